"""Losses by the names of Keras: losses of rows, on tensors. The outputs of a model are checked for what a loss expects.

Source: keras/src/losses (Keras 3), whose values these are.
"""

import difflib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcdist.errors import UsageError
from hpcdist.strategy.base import get_strategy
from hpcdist.strategy.replica_context import get_replica_context

#: A class that no label has, for torch's `ignore_index`, which is -100 by default and would hide a wrong label.
_NO_CLASS = -(1 << 62)
#: Probabilities are kept this far from 0 and 1, as in Keras.
_EPSILON = 1e-7
#: Label that losses of torch leave out unless they are told another one.
_TORCH_IGNORES = -100
#: Ways to reduce the losses of rows.
_REDUCTIONS = ("sum_over_batch_size", "sum", "none")
#: How far the probabilities of a row may be from a sum of 1.
_SUM_TOLERANCE = 1e-2


class Reduction:
    """How a loss reduces the losses of rows to one number, as `tf.keras.losses.Reduction`."""

    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    AUTO = "sum_over_batch_size"


class Loss:
    """The base of losses: a subclass defines `call(y_true, y_pred)`, which returns one value for each row, or more.

    In a custom loop with several replicas use reduction NONE and `compute_average_loss`: a replica does not know the
    rows of the further replicas. `Model.fit` needs no reduction.

    Args:
        reduction: "sum_over_batch_size", the mean; "sum"; or "none". Upper case is accepted, and so is a `Reduction`.
        name: name in logs. Default: name of the class, in snake case.

    Attributes:
        from_logits: whether predictions are logits. None where that makes no difference.

    Raises:
        UsageError: for another reduction.
    """

    from_logits: bool | None = None

    def __init__(self, reduction: str = "sum_over_batch_size", name: str | None = None) -> None:
        self.reduction = str(reduction).lower().replace("auto", "sum_over_batch_size")
        self.name = name or snake_case(type(self).__name__)
        if self.reduction not in _REDUCTIONS:
            raise UsageError(
                f"{self.name}: expected reduction of {_REDUCTIONS}, got {reduction!r}; leave it out for the mean."
            )

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values: the loss of each row, or of each element of it."""
        raise NotImplementedError(
            f"{self.name}: expected a loss that defines call(y_true, y_pred), got none; define it."
        )

    def counts(self, y_true: Any) -> tuple[int, int] | None:
        """Return the number of labels that count, and the number of all labels. None if all count.

        A mean divides by the number of labels of the whole batch that count. Cost: labels on a GPU are waited for.
        """
        return None

    def of_rows(
        self,
        y_true: Any,
        y_pred: Tensor,
        sample_weight: Any = None,
    ) -> Tensor:
        """Return (rows,) losses, each multiplied by its weight; elements of a row are averaged.

        Labels that do not count are 0, and still a part of the average; see `counts`.

        Args:
            y_true: (rows, ...) tensor or array. A last dimension of 1 is added or dropped to fit the predictions.
            y_pred: (rows, ...) predictions.
            sample_weight: a number, or one weight for each row, or for each element of a row.

        Raises:
            UsageError: when the shapes do not fit, or labels are not classes of the predictions.
        """
        values = self.of_elements(y_true, y_pred, sample_weight)
        if values.dim() > 1:
            return values.flatten(1).mean(1)
        return values

    def of_elements(
        self,
        y_true: Any,
        y_pred: Tensor,
        sample_weight: Any = None,
    ) -> Tensor:
        """Return the (rows, ...) values of `call`, each multiplied by its weight; see `of_rows`."""
        truth = torch.as_tensor(y_true, device=y_pred.device)
        try:
            values = self.call(truth, y_pred)
        except (RuntimeError, IndexError, ValueError) as error:
            raise UsageError(
                f"{self.name}: expected y_true that fits predictions of shape {tuple(y_pred.shape)}, got "
                f"{tuple(truth.shape)} of {truth.dtype}: {str(error).splitlines()[0]}; reshape one of them."
            ) from error
        if sample_weight is None:
            return values
        weights = torch.as_tensor(sample_weight, device=values.device)
        weights = weights.to(values.dtype)
        if weights.dim() in (0, values.dim()):
            shape = values.shape[: weights.dim()]
            has_rows = weights.shape[:1] == shape[:1]
            fits = has_rows and _may_broadcast(weights, values)
        else:
            fits = len(values) == weights.numel()
            ones = [1] * (values.dim() - 1)
            weights = weights.reshape(-1, *ones)
        if not fits:
            raise UsageError(
                f"{self.name}: expected a weight for each of {len(values)} rows, got {tuple(weights.shape)}; give one "
                f"for each row."
            )
        return values * weights

    def __call__(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Tensor:
        """Return the loss, reduced: a number, or with reduction NONE (rows, ...) values.

        Raises:
            UsageError: for a mean inside `run` of a strategy with several replicas, whose rows are not here.
        """
        values = self.of_elements(y_true, torch.as_tensor(y_pred), sample_weight)
        if self.reduction == "none":
            return values
        if self.reduction == "sum":
            return values.sum()
        if get_replica_context() is not None and get_strategy().num_replicas_in_sync > 1:
            raise UsageError(
                f"{self.name}: expected reduction NONE or SUM inside strategy.run, got the mean over the rows of one "
                f"replica; use reduction=Reduction.NONE, and compute_average_loss."
            )
        counts = self.counts(y_true)
        if counts is None:
            return values.mean()
        total = values.sum()
        n_counted, _ = counts
        if n_counted:
            total = total / n_counted
        return total

    def check(self, y_pred: Tensor) -> None:
        """Raise UsageError if predictions are surely not what `from_logits` says. Cost: they are read once."""


def _n_counted(y_true: Any, ignore_class: int | None) -> tuple[int, int] | None:
    """Return the number of labels that are not of a class, and of all labels. None without such a class."""
    if ignore_class is None:
        return None
    labels = torch.as_tensor(y_true)
    is_counted = labels != ignore_class
    n_counted = int(is_counted.sum())
    return n_counted, labels.numel()


def _may_broadcast(weights: Tensor, values: Tensor) -> bool:
    """Return whether each size of weights is equal to the size of values, or 1."""
    sizes = zip(reversed(weights.shape), reversed(values.shape), strict=False)
    return all(size in (1, whole) for size, whole in sizes)


class MeanSquaredError(Loss):
    """The mean of squared errors of each row."""

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        errors = y_pred - _like(y_true, y_pred)
        return _mean_of_last(errors.square())


class MeanAbsoluteError(Loss):
    """The mean of absolute errors of each row."""

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        errors = y_pred - _like(y_true, y_pred)
        return _mean_of_last(errors.abs())


class MeanAbsolutePercentageError(Loss):
    """The mean of absolute errors of each row, in percent of the truth."""

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred)
        relative_errors = (truth - y_pred) / truth.abs().clamp_min(_EPSILON)
        return 100 * _mean_of_last(relative_errors.abs())


class Huber(Loss):
    """Squared errors up to `delta`, absolute errors beyond it.

    Args:
        delta: largest error that is squared.
        reduction, name: as for `Loss`.
    """

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(reduction, name)
        self.delta = delta

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred)
        values = functional.huber_loss(y_pred, truth, reduction="none", delta=self.delta)
        return _mean_of_last(values)


class Hinge(Loss):
    """max(1 - y_true * y_pred, 0), of truths of -1 and 1, or of 0 and 1."""

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred)
        is_binary = (truth == 0) | (truth == 1)
        if bool(is_binary.all()):
            truth = 2 * truth - 1
        distances = 1 - truth * y_pred
        return _mean_of_last(distances.clamp_min(0))


class KLDivergence(Loss):
    """The Kullback-Leibler divergence of (rows, classes) probabilities."""

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred).clamp(_EPSILON, 1)
        predictions = y_pred.clamp(_EPSILON, 1)
        ratios = truth / predictions
        return (truth * ratios.log()).sum(-1)


class _OfProbabilities(Loss):
    """A loss of probabilities, or of logits.

    Args:
        from_logits: whether predictions are logits, as from a last layer without softmax or sigmoid.
        reduction, name: as for `Loss`.
    """

    _activation = "Softmax"

    def __init__(
        self,
        from_logits: bool = False,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(reduction, name)
        self.from_logits: bool = from_logits

    def _sums(self, y_pred: Tensor) -> Tensor:
        """Return sums that are 1 if predictions are probabilities."""
        return y_pred.sum(-1)

    def check(self, y_pred: Tensor) -> None:
        """Raise UsageError if predictions are surely not what `from_logits` says. Cost: they are read once."""
        predictions = y_pred.detach()
        if not predictions.numel() or not bool(torch.isfinite(predictions).all()):
            return
        low = float(predictions.min())
        high = float(predictions.max())
        are_probabilities = False
        flaw = ""
        if low >= 0 and high <= 1:
            deviations = (self._sums(predictions) - 1).abs()
            are_probabilities = bool((deviations < _SUM_TOLERANCE).all())
            flaw = " that do not add up to 1"
        if not self.from_logits and not are_probabilities:
            raise UsageError(
                f"{self.name}: expected probabilities, as it was made with from_logits=False, got outputs from "
                f"{low:.3g} to {high:.3g}{flaw}; use "
                f"{type(self).__name__}(from_logits=True), or end the model with {self._activation}."
            )
        if self.from_logits and are_probabilities and self._can_tell(predictions):
            raise UsageError(
                f"{self.name}: expected logits, as it was made with from_logits=True, got outputs from {low:.3g} to "
                f"{high:.3g} that add up to 1 in each row; leave out the last {self._activation}, or use "
                f"{type(self).__name__}()."
            )

    def _can_tell(self, y_pred: Tensor) -> bool:
        """Return whether predictions that look like probabilities can hardly be logits."""
        return y_pred.shape[-1] > 1


class _Smoothed(_OfProbabilities):
    """A loss of probabilities, or of logits, whose truths may be smoothed."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(from_logits, reduction, name)
        self.label_smoothing = label_smoothing


