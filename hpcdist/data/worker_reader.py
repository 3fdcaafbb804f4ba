"""Passes that the worker processes of a DataLoader read, and how the end of a worker is reported."""

import functools
import os
import re
import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcdist.child_processes import signals_held_back
from hpcdist.cluster.environment import read_environment, timeout_s
from hpcdist.data.loader_worker import EmptyPart, Joined, Progress, collate_of
from hpcdist.errors import DataError, WorkerDied
from hpcdist.runtime.worker_start import worker_context

#: Share of HPCDIST_TIMEOUT_S that a batch may take: this rank must name its slow worker before others name this rank.
_TIMEOUT_SHARE = 0.8
#: How long a worker whose connection has ended may take to end, too.
_EXIT_S = 0.5
_NUMBERS = re.compile(r"\d+")
#: Readers of this process, which has one handler for the end of a child: a worker may end at any time.
_readers: "weakref.WeakSet[WorkerReader]" = weakref.WeakSet()


class WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers read for a distributed dataset, which itself shows its parts to the program's loop.

    Args:
        data: dataset of torch that the workers read.
        progress: memory in which workers note the items that they read.
        settings: other settings of a DataLoader.

    Attributes:
        progress: memory in which workers note the items that they read.
    """

    #: Whether a loop over this loader is a loop of the program.
    is_shown = False

    def __init__(self, data: Any, progress: Progress, **settings: Any) -> None:
        self.progress = progress
        # a separate generator: torch's would be drawn from where a pass begins, and a restart begins it elsewhere
        super().__init__(data, generator=torch.Generator(), **settings)

    def seed_workers(self, seed: int) -> None:
        """Seed the random numbers of workers that are started from now on."""
        self.generator.manual_seed(seed % (1 << 63))

    def end_pass(self) -> None:
        """Forget what belongs to a pass."""


class WorkerReader(ABC):
    """Reads one pass after another by the workers of a DataLoader, which are kept if they are persistent.

    Workers, `persistent_workers`, `pin_memory`, `timeout`, `prefetch_factor`, `worker_init_fn` and
    `multiprocessing_context` are the loader's. Without a timeout a worker has 80 % of HPCDIST_TIMEOUT_S for a batch.

    Args:
        loader: DataLoader of the program.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._collate = collate_of(loader)
        self._worker_loader: WorkerLoader | None = None
        self._empty_part: EmptyPart | None = None
        self._loaders: dict[Any, WorkerLoader] = {}  # by the iterators of torch over them
        self._is_reading = False
        _readers.add(self)

    @abstractmethod
    def _make_worker_loader(self) -> WorkerLoader:
        """Return a loader whose workers read passes."""

    def close(self) -> None:
        """End all workers. Not collective.

        To be called before the garbage collector takes iterators of torch: it would close their queues first, and each
        iterator would wait 5 s for workers that it cannot reach.
        """
        for batches in list(self._loaders):
            self._end_workers(batches)

    def _end_workers(self, batches: Any) -> None:
        """End the workers of an iterator of torch, which does nothing if they have ended."""
        self._loaders.pop(batches, None)
        batches._shutdown_workers()

    def _take_worker_loader(self) -> WorkerLoader:
        """Return the loader of a pass: the one of the last pass, or a new one for a pass beside another pass."""
        if self._is_reading:
            return self._make_worker_loader()
        self._is_reading = True
        if self._worker_loader is None:
            self._worker_loader = self._make_worker_loader()
        return self._worker_loader

    def _parts_of_pass(self, worker_loader: WorkerLoader) -> Iterator[Joined]:
        """Yield the parts that workers join, until there are no more.

        Raises:
            WorkerDied: when a worker ends or takes too long; on this rank only.
        """
        batches: Any = None
        try:
            batches = self._start_workers(worker_loader)
            joined: Joined | None = self._next_batch(batches, worker_loader)
            while joined is not None:
                if joined.empty_part is not None:
                    self._empty_part = joined.empty_part
                yield joined
                joined = self._next_batch(batches, worker_loader)
        finally:
            is_kept = worker_loader is self._worker_loader and worker_loader.persistent_workers
            worker_loader.end_pass()
            if worker_loader is self._worker_loader:
                self._is_reading = False
            if batches is not None and not is_kept:
                self._end_workers(batches)

    def _start_workers(self, worker_loader: WorkerLoader) -> Any:
        """Return an iterator of torch over the parts that the workers of a pass join."""
        try:
            with signals_held_back():
                batches = iter(worker_loader)
        except (RuntimeError, OSError, EOFError) as error:
            # a worker that is kept may have ended since the last pass
            raise WorkerDied(
                f"DataLoader: expected {self._loader.num_workers} workers for a pass, got {error}; look at their "
                f"lines above, and at the memory of the host."
            ) from None
        self._loaders[batches] = worker_loader
        _name_dead_workers()
        return batches

    def _next_batch(self, batches: Iterator[Any], worker_loader: WorkerLoader) -> Any:
        """Return the next object that a worker sends; None when workers have no more."""
        try:
            return next(batches, None)
        except WorkerDied:  # of another loader: the handler of SIGCHLD raises it here
            raise
        except DataError as error:
            raise DataError(_text_of_worker(error)) from None
        except (RuntimeError, OSError, EOFError) as error:  # a worker may end while it sends
            failure = _failure_of(batches, worker_loader, error)
            if failure is None:  # the dataset's own error, with its traceback
                raise
            raise failure from None

    def failure_of_process(self, error: RuntimeError) -> WorkerDied | None:
        """Return how a worker of this reader has ended, if it is the one whose process an error of torch names."""
        for batches, worker_loader in self._loaders.items():
            for process in getattr(batches, "_workers", ()):
                if str(process.pid) in _NUMBERS.findall(str(error)):
                    return _failure_of(batches, worker_loader, error)
        return None

    def _worker_settings(self, begin: Callable[..., None]) -> dict[str, Any]:
        """Return the settings of a DataLoader that are about its workers.

        Args:
            begin: function that each worker calls first, with the id of this process, the program's worker_init_fn, and
                the number of the worker.
        """
        loader = self._loader
        return {
            "num_workers": loader.num_workers,
            "timeout": loader.timeout or _TIMEOUT_SHARE * timeout_s(read_environment()),
            "worker_init_fn": functools.partial(begin, os.getpid(), loader.worker_init_fn),
            "multiprocessing_context": worker_context(loader),
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "pin_memory": loader.pin_memory,
        }


