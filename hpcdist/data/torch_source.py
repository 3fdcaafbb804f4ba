"""Rows of torch's own datasets and data loaders."""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
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
    default_collate,
)

from hpcdist.child_processes import obey_only, signals_held_back
from hpcdist.data.rows import no_rows
from hpcdist.data.sources import Description, RowSource
from hpcdist.data.streams import Stream
from hpcdist.errors import DataError
from hpcdist.nest import Nest, map_nest
from hpcdist.plan.sample_order import Rows


class ItemsSource(RowSource):
    """Items of a map-style dataset, joined as by a DataLoader, except that tuples stay tuples.

    Args:
        items: has a length and items by number.
        loader: its worker processes read ahead, and its collate_fn joins items; None reads in this process.
    """

    def __init__(self, items: Any, loader: Any = None) -> None:
        self._items, self._loader = items, loader
        self.n_rows = len(items)
        self._collate: Callable[[list[Any]], Nest] = collate if loader is None else _collate_of(loader)

    def describe(self) -> Description:
        """Return the class of the dataset and its rows; what it reads is not looked at."""
        return {**super().describe(), "class": type(self._items).__qualname__}

    def to_compare(self, rows: Rows) -> Any:
        """Return items as they are, and which ones of a larger dataset these are.

        Items that worker processes read are not read here: a dataset may open its files at the first read, and could
        not be sent to them any more.
        """
        if self._loader is not None and self._loader.num_workers:
            return _indices_of(self._items)
        return [_indices_of(self._items), [self._items[row] for row in rows.tolist()]]

    def take(self, rows: Rows) -> Nest:
        """Return items, read in this process."""
        if len(rows):
            return self._collate([self._items[row] for row in rows.tolist()])
        if not self.n_rows:
            raise DataError("from_torch: expected at least one item, got an empty dataset; leave it out.")
        return no_rows(self.take(np.zeros(1, np.int64)))

    def take_many(self, requests: Iterable[Rows]) -> Iterator[Nest]:
        """Yield the items of every request; worker processes, if any, read ahead."""
        if self._loader is None or not self._loader.num_workers:
            yield from map(self.take, requests)
            return
        ahead, now = itertools.tee(requests)
        loader = _loader_over(self._loader, self._collate, (rows.tolist() for rows in ahead if len(rows)))
        with signals_held_back():
            read = iter(loader)
        for rows in now:
            yield next(read) if len(rows) else self.take(rows)


def _indices_of(items: Any) -> list[Any]:
    """Return the indices of a Subset, such as one of random_split, and of those that it is a part of."""
    found = []
    while isinstance(items, Subset):
        found.append(np.asarray(items.indices))
        items = items.dataset
    return found


class _RowLoader(DataLoader[Any]):
    """Reads rows for a distributed dataset, which itself shows what it hands out."""

    is_shown = False


def _loader_over(loader: Any, collate_rows: Any, batches: Iterator[list[int]]) -> Any:
    """Return a DataLoader with the workers of `loader` that reads the given rows."""
    return _RowLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=collate_rows,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(_begin_worker, os.getpid(), loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context or multiprocessing.get_context(_start_method(loader)),
        prefetch_factor=loader.prefetch_factor,
    )


def _begin_worker(owner: int, init: Callable[[int], None] | None, worker_id: int) -> None:
    obey_only(owner)
    if init is not None:
        init(worker_id)


def collate(rows: list[Any]) -> Nest:
    """Return rows joined by torch's default_collate, with tuples for tuples."""
    return _formed_as(rows[0], default_collate(rows))


def _formed_as(row: Any, joined: Any) -> Any:
    if isinstance(row, dict):
        return {key: _formed_as(row[key], joined[key]) for key in row}
    if isinstance(row, tuple) and not hasattr(row, "_fields"):
        return tuple(_formed_as(*pair) for pair in zip(row, joined, strict=True))
    return joined


def _collate_of(loader: Any) -> Callable[[list[Any]], Nest]:
    given = loader.collate_fn
    if given is default_collate or loader.batch_size is None:
        return collate
    return given  # type: ignore[no-any-return]


def check_loader(loader: Any) -> None:
    """Raise DataError for a DataLoader whose order or worker processes are not supported."""
    name = type(loader.sampler).__name__
    is_iterable = isinstance(loader.dataset, IterableDataset)
    random = loader.sampler if isinstance(loader.sampler, RandomSampler) else None
    is_plain = type(loader.sampler) in (SequentialSampler, RandomSampler) or is_iterable
    if not is_plain or (random and (random.replacement or random.num_samples != len(loader.dataset))):
        raise DataError(
            f"from_torch: expected a DataLoader with shuffle=True or False, got the sampler {name}; hpcdist "
            f"divides the rows among replicas itself, so use shuffle, or pass the dataset and call shuffle and batch."
        )
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise DataError(
            f"from_torch: expected a DataLoader with batch_size, got the batch_sampler "
            f"{type(loader.batch_sampler).__name__}; use batch_size: hpcdist divides batches itself."
        )
    if loader.num_workers and (is_iterable or _start_method(loader) == "fork"):
        raise DataError(
            f"from_torch: expected num_workers=0 or worker processes of a map-style dataset that do not inherit MPI, "
            f"got {loader.num_workers} started by {_start_method(loader)} of a {type(loader.dataset).__name__}; pass "
            f"multiprocessing_context='forkserver' or 'spawn', or num_workers=0 and prefetch."
        )


def _start_method(loader: Any) -> str:
    if loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def stream_of(items: Any) -> Stream:
    """Return the rows of an IterableDataset, with tensors for arrays and numbers."""
    return Stream(lambda _: (map_nest(_as_tensor, row) for row in items))


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
