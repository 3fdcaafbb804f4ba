"""The HDF5 file of a checkpoint: one contiguous dataset per dtype, and one JSON index.

/index            uint8, JSON: {"format": 1, "arrays": [[name, dtype, shape, offset], ...], "state": nest}
/arrays/<dtype>   one dimension: all arrays of that dtype, concatenated; offset counts elements

bfloat16 is stored as uint16 bits, bool as uint8. Any HDF5 reader can open the file. The layout does not depend on
ranks, hosts or replicas.
"""

import json
from typing import Any

import h5py
import numpy as np

from hpcdist.checkpoint.durable import ALIGNMENT_BYTES
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.tree import NamedArray

FORMAT = 1
#: Storage of dtypes that numpy or HDF5 lacks.
_STORED_AS = {"bfloat16": "uint16", "bool": "uint8"}
#: Dtypes that both numpy and HDF5 have. A fixed table, as numpy crashes on some other names, such as "(2,f4".
_NUMBERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in sorted({np.dtype(code).name for code in "bhilqBHILQefdgFDG"})
}


def lay_out(image: FileImage, state: Any, arrays: list[NamedArray]) -> None:
    """Make `image` the file that holds a state and copies of its arrays.

    HDF5 writes all structures into memory and reports the offsets of the arrays. Nothing is written to disk. The same
    state gives the same bytes.

    Cost: one copy of the arrays.
    """
    index, lengths = _index(arrays)
    text = json.dumps({"format": FORMAT, "arrays": index, "state": state}).encode()
    sketch = _Sketch()
    starts = _write_structures(sketch, text, lengths)
    image.resize(sketch.nbytes)
    for start, end in _gaps(sketch, starts, lengths):
        image.clear(start, end)
    for offset, data in sketch.written:
        image.put(offset, np.frombuffer(data, np.uint8))
    image.put_all(
        [
            (starts[dtype] + offset * array.values.itemsize, array.values)
            for (_, dtype, _, offset), array in zip(index, arrays, strict=True)
        ]
    )


def _index(arrays: list[NamedArray]) -> tuple[list[Any], dict[str, int]]:
    """Return the index rows and the length of each dtype's dataset, in elements."""
    index: list[Any] = []
    lengths: dict[str, int] = {}
    for array in arrays:
        offset = lengths.setdefault(array.dtype, 0)
        index.append([array.name, array.dtype, list(array.values.shape), offset])
        lengths[array.dtype] = offset + array.values.size
    return index, lengths


class _Sketch:
    """A file object that records the writes of HDF5; the arrays are left out.

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


def _write_structures(sketch: _Sketch, text: bytes, lengths: dict[str, int]) -> dict[str, int]:
    """Write everything but the arrays; return the offset of each dtype's dataset in the file, in bytes."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # so that the same state gives the same bytes
    starts: dict[str, int] = {}
    aligned = {"alignment_threshold": ALIGNMENT_BYTES, "alignment_interval": ALIGNMENT_BYTES}
    with h5py.File(sketch, "w", libver="v110", **aligned) as file:
        file.create_dataset("index", data=np.frombuffer(text, np.uint8))
        group = file.create_group("arrays")
        for dtype, length in lengths.items():
            space = h5py.h5s.create_simple((length,))
            made = h5py.h5d.create(group.id, dtype.encode(), _kind(dtype), space, creation)
            starts[dtype] = made.get_offset() or 0  # an empty dataset has no offset
    return starts


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the storage dtype of a named dtype.

    Raises:
        KeyError: for an unknown name.
    """
    return _NUMBERS[_STORED_AS.get(dtype, dtype)]


def _kind(dtype: str) -> Any:
    return h5py.h5t.py_create(stored_dtype(dtype), logical=True)


def _gaps(sketch: _Sketch, starts: dict[str, int], lengths: dict[str, int]) -> list[tuple[int, int]]:
    """Return the padding, as (start, end): the parts of the file that neither HDF5 nor an array writes."""
    written = [(offset, offset + len(data)) for offset, data in sketch.written]
    datasets = [
        (starts[dtype], starts[dtype] + length * stored_dtype(dtype).itemsize)
        for dtype, length in lengths.items()
        if length
    ]
    gaps, end = [], 0
    for start, stop in [*sorted(written + datasets), (sketch.nbytes, sketch.nbytes)]:
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    return gaps
