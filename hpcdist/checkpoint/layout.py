"""A checkpoint as one HDF5 file that verifies itself.

    bytes 0 to 4095     the user block, which HDF5 leaves to us: header.py
    HDF5 from there on  one contiguous dataset per array, under the array's name, such as /model/0.weight
    /index, the last    JSON, padded with spaces: {"step", "time_s", "metrics", "written", "arrays", "state"}, with
                        arrays as [[name, dtype, shape, offset in bytes from the start of the file], ...]

bfloat16 is stored as uint16 bits, bool as uint8. Any HDF5 reader can open the file. The layout does not depend on
ranks, hosts or replicas.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpcdist.checkpoint.header import HEADER_BYTES
from hpcdist.checkpoint.image import FileImage, Placed
from hpcdist.checkpoint.tree import NamedArray

#: The index is padded with spaces to a multiple of this, so that the next save has the same layout.
_INDEX_UNIT_BYTES = 4096
#: A part of a file: its start and its end.
_Extent = tuple[int, int]
#: Storage of dtypes that numpy or HDF5 lacks.
_STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
_NUMBER_NAMES = {np.dtype(code).name for code in "bhilqBHILQefdgFDG"}
#: Dtypes that both numpy and HDF5 have. A fixed table, as numpy crashes on some other names, such as "(2,f4".
_NUMBERS: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in sorted(_NUMBER_NAMES)}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the storage dtype of a named dtype.

    Raises:
        KeyError: for an unknown name.
    """
    return _NUMBERS[_STORED_AS.get(dtype, dtype)]


class _Spec(NamedTuple):
    """Name, dtype and shape of an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array in the file."""
        n_elements = int(np.prod(self.shape))
        return n_elements * stored_dtype(self.dtype).itemsize


def _spec_of(array: NamedArray) -> _Spec:
    shape = array.values.shape
    return _Spec(array.name, array.dtype, shape)


