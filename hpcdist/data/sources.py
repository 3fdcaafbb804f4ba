"""Sources of rows with random access: the base class, arrays in memory, shards and mapped rows."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any

import numpy as np

from hpcdist.data.batches import Shard
from hpcdist.data.row_numbers import RowNumbers, RowSeeds, own_random_numbers
from hpcdist.data.rows import (
    Function,
    apply,
    n_rows_of,
    no_rows,
    spec_of,
    stack,
    unstack,
    zeros_like,
)
from hpcdist.errors import DataError
from hpcdist.nest import Nest, form_of, leaves, map_nest, with_leaves
from hpcdist.plan.sample_order import Rows

#: Arrays up to this size are compared in full; of larger ones, a sample of rows.
_COMPARED_BYTES = 16 << 20
#: Description of a source, as JSON.
Description = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Rows that are asked for at once.

    Attributes:
        rows: (n,) int64 numbers of the rows.
        numbers: caller of the functions that read and map the rows.
        seeds: seeds of the rows' random numbers. None leaves the numbers as they come.
    """

    rows: Rows
    numbers: RowNumbers
    seeds: RowSeeds | None = None

    def with_rows(self, rows: Rows, branch: Any = None) -> "Request":
        """Return a request for rows of another source.

        Args:
            rows: numbers of the rows in the other source.
            branch: name that tells the source apart, where several are asked for the same rows.
        """
        if self.seeds is None or branch is None:
            return replace(self, rows=rows)
        return replace(self, rows=rows, seeds=self.seeds.branch(branch))

    def in_no_epoch(self) -> "Request":
        """Return the request with random numbers that are the same in every epoch."""
        if self.seeds is None:
            return self
        seeds = replace(self.seeds, epoch=-1, first=None)
        return replace(self, seeds=seeds)

    def call(self, function: Any, *arguments: Any, stage: int = 0) -> Any:
        """Return the result of a function that reads, or maps, all rows at once."""
        seeds = self.seeds
        if seeds is None or not len(self.rows):
            return self.numbers.call(None, function, *arguments)
        return self.numbers.call(
            lambda: seeds.of_all(int(self.rows[0]), stage), function, *arguments
        )

    def call_once(self, function: Any, *arguments: Any) -> Any:
        """Return the result of a function that reads all rows at once, and is not to be called twice."""
        seeds = self.seeds
        if seeds is None or not len(self.rows):
            return self.numbers.call_once(None, function, *arguments)
        return self.numbers.call_once(lambda: seeds.of_all(int(self.rows[0])), function, *arguments)

    def call_for_rows(self, stage: int, function: Any, values: Sequence[Any]) -> list[Any]:
        """Return the result of a function that maps a row, for each row."""
        return self.numbers.call_for_rows(self._row_seeds(stage), function, values)

    def _row_seeds(self, stage: int) -> Callable[[int], int] | None:
        """Return a function that returns the seed of a row by its index; None where numbers are not seeded."""
        seeds = self.seeds
        if seeds is None:
            return None
        return lambda index: seeds.of_row(index, int(self.rows[index]), stage)


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
        n_rows: number of rows.
        rows_of_files: rows of each file, in the order of the rows; empty when rows are not read from files. With it
            AutoShardPolicy.FILE can divide the source.
        n_sampled: number of rows that ranks compare when a dataset is distributed.
        n_stages: number of functions that, one after another, may draw random numbers for a row.
        chunk_rows: number of rows that together cost as much to read as one of them, rows 0 to chunk_rows - 1 and so
            on. Where it is more than 1, `shuffle(buffer_size)` mixes no more than buffer_size rows at a time, and calls
            `keeping`.
    """

    n_rows: int
    rows_of_files: tuple[int, ...] = ()
    n_sampled: int = 5
    n_stages: int = 1
    chunk_rows: int = 1

    @abstractmethod
    def take(self, rows: Rows) -> Nest:
        """Return rows as a nest of (len(rows), ...) arrays or tensors.

        Args:
            rows: (n,) int64 numbers from 0 to n_rows - 1 in any order; n may be 0, and a row may come twice.
        """

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the rows of every request. A source that reads ahead may take requests early."""
        return map(self.take, requests)

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request, for which random numbers are seeded."""
        for_reader, now = tee(requests)
        if type(self).take_many is RowSource.take_many:
            for request in now:
                yield request.call(self.take, request.rows)
            return
        parts = iter(self.take_many(request.rows for request in for_reader))
        for request in now:
            was_drawing = request.numbers.is_drawing
            part = request.call_once(next, parts)
            if request.numbers.is_drawing and not was_drawing:
                part = request.call(self.take, request.rows)
            yield part

    def keeping(self, n_rows: int) -> "RowSource":
        """Return the source that keeps the rows of the last chunks it has read, `n_rows` rows and a chunk."""
        return self

    def to_compare(self, rows: Rows) -> Any:
        """Return the content of some rows that must be equal on all ranks, as a nest; None if there is none.

        The nest holds arrays, numbers and texts. Override it where `take` is expensive, or gives each rank something
        else on purpose. Rows that differ between two reads, such as randomly transformed ones, are not compared.
        """
        return self.take(rows)

    def describe(self) -> Description:
        """Return the description of the source that a file of cached rows records, as JSON.

        Override it to add facts that tell two sources of one class apart, such as a path and its time of change.
        """
        return {"kind": type(self).__name__, "n_rows": self.n_rows}


class ArraySource(RowSource):
    """Rows of a nest of arrays in memory."""

    def __init__(self, tensors: Nest, n_rows: int) -> None:
        self.tensors = tensors
        self.n_rows = n_rows
        nbytes = sum(int(getattr(array, "nbytes", 0)) for array in leaves(tensors))
        self.n_sampled = n_rows
        if nbytes > _COMPARED_BYTES:
            self.n_sampled = 64

    def take(self, rows: Rows) -> Nest:
        """Return the rows, copied."""
        return map_nest(lambda array: array[rows], self.tensors)

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request; nothing is drawn at random."""
        return (self.take(request.rows) for request in requests)

    def describe(self) -> Description:
        """Return the shapes and dtypes of the arrays."""
        arrays: list[list[int | str]] = []
        for array in leaves(self.tensors):
            shape = map(int, array.shape)
            arrays.append([*shape, str(array.dtype)])
        return {**super().describe(), "arrays": arrays}


