"""Metrics over all replicas, as `tf.keras.metrics`: updated inside `run`, read outside, exact for parts of any length.

Each replica sums what it sees, in float64 and in one thread; reading adds the sums in the order of replicas. So a
metric has the same bits on any number of ranks where num_replicas is given.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.tf_compat import losses
from hpcdist.tf_compat.metric import (
    Array,
    Metric,
    classes_of,
    in_one_shape,
    means_of_rows,
    misfit,
    to_array,
    to_floats,
    weigh,
)
from hpcdist.tf_compat.torch_metric import TorchMetric as TorchMetric

#: Probabilities are kept this far from 0 and 1, as in Keras.
_EPSILON = 1e-7


class Mean(Metric):
    """The weighted mean of all values seen.

    >>> with strategy.scope():
    ...     mean = hpcdist.metrics.Mean()
    >>> mean.update_state(torch.tensor([1.0, 3.0]))
    >>> float(mean.result())  # over all ranks; collective
    2.0
    """

    def update_state(
        self,
        values: Any,
        sample_weight: Any = None,
    ) -> None:
        """Add values of this replica.

        Args:
            values: tensor, array or number.
            sample_weight: a number, or one weight for each value, or for each row of them.

        Raises:
            UsageError: outside `run` where num_replicas was given, or when weights do not fit.
        """
        self._add(to_floats(values), sample_weight)

    def __call__(
        self,
        values: Any,
        sample_weight: Any = None,
    ) -> Tensor:
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

    def update_state(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> None:
        """Add rows of this replica.

        Args:
            y_true: the truth.
            y_pred: predictions.
            sample_weight: a number, or one weight for each row.

        Raises:
            UsageError: outside `run` where num_replicas was given, or when shapes do not fit.
        """
        scores = self._scores(to_array(y_true), to_array(y_pred))
        self._add(scores, sample_weight)

    def __call__(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Tensor:
        """Add rows and return the result."""
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        """Return the score of each row, (rows,) float64."""
        raise NotImplementedError(
            f"update_state: expected a metric of rows, got {type(self).__name__}; use Mean."
        )


class Accuracy(_MeanOfRows):
    """The fraction of predictions that equal the truth, element by element."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = in_one_shape(y_true, y_pred)
        return to_floats(y_true == y_pred)


