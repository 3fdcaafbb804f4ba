"""The format of a file of cached rows, FILENAME.*.rows. It is written by one process and never changed.

It holds the values of its rows one after another; an index as JSON: the description of the source, the key, the number
of all rows where it is known, the layouts, and for each row its number, size, layout and checksum; and a tail of fixed
size with the size and checksum of the index.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from hpcdist.errors import DataError
from hpcdist.nest import Nest, leaves, map_nest

_TAIL = struct.Struct("<8sQQ")
_MAGIC = b"hpcdrow2"
_BLOCK_BYTES = 1 << 20
#: Kinds of numpy dtypes that a row may have: numbers, text, times.
_KINDS = "biufcSUmM"


@dataclass(frozen=True)
class StoredRow:
    """Where a row is in a file, and its layout; `path` is None for the file of new rows."""

    path: str | None
    start: int
    n_bytes: int
    layout: str
    checksum: int


def content_of_file(
    header: Mapping[str, Any], rows: Mapping[int, StoredRow], read: Callable[[StoredRow], bytes]
) -> Iterator[bytes]:
    """Yield the content of a file, piece by piece.

    Args:
        header: description, key and total, as in the index.
        rows: by number.
        read: returns the values of one.
    """
    layouts: dict[str, int] = {}
    entries: list[tuple[int, int, int, int]] = []
    for number, row in sorted(rows.items()):
        entries.append(
            (number, row.n_bytes, layouts.setdefault(row.layout, len(layouts)), row.checksum)
        )
        yield read(row)
    index = json.dumps({**header, "layouts": list(layouts), "rows": entries}).encode()
    yield index + _TAIL.pack(_MAGIC, len(index), xxh3_64_intdigest(index))


def blocks(pieces: Iterable[bytes]) -> Iterator[memoryview]:
    """Yield pieces joined into blocks large enough for one write."""
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) >= _BLOCK_BYTES:
            yield memoryview(block)
            block = bytearray()
    yield memoryview(block)


def read_index(path: str, descriptor: int) -> tuple[dict[str, Any], dict[int, StoredRow]]:
    """Return a file's index, with `description`, `key` and `total` as given to `content_of_file`, and its rows.

    Raises:
        ValueError: when the file was cut or changed.
        OSError: when it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    tail = read_at(descriptor, _TAIL.size, max(0, size - _TAIL.size))
    magic, n_index, checksum = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (b"", 0, 0)
    start = size - _TAIL.size - n_index
    text = read_at(descriptor, n_index, start) if magic == _MAGIC and start >= 0 else b""
    if magic != _MAGIC or xxh3_64_intdigest(text) != checksum:
        raise ValueError("a file that was cut or changed")
    index = json.loads(text)
    rows = {}
    start = 0
    for number, n_bytes, layout, row_checksum in index["rows"]:
        rows[number] = StoredRow(path, start, n_bytes, index["layouts"][layout], row_checksum)
        start += n_bytes
    return index, rows


def read_at(descriptor: int, n_bytes: int, start: int) -> bytes:
    """Return bytes of a file; fewer where it ends."""
    data = os.pread(descriptor, n_bytes, start)
    while len(data) < n_bytes and (
        more := os.pread(descriptor, n_bytes - len(data), start + len(data))
    ):
        data += more
    return data


def write_at(file: Any, data: bytes, start: int) -> None:
    """Write bytes at an offset of an unbuffered file."""
    file.seek(start)
    n_written = 0
    while n_written < len(data):
        n_written += file.write(data[n_written:])


@dataclass(frozen=True)
class _ArrayLayout:
    shape: tuple[int, ...]
    dtype: str
    is_tensor: bool

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def array(self, data: bytes) -> Any:
        array = np.frombuffer(data, self.dtype).reshape(self.shape).copy()
        return torch.from_numpy(array) if self.is_tensor else array


def pack(row: Nest) -> tuple[str, bytes]:
    """Return the layout of a row as JSON, and its values.

    Raises:
        DataError: for anything but numbers and text in tuples, lists and dicts with text as keys.
    """
    return json.dumps(_layout_of(row)), b"".join(np.asarray(leaf).tobytes() for leaf in leaves(row))


def _layout_of(nest: Nest) -> Any:
    if isinstance(nest, dict) and all(isinstance(key, str) for key in nest):
        return {"dict": {key: _layout_of(part) for key, part in nest.items()}}
    if type(nest) in (tuple, list):
        return {type(nest).__name__: [_layout_of(part) for part in nest]}
    array = np.asarray(nest)
    if isinstance(nest, (dict, tuple, list)) or array.dtype.kind not in _KINDS:
        raise DataError(
            f"cache: expected rows of numbers or text in tuples, lists and dicts with text as keys, got "
            f"{type(nest).__name__} of {array.dtype}; map them to such rows, or leave the filename out."
        )
    return {"array": [list(array.shape), array.dtype.str, isinstance(nest, torch.Tensor)]}


def unpack(layout: str, data: bytes) -> Nest:
    """Return the row that was packed."""
    start = 0

    def array(array_layout: _ArrayLayout) -> Any:
        nonlocal start
        start += array_layout.n_bytes
        return array_layout.array(data[start - array_layout.n_bytes : start])

    return map_nest(array, _nest_of_layouts(layout))


@lru_cache(maxsize=64)
def _nest_of_layouts(layout: str) -> Nest:
    return _parsed(json.loads(layout))


def _parsed(layout: Any) -> Nest:
    ((kind, content),) = layout.items()
    if kind == "array":
        shape, dtype, is_tensor = content
        return _ArrayLayout(tuple(shape), dtype, is_tensor)
    if kind == "dict":
        return {key: _parsed(part) for key, part in content.items()}
    return {"tuple": tuple, "list": list}[kind](map(_parsed, content))
