"""Passes over a distributed input: which batches were used, and where the next pass, or a restart, begins."""

import contextlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from hpcdist.data.dataset import Dataset
from hpcdist.data.iterator import Delivery, DistributedIterator
from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import Items
from hpcdist.errors import DataError, agreed
from hpcdist.nest import Nest
from hpcdist.runtime.parts import Part
from hpcdist.runtime.step_flags import StepFlags
from hpcdist.runtime.time_spent import time_spent


class DistributedInput(ABC):
    """Passes over the input of this rank's replicas: the part that all distributed datasets share.

    Every `iter()` begins a pass. A pass of which nothing was used, such as a peek at the first batch, consumes nothing:
    the next pass begins where it began. In a program that trains by backwards, a batch is used if a step was made of
    it; elsewhere it is used if it was drawn.

    Args:
        n_local: number of replicas of this rank.
        delivery: connections to the strategy.
        options: options of the input.

    Attributes:
        options: options of the input.
        global_rows: rows of the last batch on all replicas together, where `has_global_rows`.

    Raises:
        DataError: when there are several local replicas and nothing that joins their parts.
    """

    def __init__(self, n_local: int, delivery: Delivery, options: InputOptions | None) -> None:
        delivery.check(n_local)
        self._delivery = delivery
        self.options = options or InputOptions()
        self._flags = StepFlags() if delivery.flags is None else delivery.flags
        self._source = self._flags.loop.add_source(delivery.owner)
        weakref.finalize(self, self._source.abandon)
        self._n_begun = 0
        self._is_loaded = False
        self._pass: _Pass | None = None
        self.global_rows = 0

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over this rank's parts of one pass: the source's nests, (rows, ...) arrays.

        The newest iterator in use moves the cursor: an older one raises DataError from then on.

        Raises:
            DataError: at its first element, on all ranks, if a pass was left in its middle in a program that saves.
        """
        return DistributedIterator(self._elements(), lambda: self.element_spec)

    def take(self, count: int) -> "FirstBatches":
        """Return an iterable over the first `count` batches of the next pass, which then ends the pass.

        A restart in its middle yields the remaining batches, which a count in the program, as by `itertools.islice` or
        `break`, could not know.

        Args:
            count: number of batches, at least 1.

        Raises:
            DataError: for a count below 1.
        """
        if count < 1:
            raise DataError(
                f"take: expected a count of at least 1 batch, got {count}; leave take out for all batches."
            )
        return FirstBatches(self, count)

    def _elements(self, limit: float = math.inf) -> Generator[Any, None, None]:
        """Yield the elements of a pass, which ends after `limit` batches at the latest."""
        self._poll()
        self._source.move(self._position())
        self._source.settle()
        self._n_begun += 1
        number = self._n_begun
        self._begin_or_resume()
        self._source.begin_pass()
        try:
            with contextlib.ExitStack() as stack:
                readers: list[Items] = []
                for reader in self._readers():
                    stack.enter_context(contextlib.closing(reader))
                    readers.append(reader)
                while self._n_in_pass < limit:
                    nests = self._timed_parts(readers)
                    if nests is None:
                        break
                    yield self._delivery.element_of(self._hand_out(), nests)
                    self._require_newest(number)
                    self._poll()
                    self._source.settle()
            self._finish_pass()
        finally:
            if number == self._n_begun:
                self._source.end_pass()

    def _require_newest(self, number: int) -> None:
        if number != self._n_begun:
            raise DataError(
                "next: expected one iterator at a time over a distributed dataset, whose cursor is saved, got "
                "this one after a newer one was begun, or a cursor was loaded; end this one first, or "
                "distribute the dataset again."
            )

    def _poll(self) -> None:
        is_last = self._pass is not None and self._is_at_end
        self._flags.poll_at_draw(self._source, torch.is_grad_enabled(), is_last)

    def _begin_or_resume(self) -> None:
        """Move to the start of the next pass; to the start of the last pass if nothing of that pass was used."""
        last_pass = self._pass
        self._pass = None
        if last_pass is not None and not self._is_used(last_pass):
            if self._source.n_handed_out > last_pass.n_handed_out:
                self._require_known_end()
                self._source.note_peek()
            self._restore(last_pass.start)
        elif not self._is_loaded:
            if last_pass is not None:
                self._require_end(last_pass)
            self._begin_pass()
        self._is_loaded = False
        self._source.move(self._position())
        self._pass = _Pass(self._position(), self._source.n_handed_out, self._source.n_complete)

    def _is_used(self, last_pass: "_Pass") -> bool:
        """Return whether some batch of a pass that was left was used."""
        if self._flags.loop.is_training_with(self._source) and not self._source.is_trusted:
            return self._source.n_complete > last_pass.n_complete
        return self._source.n_handed_out > last_pass.n_handed_out

    def _require_known_end(self) -> None:
        """Raise DataError where the program peeks at a pass of unknown end, and saves.

        A restart after its last batch would peek at nothing, and train on the next pass in the same epoch.
        """
        is_saving = self._flags.requester is not None and not self._source.is_trusted
        if is_saving and not self._knows_end:
            raise DataError(
                "iter: expected a pass over a stream to be used in a program that saves, got one that was left before "
                "a step; look at the dataset itself, as by next(iter(loader)), and not at what was distributed."
            )

    def _require_end(self, last_pass: "_Pass") -> None:
        """Raise DataError on all ranks if a restart could not know where the program leaves its passes."""
        is_trained = self._source.n_complete > last_pass.n_complete
        is_saving = self._flags.requester is not None and not self._source.is_trusted
        if is_trained and is_saving and self._knows_end and not self._is_at_end:
            n_batches = self._n_in_pass
            raise agreed(
                DataError(
                    f"iter: expected the last pass to end by itself, got it left after {n_batches} batches, which a "
                    f"restart in its middle would count anew; iterate over batches.take({n_batches}), which ends it."
                )
            )

    def _hand_out(self) -> Part:
        """Return the part of the batch that was drawn last, and record it."""
        part = self._part(torch.is_grad_enabled())
        self._source.move(part.position)
        self._flags.loop.hand_out(part)
        return part

    def _saved_position(self) -> Any:
        """Return the position after the batch that was used last."""
        is_training = self._flags.loop.is_training_with(self._source)
        position = self._source.saved_position(is_training)
        if position is None:
            return self._beginning
        return position

    def _timed_parts(self, readers: list[Items]) -> list[Nest] | None:
        with time_spent.timed("input", "next batch"), self._flags.loop.drawing():
            parts = self._next_parts(readers)
        time_spent.rows += self._rows_of_last()
        return parts

    def _finish_pass(self) -> None:
        """Move the cursor to the start of the next pass."""
        self._end_pass()
        if self._flags.loop.is_training_with(self._source):
            self._source.drop_evaluated()
        else:
            self._source.drop_open()
        self._pass = None
        self._source.move(self._position())
        self._source.settle()
        self._flags.loop.forget_last_used(self._source)
        if self._delivery.on_batch is not None:
            self._delivery.on_batch(None)

    def drop_batch(self) -> None:
        """Expect no step that is made of the last batch. Not collective."""
        self._source.drop_open()
        self._flags.loop.forget_last_used(self._source)
        if self._delivery.on_batch is not None:
            self._delivery.on_batch(None)

    def trust_draws(self) -> None:
        """Take every draw as one between two iterations: the caller uses each batch, and restores its position itself.

        Not collective, but to be called on all ranks alike.
        """
        self._source.trust()

    def leave_pass(self) -> None:
        """Let the next iterator begin a pass, also where it would resume the pass whose cursor was loaded."""
        self._is_loaded = False

    def _resume(self) -> None:
        """Let the next iterator continue at the cursor that was loaded. An iterator in use raises from now on."""
        self._is_loaded = True
        self._pass = None
        self._n_begun += 1
        self._source.forget()
        self._source.move(self._position())
        self._source.settle()

    @property
    def has_global_rows(self) -> bool:
        """Whether this rank knows the rows of a batch on all replicas together."""
        return False

    @property
    @abstractmethod
    def _n_in_pass(self) -> int:
        """Batches of this pass so far."""

    @property
    @abstractmethod
    def _knows_end(self) -> bool:
        """Whether the length of a pass is known."""

    @property
    @abstractmethod
    def _is_at_end(self) -> bool:
        """Whether it is known that the pass has no more batches."""

    @property
    @abstractmethod
    def _beginning(self) -> Any:
        """The position before the first batch of all."""

    @abstractmethod
    def _position(self) -> Any:
        """Return the position after the last batch, or at the start of a pass."""

    @abstractmethod
    def _restore(self, position: Any) -> None:
        """Read from a position on."""

    @abstractmethod
    def _part(self, is_for_training: bool) -> Part:
        """Return the part of the batch that was drawn last."""

    @property
    @abstractmethod
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is read."""

    @abstractmethod
    def _begin_pass(self) -> None:
        """Move the cursor to the start of the next pass."""

    @abstractmethod
    def _readers(self) -> list[Items]:
        """Return readers from the cursor on."""

    @abstractmethod
    def _next_parts(self, readers: list[Items]) -> list[Nest] | None:
        """Return the local parts of the next batch and record the cursor after it; None at the end of the pass."""

    def _rows_of_last(self) -> int:
        """Return the rows of the last batch on all replicas together; 0 where they are unknown."""
        return 0

    @abstractmethod
    def _end_pass(self) -> None:
        """Move the cursor to the start of the next pass."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the cursor. Equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor; raises DataError when it is of other data."""

    def _device(self) -> torch.device | None:
        """Return the device to which parts are moved; None leaves them on the host."""
        device = self._delivery.device
        is_fetched = self.options.experimental_fetch_to_device
        if is_fetched is False:
            return None
        if device is None:
            has_gpu = is_fetched and torch.cuda.is_available()
            return torch.device("cuda") if has_gpu else None
        if device.type == "cpu":
            return None
        return device

    def _prefetched(self, dataset: Dataset) -> Dataset:
        """Return the dataset with the number of batches read ahead that it, or the options, ask for."""
        if not self.options.experimental_fetch_to_device:
            return dataset
        n_of_options = self.options.experimental_per_replica_buffer_size
        return dataset.prefetch(max(dataset.prefetch_batches, n_of_options))


@dataclass(frozen=True)
class _Pass:
    """A pass that was begun: its start, and how many parts were handed out and trained on before."""

    start: Any
    n_handed_out: int
    n_complete: int


class FirstBatches:
    """The first batches of every pass of a distributed dataset; see `DistributedInput.take`.

    Args:
        batches: distributed dataset.
        count: number of batches of a pass.
    """

    def __init__(self, batches: DistributedInput, count: int) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over the first batches of the next pass; after a restart, over the remaining ones."""
        batches = self._batches
        return DistributedIterator(batches._elements(self._count), lambda: batches.element_spec)
