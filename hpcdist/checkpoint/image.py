"""A checkpoint file in memory, byte for byte as on the disk: the copy that a background writer works from."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.checkpoint.durable import ALIGNMENT_BYTES

#: Hashed and written in one go: long enough for the disk, short enough for what was hashed to be in the cache still.
BLOCK_BYTES = 4 << 20


class FileImage:
    """Room for one file, page-aligned and kept from one save to the next.

    Attributes:
        nbytes: of the file that it holds now.
        n_blocks: yielded so far, of all files.
    """

    def __init__(self) -> None:
        self._room = memoryview(b"")
        self._bytes = np.frombuffer(self._room, np.uint8)
        self.nbytes = self.n_blocks = 0

    def resize(self, nbytes: int) -> None:
        """Make room for a file of `nbytes`, whose content is undefined then. Costs nothing if there was room for it."""
        if len(self._bytes) < nbytes:
            room = mmap.mmap(-1, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)  # copies into it are a tenth faster
            self._room = memoryview(room)
            self._bytes = np.frombuffer(self._room, np.uint8)
        self.nbytes = nbytes

    def put(self, offset: int, values: npt.NDArray[Any]) -> None:
        """Copy an array of any shape and strides to a place in the file, in C order."""
        place = self._bytes[offset : offset + values.nbytes]
        if offset % values.itemsize:
            place[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        else:
            np.copyto(place.view(values.dtype).reshape(values.shape), values)

    def clear(self, offset: int, end: int) -> None:
        """Fill a part of the file with zeros."""
        self._bytes[offset:end] = 0

    def blocks(self, digest: "xxhash.xxh3_128") -> Iterator[memoryview]:
        """Yield the content in order, and add it to `digest` on the way."""
        content = self._room[: self.nbytes]
        whole = self.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            block = content[start : min(start + BLOCK_BYTES, whole)]
            digest.update(block)
            self.n_blocks += 1
            yield block
        if whole < self.nbytes:
            digest.update(content[whole:])
            yield content[whole:]
