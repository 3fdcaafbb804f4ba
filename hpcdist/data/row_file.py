"""The format of a file of cached rows, FILENAME.*.rows. It is written by one process and never changed.

It holds the values of its rows one after another, then an index as JSON, and a tail of fixed size with the size and
checksum of the index. The index has the description of the source, the key, the number of all rows where it is known,
the layouts, and for each row its number, size, layout and checksum.
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
    """Place of a row in a file, and its layout; `path` is None for the file of new rows."""

    path: str | None
    start: int
    n_bytes: int
    layout: str
    checksum: int


def content_of_file(
    header: Mapping[str, Any],
    rows: Mapping[int, StoredRow],
    read: Callable[[StoredRow], bytes],
) -> Iterator[bytes]:
    """Yield the content of a file, piece by piece.

    Args:
        header: description, key and total, as in the index.
        rows: rows by number.
        read: function that returns the values of a row.
    """
    layouts: dict[str, int] = {}
    entries: list[tuple[int, int, int, int]] = []
    for number, row in sorted(rows.items()):
        layout = layouts.setdefault(row.layout, len(layouts))
        entries.append((number, row.n_bytes, layout, row.checksum))
        yield read(row)
    fields = {**header, "layouts": list(layouts), "rows": entries}
    index = json.dumps(fields).encode()
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


def read_index(
    path: str,
    descriptor: int,
) -> tuple[dict[str, Any], dict[int, StoredRow]]:
    """Return a file's index, with `description`, `key` and `total` as passed to `content_of_file`, and its rows.

    Raises:
        ValueError: when the file was cut or changed.
        OSError: when it cannot be read.
    """
    index = json.loads(_read_index_text(descriptor))
    layouts = index["layouts"]
    rows: dict[int, StoredRow] = {}
    start = 0
    for number, n_bytes, layout_number, checksum in index["rows"]:
        layout = layouts[layout_number]
        rows[number] = StoredRow(path, start, n_bytes, layout, checksum)
        start += n_bytes
    return index, rows


def _read_index_text(descriptor: int) -> bytes:
    """Return the index of a file as JSON; raise ValueError if the file was cut or changed."""
    refusal = "a file that was cut or changed"
    size = os.fstat(descriptor).st_size
    tail_start = max(0, size - _TAIL.size)
    tail = read_at(descriptor, _TAIL.size, tail_start)
    if len(tail) != _TAIL.size:
        raise ValueError(refusal)
    magic, n_bytes, checksum = _TAIL.unpack(tail)
    if magic != _MAGIC:
        raise ValueError(refusal)
    text = b""
    start = tail_start - n_bytes
    if start >= 0:
        text = read_at(descriptor, n_bytes, start)
    if xxh3_64_intdigest(text) != checksum:
        raise ValueError(refusal)
    return text


def read_at(descriptor: int, n_bytes: int, start: int) -> bytes:
    """Return bytes of a file; fewer where it ends."""
    data = os.pread(descriptor, n_bytes, start)
    while len(data) < n_bytes:
        n_missing = n_bytes - len(data)
        piece = os.pread(descriptor, n_missing, start + len(data))
        if not piece:
            break
        data += piece
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
        n_elements = int(np.prod(self.shape, dtype=np.int64))
        return n_elements * np.dtype(self.dtype).itemsize

    def array(self, data: bytes) -> Any:
        array = np.frombuffer(data, self.dtype).reshape(self.shape).copy()
        if self.is_tensor:
            return torch.from_numpy(array)
        return array


def pack(row: Nest) -> tuple[str, bytes]:
    """Return the layout of a row as JSON, and its values.

    Raises:
        DataError: for anything but numbers and text in tuples, lists and dicts with text as keys.
    """
    layout = json.dumps(_layout_of(row))
    values = [np.asarray(leaf).tobytes() for leaf in leaves(row)]
    return layout, b"".join(values)


def _layout_of(nest: Nest) -> Any:
    """Return the layout of a row as JSON."""
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
    is_tensor = isinstance(nest, torch.Tensor)
    return {"array": [list(array.shape), array.dtype.str, is_tensor]}


def unpack(layout: str, data: bytes) -> Nest:
    """Return the row that was packed."""
    start = 0

    def next_array(array_layout: _ArrayLayout) -> Any:
        nonlocal start
        end = start + array_layout.n_bytes
        array = array_layout.array(data[start:end])
        start = end
        return array

    return map_nest(next_array, _nest_of_layouts(layout))


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
    make = {"tuple": tuple, "list": list}[kind]
    return make(map(_parsed, content))
