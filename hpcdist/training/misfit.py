"""Says which layer of a model does not fit its input, where torch gives sizes of matrices alone."""

import traceback

import torch
from torch import nn

from hpcdist.errors import UsageError
from hpcdist.nest import leaves


def explained(model: nn.Module, error: Exception) -> UsageError | None:
    """Return a UsageError that names the layer for a torch error about shapes or dtypes; None for others."""
    failing_layer = None if _is_of_memory(error) else _failing_layer(model, error)
    if failing_layer is None:
        return None
    name, layer, shapes = failing_layer
    text = (str(error).splitlines() or [type(error).__name__])[0]
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
    calls = [
        frame.f_locals
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is nn.Module._call_impl.__code__ and id(frame.f_locals["self"]) in names
    ]
    if not calls:
        return None
    layer = calls[-1]["self"]
    args = calls[-1]["args"]
    name = names[id(layer)].removeprefix("module.")
    if not name or not type(layer).__module__.startswith("torch."):
        return None
    shapes = ", ".join(
        f"{tuple(tensor.shape)} {tensor.dtype}"
        for tensor in leaves(tuple(args))
        if hasattr(tensor, "shape")
    )
    return name, str(layer).splitlines()[0], shapes
