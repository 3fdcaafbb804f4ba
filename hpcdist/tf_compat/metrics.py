"""Metrics over all replicas, as `tf.keras.metrics`: updated inside `run`, read outside, exact for parts of any length.

Each replica sums what it sees, in float64 and in one thread; reading adds the sums in the order of replicas. So a
metric has the same bits on any number of ranks where num_replicas is given.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.strategy import context
from hpcdist.tf_compat.variables import Variable, as_tensor

Array = npt.NDArray[Any]


class Metric:
    """The base of all metrics: each replica keeps a weighted sum and the sum of the weights.

    Make it in the strategy's scope, call `update_state` inside `run`, or in a loop without `run` where no num_replicas
    was given, and `result` outside.

    Collective: all ranks, in a strategy's scope.

    Args:
        name: for messages; default: that of the class.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__
        self._sums = Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM", name=self.name)

    def _add(self, values: Array, sample_weight: Any) -> None:
        weighted, weights = _weighted(values, sample_weight)
        entry = context.current()
        if entry is not None and entry.replica is not None and entry.strategy is not self._sums.strategy:
            raise RuntimeError(
                f"update_state: expected metric {self.name!r} made in the scope of the strategy that runs, got one "
                f"made elsewhere, which would not see other ranks; make it in strategy.scope()."
            )
        self._sums.assign_add(np.array([weighted.sum(), weights.sum()]))

    def result(self) -> Tensor:
        """Return the metric over all values seen, a float64 number: of all replicas; inside `run` of this one.

        Collective outside `run`: all ranks. Zero when nothing was seen.
        """
        total, weight = self._sums.read_value()
        return total / weight if weight else torch.zeros_like(total)

    def reset_state(self) -> None:
        """Forget all values: of all replicas; inside `run` of this one. Outside `run` all ranks call it."""
        self._sums.assign(np.zeros(2))

    def reset_states(self) -> None:
        """Do what `reset_state` does, under its older name."""
        self.reset_state()

    @property
    def is_state_collective(self) -> bool:
        """Whether all ranks must call `state_dict` together; `CheckpointManager.save` lets them."""
        return self._sums.is_state_collective

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all replicas. Collective: all ranks, if it was made in a strategy's scope."""
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Not collective."""
        self._sums.load_state_dict(state)


class Mean(Metric):
    """The weighted mean of all values seen."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values of this replica.

        Args:
            values: tensor, array or number.
            sample_weight: a number, or one weight for each value, or for each row of them.

        Raises:
            UsageError: outside `run` where num_replicas was given, or when weights do not fit.
        """
        self._add(_floats(values), sample_weight)

    def __call__(self, values: Any, sample_weight: Any = None) -> Tensor:
        """Add values and return the result."""
        self.update_state(values, sample_weight)
        return self.result()


class Sum(Mean):
    """The weighted sum of all values seen."""

    def result(self) -> Tensor:
        """Return the sum; see `Metric.result`."""
        return self._sums.read_value()[0]


class _MeanOfRows(Metric):
    """The weighted mean of a score of each row of predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add rows of this replica.

        Args:
            y_true: the truth.
            y_pred: predictions.
            sample_weight: a number, or one weight for each row.

        Raises:
            UsageError: outside `run` where num_replicas was given, or when shapes do not fit.
        """
        self._add(self._scores(_array(y_true), _array(y_pred)), sample_weight)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Add rows and return the result."""
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        """Return (rows,) float64."""
        raise NotImplementedError(f"update_state: expected a metric of rows, got {type(self).__name__}; use Mean.")


class Accuracy(_MeanOfRows):
    """The fraction of predictions that equal the truth, element by element."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(y_true, y_pred)
        return _floats(y_true == y_pred)


class BinaryAccuracy(_MeanOfRows):
    """The fraction of probabilities on the right side of a threshold: (rows,), or (rows, n), whose rows are averaged.

    Args:
        name: for messages.
        threshold: above it a prediction is 1.
    """

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name)
        self._threshold = threshold

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(y_true, y_pred)
        return _means(y_true == (y_pred > self._threshold))


class CategoricalAccuracy(_MeanOfRows):
    """The fraction of rows whose largest of (rows, classes) predictions is at the class of the one-hot truth."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(y_true, y_pred)
        return _floats(y_true.argmax(-1) == y_pred.argmax(-1))


