"""Reads this rank's share of an IterableDataset by the workers of a DataLoader."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from hpcdist.data.first_rows import FirstRows, RowDigests
from hpcdist.data.loader_worker import EmptyPart, Progress
from hpcdist.data.stream_worker import (
    DescribedStream,
    JoinShare,
    RandomNumbers,
    ShareOfStream,
    Shares,
    begin_stream_worker,
)
from hpcdist.data.worker_reader import WorkerLoader, WorkerReader
from hpcdist.errors import DataError
from hpcdist.nest import Nest

#: A part and its rows.
CountedNest = tuple[int, Nest]


class ShareReader(WorkerReader):
    """Reads parts of a stream, one pass after another, each worker its own.

    Args:
        loader: DataLoader of the program over an IterableDataset, with workers.
        shares: shares into which rows are cut.
        part_rows: number of rows of a part; the last parts of each worker have fewer.
    """

    def __init__(self, loader: "DataLoader[Any]", shares: Shares, part_rows: int) -> None:
        super().__init__(loader)
        self._items: Any = loader.dataset
        self._shares = shares
        self._part_rows = part_rows
        self._seed = 0
        self._first_rows: dict[int, FirstRows] = {}

    def set_seed(self, seed: int) -> None:
        """Seed the random numbers of later passes. Not to be called in a pass."""
        self._seed = seed
        self.close()
        self._worker_loader = None

    def read(self, number: int) -> Iterator[CountedNest]:
        """Yield the parts of a pass.

        Args:
            number: number of the pass, by which random numbers are seeded.

        Raises:
            DataError: when a worker ends or takes too long; on this rank only.
        """
        share_loader = self._take_worker_loader()
        assert isinstance(share_loader, _ShareLoader), "what _make_worker_loader returns"
        share_loader.begin_pass(number)
        first_rows: dict[int, FirstRows] = {}
        self._first_rows = first_rows
        for joined in self._parts_of_pass(share_loader):
            if joined.first_rows is not None:
                first_rows[joined.first_rows.worker] = joined.first_rows
            yield joined.n_rows, joined.part

    def first_rows(self) -> list[FirstRows]:
        """Return the rows that this rank's workers have drawn first in the pass, as far as their parts have come."""
        return list(self._first_rows.values())

    def describe_first_share(self) -> list[RowDigests]:
        """Return digests of the first rows of the first share, as two new processes read them.

        Cost: two processes are started.
        """
        progress = Progress(2, "row {} of its stream")
        shares = replace(self._shares, rank=0)
        described = DescribedStream(self._items, shares, RandomNumbers(self._seed), progress)
        settings = self._worker_settings(begin_stream_worker)
        settings.update(num_workers=2, persistent_workers=False, pin_memory=False)
        return self._read_at_once(
            WorkerLoader(described, progress, batch_size=None, collate_fn=_as_it_is, **settings)
        )

    def _read_at_once(self, worker_loader: WorkerLoader) -> list[Any]:
        """Return all objects that the workers of a loader send."""
        batches = self._start_workers(worker_loader)
        received: list[Any] = []
        try:
            batch = self._next_batch(batches, worker_loader)
            while batch is not None:
                received.append(batch)
                batch = self._next_batch(batches, worker_loader)
        finally:
            self._end_workers(batches)
        return received

    @property
    def empty_part(self) -> EmptyPart | None:
        """A part of no rows, if this rank has had a part."""
        return self._empty_part

    def take_empty_part(self, empty_part: EmptyPart | None) -> None:
        """Give parts of no rows the form of another rank's."""
        self._empty_part = empty_part

    def part_without_rows(self) -> Nest:
        """Return a part of no rows. Cost: a worker draws the first row, unless parts have been read.

        Raises:
            DataError: for a stream without rows, or a collate_fn that returns something that has no value for no rows.
        """
        if self._empty_part is None:
            progress = Progress(1, "row {} of its stream")
            settings = self._worker_settings(begin_stream_worker)
            settings.update(num_workers=1, persistent_workers=False, batch_size=1)
            alone = Shares(rank=0, n_ranks=1, n_workers=1, is_sharded=False)
            share = _FirstRowOnly(self._items, alone, RandomNumbers(self._seed), progress)
            for joined in self._read_at_once(
                WorkerLoader(share, progress, collate_fn=JoinShare(self._collate), **settings)
            ):
                self._empty_part = joined.empty_part
        if self._empty_part is None:
            raise DataError(
                f"DataLoader: expected a first row of {type(self._items).__name__}, got none; give it rows."
            )
        return self._empty_part.part_or_error()

    def _make_worker_loader(self) -> "_ShareLoader":
        progress = Progress(self._loader.num_workers, "row {} of its stream")
        numbers = RandomNumbers(self._seed)
        share = ShareOfStream(self._items, self._shares, numbers, progress)
        settings = self._worker_settings(begin_stream_worker)
        settings.update(batch_size=self._part_rows, drop_last=self._loader.drop_last)
        return _ShareLoader(share, numbers, progress, JoinShare(self._collate), settings)


class _FirstRowOnly(ShareOfStream):
    """Yields the first row alone."""

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            yield row
            return


class _ShareLoader(WorkerLoader):
    """Reads a share of a stream.

    Args:
        share: rows over which each worker iterates.
        numbers: seeds of the workers' random numbers.
        progress: memory in which workers note the rows that they read.
        join: function that makes a part of a list of rows.
        settings: settings of the workers, and batch_size.
    """

    def __init__(
        self,
        share: ShareOfStream,
        numbers: RandomNumbers,
        progress: Progress,
        join: JoinShare,
        settings: dict[str, Any],
    ) -> None:
        self._numbers = numbers
        super().__init__(share, progress, collate_fn=join, **settings)

    def begin_pass(self, number: int) -> None:
        """Read another pass from the next iterator on."""
        self._numbers.begin_pass(number)


def _as_it_is(row: Any) -> Any:
    return row
