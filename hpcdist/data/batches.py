"""The plan of batches: which samples a global batch covers, and which rows each local replica reads. Pure arithmetic.

A plan turns a cursor into the batches that follow it, so a cursor is all that a checkpoint needs. Positions count
global samples from the first epoch on; see `SampleOrder` for epochs, runs and passes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from hpcdist.errors import DataError
from hpcdist.plan.blocks import ceiling_bounds
from hpcdist.plan.sample_order import UNKNOWN, Rows, SampleOrder


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: an epoch, rows drawn in it, and samples since the start of its run."""

    epoch: int = 0
    offset: int = 0
    run_offset: int = 0


@dataclass(frozen=True)
class Cursor:
    """A position in training.

    Attributes:
        position: samples yielded so far, over all epochs and passes.
        pass_start: position at which the pass began.
        stream: position in a stream.
        pass_epoch: epoch of a stream at which the pass began.
        n_batches: number of batches of the pass so far.
        part_rows: rows of each local part of the batch before this position, as planned.
        first_rows: digest of the rows of the batch before this position, if it is the first one that was drawn from a
            stream; else 0.
    """

    position: int = 0
    pass_start: int = 0
    stream: StreamPosition = field(default_factory=StreamPosition)
    pass_epoch: int = 0
    n_batches: int = field(default=0, compare=False)
    part_rows: tuple[int, ...] = field(default=(), compare=False, repr=False)
    first_rows: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class PlannedBatch:
    """One global batch.

    Attributes:
        cursor: cursor after the batch.
        rows: source rows of each local part.
        positions: position of the first row of each local part.
        epoch: epoch in which the batch begins.
    """

    cursor: Cursor
    rows: list[Rows]
    positions: list[int]
    epoch: int


