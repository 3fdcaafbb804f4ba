"""Reads items of a dataset as a DataLoader of the program does: by its workers, and with its other settings."""

import functools
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from hpcdist.child_processes import obey_only, signals_held_back
from hpcdist.cluster.environment import read_environment, timeout_s
from hpcdist.data.parts_without_rows import part_without_rows
from hpcdist.data.prefetch import pinned
from hpcdist.data.same_rows import own_random_numbers
from hpcdist.data.worker_start import worker_context
from hpcdist.errors import DataError
from hpcdist.nest import Nest, map_nest

logger = logging.getLogger("hpcdist")

#: Items of one part of a batch, by their numbers or other keys in the dataset.
ItemKeys = Sequence[Any]
#: Share of HPCDIST_TIMEOUT_S that a batch may take: this rank is to report its worker before others report this rank.
_TIMEOUT_SHARE = 0.8


class LoaderReader:
    """Reads parts of batches, one pass after another, as a DataLoader would.

    Workers, `persistent_workers`, `pin_memory`, `timeout`, `prefetch_factor`, `worker_init_fn` and
    `multiprocessing_context` are the loader's. Without a timeout a worker has 80 % of HPCDIST_TIMEOUT_S for a batch.

    Args:
        loader: DataLoader of the program.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._items: Any = loader.dataset
        self._collate = collate_of(loader)
        self._row_loader: _RowLoader | None = None
        self._empty_part: _EmptyPart | None = None
        self._is_reading = False
        self._n_passes = 0

    def read_here(self, keys: ItemKeys) -> Nest:
        """Return at least one item, joined, read in this process."""
        return self._collate([self._items[key] for key in keys])

    def part_without_rows(self, key: Any) -> Nest:
        """Return a part of no items. Cost: an item is read in this process, unless parts have been read.

        Args:
            key: of any item.

        Raises:
            DataError: where the collate_fn returns what has no value for no items.
        """
        if self._empty_part is None:
            with own_random_numbers():
                self._empty_part = _EmptyPart.made_of(self._collate, self._items[key])
        return self._empty_part.part_or_error()

    def read(self, requests: Iterable[ItemKeys]) -> Iterator[Nest]:
        """Yield the joined items of every request, which have at least one; workers, if there are any, read ahead.

        Raises:
            DataError: when a worker ends or takes too long; on this rank only.
        """
        if not self._loader.num_workers:
            for keys in requests:
                part = self.read_here(keys)
                yield pinned(part) if self._loader.pin_memory else part
            return
        for_workers, now = itertools.tee(requests)
        batches = self._begin_pass(for_workers)
        was_reading = self._is_reading
        self._is_reading = True
        try:
            for number, keys in enumerate(now):
                yield self._next_batch(batches, number, keys)
        finally:
            self._is_reading = was_reading

    def _begin_pass(self, requests: Iterator[ItemKeys]) -> Iterator[Any]:
        """Return an iterator over what workers read; persistent ones are those of the last pass."""
        row_loader = self._row_loader
        if row_loader is None or self._is_reading:  # a pass inside another one has workers of its own
            row_loader = self._make_row_loader()
        if not self._is_reading:
            self._row_loader = row_loader
        row_loader.begin_pass(map(list, requests), self._n_passes)
        self._n_passes += 1
        with signals_held_back():
            return iter(row_loader)

    def _make_row_loader(self) -> "_RowLoader":
        loader = self._loader
        init_worker = functools.partial(_begin_worker, os.getpid(), loader.worker_init_fn)
        limit_s = loader.timeout or _TIMEOUT_SHARE * timeout_s(read_environment())
        generator = loader.generator
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        return _RowLoader(
            seed,
            loader.dataset,
            batch_sampler=_Requests(),
            num_workers=loader.num_workers,
            collate_fn=_JoinInWorker(self._collate),
            timeout=limit_s,
            worker_init_fn=init_worker,
            multiprocessing_context=worker_context(loader),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory=loader.pin_memory,
        )

    def _next_batch(self, batches: Iterator[Any], number: int, keys: ItemKeys) -> Nest:
        try:
            joined: _Joined = next(batches)
        except RuntimeError as error:
            what_happened, advice = _failure_of(batches, error)
            if not advice:  # the dataset's own error, with its traceback
                raise
            n_workers = self._loader.num_workers
            worker = number % n_workers
            raise DataError(
                f"DataLoader: expected worker {worker} of {n_workers} to read items {keys[0]} to {keys[-1]}, got "
                f"{what_happened}; {advice}."
            ) from None
        if joined.empty_part is not None:
            self._empty_part = joined.empty_part
        return joined.part


@dataclass(frozen=True)
class _EmptyPart:
    """A part of no items, or why there is none."""

    part: Nest
    refusal: str | None = None

    @classmethod
    def made_of(cls, join: Callable[[list[Any]], Nest], item: Any) -> "_EmptyPart":
        """Return the part of no items, as of one item."""
        try:
            return cls(part_without_rows(join, item))
        except DataError as error:
            return cls(None, str(error))

    def part_or_error(self) -> Nest:
        """Return the part.

        Raises:
            DataError: where there is none.
        """
        if self.refusal is not None:
            raise DataError(self.refusal)
        return self.part


@dataclass(frozen=True)
class _Joined:
    """What a worker sends: a part of a batch, and with its first one a part of no items."""

    part: Nest
    empty_part: _EmptyPart | None = None

    def pin_memory(self) -> "_Joined":
        """Return this with pinned copies of tensors; torch calls it in the thread that pins."""
        return replace(self, part=map_nest(_pinned, self.part))


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


class _JoinInWorker:
    """Joins items in a worker process.

    Args:
        join: makes a part of a list of items.
    """

    def __init__(self, join: Callable[[list[Any]], Nest]) -> None:
        self._join = join
        self._is_first = True

    def __call__(self, items: list[Any]) -> _Joined:
        """Return the items joined."""
        part = self._join(items)
        if not self._is_first:
            return _Joined(part)
        self._is_first = False
        with own_random_numbers():
            return _Joined(part, _EmptyPart.made_of(self._join, items[0]))


class _Requests:
    """What the workers of a loader are asked for."""

    def __init__(self) -> None:
        self._requests: Iterator[list[Any]] = iter(())

    def begin_pass(self, requests: Iterator[list[Any]]) -> None:
        """Ask for other items from now on."""
        self._requests = requests

    def __iter__(self) -> Iterator[list[Any]]:
        return self._requests


class _RowLoader(DataLoader[Any]):
    """Reads for a distributed dataset, which shows to the program's loop what it hands out.

    Args:
        seed: of the workers' random numbers.
        dataset: whose items are read.
        batch_sampler: the requests.
        settings: those of a DataLoader.
    """

    #: Whether a loop over this loader is a loop of the program.
    is_shown = False

    def __init__(self, seed: int, dataset: Any, batch_sampler: _Requests, **settings: Any) -> None:
        self._seed = seed
        self._requests = batch_sampler
        # a generator of its own: torch's would be drawn from where a pass begins, and a restart begins it elsewhere
        super().__init__(dataset, batch_sampler=batch_sampler, generator=torch.Generator(), **settings)

    def begin_pass(self, requests: Iterator[list[Any]], number: int) -> None:
        """Read other items from the next iterator on."""
        self._requests.begin_pass(requests)
        self.generator.manual_seed((self._seed + number) % (1 << 63))


def _begin_worker(owner: int, init: Callable[[int], None] | None, worker_id: int) -> None:
    obey_only(owner)
    if init is not None:
        init(worker_id)


def _failure_of(batches: Any, error: RuntimeError) -> tuple[str, str]:
    """Return what has happened to the workers of an iterator of torch, and what to do; nothing if an item raised."""
    for process in getattr(batches, "_workers", ()):
        if process.exitcode == -signal.SIGKILL:
            advice = "use fewer workers, or a smaller prefetch_factor"
            return f"process {process.pid} killed by signal 9, as where a host runs out of memory", advice
        if process.exitcode:
            return f"process {process.pid} ended with exit code {process.exitcode}", "look at its lines above"
    if "timed out" in str(error):
        return "nothing in time", "look at what the dataset waits for, or set the loader's timeout"
    return "", ""


def collate(items: list[Any]) -> Nest:
    """Return items joined by torch's default_collate, with tuples for tuples."""
    return _formed_as(items[0], default_collate(items))


def _formed_as(item: Any, joined: Any) -> Any:
    if isinstance(item, dict):
        return {key: _formed_as(item[key], joined[key]) for key in item}
    if isinstance(item, tuple) and not hasattr(item, "_fields"):
        return tuple(_formed_as(*pair) for pair in zip(item, joined, strict=True))
    return joined


def collate_of(loader: "DataLoader[Any]") -> Callable[[list[Any]], Nest]:
    """Return what joins the items of a loader."""
    if loader.collate_fn is default_collate or loader.batch_sampler is None:
        return collate
    return loader.collate_fn
