"""Settings of optimizers, such as learning rates, group by group: they must be the same on all ranks and replicas."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import DesyncError

#: Types of compared values; other values, such as functions, have no text that is equal on all ranks.
_PLAIN = (bool, int, float, complex, str, type(None))


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group; a tensor, as a learning rate may be, as numbers."""
    return [_settings_of_group(group) for group in optimizer.param_groups]


def _settings_of_group(group: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            settings[key] = value.tolist() if isinstance(value, Tensor) else value
    return settings


def describe_settings(optimizers: Iterable[Optimizer]) -> str:
    """Return one line for each group of parameters: the optimizer's class, the number of parameters, the settings."""
    lines: list[str] = []
    for optimizer in optimizers:
        class_name = type(optimizer).__name__
        for group in optimizer.param_groups:
            n_parameters = len(group["params"])
            settings = _settings_of_group(group)
            pairs: list[str] = []
            for key, value in sorted(settings.items()):
                pairs.append(f"{key}={_text(value)}")
            settings_text = ", ".join(pairs)
            lines.append(f"{class_name} of {n_parameters} parameters: {settings_text}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Return a text of a value that is equal on all ranks."""
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_text, value))
        return f"({items})"
    if isinstance(value, _PLAIN):
        return repr(value)
    return type(value).__name__


def explain_settings(settings: str, chiefs: str) -> DesyncError:
    """Return the error for a rank.

    Args:
        settings: description of the rank's optimizers.
        chiefs: description of the chief's optimizers, which differs.
    """
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
