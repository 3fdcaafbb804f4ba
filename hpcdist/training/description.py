"""What a model is made of and how it was compiled: as JSON, where both can be made of that again, and as a table.

No code is stored, and none is run when a file is loaded: layers are classes of torch.nn, made by the arguments that
they were made with.
"""

import inspect
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpcdist.errors import CheckpointMismatch, UsageError
from hpcdist.tf_compat import metrics
from hpcdist.tf_compat.metric import Metric
from hpcdist.training import losses, optimizers

if TYPE_CHECKING:
    from hpcdist.training.model import Model

_PLAIN = (bool, int, float, str, type(None))


def describe(model: "Model", layers: Any, extra: list[str]) -> str:
    """Return what a model is made of, and how it was compiled, as JSON.

    Args:
        model: see above.
        layers: what `describe_layers` returned for it.
        extra: what else it trains with, which cannot be made again.
    """
    frozen = [
        name for name, parameter in model.net.named_parameters() if not parameter.requires_grad
    ]
    return json.dumps(
        {"layers": layers, "frozen": frozen, "compiled": describe_compiled(model, extra)}
    )


# -- layers -----------------------------------------------------------------------------------------------------------


def describe_layers(module: nn.Module) -> Any:
    """Return what a layer of torch.nn, or a Sequential of them, is made of, as JSON; None for anything else."""
    if type(module) is nn.Sequential:
        layers = list(module._modules.items())  # one that comes twice is there twice
        shared = [
            candidate
            for _, candidate in layers
            if sum(candidate is sibling for _, sibling in layers) > 1
        ]
        if any(
            shared_layer is None or list(shared_layer.parameters()) or list(shared_layer.buffers())
            for shared_layer in shared
        ):
            return None
        parts = [(name, describe_layers(layer)) for name, layer in layers if layer is not None]
        return {"Sequential": parts} if all(part is not None for _, part in parts) else None
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or list(module.children()):
        return None
    arguments = _arguments_of(module)
    if arguments is None:
        return None
    with torch.device("meta"):  # which draws no random numbers
        rebuilt = _make_layer(kind.__name__, arguments)
    shapes = [(name, value.shape) for name, value in module.state_dict().items()]
    is_alike = (
        rebuilt is not None
        and [(name, value.shape) for name, value in rebuilt.state_dict().items()] == shapes
    )
    return {kind.__name__: arguments} if is_alike and repr(rebuilt) == repr(module) else None


def _arguments_of(layer: nn.Module) -> dict[str, Any] | None:
    """Return the arguments of a layer's constructor, which torch keeps as attributes; None if one is not found."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(layer).__init__).parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name in ("self", "device", "dtype") or name.startswith("_") or is_variable:
            continue
        value = getattr(layer, name, parameter.default)
        if isinstance(value, torch.Tensor) or (name == "bias" and value is None):
            value = value is not None
        is_list = isinstance(value, (tuple, list)) and all(
            isinstance(element, _PLAIN) for element in value
        )
        if not is_list and not isinstance(value, _PLAIN):
            return None
        arguments[name] = list(value) if is_list else value
    return arguments


def make_layers(description: Any) -> nn.Module:
    """Return new layers for what `describe_layers` returned.

    Raises:
        CheckpointMismatch: for what it does not return.
    """
    if not isinstance(description, dict) or len(description) != 1:
        raise CheckpointMismatch(
            f"load_model: expected one layer, got {str(description)[:60]}; give a factory."
        )
    ((kind, content),) = description.items()
    if kind == "Sequential":
        sequential = nn.Sequential()
        for name, part in content:
            sequential.add_module(name, make_layers(part))
        return sequential
    layer = _make_layer(kind, content)
    if layer is None:
        raise CheckpointMismatch(
            f"load_model: expected a layer of torch.nn, got {kind[:60]!r}; give a factory."
        )
    return layer


def _make_layer(kind: str, arguments: dict[str, Any]) -> nn.Module | None:
    make = getattr(nn, kind, None)
    if not (inspect.isclass(make) and issubclass(make, nn.Module)):
        return None
    constructor_arguments = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    try:
        layer: nn.Module = make(**constructor_arguments)
    except (TypeError, ValueError, RuntimeError):
        return None
    return layer


# -- how it was compiled ----------------------------------------------------------------------------------------------


def describe_compiled(model: "Model", extra: list[str]) -> Any:
    """Return how a model was compiled, as JSON, with the names of what cannot be made again as "lost"."""
    if model.optimizer is None:
        return None
    compile_arguments = model.compiled_with
    defaults: dict[str, Any] = {}
    for name, value in model.optimizer.defaults.items():
        if isinstance(value, (*_PLAIN, tuple)):
            defaults[name] = value
    described: dict[str, Any] = {}
    lost = list(extra)
    for name in ("loss", "metrics", "weighted_metrics", "loss_weights"):
        described[name] = _describe_nest(compile_arguments[name])
        if compile_arguments[name] is not None and described[name] is None:
            lost.append(name)
    optimizer = optimizers.name_of(type(model.optimizer))
    return {
        "lost": lost,
        "optimizer": optimizer,
        "defaults": defaults,
        "options": compile_arguments["options"],
        **described,
    }


def _describe_nest(nest: Any) -> Any:
    """Return losses, metrics or weights as JSON: one, or a list or dict of them; None if one is the program's own."""
    if isinstance(nest, dict):
        parts = {key: _describe_nest(value) for key, value in nest.items()}
        is_whole = all(isinstance(key, str) and part is not None for key, part in parts.items())
        return {"dict": parts} if is_whole else None
    if isinstance(nest, (list, tuple)):
        items = [_describe_nest(value) for value in nest]
        return {"list": items} if all(item is not None for item in items) else None
    if isinstance(nest, np.number):
        nest = nest.item()
    if isinstance(nest, (str, int, float)):
        return {"plain": nest}
    kind = type(nest).__name__
    if isinstance(nest, losses.Loss) and losses.snake_case(kind) in losses.NAMED:
        return {"loss": kind, "arguments": _arguments_of_loss(nest)}
    if isinstance(nest, Metric) and getattr(metrics, kind, None) is type(nest):
        return {"metric": kind, "arguments": nest.get_config()}
    return None


