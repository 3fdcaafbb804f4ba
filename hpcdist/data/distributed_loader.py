"""Distributed DataLoaders with a sampler of the program: this rank's parts of every batch, and the cursor."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpcdist.data.batches import Division
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.iterator import Delivery, on_host
from hpcdist.data.loader_reader import LoaderReader
from hpcdist.data.loader_worker import ItemRequest
from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import Items, moved_ahead, read_ahead
from hpcdist.data.row_numbers import RowNumbers, RowSeeds, seed_of
from hpcdist.data.rows import spec_of
from hpcdist.data.sampler_order import SamplerOrder
from hpcdist.data.torch_source import describe_sampler, has_plain_order
from hpcdist.errors import DataError, agreed
from hpcdist.nest import Nest
from hpcdist.runtime.parts import Part

#: Batches, at least, that the main thread draws before they are asked for: a thread that reads ahead is to draw no
#: random numbers.
_MIN_AHEAD = 1024


def has_own_sampler(data: Any) -> bool:
    """Return whether something is a DataLoader over items whose order only its sampler knows."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    return not has_plain_order(data)


@dataclass(frozen=True)
class LoaderPosition:
    """A position of a distributed loader.

    Attributes:
        n_passes: number of passes that have ended.
        n_batches: number of batches of the pass in progress.
        n_rows: rows of the batch before the position, on all replicas.
    """

    n_passes: int = 0
    n_batches: int = 0
    n_rows: int = field(default=0, compare=False)


