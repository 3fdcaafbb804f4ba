"""The losses and metrics that a model is compiled with, of one output or several."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpcdist.errors import UsageError
from hpcdist.nest import is_nest, leaves, map_nest
from hpcdist.tf_compat import losses
from hpcdist.tf_compat.metrics import Mean
from hpcdist.tf_compat.torch_metric import TorchMetric
from hpcdist.training import named_metrics


class NamedMetric(NamedTuple):
    """A metric of `compile`: its name in logs, whether it takes sample weights, and the key of its output."""

    name: str
    metric: Any
    is_weighted: bool
    key: Any


class Objective:
    """Losses and metrics of a model. Make it in the strategy's scope, which the metrics belong to.

    Args:
        owner: name of the model, for messages.
        loss, loss_weights, metrics, weighted_metrics: see `Model.compile`.

    Attributes:
        total: mean loss over the rows of an epoch.
        metrics: metrics of `compile`; after them, where several losses were given, the mean of each loss.
        ignores_labels: whether a loss leaves out some labels.
    """

    def __init__(
        self,
        owner: str,
        loss: Any,
        loss_weights: Any,
        metrics: Any,
        weighted_metrics: Any,
    ) -> None:
        self._owner = owner
        self._loss: Any = None
        if loss is not None:
            self._loss = map_nest(losses.get, loss)
        self._loss_weights = loss_weights
        self.ignores_labels = any(
            getattr(loss, "ignore_class", None) is not None for loss in leaves(self._loss)
        )
        self.total = Mean("loss")
        self._of_loss: dict[Any, Mean] = {}
        if is_nest(self._loss):
            self._of_loss = {key: Mean(f"{key}_loss") for key in _keys_of(self._loss)}
        self._judging = [*self._named(metrics, False), *self._named(weighted_metrics, True)]
        self.metrics = list(self._judging)
        for key, mean in self._of_loss.items():
            self.metrics.append(NamedMetric(mean.name, mean, False, key))

    @property
    def has_loss(self) -> bool:
        """Whether `compile` was given a loss."""
        return self._loss is not None

    def require_fitting(self, last_layer: Any) -> None:
        """Raise UsageError for losses of logits where the last layer makes probabilities.

        Their values alone do not always show that: any number from 0 to 1 may be a logit.
        """
        if isinstance(last_layer, (nn.Sigmoid, nn.Softmax)):
            for loss in leaves(self._loss):
                if getattr(loss, "from_logits", None):
                    raise UsageError(
                        f"{self._owner}: expected a last layer that makes logits, as {loss.name} is of logits, got "
                        f"{last_layer}; leave that layer out, or take a loss of probabilities."
                    )

    def _named(self, metrics: Any, is_weighted: bool) -> Iterable[NamedMetric]:
        """Yield the metrics that `compile` was given."""
        for key, metrics_of_output in _metrics_by_output(metrics):
            loss = self._loss_of(key)
            if not isinstance(metrics_of_output, (list, tuple)):
                metrics_of_output = [metrics_of_output]
            for metric_or_name in metrics_of_output:
                name, metric = named_metrics.get(metric_or_name, loss)
                if is_weighted and isinstance(metric, TorchMetric):
                    raise UsageError(
                        f"compile: expected weighted_metrics that take weights, got {name!r} of torchmetrics, which "
                        f"takes none; give it as one of the metrics."
                    )
                if key is not None:
                    name = f"{key}_{name}"
                yield NamedMetric(name, metric, is_weighted, key)

    def _loss_of(self, key: Any) -> Any:
        """Return the loss of an output. None if it has none."""
        if not is_nest(self._loss):
            return self._loss
        if key in _keys_of(self._loss):
            return self._loss[key]
        return None

    def counts(self, y: Any) -> dict[Any, tuple[int, int]]:
        """Return, by output, how many labels count and how many there are, for losses that leave out some.

        Outputs have the same order on all replicas. An output that has no key has the key None.
        """
        counts: dict[Any, tuple[int, int]] = {}
        keys: Any = [None]
        if is_nest(y):
            keys = _keys_of(y)
        for key in keys:
            loss = self._loss_of(key)
            if loss is None:
                continue
            label_counts = loss.counts(_entry(y, key))
            if label_counts is not None:
                counts[key] = label_counts
        return counts

    def loss_of_rows(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        must_check: bool,
        counts: Mapping[Any, tuple[float, float]],
    ) -> Tensor:
        """Return (rows,) losses: the weighted sum over outputs, if there are several.

        Args:
            y: labels.
            y_pred: outputs.
            sample_weight: weight of each row. None if all weigh 1.
            must_check: whether predictions are checked, such as for probabilities where logits are expected.
            counts: the result of `counts`, summed over all replicas. Rows are scaled so that their mean over the
                batch is the sum over the labels that count, divided by their number.

        Raises:
            UsageError: when outputs, labels and losses do not fit together.
        """
        parts = []
        for key, loss, weight, truth, predictions in self._pairs(y, y_pred):
            rows = loss.of_rows(truth, predictions, sample_weight)
            n_counted, n_labels = counts.get(key, (0, 0))
            if n_counted:
                rows = rows * (n_labels / n_counted)
            if must_check:
                loss.check(predictions)
            if key in self._of_loss:
                self._of_loss[key].update_state(rows.detach())
            if weight != 1:
                rows = weight * rows
            parts.append(rows)
        return functools.reduce(torch.add, parts)

    def _pairs(self, y: Any, y_pred: Any) -> list[tuple[Any, losses.Loss, float, Any, Tensor]]:
        """Return one entry for each output: its key, loss, loss weight, labels and predictions."""
        if self._loss is None:
            raise UsageError(
                f"{self._owner}: expected a loss in compile, or a train_step of a subclass that needs none, got "
                f"neither; give compile a loss."
            )
        if y is None:
            raise UsageError(
                f"{self._owner}: expected batches of (x, y), got x alone; give labels, or a train_step."
            )
        loss_weights = self._loss_weights
        if not is_nest(self._loss) and not is_nest(y_pred):
            weight = 1.0
            if loss_weights is not None:
                weight = float(leaves(loss_weights)[0])
            return [(None, self._loss, weight, y, y_pred)]
        outputs = y_pred if is_nest(y_pred) else [y_pred]
        pairs = []
        try:
            for key in _keys_of(outputs):
                loss = _entry(self._loss, key)
                weight = 1.0
                if loss_weights is not None:
                    weight = float(loss_weights[key])
                pairs.append((key, loss, weight, y[key], outputs[key]))
        except (KeyError, IndexError, TypeError):
            raise UsageError(
                f"{self._owner}: expected a loss, a weight and labels for each output ({_keys_of(outputs)}), got "
                f"losses {_keys_of(self._loss)}, weights {_keys_of(loss_weights)} and labels {_keys_of(y)}; give one "
                f"of each under the same name or at the same place."
            ) from None
        return pairs

    def update_metrics(
        self,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
    ) -> None:
        """Update the metrics of `compile` by rows of this replica.

        Raises:
            UsageError: for metrics of an output that the model does not have.
        """
        for name, metric, is_weighted, key in self._judging:
            truth = y
            predictions = y_pred
            if is_nest(y_pred):
                if key is None or key not in _keys_of(y_pred):
                    raise UsageError(
                        f"{self._owner}: expected metrics under the names or places of outputs, {_keys_of(y_pred)}, "
                        f"got {name!r}; give a dict or a list of lists."
                    )
                truth = y[key]
                predictions = y_pred[key]
            predictions = predictions.detach()
            if isinstance(metric, TorchMetric):
                metric.update_state(predictions, truth)
            elif is_weighted and sample_weight is not None:
                metric.update_state(truth, predictions, sample_weight)
            else:
                metric.update_state(truth, predictions)

    def by_name(self, metrics: Sequence[Any]) -> Mapping[str, Any]:
        """Return metrics by their names in logs. If several have the same name, the later ones get a number."""
        names_by_id = {id(named_metric.metric): named_metric.name for named_metric in self.metrics}
        metrics_by_name: dict[str, Any] = {}
        for metric in metrics:
            name = names_by_id.get(id(metric)) or str(metric.name)
            if name == type(metric).__name__:
                name = losses.snake_case(name)
            unique_name = name
            number = 1
            while unique_name in metrics_by_name:
                unique_name = f"{name}_{number}"
                number += 1
            metrics_by_name[unique_name] = metric
        return metrics_by_name


def _metrics_by_output(metrics: Any) -> list[tuple[Any, Any]]:
    """Return the metrics of `compile` as (key of an output, metric or list of metrics); key None for any output."""
    if metrics is None:
        return [(None, [])]
    if isinstance(metrics, dict):
        return sorted(metrics.items())
    is_list = isinstance(metrics, (list, tuple))
    if is_list and any(isinstance(item, (list, tuple)) for item in metrics):
        return list(enumerate(metrics))
    return [(None, metrics)]


def _entry(nest: Any, key: Any) -> Any:
    """Return the entry of a nest under a key, or the value itself if it is no nest."""
    return nest[key] if is_nest(nest) else nest


def _keys_of(nest: Any) -> Any:
    """Return the keys of a nest, in the same order on all replicas; "one" for a value that is no nest."""
    if isinstance(nest, dict):
        return sorted(nest)
    if isinstance(nest, (tuple, list)):
        return list(range(len(nest)))
    return "one"
