"""Distributed datasets: this rank's parts of every batch, and the cursor from which a restart resumes."""

import contextlib
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hpcdist.data.batches import (
    Cursor,
    DividedBatches,
    Division,
    Plan,
    ShardedBatches,
    StreamPosition,
    batch_sizes,
    end_of_pass,
    in_parts,
    next_pass,
)
from hpcdist.data.dataset import Dataset
from hpcdist.data.elements import is_torch_data
from hpcdist.data.iterator import Delivery, DistributedIterator, PipelineReader
from hpcdist.data.options import AutoShardPolicy, InputOptions
from hpcdist.data.prefetch import Items
from hpcdist.data.row_numbers import program_seed
from hpcdist.data.rows import spec_of
from hpcdist.data.same_rows import describe_first_rows
from hpcdist.data.streams import Stream
from hpcdist.errors import DataError, agreed
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import Mixing
from hpcdist.runtime.parts import Part
from hpcdist.runtime.step_flags import StepFlags
from hpcdist.runtime.time_spent import time_spent

logger = logging.getLogger("hpcdist")

#: The policies by which each replica reads another shard, and the name of the number of shards in a checkpoint.
_SHARDS_KEYS = {AutoShardPolicy.FILE: "file_shards", AutoShardPolicy.HINT: "hint_shards"}


def as_dataset(dataset_like: Any) -> Any:
    """Return a Dataset of the rows of a torch dataset or the batches of a DataLoader; anything else as it is.

    Raises:
        DataError: for a DataLoader that cannot be divided; on this rank only.
    """
    if is_torch_data(dataset_like):
        return Dataset.from_torch(dataset_like)
    return dataset_like


def check_distributable(dataset: Any, n_replicas: int = 1) -> None:
    """Raise DataError unless `dataset` is a Dataset with a batch size that can be divided as its options say."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"experimental_distribute_dataset: expected an hpcdist.Dataset or a DataLoader, got "
            f"{type(dataset).__name__}; build one with Dataset.from_tensor_slices(...).batch(global_batch)."
        )
    if dataset.order.batch_rows is None:
        raise DataError(
            "experimental_distribute_dataset: expected a dataset with batch(global_batch), got one without; add it."
        )
    dataset.check_hint()
    if dataset.holds_batches and dataset.policy is AutoShardPolicy.OFF:
        raise DataError(
            "experimental_distribute_dataset: expected batch as the last grouping with AutoShardPolicy.OFF, got "
            "elements that were made of batches; call unbatch and batch behind them."
        )
    _plan_of(dataset, range(n_replicas), n_replicas)


def _plan_of(dataset: Dataset, replicas: range, n_replicas: int) -> Plan:
    """Return which rows each local replica reads, by the dataset's policy."""
    order = dataset.order
    policy = dataset.policy
    if policy not in _SHARDS_KEYS:
        is_whole = policy is AutoShardPolicy.OFF
        return DividedBatches(order, Division(replicas, n_replicas, is_whole))
    limits = (order.epoch_limit, order.run_limit, order.pass_limit)
    if order.n_rows != dataset.source.n_rows or not all(map(math.isinf, limits)):
        raise DataError(
            f"experimental_distribute_dataset: expected all rows of the source with {policy}, got take; leave it out, "
            f"or use AutoShardPolicy.DATA."
        )
    shards = [dataset.shard_of(n_replicas, replica) for replica in range(n_replicas)]
    return ShardedBatches(order, shards, replicas)


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


