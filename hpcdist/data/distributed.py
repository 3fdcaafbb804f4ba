"""Distributed datasets: this rank's parts of every batch, and the cursor from which a restart resumes."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.elements import is_torch_data
from hpcdist.data.iterator import Delivery, PipelineReader
from hpcdist.data.options import AutoShardPolicy, InputOptions
from hpcdist.data.prefetch import Items
from hpcdist.data.row_numbers import program_seed
from hpcdist.data.rows import spec_of
from hpcdist.data.same_rows import describe_first_rows
from hpcdist.data.streams import Stream
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import Mixing
from hpcdist.runtime.parts import Part

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
