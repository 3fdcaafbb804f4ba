"""The work of a worker process of a distributed stream: it draws rows, keeps the rows of its share, and joins them.

A dataset that asks `get_worker_info()` for the number of workers cuts its rows itself; to it, the workers of all ranks
appear as the workers of one loader. From any other dataset, each worker draws all rows and keeps every n-th.

Worker processes import this file: nothing here may start MPI.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpcdist.child_processes import obey_only
from hpcdist.data.first_rows import N_FIRST_ROWS, FirstRows
from hpcdist.data.loader_worker import EmptyPart, Joined, Progress, call_init
from hpcdist.data.row_numbers import own_random_numbers, seed_random_numbers
from hpcdist.data.same_rows import leaf_digests
from hpcdist.errors import DataError
from hpcdist.nest import Nest

_NO_ROW = object()


@dataclass(frozen=True)
class Shares:
    """The shares into which the rows of a stream are cut.

    Attributes:
        rank: number of this rank.
        n_ranks: number of ranks.
        n_workers: number of workers of each rank.
        is_sharded: whether the dataset gives each rank other rows, so that all rows of a worker are used.
    """

    rank: int
    n_ranks: int
    n_workers: int
    is_sharded: bool

    @property
    def n_shares(self) -> int:
        """Number of workers that the dataset sees: of all ranks, or of one rank if it cuts by rank."""
        return self.n_workers if self.is_sharded else self.n_ranks * self.n_workers

    def number_of(self, worker: int) -> int:
        """Return the number of a worker among the workers that the dataset sees.

        The first workers of all ranks come first: fewer files than workers are spread over the ranks.
        """
        return worker if self.is_sharded else worker * self.n_ranks + self.rank

    def number_in_job(self, worker: int) -> int:
        """Return a number that no other worker of the job has."""
        return worker * self.n_ranks + self.rank


class ShareInfo:
    """The result of `get_worker_info()` for the dataset and its worker_init_fn, in place of torch's WorkerInfo.

    Random numbers of the libraries are the same in all workers until the dataset asks for their number, so that a
    shuffle before the cut is the same everywhere; from then on each worker has different numbers.

    Args:
        worker: number of the worker in its rank.
        shares: shares into which rows are cut.
        numbers: seeds of the random numbers.
        dataset: dataset of the program.

    Attributes:
        worker: number of the worker in its rank.
        dataset: dataset of the program.
        has_told_number: whether `id` was read.
        has_told_count: whether `num_workers` was read.
        first_rows: digests of the leaves of each of the first rows of this pass, whichever worker keeps them.
        n_parts: number of parts that were joined in this pass.
    """

    def __init__(self, worker: int, shares: Shares, numbers: "RandomNumbers", dataset: Any) -> None:
        self.worker = worker
        self.dataset = dataset
        self.has_told_number = False
        self.has_told_count = False
        self.first_rows: list[tuple[int, ...]] = []
        self.n_parts = 0
        self._shares = shares
        self._numbers = numbers
        self._has_numbers_of_its_own = False
        self._n_told = 0

    @property
    def id(self) -> int:
        """Number of the share."""
        self.has_told_number = True
        return self._shares.number_of(self.worker)

    @property
    def num_workers(self) -> int:
        """Number of shares."""
        self.has_told_count = True
        self.take_numbers_of_its_own()
        return self._shares.n_shares

    @property
    def seed(self) -> int:
        """Seed of this worker in this pass."""
        return self._numbers.seed_of("worker", self._shares.number_in_job(self.worker))

    @property
    def is_cut(self) -> bool:
        """Whether all rows that the dataset gives in this worker are used."""
        return self._shares.is_sharded or self.has_told_count

    def begin_pass(self) -> None:
        """Seed the random numbers of a pass, and forget the rows of the last one."""
        self.first_rows = []
        self.n_parts = 0
        self._n_told = 0
        self._has_numbers_of_its_own = False
        seed_random_numbers(self._numbers.seed_of("all workers", 0))
        if self._shares.is_sharded:
            self.take_numbers_of_its_own()

    def take_numbers_of_its_own(self) -> None:
        """Seed the random numbers as those of no other worker, once in a pass."""
        if not self._has_numbers_of_its_own:
            self._has_numbers_of_its_own = True
            seed_random_numbers(self.seed)

    def add_first_row(self, row: Nest) -> None:
        """Note a row, if it is one of the first."""
        if len(self.first_rows) < N_FIRST_ROWS:
            self.first_rows.append(leaf_digests(row))

    def seed_of_next_part(self) -> int:
        """Return a seed of the random numbers that joining the next part of this pass takes."""
        self.n_parts += 1
        purpose = f"join {self._shares.number_in_job(self.worker)}"
        return self._numbers.seed_of(purpose, self.n_parts)

    def tell_first_rows(self) -> FirstRows | None:
        """Return the rows that the worker has drawn first, if there are more than the last time."""
        if self._n_told == len(self.first_rows):
            return None
        self._n_told = len(self.first_rows)
        number = self._shares.number_in_job(self.worker)
        return FirstRows(number, self.is_cut, tuple(self.first_rows))


class RandomNumbers:
    """Seeds of the random numbers of a pass, in memory that all workers see, also those that are kept.

    Args:
        seed: seed of all passes, equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pass_number = torch.zeros(1, dtype=torch.int64)
        self._pass_number.share_memory_()  # type: ignore[no-untyped-call]

    def begin_pass(self, number: int) -> None:
        """Take the numbers of a pass; called in the rank, before workers begin it."""
        self._pass_number[0] = number

    def seed_of(self, purpose: str, number: int) -> int:
        """Return a seed for a purpose in this pass, of 63 bits."""
        pass_number = int(self._pass_number)
        key = f"{self._seed} {pass_number} {purpose} {number}"
        return xxhash.xxh3_64_intdigest(key.encode()) >> 1


