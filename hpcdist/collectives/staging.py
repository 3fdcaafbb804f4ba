"""Small shared memory through which private buffers pass in chunks, so small that they stay in the cache.

Every local rank owns a slice of each chunk. It puts all slices but its own into its slot; its own it reads where it is.
So main memory sees one read and one write of the buffer, and the shared memory hardly at all.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.window import NodeWindow
from hpcdist.plan.blocks import block_bounds

Array = npt.NDArray[Any]


class Stage:
    """Slots for a few chunks in flight.

    Collective: `group.node_comm`.

    Args:
        group: whose ranks share the memory.
        depth: chunks in flight; a slot is used again `depth` chunks later.
        chunk_bytes: bytes of a chunk.
        n_slices: local ranks that own a slice, at most those of the host.

    Attributes:
        chunk_bytes: bytes of a chunk.
    """

    def __init__(self, group: Group, depth: int, chunk_bytes: int, n_slices: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._n_slices = n_slices
        self._place = group.node_comm.rank
        self._window = NodeWindow(group.node_comm, depth * chunk_bytes, group.world)
        self._depth = depth
        self._number = 0
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}

    def next_slots(self, dtype: np.dtype[Any]) -> list[Array]:
        """Return the slot of each local rank for the next chunk: (chunk_bytes / itemsize,) arrays.

        Chunks are counted over all calls: the slots of a call's last chunk may still be read when the next one begins.
        """
        self._number += 1
        if dtype not in self._slots:
            pieces = [np.frombuffer(piece[: self._depth * self.chunk_bytes], dtype) for piece in self._window.pieces]
            shaped = [piece.reshape(self._depth, -1) for piece in pieces]
            self._slots[dtype] = [[piece[index] for piece in shaped] for index in range(self._depth)]
        return self._slots[dtype][self._number % self._depth]

    def bounds(self, chunk: Array) -> tuple[int, int]:
        """Return (start, stop) of this rank's slice of a chunk; empty for a rank that owns none."""
        if self._place >= self._n_slices:
            return chunk.size, chunk.size
        return block_bounds(chunk.size, self._n_slices, self._place)

    def put(self, chunk: Array, slots: list[Array]) -> list[Array]:
        """Put all but this rank's slice into its slot; return that slice of every local rank, its own where it is."""
        start, stop = self.bounds(chunk)
        own = slots[self._place]
        copy(own[:start], chunk[:start])
        copy(own[stop : chunk.size], chunk[stop:])
        rows = [slot[start:stop] for slot in slots]
        rows[self._place] = chunk[start:stop]
        return rows

    def publish(self, chunk: Array, slots: list[Array]) -> None:
        """Take this rank's slice of the result, which is in the first of the rows that `put` returned, and show it.

        The others read it in the slot of the first local rank.
        """
        start, stop = self.bounds(chunk)
        if self._place == 0:
            copy(slots[0][start:stop], chunk[start:stop])
        else:
            copy(chunk[start:stop], slots[0][start:stop])

    def take(self, chunk: Array, slots: list[Array]) -> None:
        """Read all but this rank's slice of the result."""
        start, stop = self.bounds(chunk)
        copy(chunk[:start], slots[0][:start])
        copy(chunk[stop:], slots[0][stop : chunk.size])


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_NOTHING = {dtype: np.zeros(1, dtype) for dtype in _UNSIGNED.values()}


def copy(target: Array, source: Array) -> None:
    """Copy the bits of a flat array.

    By an integer operation, as memcpy, which numpy's assignment uses, was measured ten times slower for some alignments
    (glibc 2.36 on AMD Zen, 64 to 384 KiB, the target 16 bytes beyond the source modulo 4 KiB).
    """
    bits = _UNSIGNED[min(8, target.itemsize)]
    np.bitwise_or(source.view(bits), _NOTHING[bits], out=target.view(bits))


def add_rows(rows: list[Array], additions: "tuple[tuple[int, int], ...] | list[tuple[int, int]]", ufunc: Any) -> None:
    """Combine rows in place: rows[into] = ufunc(rows[into], rows[row]) for each pair, block by block in the cache."""
    n_block = max(4096, BLOCK_BYTES // max(1, len(rows)) // max(1, rows[0].itemsize))
    for start in range(0, rows[0].size, n_block):
        block = [row[start : start + n_block] for row in rows]
        for into, row in additions:
            ufunc(block[into], block[row], out=block[into])


#: Bytes of all rows together that are combined at a time: half of a core's second-level cache, as most have 1 MiB.
BLOCK_BYTES = 512 << 10
