"""Datasets made of the elements of other datasets: filter, skip, zip, concatenate, interleave, unbatch, padded batches.

Where the rows of all of them can be read in any order, the rows of the result can be, too, and a run resumes at any
sample at once. Else the result is a stream: its epoch n is made of pass n of its parts, so that it is the same on all
ranks and after a restart, which draws the epoch again up to the cursor.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.utils.data

from hpcdist.data.batches import DividedBatches, RowRange, start_of_pass
from hpcdist.data.iterator import Pipeline, PipelineReader
from hpcdist.data.rows import apply, padded, stack, unstack
from hpcdist.data.sources import (
    JoinedSource,
    RowSource,
    ShardSource,
    ZippedSource,
    mapped,
    require_kind,
)
from hpcdist.data.streams import Stream, StreamParts
from hpcdist.errors import DataError
from hpcdist.nest import Nest, leaves, map_nest, with_leaves
from hpcdist.plan.sample_order import UNKNOWN, SampleOrder

Self = TypeVar("Self", bound="Elements")
#: Results of `cardinality` for a dataset without end, and for one of unknown length, as in tf.data.
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


@dataclass(frozen=True)
class Elements(Pipeline):
    """A pipeline whose elements, rows or batches, other datasets are made of.

    Attributes:
        has_drawn_seed: whether the seed of the order was drawn, and not set by the program.
        has_shard_hint: whether the place of a shard is marked, which a strategy puts there.
    """

    has_drawn_seed: bool = False
    has_shard_hint: bool = False

    @classmethod
    def from_dataset_like(cls: type[Self], dataset_like: Any, call: str, advice: str) -> Self:
        """Return a dataset, also for a torch dataset or DataLoader.

        Args:
            dataset_like: object that a program passed, or returned.
            call: name of the method that got it, for the message.
            advice: advice for the message.

        Raises:
            DataError: for anything but a dataset or a DataLoader.
        """
        if is_torch_data(dataset_like):
            return cls.from_torch(dataset_like)  # type: ignore[attr-defined, no-any-return]
        if not isinstance(dataset_like, cls):
            raise DataError(
                f"{call}: expected a dataset, got {type(dataset_like).__name__}; {advice}."
            )
        return dataset_like

    def elements(self, number: int) -> Iterator[Nest]:
        """Yield the batches, or single rows, of pass number `number` on this process alone."""
        cursor = start_of_pass(self.order, number)
        reader = PipelineReader(self, DividedBatches(self.order))
        for _, (part,) in reader.stages(cursor):
            yield part if self.order.batch_rows else map_nest(lambda array: array[0], part)

    # -- how many ----------------------------------------------------------------------------------------------------

    def cardinality(self) -> int:
        """Return how many elements a pass has: -1 for one without end, -2 where only drawing tells, as in tf.data."""
        order = self.order
        if isinstance(self.source, Stream):
            is_endless = math.isinf(order.inner_epochs * order.outer_epochs) and self._is_unlimited
            return INFINITE_CARDINALITY if is_endless else UNKNOWN_CARDINALITY
        if math.isinf(order.n_samples):
            return INFINITE_CARDINALITY
        if order.batch_rows is None:
            return int(order.n_samples)
        return order.n_batches

    @property
    def _is_unlimited(self) -> bool:
        order = self.order
        limits = (order.epoch_limit, order.run_limit, order.pass_limit)
        return all(map(math.isinf, limits))

    def __len__(self) -> int:
        """Return how many elements a pass has.

        Raises:
            TypeError: when it has no end, or only drawing tells.
        """
        n_elements = self.cardinality()
        if n_elements < 0:
            kind = "a stream, which tells by its end"
            if n_elements == INFINITE_CARDINALITY:
                kind = "one without end"
            raise TypeError(
                f"len: expected a dataset of known length, got {kind}; count its elements, or take some."
            )
        return n_elements

    def __bool__(self) -> bool:
        return True

    # -- fewer and more elements -------------------------------------------------------------------------------------

    def skip(self: Self, count: int) -> Self:
        """Leave out the first `count` elements of a pass; -1: all.

        Raises:
            DataError: below -1; after a `shuffle` without a seed.
        """
        if count < -1:
            raise DataError(
                f"skip: expected a count of at least 0, or -1, got {count}; -1 skips all."
            )
        rows = self._rows()
        if rows is not None:
            start = rows.n_rows if count == -1 else min(count, rows.n_rows)
            remaining_rows = RowRange(start, rows.n_rows)
            return self._over(ShardSource(rows, remaining_rows))

        def without_first(elements: Iterator[Nest]) -> Iterator[Nest]:
            if count == -1:
                return iter(())
            return itertools.islice(elements, count, None)

        return self._of_passes("skip", without_first)

    def filter(self: Self, predicate: Callable[..., Any]) -> Self:
        """Keep the elements for which a function returns True. The result is a stream.

        Args:
            predicate: function of an element; a tuple is passed as several arguments.

        Raises:
            DataError: after a `shuffle` without a seed.
        """

        def matching(elements: Iterator[Nest]) -> Iterator[Nest]:
            for element in elements:
                if apply((predicate,), element):
                    yield element

        return self._of_passes("filter", matching)

    def concatenate(self: Self, other: Any) -> Self:
        """Return the elements of this dataset, then the elements of a second one of the same form.

        Args:
            other: second dataset: a Dataset, or a torch dataset or DataLoader.

        Raises:
            DataError: when `other` is something else; when one dataset has batches and the other rows; when their
                elements differ in form or dtype; after a `shuffle` without a seed.

        Cost: a row of each is read at once, where rows can be read in any order.
        """
        advice = "pass an hpcdist.Dataset, or one of torch's"
        second = type(self).from_dataset_like(other, "concatenate", advice)
        first_source = self._rows()
        second_source = second._rows()
        if first_source is not None and second_source is not None:
            return self._over(JoinedSource(first_source, second_source))
        _require_alike("concatenate", [self, second])
        streams = [dataset._stream("concatenate") for dataset in (self, second)]

        def draw(epoch: int) -> Iterator[Nest]:
            kind = None
            for stream in streams:
                for number, element in enumerate(stream.draw(epoch)):
                    if number == 0:
                        kind = require_kind(element, kind)
                    yield element

        return self._over(_of(draw, streams[0]))

    @classmethod
    def zip(cls: type[Self], *datasets: Any) -> Self:
        """Return a dataset whose element i is the nest of the datasets' elements i; the shortest one ends it.

        Args:
            datasets: several datasets, for tuples of their elements; or one nest of datasets, for nests of their
                elements. Torch datasets and DataLoaders are datasets, too.

        Raises:
            DataError: when something is no dataset; when some have batches and others rows; after a `shuffle` without
                a seed.
        """
        nest = datasets if len(datasets) > 1 else datasets[0]
        advice = "pass hpcdist.Dataset objects, or torch's"
        members = [cls.from_dataset_like(leaf, "zip", advice) for leaf in leaves(nest)]
        if not members:
            raise DataError("zip: expected datasets, got nothing; pass hpcdist.Dataset objects.")
        sources = [member._rows() for member in members]
        if all(source is not None for source in sources):
            zipped: Self = members[0]._over(ZippedSource(with_leaves(nest, sources)))
            return zipped
        _require_alike("zip", members)
        streams = [member._stream("zip") for member in members]

        def draw(epoch: int) -> Iterator[Nest]:
            columns = [stream.draw(epoch) for stream in streams]
            for elements in zip(*columns, strict=False):
                yield with_leaves(nest, elements)

        dataset: Self = members[0]._over(_of(draw, streams[0]))
        return dataset

    def interleave(
        self: Self,
        map_func: Callable[..., "Elements"],
        cycle_length: int = 1,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Make a dataset of each element, and take their elements in turn, as in tf.data. The result is a stream.

        Args:
            map_func: function of an element that returns a dataset, also one of torch's or a DataLoader; a tuple is
                passed as several arguments.
            cycle_length: number of datasets that are open at a time.
            block_length: number of elements that are taken of one dataset before the next one.
            num_parallel_calls: number that is accepted as in tf.data, and not used: elements are drawn one after
                another.
            deterministic: flag that is accepted as in tf.data, and not used: the order is always the same.

        Raises:
            DataError: for lengths below 1; when `map_func` returns no dataset; after a `shuffle` without a seed.
        """
        if min(cycle_length, block_length) < 1:
            raise DataError(
                f"interleave: expected cycle_length and block_length of at least 1, got {cycle_length} and "
                f"{block_length}; 1 takes one element of one stream at a time."
            )
        stream = self._stream("interleave")

        def inner_elements(epoch: int) -> Iterator[Iterator[Nest]]:
            for element in stream.draw(epoch):
                dataset_like = apply((map_func,), element)
                advice = "let map_func return one"
                dataset = type(self).from_dataset_like(dataset_like, "interleave", advice)
                yield dataset._stream("interleave").draw(epoch)

        def draw(epoch: int) -> Iterator[Nest]:
            return _in_turn(inner_elements(epoch), cycle_length, block_length)

        return self._over(_of(draw, replace(stream, holds_batches=False)))

    def flat_map(self: Self, map_func: Callable[..., "Elements"]) -> Self:
        """Make a dataset of each element, and take the elements of one dataset after another; see `interleave`."""
        return self.interleave(map_func)

    # -- batches -----------------------------------------------------------------------------------------------------

    def unbatch(self: Self) -> Self:
        """Return the rows of batches, or of elements whose arrays have a first dimension of rows.

        Raises:
            DataError: after a `shuffle` without a seed, but for batches that were only grouped.
        """
        order = self.order
        is_plain = order.batch_rows is not None and not self.batch_maps and not self.holds_batches
        has_all_rows = not order.drop_remainder and math.isinf(order.pass_limit)
        if is_plain and has_all_rows and order.outer_epochs == 1:
            return replace(self, order=replace(order, batch_rows=None))
        stream = self._stream("unbatch")

        def draw(epoch: int) -> Iterator[Nest]:
            for batch in stream.draw(epoch):
                yield from unstack(batch)

        return self._over(_of(draw, replace(stream, holds_batches=False)))

    def padded_batch(
        self: Self,
        batch_size: int,
        padded_shapes: Nest = None,
        padding_values: Nest = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Group rows into batches whose arrays are padded at their ends to one shape.

        Where a size is not given, arrays are padded to the longest of the global batch, so every rank reads all rows
        of a batch; with all sizes given, each reads its own.

        Args:
            batch_size: number of rows of the global batch.
            padded_shapes: nest of the rows' form, with a shape for each array, in which None or -1 is the size of the
                longest array. By default, all sizes are.
            padding_values: nest of numbers, or one number for all arrays; default: 0.
            drop_remainder: whether a last short batch is left out.

        Raises:
            DataError: when there are batches already, or batch_size is below 1; at a row that is longer than its shape,
                or has another number of dimensions; after a `shuffle` without a seed, where a size is not given.
        """
        order = self.order
        if order.batch_rows is not None or batch_size < 1:
            kind = "rows" if order.batch_rows is None else "batches"
            raise DataError(
                f"padded_batch: expected rows and a batch_size of at least 1, got {batch_size} for {kind}; correct the "
                f"calls that build the dataset."
            )
        if padded_shapes is not None and _are_sizes_known(padded_shapes):
            pad_row = _PadRow(padded_shapes, padding_values)
            order = replace(order, batch_rows=batch_size, drop_remainder=drop_remainder)
            return replace(self, row_maps=(*self.row_maps, pad_row), order=order)
        stream = self._stream("padded_batch")

        def draw(epoch: int) -> Iterator[Nest]:
            rows = stream.draw(epoch)
            while batch := list(itertools.islice(rows, batch_size)):
                if len(batch) == batch_size or not drop_remainder:
                    yield stack(padded(batch, padded_shapes, padding_values))

        order = SampleOrder(UNKNOWN, batch_rows=batch_size, drop_remainder=drop_remainder)
        batches = self._over(_of(draw, replace(stream, holds_batches=True)))
        return replace(batches, order=order)

    # -- sources and streams of elements -----------------------------------------------------------------------------

    @property
    def holds_batches(self) -> bool:
        """Whether the dataset is a stream of whole batches."""
        return isinstance(self.source, Stream) and self.source.holds_batches

    def _rows(self) -> RowSource | None:
        """Return a source of the elements if they are rows in plain order that can be read in any order; else None."""
        order = self.order
        is_plain = replace(order, n_rows=0) == SampleOrder(0)
        if isinstance(self.source, Stream) or self.has_shard_hint or not is_plain:
            return None
        rows = mapped(self.source, self.row_maps)
        if order.n_rows == rows.n_rows:
            return rows
        return ShardSource(rows, RowRange(0, order.n_rows))

    def _stream(self, call: str) -> Stream:
        """Return a stream of the elements.

        Raises:
            DataError: when the program has set no seed of their order: ranks and restarts would draw other elements.
        """
        if self.has_shard_hint:
            raise DataError(
                f"{call}: expected a call before shard(SHARD_HINT, SHARD_HINT), got one after it; swap them."
            )
        if self.has_drawn_seed:
            raise DataError(
                f"{call}: expected shuffle(seed=...) before it, got a shuffle without a seed; give it one, so that all "
                f"ranks and restarts draw the same elements."
            )
        parts: StreamParts = ()
        if isinstance(self.source, Stream):
            parts = self.source.parts
        return Stream(
            self.elements,
            parts=(*parts, ("elements", 0, 0)),
            holds_batches=self.order.batch_rows is not None,
        )

    def _of_passes(
        self: Self,
        call: str,
        change: Callable[[Iterator[Nest]], Iterable[Nest]],
    ) -> Self:
        """Return a stream of the changed elements of each pass."""
        stream = self._stream(call)

        def draw(epoch: int) -> Iterator[Nest]:
            return iter(change(stream.draw(epoch)))

        return self._over(_of(draw, stream))

    def _over(self: Self, source: RowSource | Stream) -> Self:
        """Return a dataset of the same class and options over another source, in its plain order."""
        order = SampleOrder(source.n_rows)
        if isinstance(source, Stream) and source.holds_batches:
            order = replace(
                order,
                batch_rows=self.order.batch_rows,
                drop_remainder=self.order.drop_remainder,
            )
        return replace(self, source=source, order=order, row_maps=(), batch_maps=(), buffer_rows=0)


def _of(draw: Callable[[int], Iterator[Nest]], like: Stream) -> Stream:
    """Return a stream like another one that is drawn in another way."""
    return replace(like, draw=draw, signature=None)


def is_torch_data(candidate: Any) -> bool:
    """Return whether something is a dataset or DataLoader of torch."""
    return isinstance(candidate, (torch.utils.data.DataLoader, torch.utils.data.Dataset))


def _require_alike(call: str, datasets: Sequence[Elements]) -> None:
    if len({dataset.order.batch_rows is None for dataset in datasets}) > 1:
        raise DataError(
            f"{call}: expected datasets of rows, or of batches, got both; call batch before it, or after."
        )


def _in_turn(
    inner: Iterator[Iterator[Nest]],
    cycle_length: int,
    block_length: int,
) -> Iterator[Nest]:
    """Yield blocks of elements of `cycle_length` iterators in turn; one that ends gives its place to the next."""
    places: list[Iterator[Nest] | None] = list(itertools.islice(inner, cycle_length))
    while any(place is not None for place in places):
        for number, place in enumerate(places):
            if place is None:
                continue
            block = list(itertools.islice(place, block_length))
            yield from block
            if len(block) < block_length:
                places[number] = next(inner, None)


def _are_sizes_known(shapes: Nest) -> bool:
    """Return whether no size in a nest of shapes depends on the rows."""
    if isinstance(shapes, dict):
        return all(map(_are_sizes_known, shapes.values()))
    if _is_shape(shapes):
        return all(size is not None and size >= 0 for size in shapes)
    return all(map(_are_sizes_known, shapes))


def _is_shape(shapes: Nest) -> bool:
    """Return whether a nest of shapes is a single shape: a list or tuple of numbers and None."""
    if not isinstance(shapes, (list, tuple)):
        return False
    return all(size is None or isinstance(size, int) for size in shapes)


class _PadRow:
    """Pads the arrays of a row to fixed shapes."""

    def __init__(self, shapes: Nest, values: Nest) -> None:
        self._shapes = shapes
        self._values = values

    def __call__(self, *row: Any) -> Nest:
        nest: Nest = row
        if len(row) == 1:
            nest = row[0]
        return padded([nest], self._shapes, self._values)[0]
