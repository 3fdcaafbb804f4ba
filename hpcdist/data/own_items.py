"""Rows that a DataLoader of the program's own reads, with random numbers that depend on the row alone.

Worker processes import this file: nothing here may start MPI.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from hpcdist.data.loader_worker import ItemRequest, read_items, show_own_items
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
        batch_sampler: of the program's loader.
        seeds: returns the seeds of the pass that begins.
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
    """Items of a dataset, each read with random numbers of its own.

    Args:
        items: dataset of the program.

    Attributes:
        items: as given.
    """

    def __init__(self, items: Any) -> None:
        self.items = items
        self._numbers = RowNumbers([items])
        self._has_begun = False

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, keys: _SeededKeys) -> list[Any]:
        """Return the items of a batch; torch calls it with what the batch sampler yields."""
        is_in_worker = get_worker_info() is not None
        if is_in_worker and not self._has_begun:
            show_own_items()
        self._has_begun = True
        with nullcontext() if is_in_worker else self._numbers.keeping():
            return read_items(self.items, ItemRequest(list(keys), keys.seeds), self._numbers).items


class SeededLoader:
    """Lets the passes of a DataLoader read rows with random numbers of their own.

    Args:
        loader: DataLoader of the program, with a batch sampler.
        seeds: returns the seeds of a pass that begins.
    """

    def __init__(self, loader: "DataLoader[Any]", seeds: Callable[[], RowSeeds]) -> None:
        self._dataset = _SeededItems(loader.dataset)
        self._batches = _SeededBatches(loader.batch_sampler, seeds)

    @contextmanager
    def beginning(self, loader: "DataLoader[Any]") -> Iterator[None]:
        """Let iterators of the loader that are made in the block read in this way."""
        attributes = vars(loader)  # torch refuses to set these by name
        dataset = attributes["dataset"]
        batch_sampler = attributes["batch_sampler"]
        attributes.update(dataset=self._dataset, batch_sampler=self._batches)
        try:
            yield
        finally:
            attributes.update(dataset=dataset, batch_sampler=batch_sampler)