class BinaryCrossentropy(_Smoothed):
    """The cross-entropy of predictions with truths of 0 and 1; the mean over the truths of a row.

    Args:
        from_logits: whether predictions are logits, as from a last layer without sigmoid.
        label_smoothing: fraction by which truths are moved to 1/2, from 0 to 1.
        reduction, name: as for `Loss`.
    """

    _activation = "Sigmoid"

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred)
        truth = truth * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        if self.from_logits:
            values = functional.binary_cross_entropy_with_logits(y_pred, truth, reduction="none")
            return _mean_of_last(values)
        probabilities = y_pred.clamp(_EPSILON, 1 - _EPSILON)
        logs = probabilities.log()
        loss_of_ones = -truth * logs
        complements = 1 - probabilities
        log_likelihood_of_zeros = (1 - truth) * complements.log()
        return _mean_of_last(loss_of_ones - log_likelihood_of_zeros)

    def _sums(self, y_pred: Tensor) -> Tensor:
        return torch.ones_like(y_pred)  # any number from 0 to 1 is a probability

    def _can_tell(self, y_pred: Tensor) -> bool:
        return False


class CategoricalCrossentropy(_Smoothed):
    """The cross-entropy of (rows, classes) predictions with one-hot truths.

    Args:
        from_logits: whether predictions are logits; else probabilities, which are divided by their sum.
        label_smoothing: fraction by which truths are moved to 1/classes, from 0 to 1.
        reduction, name: as for `Loss`.
    """

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        truth = _like(y_true, y_pred)
        truth = truth * (1 - self.label_smoothing) + self.label_smoothing / truth.shape[-1]
        likelihoods = truth * log_probabilities(y_pred, self.from_logits)
        return -likelihoods.sum(-1)


