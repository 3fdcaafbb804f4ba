"""Distributed datasets: this replica's part of every global batch, and the cursor that a restart goes on from."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from hpcdist.data.dataset import Dataset, Nest
from hpcdist.errors import DataError
from hpcdist.plan.blocks import ceiling_bounds


def check_distributable(dataset: Any) -> None:
    """Raise DataError unless `dataset` is a Dataset with a batch size."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"experimental_distribute_dataset: expected an hpcdist.Dataset, got {type(dataset).__name__}; build one "
            f"with Dataset.from_tensor_slices(...).batch(global_batch)."
        )
    if dataset.order.batch_rows is None:
        raise DataError(
            "experimental_distribute_dataset: expected a dataset with batch(global_batch), got one without; add it."
        )


class DistributedDataset:
    """This replica's parts of a dataset's global batches.

    Every `iter()` is one pass, except the first after `load_state_dict`, which goes on where the state was taken. A
    global batch of n rows is divided by ceiling: a last short batch leaves the last replicas with fewer rows or none.

    Args:
        dataset: with `batch(global_batch)`.
        replica, n_replicas: which part this is, of how many.
        on_batch: called with the number of rows of every part that is handed out, and with None at the end of a pass.

    Raises:
        DataError: when the dataset has no batch size.
    """

    def __init__(
        self, dataset: Dataset, replica: int, n_replicas: int, on_batch: Callable[[int | None], None] | None = None
    ) -> None:
        check_distributable(dataset)
        self._dataset = dataset
        self._replica, self._n_replicas = replica, n_replicas
        self._on_batch = on_batch
        self._position = 0
        self._pass_start = 0
        self._goes_on = False

    @property
    def position(self) -> int:
        """Global samples handed out so far, over all epochs and passes."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one. An epoch ends when its iterator ends."""
        if self._position == self._pass_start:
            return self._dataset.order.epoch_of(self._position)
        return self._dataset.order.epoch_of(self._position - 1)

    def __iter__(self) -> Iterator[Nest]:
        """Yield this replica's part of each global batch of one pass: the source's nest, (rows, ...) arrays."""
        order = self._dataset.order
        if not self._goes_on:
            self._position = self._pass_start = self._next_pass()
        self._goes_on = False
        end = self._pass_start + order.n_samples
        while (batch := order.next_batch(self._position, end)) is not None:
            self._position = batch[1]
            yield self._part(*batch)
        self._position = self._pass_start = int(end)
        if self._on_batch:
            self._on_batch(None)

    def _next_pass(self) -> int:
        """Return where the next pass starts: the first run of epochs, between ends of batches, that is untouched."""
        order = self._dataset.order
        run = order.n_rows * (1 if math.isinf(order.inner_epochs) else int(order.inner_epochs))
        return -(-self._position // max(run, 1)) * run

    def _part(self, start: int, stop: int) -> Nest:
        low, high = ceiling_bounds(stop - start, self._n_replicas, self._replica)
        if self._on_batch:
            self._on_batch(high - low)
        return self._dataset.take_rows(self._dataset.order.rows(start + low, start + high))

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: position, start of the pass, rows and seed. Equal on all ranks."""
        order = self._dataset.order
        return {
            "position": self._position,
            "pass_start": self._pass_start,
            "n_rows": order.n_rows,
            "seed": order.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor, with another batch size or number of replicas if need be.

        Raises:
            DataError: when the cursor is of a dataset with another number of rows or another seed.
        """
        if self._dataset.has_drawn_seed:
            self._dataset = self._dataset.with_seed(state["seed"])
        order = self._dataset.order
        for key, own in (("n_rows", order.n_rows), ("seed", order.seed)):
            if state[key] != own:
                raise DataError(
                    f"restore: expected a dataset with {key} {state[key]} as in the checkpoint, got {own}; "
                    f"use the same data and seed, or a new run folder."
                )
        self._position, self._pass_start = state["position"], state["pass_start"]
        self._goes_on = True