class DistributedLoader(DistributedInput):
    """The parts of this rank's replicas of the batches that a DataLoader's sampler or batch sampler draws.

    All ranks draw the same batches, as the random numbers of the sampler are seeded by the seed and the number of the
    pass. A batch of n rows is divided by ceiling. The cursor counts passes and batches, so a restart may have other
    ranks, but needs the same sampler: the keys that were used are compared.

    Args:
        loader: DataLoader of the program, with the global batch.
        seed: seed of the passes, equal on all ranks.
        replicas: replicas of this rank.
        n_replicas: number of replicas on all ranks.
        require_same: function that is called with a text that must be equal on all ranks, and with a function that
            makes the error otherwise. Collective.
        delivery: connections to the strategy.
        options: options of the input.

    Attributes:
        numbers: caller of the functions that may draw random numbers in this process.

    Raises:
        DataError: for a loader without batches; at the first batch, on all ranks, for samplers that differ.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        seed: int,
        replicas: range,
        n_replicas: int,
        require_same: Callable[[str, Callable[[str], DataError]], None],
        delivery: Delivery,
        options: InputOptions | None = None,
    ) -> None:
        if loader.batch_sampler is None:
            raise DataError(
                f"experimental_distribute_dataset: expected a DataLoader with a batch_size, got none with "
                f"{describe_sampler(loader)}; give it one, or a batch_sampler."
            )
        super().__init__(len(replicas), delivery, options)
        self._loader = loader
        self._reader = LoaderReader(loader)
        roots: list[Any] = []
        if not self._reader.has_workers:
            roots = [loader.dataset, loader.collate_fn]
        self.numbers = RowNumbers(roots)
        weakref.finalize(self, self._reader.close)
        self._seed = seed
        self._division = Division(replicas, n_replicas)
        self._require_same = require_same
        self._current = LoaderPosition()
        self._order: SamplerOrder | None = None
        self._checked_order: SamplerOrder | None = None
        n_in_workers = loader.num_workers * (loader.prefetch_factor or 0)
        n_in_thread = self.options.experimental_per_replica_buffer_size
        self._n_ahead = _MIN_AHEAD + n_in_workers + n_in_thread

    @property
    def has_global_rows(self) -> bool:
        """Whether this rank knows the rows of a batch on all replicas together."""
        return True

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one."""
        return self._current.n_passes

    def __len__(self) -> int:
        """Return how many batches the pass in progress, or the next one, has.

        Raises:
            TypeError: when its sampler has neither a known end nor a length.
        """
        order = self._order_of_pass(1)
        if order.is_whole:
            return len(order.batches)
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    @property
    def element_spec(self) -> Nest:
        """The nest of a part with a TensorSpec for every array. Cost: an item is read."""
        return spec_of(self._part_without_rows(), None)

    # -- passes -------------------------------------------------------------------------------------------------

    @property
    def _n_in_pass(self) -> int:
        return self._current.n_batches

    @property
    def _knows_end(self) -> bool:
        return True

    @property
    def _is_at_end(self) -> bool:
        order = self._order_of_pass(self._current.n_batches + 1)
        return order.is_whole and self._current.n_batches == len(order.batches)

    @property
    def _beginning(self) -> LoaderPosition:
        return LoaderPosition()

    def _position(self) -> LoaderPosition:
        return self._current

    def _restore(self, position: LoaderPosition) -> None:
        self._current = position

    def _begin_pass(self) -> None:
        if self._current.n_batches:
            self._end_pass()

    def _end_pass(self) -> None:
        self._current = LoaderPosition(self._current.n_passes + 1)

    def _order_of_pass(self, n_batches: int) -> SamplerOrder:
        """Return the order of this pass, with at least `n_batches` batches unless it ends before. Not collective."""
        order = self._order
        if order is None or order.n_passes != self._current.n_passes:
            order = SamplerOrder(self._loader, self._seed, self._current.n_passes)
            self._order = order
        order.draw(n_batches + self._n_ahead)
        return order

    def check_order(self) -> None:
        """Raise DataError on all ranks unless all draw the same batches in this pass, at least one.

        Collective over the ranks of the strategy. Later passes are compared batch by batch, as gradients are summed.
        """
        order = self._order_of_pass(self._current.n_batches + 1)
        n_batches = len(order.batches)
        summary = f"{n_batches} batches, digest {order.digest_of(n_batches):x}"

        def refusal(chiefs: str) -> DataError:
            return DataError(
                f"experimental_distribute_dataset: expected the batches of the chief, {chiefs}, got {summary} from "
                f"{describe_sampler(self._loader)}; use a sampler that does not depend on the rank, such as "
                f"shuffle=True, as hpcdist divides each batch itself."
            )

        self._require_same(summary, refusal)
        if not n_batches:
            raise agreed(
                DataError(
                    f"experimental_distribute_dataset: expected at least one batch, got none from "
                    f"{describe_sampler(self._loader)}; give it more rows, or leave out drop_last."
                )
            )

    # -- reading ------------------------------------------------------------------------------------------------

    def _readers(self) -> list[Items]:
        if not self._current.n_batches:
            self._order = None  # the program may have changed its sampler since it was drawn
        self._order_of_pass(self._current.n_batches + 1)
        items: Items
        n_ahead = self.options.experimental_per_replica_buffer_size
        if self.options.experimental_fetch_to_device and n_ahead:
            items = read_ahead(self, self._current, n_ahead)
        else:
            items = self.read_from(self._current)
        device = self._device()
        if device is not None:
            items = moved_ahead(items, device)
        return [items]

    def read_from(self, cursor: LoaderPosition) -> Items:
        """Yield (position after it, local parts) of every batch of the pass from a position on."""
        for_reader, now = itertools.tee(self._batches_from(cursor.n_batches))
        requests = self._requests_for(for_reader, cursor.n_passes, cursor.n_batches)
        parts = self._reader.read(requests, self.numbers, cursor.n_passes)
        position = cursor
        for batch in now:
            position = replace(position, n_batches=position.n_batches + 1, n_rows=len(batch))
            with on_host(), self.numbers.keeping():
                local_parts = [self._joined(keys, parts) for _, keys in self._cut(batch)]
            yield position, local_parts

    def _batches_from(self, n_batches: int) -> Iterator[list[Any]]:
        """Yield the keys of the batches of the pass from a batch on.

        Workers ask ahead, maybe beyond the batches that are drawn.
        """
        order = self._order_of_pass(n_batches + 1)
        while n_batches < len(order.batches):
            yield order.batches[n_batches]
            n_batches += 1
        assert order.is_whole, "more batches are asked ahead than the main thread has drawn"

    def _requests_for(
        self,
        batches: Iterator[list[Any]],
        n_passes: int,
        n_batches: int,
    ) -> Iterator[ItemRequest]:
        """Yield a request for each local part that has items.

        Args:
            batches: keys of each batch.
            n_passes: number of passes before this one.
            n_batches: number of the first batch in the pass.
        """
        for number, batch in enumerate(batches, n_batches):
            seed = seed_of(self._seed, n_passes)
            for start, keys in self._cut(batch):
                if keys:
                    yield ItemRequest(keys, RowSeeds(seed, number, start))

    def _cut(self, batch: list[Any]) -> list[tuple[int, list[Any]]]:
        """Return the first position in a batch, and the keys, of each local replica's part."""
        bounds = self._division.bounds(len(batch))
        return [(start, batch[start:stop]) for start, stop in bounds]

    def _joined(self, keys: list[Any], parts: Iterator[Nest]) -> Nest:
        if not keys:
            return self._part_without_rows()
        return next(parts)

    def _part_without_rows(self) -> Nest:
        """Return a part with 0 rows. Cost: the first item of the first batch is read, unless parts have been read."""
        keys = next(batch for batch in self._order_of_pass(1).batches if batch)
        return self._reader.part_without_rows(keys[0])

    def _next_parts(self, readers: list[Items]) -> list[Nest] | None:
        position, parts = next(readers[0], (None, None))
        if position is None:
            return None
        self._current = position
        self.global_rows = position.n_rows
        if self._checked_order is not self._order:
            self._checked_order = self._order
            self._check_parts_without_rows()
        return parts

    def _check_parts_without_rows(self) -> None:
        """Raise DataError if a batch leaves replicas without rows, and there is no such part; the job ends."""
        order = self._order_of_pass(1)
        if all(self._division.is_everywhere(len(batch)) for batch in order.batches):
            return
        self._part_without_rows()

    def _rows_of_last(self) -> int:
        return self.global_rows

    def _part(self, is_for_training: bool) -> Part:
        position = self._current
        order = self._order_of_pass(position.n_batches)
        digest = order.digest_of(position.n_batches)
        batch_id = (self._source.number, position.n_passes, position.n_batches, digest)
        return Part(
            source=self._source,
            number=self._source.n_handed_out + 1,
            rows=self._division.rows_of_parts(self.global_rows),
            total_rows=self.global_rows,
            is_everywhere=self._division.is_everywhere(self.global_rows),
            key=hash(batch_id),
            position=position,
            is_for_training=is_for_training,
        )

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the batch that was used last. Equal on all ranks.

        It holds the number of passes, the number of batches of the pass in progress, the seed, the number of items, and
        a digest of the keys that the pass has used.
        """
        position: LoaderPosition = self._saved_position()
        order = self._order
        if order is None or order.n_passes != position.n_passes:
            order = SamplerOrder(self._loader, self._seed, position.n_passes)
        order.draw(position.n_batches)
        return {
            "passes": position.n_passes,
            "batches": position.n_batches,
            "seed": self._seed,
            "n_rows": self._n_items(),
            "digest": order.digest_of(position.n_batches),
        }

    def _n_items(self) -> int:
        """Return how many items the dataset has; -1 where it does not say."""
        dataset = self._loader.dataset
        if hasattr(dataset, "__len__"):
            return len(dataset)
        return -1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a cursor. Collective over the ranks of the strategy.

        Raises:
            DataError: when it is of another number of items, or the sampler draws other batches; on all ranks alike.
        """
        if state["n_rows"] != self._n_items():
            raise DataError(
                f"restore: expected a dataset of {state['n_rows']} items as in the checkpoint, got {self._n_items()}; "
                f"use the same data, or a new run folder."
            )
        n_batches = state["batches"]
        self._seed = state["seed"]
        self._order = None
        self._current = LoaderPosition(state["passes"], n_batches)
        self.check_order()
        order = self._order_of_pass(n_batches)
        if len(order.batches) < n_batches or order.digest_of(n_batches) != state["digest"]:
            raise agreed(
                DataError(
                    f"restore: expected the {n_batches} batches that {describe_sampler(self._loader)} had drawn "
                    f"before the checkpoint, got others; let it depend on its arguments, set_epoch and the generators "
                    f"that it holds alone, or use a new run folder."
                )
            )
        self._resume()
