"""Rows that a DataLoader of the program reads, with random numbers that depend on the row alone.

Worker processes import this file: nothing here may start MPI.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from hpcdist.data.loader_worker import (
    ItemRequest,
    ReadItems,
    join_items,
    read_items,
    show_own_items,
)
from hpcdist.data.row_numbers import RowNumbers, RowSeeds


class _SeededKeys(list[Any]):
    """The keys of the items of a batch, and the seeds of their random numbers."""

    def __init__(self, keys: Iterable[Any], seeds: RowSeeds) -> None:
        super().__init__(keys)
        self.seeds = seeds

    def __reduce__(self) -> tuple[Any, ...]:
        return _SeededKeys, (list(self), self.seeds)


class _SeededBatches:
    """Batches of keys, as a batch sampler draws them, with seeds.

    Args:
        batch_sampler: batch sampler of the program's loader.
        seeds: function that returns the seeds of the pass that begins.
    """

    def __init__(self, batch_sampler: Any, seeds: Callable[[], RowSeeds]) -> None:
        self._batch_sampler = batch_sampler
        self._seeds = seeds

    def __iter__(self) -> Iterator[_SeededKeys]:
        seeds = self._seeds()
        for keys in self._batch_sampler:
            yield _SeededKeys(keys, seeds)

    def __len__(self) -> int:
        return len(self._batch_sampler)


class _SeededItems:
    """Items of a dataset, each read with random numbers that are seeded for it.

    Args:
        items: dataset of the program.
        numbers: caller of the functions that may draw random numbers.

    Attributes:
        items: dataset of the program.
    """

    def __init__(self, items: Any, numbers: RowNumbers) -> None:
        self.items = items
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, keys: _SeededKeys) -> ReadItems:
        """Return the items of a batch; torch calls it with what the batch sampler yields."""
        request = ItemRequest(list(keys), keys.seeds)
        with _keeping(self._numbers):
            return read_items(self.items, request, self._numbers)


class _SeededJoin:
    """Joins items with random numbers that are seeded for them.

    Args:
        join: collate_fn of the program's loader.
        numbers: caller of the functions that may draw random numbers.
    """

    def __init__(self, join: Callable[[list[Any]], Any], numbers: RowNumbers) -> None:
        self._join = join
        self._numbers = numbers

    def __call__(self, read: ReadItems) -> Any:
        """Return the items joined."""
        with _keeping(self._numbers):
            return join_items(self._join, read, self._numbers)


def _keeping(numbers: RowNumbers) -> AbstractContextManager[None]:
    """Leave the random numbers of a rank as they were; nothing else uses the numbers of a worker."""
    if get_worker_info() is None:
        return numbers.keeping()
    return nullcontext()


class _BeginWorker:
    """Begins a worker process: get_worker_info() returns the program's dataset, as in a worker of the program's loader.

    Args:
        init: worker_init_fn of the program's loader.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        show_own_items()
        if self._init is not None:
            self._init(worker)


class SeededLoader:
    """Lets the passes of a DataLoader read rows with random numbers that are seeded for them.

    Args:
        loader: DataLoader of the program, with a batch sampler.
        seeds: function that returns the seeds of a pass that begins.
    """

    def __init__(self, loader: "DataLoader[Any]", seeds: Callable[[], RowSeeds]) -> None:
        self._attributes = {
            "dataset": _SeededItems(loader.dataset, RowNumbers([loader.dataset])),
            "batch_sampler": _SeededBatches(loader.batch_sampler, seeds),
            "collate_fn": _SeededJoin(loader.collate_fn, RowNumbers([loader.collate_fn])),
            "worker_init_fn": _BeginWorker(loader.worker_init_fn),
        }
        loader._iterator = None  # workers that were kept from before would read in another way

    @contextmanager
    def beginning(self, loader: "DataLoader[Any]") -> Iterator[None]:
        """Let iterators of the loader that are made in the block read in this way."""
        attributes = vars(loader)  # torch refuses to set some of these by name
        before = {name: attributes[name] for name in self._attributes}
        attributes.update(self._attributes)
        try:
            yield
        finally:
            attributes.update(before)