class SparseCategoricalAccuracy(_MeanOfRows):
    """The fraction of rows whose largest of (rows, classes) predictions is at the given class, (rows,) or (rows, 1)."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        return _floats(_classes(y_true, y_pred) == y_pred.argmax(-1))


class SparseTopKCategoricalAccuracy(_MeanOfRows):
    """The fraction of rows with the given class, (rows,) or (rows, 1), among the k largest of the predictions.

    Args:
        k: how many; a class that ties with the k-th counts.
        name: for messages.
    """

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(name)
        self._k = k

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        classes = _classes(y_true, y_pred).astype(np.int64)
        chosen = np.take_along_axis(y_pred, classes[..., None], -1)
        return _floats(((y_pred > chosen).sum(-1) < self._k) & np.isfinite(chosen[..., 0]))


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The fraction of rows with the one-hot truth's class among the k largest of (rows, classes) predictions."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(y_true, y_pred)
        return super()._scores(y_true.argmax(-1), y_pred)


class MeanSquaredError(_MeanOfRows):
    """The mean of squared errors: (rows,), or (rows, n), whose rows are averaged first."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(_floats(y_true), _floats(y_pred))
        return _means(np.square(y_pred - y_true))


class MeanAbsoluteError(_MeanOfRows):
    """The mean of absolute errors: (rows,), or (rows, n), whose rows are averaged first."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = _alike(_floats(y_true), _floats(y_pred))
        return _means(np.abs(y_pred - y_true))


def _array(value: Any) -> Array:
    tensor = as_tensor(value).cpu()
    return np.asarray((tensor.double() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).numpy())


def _floats(value: Any) -> Array:
    return _array(value).astype(np.float64)


def _means(values: Array) -> Array:
    """Return the mean of each row; (rows,) unchanged: a mean of it would give parts of any length the same weight."""
    return _floats(values) if values.ndim < 2 else _floats(values).mean(-1)


def _alike(y_true: Array, y_pred: Array) -> tuple[Array, Array]:
    """Return both in one shape: one may have an extra last dimension of 1. Others would broadcast to all pairs."""
    if y_true.ndim == y_pred.ndim + 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    elif y_pred.ndim == y_true.ndim + 1 and y_pred.shape[-1] == 1:
        y_pred = y_pred[..., 0]
    if y_true.shape != y_pred.shape:
        raise _misfit(f"y_true and y_pred of the same shape, got {y_true.shape} and {y_pred.shape}")
    return y_true, y_pred


def _classes(y_true: Array, y_pred: Array) -> Array:
    if y_true.ndim == y_pred.ndim and y_true.shape[-1:] == (1,):
        y_true = y_true[..., 0]
    if y_pred.ndim == 0 or y_true.shape != y_pred.shape[:-1]:
        raise _misfit(f"one class for each row of predictions, got {y_true.shape} for {y_pred.shape}")
    return y_true


def _weighted(values: Array, sample_weight: Any) -> tuple[Array, Array]:
    """Return values times weights, and the weights: one for each value; rows with one weight in all are averaged."""
    if sample_weight is None:
        return values, np.ones(values.shape)
    weights = _floats(sample_weight)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    elif weights.ndim == values.ndim - 1:
        weights = weights[..., None]
    if weights.ndim not in (0, values.ndim):
        values = values.mean(tuple(range(weights.ndim, values.ndim)))
    if any(own not in (1, other) for own, other in zip(weights.shape, values.shape, strict=weights.ndim > 0)):
        raise _misfit(f"one weight for each value or row of {values.shape}, got {weights.shape}")
    weights = np.broadcast_to(weights, values.shape)
    return values * weights, weights


def _misfit(expected: str) -> UsageError:
    return UsageError(f"update_state: expected {expected}; reshape one of them.")
