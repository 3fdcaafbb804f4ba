"""Reads items of a dataset as a DataLoader of the program does: by its workers, and with its other settings."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcdist.data.loader_worker import (
    EmptyPart,
    JoinInWorker,
    NotedBatches,
    NotedItems,
    Progress,
    begin_worker,
    items_of,
)
from hpcdist.data.prefetch import pinned
from hpcdist.data.same_rows import own_random_numbers
from hpcdist.data.worker_reader import WorkerLoader, WorkerReader
from hpcdist.nest import Nest

#: Items of one part of a batch, by their numbers or other keys in the dataset.
ItemKeys = Sequence[Any]


class LoaderReader(WorkerReader):
    """Reads parts of batches, one pass after another, as a DataLoader over items would.

    Args:
        loader: DataLoader of the program.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)
        self._items: Any = loader.dataset
        self._n_passes = 0

    def read_here(self, keys: ItemKeys) -> Nest:
        """Return at least one item, joined, read in this process."""
        return self._collate(items_of(self._items, keys))

    def part_without_rows(self, key: Any) -> Nest:
        """Return a part of no items. Cost: an item is read in this process, unless parts have been read.

        Args:
            key: of any item.

        Raises:
            DataError: where the collate_fn returns what has no value for no items.
        """
        if self._empty_part is None:
            with own_random_numbers():
                [item] = items_of(self._items, [key])
                self._empty_part = EmptyPart.made_of(self._collate, item)
        return self._empty_part.part_or_error()

    def read(self, requests: Iterable[ItemKeys], number: int | None = None) -> Iterator[Nest]:
        """Yield the joined items of every request, which have at least one; workers, if there are any, read ahead.

        Args:
            requests: keys of the items of each part.
            number: of the pass, by which the workers' random numbers are seeded; default: counted from 0.

        Raises:
            DataError: when a worker ends or takes too long; on this rank only.
        """
        if not self._loader.num_workers:
            for keys in requests:
                part = self.read_here(keys)
                yield pinned(part) if self._loader.pin_memory else part
            return
        row_loader = self._take_worker_loader()
        assert isinstance(row_loader, _RowLoader), "what _make_worker_loader returns"
        row_loader.begin_pass(map(list, requests), self._n_passes if number is None else number)
        self._n_passes += 1
        for joined in self._parts_of_pass(row_loader):
            yield joined.part

    def _make_worker_loader(self) -> "_RowLoader":
        loader = self._loader
        generator = loader.generator
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        join = JoinInWorker(self._collate)
        return _RowLoader(self._items, seed, loader.num_workers, join, self._worker_settings(begin_worker))


class _Requests:
    """What the workers of a loader are asked for."""

    def __init__(self) -> None:
        self._requests: Iterator[list[Any]] = iter(())

    def begin_pass(self, requests: Iterator[list[Any]]) -> None:
        """Ask for other items from now on."""
        self._requests = requests

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            keys = next(self._requests, None)
            if keys is None:
                return
            yield keys


class _RowLoader(WorkerLoader):
    """Reads the items that are asked for.

    Args:
        items: dataset of the program.
        seed: seed of the workers' random numbers.
        n_workers: number of workers.
        join: makes a part of a list of items.
        settings: settings of the workers.
    """

    def __init__(self, items: Any, seed: int, n_workers: int, join: JoinInWorker, settings: dict[str, Any]) -> None:
        self._seed = seed
        self._requests = _Requests()
        progress = Progress(n_workers, "item {}")
        kind = NotedBatches if hasattr(items, "__getitems__") else NotedItems
        noted: Any = kind(items, progress)
        super().__init__(noted, progress, batch_sampler=self._requests, collate_fn=join, **settings)

    def begin_pass(self, requests: Iterator[list[Any]], number: int) -> None:
        """Read other items from the next iterator on."""
        self._requests.begin_pass(requests)
        self.seed_workers(self._seed + number)

    def end_pass(self) -> None:
        """Forget the requests, and who makes them: workers that are kept would keep it, too."""
        self._requests.begin_pass(iter(()))
