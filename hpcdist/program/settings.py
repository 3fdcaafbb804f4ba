"""Settings of optimizers, such as learning rates, group by group: they must be the same on all ranks and replicas."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import DesyncError

#: What is compared; other values, such as functions, have no text that is equal on all ranks.
_PLAIN = (bool, int, float, complex, str, type(None))


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group; a tensor, as a learning rate may be, as numbers."""
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def describe_settings(optimizers: Iterable[Optimizer]) -> str:
    """Return one line for each group of parameters: the optimizer's class, how many there are, and the settings."""
    return "\n".join(
        f"{type(optimizer).__name__} of {len(group['params'])} parameters: "
        + ", ".join(f"{key}={_text(value)}" for key, value in sorted(settings.items()))
        for optimizer in optimizers
        for group, settings in zip(optimizer.param_groups, settings_of(optimizer), strict=True)
    )


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def explain_settings(settings: str, chiefs: str) -> DesyncError:
    """Return the error for a rank whose optimizers are described by `settings` where the chief's are by `chiefs`."""
    pairs = zip_longest(settings.splitlines(), chiefs.splitlines(), fillvalue="none")
    actual, wanted = next((actual, wanted) for actual, wanted in pairs if actual != wanted)
    return DesyncError(
        f"strategy: expected the chief's optimizers and comm hook, {wanted!r}, got {actual!r}; make the same, with the "
        f"same settings, on every rank."
    )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters
