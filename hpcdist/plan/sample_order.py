"""Sample order: which rows come at which position of training, a pure function of (seed, epoch, position).

Positions count global samples from the first epoch on, over all epochs; they do not depend on ranks or batch sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
#: The number of rows of a source that only tells by running out.
UNKNOWN = -1


@dataclass(frozen=True)
class Mixing:
    """How far rows are mixed that are read a chunk at a time.

    The chunks of a file come in random order; `n_rows` rows of them, a window, are mixed at a time. So each chunk is
    read once in an epoch by who keeps a window, while every row may come anywhere in it.

    Attributes:
        chunk_rows: rows of a chunk. n_rows: rows of a window; at least one chunk is mixed.
    """

    chunk_rows: int
    n_rows: int

    @property
    def n_chunks(self) -> int:
        """Chunks of a window."""
        return max(1, self.n_rows // self.chunk_rows)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n_rows: int, mixing: Mixing | None = None) -> Rows:
    """Return a permutation of n_rows rows that is the same for ever for the same arguments.

    numpy promises the raw stream of a bit generator across versions, but not `Generator.permutation`; hence the sort.

    Args:
        seed: of all epochs.
        epoch: each has its own.
        n_rows: of the source.
        mixing: by windows; None mixes all rows.

    Cost: n log n time, 16 n bytes, 32 n with `mixing`; the last few results are kept.
    """
    bits = np.random.Philox(key=[seed % 2**64, epoch])
    if mixing is None:
        order = np.argsort(bits.random_raw(n_rows), kind="stable")
    else:
        chunks = np.argsort(bits.random_raw(-(-n_rows // mixing.chunk_rows)), kind="stable")
        windows = np.empty_like(chunks)
        windows[chunks] = np.arange(len(chunks)) // mixing.n_chunks
        order = np.lexsort(
            (bits.random_raw(n_rows), windows[np.arange(n_rows) // mixing.chunk_rows])
        )
    rows: Rows = order.astype(np.int64)
    rows.setflags(write=False)
    return rows


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a dataset's rows are visited, and where batches end.

    Rows form an epoch, epochs a run, and runs a pass. A batch may cross the end of an epoch, but not that of a run.

    Attributes:
        n_rows: rows of the source; UNKNOWN for a stream.
        seed: of the shuffle; None visits rows in order.
        is_reshuffled: whether every epoch has an order of its own.
        mixing: how far rows are mixed; None: all.
        batch_rows: rows of a global batch.
        drop_remainder: whether a last short batch is left out.
        inner_epochs: epochs that batches run across (repeat before batch); infinite allowed.
        outer_epochs: times that the whole is visited (repeat after batch); infinite allowed.
        epoch_limit, run_limit, pass_limit: samples of an epoch, run or pass that are visited at most (take).
    """

    n_rows: int
    seed: int | None = None
    batch_rows: int | None = None
    drop_remainder: bool = False
    inner_epochs: float = 1
    outer_epochs: float = 1
    epoch_limit: float = math.inf
    run_limit: float = math.inf
    pass_limit: float = math.inf
    is_reshuffled: bool = True
    mixing: Mixing | None = None

    @property
    def epoch_rows(self) -> int:
        """Samples of an epoch."""
        return int(min(self.n_rows, self.epoch_limit))

    @property
    def run_rows(self) -> float:
        """Samples of a run; infinite for an endless one."""
        return min(self.epoch_rows * self.inner_epochs, self.run_limit) if self.epoch_rows else 0

    @property
    def n_samples(self) -> float:
        """Samples of one pass over the dataset; infinite for an endless one."""
        return min(self.run_rows * self.outer_epochs, self.pass_limit) if self.run_rows else 0

    @property
    def n_batches(self) -> int:
        """Batches of one pass, which must end."""
        run = self.run_rows
        rows = self.batch_rows or 1
        n_runs, remaining_rows = (
            divmod(self.n_samples, run) if run and not math.isinf(run) else (0, self.n_samples)
        )
        counts = (
            int(n_rows // rows) if self.drop_remainder else -(-int(n_rows) // rows)
            for n_rows in (run, remaining_rows)
        )
        per_run, last = (0, -(-int(remaining_rows) // rows)) if math.isinf(run) else counts
        return int(n_runs) * per_run + last

    def taking(self, count: int) -> "SampleOrder":
        """Return the order that ends after `count` samples, or batches once there is a batch size."""
        if self.batch_rows is None:
            if self.inner_epochs > 1:
                return replace(self, run_limit=min(self.run_limit, count))
            return replace(self, epoch_limit=min(self.epoch_limit, count))
        if self.outer_epochs == 1:
            return replace(self, run_limit=min(self.run_limit, count * self.batch_rows))
        return replace(self, pass_limit=min(self.pass_limit, self._samples_of(count)))

    def _samples_of(self, n_batches: int) -> float:
        """Return how many samples of a pass lie before the end of its batch number `n_batches`."""
        run = self.run_rows
        rows = self.batch_rows or 1
        if math.isinf(run):
            return n_batches * rows
        per_run = int(run // rows) if self.drop_remainder else -(-int(run) // rows)
        n_runs, n_more = divmod(n_batches, max(per_run, 1))
        return n_runs * run + min(n_more * rows, run)

    def next_run(self, position: int) -> int:
        """Return the start of the first run at or after `position`; of an endless run, that of the next epoch."""
        run = self.epoch_rows if math.isinf(self.run_rows) else int(self.run_rows)
        return -(-position // max(run, 1)) * run

    def epoch_of(self, position: int) -> int:
        """Return the epoch that the sample at `position` belongs to."""
        epoch = max(self.epoch_rows, 1)
        if math.isinf(self.run_rows) or not self.run_rows:
            return position // epoch
        run = int(self.run_rows)
        n_epochs_of_run = -(-run // epoch)
        return position // run * n_epochs_of_run + position % run // epoch

    def next_batch(self, position: int, end: float) -> tuple[int, int] | None:
        """Return (start, stop) of the batch that begins at or after `position`, or None when `end` is reached."""
        rows = self.batch_rows or 1
        run = self.run_rows
        if self.drop_remainder and run < rows:
            return None
        while position < end:
            run_end = end if math.isinf(run) else min(end, (position // run + 1) * run)
            stop = int(min(position + rows, run_end))
            if stop - position == rows or not self.drop_remainder:
                return position, stop
            position = int(run_end)
        return None

    def batches(self, position: int, end: float) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of every batch from `position` to `end`."""
        while (batch := self.next_batch(position, end)) is not None:
            position = batch[1]
            yield batch

    def rows(self, start: int, stop: int) -> Rows:
        """Return the source rows at positions [start, stop), an (n,) int64 array."""
        epochs, rows = self._epochs_and_rows(np.arange(start, stop, dtype=np.int64))
        if self.seed is None:
            return rows
        parts = [
            self._permutation(int(epoch))[rows[epochs == epoch]] for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts) if parts else rows

    def shuffle_epoch(self, epoch: int) -> int:
        """Return the epoch whose random order an epoch has: its own, or the first one's."""
        return epoch if self.is_reshuffled else 0

    def _permutation(self, epoch: int) -> Rows:
        assert self.seed is not None, "rows are shuffled"
        return permutation(self.seed, self.shuffle_epoch(epoch), self.n_rows, self.mixing)

    def _epochs_and_rows(self, positions: Rows) -> tuple[Rows, Rows]:
        """Return the epoch of each position, and its offset in the epoch."""
        epoch = max(self.epoch_rows, 1)
        run = self.run_rows
        if math.isinf(run) or not run:
            return positions // epoch, positions % epoch
        runs = positions // int(run)
        offsets = positions % int(run)
        return runs * -(-int(run) // epoch) + offsets // epoch, offsets % epoch
