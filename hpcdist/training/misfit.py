"""Names the layer of a model that does not fit its input, where torch gives sizes of matrices alone."""

import traceback
from typing import Any

import torch
from torch import nn

from hpcdist.errors import UsageError
from hpcdist.nest import leaves


def explained(model: nn.Module, error: Exception) -> UsageError | None:
    """Return a UsageError that names the layer for a torch error about shapes or dtypes; None for another error."""
    if _is_of_memory(error):
        return None
    failing_layer = _failing_layer(model, error)
    if failing_layer is None:
        return None
    name, layer, shapes = failing_layer
    text = type(error).__name__
    if str(error):
        text = str(error).splitlines()[0]
    return UsageError(
        f"{name}: expected inputs that fit {layer}, got {shapes}: {text}; check the shapes of the data and of "
        f"the layers before it."
    )


def _is_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _failing_layer(model: nn.Module, error: BaseException) -> tuple[str, str, str] | None:
    """Return name, description and input shapes of the innermost layer of torch.nn that was called.

    None where the error is not raised in one: in the program's own code it says enough.
    """
    names = {id(layer): name for name, layer in model.named_modules()}
    innermost_call: dict[str, Any] | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_call = frame.f_code is nn.Module._call_impl.__code__
        if is_call and id(frame.f_locals["self"]) in names:
            innermost_call = frame.f_locals
    if innermost_call is None:
        return None
    layer = innermost_call["self"]
    name = names[id(layer)].removeprefix("module.")
    if not name or not type(layer).__module__.startswith("torch."):
        return None
    shapes = []
    for argument in leaves(tuple(innermost_call["args"])):
        if hasattr(argument, "shape"):
            shapes.append(f"{tuple(argument.shape)} {argument.dtype}")
    return name, str(layer).splitlines()[0], ", ".join(shapes)
