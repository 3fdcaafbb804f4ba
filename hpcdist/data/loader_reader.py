"""Reads items of a dataset as a DataLoader of the program does: by its workers, and with its other settings."""

import functools
import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcdist.child_processes import signals_held_back
from hpcdist.cluster.environment import read_environment, timeout_s
from hpcdist.data.loader_worker import (
    EmptyPart,
    Joined,
    JoinInWorker,
    NotedBatches,
    NotedItems,
    Progress,
    begin_worker,
    collate_of,
    items_of,
)
from hpcdist.data.prefetch import pinned
from hpcdist.data.same_rows import own_random_numbers
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.runtime.worker_start import worker_context

#: Items of one part of a batch, by their numbers or other keys in the dataset.
ItemKeys = Sequence[Any]
#: Share of HPCDIST_TIMEOUT_S that a batch may take: this rank is to report its worker before others report this rank.
_TIMEOUT_SHARE = 0.8
#: How long a worker whose connection has ended may take to end, too.
_EXIT_S = 0.5


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
        self._empty_part: EmptyPart | None = None
        self._iterators: set[Any] = set()
        self._is_reading = False
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
        for_workers, now = itertools.tee(requests)
        row_loader = self._take_row_loader()
        row_loader.begin_pass(map(list, for_workers), self._n_passes if number is None else number)
        self._n_passes += 1
        batches: Any = None
        try:
            batches = self._start_workers(row_loader)
            for position, _ in enumerate(now):
                yield self._next_batch(batches, row_loader, position)
        finally:
            is_kept = row_loader is self._row_loader and row_loader.persistent_workers
            row_loader.end_pass()
            if row_loader is self._row_loader:
                self._is_reading = False
            if batches is not None and not is_kept:
                self._iterators.discard(batches)
                _end_workers(batches)

    def _take_row_loader(self) -> "_RowLoader":
        """Return the loader of a pass: that of the last pass, or one of its own for a pass beside another one."""
        if self._is_reading:
            return self._make_row_loader()
        self._is_reading = True
        if self._row_loader is None:
            self._row_loader = self._make_row_loader()
        return self._row_loader

    def _start_workers(self, row_loader: "_RowLoader") -> Any:
        """Return an iterator of torch over the requests of a pass."""
        try:
            with signals_held_back():
                batches = iter(row_loader)
        except (RuntimeError, OSError, EOFError) as error:  # a worker that is kept may have ended since the last pass
            raise DataError(
                f"DataLoader: expected {self._loader.num_workers} workers for a pass, got {error}; look at their "
                f"lines above, and at the memory of the host."
            ) from None
        self._iterators.add(batches)
        return batches

    def close(self) -> None:
        """End all workers. Not collective.

        To be called before the garbage collector takes iterators of torch: it would close their queues first, and each
        would wait 5 s for workers that nobody can reach.
        """
        for batches in self._iterators:
            _end_workers(batches)
        self._iterators = set()

    def _make_row_loader(self) -> "_RowLoader":
        loader = self._loader
        init_worker = functools.partial(begin_worker, os.getpid(), loader.worker_init_fn)
        limit_s = loader.timeout or _TIMEOUT_SHARE * timeout_s(read_environment())
        generator = loader.generator
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        return _RowLoader(
            seed,
            Progress(loader.num_workers),
            loader.dataset,
            batch_sampler=_Requests(),
            num_workers=loader.num_workers,
            collate_fn=JoinInWorker(self._collate),
            timeout=limit_s,
            worker_init_fn=init_worker,
            multiprocessing_context=worker_context(loader),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory=loader.pin_memory,
        )

    def _next_batch(self, batches: Iterator[Any], row_loader: "_RowLoader", number: int) -> Nest:
        try:
            joined: Joined = next(batches)
        except (RuntimeError, OSError, EOFError) as error:  # a worker may end while it sends
            worker, what_happened, advice = _failure_of(batches, error, number % self._loader.num_workers)
            if not advice:  # the dataset's own error, with its traceback
                raise
            raise DataError(
                f"DataLoader: expected worker {worker} of {self._loader.num_workers} to read "
                f"{row_loader.progress.describe(worker)}, got {what_happened}; {advice}."
            ) from None
        if joined.empty_part is not None:
            self._empty_part = joined.empty_part
        return joined.part


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


class _RowLoader(DataLoader[Any]):
    """Reads for a distributed dataset, which shows to the program's loop what it hands out.

    Args:
        seed: seed of the workers' random numbers.
        progress: where workers note what they read.
        dataset: dataset whose items are read.
        batch_sampler: requests for items.
        settings: other settings of a DataLoader.

    Attributes:
        progress: as given.
    """

    #: Whether a loop over this loader is a loop of the program.
    is_shown = False

    def __init__(self, seed: int, progress: Progress, dataset: Any, batch_sampler: _Requests, **settings: Any) -> None:
        self.progress = progress
        self._seed = seed
        self._requests = batch_sampler
        # a generator of its own: torch's would be drawn from where a pass begins, and a restart begins it elsewhere
        kind = NotedBatches if hasattr(dataset, "__getitems__") else NotedItems
        noted: Any = kind(dataset, progress)
        super().__init__(noted, batch_sampler=batch_sampler, generator=torch.Generator(), **settings)

    def begin_pass(self, requests: Iterator[list[Any]], number: int) -> None:
        """Read other items from the next iterator on."""
        self._requests.begin_pass(requests)
        self.generator.manual_seed((self._seed + number) % (1 << 63))

    def end_pass(self) -> None:
        """Forget the requests, and who makes them: workers that are kept would keep it, too."""
        self._requests.begin_pass(iter(()))


def _end_workers(batches: Any) -> None:
    """End the workers of an iterator of torch, which does nothing if they have ended."""
    batches._shutdown_workers()


def _failure_of(batches: Any, error: Exception, awaited_worker: int) -> tuple[int, str, str]:
    """Return which worker of an iterator of torch has failed, how, and what to do; no advice if an item raised."""
    if "DataLoader worker process" in str(error):  # torch raises an item's own error with its traceback as the text
        return awaited_worker, "", ""
    for worker, process in enumerate(getattr(batches, "_workers", ())):
        if not isinstance(error, RuntimeError):
            process.join(_EXIT_S)
        if process.exitcode == -signal.SIGKILL:
            advice = "use fewer workers, or a smaller prefetch_factor"
            return worker, f"process {process.pid} killed by signal 9, as where a host runs out of memory", advice
        if process.exitcode:
            what_happened = f"process {process.pid} ended with exit code {process.exitcode}"
            return worker, what_happened, "look at its lines above"
    if str(error).startswith("DataLoader timed out after"):
        advice = "look at what the dataset waits for, or set the loader's timeout"
        return awaited_worker, "nothing in time", advice
    return awaited_worker, "", ""
