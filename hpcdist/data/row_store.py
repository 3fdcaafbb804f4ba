"""Rows by number, kept in memory or in files."""

import functools
import glob
import logging
import os
import secrets
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hpcdist.data.row_file import (
    MORE_FILES,
    OpenFiles,
    Place,
    checksum_of,
    is_short_of_files,
    pack,
    read_at,
    unpack,
    write_rows,
)
from hpcdist.errors import DataError
from hpcdist.nest import Nest, map_nest

logger = logging.getLogger("hpcdist")


class RowStore(Protocol):
    """Rows by number, and how many there are in all, once that is known."""

    total: int | None

    def __len__(self) -> int: ...
    def __contains__(self, number: int) -> bool: ...
    def __getitem__(self, number: int) -> Nest: ...
    def __setitem__(self, number: int, row: Nest) -> None: ...

    def refresh(self) -> None:
        """Look for rows that other processes have left."""

    def commit(self, total: int | None = None) -> None:
        """Leave the rows to other processes; with `total`, as all there are."""

    @property
    def is_commit_due(self) -> bool:
        """Whether it is worth while to leave to others what was read since the last time."""


class MemoryStore:
    """Rows in memory, for this process alone."""

    is_commit_due = False

    def __init__(self) -> None:
        self._rows: dict[int, Nest] = {}
        self.total: int | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def __setitem__(self, number: int, row: Nest) -> None:
        self._rows[number] = map_nest(_copy, row)  # a view would keep the whole batch that it was read with

    def __getitem__(self, number: int) -> Nest:
        return self._rows[number]

    def refresh(self) -> None:
        """Do nothing: there are no others."""

    def commit(self, total: int | None = None) -> None:
        """Take note of how many rows there are."""
        self.total = total


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else np.array(value)


class FileStore:
    """Rows in files that are named after `filename`, for this process and later ones.

    New rows go to a file without a name, which is gone with the process however that ends. `commit` makes one with a
    name of its own of those that came since the last one, so that any number of processes may do so side by side.
    However many files there are, only a few are open at a time.
    Files of another key are left alone; files that were cut or changed are, too, with a warning.

    Used by the caller's thread and by prefetch's.

    Args:
        filename: what names begin with.
        key: says of which dataset the rows are.

    Raises:
        DataError: when there can be no file in the folder of `filename`.
    """

    def __init__(self, filename: str, key: str) -> None:
        self._filename, self._key = filename, key
        self._places: dict[int, Place] = {}
        self._new: dict[int, Place] = {}
        self._n_committed = self._end = 0
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self.total: int | None = None
        try:
            # closed with the store
            self._spool = tempfile.TemporaryFile(dir=os.path.dirname(filename) or ".", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise DataError(
                f"cache: expected a folder for {filename!r} that can be written, got {error}; "
                f"{MORE_FILES if is_short_of_files(error) else 'make it'}."
            ) from None
        self._files = OpenFiles()
        weakref.finalize(self, _close, self._spool, self._files)
        self.refresh()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __setitem__(self, number: int, row: Nest) -> None:
        layout, data = pack(row)
        with self._lock:
            start, self._end = self._end, self._end + len(data)
            _write_at(self._spool.fileno(), data, start)
            reader = functools.partial(read_at, self._spool.fileno())
            place = Place(reader, start, len(data), layout, checksum_of(data))
            self._places[number] = self._new[number] = place

    def __getitem__(self, number: int) -> Nest:
        place = self._places[number]
        return unpack(place.layout, place.read())

    def refresh(self) -> None:
        """Look for files that were left since the last time."""
        with self._lock:
            for path in sorted(glob.glob(f"{glob.escape(self._filename)}.*.rows")):
                if path not in self._seen and self._is_added(path):
                    self._seen.add(path)

    def _is_added(self, path: str) -> bool:
        """Take up the rows of a file, if it is of this dataset; return False where it is to be looked at again."""
        try:
            key, total, places = self._files.index(path)
        except OSError as error:
            advice = f"; {MORE_FILES}" if is_short_of_files(error) else ""
            logger.warning("cache: expected to open %r, got %s; its rows are read anew%s.", path, error, advice)
            return False
        except ValueError as error:
            logger.warning("cache: expected rows in %r, got %s; they are read anew, remove the file.", path, error)
            return True
        if key == self._key and places:
            for number, place in places.items():
                self._places.setdefault(number, place)
            self.total = self.total if total is None else total
        return True

    @property
    def is_commit_due(self) -> bool:
        """Whether there are as many new rows as were committed: so files are few, and what a kill loses is, too."""
        return len(self._new) > 0 and len(self._new) >= self._n_committed

    def commit(self, total: int | None = None) -> None:
        """Make a file of the new rows; with `total`, which says that there are no others.

        Raises:
            DataError: when the file system refuses.
        """
        with self._lock:
            new, self._new = self._new, {}
            self.total = total if self.total is None else self.total
            if not new:
                return
            self._n_committed += len(new)
            path = f"{self._filename}.{secrets.token_hex(8)}.rows"
            self._seen.add(path)
            try:
                write_rows(Path(path), self._key, total, sorted(new.items()))
            except OSError as error:
                raise DataError(
                    f"cache: expected {path!r} to be written, got {error}; "
                    f"{MORE_FILES if is_short_of_files(error) else 'make room'}."
                ) from None


def _close(spool: Any, files: OpenFiles) -> None:
    spool.close()
    files.close()


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def store_of(filename: str | None, key: str) -> RowStore:
    """Return where rows are kept: in memory without a filename."""
    return MemoryStore() if filename is None else FileStore(filename, key)
