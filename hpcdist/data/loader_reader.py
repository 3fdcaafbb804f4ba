"""Reads items of a dataset as a DataLoader of the program does: by its workers, and with its other settings."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcdist.data.loader_worker import (
    EmptyPart,
    ItemRequest,
    JoinInWorker,
    NotedItems,
    Progress,
    begin_worker,
    join_items,
    read_items,
)
from hpcdist.data.prefetch import pinned
from hpcdist.data.row_numbers import RowNumbers, own_random_numbers
from hpcdist.data.worker_reader import WorkerLoader, WorkerReader
from hpcdist.nest import Nest


class LoaderReader(WorkerReader):
    """Reads parts of batches, one pass after another, as a DataLoader over items would.

    Args:
        loader: DataLoader of the program.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)
        self._items: Any = loader.dataset
        self._n_passes = 0

    def read_here(self, request: ItemRequest, numbers: RowNumbers) -> Nest:
        """Return at least one item, joined, read in this process.

        Args:
            request: request for the items.
            numbers: caller of the functions that may draw random numbers.
        """
        return join_items(self._collate, read_items(self._items, request, numbers), numbers)

    def part_without_rows(self, key: Any) -> Nest:
        """Return a part of no items. Cost: an item is read in this process, unless parts have been read.

        Args:
            key: key of any item.

        Raises:
            DataError: where the collate_fn returns something that has no value for no items.
        """
        if self._empty_part is None:
            with own_random_numbers():
                [item] = read_items(self._items, ItemRequest([key]), RowNumbers()).items
                self._empty_part = EmptyPart.made_of(self._collate, item)
        return self._empty_part.part_or_error()

    @property
    def has_workers(self) -> bool:
        """Whether worker processes read."""
        return self._loader.num_workers > 0

    def read(
        self,
        requests: Iterable[ItemRequest],
        numbers: RowNumbers,
        number: int | None = None,
    ) -> Iterator[Nest]:
        """Yield the joined items of every request, which have at least one; workers, if there are any, read ahead.

        Args:
            requests: requests for the items of each part.
            numbers: caller of the functions that may draw random numbers in this process.
            number: number of the pass, by which the workers' random numbers are seeded. By default, passes are counted
                from 0.

        Raises:
            DataError: when a worker ends or takes too long; on this rank only.
        """
        if not self.has_workers:
            for request in requests:
                part = self.read_here(request, numbers)
                yield pinned(part) if self._loader.pin_memory else part
            return
        row_loader = self._take_worker_loader()
        assert isinstance(row_loader, _RowLoader), "what _make_worker_loader returns"
        if number is None:
            number = self._n_passes
        row_loader.begin_pass(iter(requests), number)
        self._n_passes += 1
        for joined in self._parts_of_pass(row_loader):
            yield joined.part

    def _make_worker_loader(self) -> "_RowLoader":
        loader = self._loader
        seed = torch.initial_seed()
        if loader.generator is not None:
            seed = loader.generator.initial_seed()
        progress = Progress(loader.num_workers, "item {}")
        noted = NotedItems(self._items, RowNumbers([self._items]), progress)
        join = JoinInWorker(self._collate, RowNumbers([self._collate]))
        return _RowLoader(noted, seed, progress, join, self._worker_settings(begin_worker))


class _Requests:
    """Requests for the items that the workers of a loader read."""

    def __init__(self) -> None:
        self._requests: Iterator[ItemRequest] = iter(())

    def begin_pass(self, requests: Iterator[ItemRequest]) -> None:
        """Ask for other items from now on."""
        self._requests = requests

    def __iter__(self) -> Iterator[ItemRequest]:
        while True:
            request = next(self._requests, None)
            if request is None:
                return
            yield request


class _RowLoader(WorkerLoader):
    """Reads the items that are asked for.

    Args:
        items: items that the workers read.
        seed: seed of the workers' random numbers.
        progress: memory in which workers note the items that they read.
        join: function that makes a part of items.
        settings: settings of the workers.
    """

    def __init__(
        self,
        items: NotedItems,
        seed: int,
        progress: Progress,
        join: JoinInWorker,
        settings: dict[str, Any],
    ) -> None:
        self._seed = seed
        self._requests = _Requests()
        noted: Any = items
        super().__init__(noted, progress, batch_sampler=self._requests, collate_fn=join, **settings)

    def begin_pass(self, requests: Iterator[ItemRequest], number: int) -> None:
        """Read other items from the next iterator on."""
        self._requests.begin_pass(requests)
        self.seed_workers(self._seed + number)

    def end_pass(self) -> None:
        """Forget the requests, and the reader behind them: workers that are kept would keep it, too."""
        self._requests.begin_pass(iter(()))
