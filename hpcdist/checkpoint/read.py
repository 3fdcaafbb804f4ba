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

from hpcdist.checkpoint.header import HEADER_BYTES, Header, is_count, parse_header
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
#: Called after each block that was read.
_OnBlock = Callable[[], None]


def _ignore() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class StoredArray:
    """One array in a file: its name, the name of its dtype, its shape and its offset in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the array in the file."""
        n_elements = math.prod(self.shape)
        return n_elements * stored_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint.

    Attributes:
        header: header of the file.
        step: number of optimizer steps taken.
        time_s: time of the save, in seconds since 1970.
        metrics: metrics of the model at this step, from the program.
        written: provenance of the checkpoint: versions, ranks, threads.
        arrays: arrays in the file, in the order of the state.
        state: state of the program, as JSON.
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
        fields = {
            **vars(self),
            "header": vars(self.header),
            "arrays": [astuple(array) for array in self.arrays],
        }
        return json.dumps(fields)

    @classmethod
    def from_text(cls, text: str) -> "Index":
        """Return the index of which `to_text` made the text. It is not checked: a rank of this job sent it."""
        fields = json.loads(text)
        arrays: list[StoredArray] = []
        for name, dtype, shape, offset in fields["arrays"]:
            array = StoredArray(
                name=name,
                dtype=dtype,
                shape=tuple(shape),
                offset=offset,
            )
            arrays.append(array)
        fields["arrays"] = tuple(arrays)
        fields["header"] = Header(**fields["header"])
        return cls(**fields)


class CheckpointFile:
    """An open checkpoint. All reads are of one file, even if another file gets its name meanwhile.

    Attributes:
        path: path of the file.
        index: index of the file, verified.
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
        head = _read(self._descriptor, HEADER_BYTES, 0)
        header = parse_header(head, self.path)
        if status.st_size != header.nbytes:
            expected = f"{header.nbytes} bytes"
            raise self._damaged(expected, f"{status.st_size} bytes")
        size = header.nbytes - header.index_offset
        tail = b""
        if size <= _MAX_INDEX_BYTES:
            tail = _read(self._descriptor, size, header.index_offset)
        if xxhash.xxh3_128_hexdigest(tail) != header.index_digest:
            raise self._damaged("the index as committed", "other bytes")
        try:
            text = tail[: header.index_nbytes]
            fields = json.loads(text)
            return _parse_index(header, fields)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise self._damaged("an index", reason) from None

    def verify(self, on_block: _OnBlock = _ignore) -> None:
        """Raise CheckpointDamaged unless the arrays are, byte for byte, what was committed.

        Cost: reads the whole file.
        """
        for _ in self.blocks(on_block):
            pass

    def read_arrays(self, on_block: _OnBlock = _ignore) -> list[NamedArray]:
        """Return the arrays, in the order of the index.

        Raises:
            CheckpointDamaged: if they are not what was committed.

        Cost: reads the file once; memory for the arrays and one block.
        """
        stored = self.index.arrays
        arrays: list[npt.NDArray[Any]] = []
        for array in stored:
            dtype = stored_dtype(array.dtype)
            arrays.append(np.empty(array.shape, dtype))
        writer = ArrayWriter(stored, arrays)
        start = HEADER_BYTES
        for block in self.blocks(on_block):
            writer.take(start, block)
            start += len(block)
        try:
            return named_arrays(stored, arrays)
        except ValueError as error:
            raise self._damaged("arrays", str(error)) from None

    def blocks(self, on_block: _OnBlock = _ignore) -> Iterator[memoryview]:
        """Yield the part with the arrays, from `HEADER_BYTES` on, in blocks of `BLOCK_BYTES` and a shorter last one.

        Raises:
            CheckpointDamaged: after the last block, if the arrays are not what was committed; before that, if the file
                is cut.
        """
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        start = HEADER_BYTES
        end = self.index.header.index_offset
        while start < end:
            block = buffer[: end - start]
            n_read = 0
            while n_read < len(block):
                position = start + n_read
                n_more = os.preadv(self._descriptor, [block[n_read:]], position)
                if n_more == 0:
                    raise self._damaged(f"{end} bytes", f"{position} bytes")
                n_read += n_more
            digest.update(block)
            on_block()
            yield block
            start += len(block)
        if digest.hexdigest() != self.index.header.arrays_digest:
            raise self._damaged("arrays as committed", "other bytes")

    def _damaged(self, expected: str, actual: str) -> CheckpointDamaged:
        actual_line = " ".join(actual.split())[:200]
        return CheckpointDamaged(
            f"restore: expected {expected} in {self.path}, got {actual_line}; use another."
        )


class ArrayWriter:
    """Puts consecutive blocks of a file into its arrays.

    Args:
        stored: places of the arrays in the file.
        arrays: C-contiguous arrays of these shapes and storage dtypes.
    """

    def __init__(
        self,
        stored: tuple[StoredArray, ...],
        arrays: list[npt.NDArray[Any]],
    ) -> None:
        places: list[tuple[int, memoryview]] = []
        for stored_array, array in zip(stored, arrays, strict=True):
            target = _bytes_of(array)
            if len(target):
                places.append((stored_array.offset, target))
        places.sort(key=lambda place: place[0])
        # the next array to fill comes last
        places.reverse()
        self._remaining = places

    def take(self, start: int, block: memoryview) -> None:
        """Copy the part of the arrays that a block holds. Blocks come in order, without gaps.

        Args:
            start: offset of the block in the file.
            block: bytes of the file.
        """
        while self._remaining:
            offset, target = self._remaining[-1]
            target_end = offset + len(target)
            begin = max(offset - start, 0)
            end = min(target_end - start, len(block))
            if begin < end:
                n_before = start - offset
                target[n_before + begin : n_before + end] = block[begin:end]
            if target_end > start + len(block):
                return
            self._remaining.pop()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return the memory of a C-contiguous array."""
    flat = array.reshape(-1)
    return flat.view(np.uint8).data


