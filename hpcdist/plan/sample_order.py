"""Sample order: which rows come at which position of training, a pure function of (seed, epoch, position).

Positions count global samples from the first epoch on, over all epochs; they do not depend on ranks or batch sizes.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n_rows: int) -> Rows:
    """Return a permutation of n_rows rows that is the same for ever for the same (seed, epoch).

    numpy promises the raw stream of a bit generator across versions, but not `Generator.permutation`; hence the sort.

    Cost: n log n time, 16 n bytes; the last few results are kept.
    """
    raw = np.random.Philox(key=[seed % 2**64, epoch]).random_raw(n_rows)
    order: Rows = np.argsort(raw, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a dataset's rows are visited, and where batches end.

    Attributes:
        n_rows: rows of the source.
        seed: of the shuffle; None visits rows in order.
        batch_rows: rows of a global batch.
        drop_remainder: whether a last short batch is left out.
        inner_epochs: epochs that batches run across (repeat before batch); infinite allowed.
        outer_epochs: times that the whole is visited (repeat after batch); infinite allowed.
    """

    n_rows: int
    seed: int | None = None
    batch_rows: int | None = None
    drop_remainder: bool = False
    inner_epochs: float = 1
    outer_epochs: float = 1

    @property
    def n_samples(self) -> float:
        """Samples of one pass over the dataset; infinite for an endless one."""
        return self.n_rows * self.inner_epochs * self.outer_epochs if self.n_rows else 0

    def epoch_of(self, position: int) -> int:
        """Return the epoch that the sample at `position` belongs to."""
        return position // self.n_rows if self.n_rows else 0

    def next_batch(self, position: int, end: float) -> tuple[int, int] | None:
        """Return (start, stop) of the batch that begins at or after `position`, or None when `end` is reached."""
        rows = self.batch_rows or 1
        run = self.n_rows * self.inner_epochs
        if self.drop_remainder and run < rows:
            return None
        while position < end:
            run_end = end if math.isinf(run) else min(end, (position // run + 1) * run)
            stop = int(min(position + rows, run_end))
            if stop - position == rows or not self.drop_remainder:
                return position, stop
            position = int(run_end)
        return None

    def rows(self, start: int, stop: int) -> Rows:
        """Return the source rows at positions [start, stop), an (n,) int64 array."""
        positions = np.arange(start, stop, dtype=np.int64)
        if self.seed is None:
            return positions % max(self.n_rows, 1)
        epochs = positions // max(self.n_rows, 1)
        parts = [
            permutation(self.seed, int(epoch), self.n_rows)[positions[epochs == epoch] - epoch * self.n_rows]
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts) if parts else positions
