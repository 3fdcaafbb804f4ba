"""The base of all metrics: sums of each replica, and arrays of rows that fit together."""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.strategy import context
from hpcdist.strategy.base import live_strategies, pass_through
from hpcdist.tf_compat.variables import Variable, as_tensor

Array = npt.NDArray[Any]
logger = logging.getLogger("hpcdist")


class Metric:
    """The base of all metrics: each replica keeps sums, by default of weighted values and of weights.

    Make it in the strategy's scope, call `update_state` inside `run`, or in a loop without `run` where no num_replicas
    was given, and `result` outside. One that is made outside of all scopes counts what its own rank sees; the chief
    logs a warning then.

    Collective over the ranks of the role, in a strategy's scope.

    Args:
        name: name of the metric, for messages; default: the name of the class.
        n_sums: number of sums.
    """

    def __init__(
        self,
        name: str | None = None,
        n_sums: int = 2,
    ) -> None:
        self.name = name or type(self).__name__
        self._sums = Variable(
            np.zeros(n_sums),
            synchronization="ON_READ",
            aggregation="SUM",
            name=self.name,
        )
        self._has_warned = False

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one, as plain numbers, texts and lists."""
        return {"name": self.name}

    def _add(self, values: Array, sample_weight: Any) -> None:
        weighted, weights = weigh(values, sample_weight)
        sums = np.array([weighted.sum(), weights.sum()])
        self._add_sums(sums)

    def _add_sums(self, sums: Array) -> None:
        """Add to this replica's sums."""
        entry = context.current()
        if (
            entry is not None
            and entry.replica is not None
            and entry.strategy is not self._sums.strategy
        ):
            raise RuntimeError(
                f"update_state: expected metric {self.name!r} made in the scope of the strategy that runs, got one "
                f"made elsewhere, which would not see other ranks; make it in strategy.scope()."
            )
        if entry is None:
            self._warn_if_local()
        self._sums.assign_add(sums)

    def result(self) -> Tensor:
        """Return the metric over all values seen, a float64 number: by all replicas; inside `run` by this replica.

        Collective over the ranks of the role outside `run`. Zero when nothing was seen.
        """
        total, weight = self._sums.read_value()
        if not weight:
            return torch.zeros_like(total)
        mean: Tensor = total / weight
        return mean

    def _warn_if_local(self) -> None:
        """Log once, on the chief, that other ranks' values do not count."""
        if self._has_warned or self._sums.strategy is not pass_through:
            return
        for strategy in live_strategies():
            if strategy.size > 1 and strategy.is_chief:
                self._has_warned = True
                logger.warning(
                    "metrics: expected %s made in strategy.scope(), where it counts the rows of all ranks, got one "
                    "made outside, which counts those of its own rank; make it in the scope, or leave it if each rank "
                    "sees all rows.",
                    self.name,
                )
                return

    def reset_state(self) -> None:
        """Forget all values of all replicas; inside `run` of this replica. Outside `run` all ranks call it."""
        zeros = np.zeros(self._sums.shape)
        self._sums.assign(zeros)

    def reset_states(self) -> None:
        """Do what `reset_state` does, under its older name."""
        self.reset_state()

    @property
    def is_state_collective(self) -> bool:
        """Whether all ranks must call `state_dict` together; `CheckpointManager.save` lets them."""
        return self._sums.is_state_collective

    def local_state(self) -> dict[str, Any]:
        """Return the sums of this rank's replicas. Not collective."""
        return self._sums.local_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all replicas. Collective over the ranks of the role, if made in a strategy's scope."""
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Not collective."""
        self._sums.load_state_dict(state)


def to_array(value: Any) -> Array:
    """Return a tensor, array or number as a host array; half precision as float64."""
    tensor = as_tensor(value).cpu()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.double()
    return np.asarray(tensor.numpy())


def to_floats(value: Any) -> Array:
    """Return a tensor, array or number as a float64 host array."""
    return to_array(value).astype(np.float64)


def means_of_rows(values: Array) -> Array:
    """Return the mean of each row; (rows,) unchanged: a mean of it would give parts of any length the same weight."""
    floats = to_floats(values)
    if floats.ndim < 2:
        return floats
    means: Array = floats.mean(-1)
    return means


def in_one_shape(y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Return both arrays in one shape; one of them may have an extra last dimension of 1.

    Raises:
        UsageError: for all other shapes, which would broadcast to all pairs.
    """
    n_more = y_true.ndim - y_pred.ndim
    if n_more == 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    elif n_more == -1 and y_pred.shape[-1] == 1:
        y_pred = y_pred[..., 0]
    if y_true.shape != y_pred.shape:
        raise misfit(f"y_true and y_pred of the same shape, got {y_true.shape} and {y_pred.shape}")
    return y_true, y_pred


def classes_of(y_true: Array, y_pred: Array) -> Array:
    """Return one class for each row of (rows, classes) predictions; raise UsageError where they do not fit."""
    if y_true.ndim == y_pred.ndim and y_true.shape[-1:] == (1,):
        y_true = y_true[..., 0]
    shape_of_rows = y_pred.shape[:-1]
    if y_pred.ndim == 0 or y_true.shape != shape_of_rows:
        raise misfit(
            f"one class for each row of predictions, got {y_true.shape} for {y_pred.shape}"
        )
    return y_true


def weigh(values: Array, sample_weight: Any) -> tuple[Array, Array]:
    """Return values times weights, and the weights: one for each value; rows with one weight in all are averaged."""
    if sample_weight is None:
        return values, np.ones(values.shape)
    weights = to_floats(sample_weight)
    n_more = weights.ndim - values.ndim
    if n_more == 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    elif n_more == -1:
        weights = weights[..., None]
    if weights.ndim not in (0, values.ndim):
        axes = tuple(range(weights.ndim, values.ndim))
        values = values.mean(axes)
    sizes = zip(weights.shape, values.shape, strict=weights.ndim > 0)
    if any(weight_size not in (1, value_size) for weight_size, value_size in sizes):
        raise misfit(f"one weight for each value or row of {values.shape}, got {weights.shape}")
    weights = np.broadcast_to(weights, values.shape)
    return values * weights, weights


def misfit(expected: str) -> UsageError:
    """Return the error of values that do not fit."""
    return UsageError(f"update_state: expected {expected}; reshape one of them.")
