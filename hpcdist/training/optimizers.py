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
from hpcdist.storage.zero_redundancy import ZeroRedundancyOptimizer
from hpcdist.tf_compat.losses import named
from hpcdist.training import keras_optimizers


def _fused(kind: Callable[..., Optimizer], **settings: Any) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of a class, with a fused step where torch has one for the parameters.

    Args:
        kind: class of the optimizer.
        settings: defaults of the settings of the optimizer.
    """

    def make(parameters: Iterable[nn.Parameter], **overrides: Any) -> Optimizer:
        trained = list(parameters)
        is_fused: bool | None = True
        for parameter in trained:
            has_kernel = parameter.device.type in _FUSED_DEVICES
            if not has_kernel or not parameter.is_floating_point():
                is_fused = None  # torch chooses
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
        UsageError: for an unknown name, with a list of close ones; for an object that makes no optimizer.
    """
    if isinstance(optimizer_or_name, Optimizer):
        return optimizer_or_name
    make = optimizer_or_name
    if isinstance(optimizer_or_name, str):
        make = named(optimizer_or_name, NAMED, "optimizer")
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
    """Return the name of a class of optimizers in files: its class name, behind "keras." if its steps are Keras'."""
    if getattr(keras_optimizers, kind.__name__, None) is kind:
        return f"keras.{kind.__name__}"
    return kind.__name__


def class_of(name: str) -> type[Optimizer] | None:
    """Return the class that `name_of` has named; None for one of the program's own."""
    kind: Any = getattr(torch.optim, name, None)
    if name.startswith("keras."):
        kind = getattr(keras_optimizers, name.removeprefix("keras."), None)
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind
    return None


def settings_of(kind: type[Optimizer]) -> set[str]:
    """Return the names of the settings that the constructor of a class of optimizers takes.

    A constructor with `**settings` passes them on to the constructor of the next base class.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        names.update(parameters)
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def maker_like(optimizer: Optimizer) -> Callable[..., Optimizer]:
    """Return a function of parameters that makes an optimizer of this class, with the settings of its first group."""
    kind: Callable[..., Optimizer] = type(optimizer)
    accepted = settings_of(type(optimizer))
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        kind = partial(ZeroRedundancyOptimizer, optimizer_class=optimizer.optimizer_class)
        accepted = settings_of(optimizer.optimizer_class)
    settings: dict[str, Any] = {}
    for name in optimizer.defaults:
        if name in accepted:
            settings[name] = optimizer.param_groups[0][name]
    return partial(kind, **settings)


def with_rate(name: str, rate: float) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function that makes the optimizer of a name, with a learning rate.

    "Ftrl" follows McMahan (2013), without penalties.

    Raises:
        UsageError: for an unknown name, as `get`.
    """
    ftrl = partial(torch.optim.Adagrad, initial_accumulator_value=0.1, eps=1e-10)
    optimizers_by_name = {**NAMED, "ftrl": ftrl}
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
    """A regularizer: the sum of `L1` and `L2`."""

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self._parts = (L1(l1), L2(l2))

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the loss of a tensor, without dimensions."""
        return self._parts[0](tensor) + self._parts[1](tensor)