class _DeadWorkerHandler:
    """Handles SIGCHLD as torch does, which raises wherever the main thread is, and names the worker and its row.

    Args:
        handle_as_torch: handler that torch has set.
    """

    def __init__(self, handle_as_torch: Callable[[int, Any], Any]) -> None:
        self._handle_as_torch = handle_as_torch

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self._handle_as_torch(number, frame)
        except RuntimeError as error:
            for reader in list(_readers):
                failure = reader.failure_of_process(error)
                if failure is not None:
                    raise failure from None
            raise


def _name_dead_workers() -> None:
    """Replace torch's handler of SIGCHLD, which it sets with the first workers that the main thread starts."""
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return
    if not isinstance(handler, _DeadWorkerHandler):
        signal.signal(signal.SIGCHLD, _DeadWorkerHandler(handler))


def _failure_of(batches: Any, worker_loader: WorkerLoader, error: Exception) -> WorkerDied | None:
    """Return how a worker of an iterator of torch has failed; None if the dataset has raised an error."""
    # torch raises an item's own error with its traceback as the text
    if "DataLoader worker process" in str(error):
        return None
    worker, what_happened, advice = _ended_worker(batches, error)
    if not advice and str(error).startswith("DataLoader timed out after"):
        worker = _awaited_worker(batches)
        what_happened = "nothing in time"
        advice = "look at what the dataset waits for, or set the loader's timeout"
    if not advice:
        return None
    return WorkerDied(
        f"DataLoader: expected worker {worker} of {worker_loader.num_workers} to read "
        f"{worker_loader.progress.describe(worker)}, got {what_happened}; {advice}."
    )


def _ended_worker(batches: Any, error: Exception) -> tuple[int, str, str]:
    """Return which worker of an iterator of torch has ended, how, and what to do; no advice if none has."""
    for worker, process in enumerate(getattr(batches, "_workers", ())):
        if not isinstance(error, RuntimeError):
            process.join(_EXIT_S)
        if process.exitcode == -signal.SIGKILL:
            what_happened = (
                f"process {process.pid} killed by signal 9, as when the host runs out of memory"
            )
            return worker, what_happened, "use fewer workers, or a smaller prefetch_factor"
        if process.exitcode:
            what_happened = f"process {process.pid} ended with exit code {process.exitcode}"
            return worker, what_happened, "look at what it printed above"
    return 0, "", ""


def _text_of_worker(error: DataError) -> str:
    """Return the text of an error that torch has sent from a worker, which follows the worker's traceback."""
    _, _, text = str(error).rpartition(f"{DataError.__module__}.{DataError.__qualname__}: ")
    return text.rstrip()


def _awaited_worker(batches: Any) -> int:
    """Return the worker whose batch an iterator of torch waits for."""
    task = batches._task_info.get(batches._rcvd_idx, (0,))
    return int(task[0])
