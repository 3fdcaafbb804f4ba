"""Sources with random access: rows by number, from arrays in memory and from other sources."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np

from hpcdist.data.identity import digest_of
from hpcdist.data.rows import Function, apply, no_rows, spec_of, stack, unstack, zeros_like
from hpcdist.errors import DataError
from hpcdist.nest import Nest, leaves, map_nest
from hpcdist.plan.sample_order import Rows


class RowSource(ABC):
    """Rows that can be read in any order.

    Attributes:
        n_rows: how many there are.
        n_files: files that they are read from; 0 when they are not.
    """

    n_rows: int
    n_files = 0

    @abstractmethod
    def take(self, rows: Rows) -> Nest:
        """Return the given rows of every array, (len(rows), ...) each; `rows` may be empty."""

    def describe(self) -> str:
        """Return what tells its rows from those of other sources, in this process and later ones; see `digest_of`.

        Raises:
            DataError: when that cannot be told.
        """
        return f"{type(self).__name__} of {self.n_rows} rows"

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request. A source that reads ahead does so here."""
        return map(self.take, requests)

    def of_files(self, numbers: range) -> "RowSource":
        """Return the rows of some of the files alone.

        Raises:
            DataError: for rows that are not read from files.
        """
        raise DataError(
            f"shard: expected rows that are read from files, got {type(self).__name__}; use AutoShardPolicy.DATA."
        )


class ArraySource(RowSource):
    """Rows of arrays in memory."""

    def __init__(self, tensors: Nest, n_rows: int) -> None:
        self.tensors, self.n_rows = tensors, n_rows

    def describe(self) -> str:
        """Return a digest of all the rows. Cost: they are read once."""
        return f"{super().describe()} {digest_of(self.tensors)}"

    def take(self, rows: Rows) -> Nest:
        """Return the rows, copied."""
        return map_nest(lambda array: array[rows], self.tensors)


class EveryNth(RowSource):
    """Rows index, index + n, index + 2n, ... of a source."""

    def __init__(self, source: RowSource, n_shards: int, index: int) -> None:
        self._source, self._n_shards, self._index = source, n_shards, index
        self.n_rows = len(range(index, source.n_rows, n_shards))

    def describe(self) -> str:
        """Return which rows they are of which source."""
        return f"{self._source.describe()}[{self._index}::{self._n_shards}]"

    def take(self, rows: Rows) -> Nest:
        """Return the rows, numbered within the shard."""
        return self._source.take(rows * self._n_shards + self._index)

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request."""
        return self._source.take_many(rows * self._n_shards + self._index for rows in requests)


class Mapped(RowSource):
    """Rows that functions were applied to, one row at a time."""

    def __init__(self, source: RowSource, functions: tuple[Function, ...]) -> None:
        self._source, self._functions = source, functions
        self.n_rows, self.n_files = source.n_rows, source.n_files
        self._no_rows: Nest = None

    def describe(self) -> str:
        """Return the source and a digest of the functions."""
        return f"{self._source.describe()} {digest_of(self._functions)}"

    def of_files(self, numbers: range) -> RowSource:
        """Return the mapped rows of some of the files alone."""
        return Mapped(self._source.of_files(numbers), self._functions)

    def take(self, rows: Rows) -> Nest:
        """Return the mapped rows; for none of them, one row is mapped, once, to see what they look like."""
        return self._mapped(self._source.take(rows))

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the mapped rows of every request."""
        return map(self._mapped, self._source.take_many(requests))

    def _mapped(self, nest: Nest) -> Nest:
        if len(leaves(nest)[0]):
            return stack([apply(self._functions, row) for row in unstack(nest)])
        if self._no_rows is None:
            first = self._source.take(np.zeros(1, np.int64)) if self.n_rows else zeros_like(spec_of(nest, 1))
            self._no_rows = no_rows(self._mapped(first))
        return self._no_rows
