"""Distributed datasets: this rank's parts of every global batch, and the cursor that a restart goes on from."""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from hpcdist.data.dataset import Dataset
from hpcdist.data.iterators import DistributedIterator, HandOut, OnBatch, Wrap
from hpcdist.data.options import AutoShardPolicy, InputOptions
from hpcdist.data.reading import Cursor, next_pass, read_pass
from hpcdist.data.rows import spec_of
from hpcdist.data.shards import POLICIES, Shards
from hpcdist.data.streams import StreamPlace
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.plan.blocks import ceiling_bounds


def check_distributable(dataset: Any, n_replicas: int = 1) -> None:
    """Raise DataError unless `dataset` is a Dataset with a batch size that can be divided as its options say."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"experimental_distribute_dataset: expected an hpcdist.Dataset, got {type(dataset).__name__}; build one "
            f"with Dataset.from_tensor_slices(...).batch(global_batch)."
        )
    if dataset.order.batch_rows is None:
        raise DataError(
            "experimental_distribute_dataset: expected a dataset with batch(global_batch), got one without; add it."
        )
    dataset.check_hint()
    if dataset.policy in POLICIES:
        Shards(dataset, n_replicas)


class DistributedDataset:
    """The parts of this rank's replicas of a dataset's global batches.

    Every `iter()` is one pass, except the first after `load_state_dict`, which goes on where the state was taken. A
    global batch of n rows is divided by ceiling: a last short batch leaves the last replicas with fewer rows or none.
    With AutoShardPolicy.OFF every replica gets the whole batch. With FILE, replica r of n reads the files r, r + n, ...
    alone, ceil(batch / n) rows a step; replicas that are out of rows get empty parts until all are. HINT does the same
    with rows.

    The cursor counts global samples, so a restart on other ranks, with other replicas or another batch, repeats no
    sample and skips none; with FILE and HINT, replicas and batch must stay as they were inside a run of epochs. To
    go on costs nothing where rows can be read in any order; a stream (generator, torch IterableDataset) is started at
    the epoch of the cursor, and the rows of that epoch that were used are drawn and dropped.

    Args:
        dataset: with `batch(global_batch)`.
        replicas, n_replicas: the replicas of this rank, of how many.
        on_batch: called with the number of rows of every local part that is handed out, and with None at the end of a
            pass.
        wrap: makes what is yielded out of the list of local parts. Without it, the part of the only local replica is
            yielded.
        options: of the input.
        agree_rows: called with the rows of every global batch of a stream (0: it ended), as nobody knows before that
            streams are equal on all ranks; to raise on all ranks when they are not.

    Attributes:
        poll: called when a batch is asked for: what was done with those before is done, and not yet counted is none.

    Raises:
        DataError: when the dataset has no batch size; with FILE and fewer files than replicas; for a shard that is
            marked without HINT, or HINT without one.
    """

    def __init__(
        self,
        dataset: Dataset,
        replicas: range,
        n_replicas: int,
        on_batch: OnBatch | None = None,
        wrap: Wrap | None = None,
        options: InputOptions | None = None,
        agree_rows: Callable[[int], None] | None = None,
    ) -> None:
        check_distributable(dataset, n_replicas)
        self._hand_out = HandOut(on_batch, wrap, options or InputOptions())
        self._hand_out.check(len(replicas))
        self._dataset = replace(dataset, prefetch_batches=self._hand_out.n_ahead(dataset.prefetch_batches))
        self._replicas, self._n_replicas = replicas, n_replicas
        self._agree_rows = agree_rows if dataset.is_stream else None
        self._cursor = Cursor()
        self._goes_on = False
        self.poll: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """Global samples handed out so far, over all epochs and passes."""
        return self._cursor.position

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one. An epoch ends when its iterator ends."""
        if self._dataset.is_stream:
            return self._cursor.place.epoch
        position, start = self._cursor.position, self._cursor.pass_start
        return self._dataset.order.epoch_of(position if position == start else position - 1)

    @property
    def element_spec(self) -> Nest:
        """What a part looks like: the source's nest with a TensorSpec for every array. Cost: a row is read."""
        order = self._dataset.order
        is_fixed = order.drop_remainder and (order.batch_rows or 0) % self._n_replicas == 0
        n_rows = (order.batch_rows or 0) // self._n_replicas if is_fixed else None
        return spec_of(self._dataset.part_without_rows(), n_rows)

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over this rank's parts of one pass: the source's nests, (rows, ...) arrays."""
        return DistributedIterator(self._pass(), lambda: self.element_spec, self.poll)

    def _pass(self) -> Iterator[Any]:
        if not self._goes_on:
            self._cursor = next_pass(self._dataset, self._cursor)
        self._goes_on = False
        for cursor, parts in self._read():
            self._check_rows(cursor.position - self._cursor.position)
            self._cursor = cursor
            yield self._hand_out.hand(parts)
        self._check_rows(0)
        self._cursor = self._end_of_pass()
        self._hand_out.end()

    def _read(self) -> Generator[tuple[Cursor, list[Nest]], None, None]:
        if self._dataset.policy in POLICIES:
            return Shards(self._dataset, self._n_replicas).read_pass(self._cursor, self._replicas)
        return read_pass(self._dataset, self._cursor, self._split)

    def _split(self, n_rows: int) -> list[tuple[int, int]]:
        if self._dataset.policy is AutoShardPolicy.OFF:
            return [(0, n_rows) for _ in self._replicas]
        return [ceiling_bounds(n_rows, self._n_replicas, replica) for replica in self._replicas]

    def _check_rows(self, n_rows: int) -> None:
        if self._agree_rows is not None:
            self._agree_rows(n_rows)

    def _end_of_pass(self) -> Cursor:
        cursor, n_samples = self._cursor, self._dataset.order.n_samples
        # an endless pass ends where not even one batch can be filled: nothing was handed out
        if not self._dataset.is_stream and not math.isinf(n_samples):
            cursor = Cursor(int(cursor.pass_start + n_samples))
        return next_pass(self._dataset, cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: position, start of the pass, rows and seed; a stream's place. Equal on all ranks."""
        cursor, order = self._cursor, self._dataset.order
        state: dict[str, Any] = {
            "position": cursor.position,
            "pass_start": cursor.pass_start,
            "n_rows": order.n_rows,
            "seed": order.seed,
        }
        if self._dataset.is_stream:
            place = cursor.place
            state["stream"] = [place.epoch, place.offset, place.run_offset, cursor.pass_epoch]
        if self._dataset.policy in POLICIES:
            state[POLICIES[self._dataset.policy]] = self._n_replicas
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor, with another batch size or number of replicas if need be.

        Raises:
            DataError: when the cursor is of a dataset with another number of rows or another seed, or that was divided
                by files among another number of replicas.
        """
        if self._dataset.has_drawn_seed:
            self._dataset = self._dataset.with_seed(state["seed"])
        order = self._dataset.order
        shards = [(key, self._n_replicas if self._dataset.policy is one else None) for one, key in POLICIES.items()]
        for key, own in (("n_rows", order.n_rows), ("seed", order.seed), *shards):
            if state.get(key) != own:
                raise DataError(
                    f"restore: expected a dataset with {key} {state.get(key)} as in the checkpoint, got {own}; "
                    f"use the same data and seed, or a new run folder."
                )
        *place, pass_epoch = state.get("stream") or (0, 0, 0, 0)
        self._cursor = Cursor(state["position"], state["pass_start"], StreamPlace(*place), pass_epoch)
        self._goes_on = True
