"""Says which layer of a model does not fit its input, where torch gives sizes of matrices alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpcdist.errors import UsageError
from hpcdist.nest import leaves


@contextmanager
def explaining_layers(model: nn.Module, x: Any) -> Iterator[None]:
    """Turn a torch error of the block about shapes or dtypes into a UsageError that names the layer.

    The layer is found by a second call, of which every layer is watched.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        found = _failing_layer(model, x, str(error))
        if found is None:
            raise
        name, layer, shapes = found
        raise UsageError(
            f"{name}: expected inputs that fit {layer}, got {shapes}: {str(error).splitlines()[0]}; check the shapes "
            f"of the data and of the layers before it."
        ) from error


def _failing_layer(model: nn.Module, x: Any, text: str) -> tuple[str, str, str] | None:
    """Return name, description and input shapes of the innermost layer that raises the same error again."""
    entered: list[tuple[str, nn.Module, str]] = []
    names = {id(layer): name for name, layer in model.named_modules()}

    def enter(layer: nn.Module, args: Any) -> None:
        shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in leaves(tuple(args)) if hasattr(one, "shape"))
        entered.append((names.get(id(layer), ""), layer, shapes))

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        entered.pop()

    hooks = [
        hook
        for layer in model.modules()
        for hook in (layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave))
    ]
    try:
        with torch.no_grad():
            if isinstance(x, (tuple, list)):
                model(*x)
            elif isinstance(x, dict):
                model(**x)
            else:
                model(x)
    except (RuntimeError, IndexError, ValueError) as error:
        if str(error) == text and entered and entered[-1][0]:
            name, layer, shapes = entered[-1]
            return name.removeprefix("module."), str(layer).splitlines()[0], shapes
    finally:
        for hook in hooks:
            hook.remove()
    return None
