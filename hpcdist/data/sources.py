"""Sources of rows with random access: the base class, arrays in memory, shards and mapped rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

import numpy as np

from hpcdist.data.batches import Shard
from hpcdist.data.rows import Function, apply, n_rows_of, no_rows, spec_of, stack, unstack, zeros_like
from hpcdist.errors import DataError
from hpcdist.nest import Nest, form_of, leaves, map_nest, with_leaves
from hpcdist.plan.sample_order import Rows

#: Arrays up to this size are compared in full; of larger ones, a sample of rows.
_COMPARED_BYTES = 16 << 20
#: What a source says of itself: JSON.
Description = dict[str, Any]


class RowSource(ABC):
    """Rows that can be read in any order. Subclass it for a source of your own, for `Dataset.from_source`.

    A source sets `n_rows` and defines `take`; the dataset adds the order, the division among replicas and the cursor.

    >>> class Squares(hpcdist.RowSource):
    ...     n_rows = 100
    ...     def take(self, rows):
    ...         return {"x": rows, "y": rows**2}
    >>> dataset = hpcdist.Dataset.from_source(Squares()).shuffle(seed=1).batch(10)

    With `prefetch`, `take` is called in a thread.

    Attributes:
        n_rows: how many there are.
        rows_of_files: rows of each file, in the order of the rows; empty when rows are not read from files. With it
            AutoShardPolicy.FILE can divide the source.
        n_sampled: rows that ranks compare when a dataset is distributed.
        chunk_rows: rows that cost as much to read as one of them, rows 0 to chunk_rows - 1 and so on. Where it is more
            than 1, `shuffle(buffer_size)` mixes no more than buffer_size rows at a time, and tells `keeping`.
    """

    n_rows: int
    rows_of_files: tuple[int, ...] = ()
    n_sampled: int = 5
    chunk_rows: int = 1

    @abstractmethod
    def take(self, rows: Rows) -> Nest:
        """Return the given rows as a nest of (len(rows), ...) arrays or tensors.

        Args:
            rows: (n,) int64 numbers from 0 to n_rows - 1 in any order; n may be 0, and a row may be asked for twice.
        """

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request. A source that reads ahead may take requests early."""
        return map(self.take, requests)

    def keeping(self, n_rows: int) -> "RowSource":
        """Return the source that keeps the rows of the last chunks it has read, `n_rows` rows and a chunk."""
        return self

    def to_compare(self, rows: Rows) -> Any:
        """Return what must be equal on all ranks of some rows: a nest of arrays, numbers and texts; None for nothing.

        Override it where `take` is expensive, or gives each rank something else on purpose. Rows that differ between
        two reads, such as randomly transformed ones, are not compared.
        """
        return self.take(rows)

    def describe(self) -> Description:
        """Return the description of the source that a file of cached rows records, as JSON.

        Override it with what tells two sources of one class apart, such as a path and its time of change.
        """
        return {"kind": type(self).__name__, "n_rows": self.n_rows}


class ArraySource(RowSource):
    """Rows of a nest of arrays in memory."""

    def __init__(self, tensors: Nest, n_rows: int) -> None:
        self.tensors, self.n_rows = tensors, n_rows
        nbytes = sum(int(getattr(array, "nbytes", 0)) for array in leaves(tensors))
        self.n_sampled = n_rows if nbytes <= _COMPARED_BYTES else 64

    def take(self, rows: Rows) -> Nest:
        """Return the rows, copied."""
        return map_nest(lambda array: array[rows], self.tensors)

    def describe(self) -> Description:
        """Return the shapes and dtypes of the arrays."""
        arrays = [[*map(int, array.shape), str(array.dtype)] for array in leaves(self.tensors)]
        return {**super().describe(), "arrays": arrays}


