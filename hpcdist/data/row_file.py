"""Files of rows, which a cache leaves to later processes: read by row, and never half written.

A file holds the values of the rows one after another; (rows, 4) int64 numbers: each row's number, start, layout and
checksum; JSON: key, total and layouts; and an end of fixed size, with a checksum over numbers and JSON.
"""

import errno
import functools
import json
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hpcdist.checkpoint.durable import Disk, replace_file
from hpcdist.errors import DataError
from hpcdist.nest import Nest

_END = struct.Struct("<8sQQQ")
_MAGIC = b"hpcdrow1"
_KINDS = "biufcSUmM"
_BLOCK_BYTES = 1 << 20
_OPEN_FILES = 8
#: What to do where too many files are open.
MORE_FILES = "allow more open files (ulimit -n)"
#: Returns `n_bytes` from `start` of a file: reader(n_bytes, start).
Reader = Callable[[int, int], bytearray]


@dataclass(frozen=True)
class Place:
    """Where a row is: `n_bytes` from `start` in a file, which `reader` reads, of some layout, with some checksum."""

    reader: Reader
    start: int
    n_bytes: int
    layout: str
    checksum: int

    def read(self) -> bytes:
        """Return the row's bytes.

        Raises:
            DataError: when they are not what was written, or the file cannot be opened any more.
        """
        found = self.reader(self.n_bytes, self.start)
        if checksum_of(found) != self.checksum:
            raise DataError(
                "cache: expected the row that was written, got another one in a damaged file; remove the files of this "
                "cache, and they are made anew."
            )
        return bytes(found)


def read_at(descriptor: int, n_bytes: int, start: int) -> bytearray:
    """Return bytes of a file that is open; fewer where it ends."""
    found = bytearray()
    while len(found) < n_bytes:
        part = os.pread(descriptor, n_bytes - len(found), start + len(found))
        if not part:
            break
        found += part
    return found


class OpenFiles:
    """Files that are opened when they are read: the few that were read last stay open. For any thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, n_bytes: int, start: int) -> bytearray:
        """Return bytes of a file; fewer where it ends.

        Raises:
            DataError: when it cannot be opened.
        """
        with self._lock:
            try:
                descriptor = self._opened(path)
            except OSError as error:
                raise DataError(
                    f"cache: expected the file of rows {path!r}, got {error}; "
                    f"{MORE_FILES if is_short_of_files(error) else 'start again, and its rows are read anew'}."
                ) from None
            return read_at(descriptor, n_bytes, start)

    def index(self, path: str) -> tuple[str, int | None, dict[int, Place]]:
        """Return key, total and rows of a file. What the rows hold is looked at when they are read.

        Raises:
            ValueError: when it is no file of rows, or not the one that was written.
            OSError: when it cannot be opened or read.
        """
        with self._lock:
            return _read_index(self._opened(path), functools.partial(self.read, path))

    def close(self) -> None:
        """Close them all; those that are read again are opened again."""
        with self._lock:
            while self._open:
                self._close_oldest()

    def _opened(self, path: str) -> int:
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._close_oldest()
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if not is_short_of_files(error) or not self._open:
                    raise
                self._close_oldest()
                return self._opened(path)
            self._open[path] = descriptor
        self._open.move_to_end(path)
        return self._open[path]

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])


def is_short_of_files(error: OSError) -> bool:
    """Return whether too many files are open, of this process or on this machine: nothing is wrong with the file."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def checksum_of(data: bytes | bytearray) -> int:
    """Return a checksum that fits into int64."""
    return xxhash.xxh3_64_intdigest(data) >> 1


def pack(row: Nest) -> tuple[str, bytes]:
    """Return the layout of a row as JSON, and its values.

    Raises:
        DataError: for what is no number or text, and nests of anything but tuples, lists and dicts with text as keys.
    """
    values: list[bytes] = []
    return json.dumps(_layout_of(row, values)), b"".join(values)


