"""Datasets of rows in memory: what is visited, in which order, in batches of which size."""

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpcdist.errors import DataError
from hpcdist.plan.sample_order import Rows, SampleOrder

#: A nest of arrays: an array, or a tuple, list or dict of nests.
Nest = Any


def map_nest(function: Callable[[Any], Any], nest: Nest) -> Nest:
    """Return the nest with function(array) in place of every array."""
    if isinstance(nest, dict):
        return {key: map_nest(function, part) for key, part in nest.items()}
    if isinstance(nest, (tuple, list)):
        parts = [map_nest(function, part) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return function(nest)


@dataclass(frozen=True)
class Dataset:
    """Rows of arrays in memory, with an order and a batch size. Every method returns a new dataset.

    The order of rows is a pure function of (seed, epoch, position), so a run can go on from any sample.

    Example:
        Dataset.from_tensor_slices((images, labels)).shuffle(seed=1).batch(64).repeat(10)
    """

    source: Nest
    order: SampleOrder
    has_drawn_seed: bool = False

    @classmethod
    def from_tensor_slices(cls, tensors: Nest) -> "Dataset":
        """Return a dataset whose row i is row i of every array in a nest.

        Args:
            tensors: torch tensors or numpy arrays with equal first dimensions, in tuples, lists or dicts.

        Raises:
            DataError: when there is no array, one has no rows dimension, or the numbers of rows differ.
        """
        counts: list[int] = []
        map_nest(lambda array: counts.append(_n_rows(array)), tensors)
        if len(set(counts)) != 1:
            raise DataError(
                f"from_tensor_slices: expected arrays with the same number of rows, got {counts}; check the first "
                "dimension."
            )
        return cls(tensors, SampleOrder(counts[0]))

    def shuffle(self, buffer_size: int | None = None, seed: int | None = None) -> "Dataset":
        """Visit the rows in a new random order in every epoch.

        Args:
            buffer_size: accepted as in tf.data; rows are in memory, so all of them are always mixed.
            seed: of the order; None draws one, which ranks agree on when the dataset is distributed.

        Raises:
            DataError: after `batch` or `repeat`, or for a buffer_size below 1.
        """
        is_first = self.order.batch_rows is None and self.order.inner_epochs == 1
        _check(is_first, "shuffle", "a call before batch and repeat", "one after them")
        _check(buffer_size is None or buffer_size >= 1, "shuffle", "a buffer_size of at least 1", buffer_size)
        if seed is not None:
            return self.with_seed(seed)
        return self.with_drawn_seed(secrets.randbits(63))

    def with_seed(self, seed: int) -> "Dataset":
        """Return the dataset with another seed for its order."""
        return self._ordered(seed=seed)

    def with_drawn_seed(self, seed: int) -> "Dataset":
        """Return the dataset with a seed that a checkpoint may replace by its own."""
        return replace(self.with_seed(seed), has_drawn_seed=True)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "Dataset":
        """Group rows into batches; for a distributed dataset, `batch_size` is the global batch.

        Raises:
            DataError: when it is batched already or `batch_size` is below 1.
        """
        _check(self.order.batch_rows is None, "batch", "one call of batch", "a second one")
        _check(batch_size >= 1, "batch", "a batch_size of at least 1", batch_size)
        return self._ordered(batch_rows=batch_size, drop_remainder=drop_remainder)

    def repeat(self, count: int | None = None) -> "Dataset":
        """Visit the dataset `count` times; None or -1: for ever. Batches run across epochs when `batch` comes later.

        Raises:
            DataError: for a count of 0 or below -1.
        """
        times = math.inf if count in (None, -1) else float(count or 0)
        _check(times >= 1, "repeat", "a count of at least 1, or None", count)
        if self.order.batch_rows is None:
            return self._ordered(inner_epochs=self.order.inner_epochs * times)
        return self._ordered(outer_epochs=self.order.outer_epochs * times)

    def take_rows(self, rows: Rows) -> Nest:
        """Return the nest with the given source rows of every array."""
        return map_nest(lambda array: array[rows], self.source)

    def __iter__(self) -> Iterator[Nest]:
        """Yield the batches (or single rows) of one pass on this process alone."""
        position, end = 0, self.order.n_samples
        while (batch := self.order.next_batch(position, end)) is not None:
            start, position = batch
            rows = self.order.rows(start, position)
            yield self.take_rows(rows if self.order.batch_rows else rows[0])

    def _ordered(self, **changes: Any) -> "Dataset":
        return replace(self, order=replace(self.order, **changes))


def _check(is_right: bool, operation: str, expected: str, got: object) -> None:
    if not is_right:
        raise DataError(f"{operation}: expected {expected}, got {got}; correct the calls that build the dataset.")


def _n_rows(array: Any) -> int:
    shape = getattr(array, "shape", None)
    if not shape:
        raise DataError(
            f"from_tensor_slices: expected arrays with at least one dimension, got {type(array).__name__}; "
            f"pass torch tensors or numpy arrays."
        )
    return int(shape[0])
