"""Rows of HDF5 files, read by slabs."""

import glob
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcdist.checkpoint.safe_open import open_data
from hpcdist.data.sources import Description, Request, RowSource
from hpcdist.errors import DataError
from hpcdist.nest import Nest, leaves, map_nest
from hpcdist.plan.sample_order import Rows

_Path = str | os.PathLike[str]
Paths = _Path | Sequence[_Path]
#: Name of a dataset -> shape of a row, and dtype.
_Layout = dict[str, tuple[tuple[int, ...], str]]
#: Consecutive rows: number of the file, (start, stop) in it, and index of the first row among the rows to read.
_Slab = tuple[int, tuple[int, int], int]
_OPEN_FILES = 16


def expand(paths: Any) -> list[str]:
    """Return the files that a path, a pattern or a list of paths names, in this order; matches of a pattern are sorted.

    An open h5py file is named by its path: each rank opens it anew.

    Raises:
        DataError: when there is no file, and for a dataset or a group of a file.
    """
    if is_h5py_dataset(paths):
        raise DataError(
            f"from_hdf5: expected files, got the open dataset {paths.name!r}; pass it to from_tensor_slices."
        )
    if is_h5py_group(paths) and paths.name != "/":
        raise DataError(
            f"from_hdf5: expected files, got the open group {paths.name!r}; pass its file, and names with the group's."
        )
    if is_h5py_group(paths):
        return [_absolute(paths.filename)]
    files: list[str] = []
    if isinstance(paths, (str, os.PathLike)):
        files = _matching_files(os.fspath(paths))
    else:
        for path in paths:
            if is_h5py_group(path):
                files += expand(path)
            else:
                files.append(os.fspath(path))
    if not files:
        raise DataError(
            f"from_hdf5: expected at least one file, got none for {paths!r}; check the pattern."
        )
    return list(map(_absolute, files))


def _matching_files(text: str) -> list[str]:
    """Return the files that match a pattern, sorted; or the path itself if it is no pattern."""
    if glob.has_magic(text) and not os.path.exists(text):
        return sorted(glob.glob(text))
    return [text]


def _absolute(path: str) -> str:
    """Return a path that stays right when the program changes its folder."""
    return os.path.join(os.getcwd(), path)


def is_h5py_dataset(value: Any) -> bool:
    """Return whether a value is a dataset of an open h5py file. Does not import h5py."""
    return _is_in_h5py_file(value) and hasattr(value, "shape")


def is_h5py_group(value: Any) -> bool:
    """Return whether a value is an open h5py file, or a group of one. Does not import h5py."""
    return _is_in_h5py_file(value) and hasattr(value, "items")


def _is_in_h5py_file(value: Any) -> bool:
    return type(value).__module__.startswith("h5py.") and hasattr(value, "file")


def datasets_in(value: Any) -> Any:
    """Return the datasets of an open h5py file or group in dicts, one for each group; anything else as it is."""
    if not is_h5py_group(value):
        return value
    for name in value:
        link = value.get(name, getlink=True)
        if type(link).__name__ != "HardLink":
            raise DataError(
                f"from_tensor_slices: expected datasets inside the file, got the link {name!r}; name others."
            )
    return {name: datasets_in(member) for name, member in value.items()}


def paths_and_names(nest: Nest) -> tuple[list[str], Nest]:
    """Return the path of the file whose datasets a nest holds, and the nest of their names: each rank opens it anew.

    Raises:
        DataError: when the datasets are of several files, or the nest holds something else.
    """
    if not all(is_h5py_dataset(leaf) for leaf in leaves(nest)):
        raise DataError(
            "from_tensor_slices: expected arrays, or datasets of an h5py file, got both; read the small ones by [:]."
        )
    files = sorted({os.path.realpath(leaf.file.filename) for leaf in leaves(nest)})
    if len(files) > 1:
        raise DataError(
            f"from_tensor_slices: expected datasets of one file, got {files}; zip two datasets."
        )
    return files, map_nest(lambda leaf: leaf.name, nest)