def begin_stream_worker(
    owner: int,
    init: Callable[[int], None] | None,
    worker: int,
) -> None:
    """Begin the work of a process. The program's worker_init_fn gets the number of its share.

    Args:
        owner: id of the rank's process, which alone ends this one.
        init: worker_init_fn of the program.
        worker: number of the worker in its rank.
    """
    obey_only(owner)
    torch_info: Any = get_worker_info()
    stream: ShareOfStream = torch_info.dataset
    info = stream.info_of(worker)
    torch_worker._worker_info = info  # type: ignore[assignment]
    seed_random_numbers(info.seed)
    call_init(init, stream.shares.number_of(worker))


class ShareOfStream(IterableDataset[Any]):
    """The rows of an IterableDataset that a worker keeps.

    Args:
        items: dataset of the program.
        shares: shares into which its rows are cut.
        numbers: seeds of the random numbers.
        progress: memory in which workers note the rows that they draw.

    Attributes:
        shares: shares into which rows are cut.
    """

    def __init__(
        self,
        items: Any,
        shares: Shares,
        numbers: RandomNumbers,
        progress: Progress,
    ) -> None:
        self.shares = shares
        self._items = items
        self._numbers = numbers
        self._progress = progress

    def info_of(self, worker: int) -> ShareInfo:
        """Return the result of `get_worker_info()` in a worker."""
        return ShareInfo(worker, self.shares, self._numbers, self._items)

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()  # made by info_of
        info.begin_pass()
        rows = iter(self._items)
        row = self._draw(rows, info, 0)
        is_cut = info.is_cut
        if is_cut:  # its cut may be older than this pass
            info.take_numbers_of_its_own()
        share = self.shares.number_of(info.worker)
        number = 0
        while row is not _NO_ROW:
            info.add_first_row(row)
            if is_cut or number % self.shares.n_shares == share:
                yield row
            number += 1
            row = self._draw(rows, info, number)
            if info.is_cut != is_cut:
                raise DataError(
                    f"DataLoader: expected {type(self._items).__name__} to read get_worker_info().num_workers before "
                    f"its first row, got it read after row {number}; read it where an iteration begins."
                )

    def _draw(self, rows: Iterator[Any], info: ShareInfo, number: int) -> Any:
        """Return the next row, or `_NO_ROW`.

        Raises:
            DataError: for a dataset that reads the number of its worker, and not the number of workers: rows may be
                lost.
        """
        self._progress.note(info.worker, number)
        row = next(rows, _NO_ROW)
        if info.has_told_number and not info.is_cut:
            raise DataError(
                f"DataLoader: expected {type(self._items).__name__} to read get_worker_info().num_workers beside id, "
                f"as the workers of all ranks share its rows, got id alone; read both where it cuts its rows, or "
                f"neither: worker_init_fn gets the number, too."
            )
        return row


class DescribedStream(ShareOfStream):
    """Yields the digests of the first rows of the first share, whichever rank and worker reads them."""

    def info_of(self, worker: int) -> ShareInfo:
        """Return the result of `get_worker_info()`."""
        return ShareInfo(0, self.shares, self._numbers, self._items)

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        for _ in super().__iter__():
            if len(info.first_rows) == N_FIRST_ROWS:
                break
        yield tuple(info.first_rows)


class JoinShare:
    """Joins rows in a worker, and sends with the first parts of a pass which rows the worker has drawn first.

    Random numbers for joining are seeded for each part, and the dataset's random numbers are left as they were: workers
    that draw all rows must draw the same ones.

    Args:
        join: function that makes a part of a list of rows.
    """

    def __init__(self, join: Callable[[list[Any]], Nest]) -> None:
        self._join = join

    def __call__(self, rows: list[Any]) -> Joined:
        """Return the rows joined."""
        info: Any = get_worker_info()
        is_first = info.n_parts == 0
        with own_random_numbers(info.seed_of_next_part()):
            part = self._join(rows)
        first_rows = info.tell_first_rows()
        if not is_first:
            return Joined(part, len(rows), first_rows=first_rows)
        with own_random_numbers():
            empty_part = EmptyPart.made_of(self._join, rows[0])
        return Joined(part, len(rows), empty_part, first_rows)
