"""Sets of buffers that together are larger than the caches, with fresh random values whose sum is known."""

import numpy as np

from hpcdist.runtime.mpi import MPI

#: Elements that are filled or compared at once.
_PIECE = 1 << 20
#: Places in the random values at which a set may begin.
_N_STARTS = 4096


class RandomSets:
    """Fresh random float32 values for sets of buffers, different on every rank, and the sums over the ranks.

    Each filling of a set is a piece of one long random array, from a random place on, scaled and shifted by fresh
    random numbers. All ranks draw the same place and scale, so the float64 sum of the long arrays tells every result.

    The constructor is collective over `comm`.

    Args:
        comm: the ranks.
        n_elements: number of elements of a set.
        seed: seed of the random values, equal on all ranks.
    """

    def __init__(self, comm: MPI.Comm, n_elements: int, seed: int) -> None:
        self._size = comm.size
        generator = np.random.default_rng([seed, comm.rank])
        n_values = n_elements + _N_STARTS
        values = generator.random(n_values, np.float32)
        self._values = values * np.float32(2) - np.float32(1)
        self._sum = np.empty(n_values)
        for start in range(0, n_values, _PIECE):
            piece = slice(start, start + _PIECE)
            values_of_rank = self._values[piece].astype(np.float64)
            comm.Allreduce(values_of_rank, self._sum[piece])
        self._draws = np.random.default_rng([seed, 1 << 31])
        self._drawn: dict[int, tuple[int, np.float32, np.float32]] = {}

    def fill(self, sets: list[np.ndarray]) -> None:
        """Give every set fresh values. Every rank fills equally many sets, in the same order."""
        n_sets = len(sets)
        starts = self._draws.integers(0, _N_STARTS, n_sets).tolist()
        factors = self._draws.uniform(0.5, 1.5, (n_sets, 2))
        factors = factors.astype(np.float32)
        for number, array in enumerate(sets):
            start = starts[number]
            scale, shift = factors[number]
            self._drawn[number] = (start, scale, shift)
            values = self._values[start : start + array.size]
            np.multiply(values, scale, out=array)
            array += shift

    def check(self, number: int, result: np.ndarray) -> None:
        """Raise AssertionError unless `result` is the sum over the ranks of set `number` as it was filled last."""
        start, scale, shift = self._drawn[number]
        total_shift = float(shift) * self._size
        tolerance = 1e-6 * self._size * self._size
        for first in range(0, result.size, _PIECE):
            piece = result[first : first + _PIECE]
            sums_start = start + first
            sums = self._sum[sums_start : sums_start + piece.size]
            due = sums * scale + total_shift
            error = np.abs(due - piece).max(initial=0.0)
            if not error <= tolerance:
                raise AssertionError(
                    f"benchmark: expected the sum over {self._size} ranks within {tolerance:g}, got an error of "
                    f"{error:g} in set {number} of {result.size} elements; do not use these timings."
                )