def lay_out(
    image: FileImage,
    facts: dict[str, Any],
    state: Any,
    arrays: list[NamedArray],
) -> list[memoryview]:
    """Make `image` the file of a state and copies of its arrays, but for the header, which comes with its blocks.

    HDF5 writes its structures into memory, once for all saves of arrays of the same names, dtypes and shapes.

    Args:
        image: file in memory.
        facts: step, time_s, metrics and written.
        state: state of the program, as JSON.
        arrays: arrays of the state.

    Returns:
        bytes of each array's copy, in the image.

    Cost: one copy of the arrays.
    """
    specs = tuple(map(_spec_of, arrays))
    offsets = _layout_of(specs, _INDEX_UNIT_BYTES).offsets
    rows: list[list[Any]] = []
    for spec, offset in zip(specs, offsets, strict=True):
        rows.append([*spec, offset])
    fields = {**facts, "arrays": rows, "state": state}
    index = json.dumps(fields).encode()
    n_units = -(-len(index) // _INDEX_UNIT_BYTES)
    layout = _layout_of(specs, n_units * _INDEX_UNIT_BYTES)
    image.resize(layout.nbytes, layout.index_offset, len(index))
    for start, end in layout.gaps:
        image.clear(start, end)
    padded_index = index.ljust(layout.index_nbytes)
    for offset, content in (*layout.structures, (layout.index_offset, padded_index)):
        image.put(offset, np.frombuffer(content, np.uint8))
    placed: list[Placed] = []
    copies: list[memoryview] = []
    for offset, array in zip(offsets, arrays, strict=True):
        placed.append((offset, array.values))
        copy = image.content(offset, array.values.nbytes)
        copies.append(copy)
    image.put_all(placed)
    return copies


@dataclass(frozen=True)
class _Layout:
    """Where everything is in a file.

    Attributes:
        nbytes: size of the file.
        offsets: offset of each array.
        index_offset: offset of the index.
        index_nbytes: size of the index, padding included.
        structures: bytes that HDF5 writes, as (offset, bytes), in the order of writing.
        gaps: parts of the file that nothing writes, as (start, end).
    """

    nbytes: int
    offsets: tuple[int, ...]
    index_offset: int
    index_nbytes: int
    structures: tuple[tuple[int, bytes], ...]
    gaps: tuple[_Extent, ...]


@lru_cache(maxsize=4)  # HDF5 takes 50 microseconds for a dataset
def _layout_of(specs: tuple[_Spec, ...], index_nbytes: int) -> _Layout:
    sketch = _Sketch()
    paths = _paths([spec.name for spec in specs])
    offsets: list[int] = []
    with h5py.File(sketch, "w", libver="v110", userblock_size=HEADER_BYTES) as file:
        for path, spec in zip(paths, specs, strict=True):
            dtype = stored_dtype(spec.dtype)
            offset = _make_dataset(file, path, dtype, spec.shape)
            offsets.append(offset)
        index_dtype = np.dtype(np.uint8)
        index_offset = _make_dataset(file, "index", index_dtype, (index_nbytes,))
    written: list[_Extent] = [
        (0, HEADER_BYTES),
        (index_offset, index_offset + index_nbytes),
        (sketch.nbytes, sketch.nbytes),
    ]
    for offset, content in sketch.written:
        end = offset + len(content)
        written.append((offset, end))
    for offset, spec in zip(offsets, specs, strict=True):
        if spec.nbytes:
            end = offset + spec.nbytes
            written.append((offset, end))
    return _Layout(
        nbytes=sketch.nbytes,
        offsets=tuple(offsets),
        index_offset=index_offset,
        index_nbytes=index_nbytes,
        structures=tuple(sketch.written),
        gaps=_gaps(written),
    )


def _make_dataset(
    file: h5py.File,
    path: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
) -> int:
    """Make a dataset and the groups around it; return the offset of its content, or 0 if it is empty."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # so that the same state gives the same bytes
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape)
    kind = h5py.h5t.py_create(dtype, logical=True)
    name = path.encode()
    dataset = h5py.h5d.create(file.id, name, kind, space, creation, links)
    if 0 in shape:
        return 0
    offset: int = dataset.get_offset()
    return offset


def _paths(names: list[str]) -> list[str]:
    """Return the path in the file for each array: its name, or #NUMBER where HDF5 cannot take that."""
    groups: set[str] = set()
    used_paths = {"index"}
    paths: list[str] = []
    for number, name in enumerate(names):
        name_groups = _groups_of(name)
        is_taken = name in used_paths or name in groups
        if _is_path(name) and not is_taken and not name_groups & used_paths:
            path = name
            groups |= name_groups
        else:
            path = f"#{number}"
            while path in used_paths or path in groups:
                path = f"#{path}"
        used_paths.add(path)
        paths.append(path)
    return paths


def _groups_of(path: str) -> set[str]:
    """Return the paths of the groups that hold a dataset: "a" and "a/b" for "a/b/c"."""
    return {path[:position] for position, letter in enumerate(path) if letter == "/"}


def _is_path(name: str) -> bool:
    """Return whether HDF5 can take a name as a path, which no path that begins with # is mistaken for."""
    if not name.isprintable() or name.startswith("#"):
        return False
    special_parts = {"", ".", ".."} & set(name.split("/"))
    return not special_parts


def _gaps(written: list[_Extent]) -> tuple[_Extent, ...]:
    """Return the parts of a file that lie between the written ones."""
    gaps: list[_Extent] = []
    end = 0
    for start, stop in sorted(written):
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    return tuple(gaps)


class _Sketch:
    """A file object that records the writes of HDF5; the arrays and the index are left out.

    Attributes:
        written: offsets and bytes, in the order of writing.
        nbytes: size of the whole file.
    """

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self.nbytes = 0
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        origins = (0, self._position, self.nbytes)
        self._position = origins[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, n_bytes: int = -1) -> bytes:
        raise OSError("HDF5 reads back nothing of a file that it lays out")

    readinto = read

    def write(self, data: Any) -> int:
        content = bytes(data)
        self.written.append((self._position, content))
        self._position += len(content)
        self.nbytes = max(self.nbytes, self._position)
        return len(content)

    def truncate(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def flush(self) -> None:
        """Do nothing: all is in memory."""