def named_arrays(
    stored: Sequence[StoredArray],
    arrays: Sequence[npt.NDArray[Any]],
) -> list[NamedArray]:
    """Return arrays in their own dtypes, once their bytes are read.

    Raises:
        ValueError: for a bool that is neither 0 nor 1.
    """
    converted: list[NamedArray] = []
    for stored_array, values in zip(stored, arrays, strict=True):
        if stored_array.dtype == "bool":
            if (values > 1).any():
                raise ValueError(f"a bool that is neither 0 nor 1 in {stored_array.name!r}")
            values = values.view(np.bool_)
        named = NamedArray(
            name=stored_array.name,
            dtype=stored_array.dtype,
            values=values,
        )
        converted.append(named)
    return converted


@contextmanager
def open_checkpoint(path: Path) -> Iterator[CheckpointFile]:
    """Open a checkpoint and read its index.

    Raises:
        CheckpointDamaged: if its header or index is not what was committed.
        CheckpointMismatch: if a newer hpcdist wrote it.
        OSError: if it cannot be read; see `read_patiently`.
    """
    descriptor = _open_at_once(path)
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
    n_reads = len(_PAUSES_S) + 1
    raise CheckpointError(
        f"restore: expected to read {path}, got {reason}, {n_reads} times; check the file system and run again. "
        f"Checkpoints are untouched."
    )


def read_text(path: Path, max_bytes: int, errors: str = "strict") -> str:
    """Return the text of a path that may be anything; neither waits for a pipe nor reads a device to its end.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a regular file, is too large, or is not text.
    """
    with open(_open_at_once(path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"no file of at most {max_bytes} bytes")
        return file.read().decode(errors=errors)


def open_plain(path: Path) -> TextIO:
    """Open a text that may be anything for reading; it never waits for a pipe.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    descriptor = _open_at_once(path)
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
    with open(_open_at_once(path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        start = max(0, status.st_size - n_bytes)
        file.seek(start)
        return file.read(n_bytes).decode(errors="replace")


def _open_at_once(path: Path) -> int:
    """Open a path that may be anything for reading; return its descriptor. Never waits for a pipe."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags)


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Return bytes of a file; fewer at its end only."""
    content = b""
    while len(content) < nbytes:
        n_missing = nbytes - len(content)
        piece = os.pread(descriptor, n_missing, offset + len(content))
        if not piece:
            break
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
    if not is_count(step):
        raise TypeError("a step that is none")
    are_dicts = type(metrics) is dict and type(written) is dict
    if not are_dicts or not all(map(_is_number, (time_s, *metrics.values()))):
        raise TypeError("time_s, metrics or written of another type")
    arrays = tuple(_parse_row(*row) for row in fields["arrays"])
    end = HEADER_BYTES
    for array in sorted(arrays, key=lambda array: array.offset):
        nbytes = array.nbytes
        if nbytes and not end <= array.offset <= header.index_offset - nbytes:
            name = repr(array.name[:40])
            raise ValueError(
                f"{name} at byte {array.offset}, between {end} and {header.index_offset}"
            )
        end = max(end, array.offset + nbytes)
    return Index(
        header=header,
        step=step,
        time_s=time_s,
        metrics=metrics,
        written=written,
        arrays=arrays,
        state=fields["state"],
    )


def _parse_row(name: Any, dtype: Any, shape: Any, offset: Any) -> StoredArray:
    """Return what a row of an index says of an array; raise ValueError, KeyError or TypeError if it is no row."""
    numbers = [*shape, offset]
    if len(numbers) > _MAX_DIMENSIONS + 1 or not all(map(is_count, numbers)):
        raise ValueError("a row that is none")
    if type(name) is not str or type(dtype) is not str:
        raise ValueError("a row that is none")
    # numpy refuses a dimension without bounds also beside a 0
    n_elements = math.prod(max(length, 1) for length in shape)
    if n_elements * stored_dtype(dtype).itemsize >= 1 << 62:
        raise ValueError("a shape without bounds")
    return StoredArray(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=offset,
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or a whole number that 64 bits hold."""
    if type(value) is float:
        return True
    return type(value) is int and abs(value) < 1 << 63
