"""One pass over a dataset: global batches one after another, of each the parts that are asked for."""

import itertools
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hpcdist.data.prefetch import read_ahead
from hpcdist.data.rows import Function, apply, apply_to_part, no_rows, stack, zeros_like
from hpcdist.data.sources import Mapped, RowSource
from hpcdist.data.streams import Stream, StreamPlace, StreamReader
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import SampleOrder

#: Of a batch of n rows, the bounds of the parts that are wanted.
Split = Callable[[int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Pipeline:
    """A source and what is done to its rows.

    Attributes:
        source: of rows.
        order: in which they are visited, in which batches.
        row_maps: functions of a row. batch_maps: functions of a part of a batch.
        buffer_rows: rows of a stream that are mixed at a time.
        prefetch_batches: batches that are read ahead; 0: none.
    """

    source: RowSource | Stream
    order: SampleOrder
    row_maps: tuple[Function, ...] = ()
    batch_maps: tuple[Function, ...] = ()
    buffer_rows: int = 0
    prefetch_batches: int = 0

    @property
    def is_stream(self) -> bool:
        """Whether rows come one by one."""
        return isinstance(self.source, Stream)

    def part_without_rows(self) -> Nest:
        """Return a part with 0 rows, of the shapes and dtypes of the others.

        Cost: see `first_rows`, and the maps of one row.

        Raises:
            DataError: for a stream that has neither rows nor a signature.
        """
        with on_host():
            return no_rows(apply_to_part(self.batch_maps, self._first_row()))

    def _first_row(self) -> Nest:
        """Return a part with the first row, or a made-up one where there is none."""
        if not isinstance(self.source, Stream):
            return mapped(self.source, self.row_maps).take(np.zeros(min(1, self.source.n_rows), np.int64))
        row = (
            next(iter(self.source.draw()), None) if self.source.signature is None else zeros_like(self.source.signature)
        )
        if row is None:
            raise DataError(
                "from_generator: expected a first row or output_signature, got neither; say what rows look like by "
                "output_signature."
            )
        return stack([apply(self.row_maps, row)])


@dataclass(frozen=True)
class Cursor:
    """A place in training: samples handed out so far, where the pass began, and the same for streams."""

    position: int = 0
    pass_start: int = 0
    place: StreamPlace = field(default_factory=StreamPlace)
    pass_epoch: int = 0


#: Batches of a pass: the cursor after each, and the parts that are wanted.
Items = Generator[tuple[Cursor, list[Nest]], None, None]


def next_pass(pipeline: Pipeline, cursor: Cursor) -> Cursor:
    """Return where the next pass starts: at the first run of epochs that nothing was handed out of."""
    if isinstance(pipeline.source, Stream):
        place = StreamReader(pipeline.source, pipeline.order, 0).next_run(cursor.place)
        return Cursor(cursor.position, cursor.position, place, place.epoch)
    position = pipeline.order.next_run(cursor.position)
    return Cursor(position, position)


def start_of_pass(pipeline: Pipeline, number: int) -> Cursor:
    """Return where the pass of that number starts when all before it were whole; endless ones count as an epoch."""
    order = pipeline.order
    if pipeline.is_stream:
        epochs = order.inner_epochs * order.outer_epochs
        epoch = number * (1 if math.isinf(epochs) else int(epochs))
        return Cursor(place=StreamPlace(epoch), pass_epoch=epoch)
    samples = order.epoch_rows if math.isinf(order.n_samples) else order.next_run(int(order.n_samples))
    return Cursor(number * samples, number * samples)


def after_batches(pipeline: Pipeline, cursor: Cursor, n_batches: int) -> Cursor:
    """Return the cursor after some more batches of a pass over rows with random access. Nothing is read."""
    end = cursor.pass_start + pipeline.order.n_samples
    for _, position in itertools.islice(pipeline.order.batches(cursor.position, end), n_batches):
        cursor = replace(cursor, position=position)
    return cursor


def read_pass(pipeline: Pipeline, cursor: Cursor, split: Split) -> Items:
    """Yield (cursor after it, parts) of every global batch from the cursor to the end of its pass.

    Args:
        pipeline: what to read.
        cursor: from where.
        split: says which parts of a batch of so many rows are wanted.
    """
    if isinstance(pipeline.source, Stream):
        items = _stream_batches(pipeline, pipeline.source, cursor, split)
    else:
        items = _row_batches(pipeline, pipeline.source, cursor, split)
    yield from read(items, pipeline.prefetch_batches)


def read(items: Items, n_ahead: int) -> Items:
    """Yield the items, at most `n_ahead` of them read before they are asked for.

    What is read and mapped for them is on the host, wherever tensors of the caller are made.
    """
    items = _read_on_host(items)
    if n_ahead:
        items = read_ahead(items, n_ahead)
    with closing(items):
        yield from items


def _read_on_host(items: Items) -> Items:
    with closing(items):
        while True:
            with on_host():
                item = next(items, None)
            if item is None:
                return
            yield item


def on_host() -> AbstractContextManager[object]:
    """Make tensors of the block on the host; no time is spent in every call where they are anyway."""
    host = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == host else host


def _row_batches(
    pipeline: Pipeline, source: RowSource, cursor: Cursor, split: Split
) -> Generator[tuple[Cursor, list[Nest]], None, None]:
    order = pipeline.order
    ahead, now = itertools.tee(order.batches(cursor.position, cursor.pass_start + order.n_samples))
    requests = (order.rows(start + low, start + high) for start, stop in ahead for low, high in split(stop - start))
    parts = mapped(source, pipeline.row_maps).take_many(requests)
    for start, stop in now:
        yield (
            replace(cursor, position=stop),
            [apply_to_part(pipeline.batch_maps, next(parts)) for _ in split(stop - start)],
        )


def _stream_batches(pipeline: Pipeline, source: Stream, cursor: Cursor, split: Split) -> Items:
    reader = StreamReader(source, pipeline.order, pipeline.buffer_rows)
    for place, rows in reader.batches(cursor.place, cursor.pass_epoch):
        cursor = replace(cursor, position=cursor.position + len(rows), place=place)
        yield (
            cursor,
            [apply_to_part(pipeline.batch_maps, _joined(pipeline, rows, *bounds)) for bounds in split(len(rows))],
        )


def _joined(pipeline: Pipeline, rows: list[Nest], low: int, high: int) -> Nest:
    if low < high:
        return stack([apply(pipeline.row_maps, row) for row in rows[low:high]])
    return no_rows(stack([apply(pipeline.row_maps, rows[0])]))


def mapped(source: RowSource, functions: tuple[Function, ...]) -> RowSource:
    """Return the source with functions applied to every row."""
    return Mapped(source, functions) if functions else source
