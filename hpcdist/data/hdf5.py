"""Rows of HDF5 files, read by slabs."""

import glob
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

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_OPEN_FILES = 16


def expand(paths: Any) -> list[str]:
    """Return the files that a path, a pattern or a list of paths names, in the order given; a pattern's are sorted.

    An open h5py file is named by its path: each rank opens it anew.

    Raises:
        DataError: when there is none, or a dataset of a file is given.
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
    if isinstance(paths, (str, os.PathLike)):
        text = os.fspath(paths)
        files = (
            sorted(glob.glob(text)) if glob.has_magic(text) and not os.path.exists(text) else [text]
        )
    else:
        files = [
            file
            for path in paths
            for file in (expand(path) if is_h5py_group(path) else [os.fspath(path)])
        ]
    if not files:
        raise DataError(
            f"from_hdf5: expected at least one file, got none for {paths!r}; check the pattern."
        )
    return list(map(_absolute, files))


def _absolute(path: str) -> str:
    """Return a path that stays right when the program changes its folder."""
    return os.path.join(os.getcwd(), path)


def is_h5py_dataset(value: Any) -> bool:
    """Return whether a value is a dataset of an open h5py file. Does not import h5py."""
    return (
        type(value).__module__.startswith("h5py.")
        and hasattr(value, "file")
        and hasattr(value, "shape")
    )


def is_h5py_group(value: Any) -> bool:
    """Return whether a value is an open h5py file, or a group of one. Does not import h5py."""
    return (
        type(value).__module__.startswith("h5py.")
        and hasattr(value, "file")
        and hasattr(value, "items")
    )


def datasets_in(value: Any) -> Any:
    """Return the datasets of an open h5py file or group in dicts, one for each group; anything else as it is."""
    if not is_h5py_group(value):
        return value
    links = [name for name in value if type(value.get(name, getlink=True)).__name__ != "HardLink"]
    if links:
        raise DataError(
            f"from_tensor_slices: expected datasets inside the file, got the link {links[0]!r}; name others."
        )
    return {name: datasets_in(member) for name, member in value.items()}


def paths_and_names(nest: Nest) -> tuple[list[str], Nest]:
    """Return the path of the file whose datasets a nest holds, and the nest of their names: each rank opens it anew.

    Raises:
        DataError: when they are of several files, or there is something else.
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
    the order may be parts of two of the file.

    Args:
        paths: of the files.
        names: nest of names of datasets; row i is row i of each of them.
        kept_rows: rows that are kept of the last chunks; 0: none.

    Raises:
        DataError: when a file cannot be read, or files or datasets do not fit together.
    """

    def __init__(self, paths: list[str], names: Nest, kept_rows: int = 0) -> None:
        self._names = names
        self._kept_rows = kept_rows
        self._chunks: OrderedDict[int, Nest] = OrderedDict()
        self._open: OrderedDict[str, Any] = OrderedDict()
        shapes = [self._shapes(path) for path in paths]
        self._layout = shapes[0][1]
        for path, (_, layout) in zip(paths, shapes, strict=True):
            if layout != self._layout:
                raise DataError(
                    f"from_hdf5: expected rows as in {paths[0]!r}, {self._layout}, got {layout} in {path!r}; convert "
                    f"the file."
                )
        self._paths = paths
        self.rows_of_files = tuple(n_rows for n_rows, _ in shapes)
        self._starts = np.cumsum([0, *self.rows_of_files])
        self.n_rows = int(self._starts[-1])
        self.chunk_rows = max(chunk_rows for path in paths for chunk_rows in self._chunk_rows(path))

    def keeping(self, n_rows: int) -> "Hdf5Source":
        """Return the source that keeps the rows of the last chunks it has read, `n_rows` rows and a chunk."""
        return Hdf5Source(self._paths, self._names, n_rows + self.chunk_rows)

    def describe(self) -> Description:
        """Return the files with their size and time of change, the names in them and their rows."""
        stats = [(os.path.realpath(path), os.stat(path)) for path in self._paths]
        files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {**super().describe(), "files": files, "datasets": repr(self._names)}

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request; nothing is drawn at random."""
        return (self.take(request.rows) for request in requests)

    def take(self, rows: Rows) -> Nest:
        """Return rows in any order: the distinct ones are read in the order of the file, one slab per run."""
        if self._kept_rows and len(rows):
            return self._take_by_chunks(rows)
        unique, indices = np.unique(rows, return_inverse=True)
        is_sorted = len(unique) == len(rows) and bool((indices[1:] > indices[:-1]).all())
        unique_rows = map_nest(lambda name: self._read(name, unique), self._names)
        return unique_rows if is_sorted else map_nest(lambda array: array[indices], unique_rows)

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
        shape, dtype = self._layout[name]
        values = np.empty((len(rows), *shape), dtype)
        for file, (start, stop), first in slabs(rows, self._starts):
            dataset = self._datasets(self._paths[file])[1][name]
            try:
                dataset.read_direct(values, np.s_[start:stop], np.s_[first : first + stop - start])
            except OSError as error:
                raise DataError(
                    f"from_hdf5: expected rows {start} to {stop} of {name!r} in {self._paths[file]!r}, got {error}; "
                    f"check the file."
                ) from None
        return values

    def _shapes(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the rows of a file, and name -> (shape of a row, dtype)."""
        datasets = self._datasets(path)[1]
        counts = {name: dataset.shape[0] for name, dataset in datasets.items()}
        if len(set(counts.values())) != 1:
            raise DataError(
                f"from_hdf5: expected datasets with the same number of rows in {path!r}, got {counts}; check the first "
                f"dimension."
            )
        return next(iter(counts.values())), {
            name: (column.shape[1:], str(column.dtype)) for name, column in datasets.items()
        }

    def _chunk_rows(self, path: str) -> list[int]:
        """Return the rows of a chunk of each dataset; 1 where rows are not stored by chunks."""
        return [
            dataset.chunks[0] if dataset.chunks else 1
            for dataset in self._datasets(path)[1].values()
        ]

    def _datasets(self, path: str) -> Any:
        """Return (file, datasets) of a path; a few files are kept open."""
        if path not in self._open:
            self._open[path] = open_data(path, leaves(self._names))
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1][0].close()
        self._open.move_to_end(path)
        return self._open[path]


def slabs(rows: Rows, starts: Any) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yield (file, (start, stop) in it, index of the first in `rows`) for every run of consecutive rows.

    Args:
        rows: ascending, over all files.
        starts: first row of every file, and the number of all rows.

    >>> list(slabs(np.array([1, 2, 5, 6, 7]), np.array([0, 6, 10])))
    [(0, (1, 3), 0), (0, (5, 6), 2), (1, (0, 2), 3)]
    """
    if not len(rows):
        return
    files = np.searchsorted(starts, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(files) != 0)) + 1
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
        file = int(files[first])
        yield file, (int(rows[first] - starts[file]), int(rows[end - 1] - starts[file]) + 1), first