@dataclass(frozen=True)
class Division:
    """How a batch is divided among replicas: each takes ceil(n / replicas) rows while there are any.

    Attributes:
        replicas: local replicas, whose parts are wanted.
        n_replicas: number of replicas on all ranks.
        is_whole: whether every replica takes the whole batch instead.
    """

    replicas: range = range(1)
    n_replicas: int = 1
    is_whole: bool = False

    def bounds(self, n_rows: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each local part in a batch of `n_rows`."""
        if self.is_whole:
            return [(0, n_rows)] * len(self.replicas)
        return [ceiling_bounds(n_rows, self.n_replicas, replica) for replica in self.replicas]

    def rows_of_parts(self, n_rows: int) -> tuple[int, ...]:
        """Return the rows of each local part in a batch of `n_rows`."""
        return tuple(stop - start for start, stop in self.bounds(n_rows))

    def is_everywhere(self, n_rows: int) -> bool:
        """Return whether every replica of the job has rows in a batch of `n_rows`."""
        start, stop = ceiling_bounds(n_rows, self.n_replicas, self.n_replicas - 1)
        return self.is_whole or stop > start


@dataclass(frozen=True)
class DividedBatches:
    """Global batches in one order, each divided among the replicas."""

    order: SampleOrder
    division: Division = field(default_factory=Division)

    def batches(self, cursor: Cursor) -> Iterator[PlannedBatch]:
        """Yield every batch from the cursor to the end of its pass."""
        order = self.order
        end = cursor.pass_start + self.order.n_samples
        while (batch := order.next_batch(cursor.position, end)) is not None:
            start, stop = batch
            bounds = self.division.bounds(stop - start)
            part_rows = self.division.rows_of_parts(stop - start)
            cursor = replace(
                cursor,
                position=stop,
                n_batches=cursor.n_batches + 1,
                part_rows=part_rows,
            )
            rows = [order.rows(start + low, start + high) for low, high in bounds]
            positions = [start + low for low, _ in bounds]
            yield PlannedBatch(cursor, rows, positions, order.epoch_of(start))


class Shard(Protocol):
    """Some rows of a source, numbered from 0."""

    @property
    def n_rows(self) -> int:
        """Rows in the shard."""

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Rows of each file in the shard; empty when it does not consist of whole files."""

    def source_rows(self, rows: Rows) -> Rows:
        """Return the numbers in the source of rows of the shard."""

    def describe(self) -> list[int | str]:
        """Return which rows these are, as JSON."""


@dataclass(frozen=True)
class EveryNth:
    """Rows index, index + n, index + 2n, ... of `n_source_rows`."""

    n_source_rows: int
    n: int
    index: int
    rows_of_files = ()

    @property
    def n_rows(self) -> int:
        """Rows in the shard."""
        return len(range(self.index, self.n_source_rows, self.n))

    def source_rows(self, rows: Rows) -> Rows:
        """Return the numbers in the source of rows of the shard."""
        return rows * self.n + self.index

    def describe(self) -> list[int | str]:
        """Return which rows these are, as JSON."""
        return ["rows", self.index, self.n]


@dataclass(frozen=True)
class RowRange:
    """Rows from `start` to before `stop`."""

    start: int
    stop: int
    rows_of_files = ()

    @property
    def n_rows(self) -> int:
        """Rows in the range."""
        return self.stop - self.start

    def source_rows(self, rows: Rows) -> Rows:
        """Return the numbers in the source of rows of the range."""
        return rows + self.start

    def describe(self) -> list[int | str]:
        """Return which rows these are, as JSON."""
        return ["from", self.start, self.stop]


@dataclass(frozen=True)
class EveryNthFile:
    """All rows of the files index, index + n, index + 2n, ... of files with `rows_of_source_files` rows."""

    rows_of_source_files: tuple[int, ...]
    n: int
    index: int

    @cached_property
    def rows_of_files(self) -> tuple[int, ...]:
        """Rows of each file in the shard."""
        return self.rows_of_source_files[self.index :: self.n]

    @property
    def n_rows(self) -> int:
        """Rows in the shard."""
        return sum(self.rows_of_files)

    @cached_property
    def _starts(self) -> tuple[Rows, Rows]:
        """Return the number of the first row of each file, in the shard and in the source."""
        shard_starts = np.cumsum([0, *self.rows_of_files])
        source_starts = np.cumsum([0, *self.rows_of_source_files])
        return shard_starts, source_starts[self.index :: self.n]

    def source_rows(self, rows: Rows) -> Rows:
        """Return the numbers in the source of rows of the shard."""
        shard_starts, source_starts = self._starts
        files = np.searchsorted(shard_starts, rows, side="right") - 1
        return rows - shard_starts[files] + source_starts[files]

    def describe(self) -> list[int | str]:
        """Return which rows these are, as JSON."""
        return ["files", self.index, self.n]


class ShardedBatches:
    """Global batches of which replica r reads the next ceil(batch_rows / n) rows of shard r, each shard in its order.

    Replicas without rows get empty parts until all are out of rows; with drop_remainder, the run ends before the first
    batch that one of them cannot fill.

    Args:
        order: order of the whole source, which must not be limited by take.
        shards: shards of the source, one for each replica of the job.
        replicas: local replicas.
    """

    def __init__(
        self,
        order: SampleOrder,
        shards: Sequence[Shard],
        replicas: range,
    ) -> None:
        self.order = order
        self.shards = shards
        self.replicas = replicas
        batch_rows = order.batch_rows or 1
        self._part_rows = -(-batch_rows // len(shards))
        self._orders: list[SampleOrder] = []
        for shard in shards:
            shard_order = replace(order, n_rows=shard.n_rows, batch_rows=self._part_rows)
            self._orders.append(shard_order)

    def batches(self, cursor: Cursor) -> Iterator[PlannedBatch]:
        """Yield every batch from the cursor to the end of its pass.

        Raises:
            DataError: when the cursor is inside a batch, as after a change of the batch size.
        """
        run_rows = self.order.run_rows
        position = cursor.position
        n_batches = cursor.n_batches
        is_endless = math.isinf(run_rows)
        while position < cursor.pass_start + self.order.n_samples:
            run = 0
            run_start = 0
            if not is_endless:
                run = int(position // run_rows)
                run_start = int(run * run_rows)
            number = self._batch_at(position - run_start)
            if not self._has_batch(0) or (is_endless and not self._has_batch(number)):
                return
            while self._has_batch(number):
                rows = [self._rows(replica, run, number) for replica in self.replicas]
                epoch = self.order.epoch_of(position)
                positions = [position + replica * self._part_rows for replica in self.replicas]
                position = run_start + self._samples_before(number + 1)
                n_batches += 1
                after = replace(
                    cursor,
                    position=position,
                    n_batches=n_batches,
                    part_rows=tuple(map(len, rows)),
                )
                yield PlannedBatch(after, rows, positions, epoch)
                number += 1
            position = int(run_start + run_rows)

    def _has_batch(self, number: int) -> bool:
        if self.order.drop_remainder:
            return all((number + 1) * self._part_rows <= order.run_rows for order in self._orders)
        return any(number * self._part_rows < order.run_rows for order in self._orders)

    def _samples_before(self, number: int) -> int:
        return sum(int(min(number * self._part_rows, order.run_rows)) for order in self._orders)

    def _batch_at(self, n_samples: int) -> int:
        """Return how many batches of a run precede its sample number `n_samples`."""
        number = n_samples // (self._part_rows * len(self._orders))
        while self._samples_before(number) < n_samples:
            number += 1
        if self._samples_before(number) != n_samples:
            raise DataError(
                f"restore: expected the end of a batch of {self._part_rows} rows per replica, got {n_samples} samples "
                f"in the run; with AutoShardPolicy.FILE or HINT, resume with the batch size of the checkpoint."
            )
        return number

    def _rows(self, replica: int, run: int, number: int) -> Rows:
        """Return the source rows of a replica in a batch of a run."""
        order = self._orders[replica]
        run_start = 0
        if not math.isinf(order.run_rows):
            run_start = int(run * order.run_rows)
        low = int(min(number * self._part_rows, order.run_rows))
        high = int(min((number + 1) * self._part_rows, order.run_rows))
        shard_rows = order.rows(run_start + low, run_start + high)
        return self.shards[replica].source_rows(shard_rows)


Plan = DividedBatches | ShardedBatches


def batch_sizes(order: SampleOrder) -> set[int]:
    """Return which numbers of rows the batches of a pass over rows with random access may have."""
    batch_rows = order.batch_rows or 1
    sizes = {batch_rows}
    if not order.drop_remainder:
        ends = [order.run_rows, order.n_samples]
        if order.run_rows and not math.isinf(order.run_rows) and not math.isinf(order.n_samples):
            ends.append(order.n_samples % order.run_rows)
        for end in ends:
            if not math.isinf(end):
                sizes.add(int(end % batch_rows))
    return sizes - {0}


def is_stream(order: SampleOrder) -> bool:
    """Return whether rows come one by one, and their number is unknown."""
    return order.n_rows == UNKNOWN


def next_run(order: SampleOrder, position: StreamPosition) -> StreamPosition:
    """Return the start of the first run of a stream at or after a position; of an endless run, the next epoch."""
    run_epochs = 1
    if not math.isinf(order.inner_epochs):
        run_epochs = int(order.inner_epochs)
    n_begun_epochs = position.epoch + (position.offset > 0)
    n_begun_runs = -(-n_begun_epochs // run_epochs)
    return StreamPosition(n_begun_runs * run_epochs)


def next_pass(order: SampleOrder, cursor: Cursor) -> Cursor:
    """Return the start of the next pass: the first run of which nothing was yielded."""
    if is_stream(order):
        start = next_run(order, cursor.stream)
        return Cursor(cursor.position, cursor.position, start, start.epoch)
    position = order.next_run(cursor.position)
    return Cursor(position, position)


def end_of_pass(order: SampleOrder, cursor: Cursor) -> Cursor:
    """Return the start of the pass that follows the one of the cursor, which has come to its end."""
    # an endless pass ends only where no batch can be filled, and then nothing was yielded
    if not is_stream(order) and not math.isinf(order.n_samples):
        cursor = Cursor(int(cursor.pass_start + order.n_samples))
    return next_pass(order, cursor)


def start_of_pass(order: SampleOrder, number: int) -> Cursor:
    """Return the start of a pass by its number, when all passes before it are whole; endless ones count as an epoch."""
    if is_stream(order):
        epochs = order.inner_epochs * order.outer_epochs
        epoch = number
        if not math.isinf(epochs):
            epoch = number * int(epochs)
        return Cursor(stream=StreamPosition(epoch), pass_epoch=epoch)
    pass_samples = order.epoch_rows
    if not math.isinf(order.n_samples):
        pass_samples = order.next_run(int(order.n_samples))
    position = number * pass_samples
    return Cursor(position, position)


def after_batches(order: SampleOrder, cursor: Cursor, n_batches: int) -> Cursor:
    """Return the cursor after `n_batches` more batches of a pass over rows with random access. Nothing is read."""
    end = cursor.pass_start + order.n_samples
    for _ in range(n_batches):
        batch = order.next_batch(cursor.position, end)
        if batch is None:
            break
        cursor = replace(cursor, position=batch[1], n_batches=cursor.n_batches + 1)
    return cursor


def in_parts(order: SampleOrder, n_replicas: int) -> SampleOrder:
    """Return an order whose batches are a replica's parts of the global ones. It drops the rows that they drop."""
    batch_rows = order.batch_rows or 1
    limit = order.run_limit
    if order.drop_remainder and order.n_rows != UNKNOWN and not math.isinf(order.run_rows):
        limit = order.run_rows // batch_rows * batch_rows
    part_rows = -(-batch_rows // n_replicas)
    return replace(order, batch_rows=part_rows, run_limit=limit)
