"""The combination of the gradients of replicas: a sum, or a mean weighted by the rows of each replica."""

from torch import Tensor

from hpcdist.errors import GradientError
from hpcdist.program import torch_hooks
from hpcdist.program.part_weights import Weight, weigh
from hpcdist.runtime.loop_state import LoopState


class GradientOp:
    """Whether gradients are averaged by rows, or summed.

    Args:
        is_mean: whether the program has chosen a mean. None if it has not chosen: then the first scaled loss that
            reaches a backward settles it, as a sum.
        n_replicas: number of replicas whose gradients combine.

    Attributes:
        is_mean: whether gradients are averaged; None until it is settled.
    """

    def __init__(self, is_mean: bool | None, n_replicas: int) -> None:
        self.is_mean = is_mean
        self._n_replicas = n_replicas
        self._is_settled_by_loss = False

    def take_scaled_loss(self, loss: Tensor) -> None:
        """Sum gradients from the first backward that reaches this loss, which is divided by the global batch."""
        if loss.requires_grad and self.is_mean is None:
            torch_hooks.at_gradient_of(loss, self._settle)

    def _settle(self) -> None:
        if self.is_mean is None:
            self.is_mean = False
            self._is_settled_by_loss = True

    def is_settled(self, is_scaled: bool) -> bool:
        """Return whether it is known how the gradients of a backward combine.

        Args:
            is_scaled: whether the backward has reached a scaled loss.
        """
        return self.is_mean is not None and (is_scaled or not self._is_settled_by_loss)

    def require(self, is_scaled: bool) -> None:
        """Raise GradientError unless `is_settled`; on this rank only.

        At the end of the backward: until then a scaled loss may still come.
        """
        if self._is_settled_by_loss and not is_scaled:
            raise GradientError(
                "backward: expected a loss scaled by hpcdist.compute_average_loss, as earlier ones were, got one that "
                "was not; scale it too, or make the strategy with the gradient_op that all losses are meant for."
            )
        if self.is_mean is None:
            raise GradientError(
                f"backward: expected to know how the gradients of {self._n_replicas} replicas combine, got no "
                f"gradient_op; scale the loss by hpcdist.compute_average_loss, or make the strategy with "
                f"gradient_op=ReduceOp.SUM (the loss is divided by the global batch) or ReduceOp.MEAN (the loss is a "
                f"mean over the local batch)."
            )

    def scale(self, weight: float) -> float:
        """Return the factor of the gradients of a replica of this weight before they are summed."""
        return weight if self.is_mean else 1.0

    def local_scale(self, weight: float) -> float:
        """Return the factor of the gradients of a local step, as if all replicas had the same rows."""
        scale = 1 if self.is_mean else self._n_replicas
        return float(weight > 0) * scale


class RowWeights:
    """The rows by which the gradients of each local replica are weighted.

    Args:
        op: whether gradients are averaged by rows, or summed.
        loop: state of the program's loop.
        owner: number of the strategy whose gradients are weighted.
        n_local: number of replicas of this process.

    Attributes:
        used: weights of the last backward of each local replica.
    """

    def __init__(
        self,
        op: GradientOp,
        loop: LoopState,
        owner: int,
        n_local: int,
    ) -> None:
        self.used = [Weight() for _ in range(n_local)]
        self._op = op
        self._loop = loop
        self._owner = owner
        self._row_counts: list[int | None] = [None for _ in range(n_local)]

    def set_row_count(self, local_index: int, n_rows: int) -> None:
        """Weigh the next backward of a local replica by a number of rows that the program knows."""
        self._row_counts[local_index] = n_rows

    def find(self, local_index: int) -> Weight:
        """Return the weight of a local replica's running backward, by the parts that it may use."""
        n_rows = self._row_counts[local_index]
        if n_rows is not None:
            return Weight(float(n_rows), is_planned=True)
        parts = self._loop.candidates(self._owner)
        likely_rows = self._loop.uses().likely_rows
        weight = weigh(parts, local_index, likely_rows)
        if self._op.is_mean and not weight.is_planned:
            self._loop.keep_watching()  # to notice replicas that have different numbers of rows
        return weight

    def take(self, local_index: int, earlier: Weight | None) -> Weight:
        """Return the weight of a local replica's backward that has ended.

        Args:
            local_index: index of the replica among those of this process.
            earlier: weight of earlier gradients to which the gradients of this backward are added, as under no_sync;
                None without earlier ones. It must be the same fraction of all rows.
        """
        weight = self.find(local_index)
        self._row_counts[local_index] = None
        if self._op.is_mean and earlier is not None:
            refusal = earlier.refusal or weight.refusal
            if refusal is None and not weight.has_fraction_of(earlier):
                refusal = _fraction_refusal(earlier, weight)
            weight = weight._replace(refusal=refusal)
        self.used[local_index] = weight
        return weight

    @property
    def are_planned(self) -> bool:
        """Whether all local replicas have used batches that a distributed dataset has planned."""
        return all(weight.is_planned for weight in self.used)

    @property
    def are_named(self) -> bool:
        """Whether the keys of the batches that local replicas have used are those of distributed datasets."""
        return all(weight.is_planned or weight.key is None for weight in self.used)


def _fraction_refusal(first: Weight, second: Weight) -> str:
    """Return the text of the error for weights that are different fractions of their batches."""
    first_total = first.total_rows or "an unknown number"
    second_total = second.total_rows or "an unknown number"
    return (
        f"backward: expected parts, or micro-batches, of the same fraction of their batches with ReduceOp.MEAN, got "
        f"{first.rows:g} rows of {first_total} and {second.rows:g} of {second_total}; use drop_remainder=True, or "
        f"compute_average_loss with ReduceOp.SUM."
    )
