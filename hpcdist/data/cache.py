"""Rows that are read and mapped once, then kept in memory or in a file."""

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np
import torch

from hpcdist.data.nest import Nest, map_nest, no_rows, stack, unstack
from hpcdist.data.sources import RowSource
from hpcdist.errors import DataError
from hpcdist.plan.sample_order import Rows


class RowStore:
    """Rows by number: in memory, or in a file of this process alone, beside `filename`, that is gone when it ends.

    Raises:
        DataError: when there can be no file in the folder of `filename`.
    """

    def __init__(self, filename: str | None) -> None:
        self._rows: dict[int, Nest] = {}
        self._file = None if filename is None else _NamelessFile(filename)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def __setitem__(self, number: int, row: Nest) -> None:
        # a copy: a view would keep the whole batch that it was read with
        self._rows[number] = map_nest(_copy if self._file is None else self._file.write, row)

    def __getitem__(self, number: int) -> Nest:
        row = self._rows[number]
        return row if self._file is None else map_nest(self._file.read, row)


@dataclass(frozen=True)
class _Place:
    start: int
    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool


class _NamelessFile:
    """A file that nothing is left of, however the process ends. Used by the caller's thread and by prefetch's."""

    def __init__(self, filename: str) -> None:
        try:
            # closed with its last holder
            self._file = tempfile.TemporaryFile(dir=os.path.dirname(filename) or ".", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise DataError(
                f"cache: expected a folder for {filename!r} that can be written, got {error}; make it."
            ) from None
        self._end = 0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def write(self, value: Any) -> _Place:
        array = np.ascontiguousarray(value)
        with self._lock:
            start, self._end = self._end, self._end + array.nbytes
        _write_at(self._file.fileno(), array.tobytes(), start)
        return _Place(start, np.shape(value), array.dtype, isinstance(value, torch.Tensor))

    def read(self, place: _Place) -> Any:
        values = np.empty(place.shape, place.dtype)
        os.preadv(self._file.fileno(), [values.reshape(-1).view(np.uint8).data], place.start)
        return torch.from_numpy(values) if place.is_tensor else values


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else np.array(value)


class Cached(RowSource):
    """Rows that are kept once they were read: each process keeps the rows that it has read itself."""

    def __init__(self, source: RowSource, filename: str | None) -> None:
        self._source, self._store, self._filename = source, RowStore(filename), filename
        self.n_rows, self.n_files = source.n_rows, source.n_files

    def of_files(self, numbers: range) -> RowSource:
        """Return rows of some of the files alone, kept by themselves."""
        return Cached(self._source.of_files(numbers), self._filename)

    def take(self, rows: Rows) -> Nest:
        """Return rows, reading those that were not read before."""
        missing = self._missing(rows)
        return self._joined(rows, missing, self._source.take(missing) if len(missing) else None)

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request; what is not yet kept is asked for ahead, if the source reads ahead."""
        ahead, now = tee((rows, self._missing(rows)) for rows in requests)
        fresh = self._source.take_many(missing for _, missing in ahead if len(missing))
        for rows, missing in now:
            yield self._joined(rows, missing, next(fresh) if len(missing) else None)

    def _missing(self, rows: Rows) -> Rows:
        return np.array([row for row in np.unique(rows) if int(row) not in self._store], np.int64)

    def _joined(self, rows: Rows, missing: Rows, fresh: Nest) -> Nest:
        if fresh is not None:
            for number, row in zip(missing.tolist(), unstack(fresh), strict=True):
                self._store[number] = row
        if len(rows):
            return stack([self._store[row] for row in rows.tolist()])
        return no_rows(self.take(np.zeros(1, np.int64))) if self.n_rows else self._source.take(rows)