class DistributedDataset(DistributedInput):
    """The parts of this rank's replicas of a dataset's global batches.

    Every `iter()` is one pass, except that the first after `load_state_dict` resumes where the state was taken. A
    global batch of n rows is divided by ceiling: a last short batch leaves the last replicas with fewer rows or none.
    With AutoShardPolicy.OFF every replica reads all rows, ceil(batch / n) at a time, so that a pass has n times as many
    steps. With FILE, replica r of n reads the files r, r + n, ...
    alone, ceil(batch / n) rows a step; replicas without rows get empty parts until all are out of rows. HINT does the
    same with rows.

    The cursor counts global samples, so a restart on other ranks, with other replicas or another batch size, repeats no
    sample and skips none; with FILE and HINT, replicas and batch size must stay the same inside a run of epochs. To
    resume costs nothing where rows can be read in any order; a stream (generator, torch IterableDataset) starts at the
    epoch of the cursor, and the rows of that epoch that were used are drawn and dropped.

    Args:
        dataset: dataset with `batch(global_batch)`.
        replicas: replicas of this rank.
        n_replicas: number of replicas on all ranks.
        delivery: connections to the strategy.
        options: options of the input.
        random_seed: seed of the random numbers that reading draws, equal on all ranks. None takes it from the program's
            seeds.

    Attributes:
        dataset: dataset that is read, with the number of batches that are read ahead.

    Raises:
        DataError: when the dataset has no batch size; with FILE and fewer files than replicas; for a marked shard
            without HINT, or HINT without a marked shard.
    """

    def __init__(
        self,
        dataset: Dataset,
        replicas: range,
        n_replicas: int,
        delivery: Delivery | None = None,
        options: InputOptions | None = None,
        random_seed: int | None = None,
    ) -> None:
        check_distributable(dataset, n_replicas)
        super().__init__(len(replicas), delivery or Delivery(), options)
        self._batch_rows = dataset.order.batch_rows
        if dataset.policy is AutoShardPolicy.OFF:
            dataset = replace(dataset, order=in_parts(dataset.order, n_replicas))
        self.dataset = self._prefetched(dataset)
        self._replicas = replicas
        self._n_replicas = n_replicas
        self._cursor = Cursor()
        self._n_left_epochs = 0
        self._has_checked_parts = False
        self._random_seed = program_seed() if random_seed is None else random_seed
        self._reader: PipelineReader | None = None

    @property
    def has_global_rows(self) -> bool:
        """Whether this rank knows the rows of a batch on all replicas together."""
        return self.dataset.policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)

    @property
    def position(self) -> int:
        """Global samples yielded so far, over all epochs and passes."""
        return self._cursor.position

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one.

        An epoch ends when its iterator ends. Passes that were left before their end are not counted.
        """
        return self._order_epoch() - self._n_left_epochs

    def _order_epoch(self) -> int:
        """Return the number of the epoch in the order of rows, in which passes that were left count, too."""
        if self.dataset.is_stream:
            return self._cursor.stream.epoch
        position = self._cursor.position
        if position != self._cursor.pass_start:
            position -= 1
        return self.dataset.order.epoch_of(position)

    def __len__(self) -> int:
        """Return how many batches a pass has.

        Raises:
            TypeError: when it has no end, or only drawing tells.
        """
        return len(self.dataset)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is read."""
        order = self.dataset.order
        n_parts = self._n_replicas
        if self.dataset.policy is AutoShardPolicy.OFF:
            n_parts = 1
        part_rows, remainder = divmod(order.batch_rows or 0, n_parts)
        n_rows: int | None = None
        if order.drop_remainder and not remainder:
            n_rows = part_rows
        return spec_of(self.dataset.part_without_rows(), n_rows)

    def _begin_pass(self) -> None:
        is_whole = self._is_at_end or self._cursor.position == self._cursor.pass_start
        epoch = self._order_epoch()
        self._cursor = next_pass(self.dataset.order, self._cursor)
        if not is_whole:
            self._n_left_epochs += self._order_epoch() - epoch

    def _readers(self) -> list[Items]:
        if self._reader is None:
            plan = _plan_of(self.dataset, self._replicas, self._n_replicas)
            self._reader = PipelineReader(self.dataset, plan, self._random_seed)
        return [self._reader.stages(self._cursor, self._device())]

    @property
    def _n_in_pass(self) -> int:
        return self._cursor.n_batches

    @property
    def _knows_end(self) -> bool:
        return not self.dataset.is_stream

    @property
    def _is_at_end(self) -> bool:
        return self._is_end(self._cursor)

    def _is_end(self, cursor: Cursor) -> bool:
        """Return whether a cursor is known to be at the end of its pass."""
        order = self.dataset.order
        if self.dataset.is_stream:
            return False
        return order.next_batch(cursor.position, cursor.pass_start + order.n_samples) is None

    @property
    def _beginning(self) -> "_DatasetPosition":
        return _DatasetPosition(Cursor(), 0)

    def _position(self) -> "_DatasetPosition":
        return _DatasetPosition(self._cursor, self._n_left_epochs)

    def _restore(self, position: "_DatasetPosition") -> None:
        self._cursor = position.cursor
        self._n_left_epochs = position.n_left_epochs

    def _part(self, is_for_training: bool) -> Part:
        policy = self.dataset.policy
        rows = self._cursor.part_rows
        total_rows = self.global_rows
        is_everywhere = False
        if policy is AutoShardPolicy.OFF:
            total_rows = self.global_rows * self._n_replicas
            is_everywhere = True
        elif policy not in _SHARDS_KEYS:
            division = Division(self._replicas, self._n_replicas)
            is_everywhere = division.is_everywhere(self.global_rows)
        batch_id = (
            self._source.number,
            self._cursor.pass_start,
            self._cursor.pass_epoch,
            self._cursor.position,
        )
        return Part(
            source=self._source,
            number=self._source.n_handed_out + 1,
            rows=rows,
            total_rows=total_rows,
            is_everywhere=is_everywhere,
            key=hash(batch_id),
            position=self._position(),
            is_for_training=is_for_training,
        )

    def _next_parts(self, readers: list[Items]) -> list[Nest] | None:
        cursor, parts = next(readers[0], (self._cursor, None))
        if self._delivery.agree_rows is not None and self.dataset.is_stream:
            self._delivery.agree_rows(cursor.position - self._cursor.position)
        if self._delivery.agree_first_rows is not None and cursor.first_rows and parts is not None:
            has_drawn_again = self._delivery.agree_first_rows(
                cursor.first_rows, self._describe_first_rows
            )
            if has_drawn_again:  # the stream may have one state for all iterators
                readers[0].close()
                readers[:] = self._readers()
                cursor, parts = next(readers[0])
        # between two epochs of a pass, the cursor also moves over the rows of a dropped remainder
        rows = cursor.position - self._cursor.position
        self.global_rows = min(rows, self._batch_rows or rows)
        self._cursor = cursor
        if not self._has_checked_parts:
            self._has_checked_parts = True
            self._check_parts_without_rows()
        return parts

    def _describe_first_rows(self) -> list[int | None]:
        assert isinstance(self.dataset.source, Stream), (
            "rows with random access are compared before they are drawn"
        )
        return describe_first_rows(self.dataset.source, self._cursor.stream.epoch)

    def _check_parts_without_rows(self) -> None:
        """Raise DataError if a batch leaves replicas without rows, and there is no such part; the job ends."""
        source = self.dataset.source
        if isinstance(source, Stream) or self.dataset.policy not in (
            AutoShardPolicy.AUTO,
            AutoShardPolicy.DATA,
        ):
            return
        division = Division(self._replicas, self._n_replicas)
        if all(division.is_everywhere(n_rows) for n_rows in batch_sizes(self.dataset.order)):
            return
        source.take(np.zeros(0, np.int64))

    def _rows_of_last(self) -> int:
        return self.global_rows

    def _end_pass(self) -> None:
        self._cursor = end_of_pass(self.dataset.order, self._cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the batch that was used last. Equal on all ranks.

        It holds the position, the start of the pass, the number of its batches, the number of epochs that were left,
        the number of rows and the seeds; for a stream also the position in it.
        """
        saved_position: _DatasetPosition = self._saved_position()
        order = self.dataset.order
        cursor = self._without_end(saved_position.cursor)
        state: dict[str, Any] = {
            "position": cursor.position,
            "pass_start": cursor.pass_start,
            "n_batches": cursor.n_batches,
            "left_epochs": saved_position.n_left_epochs,
            "n_rows": order.n_rows,
            "seed": order.seed,
            "batch": self._batch_rows,
            "random_seed": self._random_seed,
        }
        if order.mixing is not None:
            state["mixing"] = _describe_mixing(order.mixing)
        if self.dataset.is_stream:
            stream = cursor.stream
            state["stream"] = [stream.epoch, stream.offset, stream.run_offset, cursor.pass_epoch]
        if self.dataset.policy in _SHARDS_KEYS:
            state[_SHARDS_KEYS[self.dataset.policy]] = self._n_replicas
        return state

    def _without_end(self, cursor: Cursor) -> Cursor:
        """Return the start of the next pass for the end of a pass whose loop another source ends.

        After a restart that loop does not ask this dataset any more, and would find it without batches the next time.
        """
        is_following = self._flags.loop.is_following(self._source) and not self._source.is_trusted
        if not is_following or cursor.position == cursor.pass_start or not self._is_end(cursor):
            return cursor
        return end_of_pass(self.dataset.order, cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor, if need be with another batch size or number of replicas.

        Raises:
            DataError: when the cursor is of a dataset with another number of rows or another seed, or one that was
                divided by files or rows among another number of replicas.
        """
        if self.dataset.has_drawn_seed:
            self.dataset = self.dataset.with_seed(state["seed"])
        self._require_same_data(state)
        has_other_batch = state.get("batch") not in (None, self._batch_rows)
        if has_other_batch and self.dataset.holds_batches:
            raise DataError(
                f"restore: expected batches of {state['batch']} rows as in the checkpoint, got {self._batch_rows}, in "
                f"a dataset that is made of batches; use the same batch size."
            )
        if has_other_batch and 0 in self._replicas:  # said once
            logger.warning(
                "restore: the global batch was %d rows at the save and is %d now: the sample is the same, but steps "
                "and learning rates mean something else.",
                state["batch"],
                self._batch_rows,
            )
        self._random_seed = state["random_seed"]
        self._reader = None
        *stream, pass_epoch = state.get("stream") or (0, 0, 0, 0)
        self._cursor = Cursor(
            state["position"],
            state["pass_start"],
            StreamPosition(*stream),
            pass_epoch,
            state.get("n_batches", 0),
        )
        self._n_left_epochs = state.get("left_epochs", 0)
        self._resume()

    def _require_same_data(self, state: dict[str, Any]) -> None:
        """Raise DataError if a cursor is of other rows, of another order, or of other shards."""
        order = self.dataset.order
        current: dict[str, Any] = {
            "n_rows": order.n_rows,
            "seed": order.seed,
            "mixing": None,
        }
        if order.mixing is not None:
            current["mixing"] = _describe_mixing(order.mixing)
        for policy, key in _SHARDS_KEYS.items():
            current[key] = None
            if self.dataset.policy is policy:
                current[key] = self._n_replicas
        for key, value in current.items():
            if state.get(key) != value:
                raise DataError(
                    f"restore: expected a dataset with {key} {state.get(key)} as in the checkpoint, got {value}; "
                    f"use the same data and seed, or a new run folder."
                )


def _describe_mixing(mixing: Mixing) -> list[int]:
    """Return how far rows are mixed, as JSON."""
    return [mixing.chunk_rows, mixing.n_chunks]


@dataclass(frozen=True)
class _DatasetPosition:
    """Position of a distributed dataset: its cursor, and epochs of the order that no finished pass has covered."""

    cursor: Cursor
    n_left_epochs: int