class SparseCategoricalCrossentropy(_OfProbabilities):
    """The cross-entropy of (rows, ..., classes) predictions with classes as labels, (rows, ...) or (rows, ..., 1).

    >>> loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> loss(torch.tensor([1]), torch.tensor([[0.0, 0.0]]))
    tensor(0.6931)

    Args:
        from_logits: whether predictions are logits; else probabilities, which are divided by their sum.
        ignore_class: class whose labels count neither in the sum nor in the divisor of a mean. None if all count.
        reduction, name: as for `Loss`.
    """

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(from_logits, reduction, name)
        self.ignore_class = ignore_class

    def counts(self, y_true: Any) -> tuple[int, int] | None:
        """Return the number of labels that are not ignored, and of all labels. None if no class is ignored."""
        return _n_counted(y_true, self.ignore_class)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        classes = self._classes(y_true, y_pred)
        formula: Callable[..., Tensor]
        if self.from_logits:
            logs = y_pred
            formula = functional.cross_entropy
        else:
            logs = log_probabilities(y_pred, False)
            formula = functional.nll_loss
        ignored = _NO_CLASS
        if self.ignore_class is not None:
            ignored = self.ignore_class
        if logs.dim() == 2:  # each reshape would be a node of the graph
            return formula(logs, classes, reduction="none", ignore_index=ignored)
        flat_logs = logs.reshape(-1, logs.shape[-1])
        values = formula(flat_logs, classes.reshape(-1), reduction="none", ignore_index=ignored)
        return values.reshape(classes.shape)

    def _classes(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        if y_true.dim() == y_pred.dim() and y_true.shape[-1] == 1:
            y_true = y_true[..., 0]
        if y_true.shape != y_pred.shape[:-1]:
            raise ValueError("one class for each row of predictions is needed")
        if y_true.is_floating_point() and not bool((y_true == y_true.floor()).all()):
            raise ValueError("labels are no whole numbers")
        return y_true.long()


class _OfTorch(Loss):
    """A loss of torch, such as torch.nn.CrossEntropyLoss, whose arguments are in reverse order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__("sum_over_batch_size", snake_case(type(module).__name__))
        self._module = module
        self.from_logits = isinstance(module, (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss)) or None
        #: Class that is left out of a mean. To count labels takes a message a step, which a default does not ask for.
        self.ignore_class: int | None = getattr(module, "ignore_index", None)
        self._refuses_ignored = self.ignore_class == _TORCH_IGNORES
        if self._refuses_ignored:
            self.ignore_class = None

    def counts(self, y_true: Any) -> tuple[int, int] | None:
        """Return the number of labels that are not ignored, and of all labels.

        Returns:
            None if no class is ignored, or if labels are probabilities of the classes.
        """
        if torch.as_tensor(y_true).is_floating_point():
            return None
        return _n_counted(y_true, self.ignore_class)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values; raise ValueError for labels that torch would ignore by default."""
        if self._refuses_ignored and bool((y_true == _TORCH_IGNORES).any()):
            raise ValueError(
                f"labels of {_TORCH_IGNORES} are left out of the mean by "
                f"SparseCategoricalCrossentropy(from_logits=True, ignore_class={_TORCH_IGNORES})"
            )
        before = self._module.reduction
        self._module.reduction = "none"  # type: ignore[assignment]
        try:
            return self._module(y_pred, y_true)  # type: ignore[no-any-return]
        finally:
            self._module.reduction = before


class _OfFunction(Loss):
    """A function of (y_true, y_pred) that returns a loss for each row, or for each element of a row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        kind = snake_case(type(function).__name__)
        super().__init__(name=getattr(function, "__name__", kind))
        self._function = function

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return (rows, ...) values."""
        values: Tensor = torch.as_tensor(self._function(y_true, y_pred))
        if not values.dim():
            raise ValueError(
                f"{self.name} returned a single number, where one for each row is needed"
            )
        return values


#: Name -> loss.
NAMED: dict[str, Callable[[], Loss]] = {
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
    "mean_absolute_error": MeanAbsoluteError,
    "mae": MeanAbsoluteError,
    "mean_absolute_percentage_error": MeanAbsolutePercentageError,
    "mape": MeanAbsolutePercentageError,
    "huber": Huber,
    "hinge": Hinge,
    "kl_divergence": KLDivergence,
    "binary_crossentropy": BinaryCrossentropy,
    "categorical_crossentropy": CategoricalCrossentropy,
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
}


def get(loss: Any) -> Loss:
    """Return a loss by its name, or as a `Loss`, a loss module of torch, or a function (y_true, y_pred).

    Raises:
        UsageError: for an unknown name, with a list of close ones; for an object of another kind.
    """
    if getattr(loss, "reduction", None) == "sum":
        raise UsageError(
            f"compile: expected a loss that is averaged over the rows of a batch, got reduction 'sum' of "
            f"{type(loss).__name__}; leave it out, and scale the learning rate."
        )
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        named_loss: Loss = named(loss, NAMED, "loss")()
        return named_loss
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        if loss.reduction not in ("mean", "none"):
            raise UsageError(
                f"compile: expected a loss that is averaged over all elements of a batch, got reduction "
                f"{loss.reduction!r} of {type(loss).__name__}; use 'mean', or give a function that returns one loss "
                f"for each row."
            )
        return _OfTorch(loss)
    if callable(loss):
        return _OfFunction(loss)
    raise UsageError(
        f"compile: expected a loss by name, or a function, got {type(loss).__name__}; give one of these."
    )


def named(name: str, table: dict[str, Any], kind: str) -> Any:
    """Return the entry of a table under a name, in the spelling of Keras, or under the name of its class.

    Args:
        name: name such as "mean_squared_error", or "MeanSquaredError".
        table: entries by name.
        kind: kind of the entries, for messages.

    Raises:
        UsageError: for an unknown name; lists close ones.
    """
    for key in (name, snake_case(name), name.lower()):
        if key in table:
            return table[key]
    close = difflib.get_close_matches(name.lower(), table, 4, 0.4) or sorted(table)
    raise UsageError(
        f"compile: expected a known {kind}, got {name!r}; close ones are {', '.join(close)}."
    )


def snake_case(name: str) -> str:
    """Return the name of a class as Keras names its objects: "MeanSquaredError" -> "mean_squared_error"."""
    name = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _like(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Return the truth in the dtype and dimensions of predictions; a last dimension of 1 is added or dropped."""
    if y_true.dim() == y_pred.dim() - 1 and y_pred.shape[-1] == 1:
        y_true = y_true[..., None]
    elif y_true.dim() == y_pred.dim() + 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    if y_true.shape != y_pred.shape:
        raise ValueError("the same shape is needed")
    return y_true.to(y_pred.dtype)


def _mean_of_last(values: Tensor) -> Tensor:
    """Return the mean over the last dimension; (rows,) unchanged."""
    if values.dim() > 1:
        return values.mean(-1)
    return values


def log_probabilities(y_pred: Tensor, are_logits: bool) -> Tensor:
    """Return the logarithms of probabilities, which are logits, or are divided by their sum."""
    if are_logits:
        return functional.log_softmax(y_pred, -1)
    probabilities = y_pred / y_pred.sum(-1, keepdim=True)
    inside = probabilities.clamp(_EPSILON, 1 - _EPSILON)
    return inside.log()
