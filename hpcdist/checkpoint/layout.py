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
from typing import Any

import h5py
import numpy as np

from hpcdist.checkpoint.header import HEADER_BYTES
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.tree import NamedArray

#: The index is padded with spaces to a multiple of this, so that the next save has the same layout.
_INDEX_UNIT_BYTES = 4096
#: Storage of dtypes that numpy or HDF5 lacks.
_STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
#: Dtypes that both numpy and HDF5 have. A fixed table, as numpy crashes on some other names, such as "(2,f4".
_NUMBERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in sorted({np.dtype(code).name for code in "bhilqBHILQefdgFDG"})
}
#: Name, dtype and shape of an array.
_Spec = tuple[str, str, tuple[int, ...]]


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the storage dtype of a named dtype.

    Raises:
        KeyError: for an unknown name.
    """
    return _NUMBERS[_STORED_AS.get(dtype, dtype)]


def lay_out(
    image: FileImage, facts: dict[str, Any], state: Any, arrays: list[NamedArray]
) -> list[memoryview]:
    """Make `image` the file of a state and copies of its arrays, but for the header, which comes with its blocks.

    HDF5 writes its structures into memory, once for all saves of arrays of the same names, dtypes and shapes.

    Args:
        image: the file in memory.
        facts: step, time_s, metrics and written.
        state: the state, as JSON.
        arrays: its arrays.

    Returns:
        the bytes of each array's copy, in the image.

    Cost: one copy of the arrays.
    """
    specs = tuple((array.name, array.dtype, array.values.shape) for array in arrays)
    offsets = _layout_of(specs, _INDEX_UNIT_BYTES).offsets
    rows = [[*spec, offset] for spec, offset in zip(specs, offsets, strict=True)]
    text = json.dumps({**facts, "arrays": rows, "state": state}).encode()
    layout = _layout_of(specs, -(-len(text) // _INDEX_UNIT_BYTES) * _INDEX_UNIT_BYTES)
    image.resize(layout.nbytes, layout.index_offset, len(text))
    for start, end in layout.gaps:
        image.clear(start, end)
    for offset, data in layout.structures:
        image.put(offset, np.frombuffer(data, np.uint8))
    image.put(layout.index_offset, np.frombuffer(text.ljust(layout.index_nbytes), np.uint8))
    image.put_all([(offset, array.values) for offset, array in zip(offsets, arrays, strict=True)])
    return [
        image.content(offset, array.values.nbytes)
        for offset, array in zip(offsets, arrays, strict=True)
    ]


@dataclass(frozen=True)
class _Layout:
    """Where everything is in a file.

    Attributes:
        nbytes: size of the file.
        offsets: of the arrays.
        index_offset, index_nbytes: of the index, padding included.
        structures: what HDF5 writes, as (offset, bytes), in the order of writing.
        gaps: the parts that nothing writes, as (start, end).
    """

    nbytes: int
    offsets: tuple[int, ...]
    index_offset: int
    index_nbytes: int
    structures: tuple[tuple[int, bytes], ...]
    gaps: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4)  # HDF5 takes 50 microseconds for a dataset
def _layout_of(specs: tuple[_Spec, ...], index_nbytes: int) -> _Layout:
    sketch = _Sketch()
    paths = _paths([name for name, _, _ in specs])
    with h5py.File(sketch, "w", libver="v110", userblock_size=HEADER_BYTES) as file:
        offsets = tuple(
            _make_dataset(file, path, stored_dtype(dtype), shape)
            for path, (_, dtype, shape) in zip(paths, specs, strict=True)
        )
        index_offset = _make_dataset(file, "index", np.dtype(np.uint8), (index_nbytes,))
    sizes = [int(np.prod(shape)) * stored_dtype(dtype).itemsize for _, dtype, shape in specs]
    written = [(offset, offset + len(data)) for offset, data in sketch.written]
    written += [
        (offset, offset + size) for offset, size in zip(offsets, sizes, strict=True) if size
    ]
    written += [
        (0, HEADER_BYTES),
        (index_offset, index_offset + index_nbytes),
        (sketch.nbytes, sketch.nbytes),
    ]
    return _Layout(
        sketch.nbytes, offsets, index_offset, index_nbytes, tuple(sketch.written), _gaps(written)
    )


def _make_dataset(file: h5py.File, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Make a dataset and the groups around it; return the offset of its content, 0 for an empty one."""
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
    dataset = h5py.h5d.create(file.id, path.encode(), kind, space, creation, links)
    return dataset.get_offset() if 0 not in shape else 0


def _paths(names: list[str]) -> list[str]:
    """Return the path in the file for each array: its name, or #NUMBER where HDF5 cannot take that."""
    groups: set[str] = set()
    used_paths = {"index"}
    paths = []
    for number, name in enumerate(names):
        above = {name[:at] for at, letter in enumerate(name) if letter == "/"}
        is_fit = (
            _is_path(name)
            and name not in used_paths
            and name not in groups
            and not above & used_paths
        )
        if is_fit:
            groups |= above
        path = name if is_fit else f"#{number}"
        while not is_fit and (path in used_paths or path in groups):
            path = f"#{path}"
        used_paths.add(path)
        paths.append(path)
    return paths


def _is_path(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and not {"", ".", ".."} & set(parts) and not name.startswith("#")


def _gaps(written: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    gaps = []
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
        self.nbytes = self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, n_bytes: int = -1) -> bytes:
        raise OSError("HDF5 reads back nothing of a file that it lays out")

    readinto = read

    def write(self, data: Any) -> int:
        self.written.append((self._at, bytes(data)))
        self._at += len(self.written[-1][1])
        self.nbytes = max(self.nbytes, self._at)
        return len(self.written[-1][1])

    def truncate(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def flush(self) -> None:
        """Do nothing: all is in memory."""
