"""The one iterator over batches, and its stages.

plan -> fetch rows -> map -> stack -> map whole parts -> [prefetch thread, pinned] -> [device] -> yield, cursor recorded

All up to the thread is done on the host, wherever the caller's code makes tensors. `PipelineReader` puts the reading
stages together; `distributed.py` takes batches out of them, records the cursor and yields them through a
`DistributedIterator`.
"""

import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from hpcdist.data.batches import Cursor, DividedBatches, Plan, PlannedBatch
from hpcdist.data.prefetch import Items, moved_ahead, read_ahead
from hpcdist.data.row_numbers import RowNumbers, RowSeeds, own_random_numbers
from hpcdist.data.rows import Function, apply, apply_to_part, no_rows, stack, zeros_like
from hpcdist.data.same_rows import digest_of
from hpcdist.data.sources import Request, RowSource, mapped
from hpcdist.data.streams import Stream, StreamReader
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import SampleOrder
from hpcdist.runtime.parts import Part
from hpcdist.runtime.step_flags import StepFlags

#: Describes the first rows of a stream, as `describe_first_rows` does.
DescribeRows = Callable[[], list[int | None]]
_NOTHING = object()
_requests_of_batch = attrgetter("requests")


@dataclass(frozen=True)
class Pipeline:
    """A source, the order of its rows, and the functions mapped over them.

    Attributes:
        source: source of rows.
        order: order in which rows are visited, and the sizes of batches.
        row_maps: functions of a row, applied one after another.
        batch_maps: functions of a part of a batch, applied one after another.
        buffer_rows: number of rows of a stream that are mixed at a time.
        prefetch_batches: number of batches that are read ahead.
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
        """Return a part with 0 rows, of the shapes and dtypes of all parts.

        Cost: one row is read, or drawn from a new iterator, and mapped.

        Raises:
            DataError: for a stream that has neither rows nor a signature.
        """
        with on_host(), own_random_numbers():
            return no_rows(apply_to_part(self.batch_maps, self._first_row()))

    def _first_row(self) -> Nest:
        """Return a part with the first row, or one of zeros where a signature or the source gives the shapes."""
        source = self.source
        if not isinstance(source, Stream):
            rows = np.zeros(min(1, source.n_rows), np.int64)
            return mapped(source, self.row_maps).take(rows)
        row = _example_row(source)
        if row is None:
            raise DataError(
                "from_generator: expected a first row or output_signature, got neither; pass output_signature with "
                "the shapes and dtypes of a row."
            )
        if source.holds_batches:
            return row
        return stack([apply(self.row_maps, row)])


def _example_row(stream: Stream) -> Nest:
    """Return a row of zeros if a stream has a signature, else its first row; None if it has no rows."""
    if stream.signature is not None:
        return zeros_like(stream.signature)
    return next(iter(stream.draw(0)), None)


def on_host() -> AbstractContextManager[object]:
    """Make tensors of the block on the host. Where that is the default, no torch call is slowed down."""
    host = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == host else host


class PipelineReader:
    """Reads the batches of passes over a pipeline.

    Args:
        pipeline: pipeline to read.
        plan: plan of the rows of each local part; for a stream, whose rows are not known before, the division of a
            batch.
        seed: seed of the random numbers that are drawn for the rows. None leaves the numbers as they come.

    Attributes:
        numbers: caller of the program's functions, which may draw random numbers.
    """

    def __init__(self, pipeline: Pipeline, plan: Plan, seed: int | None = None) -> None:
        self._pipeline = pipeline
        self._plan = plan
        self._seed = seed
        roots: list[Any] = []
        if seed is not None:
            roots = [pipeline.source, pipeline.row_maps, pipeline.batch_maps]
        self.numbers = RowNumbers(roots)
        self._mapped: RowSource | None = None
        if not isinstance(pipeline.source, Stream):
            self._mapped = mapped(pipeline.source, pipeline.row_maps)
        self._no_rows: Nest = None

    def stages(self, cursor: Cursor, device: torch.device | None = None) -> Items:
        """Return the reading stages of one pass: an iterator over (cursor after it, local parts) of every batch.

        Args:
            cursor: cursor from which to read.
            device: device to which parts are moved. None leaves them on the host.
        """
        n_ahead = self._pipeline.prefetch_batches
        items = read_ahead(self, cursor, n_ahead) if n_ahead else self.read_from(cursor)
        if device is not None:
            items = moved_ahead(items, device)
        return items

    def read_from(self, cursor: Cursor) -> Items:
        """Yield (cursor after it, local parts) of every batch from a cursor on, in the calling thread."""
        source = self._pipeline.source
        if not isinstance(source, Stream):
            yield from self._read_rows(cursor)
            return
        is_drawing = self.numbers.is_drawing
        items = self._read_stream(source, cursor)
        for after, parts in items:
            if self.numbers.is_drawing and not is_drawing and self._seed is not None:
                items.close()
                break  # the batch was drawn without a seed
            yield after, parts
            cursor = after
        else:
            return
        yield from self._read_stream(source, cursor)

    def _keeping_numbers(self) -> AbstractContextManager[None]:
        """Leave the random numbers of the process as they were, if the rows' numbers are seeded."""
        if self._seed is None:
            return nullcontext()
        return self.numbers.keeping()

    def _read_rows(self, cursor: Cursor) -> Items:
        assert self._mapped is not None, "rows with random access"
        # a source that reads ahead runs through the plan first
        for_source, batches = itertools.tee(self._requests(cursor))
        requests = itertools.chain.from_iterable(map(_requests_of_batch, for_source))
        fetched = self._mapped.take_requests(requests)
        while True:
            with on_host(), self._keeping_numbers():
                batch = next(batches, None)
                if batch is None:
                    return
                parts = [self._mapped_part(request, next(fetched)) for request in batch.requests]
            yield batch.cursor, parts

    def _mapped_part(self, request: Request, part: Nest) -> Nest:
        maps = self._pipeline.batch_maps
        if not maps:
            return part
        return request.call(apply_to_part, maps, part, stage=1)

    def _requests(self, cursor: Cursor) -> Iterator["_RequestedBatch"]:
        """Yield the requests for every batch from a cursor on."""
        for batch in self._plan.batches(cursor):
            requests: list[Request] = []
            for rows, position in zip(batch.rows, batch.positions, strict=True):
                requests.append(Request(rows, self.numbers, self._seeds_of(batch, position)))
            yield _RequestedBatch(batch.cursor, requests)

    def _seeds_of(self, batch: PlannedBatch, position: int) -> RowSeeds | None:
        """Return the seeds of a part that begins at a position; by positions where a row may come twice in a batch."""
        if self._seed is None:
            return None
        first = None
        if self._pipeline.order.inner_epochs > 1:
            first = position
        return RowSeeds(self._seed, batch.epoch, first)

    def _read_stream(self, stream: Stream, cursor: Cursor) -> Items:
        assert isinstance(self._plan, DividedBatches), "a stream has no shards"
        division = self._plan.division
        pipeline = self._pipeline
        reader = StreamReader(
            stream, pipeline.order, pipeline.buffer_rows, self.numbers, self._seed
        )
        batches = reader.batches(cursor)
        is_first = True
        while True:
            with on_host(), self._keeping_numbers():
                batch = next(batches, None)
                if batch is None:
                    return
                after, rows = batch
                start = after.position - len(rows)
                seeds = None
                if self._seed is not None:
                    seeds = RowSeeds(self._seed, after.pass_epoch)
                parts = [
                    self._part_of(rows, low, high, start, seeds)
                    for low, high in division.bounds(len(rows))
                ]
                first_rows = digest_of(rows) if is_first else 0
                is_first = False
                after = replace(
                    after,
                    part_rows=division.rows_of_parts(len(rows)),
                    first_rows=first_rows,
                )
            yield after, parts

    def _part_of(
        self,
        rows: list[Nest],
        low: int,
        high: int,
        start: int,
        seeds: RowSeeds | None,
    ) -> Nest:
        """Return the part of the rows from `low` to before `high` of a batch whose first row has position `start`."""
        maps = self._pipeline.row_maps
        request = Request(np.arange(start + low, start + high), self.numbers, seeds)
        if low == high:
            return self._mapped_part(request, self._part_of_no_rows(rows[0]))
        mapped_rows = rows[low:high]
        if maps:
            mapped_rows = request.call_for_rows(0, functools.partial(apply, maps), mapped_rows)
        return self._mapped_part(request, stack(mapped_rows))

    def _part_of_no_rows(self, row: Nest) -> Nest:
        if self._no_rows is None:
            with own_random_numbers():
                self._no_rows = no_rows(stack([apply(self._pipeline.row_maps, row)]))
        return self._no_rows