class Hdf5Source(RowSource):
    """Rows of datasets in files, one file after another. Only the rows asked for are read, and none are kept.

    A source that keeps rows (`keeping`) reads whole chunks. In files whose rows are no multiple of a chunk, a chunk of
    the order may consist of parts of two chunks of a file.

    Args:
        paths: paths of the files.
        names: nest of names of datasets; row i is row i of each of them.
        kept_rows: number of rows of the last chunks that are kept. 0 keeps none.

    Raises:
        DataError: when a file cannot be read, or files or datasets do not fit together.
    """

    def __init__(self, paths: list[str], names: Nest, kept_rows: int = 0) -> None:
        self._names = names
        self._kept_rows = kept_rows
        self._chunks: OrderedDict[int, Nest] = OrderedDict()
        self._open: OrderedDict[str, Any] = OrderedDict()
        rows_of_files: list[int] = []
        layouts: list[_Layout] = []
        for path in paths:
            n_rows, layout = self._read_layout(path)
            rows_of_files.append(n_rows)
            layouts.append(layout)
        self._layout = layouts[0]
        for path, layout in zip(paths, layouts, strict=True):
            if layout != self._layout:
                raise DataError(
                    f"from_hdf5: expected rows as in {paths[0]!r}, {self._layout}, got {layout} in {path!r}; convert "
                    f"the file."
                )
        self._paths = paths
        self.rows_of_files = tuple(rows_of_files)
        self._starts = np.cumsum([0, *rows_of_files])
        self.n_rows = int(self._starts[-1])
        self.chunk_rows = max(map(self._chunk_rows, paths))

    def keeping(self, n_rows: int) -> "Hdf5Source":
        """Return the source that keeps the rows of the last chunks it has read, `n_rows` rows and a chunk."""
        return Hdf5Source(self._paths, self._names, n_rows + self.chunk_rows)

    def describe(self) -> Description:
        """Return the files with their size and time of change, the names in them and their rows."""
        files: list[list[str | int]] = []
        for path in self._paths:
            status = os.stat(path)
            files.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
        return {**super().describe(), "files": files, "datasets": repr(self._names)}

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request; nothing is drawn at random."""
        return (self.take(request.rows) for request in requests)

    def take(self, rows: Rows) -> Nest:
        """Return rows in any order: the distinct ones are read in the order of the file, one slab per run."""
        if self._kept_rows and len(rows):
            return self._take_by_chunks(rows)
        unique, indices = np.unique(rows, return_inverse=True)
        unique_rows = map_nest(lambda name: self._read(name, unique), self._names)
        is_ascending = indices[1:] > indices[:-1]
        if len(unique) == len(rows) and is_ascending.all():
            return unique_rows
        return map_nest(lambda array: array[indices], unique_rows)

    def _take_by_chunks(self, rows: Rows) -> Nest:
        """Return rows of chunks that are kept, or read now, in the order in which they are asked for."""
        numbers = rows // self.chunk_rows
        values: Nest = None
        for number in dict.fromkeys(numbers.tolist()):
            chunk = self._chunk(number)
            wanted = np.flatnonzero(numbers == number)
            if values is None:
                values = map_nest(
                    lambda array: np.empty((len(rows), *array.shape[1:]), array.dtype), chunk
                )
            offsets = rows[wanted] - number * self.chunk_rows
            for target, array in zip(leaves(values), leaves(chunk), strict=True):
                target[wanted] = array[offsets]
        return values

    def _chunk(self, number: int) -> Nest:
        """Return all rows of a chunk, which is the last one to be dropped from then on."""
        chunk = self._chunks.pop(number, None)
        if chunk is None:
            first = number * self.chunk_rows
            rows = np.arange(first, min(first + self.chunk_rows, self.n_rows))
            chunk = map_nest(lambda name: self._read(name, rows), self._names)
        self._chunks[number] = chunk
        if len(self._chunks) * self.chunk_rows > self._kept_rows:
            self._chunks.popitem(last=False)
        return chunk

    def _read(self, name: str, rows: Rows) -> Any:
        """Return ascending rows of a dataset."""
        shape, dtype = self._layout[name]
        values = np.empty((len(rows), *shape), dtype)
        for file, (start, stop), first in slabs(rows, self._starts):
            path = self._paths[file]
            _, datasets = self._datasets(path)
            end = first + stop - start
            try:
                dataset = datasets[name]
                dataset.read_direct(values, np.s_[start:stop], np.s_[first:end])
            except OSError as error:
                raise DataError(
                    f"from_hdf5: expected rows {start} to {stop} of {name!r} in {path!r}, got {error}; check the file."
                ) from None
        return values

    def _read_layout(self, path: str) -> tuple[int, _Layout]:
        """Return the number of rows of a file, and the shape of a row and the dtype of each dataset."""
        _, datasets = self._datasets(path)
        counts = {name: dataset.shape[0] for name, dataset in datasets.items()}
        if len(set(counts.values())) != 1:
            raise DataError(
                f"from_hdf5: expected datasets with the same number of rows in {path!r}, got {counts}; check the first "
                f"dimension."
            )
        layout: _Layout = {}
        for name, dataset in datasets.items():
            layout[name] = (dataset.shape[1:], str(dataset.dtype))
        return next(iter(counts.values())), layout

    def _chunk_rows(self, path: str) -> int:
        """Return the rows of the largest chunk of a file; 1 where no rows are stored by chunks."""
        _, datasets = self._datasets(path)
        chunk_rows = 1
        for dataset in datasets.values():
            if dataset.chunks:
                chunk_rows = max(chunk_rows, dataset.chunks[0])
        return chunk_rows

    def _datasets(self, path: str) -> Any:
        """Return (file, datasets) of a path; a few files are kept open."""
        if path not in self._open:
            self._open[path] = open_data(path, leaves(self._names))
            if len(self._open) > _OPEN_FILES:
                _, (oldest_file, _) = self._open.popitem(last=False)
                oldest_file.close()
        self._open.move_to_end(path)
        return self._open[path]


def slabs(rows: Rows, starts: Any) -> Iterator[_Slab]:
    """Yield (file, (start, stop) in it, index of the first in `rows`) for every run of consecutive rows.

    Args:
        rows: ascending numbers of rows, over all files.
        starts: first row of every file, and the number of all rows.

    >>> list(slabs(np.array([1, 2, 5, 6, 7]), np.array([0, 6, 10])))
    [(0, (1, 3), 0), (0, (5, 6), 2), (1, (0, 2), 3)]
    """
    if not len(rows):
        return
    files = np.searchsorted(starts, rows, side="right") - 1
    begins_run = (np.diff(rows) != 1) | (np.diff(files) != 0)
    breaks = (np.flatnonzero(begins_run) + 1).tolist()
    for first, end in itertools.pairwise([0, *breaks, len(rows)]):
        file = int(files[first])
        start = int(rows[first] - starts[file])
        stop = int(rows[end - 1] - starts[file]) + 1
        yield file, (start, stop), first
