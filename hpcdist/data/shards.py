"""Replicas that read rows of their own, whole files or every n-th row, in the same number of steps on all."""

import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcdist.data.options import AutoShardPolicy
from hpcdist.data.reading import Cursor, mapped, read
from hpcdist.data.rows import apply_to_part
from hpcdist.errors import DataError
from hpcdist.nest import Nest
from hpcdist.plan.sample_order import SampleOrder

if TYPE_CHECKING:
    from hpcdist.data.dataset import Dataset

#: What divides a dataset so, and what the number of shards is called in a checkpoint.
POLICIES = {AutoShardPolicy.FILE: "file_shards", AutoShardPolicy.HINT: "hint_shards"}


class Shards:
    """The parts of all replicas when replica r of n reads the files, or the rows, r, r + n, ... alone.

    Files with AutoShardPolicy.FILE; with HINT rows, where the dataset has `shard(SHARD_HINT, SHARD_HINT)`. A step of a
    replica is the next ceil(batch / n) of its rows. Steps go on until all replicas are out of rows, or, by
    drop_remainder, until the first has not enough.

    Args:
        dataset: with a batch size and one of these policies.
        n_replicas: that share it.

    Raises:
        DataError: with fewer files than replicas, after take, or, with HINT, where no shard was marked.
    """

    def __init__(self, dataset: "Dataset", n_replicas: int) -> None:
        order = dataset.order
        limits = (order.epoch_limit, order.run_limit, order.pass_limit)
        if order.n_rows != dataset.source.n_rows or not all(map(math.isinf, limits)):
            raise DataError(
                f"experimental_distribute_dataset: expected all rows of the source with {dataset.policy}, got take; "
                f"leave it out, or use AutoShardPolicy.DATA."
            )
        self._dataset = dataset
        self._sources = [dataset.source_of(n_replicas, replica) for replica in range(n_replicas)]
        rows = -(-(order.batch_rows or 1) // n_replicas)
        self._orders = [replace(order, n_rows=source.n_rows, batch_rows=rows) for source in self._sources]
        self._step_rows = rows

    def read_pass(self, cursor: Cursor, replicas: range) -> Generator[tuple[Cursor, list[Nest]], None, None]:
        """Yield (cursor after it, parts) of every step from the cursor to the end of its pass."""
        return read(self._read(cursor, replicas), self._dataset.prefetch_batches)

    def _read(self, cursor: Cursor, replicas: range) -> Generator[tuple[Cursor, list[Nest]], None, None]:
        sources = [mapped(self._sources[replica], self._dataset.row_maps) for replica in replicas]
        end = cursor.pass_start + self._dataset.order.n_samples
        for position, bounds in self._steps(cursor.position, end):
            rows = [self._orders[replica].rows(*bounds[replica]) for replica in replicas]
            parts = [source.take(part) for source, part in zip(sources, rows, strict=True)]
            yield replace(cursor, position=position), [apply_to_part(self._dataset.batch_maps, part) for part in parts]

    def _steps(self, position: int, end: float) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield (position after it, bounds of every replica) of every step from a position on."""
        total = self._dataset.order.run_rows
        while position < end:
            run = 0 if math.isinf(total) else int(position // total)
            start = 0 if math.isinf(total) else int(run * total)
            step = self._step_at(position - start)
            if (math.isinf(total) and not self._has_step(step)) or not self._has_step(0):
                return
            while self._has_step(step):
                yield start + self._samples_before(step + 1), [self._bounds(order, run, step) for order in self._orders]
                step += 1
            position = int(start + total)

    def _has_step(self, step: int) -> bool:
        if self._dataset.order.drop_remainder:
            return all((step + 1) * self._step_rows <= order.run_rows for order in self._orders)
        return any(step * self._step_rows < order.run_rows for order in self._orders)

    def _samples_before(self, step: int) -> int:
        return sum(int(min(step * self._step_rows, order.run_rows)) for order in self._orders)

    def _step_at(self, n_samples: int) -> int:
        """Return the step of a run before which there are so many samples."""
        step = n_samples // (self._step_rows * len(self._orders))
        while self._samples_before(step) < n_samples:
            step += 1
        if self._samples_before(step) != n_samples:
            raise DataError(
                f"restore: expected the end of a step, got {n_samples} samples in the run, inside a step of "
                f"{self._step_rows} rows per replica; by {self._dataset.policy}, go on with the checkpoint's batch."
            )
        return step

    def _bounds(self, order: SampleOrder, run: int, step: int) -> tuple[int, int]:
        start = 0 if math.isinf(order.run_rows) else int(run * order.run_rows)
        low, high = (int(min(place * self._step_rows, order.run_rows)) for place in (step, step + 1))
        return start + low, start + high
