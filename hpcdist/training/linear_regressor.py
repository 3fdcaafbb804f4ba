"""LinearRegressor: the estimator of the guides, and the columns that it reads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import UsageError
from hpcdist.training import optimizers
from hpcdist.training.estimator import Estimator, RunConfig
from hpcdist.training.model import Model


@dataclass(frozen=True)
class NumericColumn:
    """Numbers under a key of the features; `numeric_column` makes it."""

    key: str
    shape: tuple[int, ...]
    normalizer_fn: Callable[[Tensor], Tensor] | None


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    normalizer_fn: Callable[[Tensor], Tensor] | None = None,
) -> NumericColumn:
    """Return a column of numbers, as `tf.feature_column.numeric_column`.

    Args:
        key: key in the features.
        shape: shape of the numbers of one row.
        normalizer_fn: function that is applied to the (rows, ...) tensor.
    """
    if isinstance(shape, int):
        shape = (shape,)
    return NumericColumn(key, tuple(shape), normalizer_fn)


class LinearRegressor(Estimator):
    """Learns a weighted sum of columns and a bias, by squared errors; see `tf.estimator.LinearRegressor`.

    Features are a dict of arrays by the keys of the columns. Weights and bias begin at 0.

    Args:
        feature_columns: columns that `numeric_column` has made.
        model_dir: folder of the run; see `Estimator`.
        label_dimension: number of values of a label.
        optimizer: a name, with a learning rate of 0.2, or 1 / sqrt(columns) where that is less; or an argument of
            `Model.compile`. "Ftrl" without regularization is Adagrad.
        config: options of the run; see `Estimator`.

    Raises:
        UsageError: for anything else than columns.
    """

    def __init__(
        self,
        feature_columns: Sequence[NumericColumn],
        model_dir: Any = None,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        columns = list(feature_columns)
        if not columns or not all(isinstance(column, NumericColumn) for column in columns):
            raise UsageError(
                f"LinearRegressor: expected columns made by numeric_column, got {feature_columns!r}; write "
                f"[numeric_column('x')]."
            )
        rate = min(0.2, 1 / math.sqrt(len(columns)))

        def make() -> Model:
            model = Model(_Linear(columns, label_dimension))
            metrics = [_mean_of("label/mean", 0), _mean_of("prediction/mean", 1)]
            model_optimizer = optimizer
            if isinstance(optimizer, str):
                model_optimizer = optimizers.with_rate(optimizer, rate)
            model.compile(model_optimizer, "mse", metrics=metrics)
            return model

        super().__init__(make, model_dir, config)


class _Linear(nn.Module):
    """A linear layer on columns side by side."""

    def __init__(self, columns: Sequence[NumericColumn], n_outputs: int) -> None:
        super().__init__()
        self._columns = columns
        n_inputs = sum(math.prod(column.shape) for column in columns)
        self.linear = nn.Linear(n_inputs, n_outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, *unnamed: Tensor, **features: Tensor) -> Tensor:
        missing = [column.key for column in self._columns if column.key not in features]
        if missing or unnamed:
            raise UsageError(
                f"LinearRegressor: expected features {missing}, got {sorted(features) or 'arrays without keys'}; "
                f"return ({{key: array}}, labels) from input_fn."
            )
        parts = []
        for column in self._columns:
            values = features[column.key]
            if column.normalizer_fn is not None:
                values = column.normalizer_fn(values)
            parts.append(values.reshape(len(values), math.prod(column.shape)))
        predictions: Tensor = self.linear(torch.cat(parts, 1).to(self.linear.weight.dtype))
        return predictions


def _mean_of(name: str, index: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a metric of this name in logs: the mean of labels (0), or of predictions (1)."""

    def value(y_true: Tensor, y_pred: Tensor) -> Tensor:
        return (y_true, y_pred)[index]

    value.__name__ = name
    return value