@dataclass(frozen=True)
class _RequestedBatch:
    """The cursor after a batch, and a request for each local part of the batch."""

    cursor: Cursor
    requests: list[Request]


@dataclass(frozen=True)
class Delivery:
    """Connections of a strategy to the batches of a distributed dataset.

    Attributes:
        flags: step flags of the world; their requester looks for requests when a batch is asked for, before anything is
            read. None for a dataset of no strategy.
        owner: number of the owner whose gradients are made of the parts. None for any owner.
        on_batch: function that is called with the rows of each local part of a batch that is yielded; with None once no
            step is expected to be made of the last batch.
        on_part: function that is called with each part that is handed out, and its nests, one of each local replica.
        wrap: function that makes the element that is yielded from the list of local parts. By default the only part is
            yielded.
        device: device on which the strategy places inputs. None leaves them on the host.
        agree_rows: function that is called with the number of rows of every global batch of a stream, and with 0 at its
            end, as it is not known before that streams are equal on all ranks. Raises on all ranks when they are not.
            Collective.
        agree_first_rows: function that is called with the digest of the first batch that is drawn from a stream, and
            with a function that describes the stream's first rows, which draws them again. Raises on all ranks when
            the first rows are not equal, and returns whether it has called the function. Collective.
        agree_end: function that is called with whether this rank is out of data, and with whether one such rank ends
            the pass for all ranks; returns whether the pass ends. Collective. None for one rank.
    """

    flags: StepFlags | None = None
    owner: int | None = None
    on_batch: Callable[[list[int] | None], None] | None = None
    on_part: Callable[[Part, list[Nest]], None] | None = None
    wrap: Callable[[list[Nest]], Any] | None = None
    device: torch.device | None = None
    agree_rows: Callable[[int], None] | None = None
    agree_first_rows: Callable[[int, DescribeRows], bool] | None = None
    agree_end: Callable[[bool, bool], bool] | None = None

    def check(self, n_local: int) -> None:
        """Raise DataError when there are several local replicas and nothing that joins their parts."""
        if n_local != 1 and self.wrap is None:
            raise DataError(
                f"distribute: expected wrap for the parts of {n_local} replicas of one rank, got None; pass a function "
                f"that joins them."
            )

    def element_of(self, part: Part, nests: list[Nest]) -> Any:
        """Return the element to yield for the local parts of a batch, and report them."""
        if self.on_batch is not None:
            self.on_batch([0] * len(nests) if part.rows is None else list(part.rows))
        if self.on_part is not None:
            self.on_part(part, nests)
        if self.wrap is None:
            return nests[0]
        return self.wrap(nests)


class OptionalElement:
    """An element, or the end of the data, as in tf.experimental.Optional."""

    def __init__(self, value: Any = _NOTHING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            DataError: when there is none.
        """
        if not self.has_value():
            raise DataError(
                "get_value: expected an element, got the end of the data; ask has_value() first."
            )
        return self._value


class DistributedIterator:
    """An iterator over one pass of a distributed dataset.

    Args:
        elements: generator of the elements of the pass.
        element_spec: function that returns the specification of an element.
    """

    def __init__(
        self,
        elements: Generator[Any, None, None],
        element_spec: Callable[[], Nest],
    ) -> None:
        self._elements = elements
        self._element_spec = element_spec

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._elements)

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            StopIteration: at the end of the data; on every rank at the same step.
        """
        return next(self._elements)

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or one without a value at the end of the data; on every rank at the same step."""
        return OptionalElement(next(self._elements, _NOTHING))

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is read."""
        return self._element_spec()