def _arguments_of_loss(loss: losses.Loss) -> dict[str, Any]:
    accepted = inspect.signature(type(loss).__init__).parameters
    arguments: dict[str, Any] = {}
    for name, value in vars(loss).items():
        if name in accepted and isinstance(value, _PLAIN):
            arguments[name] = value
    return arguments


def _make_nest(description: Any) -> Any:
    """Return what `_describe_nest` has described.

    Raises:
        CheckpointMismatch: for what it does not return.
    """
    match description:
        case None:
            return None
        case {"dict": dict(parts)}:
            return {key: _make_nest(part) for key, part in parts.items()}
        case {"list": list(items)}:
            return [_make_nest(item) for item in items]
        case {"plain": value}:
            return value
        case {"loss": str(kind), "arguments": dict(arguments)}:
            return losses.named(kind, losses.NAMED, "loss")(**arguments)
        case {"metric": str(kind), "arguments": dict(arguments)}:
            make = getattr(metrics, kind, None)
            if inspect.isclass(make) and issubclass(make, Metric):
                return make(**arguments)
    raise CheckpointMismatch(
        f"load_model: expected losses and metrics of hpcdist, got {str(description)[:60]!r}; compile in a factory."
    )


def compile_as(model: "Model", compiled: dict[str, Any]) -> None:
    """Compile a model as `describe_compiled` says.

    Raises:
        CheckpointMismatch: for an optimizer that is neither one of torch nor one that has a name. UsageError: for a
            loss of the program's own.
    """
    kind = optimizers.class_of(compiled["optimizer"])
    if kind is None:
        raise CheckpointMismatch(
            f"load_model: expected an optimizer of torch.optim, got {compiled['optimizer']!r}; compile in the factory."
        )
    accepted = optimizers.settings_of(kind)
    defaults: dict[str, Any] = {}
    for name, value in compiled["defaults"].items():
        if name in accepted:
            defaults[name] = tuple(value) if isinstance(value, list) else value
    compile_parameters = inspect.signature(model.compile).parameters
    unknown = sorted(set(compiled["options"]) - set(compile_parameters))
    if unknown:
        raise CheckpointMismatch(
            f"load_model: expected options of compile, got {unknown}; give a factory."
        )
    if compiled["lost"]:
        raise UsageError(
            f"load_model: expected a model that was compiled by names, and of hpcdist.losses and metrics, got "
            f"{compiled['lost']} of the program's own; give a factory that makes the model and compiles it."
        )
    with model.strategy.scope():  # metrics belong to it
        nests = {
            name: _make_nest(compiled.get(name))
            for name in ("loss", "metrics", "weighted_metrics", "loss_weights")
        }
    model.compile(lambda parameters: kind(parameters, **defaults), **nests, **compiled["options"])


def last_layer_of(net: nn.Module) -> nn.Module | None:
    """Return the layer whose outputs are those of a Sequential; None for another module, which may do more."""
    if not isinstance(net, nn.Sequential):
        return net if not list(net.children()) else None
    return last_layer_of(net[-1]) if len(net) else None


# -- for people -------------------------------------------------------------------------------------------------------


def table_of_layers(net: nn.Module, name: str) -> list[str]:
    """Return lines with the layers, their shapes and numbers of parameters.

    Args:
        net: what the layers are part of.
        name: of itself, where it has no parts.
    """
    rows = [
        (
            layer_name or name,
            type(layer).__name__,
            [list(parameter.shape) for parameter in layer.parameters(recurse=False)],
        )
        for layer_name, layer in net.named_modules()
        if not list(layer.children()) or list(layer.parameters(recurse=False))
    ]
    counts = [sum(math.prod(shape) for shape in shapes) for _, _, shapes in rows]
    table = [("layer", "kind", "parameters", "shapes")]
    table += [(*row[:2], f"{n:,}", str(row[2])[1:-1]) for row, n in zip(rows, counts, strict=True)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip()
        for a, b, c, d in table
    ]
    n_all = sum(parameter.numel() for parameter in net.parameters())
    n_trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    return [*lines, f"{n_all:,} parameters, {n_trained:,} of them trained"]
