"""Streams: rows that can only be drawn one after another, such as a generator's, and their batches."""

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcdist.data.batches import Cursor, StreamPosition, next_run
from hpcdist.data.row_numbers import RowNumbers, seed_of
from hpcdist.data.rows import Function, apply, unstack
from hpcdist.data.sources import Description
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import UNKNOWN, SampleOrder

_NO_ROW = object()
#: Steps by which the rows of a stream were made of another one's: a name and two numbers for each.
StreamParts = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Stream:
    """Rows in the order in which they come.

    Attributes:
        draw: function that starts again and returns an iterator over the rows; called with the number of the epoch.
        signature: form of a row: a nest of anything with a shape and a dtype; None where it is not known.
        parts: shards and first rows of a stream that were taken, as a file of cached rows records them.
        holds_batches: whether the stream yields global batches, nests of (rows, ...) arrays, and no rows.
    """

    draw: Callable[[int], Iterator[Nest]]
    signature: Nest = None
    parts: StreamParts = ()
    holds_batches: bool = False
    n_rows = UNKNOWN

    def describe(self) -> Description:
        """Return the description that a file of cached rows records: it says nothing of the rows."""
        return {"kind": "stream", "parts": [list(part) for part in self.parts]}

    def shard(self, n_shards: int, index: int) -> "Stream":
        """Return every n-th row; all other rows are drawn and dropped."""
        return replace(
            self,
            draw=lambda epoch: itertools.islice(self.draw(epoch), index, None, n_shards),
            parts=(*self.parts, ("rows", index, n_shards)),
        )

    def limited(self, count: int) -> "Stream":
        """Return the first rows."""
        return replace(
            self,
            draw=lambda epoch: itertools.islice(self.draw(epoch), count),
            parts=(*self.parts, ("first", 0, count)),
        )

    def mapped(self, functions: tuple[Function, ...]) -> "Stream":
        """Return the rows with functions applied to each."""
        if not functions:
            return self
        return replace(
            self,
            draw=lambda epoch: (apply(functions, row) for row in self.draw(epoch)),
            signature=None,
            parts=(*self.parts, ("mapped", 0, len(functions))),
        )


def _shuffled(
    rows: Iterator[Nest],
    buffer_rows: int,
    seed: int,
    order_epoch: int,
) -> Generator[Nest, None, None]:
    """Yield the rows of an epoch mixed as in tf.data: each is picked from the next `buffer_rows`.

    Args:
        rows: rows of an epoch.
        buffer_rows: number of rows to pick from.
        seed: seed of the order.
        order_epoch: epoch whose random order it is.
    """
    raw = np.random.Philox(key=[seed % 2**64, order_epoch])
    buffer = list[Any]()
    for row in rows:
        buffer.append(row)
        if len(buffer) >= buffer_rows:
            yield _pick(buffer, raw)
    while buffer:
        yield _pick(buffer, raw)


def _after(cursor: Cursor, n_rows: int, stream: StreamPosition) -> Cursor:
    """Return the cursor after a batch of a stream."""
    return replace(
        cursor,
        position=cursor.position + n_rows,
        stream=stream,
        n_batches=cursor.n_batches + 1,
    )


def _pick(buffer: list[Any], raw: Any) -> Any:
    """Return a random row of a buffer; the last one takes its place."""
    index = int(raw.random_raw()) % len(buffer)
    picked = buffer[index]
    buffer[index] = buffer[-1]
    buffer.pop()
    return picked


class StreamReader:
    """Global batches of a stream, from a cursor on.

    Args:
        stream: stream that is drawn.
        order: order of the rows, and the sizes of batches.
        buffer_rows: number of rows that are mixed at a time.
        numbers: caller of the functions that draw the rows.
        seed: seed of the random numbers that are drawn for a row. None leaves the numbers as they come.

    Cost: to start inside an epoch, the rows of the epoch before the cursor are drawn and dropped.
    """

    def __init__(
        self,
        stream: Stream,
        order: SampleOrder,
        buffer_rows: int,
        numbers: RowNumbers,
        seed: int | None,
    ) -> None:
        self._stream = stream
        self._order = order
        self._buffer_rows = buffer_rows
        self._numbers = numbers
        self._seed = seed

    def batches(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[Nest]]]:
        """Yield (cursor after it, rows) of every batch from the cursor to the end of its pass."""
        order = self._order
        size = self._order.batch_rows or 1
        pass_end = cursor.pass_epoch + order.inner_epochs * order.outer_epochs
        while cursor.stream.epoch < pass_end:
            start = cursor.stream
            batch = list[Nest]()
            for position, row in self._rows_of_run(start):
                if self._stream.holds_batches:
                    batch += unstack(row)
                else:
                    batch.append(row)
                if len(batch) == size or self._stream.holds_batches:
                    cursor = _after(cursor, len(batch), position)
                    yield cursor, batch
                    batch = []
            if batch and not order.drop_remainder:
                cursor = _after(cursor, len(batch), position)
                yield cursor, batch
            # a run from whose start there was no batch would be as empty each time
            if math.isinf(order.inner_epochs) or cursor.stream == StreamPosition(start.epoch):
                return
            cursor = replace(cursor, stream=next_run(order, cursor.stream))

    def _rows_of_run(self, position: StreamPosition) -> Iterator[tuple[StreamPosition, Nest]]:
        """Yield (position after it, row) for the rest of a run."""
        run = self._order.inner_epochs
        n_left = self._order.run_limit - position.run_offset
        end = math.inf
        if not math.isinf(run):
            run_number = position.epoch // int(run)
            end = (run_number + 1) * int(run)
        n_drawn = position.offset
        epoch = position.epoch
        while epoch < end and n_left > 0:
            stop = min(self._order.epoch_limit, n_drawn + n_left)
            last = None if math.isinf(stop) else int(stop)
            rows = itertools.islice(self._rows_of_epoch(epoch), n_drawn, last)
            for row in rows:
                n_drawn += 1
                n_left -= 1
                position = StreamPosition(epoch, n_drawn, position.run_offset + 1)
                yield position, row
            if not n_drawn:
                return
            n_drawn = 0
            epoch += 1

    def _rows_of_epoch(self, epoch: int) -> Iterator[Nest]:
        rows = self._drawn_rows(epoch)
        if self._order.seed is None:
            return rows
        order_epoch = self._order.shuffle_epoch(epoch)
        return _shuffled(rows, self._buffer_rows, self._order.seed, order_epoch)

    def _drawn_rows(self, epoch: int) -> Iterator[Nest]:
        """Yield the rows of an epoch. Random numbers are seeded for each row once a row has drawn some."""
        rows = self._numbers.call_once(self._seed_of(epoch, -1), self._stream.draw, epoch)
        for number in itertools.count():
            row = self._numbers.call_once(self._seed_of(epoch, number), next, rows, _NO_ROW)
            if row is _NO_ROW:
                return
            yield row

    def _seed_of(self, epoch: int, number: int) -> Callable[[], int] | None:
        if self._seed is None:
            return None
        return functools.partial(seed_of, self._seed, epoch, number, "draw")