class ShardSource(RowSource):
    """The rows of one shard of a source."""

    def __init__(self, source: RowSource, shard: Shard) -> None:
        self._source, self._shard = source, shard
        self.n_rows, self.rows_of_files = shard.n_rows, shard.rows_of_files

    def take(self, rows: Rows) -> Nest:
        """Return rows by their numbers in the shard."""
        return self._source.take(self._shard.source_rows(rows))

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request."""
        return self._source.take_many(map(self._shard.source_rows, requests))

    def to_compare(self, rows: Rows) -> Any:
        """Return what must be equal on all ranks of some rows."""
        return self._source.to_compare(self._shard.source_rows(rows))

    def describe(self) -> Description:
        """Return the source and which of its rows these are."""
        return {"kind": "shard", "of": self._source.describe(), "shard": self._shard.describe()}


class ZippedSource(RowSource):
    """Rows of several sources side by side: row i is the nest of their rows i."""

    def __init__(self, sources: Nest) -> None:
        self._sources = sources
        self.n_rows = min(source.n_rows for source in leaves(sources))
        self.n_sampled = min(source.n_sampled for source in leaves(sources))

    def take(self, rows: Rows) -> Nest:
        """Return the nest of the sources' rows."""
        return map_nest(lambda source: source.take(rows), self._sources)

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request; each source may read ahead."""
        copies = tee(requests, len(leaves(self._sources)))
        found = [source.take_many(own) for source, own in zip(leaves(self._sources), copies, strict=True)]
        for parts in zip(*found, strict=True):
            yield with_leaves(self._sources, parts)

    def to_compare(self, rows: Rows) -> Any:
        """Return what must be equal on all ranks of some rows."""
        return [source.to_compare(rows) for source in leaves(self._sources)]

    def describe(self) -> Description:
        """Return the sources."""
        return {**super().describe(), "of": [source.describe() for source in leaves(self._sources)]}


def require_kind(rows: Nest, kind: str | None = None) -> str:
    """Return form and dtypes of rows or of a batch as text.

    Raises:
        DataError: when they are not of a given kind.
    """
    dtypes = [str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves(rows)]
    names = ["text" if dtype.startswith("<U") else dtype for dtype in dtypes]  # of any length
    found = f"{form_of(rows)} of {', '.join(names)}"
    if kind is not None and found != kind:
        raise DataError(
            f"concatenate: expected elements of one form and dtype, got {found} behind {kind}; convert them in map."
        )
    return found


class JoinedSource(RowSource):
    """Rows of one source, then those of another.

    Raises:
        DataError: when their rows differ in form or dtype.
    """

    def __init__(self, first: RowSource, second: RowSource) -> None:
        self._sources = first, second
        kind = None
        for source in self._sources:
            kind = require_kind(source.take(np.zeros(1, np.int64)), kind) if source.n_rows else kind
        self.n_rows = first.n_rows + second.n_rows
        self.n_sampled = first.n_sampled + second.n_sampled
        if first.rows_of_files and second.rows_of_files:
            self.rows_of_files = first.rows_of_files + second.rows_of_files

    def take(self, rows: Rows) -> Nest:
        """Return rows by their numbers in both.

        Raises:
            DataError: when the sources' rows differ in form or shape.
        """
        is_second = rows >= self._sources[0].n_rows
        if not is_second.any():
            return self._sources[0].take(rows)
        if is_second.all():
            return self._sources[1].take(rows - self._sources[0].n_rows)
        parts = [self._sources[0].take(rows[~is_second])]
        parts.append(self._sources[1].take(rows[is_second] - self._sources[0].n_rows))
        order = np.argsort(np.argsort(is_second, kind="stable"), kind="stable")
        joined = stack([row for part in parts for row in unstack(part)])
        return map_nest(lambda array: array[order], joined)

    def to_compare(self, rows: Rows) -> Any:
        """Return what must be equal on all ranks of some rows."""
        first, second = self._sources
        return [
            first.to_compare(rows[rows < first.n_rows]),
            second.to_compare(rows[rows >= first.n_rows] - first.n_rows),
        ]

    def describe(self) -> Description:
        """Return both sources."""
        return {**super().describe(), "of": [source.describe() for source in self._sources]}


class Mapped(RowSource):
    """Rows with functions applied to each."""

    def __init__(self, source: RowSource, functions: tuple[Function, ...]) -> None:
        self._source, self._functions = source, functions
        self.n_rows, self.rows_of_files, self.n_sampled = source.n_rows, source.rows_of_files, source.n_sampled
        self._no_rows: Nest = None

    def take(self, rows: Rows) -> Nest:
        """Return the mapped rows. For none, one row is mapped, once, which gives their shapes and dtypes."""
        return self._mapped(self._source.take(rows))

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the mapped rows of every request."""
        return map(self._mapped, self._source.take_many(requests))

    def to_compare(self, rows: Rows) -> Any:
        """Return the rows before they are mapped: the functions may be random."""
        return self._source.to_compare(rows)

    def _mapped(self, part: Nest) -> Nest:
        if n_rows_of(part):
            return stack([apply(self._functions, row) for row in unstack(part)])
        if self._no_rows is None:
            first = self._source.take(np.zeros(1, np.int64)) if self.n_rows else zeros_like(spec_of(part, 1))
            self._no_rows = no_rows(self._mapped(first))
        return self._no_rows

    def describe(self) -> Description:
        """Return the source and the number of functions; what they do is not looked at."""
        return {"kind": "mapped", "of": self._source.describe(), "functions": len(self._functions)}


def mapped(source: RowSource, functions: tuple[Function, ...]) -> RowSource:
    """Return the source with functions applied to every row."""
    return Mapped(source, functions) if functions else source
