"""Streams: rows that can only be drawn one after another, such as a generator's, and a place in them."""

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.data.identity import digest_of
from hpcdist.data.row_store import store_of
from hpcdist.data.rows import Function, apply
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import UNKNOWN, SampleOrder


@dataclass(frozen=True)
class Stream:
    """Rows in the order in which they come.

    Attributes:
        draw: starts anew and returns an iterator over the rows; called once per epoch.
        signature: what a row looks like: a nest of what has a shape and a dtype; None if nobody said.
        name: returns what tells its rows from those of other streams.
    """

    draw: Callable[[], Iterator[Nest]]
    signature: Nest = None
    name: Callable[[], str] = str
    n_rows = UNKNOWN
    n_files = 0

    def shard(self, n_shards: int, index: int) -> "Stream":
        """Return every n-th row; the others are drawn and dropped."""
        return Stream(
            lambda: itertools.islice(self.draw(), index, None, n_shards),
            self.signature,
            lambda: f"{self.name()}[{index}::{n_shards}]",
        )

    def limited(self, count: int) -> "Stream":
        """Return the first rows."""
        return Stream(lambda: itertools.islice(self.draw(), count), self.signature, lambda: f"{self.name()}[:{count}]")

    def mapped(self, functions: tuple[Function, ...]) -> "Stream":
        """Return the rows with functions applied to each."""
        if not functions:
            return self
        return Stream(
            lambda: (apply(functions, row) for row in self.draw()),
            name=lambda: f"{self.name()} {digest_of(functions)}",
        )

    def cached(self, filename: str | None) -> "Stream":
        """Return the rows, drawn once: after the first epoch that came to its end they are kept, also by others."""
        store = store_of(filename, "" if filename is None else f"stream {self.name()}")

        def draw() -> Iterator[Nest]:
            store.refresh()
            if store.total is not None:
                yield from (store[number] for number in range(store.total))
                return
            n_drawn = 0
            for row in self.draw():
                if n_drawn not in store:
                    store[n_drawn] = row
                yield row
                n_drawn += 1
            store.refresh()
            if store.total is None:  # else another process was first
                store.commit(n_drawn)

        return Stream(draw, self.signature, self.name)

    def shuffled(self, buffer_rows: int, seed: int, epoch: int) -> Generator[Nest, None, None]:
        """Yield the rows of an epoch mixed as in tf.data: each is picked from the next `buffer_rows`."""
        raw = np.random.Philox(key=[seed % 2**64, epoch])
        rows, held = self.draw(), list[Any]()
        for row in rows:
            held.append(row)
            if len(held) >= buffer_rows:
                yield _pick(held, raw)
        while held:
            yield _pick(held, raw)


def _pick(held: list[Any], raw: Any) -> Any:
    place = int(raw.random_raw()) % len(held)
    held[place], held[-1] = held[-1], held[place]
    return held.pop()


@dataclass(frozen=True)
class StreamPlace:
    """A place in a stream: rows drawn in an epoch, and samples of the run that it belongs to."""

    epoch: int = 0
    offset: int = 0
    run_offset: int = 0


class StreamReader:
    """Global batches of a stream, from a place on; see `SampleOrder` for epochs, runs and passes.

    Cost: to start inside an epoch, its rows before the place are drawn and dropped.
    """

    def __init__(self, stream: Stream, order: SampleOrder, buffer_rows: int) -> None:
        self._stream, self._order, self._buffer_rows = stream, order, buffer_rows

    def next_run(self, place: StreamPlace) -> StreamPlace:
        """Return where the first run starts that has nothing before the place; of an endless run, the next epoch."""
        run = 1 if math.isinf(self._order.inner_epochs) else int(self._order.inner_epochs)
        return StreamPlace(-(-(place.epoch + (place.offset > 0)) // run) * run)

    def batches(self, place: StreamPlace, first_epoch: int) -> Iterator[tuple[StreamPlace, list[Nest]]]:
        """Yield (place after it, rows) of every batch of the pass that began with `first_epoch`."""
        pass_end = first_epoch + self._order.inner_epochs * self._order.outer_epochs
        while place.epoch < pass_end:
            last = place
            for last, rows in self._run(place):
                yield last, rows
            # a run from whose start there was no batch would be as empty each time
            if math.isinf(self._order.inner_epochs) or last == StreamPlace(place.epoch):
                return
            place = self.next_run(last)

    def _run(self, place: StreamPlace) -> Iterator[tuple[StreamPlace, list[Nest]]]:
        size = self._order.batch_rows or 1
        with contextlib.closing(self._rows(place)) as rows:
            while held := list(itertools.islice(rows, size)):
                if len(held) == size or not self._order.drop_remainder:
                    yield held[-1][0], [row for _, row in held]

    def _rows(self, place: StreamPlace) -> Generator[tuple[StreamPlace, Nest], None, None]:
        """Yield (place after it, row) for the rest of a run."""
        run, left = self._order.inner_epochs, self._order.run_limit - place.run_offset
        end = math.inf if math.isinf(run) else (place.epoch // int(run) + 1) * int(run)
        n_drawn, epoch = place.offset, place.epoch
        while epoch < end and left > 0:
            stop = min(self._order.epoch_limit, n_drawn + left)
            with contextlib.closing(self._epoch(epoch)) as rows:
                for row in itertools.islice(rows, n_drawn, None if math.isinf(stop) else int(stop)):
                    n_drawn, left = n_drawn + 1, left - 1
                    place = StreamPlace(epoch, n_drawn, place.run_offset + 1)
                    yield place, row
            if not n_drawn:
                return
            n_drawn, epoch = 0, epoch + 1

    def _epoch(self, epoch: int) -> Generator[Nest, None, None]:
        if self._order.seed is None:
            return (row for row in self._stream.draw())
        return self._stream.shuffled(self._buffer_rows, self._order.seed, epoch)