class BinaryAccuracy(_MeanOfRows):
    """The fraction of probabilities on the right side of a threshold: (rows,), or (rows, n), whose rows are averaged.

    Args:
        name: name of the metric, for messages.
        threshold: number above which a prediction counts as 1.
    """

    def __init__(
        self,
        name: str | None = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(name)
        self._threshold = threshold

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        return {**super().get_config(), "threshold": self._threshold}

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = in_one_shape(y_true, y_pred)
        return means_of_rows(y_true == (y_pred > self._threshold))


class CategoricalAccuracy(_MeanOfRows):
    """The fraction of rows whose largest of (rows, classes) predictions is at the class of the one-hot truth."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = in_one_shape(y_true, y_pred)
        classes = y_true.argmax(-1)
        predicted_classes = y_pred.argmax(-1)
        return to_floats(classes == predicted_classes)


class SparseCategoricalAccuracy(_MeanOfRows):
    """The fraction of rows whose largest of (rows, classes) predictions is at the given class, (rows,) or (rows, 1).

    >>> with strategy.scope():
    ...     accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
    >>> accuracy.update_state(torch.tensor([1, 0]), torch.tensor([[0.1, 0.9], [0.2, 0.8]]))
    >>> float(accuracy.result())  # over all ranks; collective
    0.5
    """

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        classes = classes_of(y_true, y_pred)
        predicted_classes = y_pred.argmax(-1)
        return to_floats(classes == predicted_classes)


class SparseTopKCategoricalAccuracy(_MeanOfRows):
    """The fraction of rows with the given class, (rows,) or (rows, 1), among the k largest of the predictions.

    A row whose class is none of the predictions' counts as wrong.

    Args:
        k: number of largest predictions; a class that ties with the k-th counts.
        name: name of the metric, for messages.
    """

    def __init__(
        self,
        k: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self._k = k

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        return {**super().get_config(), "k": self._k}

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        classes = classes_of(y_true, y_pred).astype(np.int64)
        last_class = y_pred.shape[-1] - 1
        known_classes = classes.clip(0, last_class)
        is_class = classes == known_classes
        of_class = np.take_along_axis(y_pred, known_classes[..., None], -1)
        n_larger = (y_pred > of_class).sum(-1)
        is_among_largest = n_larger < self._k
        score = of_class[..., 0]
        is_finite = np.isfinite(score)
        return to_floats(is_class & is_among_largest & is_finite)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The fraction of rows with the one-hot truth's class among the k largest of (rows, classes) predictions."""

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        y_true, y_pred = in_one_shape(y_true, y_pred)
        classes = y_true.argmax(-1)
        return super()._scores(classes, y_pred)


# -- losses ------------------------------------------------------------------------------------------------------------


class _MeanOfLoss(_MeanOfRows):
    """The mean of a loss of elements, in float64: (rows,), or (rows, n), whose rows are averaged first."""

    _loss: losses.Loss

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        truth, predictions = in_one_shape(to_floats(y_true), to_floats(y_pred))
        # of each element: the bits of torch's mean of a long row depend on the number of threads
        flat_truth = torch.from_numpy(truth.reshape(-1))
        flat_predictions = torch.from_numpy(predictions.reshape(-1))
        elements = self._loss.call(flat_truth, flat_predictions).numpy()
        return means_of_rows(elements.reshape(truth.shape))


class MeanSquaredError(_MeanOfLoss):
    """The mean of squared errors: (rows,), or (rows, n), whose rows are averaged first."""

    _loss = losses.MeanSquaredError()


class MeanAbsoluteError(_MeanOfLoss):
    """The mean of absolute errors: (rows,), or (rows, n), whose rows are averaged first."""

    _loss = losses.MeanAbsoluteError()


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of squared errors."""

    def result(self) -> Tensor:
        """Return the root; see `Metric.result`."""
        return super().result().sqrt()


class _SmoothedCrossentropy(_MeanOfLoss):
    """A mean cross-entropy whose truths may be smoothed."""

    _kind: type[losses.Loss]

    def __init__(
        self,
        name: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(name)
        self._arguments: dict[str, Any] = {
            "from_logits": from_logits,
            "label_smoothing": label_smoothing,
        }
        self._loss = self._kind(**self._arguments)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        return {**super().get_config(), **self._arguments}


class BinaryCrossentropy(_SmoothedCrossentropy):
    """The mean cross-entropy of probabilities with truths of 0 and 1: (rows,), or (rows, n), whose rows are averaged.

    Args:
        name: name of the metric, for messages.
        from_logits: whether predictions are logits.
        label_smoothing: fraction, from 0 to 1, by which truths are moved towards 1/2.
    """

    _kind = losses.BinaryCrossentropy


class CategoricalCrossentropy(_SmoothedCrossentropy):
    """The mean cross-entropy of (rows, classes) predictions with one-hot truths.

    Args:
        name: name of the metric, for messages.
        from_logits: whether predictions are logits; else probabilities, which are divided by their sum.
        label_smoothing: fraction, from 0 to 1, by which truths are moved towards 1/classes.
    """

    _kind = losses.CategoricalCrossentropy

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        truth, predictions = in_one_shape(to_floats(y_true), to_floats(y_pred))
        truth_tensor = torch.from_numpy(truth)
        predicted_tensor = torch.from_numpy(predictions)
        scores = self._loss.call(truth_tensor, predicted_tensor)
        return np.asarray(scores)


class SparseCategoricalCrossentropy(_MeanOfRows):
    """The mean cross-entropy of (rows, classes) predictions with the given classes, (rows,) or (rows, 1).

    Args:
        name: name of the metric, for messages.
        from_logits: whether predictions are logits; else probabilities, which are divided by their sum.
    """

    def __init__(
        self,
        name: str | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name)
        self._from_logits = from_logits

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        return {**super().get_config(), "from_logits": self._from_logits}

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        classes = classes_of(y_true, y_pred).astype(np.int64)
        n_classes = y_pred.shape[-1]
        least = classes.min(initial=0)
        greatest = classes.max(initial=0)
        if least < 0 or greatest >= n_classes:
            raise misfit(f"classes from 0 to {n_classes - 1}, got {least} to {greatest}")
        predictions = torch.from_numpy(to_floats(y_pred))
        logs = losses.log_probabilities(predictions, self._from_logits)
        logs_of_class = np.take_along_axis(np.asarray(logs), classes[..., None], -1)
        scores: Array = -logs_of_class[..., 0]
        return scores


# -- counts of right and wrong answers ---------------------------------------------------------------------------------


class _Confusion(Metric):
    """Weighted counts of true and false positives and negatives at thresholds.

    A prediction above a threshold is positive.

    Args:
        thresholds: ascending numbers.
        name: name of the metric, for messages.
        class_id: the only column of (rows, classes) that counts. None if all values count.
    """

    def __init__(
        self,
        thresholds: Sequence[float],
        name: str | None,
        class_id: int | None = None,
    ) -> None:
        super().__init__(name, 4 * len(thresholds))
        self._thresholds = np.asarray(thresholds, np.float32)  # as predictions are, in Keras
        self._class_id = class_id

    def update_state(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> None:
        """Add rows of this replica.

        Args:
            y_true: truths, where all numbers but 0 are true.
            y_pred: predictions from 0 to 1 of the same shape, compared as float32; NaN counts as 0.
            sample_weight: a number, or one weight for each value or row.

        Raises:
            UsageError: outside `run` where num_replicas was given, for predictions outside of 0 to 1, or when shapes do
                not fit.
        """
        is_true = to_array(y_true) != 0
        predictions = to_array(y_pred).astype(np.float32)
        truth, scores = in_one_shape(is_true, predictions)
        scores = np.nan_to_num(scores)
        is_outside = (scores < 0) | (scores > 1)
        if is_outside.any():
            lowest = scores.min()
            highest = scores.max()
            raise misfit(f"predictions from 0 to 1, got {lowest:g} to {highest:g}")
        ones = np.ones(scores.shape)
        _, weights = weigh(ones, sample_weight)
        if weights.ndim < scores.ndim:
            n_missing = scores.ndim - weights.ndim
            shape = weights.shape + (1,) * n_missing
            weights = np.broadcast_to(weights.reshape(shape), scores.shape)
        if self._class_id is not None:
            truth = truth[..., self._class_id]
            scores = scores[..., self._class_id]
            weights = weights[..., self._class_id]
        truth = truth.reshape(-1)
        scores = scores.reshape(-1)
        weights = weights.reshape(-1)
        weights_of_true = weights[truth]
        weights_of_false = weights[~truth]
        positives = self._weights_above(scores[truth], weights_of_true)
        negatives = self._weights_above(scores[~truth], weights_of_false)
        missed = weights_of_true.sum() - positives
        rejected = weights_of_false.sum() - negatives
        sums = np.concatenate([positives, negatives, missed, rejected])
        self._add_sums(sums)

    def _weights_above(self, scores: Array, weights: Array) -> Array:
        """Return, for each threshold, the sum of the weights of scores above it, as float64."""
        is_above = scores > self._thresholds[:, None]
        return np.asarray((is_above * weights).sum(1))

    def __call__(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Tensor:
        """Add rows and return the result."""
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()

    def _counts(self) -> Tensor:
        """Return true positives, false positives, false negatives and true negatives, (4, thresholds)."""
        n_thresholds = len(self._thresholds)
        return self._sums.read_value().reshape(4, n_thresholds)


def _thresholds_of(thresholds: float | Sequence[float] | None) -> tuple[list[float], bool]:
    """Return thresholds as a list, and whether there is only one number."""
    if thresholds is None:
        return [0.5], True
    if isinstance(thresholds, (int, float)):
        return [float(thresholds)], True
    return [float(threshold) for threshold in thresholds], False


class _Share(_Confusion):
    """The true positives divided by all positives of a kind: predicted positives, or true ones.

    Args:
        thresholds: a number, or several numbers, for a result each; default 0.5.
        class_id: the only column of (rows, classes) that counts.
        name: name of the metric, for messages.
    """

    _complement_row: int

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ) -> None:
        numbers, self._is_single = _thresholds_of(thresholds)
        super().__init__(numbers, name, class_id)
        self._numbers = numbers

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        thresholds = self._numbers[0] if self._is_single else self._numbers
        return {**super().get_config(), "thresholds": thresholds, "class_id": self._class_id}

    def result(self) -> Tensor:
        """Return a float64 number, or one for each threshold; 0 where there are none. See `Metric.result`."""
        counts = self._counts()
        true_positives = counts[0]
        complement = counts[self._complement_row]
        shares = _divided(true_positives, true_positives + complement)
        if self._is_single:
            return shares[0]
        return shares


class Precision(_Share):
    """The true positives among all that were predicted positive; see `tf.keras.metrics.Precision`."""

    _complement_row = 1


class Recall(_Share):
    """The true positives among all that are positive; see `tf.keras.metrics.Recall`."""

    _complement_row = 2


class AUC(_Confusion):
    """The area under the curve of true and false positives, or of precision and recall, by sums at thresholds.

    Args:
        num_thresholds: number of thresholds, evenly from 0 to 1, and a little beyond.
        curve: "ROC" or "PR".
        summation_method: "interpolation" (for PR as by Davis and Goadrich 2006), "minoring" or "majoring".
        name: name of the metric, for messages.

    Raises:
        UsageError: for another curve or method, or fewer than two thresholds.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
    ) -> None:
        self._curve = str(curve).upper()
        self._method = str(summation_method).lower()
        has_curve = self._curve in ("ROC", "PR")
        has_method = self._method in ("interpolation", "minoring", "majoring")
        if not has_curve or not has_method or num_thresholds < 2:
            raise UsageError(
                f"AUC: expected the curve ROC or PR, interpolation, minoring or majoring, and at least 2 thresholds, "
                f"got {curve!r}, {summation_method!r} and {num_thresholds}; AUC() has the defaults."
            )
        n_intervals = num_thresholds - 1
        between = [number / n_intervals for number in range(1, n_intervals)]
        thresholds = [-_EPSILON, *between, 1 + _EPSILON]
        super().__init__(thresholds, name)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make a metric like this one."""
        return {
            **super().get_config(),
            "num_thresholds": len(self._thresholds),
            "curve": self._curve,
            "summation_method": self._method,
        }

    def _weights_above(self, scores: Array, weights: Array) -> Array:
        """Return the same as the base class, by the interval that a score is in, rounded as Keras rounds it."""
        n_intervals = len(self._thresholds) - 1
        positions = scores * np.float32(n_intervals)
        intervals = np.ceil(positions) - 1
        numbers = np.maximum(intervals, 0).astype(np.int64)
        of_intervals = np.bincount(numbers, weights, minlength=n_intervals)
        from_above = np.cumsum(of_intervals[::-1])
        return np.append(from_above[::-1], 0.0)

    def result(self) -> Tensor:
        """Return the area, a float64 number; see `Metric.result`."""
        true_positives, false_positives, false_negatives, true_negatives = self._counts()
        if self._curve == "PR" and self._method == "interpolation":
            return _area_of_precision(true_positives, false_positives, false_negatives)
        are_true = true_positives + false_negatives
        recall = _divided(true_positives, are_true)
        if self._curve == "ROC":
            are_false = false_positives + true_negatives
            x = _divided(false_positives, are_false)
            y = recall
        else:
            predicted = true_positives + false_positives
            x = recall
            y = _divided(true_positives, predicted)
        pairs = torch.stack([y[:-1], y[1:]])
        if self._method == "interpolation":
            heights = pairs.mean(0)
        elif self._method == "minoring":
            heights = pairs.amin(0)
        else:
            heights = pairs.amax(0)
        widths = x[:-1] - x[1:]
        return (widths * heights).sum()


def _area_of_precision(
    true_positives: Tensor,
    false_positives: Tensor,
    false_negatives: Tensor,
) -> Tensor:
    """Return the area under precision and recall, with counts that are linear between two thresholds, as in Keras."""
    positives = true_positives + false_positives
    lower = positives[:-1]  # at the lower threshold of each interval
    upper = positives[1:]
    gained = true_positives[:-1] - true_positives[1:]
    slope = _divided(gained, (lower - upper).clamp(min=0))
    offset = true_positives[1:] - slope * upper
    is_safe = (lower > 0) & (upper > 0)
    quotients = _divided(lower, upper.clamp(min=0))
    ratio = torch.where(is_safe, quotients, torch.ones_like(slope))
    parts = slope * (gained + offset * ratio.log())
    are_true = true_positives[1:] + false_negatives[1:]
    return _divided(parts, are_true.clamp(min=0)).sum()


def _divided(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Return the quotients, 0 where the divisor is 0."""
    is_zero = divisor == 0
    safe_divisor = torch.where(is_zero, torch.ones_like(divisor), divisor)
    quotients = dividend / safe_divisor
    return torch.where(is_zero, torch.zeros_like(dividend), quotients)
