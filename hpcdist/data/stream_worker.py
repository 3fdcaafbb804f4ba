"""What a worker process of a distributed stream does: it draws rows, keeps those of its share, and joins them.

A dataset that asks `get_worker_info()` for the number of workers cuts its rows itself, and is told that the workers of
all ranks are those of one loader. Of one that does not ask, each worker draws all rows and keeps every n-th.

Worker processes import this file: nothing here may start MPI.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpcdist.child_processes import obey_only
from hpcdist.data.loader_worker import EmptyPart, FirstRows, Joined, Progress, call_init
from hpcdist.data.same_rows import RowDigests, describe_first_rows, own_random_numbers
from hpcdist.errors import DataError
from hpcdist.nest import Nest

_NO_ROW = object()


@dataclass(frozen=True)
class Shares:
    """Into which shares the rows of a stream are cut.

    Attributes:
        rank: this rank.
        n_ranks: number of ranks.
        n_workers: number of workers of each rank.
        is_sharded: whether the dataset gives each rank rows of its own, and all rows of a worker are used.
    """

    rank: int
    n_ranks: int
    n_workers: int
    is_sharded: bool

    @property
    def n_shares(self) -> int:
        """Return how many workers the dataset is told of: those of all ranks, or of this one if it cuts by rank."""
        return self.n_workers if self.is_sharded else self.n_ranks * self.n_workers

    def number_of(self, worker: int) -> int:
        """Return which of them a worker of this rank is."""
        return worker if self.is_sharded else self.rank * self.n_workers + worker

    def number_in_job(self, worker: int) -> int:
        """Return a number that no other worker of the job has."""
        return self.rank * self.n_workers + worker


class ShareInfo:
    """What `get_worker_info()` returns to the dataset and its worker_init_fn, in place of torch's WorkerInfo.

    Args:
        worker: number of the worker in its rank.
        shares: into which rows are cut.
        seed: seed of the worker.
        dataset: the program's dataset.

    Attributes:
        worker: as given.
        seed: as given.
        dataset: as given.
        has_told_number: whether somebody has asked for `id`.
        has_told_count: whether somebody has asked for `num_workers`.
        first_rows: the first rows of a pass, whichever worker keeps them.
    """

    def __init__(self, worker: int, shares: Shares, seed: int, dataset: Any) -> None:
        self.seed = seed
        self.dataset = dataset
        self.has_told_number = False
        self.has_told_count = False
        self.first_rows = RowDigests()
        self.worker = worker
        self._shares = shares

    @property
    def id(self) -> int:
        """Number of the share."""
        self.has_told_number = True
        return self._shares.number_of(self.worker)

    @property
    def num_workers(self) -> int:
        """Number of shares."""
        self.has_told_count = True
        return self._shares.n_shares

    @property
    def is_cut(self) -> bool:
        """Whether all rows that the dataset gives in this worker are used."""
        return self._shares.is_sharded or self.has_told_count

    def begin_pass(self) -> None:
        """Forget the rows of the last pass."""
        self.first_rows = RowDigests()

    def describe_first_rows(self) -> FirstRows:
        """Return what the worker has drawn first."""
        return FirstRows(self.worker, self.is_cut, self.first_rows.of_leaves(), self.first_rows.are_alike)


def begin_stream_worker(owner: int, init: Callable[[int], None] | None, worker: int) -> None:
    """Begin the work of a process.

    Args:
        owner: id of the rank's process, which alone ends this one.
        init: worker_init_fn of the program.
        worker: number of the worker in its rank.
    """
    obey_only(owner)
    info: Any = get_worker_info()
    stream: ShareOfStream | DescribedStream = info.dataset
    torch_worker._worker_info = stream.info_of(worker, info.seed - worker)  # type: ignore[assignment]
    call_init(init, worker)


class ShareOfStream(IterableDataset[Any]):
    """The rows of an IterableDataset that a worker keeps.

    Random numbers of the libraries are seeded in each pass, for all workers alike: datasets that shuffle before they
    cut must do so alike. From the second row on, workers of a dataset that cuts have numbers of their own.

    Args:
        items: dataset of the program.
        shares: into which its rows are cut.
        seed: seed of the passes, equal on all ranks.
        n_compared: rows at the beginning that are compared between workers.
        progress: where workers note which row they draw.
    """

    def __init__(self, items: Any, shares: Shares, seed: int, n_compared: int, progress: Progress) -> None:
        self._items = items
        self._shares = shares
        self._seed = seed
        self._n_compared = n_compared
        self._progress = progress
        self._pass_number = torch.zeros(1, dtype=torch.int64)
        self._pass_number.share_memory_()  # type: ignore[no-untyped-call]  # workers that are kept see it, too

    def begin_pass(self, number: int) -> None:
        """Let workers draw a pass from now on; called in the rank."""
        self._pass_number[0] = number

    def info_of(self, worker: int, base_seed: int) -> ShareInfo:
        """Return what the dataset is told in a worker."""
        seed = base_seed + self._shares.number_in_job(worker)
        return ShareInfo(worker, self._shares, seed, self._items)

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()  # what info_of has returned
        worker = info.worker
        info.begin_pass()
        self._seed_random_numbers(worker, is_own=self._shares.is_sharded)
        rows = iter(self._items)
        self._progress.note(worker, 0)
        row = next(rows, _NO_ROW)
        self._require_count(info)
        is_cut = info.is_cut
        if is_cut:
            self._seed_random_numbers(worker, is_own=True)
        share = self._shares.number_of(worker)
        number = 0
        while row is not _NO_ROW:
            if info.first_rows.n_rows < self._n_compared:
                info.first_rows.add(row)
            if is_cut or number % self._shares.n_shares == share:
                yield row
            number += 1
            self._progress.note(worker, number)
            row = next(rows, _NO_ROW)
            if info.is_cut != is_cut:
                raise DataError(
                    f"DataLoader: expected {type(self._items).__name__} to read get_worker_info().num_workers before "
                    f"its first row, got it read after row {number}; read it where an iteration begins."
                )

    def _require_count(self, info: ShareInfo) -> None:
        """Raise DataError for a dataset that knows which worker it is in, and not of how many: rows may be lost."""
        if info.has_told_number and not info.is_cut:
            raise DataError(
                f"DataLoader: expected {type(self._items).__name__} to read get_worker_info().num_workers beside id, "
                f"as the workers of all ranks share its rows, got id alone; read both, or .seed for random numbers."
            )

    def _seed_random_numbers(self, worker: int, is_own: bool) -> None:
        """Seed the libraries' random numbers by the pass, and if they are to be a worker's own by the worker."""
        owner = self._shares.number_in_job(worker) if is_own else "all workers"
        key = f"{self._seed} {int(self._pass_number)} {owner}"
        seed = xxhash.xxh3_64_intdigest(key.encode()) >> 1
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)


class JoinShare:
    """Joins rows in a worker, and tells with the first part of all which rows the worker has drawn first.

    Args:
        join: makes a part of a list of rows.
    """

    def __init__(self, join: Callable[[list[Any]], Nest]) -> None:
        self._join = join
        self._is_first = True

    def __call__(self, rows: list[Any]) -> Joined:
        """Return the rows joined."""
        part = self._join(rows)
        if not self._is_first:
            return Joined(part, len(rows))
        self._is_first = False
        info: Any = get_worker_info()
        with own_random_numbers():
            empty_part = EmptyPart.made_of(self._join, rows[0])
        return Joined(part, len(rows), empty_part, info.describe_first_rows())


class DescribedStream(IterableDataset[Any]):
    """Yields one description of the first rows of the first share, to be compared between ranks.

    Args:
        items: dataset of the program.
        shares: into which its rows are cut.
        n_compared: rows that are described.
    """

    def __init__(self, items: Any, shares: Shares, n_compared: int) -> None:
        self._items = items
        self._first_share = replace(shares, rank=0)
        self._n_compared = n_compared

    def info_of(self, worker: int, base_seed: int) -> ShareInfo:
        """Return what the dataset is told in a worker."""
        return ShareInfo(worker, self._first_share, base_seed, self._items)

    def __iter__(self) -> Iterator[list[int | None]]:
        yield describe_first_rows(lambda: self._items, self._n_compared)
