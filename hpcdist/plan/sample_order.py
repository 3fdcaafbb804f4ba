"""Sample order: which rows come at which position of training, a pure function of (seed, epoch, position).

Positions count global samples from the first epoch on, over all epochs; they do not depend on ranks or batch sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hpcdist.plan.blocks import Bounds

Rows = npt.NDArray[np.int64]
#: The number of rows of a source that does not know it before it has run out of rows.
UNKNOWN = -1


@dataclass(frozen=True)
class Mixing:
    """How far rows are mixed that are read a chunk at a time.

    The chunks of a file come in random order; `n_rows` rows of them, a window, are mixed at a time. So a reader that
    keeps a window reads each chunk once in an epoch, while a row may come anywhere in the epoch.

    Attributes:
        chunk_rows: number of rows of a chunk.
        n_rows: number of rows of a window; at least one chunk is mixed.
    """

    chunk_rows: int
    n_rows: int

    @property
    def n_chunks(self) -> int:
        """Number of chunks of a window."""
        return max(1, self.n_rows // self.chunk_rows)


@lru_cache(maxsize=4)
def permutation(
    seed: int,
    epoch: int,
    n_rows: int,
    mixing: Mixing | None = None,
) -> Rows:
    """Return a permutation of n_rows rows that is the same for ever for the same arguments.

    numpy promises the raw stream of a bit generator across versions, but not `Generator.permutation`; hence the sort.

    Args:
        seed: seed of all epochs.
        epoch: number of the epoch; each epoch has another permutation.
        n_rows: number of rows of the source.
        mixing: windows in which rows are mixed. None mixes all rows.

    Cost: n log n time, 16 n bytes, 32 n with `mixing`; the last few results are kept.
    """
    bits = np.random.Philox(key=[seed % 2**64, epoch])
    if mixing is None:
        order = np.argsort(bits.random_raw(n_rows), kind="stable")
    else:
        n_chunks = -(-n_rows // mixing.chunk_rows)
        chunk_order = np.argsort(bits.random_raw(n_chunks), kind="stable")
        windows_of_chunks = np.empty_like(chunk_order)
        windows_of_chunks[chunk_order] = np.arange(n_chunks) // mixing.n_chunks
        chunks_of_rows = np.arange(n_rows) // mixing.chunk_rows
        windows_of_rows = windows_of_chunks[chunks_of_rows]
        order = np.lexsort((bits.random_raw(n_rows), windows_of_rows))
    rows: Rows = order.astype(np.int64)
    rows.setflags(write=False)
    return rows


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a dataset's rows are visited, and where batches end.

    Rows form an epoch, epochs a run, and runs a pass. A batch may cross the end of an epoch, but not of a run.

    Attributes:
        n_rows: number of rows of the source; UNKNOWN for a stream.
        seed: seed of the shuffle. None visits rows in order.
        is_reshuffled: whether every epoch has a different order.
        mixing: windows in which rows are mixed. None mixes all rows.
        batch_rows: number of rows of a global batch.
        drop_remainder: whether a last short batch is left out.
        inner_epochs: number of epochs that batches run across (repeat before batch); may be infinite.
        outer_epochs: number of times that the whole is visited (repeat after batch); may be infinite.
        epoch_limit, run_limit, pass_limit: most samples of an epoch, run or pass that are visited (take).
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
        """Number of samples of an epoch."""
        return int(min(self.n_rows, self.epoch_limit))

    @property
    def run_rows(self) -> float:
        """Number of samples of a run; infinite for an endless run."""
        if not self.epoch_rows:
            return 0
        return min(self.epoch_rows * self.inner_epochs, self.run_limit)

    @property
    def n_samples(self) -> float:
        """Number of samples of one pass over the dataset; infinite for an endless pass."""
        if not self.run_rows:
            return 0
        return min(self.run_rows * self.outer_epochs, self.pass_limit)

    @property
    def n_batches(self) -> int:
        """Number of batches of one pass, which must end."""
        run = self.run_rows
        if not run:
            return 0
        if math.isinf(run):
            rows = self.batch_rows or 1
            return -(-int(self.n_samples) // rows)
        n_runs, remaining_rows = divmod(self.n_samples, run)
        n_in_runs = int(n_runs) * self._n_batches_of(run)
        return n_in_runs + self._n_batches_of(remaining_rows)

    def _n_batches_of(self, n_rows: float) -> int:
        """Return the number of batches in the first rows of a run."""
        rows = self.batch_rows or 1
        if self.drop_remainder:
            return int(n_rows // rows)
        return -(-int(n_rows) // rows)

    def taking(self, count: int) -> "SampleOrder":
        """Return the order that ends after `count` samples, or batches once there is a batch size."""
        if self.batch_rows is None:
            if self.inner_epochs > 1:
                return replace(self, run_limit=min(self.run_limit, count))
            return replace(self, epoch_limit=min(self.epoch_limit, count))
        if self.outer_epochs == 1:
            n_samples = count * self.batch_rows
            return replace(self, run_limit=min(self.run_limit, n_samples))
        n_samples_of_pass = self._samples_of(count)
        return replace(self, pass_limit=min(self.pass_limit, n_samples_of_pass))

    def _samples_of(self, n_batches: int) -> float:
        """Return how many samples of a pass lie before the end of its batch number `n_batches`."""
        run = self.run_rows
        rows = self.batch_rows or 1
        if math.isinf(run):
            return n_batches * rows
        n_per_run = max(self._n_batches_of(run), 1)
        n_runs, n_further_batches = divmod(n_batches, n_per_run)
        n_further_rows = min(n_further_batches * rows, run)
        return n_runs * run + n_further_rows

    def next_run(self, position: int) -> int:
        """Return the start of the first run at or after `position`; in an endless run, the start of the first epoch."""
        run = self.epoch_rows
        if not math.isinf(self.run_rows):
            run = int(self.run_rows)
        n_runs = -(-position // max(run, 1))
        return n_runs * run

    def epoch_of(self, position: int) -> int:
        """Return the epoch that the sample at `position` belongs to."""
        epoch = max(self.epoch_rows, 1)
        if math.isinf(self.run_rows) or not self.run_rows:
            return position // epoch
        run = int(self.run_rows)
        n_runs, offset = divmod(position, run)
        n_epochs_of_run = -(-run // epoch)
        return n_runs * n_epochs_of_run + offset // epoch

    def next_batch(self, position: int, end: float) -> Bounds | None:
        """Return (start, stop) of the batch that begins at or after `position`, or None when `end` is reached."""
        rows = self.batch_rows or 1
        run = self.run_rows
        if self.drop_remainder and run < rows:
            return None
        while position < end:
            run_end = end
            if not math.isinf(run):
                n_runs = position // run + 1
                run_end = min(end, n_runs * run)
            stop = int(min(position + rows, run_end))
            if stop - position == rows or not self.drop_remainder:
                return position, stop
            position = int(run_end)
        return None

    def batches(self, position: int, end: float) -> Iterator[Bounds]:
        """Yield (start, stop) of every batch from `position` to `end`."""
        batch = self.next_batch(position, end)
        while batch is not None:
            yield batch
            _, position = batch
            batch = self.next_batch(position, end)

    def rows(self, start: int, stop: int) -> Rows:
        """Return the source rows at positions [start, stop), an (n,) int64 array."""
        positions = np.arange(start, stop, dtype=np.int64)
        epochs, rows = self._epochs_and_rows(positions)
        if self.seed is None:
            return rows
        parts: list[Rows] = []
        for epoch in np.unique(epochs):
            offsets = rows[epochs == epoch]
            order = self._permutation(int(epoch))
            parts.append(order[offsets])
        if not parts:
            return rows
        return np.concatenate(parts)

    def shuffle_epoch(self, epoch: int) -> int:
        """Return the epoch whose random order an epoch has: this epoch, or the first one."""
        return epoch if self.is_reshuffled else 0

    def _permutation(self, epoch: int) -> Rows:
        """Return the random order of an epoch."""
        assert self.seed is not None, "rows are shuffled"
        shuffle_epoch = self.shuffle_epoch(epoch)
        return permutation(self.seed, shuffle_epoch, self.n_rows, self.mixing)

    def _epochs_and_rows(self, positions: Rows) -> tuple[Rows, Rows]:
        """Return the epoch of each position, and its offset in the epoch."""
        epoch = max(self.epoch_rows, 1)
        run = self.run_rows
        if math.isinf(run) or not run:
            return positions // epoch, positions % epoch
        run_rows = int(run)
        runs = positions // run_rows
        offsets = positions % run_rows
        n_epochs_of_run = -(-run_rows // epoch)
        epochs = runs * n_epochs_of_run + offsets // epoch
        return epochs, offsets % epoch
