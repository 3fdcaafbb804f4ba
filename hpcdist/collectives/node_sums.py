"""Sums in memory that the ranks of one node share, without MPI: every rank sums its slice of all ranks' buffers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.ops import OPS, Op, combine, divide
from hpcdist.collectives.staging import Stage, add_rows, copy, mark_of
from hpcdist.errors import DesyncError
from hpcdist.plan.replicas import plan_row_additions
from hpcdist.runtime.node_memory import NodeBarrier

#: Most bytes of a chunk, on all ranks together and on one; chunks of an array are equally long. Small enough that they
#: stay in the cache, large enough that two barriers per chunk cost little. On 2 cores of AMD Zen 5 and for arrays of up
#: to 64 MiB 2 ranks were as fast with chunks of 512 to 1,536 KiB, 4 ranks a third faster with 512 to 768 than 1,536.
CHUNKS_BYTES = 3 << 20
LEAST_CHUNK_BYTES = 128 << 10
#: Chunks in flight.
DEPTH = 2
#: Up to this many bytes on all ranks together each rank combines everything itself.
WHOLE_BYTES = 128 << 10


class NodeSums:
    """Sums over the ranks of one host, through slots that are used in turn.

    Args:
        barrier: barrier among the ranks.
        pieces: memory that the ranks share, by rank: `stage_bytes` each, or more.
        rank: number of this rank.
        names: names of the ranks in messages, by rank.
    """

    def __init__(
        self,
        barrier: NodeBarrier,
        pieces: Sequence[memoryview],
        rank: int,
        names: Sequence[str],
    ) -> None:
        self._barrier = barrier
        self._rank = rank
        self._names = names
        n_ranks = len(pieces)
        self._stage = Stage(pieces, rank, DEPTH, chunk_bytes(n_ranks), n_ranks)
        self._additions = plan_row_additions(n_ranks)
        self._whole_bytes = min(WHOLE_BYTES // n_ranks, self._stage.chunk_bytes)

    def all_reduce(
        self,
        array: npt.NDArray[Any],
        op: Op,
        divisor: float | None,
    ) -> None:
        """Replace `array` by its reduction, as the function `all_reduce`. Collective over all ranks of the barrier."""
        if array.nbytes <= self._whole_bytes:
            self._reduce_whole(array, op, divisor)
        else:
            self._reduce_by_slices(array.reshape(-1), op, divisor)

    def _reduce_whole(
        self,
        array: npt.NDArray[Any],
        op: Op,
        divisor: float | None,
    ) -> None:
        """Let every rank combine all ranks' arrays itself: one barrier, and two slots used in turn are enough.

        Between two writes of a slot lies a barrier, which no rank enters before it has read the slot.
        """
        flat = array if array.ndim == 1 else array.reshape(-1)
        views = self._stage.next_views(flat.dtype, flat.size)
        slots = views.slots
        copy(slots[self._rank], flat)
        marks = self._barrier.wait(views.mark | op.code)
        if marks is not None:
            raise difference_of(marks, self._names)
        into, row = self._additions[-1]
        rows = slots
        if len(slots) > 2:
            rows = slots.copy()
            for first, second in self._additions[:-1]:
                rows[first] = combine(op.ufunc, rows[first], rows[second])
        combine(op.ufunc, rows[into], rows[row], flat)
        if divisor is not None:
            divide(flat, divisor)

    def _reduce_by_slices(
        self,
        flat: npt.NDArray[Any],
        op: Op,
        divisor: float | None,
    ) -> None:
        """Let every rank combine its slice of all ranks' chunks: two barriers for each chunk."""
        stage = self._stage
        barrier = self._barrier
        n_chunks = -(-flat.nbytes // stage.chunk_bytes)
        n_chunk = -(-flat.size // n_chunks)
        for start in range(0, flat.size, n_chunk):
            chunk = flat[start : start + n_chunk]
            views = stage.next_views(flat.dtype, chunk.size)
            rows = stage.put(chunk, views)
            mark = 0 if start else mark_of(flat.size, flat.dtype) | op.code
            marks = barrier.wait(mark)
            if marks is not None:
                raise difference_of(marks, self._names)
            add_rows(rows, self._additions, op.ufunc)
            if divisor is not None:
                divide(rows[0], divisor)
            stage.publish(rows, views)
            barrier.wait()
            stage.take(chunk, views)


def stage_bytes(n_local_ranks: int) -> int:
    """Return the bytes of memory that each rank of a host shares for sums."""
    return DEPTH * chunk_bytes(n_local_ranks)


def chunk_bytes(n_local_ranks: int) -> int:
    """Return the most bytes of a chunk on one rank of a host: a multiple of 32, for numbers of any dtype."""
    return max(LEAST_CHUNK_BYTES, CHUNKS_BYTES // n_local_ranks) & ~31


def difference_of(marks: list[int], names: Sequence[str]) -> DesyncError:
    """Return the error of ranks whose marks differ; all of them raise it."""
    op_names = {op.code: op.name for op in OPS.values()}
    dtype_names: dict[int, str] = {}
    for type_code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]:
        dtype = np.dtype(type_code)
        dtype_names[dtype.num] = dtype.name
    calls = []
    for rank, mark in enumerate(marks):
        op_name = op_names.get(mark & 0xFF, "unknown")
        dtype_name = dtype_names.get(mark >> 8 & 0xFF, "unknown")
        n_elements = mark >> 16
        calls.append(f"{op_name} of {n_elements} {dtype_name} on {names[rank]}")
    error = DesyncError(
        f"all_reduce: expected the same call on every rank, got {', '.join(calls)}; let all ranks make the same calls "
        f"in the same order."
    )
    error.is_agreed = True
    return error
