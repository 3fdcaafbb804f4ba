"""Sets of buffers that are larger than the caches together, with fresh random values whose sum is known."""

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

    Collective: `comm`, at the construction only.

    Args:
        comm: the ranks. n_elements: of one set. seed: equal on all ranks.
    """

    def __init__(self, comm: MPI.Comm, n_elements: int, seed: int) -> None:
        self._size = comm.size
        values = np.random.default_rng([seed, comm.rank]).random(n_elements + _N_STARTS, np.float32)
        self._values = values * np.float32(2) - np.float32(1)
        self._sum = np.empty(values.size)
        for start in range(0, values.size, _PIECE):
            piece = self._values[start : start + _PIECE].astype(np.float64)
            comm.Allreduce(piece, self._sum[start : start + _PIECE])
        self._draws = np.random.default_rng([seed, 1 << 31])
        self._drawn: dict[int, tuple[int, np.float32, np.float32]] = {}

    def fill(self, sets: list[np.ndarray]) -> None:
        """Give every set fresh values. Every rank fills equally many sets, in the same order."""
        starts = self._draws.integers(0, _N_STARTS, len(sets)).tolist()
        factors = self._draws.uniform(0.5, 1.5, (len(sets), 2)).astype(np.float32)
        for number, (array, start) in enumerate(zip(sets, starts, strict=True)):
            scale, shift = factors[number]
            self._drawn[number] = start, scale, shift
            np.multiply(self._values[start : start + array.size], scale, out=array)
            array += shift

    def check(self, number: int, result: np.ndarray) -> None:
        """Raise AssertionError unless `result` is the sum over the ranks of set `number` as it was filled last."""
        start, scale, shift = self._drawn[number]
        tolerance = 1e-6 * self._size * self._size
        for first in range(0, result.size, _PIECE):
            piece = result[first : first + _PIECE]
            sums = self._sum[start + first : start + first + piece.size]
            error = np.abs(sums * scale + float(shift) * self._size - piece).max(initial=0.0)
            if not error <= tolerance:
                raise AssertionError(
                    f"benchmark: expected the sum over {self._size} ranks within {tolerance:g}, got an error of "
                    f"{error:g} in set {number} of {result.size} elements; do not use these timings."
                )
