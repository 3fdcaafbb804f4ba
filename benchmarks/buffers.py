"""Sets of buffers that together are larger than the caches, with fresh random values whose sum is known."""

from typing import NamedTuple

import numpy as np

from hpcdist.runtime.mpi import MPI

#: Elements that are filled or compared at once.
_PIECE = 1 << 20
#: Places in the random values at which a set may begin.
_N_STARTS = 4096


class _Drawn(NamedTuple):
    """The random numbers of a filling: where in the values it starts, its factor, and the number added."""

    start: int
    scale: np.float32
    shift: np.float32


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
        values *= 2
        values -= 1
        self._values = values
        self._sum = np.empty(n_values)
        for start in range(0, n_values, _PIECE):
            stop = start + _PIECE
            piece = values[start:stop]
            values_of_rank = piece.astype(np.float64)
            comm.Allreduce(values_of_rank, self._sum[start:stop])
        self._draws = np.random.default_rng([seed, 1 << 31])
        self._drawn: dict[int, _Drawn] = {}

    def fill(self, sets: list[np.ndarray]) -> None:
        """Give every set fresh values. Every rank fills equally many sets, in the same order."""
        n_sets = len(sets)
        starts = self._draws.integers(0, _N_STARTS, n_sets)
        factors = self._draws.uniform(0.5, 1.5, (n_sets, 2))
        factors = factors.astype(np.float32)
        for number, array in enumerate(sets):
            start = int(starts[number])
            scale, shift = factors[number]
            self._drawn[number] = _Drawn(start, scale, shift)
            stop = start + array.size
            values = self._values[start:stop]
            np.multiply(values, scale, out=array)
            array += shift

    def check(self, number: int, result: np.ndarray) -> None:
        """Raise AssertionError unless `result` is the sum over the ranks of set `number` as it was filled last."""
        n_ranks = self._size
        drawn = self._drawn[number]
        total_shift = n_ranks * float(drawn.shift)
        tolerance = 1e-6 * n_ranks * n_ranks
        n_elements = result.size
        stop = drawn.start + n_elements
        sums = self._sum[drawn.start : stop]
        for piece_start in range(0, n_elements, _PIECE):
            piece_stop = piece_start + _PIECE
            due = sums[piece_start:piece_stop] * drawn.scale
            due += total_shift
            due -= result[piece_start:piece_stop]
            error = np.abs(due).max(initial=0.0)
            if not error <= tolerance:
                raise AssertionError(
                    f"benchmark: expected the sum over {n_ranks} ranks within {tolerance:g}, got an error of "
                    f"{error:g} in set {number} of {n_elements} elements; do not use these timings."
                )
