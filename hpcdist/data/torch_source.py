"""Rows of torch's own datasets and data loaders."""

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from hpcdist.data.loader_reader import LoaderReader
from hpcdist.data.loader_worker import ItemRequest
from hpcdist.data.row_numbers import RowNumbers
from hpcdist.data.sources import Description, Request, RowSource
from hpcdist.data.streams import Stream
from hpcdist.errors import DataError
from hpcdist.nest import Nest, map_nest
from hpcdist.plan.sample_order import Rows


class ItemsSource(RowSource):
    """Items of a map-style dataset, joined as by a DataLoader, except that tuples stay tuples.

    Args:
        items: dataset with a length and items by number.
        loader: DataLoader over `items`, whose workers and settings are kept. None reads in this process.
    """

    def __init__(self, items: Any, loader: "DataLoader[Any] | None" = None) -> None:
        self._items = items
        if loader is None:
            loader = DataLoader(items)
        self._loader = loader
        self._reader = LoaderReader(self._loader)
        weakref.finalize(self, self._reader.close)
        self.n_rows = len(items)

    def describe(self) -> Description:
        """Return the class of the dataset and its number of rows; the data itself is not looked at."""
        return {**super().describe(), "class": type(self._items).__qualname__}

    def to_compare(self, rows: Rows) -> Any:
        """Return items as they are, and their indices in a larger dataset.

        Items that worker processes read are not read here: a dataset may open its files at the first read, and could
        not be sent to them any more.
        """
        if self._loader.num_workers:
            return _indices_of(self._items)
        indices = _indices_of(self._items)
        items = [self._items[row] for row in rows.tolist()]
        return [indices, items]

    def take(self, rows: Rows) -> Nest:
        """Return items, read in this process. For none, one item is read, once, which gives shapes and dtypes.

        Raises:
            DataError: for no items where the loader's collate_fn returns something that has no value for no items.
        """
        if len(rows):
            return self._reader.read_here(ItemRequest(rows.tolist()), RowNumbers())
        if not self.n_rows:
            raise DataError(
                "from_torch: expected at least one item, got an empty dataset; leave it out."
            )
        return self._reader.part_without_rows(0)

    def take_requests(self, requests: Iterable[Request]) -> Iterator[Nest]:
        """Yield the items of every request; worker processes, if any, read ahead."""
        for_reader, now = itertools.tee(requests)
        first = next(iter(for_reader), None)
        if first is None:
            return
        all_requests = itertools.chain([first], for_reader)
        with_rows = (request for request in all_requests if len(request.rows))
        parts = self._reader.read(map(_item_request, with_rows), first.numbers)
        for request in now:
            if len(request.rows):
                yield next(parts)
            else:
                yield self.take(request.rows)


def _item_request(request: Request) -> ItemRequest:
    return ItemRequest(request.rows.tolist(), request.seeds)


def _indices_of(items: Any) -> list[Any]:
    """Return the indices of a Subset, such as one of random_split, and of the Subsets of which it is a part."""
    indices: list[Any] = []
    while isinstance(items, Subset):
        indices.append(np.asarray(items.indices))
        items = items.dataset
    return indices


def is_loader(data: Any) -> bool:
    """Return whether something is a DataLoader."""
    return isinstance(data, DataLoader)


def check_loader(loader: "DataLoader[Any]") -> None:
    """Raise DataError for a DataLoader whose rows have an order that no Dataset has."""
    if not has_plain_order(loader):
        raise DataError(
            f"from_torch: expected a DataLoader with batch_size, and shuffle=True or False, got "
            f"{describe_sampler(loader)}; pass the loader itself to strategy.experimental_distribute_dataset, which "
            f"keeps its sampler."
        )
    if loader.num_workers and isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"DataLoader: expected num_workers=0 for the IterableDataset {type(loader.dataset).__name__}, each row of "
            f"which every rank draws, got {loader.num_workers}; use num_workers=0, and prefetch to read ahead."
        )


def has_plain_order(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader visits all rows once, in their order or a random one, in batches of one size."""
    is_batched_plainly = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if not is_batched_plainly:
        return False
    if isinstance(loader.dataset, IterableDataset) or type(loader.sampler) is SequentialSampler:
        return True
    if type(loader.sampler) is not RandomSampler:
        return False
    return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]


def describe_sampler(loader: "DataLoader[Any]") -> str:
    """Return the name of the sampler that decides the order of a loader's rows, for messages."""
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return f"the batch_sampler {type(loader.batch_sampler).__name__}"
    return f"the sampler {type(loader.sampler).__name__}"


def stream_of(items: Any) -> Stream:
    """Return the rows of an IterableDataset, with tensors for arrays and numbers."""
    return Stream(lambda _: (map_nest(_as_tensor, row) for row in items))


def _as_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(np.asarray(value))
