"""Reads this rank's share of an IterableDataset by the workers of a DataLoader."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from hpcdist.data.loader_worker import EmptyPart, FirstRows, Progress
from hpcdist.data.same_rows import N_FIRST_ROWS, own_random_numbers
from hpcdist.data.stream_worker import DescribedStream, JoinShare, ShareOfStream, Shares, begin_stream_worker
from hpcdist.data.worker_reader import WorkerLoader, WorkerReader
from hpcdist.errors import DataError
from hpcdist.nest import Nest

#: A part and its rows.
CountedNest = tuple[int, Nest]


class ShareReader(WorkerReader):
    """Reads parts of a stream, one pass after another, each worker its own.

    Args:
        loader: DataLoader of the program over an IterableDataset, with workers.
        shares: into which rows are cut.
        part_rows: rows of a part, but for the last ones of each worker.
    """

    def __init__(self, loader: "DataLoader[Any]", shares: Shares, part_rows: int) -> None:
        super().__init__(loader)
        self._items: Any = loader.dataset
        self._shares = shares
        self._part_rows = part_rows
        self._n_compared = min(N_FIRST_ROWS, (part_rows - 1) * shares.n_shares + 1)
        self._seed = 0
        self._first_rows: list[FirstRows] = []

    def set_seed(self, seed: int) -> None:
        """Seed the random numbers of later passes. Not to be called in a pass."""
        self._seed = seed
        self.close()
        self._worker_loader = None

    def read(self, number: int) -> Iterator[CountedNest]:
        """Yield the parts of a pass.

        Args:
            number: of the pass, by which random numbers are seeded.

        Raises:
            DataError: when a worker ends or takes too long, or rows are cut wrongly; on this rank only.
        """
        share_loader = self._take_worker_loader()
        assert isinstance(share_loader, _ShareLoader), "what _make_worker_loader returns"
        share_loader.begin_pass(number)
        first_rows: list[FirstRows] = []
        self._first_rows = first_rows
        for joined in self._parts_of_pass(share_loader):
            if joined.first_rows is not None:
                for other in first_rows:
                    self._compare(joined.first_rows, other)
                first_rows.append(joined.first_rows)
            yield joined.n_rows, joined.part

    def _compare(self, first_rows: FirstRows, other: FirstRows) -> None:
        """Raise DataError if two workers begin with the same rows, or with others, and must not."""
        name = type(self._items).__name__
        workers = f"workers {other.worker} and {first_rows.worker}"
        is_same = first_rows.digests == other.digests
        if first_rows.is_cut and is_same and not first_rows.are_alike:
            raise DataError(
                f"DataLoader: expected other rows in each worker of {name}, got the same ones in {workers}; cut them "
                f"by get_worker_info().id and num_workers."
            )
        if not first_rows.is_cut and not is_same and self._differ(first_rows, other):
            raise DataError(
                f"DataLoader: expected the same rows in each worker of {name}, which does not read "
                f"get_worker_info().num_workers, got others in {workers}; cut rows by its id and num_workers alone."
            )

    def _differ(self, first_rows: FirstRows, other: FirstRows) -> bool:
        """Return whether the first rows of two workers differ in what is not random."""
        leaves = zip(self.describe_first_rows(), first_rows.digests, other.digests, strict=False)
        return any(own != others for described, own, others in leaves if described is not None)

    def has_rows_alike_everywhere(self) -> bool:
        """Return whether workers of all ranks begin with the same rows, as the dataset does not cut."""
        return bool(self._first_rows) and not self._first_rows[0].is_cut

    def digest_of_first_rows(self) -> int:
        """Return a digest of the rows that the workers of this rank have begun with."""
        return hash(self._first_rows[0].digests)

    def describe_first_rows(self) -> list[int | None]:
        """Return digests of the first rows of the first share; see `same_rows.describe_first_rows`.

        Cost: a process is started, and they are drawn twice.
        """
        described = DescribedStream(self._items, self._shares, self._n_compared)
        settings = self._worker_settings(begin_stream_worker)
        settings.update(num_workers=1, persistent_workers=False, pin_memory=False)
        loader = WorkerLoader(described, Progress(1, "row {}"), batch_size=None, collate_fn=_as_it_is, **settings)
        batches = self._start_workers(loader)
        description: list[int | None] = self._next_batch(batches, loader)
        self._end_workers(batches)
        return description

    @property
    def empty_part(self) -> EmptyPart | None:
        """A part of no rows, if this rank has had a part."""
        return self._empty_part

    def take_empty_part(self, empty_part: EmptyPart | None) -> None:
        """Give parts of no rows the form of another rank's."""
        self._empty_part = empty_part

    def read_empty_part(self) -> Nest:
        """Return a part of no rows. Cost: a row is drawn in this process, unless parts have been read.

        Raises:
            DataError: for a stream without rows, or a collate_fn that returns what has no value for none.
        """
        if self._empty_part is None:
            with own_random_numbers():
                for row in self._items:
                    self._empty_part = EmptyPart.made_of(self._collate, row)
                    break
        if self._empty_part is None:
            raise DataError(
                f"DataLoader: expected a first row of {type(self._items).__name__}, got none; give each rank rows."
            )
        return self._empty_part.part_or_error()

    def _make_worker_loader(self) -> "_ShareLoader":
        progress = Progress(self._loader.num_workers, "row {} of its stream")
        share = ShareOfStream(self._items, self._shares, self._seed, self._n_compared, progress)
        settings = self._worker_settings(begin_stream_worker)
        settings.update(batch_size=self._part_rows, drop_last=self._loader.drop_last)
        return _ShareLoader(share, self._seed, progress, JoinShare(self._collate), settings)


class _ShareLoader(WorkerLoader):
    """Reads a share of a stream.

    Args:
        share: what each worker iterates over.
        seed: seed of the workers.
        progress: where workers note what they read.
        join: makes a part of a list of rows.
        settings: settings of the workers, and batch_size.
    """

    def __init__(
        self, share: ShareOfStream, seed: int, progress: Progress, join: JoinShare, settings: dict[str, Any]
    ) -> None:
        self._share = share
        super().__init__(share, progress, collate_fn=join, **settings)
        self.seed_workers(seed)

    def begin_pass(self, number: int) -> None:
        """Read another pass from the next iterator on."""
        self._share.begin_pass(number)


def _as_it_is(row: Any) -> Any:
    return row
