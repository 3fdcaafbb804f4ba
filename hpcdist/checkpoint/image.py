"""A checkpoint file in memory, byte for byte as on disk: the copy that the background thread writes."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.checkpoint.available_memory import available_bytes
from hpcdist.checkpoint.durable import ALIGNMENT_BYTES, Block
from hpcdist.checkpoint.header import HEADER_BYTES, Header
from hpcdist.errors import CheckpointError

#: Unit of hashing and writing: large enough for the disk, small enough that a hashed block is still in the cache.
BLOCK_BYTES = 4 << 20
#: One core does not saturate the memory bandwidth; a few do.
MAX_COPIERS = 4
#: An array's offset in the file, in bytes, and the array.
Placed = tuple[int, npt.NDArray[Any]]


class FileImage:
    """A page-aligned buffer for one file, reused from save to save.

    Attributes:
        nbytes: size of the current file.
        index: offset and size in bytes of the index of the file; see layout.py.
        n_blocks: number of blocks yielded so far, over all files.
    """

    def __init__(self) -> None:
        self._room = memoryview(b"")
        self._bytes = np.frombuffer(self._room, np.uint8)
        self.nbytes = 0
        self.n_blocks = 0
        self.index = (0, 0)

    def resize(self, nbytes: int, index_offset: int, index_nbytes: int) -> None:
        """Set the size of the file; its content is then undefined. Costs nothing if the buffer is large enough.

        Raises:
            CheckpointError: if memory is insufficient.
        """
        if len(self._bytes) < nbytes:
            self._room = memoryview(b"")
            self._bytes = np.empty(0, np.uint8)
            n_units = -(-nbytes // ALIGNMENT_BYTES)
            room = _take(n_units * ALIGNMENT_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # only advice: kernels without huge pages refuse it
                with contextlib.suppress(OSError):
                    # the first copy takes 0.4 of the time, later copies 0.9
                    room.madvise(mmap.MADV_HUGEPAGE)
            self._room = memoryview(room)
            self._bytes = np.frombuffer(self._room, np.uint8)
        self.nbytes = nbytes
        self.index = (index_offset, index_nbytes)

    def put(self, offset: int, values: npt.NDArray[Any]) -> None:
        """Copy an array of any shape and strides to an offset in the file, in C order."""
        place = self._bytes[offset : offset + values.nbytes]
        if offset % values.itemsize:
            flat = np.ascontiguousarray(values).reshape(-1)
            place[:] = flat.view(np.uint8)
        else:
            target = place.view(values.dtype).reshape(values.shape)
            np.copyto(target, values)

    def put_all(self, placed: list[Placed]) -> None:
        """Copy arrays to offsets that do not overlap, in up to `MAX_COPIERS` threads."""
        pieces: list[Placed] = []
        nbytes = 0
        for offset, values in placed:
            pieces += _pieces(offset, values)
            nbytes += values.nbytes
        n_cores = len(os.sched_getaffinity(0))
        n_worthwhile = 1 + nbytes // (2 * BLOCK_BYTES)
        n_copiers = min(MAX_COPIERS, n_cores, n_worthwhile)
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(MAX_COPIERS) as threads:
            for first in range(1, n_copiers):
                share = pieces[first::n_copiers]
                futures.append(threads.submit(self._put_each, share))
            self._put_each(pieces[::n_copiers])
        for future in futures:
            future.result()

    def _put_each(self, placed: list[Placed]) -> None:
        for offset, values in placed:
            self.put(offset, values)

    def clear(self, offset: int, end: int) -> None:
        """Fill a part of the file with zeros."""
        self._bytes[offset:end] = 0

    def content(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the file. The next file overwrites it."""
        return self._room[offset : offset + nbytes]

    def digest_of_arrays(self) -> str:
        """Return the digest of the arrays, as the header holds it."""
        index_offset, _ = self.index
        arrays = self._room[HEADER_BYTES:index_offset]
        return xxhash.xxh3_128_hexdigest(arrays)

    def blocks(self) -> Iterator[Block]:
        """Yield (offset, content) of all blocks of the file. The header, which holds their digests, comes last."""
        arrays_digest = xxhash.xxh3_128()
        index_digest = xxhash.xxh3_128()
        index_offset, index_nbytes = self.index
        start = HEADER_BYTES
        aligned_end = self.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        while start < self.nbytes:
            end = self.nbytes
            if start < aligned_end:
                end = min(start + BLOCK_BYTES, aligned_end)
            block = self._room[start:end]
            n_array_bytes = max(index_offset - start, 0)
            arrays_digest.update(block[:n_array_bytes])
            index_digest.update(block[n_array_bytes:])
            self.n_blocks += 1
            yield start, block
            start = end
        header = Header(
            nbytes=self.nbytes,
            index_offset=index_offset,
            index_nbytes=index_nbytes,
            arrays_digest=arrays_digest.hexdigest(),
            index_digest=index_digest.hexdigest(),
        )
        self._room[:HEADER_BYTES] = header.to_bytes()
        yield 0, self._room[:HEADER_BYTES]


def _take(nbytes: int) -> mmap.mmap:
    """Return new memory.

    Raises:
        CheckpointError: if there is not enough: the first use of the memory would kill this process.
    """
    available = available_bytes()
    if available is not None and available < nbytes:
        cause = f"{available} available"
    else:
        try:
            # private, as Linux gives shared memory no huge pages by default
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            cause = str(error.strerror)
    raise CheckpointError(
        f"save: expected {nbytes} bytes of memory for a copy of the state, got {cause}; ask the batch system for more. "
        f"Earlier checkpoints are untouched."
    )


def _pieces(offset: int, values: npt.NDArray[Any]) -> Iterator[Placed]:
    """Yield an array in pieces of at most `BLOCK_BYTES`; as one piece if it is not contiguous."""
    if not values.flags.c_contiguous:
        yield offset, values
        return
    flat = values.reshape(-1)
    step = BLOCK_BYTES // values.itemsize
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        yield offset + start * values.itemsize, piece