class ShardSource(RowSource):
    """The rows of one shard of a source."""

    def __init__(self, source: RowSource, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        self.n_rows = shard.n_rows
        self.rows_of_files = shard.rows_of_files
        self.n_stages = source.n_stages

    def take(self, rows: Rows) -> Nest:
        """Return rows by their numbers in the shard."""
        return self._source.take(self._shard.source_rows(rows))

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request, for which random numbers are seeded."""
        return self._source.take_requests(
            request.with_rows(self._shard.source_rows(request.rows)) for request in requests
        )

    def to_compare(self, rows: Rows) -> Any:
        """Return the content of some rows that must be equal on all ranks."""
        return self._source.to_compare(self._shard.source_rows(rows))

    def describe(self) -> Description:
        """Return the source and which of its rows these are."""
        return {
            "kind": "shard",
            "of": self._source.describe(),
            "shard": self._shard.describe(),
        }


class ZippedSource(RowSource):
    """Rows of several sources side by side: row i is the nest of their rows i."""

    def __init__(self, sources: Nest) -> None:
        self._sources = sources
        members = leaves(sources)
        self.n_rows = min(source.n_rows for source in members)
        self.n_sampled = min(source.n_sampled for source in members)
        self.n_stages = max(source.n_stages for source in members)

    def take(self, rows: Rows) -> Nest:
        """Return the nest of the sources' rows."""
        return map_nest(lambda source: source.take(rows), self._sources)

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request, for which random numbers are seeded; each source may read ahead."""
        sources = leaves(self._sources)
        copies = tee(requests, len(sources))
        readers: list[Iterator[Nest]] = []
        for number, (source, copy) in enumerate(zip(sources, copies, strict=True)):
            source_requests = _branched(copy, number)
            readers.append(source.take_requests(source_requests))
        for parts in zip(*readers, strict=True):
            yield with_leaves(self._sources, parts)

    def to_compare(self, rows: Rows) -> Any:
        """Return the content of some rows that must be equal on all ranks."""
        return [source.to_compare(rows) for source in leaves(self._sources)]

    def describe(self) -> Description:
        """Return the sources."""
        descriptions = [source.describe() for source in leaves(self._sources)]
        return {**super().describe(), "of": descriptions}


def require_kind(rows: Nest, kind: str | None = None) -> str:
    """Return form and dtypes of rows or of a batch as text.

    Raises:
        DataError: when `kind` is another one.
    """
    names: list[str] = []
    for leaf in leaves(rows):
        name = str(getattr(leaf, "dtype", type(leaf).__name__))
        if name.startswith("<U"):
            name = "text"  # of any length
        names.append(name)
    joined_names = ", ".join(names)
    new_kind = f"{form_of(rows)} of {joined_names}"
    if kind is not None and new_kind != kind:
        raise DataError(
            f"concatenate: expected elements of one form and dtype, got {new_kind} behind {kind}; convert them in map."
        )
    return new_kind


def _branched(requests: Iterable[Request], branch: int) -> Iterator[Request]:
    """Yield requests for the same rows of another source."""
    for request in requests:
        yield request.with_rows(request.rows, branch)


class JoinedSource(RowSource):
    """Rows of one source, then those of another.

    Raises:
        DataError: when their rows differ in form or dtype.
    """

    def __init__(self, first: RowSource, second: RowSource) -> None:
        self._sources = first, second
        kind: str | None = None
        with own_random_numbers():
            for source in self._sources:
                if source.n_rows:
                    first_row = source.take(np.zeros(1, np.int64))
                    kind = require_kind(first_row, kind)
        self.n_rows = first.n_rows + second.n_rows
        self.n_sampled = first.n_sampled + second.n_sampled
        self.n_stages = max(first.n_stages, second.n_stages)
        if first.rows_of_files and second.rows_of_files:
            self.rows_of_files = first.rows_of_files + second.rows_of_files

    def take(self, rows: Rows) -> Nest:
        """Return rows by their numbers in both sources together.

        Raises:
            DataError: when the sources' rows differ in form or shape.
        """
        request = Request(rows, RowNumbers())
        return next(self.take_requests(iter((request,))))

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the rows of every request, for which random numbers are seeded; each source may read ahead."""
        of_first, of_second, now = tee(requests, 3)
        first_parts = self._sources[0].take_requests(self._requests_of(of_first, is_second=False))
        second_parts = self._sources[1].take_requests(self._requests_of(of_second, is_second=True))
        for request in now:
            is_second = request.rows >= self._sources[0].n_rows
            if not len(is_second) or not is_second.any():
                yield next(first_parts)
            elif is_second.all():
                yield next(second_parts)
            else:
                yield _in_order(next(first_parts), next(second_parts), is_second)

    def _requests_of(self, requests: Iterable[Request], is_second: bool) -> Iterator[Request]:
        """Yield the requests for one of the sources; a request for no rows goes to the first source."""
        n_first = self._sources[0].n_rows
        for request in requests:
            rows = request.rows
            if is_second:
                rows = rows[rows >= n_first] - n_first
            elif len(rows):
                rows = rows[rows < n_first]
            if len(rows) or (not is_second and not len(request.rows)):
                yield request.with_rows(rows, f"second {is_second}")

    def to_compare(self, rows: Rows) -> Any:
        """Return the content of some rows that must be equal on all ranks."""
        first, second = self._sources
        return [
            first.to_compare(rows[rows < first.n_rows]),
            second.to_compare(rows[rows >= first.n_rows] - first.n_rows),
        ]

    def describe(self) -> Description:
        """Return both sources."""
        descriptions = [source.describe() for source in self._sources]
        return {**super().describe(), "of": descriptions}


class Mapped(RowSource):
    """Rows with functions applied to each."""

    def __init__(self, source: RowSource, functions: tuple[Function, ...]) -> None:
        self._source = source
        self._functions = functions
        self.n_rows = source.n_rows
        self.rows_of_files = source.rows_of_files
        self.n_sampled = source.n_sampled
        self.n_stages = source.n_stages + 1
        self._no_rows: Nest = None

    def take(self, rows: Rows) -> Nest:
        """Return the mapped rows. For none, one row is mapped, once, which gives their shapes and dtypes."""
        return self._mapped(Request(rows, RowNumbers()), self._source.take(rows))

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the mapped rows of every request, for each of which random numbers are seeded."""
        for_source, now = tee(requests)
        parts = self._source.take_requests(for_source)
        for request in now:
            yield self._mapped(request, next(parts))

    def to_compare(self, rows: Rows) -> Any:
        """Return the rows before they are mapped: the functions may be random."""
        return self._source.to_compare(rows)

    def _mapped(self, request: Request, part: Nest) -> Nest:
        if n_rows_of(part):
            map_row = functools.partial(apply, self._functions)
            rows = request.call_for_rows(self._source.n_stages, map_row, unstack(part))
            return stack(rows)
        if self._no_rows is None:
            first = zeros_like(spec_of(part, 1))
            with own_random_numbers():
                if self.n_rows:
                    first = self._source.take(np.zeros(1, np.int64))
                mapped_rows = [apply(self._functions, row) for row in unstack(first)]
                self._no_rows = no_rows(stack(mapped_rows))
        return self._no_rows

    def describe(self) -> Description:
        """Return the source and the number of functions; the code of the functions is not looked at."""
        return {
            "kind": "mapped",
            "of": self._source.describe(),
            "functions": len(self._functions),
        }


def _in_order(first: Nest, second: Nest, is_second: Any) -> Nest:
    """Return the rows of two parts in the order in which they were asked for."""
    order = np.argsort(np.argsort(is_second, kind="stable"), kind="stable")
    joined = stack([*unstack(first), *unstack(second)])
    return map_nest(lambda array: array[order], joined)


def mapped(source: RowSource, functions: tuple[Function, ...]) -> RowSource:
    """Return the source with functions applied to every row."""
    if not functions:
        return source
    return Mapped(source, functions)
