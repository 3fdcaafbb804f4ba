"""Files of rows, which a cache leaves to later processes: read by row, and never half written.

A file holds the values of the rows one after another; (rows, 4) int64 numbers: each row's number, start, layout and
checksum; JSON: key, total and layouts; and an end of fixed size, with a checksum over numbers and JSON.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hpcdist.checkpoint.durable import Disk, replace_file
from hpcdist.data.nest import Nest
from hpcdist.errors import DataError

_END = struct.Struct("<8sQQQ")
_MAGIC = b"hpcdrow1"
_KINDS = "biufcSUmM"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a row is: `n_bytes` from `start` in a file that is open, of some layout, with some checksum."""

    descriptor: int
    start: int
    n_bytes: int
    layout: str
    checksum: int

    def read(self) -> bytes:
        """Return the row's bytes.

        Raises:
            DataError: when they are not what was written.
        """
        found = bytearray()
        while len(found) < self.n_bytes:
            part = os.pread(self.descriptor, self.n_bytes - len(found), self.start + len(found))
            if not part:
                break
            found += part
        if checksum_of(found) != self.checksum:
            raise DataError(
                "cache: expected the row that was written, got another one in a damaged file; remove the files of this "
                "cache, and they are made anew."
            )
        return bytes(found)


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


def read_index(descriptor: int) -> tuple[str, int | None, dict[int, Place]]:
    """Return key, total and rows of a file that is open. What the rows hold is looked at when they are read.

    Raises:
        ValueError: when it is no file of rows, or not the one that was written.
    """
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
        number: Place(descriptor, begin, following[1] - begin, header["layouts"][layout], row_checksum)
        for (number, begin, layout, row_checksum), following in pairwise(numbers)
    }
    return header["key"], header["total"], rows
