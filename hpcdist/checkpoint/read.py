"""Reads a checkpoint file, damaged or hostile as it may be: its digests and types are checked before it is used.

Arrays are read by their offsets, not by HDF5: libhdf5 never sees a file that somebody else may have made.
"""

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.checkpoint.header import HEADER_BYTES, Header, parse_header
from hpcdist.checkpoint.layout import stored_dtype
from hpcdist.checkpoint.tree import NamedArray, is_too_deep
from hpcdist.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

#: Unit of reading, hashing and broadcasting.
BLOCK_BYTES = 4 << 20
#: Largest index that is read, the state in it included; real ones have some kilobytes.
_MAX_INDEX_BYTES = 1 << 28
#: Most dimensions of an array; no numpy version allows more.
_MAX_DIMENSIONS = 64
#: Errors that mean that no such file exists, on a disk that works.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
#: Pauses before a failed read is repeated: a network file system may recover.
_PAUSES_S = (0.1, 0.4)
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class StoredArray:
    """One array in a file: its name, the name of its dtype, its shape and its offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * stored_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint.

    Attributes:
        header: the header of its file.
        step: optimizer steps taken.
        time_s: time of the save, in seconds since 1970.
        metrics: the program's metrics of the model at this step.
        written: its provenance: versions, ranks, threads.
        arrays: what is in the file, in the order of the state.
        state: the state, as JSON.
    """

    header: Header
    step: int
    time_s: float
    metrics: dict[str, float]
    written: dict[str, Any]
    arrays: tuple[StoredArray, ...]
    state: Any

    def to_text(self) -> str:
        """Return text from which `from_text` makes an equal index."""
        return json.dumps(
            {
                **vars(self),
                "header": vars(self.header),
                "arrays": [astuple(array) for array in self.arrays],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> "Index":
        """Return the index of which `to_text` made the text. It is not checked: a rank of this job sent it."""
        fields = json.loads(text)
        arrays = tuple(
            StoredArray(name, dtype, tuple(shape), offset)
            for name, dtype, shape, offset in fields["arrays"]
        )
        return cls(**{**fields, "header": Header(**fields["header"]), "arrays": arrays})


class CheckpointFile:
    """An open checkpoint. What is read is of one file, even if its name is given to another one meanwhile.

    Attributes:
        path: its path.
        index: its index, verified.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.index = self._read_index()

    def _read_index(self) -> Index:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointMissing(
                f"restore: expected a file at {self.path}, got another kind; use another."
            )
        header = parse_header(_read(self._descriptor, HEADER_BYTES, 0), self.path)
        if status.st_size != header.nbytes:
            raise self._damaged(f"{header.nbytes} bytes", f"{status.st_size} bytes")
        size = header.nbytes - header.index_offset
        tail = (
            b"" if size > _MAX_INDEX_BYTES else _read(self._descriptor, size, header.index_offset)
        )
        if xxhash.xxh3_128_hexdigest(tail) != header.index_digest:
            raise self._damaged("the index as committed", "other bytes")
        try:
            return _parse_index(header, json.loads(tail[: header.index_nbytes]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise self._damaged("an index", f"{type(error).__name__}: {error}") from None

    def verify(self, on_block: Callable[[], None] = lambda: None) -> None:
        """Raise CheckpointDamaged unless the arrays are, byte for byte, what was committed.

        Cost: reads the whole file.
        """
        for _ in self.blocks(on_block):
            pass

    def read_arrays(self, on_block: Callable[[], None] = lambda: None) -> list[NamedArray]:
        """Return the arrays, in the order of the index.

        Raises:
            CheckpointDamaged: if they are not what was committed.

        Cost: reads the file once; memory for the arrays and one block.
        """
        stored = self.index.arrays
        arrays = [np.empty(array.shape, stored_dtype(array.dtype)) for array in stored]
        writer = ArrayWriter(stored, arrays)
        start = HEADER_BYTES
        for block in self.blocks(on_block):
            writer.take(start, block)
            start += len(block)
        try:
            return named_arrays(stored, arrays)
        except ValueError as error:
            raise self._damaged("arrays", str(error)) from None

    def blocks(self, on_block: Callable[[], None] = lambda: None) -> Iterator[memoryview]:
        """Yield the part with the arrays, from `HEADER_BYTES` on, in blocks of `BLOCK_BYTES` and a rest.

        Raises:
            CheckpointDamaged: after the last block, if they are not what was committed; before, if the file is cut.
        """
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        start = HEADER_BYTES
        end = self.index.header.index_offset
        while start < end:
            block = buffer[: end - start]
            n_read = 0
            while n_read < len(block):
                n_more = os.preadv(self._descriptor, [block[n_read:]], start + n_read)
                if n_more == 0:
                    raise self._damaged(f"{end} bytes", f"{start + n_read} bytes")
                n_read += n_more
            digest.update(block)
            on_block()
            yield block
            start += len(block)
        if digest.hexdigest() != self.index.header.arrays_digest:
            raise self._damaged("arrays as committed", "other bytes")

    def _damaged(self, expected: str, actual: str) -> CheckpointDamaged:
        actual = " ".join(actual.split())[:200]
        return CheckpointDamaged(
            f"restore: expected {expected} in {self.path}, got {actual}; use another."
        )


class ArrayWriter:
    """Puts consecutive blocks of a file into its arrays.

    Args:
        stored: where the arrays are in the file.
        arrays: C-contiguous arrays of these shapes and storage dtypes.
    """

    def __init__(self, stored: tuple[StoredArray, ...], arrays: list[npt.NDArray[Any]]) -> None:
        places = sorted(
            zip(
                (stored_array.offset for stored_array in stored),
                map(_bytes_of, arrays),
                strict=True,
            ),
            key=lambda pair: pair[0],
        )
        self._remaining = [(offset, target) for offset, target in places if len(target)][::-1]

    def take(self, start: int, block: memoryview) -> None:
        """Copy what a block, at an offset in the file, holds of the arrays. Blocks come in order, without gaps."""
        while self._remaining:
            offset, target = self._remaining[-1]
            begin = max(offset - start, 0)
            end = min(offset + len(target) - start, len(block))
            if begin < end:
                target[start + begin - offset : start + end - offset] = block[begin:end]
            if offset + len(target) > start + len(block):
                return
            self._remaining.pop()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def named_arrays(
    stored: Sequence[StoredArray], arrays: Sequence[npt.NDArray[Any]]
) -> list[NamedArray]:
    """Return arrays in their own dtypes, once their bytes are read.

    Raises:
        ValueError: for a bool that is neither 0 nor 1.
    """
    converted = []
    for stored_array, values in zip(stored, arrays, strict=True):
        if stored_array.dtype == "bool" and (values > 1).any():
            raise ValueError(f"a bool that is neither 0 nor 1 in {stored_array.name!r}")
        converted.append(
            NamedArray(
                stored_array.name,
                stored_array.dtype,
                values.view(np.bool_) if stored_array.dtype == "bool" else values,
            )
        )
    return converted


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointFile]:
    """Open a checkpoint and read its index.

    Raises:
        CheckpointDamaged: if its header or index is not what was committed.
        CheckpointMismatch: if a newer hpcdist wrote it.
        OSError: if it cannot be read; see `read_patiently`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield CheckpointFile(path, descriptor)
    finally:
        os.close(descriptor)


def read_patiently(path: Path, read: Callable[[], _Read]) -> _Read:
    """Return the result of `read`; retry a few times if the file system cannot read.

    A read error is not damage: if it were treated as such, the job would resume from an older checkpoint.

    Raises:
        CheckpointError: if `path` still cannot be read.
        CheckpointMissing: if there is no such file.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return read()
        except OSError as error:
            number = error.errno
            reason = error.strerror or str(error)
        if number in _NO_FILE:
            raise CheckpointMissing(f"restore: expected {path}, got {reason}; use another.")
        if pause_s is not None:
            time.sleep(pause_s)
    raise CheckpointError(
        f"restore: expected to read {path}, got {reason}, {len(_PAUSES_S) + 1} times; check the file system and run "
        f"again. Checkpoints are untouched."
    )


def read_text(path: Path, max_bytes: int, errors: str = "strict") -> str:
    """Return the text of a path that may be anything; neither waits for a pipe nor reads a device to its end.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a regular file, is too large, or is not text.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"no file of at most {max_bytes} bytes")
        return file.read().decode(errors=errors)


def open_plain(path: Path) -> TextIO:
    """Open a text that may be anything for reading; it never waits for a pipe.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(descriptor, encoding="utf-8", errors="replace")


def read_end(path: Path, n_bytes: int) -> str:
    """Return the text of the last bytes of a path that may be anything, or all of it; it never waits for a pipe.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a regular file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        file.seek(max(0, status.st_size - n_bytes))
        return file.read(n_bytes).decode(errors="replace")


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Return bytes of a file; fewer at its end only."""
    content = b""
    while len(content) < nbytes and (
        piece := os.pread(descriptor, nbytes - len(content), offset + len(content))
    ):
        content += piece
    return content


def _parse_index(header: Header, fields: Any) -> Index:
    """Return an index. Raises ValueError, KeyError or TypeError for one that no save writes: anyone can digest."""
    if is_too_deep(fields):
        raise ValueError("nesting that is too deep")
    step = fields["step"]
    time_s = fields["time_s"]
    metrics = fields["metrics"]
    written = fields["written"]
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise TypeError("a step that is none")
    if (
        type(metrics) is not dict
        or type(written) is not dict
        or not all(map(_is_number, (time_s, *metrics.values())))
    ):
        raise TypeError("time_s, metrics or written of another type")
    arrays = tuple(_parse_row(*row) for row in fields["arrays"])
    end = HEADER_BYTES
    for array in sorted(arrays, key=lambda array: array.offset):
        if array.nbytes and not end <= array.offset <= header.index_offset - array.nbytes:
            raise ValueError(
                f"{array.name[:40]!r} at byte {array.offset}, between {end} and {header.index_offset}"
            )
        end = max(end, array.offset + array.nbytes)
    return Index(header, step, time_s, metrics, written, arrays, fields["state"])


def _parse_row(name: Any, dtype: Any, shape: Any, offset: Any) -> StoredArray:
    numbers = [*shape, offset]
    is_fit = len(numbers) <= _MAX_DIMENSIONS + 1 and all(
        type(n) is int and 0 <= n < 1 << 63 for n in numbers
    )
    if not is_fit or type(name) is not str or type(dtype) is not str:
        raise ValueError("a row that is none")
    # numpy refuses, even beside a 0
    if math.prod(max(n, 1) for n in shape) * stored_dtype(dtype).itemsize >= 1 << 62:
        raise ValueError("a shape without bounds")
    return StoredArray(name, dtype, tuple(shape), offset)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)
