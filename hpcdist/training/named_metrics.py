"""Metrics by the names of Keras, and which of them are best when they are large."""

from collections.abc import Callable
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.tf_compat import metrics
from hpcdist.tf_compat.losses import Loss, named, snake_case
from hpcdist.tf_compat.metric import Array, Metric, to_floats
from hpcdist.tf_compat.torch_metric import TorchMetric


class NamedAccuracy(metrics.Accuracy):
    """The accuracy that the shapes of labels and predictions ask for: of classes, one-hot rows, or yes and no.

    Args:
        name: name in the logs.
        are_logits: whether predictions mean yes above 0, rather than above 1/2.
    """

    def __init__(self, name: str = "accuracy", are_logits: bool = False) -> None:
        super().__init__(name)
        self._threshold = 0.0 if are_logits else 0.5

    def _scores(self, y_true: Array, y_pred: Array) -> Array:
        if y_pred.ndim < 2 or y_pred.shape[-1] == 1:
            if y_pred.ndim > 1:
                y_pred = y_pred[..., 0]
            if y_true.size == y_pred.size:
                y_true = y_true.reshape(y_pred.shape)
            return super()._scores(to_floats(y_true), to_floats(y_pred > self._threshold))
        if y_true.shape == y_pred.shape:  # one-hot rows
            classes = y_true.argmax(-1)
        elif y_true.ndim == y_pred.ndim:
            classes = y_true[..., 0]
        else:
            classes = y_true
        return super()._scores(classes, y_pred.argmax(-1))


#: Name -> metric, made with its name in the logs.
NAMED: dict[str, Callable[[str], Metric]] = {
    "accuracy": NamedAccuracy,
    "acc": NamedAccuracy,
    "binary_accuracy": metrics.BinaryAccuracy,
    "categorical_accuracy": metrics.CategoricalAccuracy,
    "sparse_categorical_accuracy": metrics.SparseCategoricalAccuracy,
    "top_k_categorical_accuracy": lambda name: metrics.TopKCategoricalAccuracy(name=name),
    "sparse_top_k_categorical_accuracy": lambda name: metrics.SparseTopKCategoricalAccuracy(
        name=name
    ),
    "auc": lambda name: metrics.AUC(name=name),
    "precision": lambda name: metrics.Precision(name=name),
    "recall": lambda name: metrics.Recall(name=name),
    "mean_squared_error": metrics.MeanSquaredError,
    "mse": metrics.MeanSquaredError,
    "mean_absolute_error": metrics.MeanAbsoluteError,
    "mae": metrics.MeanAbsoluteError,
    "root_mean_squared_error": metrics.RootMeanSquaredError,
    "rmse": metrics.RootMeanSquaredError,
    "binary_crossentropy": metrics.BinaryCrossentropy,
    "categorical_crossentropy": metrics.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": metrics.SparseCategoricalCrossentropy,
}
#: Metric -> its option for predictions that are logits.
_WITH_LOGITS = {
    NamedAccuracy: "are_logits",
    metrics.BinaryCrossentropy: "from_logits",
    metrics.CategoricalCrossentropy: "from_logits",
    metrics.SparseCategoricalCrossentropy: "from_logits",
}
#: Metrics whose largest value is the best one.
_LARGEST = (
    metrics.Accuracy,
    metrics.BinaryAccuracy,
    metrics.CategoricalAccuracy,
    metrics.SparseCategoricalAccuracy,
    metrics.SparseTopKCategoricalAccuracy,
    metrics.AUC,
    metrics.Precision,
    metrics.Recall,
)
#: Metrics whose smallest value is the best one.
_SMALLEST = (
    metrics.MeanSquaredError,
    metrics.MeanAbsoluteError,
    metrics.BinaryCrossentropy,
    metrics.CategoricalCrossentropy,
    metrics.SparseCategoricalCrossentropy,
)


def get(metric_or_name: Any, loss: Loss | None) -> tuple[str, Any]:
    """Return a metric and its name in the logs.

    Args:
        metric_or_name: a name, a Metric, a metric of torchmetrics, or a function (y_true, y_pred) that returns values.
        loss: loss of the model. If it takes logits, so do metrics that are given by name.

    Raises:
        UsageError: for an unknown name, which lists close ones; for anything else.
    """
    if isinstance(metric_or_name, str):
        make = named(metric_or_name, NAMED, "metric")
        are_logits = loss is not None and loss.from_logits
        if are_logits and make in _WITH_LOGITS:
            option = _WITH_LOGITS[make]
            return metric_or_name, make(metric_or_name, **{option: True})
        return metric_or_name, make(metric_or_name)
    if isinstance(metric_or_name, (Metric, TorchMetric)):
        name = str(metric_or_name.name)
        if name == type(metric_or_name).__name__:
            name = snake_case(name)
        return name, metric_or_name
    if hasattr(metric_or_name, "update") and hasattr(metric_or_name, "compute"):  # of torchmetrics
        return snake_case(type(metric_or_name).__name__), TorchMetric(metric_or_name)
    if callable(metric_or_name):
        name = getattr(metric_or_name, "__name__", snake_case(type(metric_or_name).__name__))
        return name, _OfFunction(metric_or_name, name)
    raise UsageError(
        f"compile: expected a metric by name, or one, got {type(metric_or_name).__name__}; give one of these."
    )


class _OfFunction(Metric):
    """The mean of a function of (y_true, y_pred)."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(name)
        self._function = function

    def update_state(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> None:
        """Add rows of this replica."""
        self._add(to_floats(self._function(y_true, y_pred)), sample_weight)


def direction_of(metric: Any) -> str | None:
    """Return "max" or "min", whichever is the best value of a metric; None where that is not known."""
    if isinstance(metric, _LARGEST):
        return "max"
    if isinstance(metric, _SMALLEST):
        return "min"
    return None