def _layout_of(nest: Nest, values: list[bytes]) -> Any:
    if isinstance(nest, dict) and all(isinstance(key, str) for key in nest):
        return {"dict": [[key, _layout_of(part, values)] for key, part in nest.items()]}
    if type(nest) in (tuple, list):
        return {type(nest).__name__: [_layout_of(part, values) for part in nest]}
    array = np.asarray(nest)
    if isinstance(nest, (dict, tuple, list)) or array.dtype.kind not in _KINDS:
        raise DataError(
            f"cache: expected rows of numbers or text in tuples, lists and dicts with text as keys, got "
            f"{type(nest).__name__} of {array.dtype}; map them to such, or leave the filename out."
        )
    values.append(array.tobytes())
    return {"array": [list(array.shape), array.dtype.str, isinstance(nest, torch.Tensor)]}


def unpack(layout: str, data: bytes) -> Nest:
    """Return the row that was packed."""
    return _unpacked(json.loads(layout), memoryview(data))[0]


def _unpacked(layout: Any, data: memoryview) -> tuple[Nest, memoryview]:
    ((kind, content),) = layout.items()
    if kind == "array":
        shape, dtype, is_tensor = content
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        array = np.frombuffer(data[:n_bytes], dtype).reshape(shape).copy()
        return torch.from_numpy(array) if is_tensor else array, data[n_bytes:]
    parts = []
    for one in content:
        part, data = _unpacked(one[1] if kind == "dict" else one, data)
        parts.append((one[0], part) if kind == "dict" else part)
    made: Nest = {"dict": dict, "tuple": tuple, "list": list}[kind](parts)
    return made, data


def write_rows(path: Path, key: str, total: int | None, rows: Iterable[tuple[int, Place]]) -> None:
    """Write a file of rows, wholly or not at all.

    Args:
        path: of the file.
        key: says of which dataset the rows are.
        total: how many rows the dataset has, where all of them are here; None elsewhere.
        rows: by number.

    Raises:
        OSError: when the file system refuses.
    """
    replace_file(Disk(), path, _joined(_file_of_rows(key, total, rows)))


def _file_of_rows(key: str, total: int | None, rows: Iterable[tuple[int, Place]]) -> Iterator[bytes]:
    """Yield the content of a file of rows, piece by piece."""
    layouts: dict[str, int] = {}
    numbers: list[tuple[int, int, int, int]] = []
    start = 0
    for number, place in rows:
        numbers.append((number, start, layouts.setdefault(place.layout, len(layouts)), place.checksum))
        start += place.n_bytes
        yield place.read()
    numbers.append((0, start, 0, 0))  # where the last row ends
    index = np.array(numbers, "<i8").tobytes()
    header = json.dumps({"key": key, "total": total, "layouts": list(layouts)}).encode()
    yield index + header + _END.pack(_MAGIC, len(index), len(header), checksum_of(index + header))


def _joined(pieces: Iterable[bytes]) -> Iterator[memoryview]:
    """Yield pieces joined to blocks that are worth a call."""
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) >= _BLOCK_BYTES:
            yield memoryview(block)
            block = bytearray()
    yield memoryview(block)


def _read_index(descriptor: int, reader: Reader) -> tuple[str, int | None, dict[int, Place]]:
    size = os.fstat(descriptor).st_size
    end = os.pread(descriptor, _END.size, max(0, size - _END.size))
    magic, n_index, n_header, checksum = _END.unpack(end) if len(end) == _END.size else (b"", 0, 0, 0)
    start = size - _END.size - n_header - n_index
    data = os.pread(descriptor, n_index + n_header, start) if magic == _MAGIC and start >= 0 else b""
    if magic != _MAGIC or checksum_of(data) != checksum:
        raise ValueError("a file of rows that was cut or changed")
    header = json.loads(data[n_index:])
    numbers = np.frombuffer(data[:n_index], "<i8").reshape(-1, 4).tolist()
    rows = {
        number: Place(reader, begin, following[1] - begin, header["layouts"][layout], row_checksum)
        for (number, begin, layout, row_checksum), following in pairwise(numbers)
    }
    return header["key"], header["total"], rows
