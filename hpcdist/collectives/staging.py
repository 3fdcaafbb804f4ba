"""Shared memory smaller than the cache, through which private buffers are exchanged chunk by chunk.

Every local rank owns a slice of each chunk. It copies the slices of the other ranks into its slot, and uses its own
slice in place. So each byte of the buffer is read from main memory once and written once; the slots stay in the cache.
"""

import functools
import mmap
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.ops import combine, divide
from hpcdist.plan.blocks import block_bounds

Array = npt.NDArray[Any]
#: Bytes of all rows together that are combined at a time: half of a core's second-level cache, as most have 1 MiB.
BLOCK_BYTES = 512 << 10
#: Chunk sizes whose views are kept; a training step has few.
_MAX_KEPT = 64
#: Smaller copies take the same time either way.
_MEMCPY_BYTES = 32 << 10
#: Size of the copies that are timed.
_PROBE_BYTES = 128 << 10
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def mark_of(n_elements: int, dtype: np.dtype[Any]) -> int:
    """Return a number of 63 bits that encodes number and dtype of elements; the lowest 8 bits are free for an op."""
    return n_elements << 16 | dtype.num << 8


@dataclass(frozen=True)
class Views:
    """Views of the slots of one chunk, for chunks of one size and dtype.

    Attributes:
        slots: whole slot of every local rank.
        mark: mark of the chunk; see `mark_of`.
        owned_range: (start, stop) of this rank's slice.
        rows: this rank's slice in every local rank's slot.
        puts: (part of the chunk, the same part of this rank's slot): all but its slice.
        takes: (part of the chunk, the same part of the first local rank's slot): all but this rank's slice.
        result: this rank's slice in the first local rank's slot.
    """

    slots: list[Array]
    mark: int
    owned_range: slice
    rows: list[Array]
    puts: list[tuple[slice, Array]]
    takes: list[tuple[slice, Array]]
    result: Array


