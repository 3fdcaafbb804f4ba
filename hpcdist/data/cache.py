"""Rows that are read and mapped once, then kept in memory or in files."""

from collections.abc import Iterable, Iterator
from itertools import tee

import numpy as np

from hpcdist.data.row_store import store_of
from hpcdist.data.rows import no_rows, stack, unstack
from hpcdist.data.sources import RowSource
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import Rows


class Cached(RowSource):
    """Rows that are kept once they were read: each process keeps the rows that it has read itself.

    In files they are found by other processes too: at the end of a pass, when all rows are there, and in between.
    """

    def __init__(self, source: RowSource, filename: str | None) -> None:
        self._source, self._filename = source, filename
        self._store = store_of(filename, "" if filename is None else source.describe())
        self.n_rows, self.n_files = source.n_rows, source.n_files

    def describe(self) -> str:
        """Return what the rows are kept as."""
        return self._source.describe()

    def of_files(self, numbers: range) -> RowSource:
        """Return rows of some of the files alone, kept by themselves."""
        return Cached(self._source.of_files(numbers), self._filename)

    def take(self, rows: Rows) -> Nest:
        """Return rows, reading those that were not read before."""
        missing = self._missing(rows)
        return self._joined(rows, missing, self._source.take(missing) if len(missing) else None)

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request; what is not yet kept is asked for ahead, if the source reads ahead."""
        self._store.refresh()
        ahead, now = tee((rows, self._missing(rows)) for rows in requests)
        fresh = self._source.take_many(missing for _, missing in ahead if len(missing))
        current = next(now, None)
        while current is not None:
            rows, missing = current
            part = self._joined(rows, missing, next(fresh) if len(missing) else None)
            current = next(now, None)
            if current is None:
                self._store.commit()
            yield part

    def _missing(self, rows: Rows) -> Rows:
        return np.array([row for row in np.unique(rows) if int(row) not in self._store], np.int64)

    def _joined(self, rows: Rows, missing: Rows, fresh: Nest) -> Nest:
        if fresh is not None:
            for number, row in zip(missing.tolist(), unstack(fresh), strict=True):
                self._store[number] = row
        is_again = len(rows) > 0 and not len(missing)
        if len(self._store) == self.n_rows or (is_again and self._store.is_commit_due):
            self._store.commit()
        if len(rows):
            return stack([self._store[row] for row in rows.tolist()])
        return no_rows(self.take(np.zeros(1, np.int64))) if self.n_rows else self._source.take(rows)
