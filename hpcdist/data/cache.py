"""Rows that are read and mapped once, then kept in memory or in files."""

import contextlib
import glob
import json
import logging
import os
import re
import secrets
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from hpcdist.checkpoint.durable import Disk, in_order, replace_file, sweep_abandoned
from hpcdist.data.row_file import (
    StoredRow,
    blocks,
    content_of_file,
    pack,
    read_at,
    read_index,
    unpack,
    write_at,
)
from hpcdist.data.row_numbers import own_random_numbers
from hpcdist.data.rows import no_rows, stack, unstack
from hpcdist.data.sources import Description, Request, RowSource
from hpcdist.data.streams import Stream
from hpcdist.errors import DataError
from hpcdist.forks import make_rlock
from hpcdist.nest import Nest, map_nest
from hpcdist.plan.sample_order import Rows

#: End of the name of a file, behind the filename and a dot: "a" is another cache than "a.b".
_ROW_FILE = re.compile(r"[0-9a-f]{16}\.rows")
logger = logging.getLogger("hpcdist")

#: Files of rows that a store keeps open.
_OPEN_FILES = 16


class CachedSource(RowSource):
    """Rows that each process keeps once it has read them. With files, later processes and others find them too."""

    def __init__(self, source: RowSource, store: "MemoryStore | FileStore") -> None:
        self._source = source
        self._store = store
        self.n_rows = source.n_rows
        self.rows_of_files = source.rows_of_files
        self.n_sampled = source.n_sampled
        self.n_stages = source.n_stages
        self._no_rows: Nest = None

    def to_compare(self, rows: Rows) -> Any:
        """Return the rows as the source has them: rows that are compared are not kept."""
        return self._source.to_compare(rows)

    def describe(self) -> Description:
        """Return the description of the source: a cache changes no row."""
        return self._source.describe()

    def take(self, rows: Rows) -> Nest:
        """Return rows to look at, as the source has them: they are not kept."""
        return self._source.take(rows)

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request; missing ones are requested ahead, for a source that reads ahead.

        Their random numbers do not depend on the epoch: after a restart, rows that are kept in memory are read in
        another epoch.
        """
        self._store.refresh()
        ahead, now = tee((request, self._missing(request.rows)) for request in requests)
        fresh = self._source.take_requests(
            request.with_rows(missing).in_no_epoch() for request, missing in ahead if len(missing)
        )
        batch = next(now, None)
        while batch is not None:
            request, missing = batch
            fresh_rows = None
            if len(missing):
                fresh_rows = next(fresh)
            part = self._joined(request.rows, missing, fresh_rows)
            batch = next(now, None)
            # before the last part, as a loop that counts its steps asks for no more
            if batch is None:
                self._store.commit()
            yield part

    def _missing(self, rows: Rows) -> Rows:
        """Return the rows that are not in the store, each once, in ascending order."""
        stored = self._store.rows
        missing = [row for row in np.unique(rows).tolist() if row not in stored]
        return np.array(missing, np.int64)

    def _joined(self, rows: Rows, missing: Rows, fresh_rows: Nest) -> Nest:
        """Return rows from the store, to which the missing ones are added first."""
        if fresh_rows is not None:
            for number, row in zip(missing.tolist(), unstack(fresh_rows), strict=True):
                self._store.add(number, row)
        # in an endless pass: once all rows of a batch are stored, and the store has doubled since the last commit
        is_due = len(rows) > 0 and not len(missing) and self._store.has_doubled
        if is_due or len(self._store.rows) == self.n_rows:
            self._store.commit()
        if len(rows):
            return stack([self._store.get(row) for row in rows.tolist()])
        if self._no_rows is None:
            with own_random_numbers():
                first_row = np.zeros(min(1, self.n_rows), np.int64)
                self._no_rows = no_rows(self.take(first_row))
        return self._no_rows


def cached_stream(stream: Stream, store: "MemoryStore | FileStore") -> Stream:
    """Return a stream that is drawn until an epoch has come to its end; its rows are then read from the store."""

    def draw(epoch: int) -> Iterator[Nest]:
        store.refresh()
        if store.total is not None:
            yield from map(store.get, range(store.total))
            return
        n_drawn = 0
        for row in stream.draw(epoch):
            if n_drawn not in store.rows:
                store.add(n_drawn, row)
            yield row
            n_drawn += 1
        store.refresh()
        if store.total is None:  # else another process was first
            store.commit(n_drawn)

    return replace(stream, draw=draw)


class MemoryStore:
    """Rows by number, in the memory of this process.

    Attributes:
        rows: rows that are kept, by number.
        total: number of all rows, where it is known.
        has_doubled: whether rows should be written now; always False.
    """

    has_doubled = False

    def __init__(self) -> None:
        self.rows: dict[int, Nest] = {}
        self.total: int | None = None

    def add(self, number: int, row: Nest) -> None:
        """Keep a copy of a row: a view would keep the whole batch that it was read with."""
        self.rows[number] = map_nest(_copy, row)

    def get(self, number: int) -> Nest:
        """Return a row."""
        return self.rows[number]

    def refresh(self) -> None:
        """Do nothing: no other process adds rows."""

    def commit(self, total: int | None = None) -> None:
        """Record the number of all rows."""
        self.total = total


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return np.array(value)


class FileStore:
    """Rows by number, in files whose names begin with `filename`.

    New rows go to a file without a name, which is gone with the process however that ends. `commit` writes the rows
    that came since the last commit to a new file with a unique name, so any number of processes may write side by side.
    Safe for use by the caller's thread and the prefetch thread.

    Args:
        filename: beginning of the names of the files.
        description: description of the source.
        key: text of the caller, which tells caches of one source apart.

    Raises:
        DataError: when there can be no file in the folder, or a file has another description or key.

    Attributes:
        rows: place of each row, by number.
        total: number of all rows, where it is known.
    """

    def __init__(self, filename: str, description: Description, key: str) -> None:
        self._filename = filename
        self._key = key
        self._description = json.loads(json.dumps(description))  # as it comes back from a file
        self.rows: dict[int, StoredRow] = {}
        self.total: int | None = None
        self._new: dict[int, StoredRow] = {}
        self._n_committed = 0
        self._end = 0
        self._seen: set[str] = set()
        self._lock = make_rlock()
        try:
            folder = os.path.dirname(filename) or "."
            self._spool = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed below
            with contextlib.suppress(OSError):  # leftovers are removed another time
                sweep_abandoned(Disk(), Path(folder), f"{os.path.basename(filename)}.*")
        except OSError as error:
            raise DataError(
                f"cache: expected a folder for {filename!r} in which files can be made, got {error}; make the folder."
            ) from None
        self._open: OrderedDict[str, int] = OrderedDict()
        weakref.finalize(self, _close, self._spool, self._open)
        self.refresh()

    @property
    def has_doubled(self) -> bool:
        """Whether there are as many new rows as committed ones: files stay few, and a kill loses at most half."""
        return len(self._new) > 0 and len(self._new) >= self._n_committed

    def add(self, number: int, row: Nest) -> None:
        """Keep a row."""
        layout, data = pack(row)
        with self._lock:
            try:
                write_at(self._spool, data, self._end)
            except OSError as error:
                raise self._no_room(self._filename, error) from None
            stored_row = StoredRow(
                path=None,
                start=self._end,
                n_bytes=len(data),
                layout=layout,
                checksum=xxh3_64_intdigest(data),
            )
            self.rows[number] = stored_row
            self._new[number] = stored_row
            self._end += len(data)

    def get(self, number: int) -> Nest:
        """Return a row.

        Raises:
            DataError: when the file is damaged or cannot be read.
        """
        row = self.rows[number]
        return unpack(row.layout, self._read(row))

    def _read(self, row: StoredRow) -> bytes:
        try:
            with self._lock:
                data = read_at(self._descriptor(row.path), row.n_bytes, row.start)
        except OSError as error:
            raise DataError(
                f"cache: expected a readable file of rows, got {error}; start again, and the rows of a file that is "
                f"gone are read anew."
            ) from None
        if xxh3_64_intdigest(data) != row.checksum:
            raise DataError(
                f"cache: expected the row as it was written, got another one from {row.path or self._filename!r}, "
                f"which is damaged; remove the file, and its rows are read anew."
            )
        return data

    def _descriptor(self, path: str | None) -> int:
        """Return a descriptor of a file; those that were used last stay open."""
        if path is None:
            return self._spool.fileno()
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                _, oldest_descriptor = self._open.popitem(last=False)
                os.close(oldest_descriptor)
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return self._open[path]

    def refresh(self) -> None:
        """Find the files that other processes have written since the last time.

        Raises:
            DataError: when a file has another description or key, or cannot be read.
        """
        with self._lock:
            pattern = f"{glob.escape(self._filename)}.*.rows"
            for path in sorted(glob.glob(pattern)):
                name = path.removeprefix(f"{self._filename}.")
                if path not in self._seen and _ROW_FILE.fullmatch(name):
                    self._add_file(path)
                    self._seen.add(path)

    def _add_file(self, path: str) -> None:
        try:
            index, rows = read_index(path, self._descriptor(path))
        except FileNotFoundError:  # removed since it was listed
            return
        except OSError as error:
            raise DataError(
                f"cache: expected a readable file of rows, got {error}; allow reading, or remove it."
            ) from None
        except ValueError as error:
            logger.warning(
                "cache: expected rows in %r, got %s; they are read anew: remove the file.",
                path,
                error,
            )
            return
        for name, expected in (("description", self._description), ("key", self._key)):
            actual = index[name]
            if actual != expected:
                raise DataError(
                    f"cache: expected rows with the {name} {json.dumps(expected)}, got {json.dumps(actual)} in "
                    f"{path!r}; remove the files {self._filename}.*.rows, or give another filename or key."
                )
        for number, row in rows.items():
            self.rows.setdefault(number, row)
        if self.total is None:
            self.total = index["total"]

    def commit(self, total: int | None = None) -> None:
        """Write a file of the new rows, whole or not at all.

        Args:
            total: number of all rows, where it is known.

        Raises:
            DataError: when the file system refuses.
        """
        with self._lock:
            if self.total is None:
                self.total = total
            if not self._new:
                return
            path = f"{self._filename}.{secrets.token_hex(8)}.rows"
            header = {"description": self._description, "key": self._key, "total": total}
            try:
                pieces = blocks(content_of_file(header, self._new, self._read))
                replace_file(Disk(), Path(path), in_order(pieces), is_swept=True)
            except OSError as error:
                raise self._no_room(path, error) from None
            self._seen.add(path)
            self._n_committed += len(self._new)
            self._new = {}

    @staticmethod
    def _no_room(path: str, error: OSError) -> DataError:
        return DataError(
            f"cache: expected {path!r} to be written, got {error}; make room on the disk, or leave the filename out to "
            f"keep rows in memory."
        )


def _close(spool: Any, files: OrderedDict[str, int]) -> None:
    spool.close()
    for descriptor in files.values():
        os.close(descriptor)
