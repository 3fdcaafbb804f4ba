"""Distributed DataLoaders over an IterableDataset with workers: each worker of each rank has a share of its rows."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpcdist.data.counted_steps import CountedPart, CountedSteps
from hpcdist.data.iterator import Delivery, on_host
from hpcdist.data.loader_worker import EmptyPart
from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import Items, moved_ahead, read_ahead
from hpcdist.data.rows import spec_of
from hpcdist.data.share_reader import ShareReader
from hpcdist.data.stream_worker import Shares
from hpcdist.errors import DataError
from hpcdist.nest import Nest


def has_stream_in_workers(data: Any) -> bool:
    """Return whether something is a DataLoader whose workers draw from an IterableDataset."""
    return isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and data.num_workers > 0


class DistributedStream(CountedSteps):
    """Parts that the workers of this rank make of their share of a stream.

    Each worker makes parts of ceil(batch / n) rows, and a smaller one of its last rows, as torch's workers do; replicas
    take the parts of the rank's workers in turn. Every row is in exactly one part.

    Cost of a restart: the parts of the pass that were used are read and dropped.

    Args:
        loader: DataLoader of the program, with the global batch and workers.
        shares: into which rows are cut.
        replicas: the replicas of this rank.
        n_replicas: number of replicas on all ranks.
        share_empty_part: called with this rank's part of no rows, or None; returns one that some rank has. Collective.
        delivery: what the strategy connects.
        options: of the input.

    Raises:
        DataError: for a loader without a batch size; on this rank only.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        shares: Shares,
        replicas: range,
        n_replicas: int,
        share_empty_part: Callable[[EmptyPart | None], EmptyPart | None],
        delivery: Delivery,
        options: InputOptions | None = None,
    ) -> None:
        if loader.batch_size is None:
            raise DataError(
                f"experimental_distribute_dataset: expected a DataLoader with a batch_size over "
                f"{type(loader.dataset).__name__}, got none; let the dataset yield rows, or use num_workers=0."
            )
        super().__init__(replicas, n_replicas, loader.drop_last, delivery, options)
        self._shares = shares
        self._share_empty_part = share_empty_part
        self._reader = ShareReader(loader, shares, -(-loader.batch_size // n_replicas))
        weakref.finalize(self, self._reader.close)
        self._has_compared = False

    def set_seed(self, seed: int) -> None:
        """Seed what workers draw at random; see `CountedSteps`."""
        super().set_seed(seed)
        self._reader.set_seed(seed)

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: a row is drawn, unless parts have been read."""
        return spec_of(self._reader.read_empty_part(), None)

    def _readers(self) -> list[Items]:
        items = self._read(self._n_passes, self._n_steps * self._n_local)
        if self.options.experimental_fetch_to_device and self.options.experimental_per_replica_buffer_size:
            items = read_ahead(items, self.options.experimental_per_replica_buffer_size)
        device = self._device()
        return [items if device is None else moved_ahead(items, device)]

    def _read(self, n_passes: int, n_used: int) -> Items:
        """Yield (rows, [part]) of every part of a pass from part `n_used` on."""
        for number, (n_rows, part) in enumerate(self._reader.read(n_passes)):
            if number >= n_used:
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
        if not self._has_compared:
            self._has_compared = True
            self._compare_ranks()
        return local_parts

    def _compare_ranks(self) -> None:
        """Compare the first rows of all ranks, and let each know a part of no rows. Collective: the strategy's ranks.

        Once, as a dataset that cuts by rank does so in each pass.
        """
        if self._delivery.agree_first_rows is not None and not self._shares.is_sharded and self._shares.n_ranks > 1:
            if self._reader.has_rows_alike_everywhere():
                self._delivery.agree_first_rows(self._reader.digest_of_first_rows(), self._reader.describe_first_rows)
            else:
                description = self._reader.describe_first_rows()
                self._delivery.agree_first_rows(hash(tuple(description)), lambda: description)
        self._reader.take_empty_part(self._share_empty_part(self._reader.empty_part))

    def _part_without_rows(self, local_replica: int) -> Nest:
        return self._reader.read_empty_part()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: as `CountedSteps`, and the number of workers. Equal on all ranks."""
        return {**super().state_dict(), "n_workers": self._shares.n_workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor.

        Raises:
            DataError: when it is of another number of replicas or workers.
        """
        if state["n_workers"] != self._shares.n_workers:
            raise DataError(
                f"restore: expected num_workers={state['n_workers']} as in the checkpoint, got "
                f"{self._shares.n_workers}; each worker has a share of the stream."
            )
        super().load_state_dict(state)
