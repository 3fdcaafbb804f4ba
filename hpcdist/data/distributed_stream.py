"""Distributed DataLoaders over an IterableDataset with workers: each worker of each rank has a share of its rows."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpcdist.data.counted_steps import CountedPart, CountedSteps
from hpcdist.data.first_rows import (
    N_FIRST_ROWS,
    FirstRows,
    RowDigests,
    are_same_shares,
    different_workers,
    doubled_workers,
    random_leaves,
)
from hpcdist.data.iterator import Delivery, on_host
from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import Items, moved_ahead, read_in_thread
from hpcdist.data.rows import spec_of
from hpcdist.data.share_reader import ShareReader
from hpcdist.data.stream_worker import Shares
from hpcdist.errors import DataError, agreed
from hpcdist.nest import Nest


def has_stream_in_workers(data: Any) -> bool:
    """Return whether something is a DataLoader whose workers draw from an IterableDataset."""
    return (
        isinstance(data, DataLoader)
        and isinstance(data.dataset, IterableDataset)
        and data.num_workers > 0
    )


class DistributedStream(CountedSteps):
    """Parts that the workers of this rank make of their share of a stream.

    Each worker makes parts of ceil(batch / n) rows, and a smaller part of its last rows, as torch's workers do;
    replicas take the parts of the rank's workers in turn. Every row is in exactly one part. In the first pass of a
    process, the ranks compare the rows that their workers begin with.

    Cost of a restart: the parts of the pass that were used are read and dropped.

    Args:
        loader: DataLoader of the program, with the global batch and workers.
        shares: shares into which rows are cut.
        replicas: replicas of this rank.
        n_replicas: number of replicas on all ranks.
        gather: function that is called with an object of each rank, and returns the objects of all ranks. Collective.
        delivery: connections to the strategy.
        options: options of the input.

    Raises:
        DataError: for a loader without a batch size; on this rank only.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        shares: Shares,
        replicas: range,
        n_replicas: int,
        gather: Callable[[Any], list[Any]],
        delivery: Delivery,
        options: InputOptions | None = None,
    ) -> None:
        if loader.batch_size is None:
            raise DataError(
                f"experimental_distribute_dataset: expected a batch_size of the DataLoader over "
                f"{type(loader.dataset).__name__}, got none; let the dataset yield rows, or use num_workers=0."
            )
        super().__init__(replicas, n_replicas, loader.drop_last, delivery, options)
        self._name = type(loader.dataset).__name__
        self._shares = shares
        self._gather = gather
        self._rows_of_part = -(-loader.batch_size // n_replicas)
        self._reader = ShareReader(loader, shares, self._rows_of_part)
        weakref.finalize(self, self._reader.close)
        self._has_shared_empty_part = False
        self._has_compared = shares.n_ranks * shares.n_workers == 1
        self._n_read_steps = 0

    def set_seed(self, seed: int) -> None:
        """Seed what workers draw at random; see `CountedSteps`."""
        super().set_seed(seed)
        self._reader.set_seed(seed)

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is drawn, unless parts have been read."""
        return spec_of(self._reader.part_without_rows(), None)

    # -- reading ------------------------------------------------------------------------------------------------

    def _readers(self) -> list[Items]:
        self._n_read_steps = 0
        items: Items = self._read()
        self._drop([items], self._n_steps * self._n_local)
        n_ahead = self.options.experimental_per_replica_buffer_size
        if self.options.experimental_fetch_to_device and n_ahead:
            items = read_in_thread(items, n_ahead)
        device = self._device()
        if device is not None:
            items = moved_ahead(items, device)
        return [items]

    def _read(self) -> Items:
        """Yield (rows, [part]) of every part of this pass."""
        for n_rows, part in self._reader.read(self._n_passes):
            yield n_rows, [part]

    def _next_local_parts(self, readers: list[Items]) -> list[CountedPart]:
        local_parts: list[CountedPart] = []
        for _ in range(self._n_local):
            with on_host():
                item = next(readers[0], None)
            if item is None:
                local_parts.append(None)
                continue
            n_rows, [nest] = item
            local_parts.append((n_rows, nest))
        if not self._has_shared_empty_part:
            self._has_shared_empty_part = True
            self._share_empty_part()
        return local_parts

    def _next_parts(self, readers: list[Items]) -> list[Nest] | None:
        parts = super()._next_parts(readers)
        self._n_read_steps += 1
        if not self._has_compared:
            # until each worker has sent a part
            n_steps_until_all_sent = -(-self._shares.n_workers // self._n_local)
            n_steps_until_rows_came = n_steps_until_all_sent * -(
                -N_FIRST_ROWS // self._rows_of_part
            )
            self._has_compared = parts is None or self._n_read_steps >= n_steps_until_rows_came
            if self._has_compared or self._n_read_steps == n_steps_until_all_sent:
                self._compare_first_rows()
        return parts

    def _share_empty_part(self) -> None:
        """Take the form of parts without rows from another rank, if this rank has none. Collective."""
        for empty_part in self._gather(self._reader.empty_part):
            if self._reader.empty_part is None:
                self._reader.take_empty_part(empty_part)

    def _part_without_rows(self, local_replica: int) -> Nest:
        return self._reader.part_without_rows()

    # -- whether rows are cut correctly -----------------------------------------------------------------------------

    def _compare_first_rows(self) -> None:
        """Raise DataError on all ranks if workers begin with equal rows that must differ, or the other way round.

        Collective over the ranks of the strategy.

        Cost: a message; where that does not decide, each rank starts two processes that read the first rows.
        """
        all_rows: list[FirstRows] = []
        for first_rows in self._gather(self._reader.first_rows()):
            all_rows += first_rows
        all_rows.sort(key=lambda first_rows: first_rows.worker)
        doubled = doubled_workers(all_rows)
        if doubled is not None:
            raise agreed(
                DataError(
                    f"DataLoader: expected other rows in each worker that reads {self._name}, got the same ones in "
                    f"{self._names_of(doubled)}; cut them by get_worker_info().id and num_workers, and draw rows that "
                    f"are made at random from its seed."
                )
            )
        may_differ_by_rank = self._shares.n_ranks > 1 and not self._shares.is_sharded
        has_cut = may_differ_by_rank and any(first_rows.is_cut for first_rows in all_rows)
        if not has_cut and different_workers(all_rows, set()) is None:
            return
        shares_read: list[RowDigests] = []
        random: set[int] = set()
        for first_read, second_read in self._gather(self._reader.describe_first_share()):
            random |= random_leaves(first_read, second_read)
            shares_read.append(first_read)
        different = different_workers(all_rows, random)
        if different is None and are_same_shares(shares_read, random):
            return
        workers = "one share as ranks read it"
        if different is not None:
            workers = self._names_of(different)
        raise agreed(
            DataError(
                f"experimental_distribute_dataset: expected {self._name} to give the same rows to the same share on "
                f"each rank, got others in {workers}; pass is_sharded=True if it gives each rank other rows itself, "
                f"cut rows by get_worker_info().id and num_workers alone, or shuffle by the libraries' generators."
            )
        )

    def _names_of(self, workers: tuple[int, int]) -> str:
        """Return the names of two workers by their numbers in the job; see `Shares.number_in_job`."""
        names: list[str] = []
        for number in workers:
            worker, rank = divmod(number, self._shares.n_ranks)
            names.append(f"worker {worker} of rank {rank}")
        return " and ".join(names)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: as `CountedSteps`, and into which parts rows are cut. Equal on all ranks."""
        return {**super().state_dict(), **self._cut()}

    def _cut(self) -> dict[str, Any]:
        """Return into which parts rows are cut, as JSON."""
        return {
            "ranks": self._shares.n_ranks,
            "num_workers": self._shares.n_workers,
            "part_rows": self._rows_of_part,
            "drop_last": self.ends_with_first,
            "is_sharded": self._shares.is_sharded,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor.

        Raises:
            DataError: when rows were cut into other parts.
        """
        for key, present in self._cut().items():
            if state[key] != present:
                raise DataError(
                    f"restore: expected {key}={state[key]} as in the checkpoint, got {present}; each worker has a "
                    f"share of the stream, and a position in its parts."
                )
        super().load_state_dict(state)