class Stage:
    """Slots for a few chunks in flight.

    Args:
        pieces: memory that the ranks of the host share, by local rank: `depth * chunk_bytes` each, or more.
        local_rank: number of this rank on the host.
        depth: number of chunks in flight; a slot is used again `depth` chunks later.
        chunk_bytes: bytes of a chunk.
        n_slices: number of local ranks that own a slice, at most all ranks of the host.

    Attributes:
        chunk_bytes: bytes of a chunk.
    """

    def __init__(
        self,
        pieces: Sequence[memoryview],
        local_rank: int,
        depth: int,
        chunk_bytes: int,
        n_slices: int,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._n_slices = n_slices
        self._local_rank = local_rank
        self._depth = depth
        self._number = 0
        self._pieces = pieces
        self._views: dict[tuple[np.dtype[Any], int, int], Views] = {}

    def next_views(self, dtype: np.dtype[Any], n_elements: int) -> Views:
        """Return the slots for the next chunk.

        Chunks are counted over all calls: the slots of a call's last chunk may still be read when the next one begins.
        """
        self._number += 1
        key = (dtype, n_elements, self._number % self._depth)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_KEPT:
                self._views.clear()
            views = self._views[key] = self._cut(*key)
        return views

    def bounds(self, n_elements: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's slice of a chunk; empty for a rank that owns none."""
        if self._local_rank >= self._n_slices:
            return n_elements, n_elements
        return block_bounds(n_elements, self._n_slices, self._local_rank)

    def _cut(
        self,
        dtype: np.dtype[Any],
        n_elements: int,
        index: int,
    ) -> Views:
        """Return views of the slots with an index, for chunks of one size and dtype."""
        first_byte = index * self.chunk_bytes
        slots: list[Array] = []
        for piece in self._pieces:
            chunk_memory = piece[first_byte : first_byte + self.chunk_bytes]
            slots.append(np.frombuffer(chunk_memory, dtype)[:n_elements])
        first_slot = slots[0]
        local_slot = slots[self._local_rank]
        start, stop = self.bounds(n_elements)
        puts: list[tuple[slice, Array]] = []
        takes: list[tuple[slice, Array]] = []
        for part in (slice(0, start), slice(stop, n_elements)):
            if part.start < part.stop:
                puts.append((part, local_slot[part]))
                takes.append((part, first_slot[part]))
        return Views(
            slots=slots,
            mark=mark_of(n_elements, dtype),
            owned_range=slice(start, stop),
            rows=[slot[start:stop] for slot in slots],
            puts=puts,
            takes=takes,
            result=first_slot[start:stop],
        )

    def put(self, chunk: Array, views: Views) -> list[Array]:
        """Copy all but this rank's slice into its slot; return that slice of every local rank.

        The slice of this rank itself is returned in place, in `chunk`.
        """
        for part, slot in views.puts:
            copy(slot, chunk[part])
        rows = views.rows.copy()
        rows[self._local_rank] = chunk[views.owned_range]
        return rows

    def publish(self, rows: list[Array], views: Views) -> None:
        """Publish this rank's slice of the result, which is in the first of the rows that `put` returned.

        The other ranks read it in the slot of the first local rank.
        """
        if self._local_rank == 0:
            copy(views.result, rows[0])
        else:
            copy(rows[self._local_rank], views.result)

    def take(self, chunk: Array, views: Views) -> None:
        """Read all but this rank's slice of the result."""
        for part, slot in views.takes:
            copy(chunk[part], slot)


def copy(target: Array, source: Array) -> None:
    """Copy the bits of a flat array to another one of the same dtype and size by memcpy, as numpy's assignment does.

    Where `is_memcpy_slow`, arrays of 32 KiB and more are copied by an integer operation instead. Elsewhere the integer
    operation is up to twice as slow: it reads the elements that it overwrites, from the cache of another core.
    """
    if source.nbytes < _MEMCPY_BYTES or not is_memcpy_slow():
        target[...] = source
    else:
        _copy_as_integers(target, source)


def _copy_as_integers(target: Array, source: Array) -> None:
    unsigned = _UNSIGNED[min(8, source.itemsize)]
    bits = source.view(unsigned)
    np.bitwise_or(bits, bits, target.view(unsigned))


@functools.cache
def is_memcpy_slow() -> bool:
    """Return whether this processor's memcpy is slow for some alignments. Measured once, in less than a millisecond.

    It took ten times as long with glibc 2.36 on some AMD Zen, for 64 to 384 KiB, where the target lay 16 bytes beyond
    the source modulo 4 KiB, as numpy's arrays do beyond the pages of slots.
    """
    memory = mmap.mmap(-1, 2 * _PROBE_BYTES + mmap.PAGESIZE)
    pages = np.frombuffer(memory, np.uint8)
    source = pages[:_PROBE_BYTES]
    target = pages[_PROBE_BYTES + 16 :][:_PROBE_BYTES]

    def fastest_s(call: Callable[[Array, Array], None]) -> float:
        times = timeit.repeat(lambda: call(target, source), number=1, repeat=8)
        return min(times)

    by_integers_s = fastest_s(_copy_as_integers)
    by_memcpy_s = fastest_s(lambda target, source: target.__setitem__(..., source))
    return by_memcpy_s > 2 * by_integers_s


def add_rows_into(
    out: Array,
    rows: list[Array],
    additions: "Sequence[tuple[int, int]]",
    divisor: float | None = None,
) -> None:
    """Add rows in the order of the tree, block by block in the cache, and divide the sum.

    Args:
        out: array that receives the sum; one of the rows, or other memory. More than two rows are overwritten.
        rows: flat arrays of one length.
        additions: pairs (into, row) of the tree.
        divisor: number that the sum is divided by; None if it is not divided.
    """
    row_bytes = BLOCK_BYTES // len(rows)
    n_block = max(4096, row_bytes // rows[0].itemsize)
    *inner_additions, (last_into, last_row) = additions
    for start in range(0, rows[0].size, n_block):
        stop = start + n_block
        block = [row[start:stop] for row in rows]
        sums = out[start:stop]
        for into, row in inner_additions:
            combine(np.add, block[into], block[row], block[into])
        combine(np.add, block[last_into], block[last_row], sums)
        if divisor is not None:
            divide(sums, divisor)


def add_rows(
    rows: list[Array],
    additions: "tuple[tuple[int, int], ...] | list[tuple[int, int]]",
    ufunc: Any,
) -> None:
    """Combine rows in place: rows[into] = ufunc(rows[into], rows[row]) for each pair, block by block in the cache."""
    n_elements = rows[0].size
    row_bytes = BLOCK_BYTES // max(1, len(rows))
    n_block = max(4096, row_bytes // max(1, rows[0].itemsize))
    for start in range(0, n_elements, n_block):
        block = rows if n_elements <= n_block else [row[start : start + n_block] for row in rows]
        for into, row in additions:
            combine(ufunc, block[into], block[row], block[into])
