"""Optimizers by the names, defaults and formulas of Keras; and regularizers.

Source: keras/src/optimizers and keras/src/regularizers (Keras 3).
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import UsageError
from hpcdist.training import keras_optimizers
from hpcdist.training.losses import named


def _fused(kind: Callable[..., Optimizer], **settings: Any) -> Callable[..., Optimizer]:
    """Return what makes an optimizer of a class: its fused step, where torch has one for the parameters."""

    def make(parameters: Iterable[nn.Parameter], **overrides: Any) -> Optimizer:
        trained = list(parameters)
        are_floats = all(parameter.is_floating_point() for parameter in trained)
        has_kernel = all(parameter.device.type in _FUSED_DEVICES for parameter in trained)
        is_fused = True if are_floats and has_kernel else None
        return kind(trained, fused=is_fused, **{**settings, **overrides})

    return make


_FUSED_DEVICES = ("cpu", "cuda")
#: Name -> an optimizer with the defaults that Keras has, whose steps are Keras'.
NAMED: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adam": _fused(keras_optimizers.Adam, lr=0.001, eps=1e-7),
    "adamw": _fused(keras_optimizers.AdamW, lr=0.001, eps=1e-7, weight_decay=0.004),
    "adamax": partial(keras_optimizers.Adamax, lr=0.001, eps=1e-7),
    "nadam": partial(torch.optim.NAdam, lr=0.001, eps=1e-7, momentum_decay=1.0),
    "rmsprop": partial(keras_optimizers.RMSprop, lr=0.001, alpha=0.9, eps=1e-7),
    "adagrad": partial(torch.optim.Adagrad, lr=0.001, initial_accumulator_value=0.1, eps=1e-7),
    "adadelta": partial(torch.optim.Adadelta, lr=0.001, rho=0.95, eps=1e-7),
}


def get(optimizer_or_name: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer: as it is, by name, or made by a function of the parameters, such as a torch class.

    Raises:
        UsageError: for an unknown name, which lists close ones; for what makes no optimizer.
    """
    if isinstance(optimizer_or_name, Optimizer):
        return optimizer_or_name
    make = (
        named(optimizer_or_name, NAMED, "optimizer")
        if isinstance(optimizer_or_name, str)
        else optimizer_or_name
    )
    if not callable(make):
        raise UsageError(
            f"compile: expected an optimizer, its name, or a function that makes it of the parameters, got "
            f"{type(optimizer_or_name).__name__}; write optimizer='adam', or optimizer=lambda parameters: "
            f"torch.optim.Adam(parameters, lr=0.01)."
        )
    optimizer = make([parameter for parameter in parameters if parameter.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"compile: expected a function that makes an optimizer, got {type(optimizer).__name__} from it; return it."
        )
    return optimizer


def name_of(kind: type[Optimizer]) -> str:
    """Return the name of a class of optimizers in files: its own, behind "keras." if its steps are Keras'."""
    return (
        f"keras.{kind.__name__}"
        if getattr(keras_optimizers, kind.__name__, None) is kind
        else kind.__name__
    )


def class_of(name: str) -> Callable[..., Optimizer] | None:
    """Return the class that `name_of` has named; None for one of the program's own."""
    kind: Any = getattr(torch.optim, name, None)
    if name.startswith("keras."):
        kind = getattr(keras_optimizers, name.removeprefix("keras."), None)
    return kind if isinstance(kind, type) and issubclass(kind, Optimizer) else None


def settings_of(kind: Callable[..., Optimizer]) -> Iterable[str]:
    """Return the names of the settings that torch's constructor of an optimizer, or of its base class, takes."""
    bases: Iterable[type] = getattr(kind, "__mro__", ())
    of_torch = next(base for base in bases if getattr(torch.optim, base.__name__, None) is base)
    return inspect.signature(of_torch).parameters


def with_rate(name: str, rate: float) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return what makes the optimizer of a name, with a learning rate. "Ftrl" as in McMahan (2013), without penalties.

    Raises:
        UsageError: as `get`.
    """
    optimizers_by_name = {
        **NAMED,
        "ftrl": partial(torch.optim.Adagrad, initial_accumulator_value=0.1, eps=1e-10),
    }
    return partial(named(name, optimizers_by_name, "optimizer"), lr=rate)


class L1:
    """A regularizer: the sum of absolute values times `l1`."""

    def __init__(self, l1: float = 0.01) -> None:
        self._l1 = l1

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the loss of a tensor, without dimensions."""
        return self._l1 * tensor.abs().sum()


class L2:
    """A regularizer: the sum of squares times `l2`."""

    def __init__(self, l2: float = 0.01) -> None:
        self._l2 = l2

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the loss of a tensor, without dimensions."""
        return self._l2 * tensor.square().sum()


class L1L2:
    """A regularizer: both."""

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self._parts = (L1(l1), L2(l2))

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the loss of a tensor, without dimensions."""
        return self._parts[0](tensor) + self._parts[1](tensor)
