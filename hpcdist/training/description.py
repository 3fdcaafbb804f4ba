"""What a model is made of and how it was compiled: as JSON, from which both can be made again, and as a table.

No code is stored, and none is run when a file is loaded: layers are classes of torch.nn, made by the arguments that
they were made with.
"""

import inspect
import json
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpcdist.errors import CheckpointMismatch
from hpcdist.tf_compat import losses, metrics
from hpcdist.tf_compat.metric import Metric
from hpcdist.training import optimizers

#: Arguments of `Model.compile` that may be lists or dicts.
NESTS = ("loss", "metrics", "weighted_metrics", "loss_weights")
_PLAIN = (bool, int, float, str, type(None))


def describe(net: nn.Module, compiled: Any) -> str:
    """Return the layers of a module, and how its model was compiled, as JSON.

    Args:
        net: module to describe.
        compiled: result of `describe_compiled` for its model. None before `compile`.
    """
    layers = describe_layers(net)
    frozen = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
    return json.dumps({"layers": layers, "frozen": frozen, "compiled": compiled})


# -- layers -----------------------------------------------------------------------------------------------------------


def describe_layers(module: nn.Module) -> Any:
    """Return a layer of torch.nn, or a Sequential of such layers, as JSON; None for another module."""
    if type(module) is nn.Sequential:
        return _describe_sequential(module)
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or list(module.children()):
        return None
    arguments = _arguments_of(module)
    if arguments is None:
        return None
    with torch.device("meta"):  # which draws no random numbers
        rebuilt = _make_layer(kind.__name__, arguments)
    if rebuilt is None or _shapes_of(rebuilt) != _shapes_of(module):
        return None
    if repr(rebuilt) != repr(module):
        return None
    return {kind.__name__: arguments}


def _describe_sequential(sequential: nn.Sequential) -> Any:
    """Return the layers of a Sequential as JSON. None if one cannot be described.

    A layer that has weights cannot be described if it comes twice, as two new layers would not share them.
    """
    n_uses = Counter(map(id, sequential._modules.values()))
    parts = []
    for name, layer in sequential._modules.items():
        is_repeated = n_uses[id(layer)] > 1
        if layer is None:
            if is_repeated:
                return None
            continue
        weights = [*layer.parameters(), *layer.buffers()]
        if is_repeated and weights:
            return None
        part = describe_layers(layer)
        if part is None:
            return None
        parts.append((name, part))
    return {"Sequential": parts}


def _shapes_of(layer: nn.Module) -> list[tuple[str, torch.Size]]:
    """Return the names and shapes of the weights of a layer, buffers included."""
    return [(name, value.shape) for name, value in layer.state_dict().items()]


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
        is_sequence = isinstance(value, (tuple, list))
        if is_sequence and all(isinstance(element, _PLAIN) for element in value):
            arguments[name] = list(value)
        elif isinstance(value, _PLAIN):
            arguments[name] = value
        else:
            return None
    return arguments


def make_layers(description: Any) -> nn.Module:
    """Return new layers by a description that `describe_layers` returned.

    Raises:
        CheckpointMismatch: for a description of another form.
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
    constructor_arguments = {name: without_list(value) for name, value in arguments.items()}
    try:
        layer: nn.Module = make(**constructor_arguments)
    except (TypeError, ValueError, RuntimeError):
        return None
    return layer


def without_list(value: Any) -> Any:
    """Return an argument that was read from JSON as a constructor takes it: a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


# -- how it was compiled ----------------------------------------------------------------------------------------------


def describe_compiled(
    optimizer: Any,
    compiled_with: dict[str, Any],
    extra: list[str],
) -> Any:
    """Return how a model was compiled, as JSON. "lost" has the names of arguments that cannot be made again.

    Args:
        optimizer: optimizer of the model.
        compiled_with: `Model.compiled_with`.
        extra: names of further things that it trains with, which cannot be made again.
    """
    defaults: dict[str, Any] = {}
    for name, value in optimizer.defaults.items():
        if isinstance(value, (*_PLAIN, tuple)):
            defaults[name] = value
    described: dict[str, Any] = {}
    lost = list(extra)
    for name in NESTS:
        described[name] = _describe_nest(compiled_with[name])
        if compiled_with[name] is not None and described[name] is None:
            lost.append(name)
    return {
        "lost": lost,
        "optimizer": optimizers.name_of(type(optimizer)),
        "defaults": defaults,
        "options": compiled_with["options"],
        **described,
    }


def _describe_nest(nest: Any) -> Any:
    """Return losses, metrics or weights as JSON: one, or a list or dict of them; None if one is the program's own."""
    if isinstance(nest, dict):
        parts = {key: _describe_nest(value) for key, value in nest.items()}
        has_texts_as_keys = all(isinstance(key, str) for key in parts)
        if None in parts.values() or not has_texts_as_keys:
            return None
        return {"dict": parts}
    if isinstance(nest, (list, tuple)):
        items = [_describe_nest(value) for value in nest]
        if None in items:
            return None
        return {"list": items}
    if isinstance(nest, np.number):
        nest = nest.item()
    if isinstance(nest, (str, int, float)):
        return {"plain": nest}
    kind = type(nest).__name__
    if losses.NAMED.get(losses.snake_case(kind)) is type(nest):
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


def make_nest(description: Any) -> Any:
    """Return the losses, metrics or weights that `_describe_nest` has described.

    Raises:
        CheckpointMismatch: for a description of another form.
    """
    match description:
        case None:
            return None
        case {"dict": dict(parts)}:
            return {key: make_nest(part) for key, part in parts.items()}
        case {"list": list(items)}:
            return [make_nest(item) for item in items]
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


def last_layer_of(net: nn.Module) -> nn.Module | None:
    """Return the layer that makes the outputs of a Sequential; None for another module, which may do more."""
    if isinstance(net, nn.Sequential):
        if not len(net):
            return None
        return last_layer_of(net[-1])
    if list(net.children()):
        return None
    return net


# -- for people -------------------------------------------------------------------------------------------------------


class _LayerRow(NamedTuple):
    """A row of the table of layers, as texts.

    Attributes:
        name: name of the layer in its model.
        kind: name of its class.
        n_parameters: number of its parameters, without the parameters of its parts.
        shapes: shapes of these parameters.
    """

    name: str
    kind: str
    n_parameters: str
    shapes: str


def table_of_layers(net: nn.Module, name: str) -> list[str]:
    """Return lines with the layers, their shapes and numbers of parameters.

    Args:
        net: module that has the layers as its parts.
        name: name of the module itself, where it has no parts.
    """
    rows = [_LayerRow("layer", "kind", "parameters", "shapes")]
    for layer_name, layer in net.named_modules():
        if not list(layer.children()) or list(layer.parameters(recurse=False)):
            rows.append(_row_of(layer, layer_name or name))
    name_width = max(len(row.name) for row in rows)
    kind_width = max(len(row.kind) for row in rows)
    number_width = max(len(row.n_parameters) for row in rows)
    lines = []
    for row in rows:
        name_and_kind = f"{row.name:<{name_width}}  {row.kind:<{kind_width}}"
        line = f"{name_and_kind}  {row.n_parameters:>{number_width}}  {row.shapes}"
        lines.append(line.rstrip())
    n_all = 0
    n_trained = 0
    for parameter in net.parameters():
        n_all += parameter.numel()
        if parameter.requires_grad:
            n_trained += parameter.numel()
    return [*lines, f"{n_all:,} parameters, {n_trained:,} of them trained"]


def _row_of(layer: nn.Module, name: str) -> _LayerRow:
    """Return the row of a layer."""
    shapes = [list(parameter.shape) for parameter in layer.parameters(recurse=False)]
    n_parameters = sum(math.prod(shape) for shape in shapes)
    return _LayerRow(
        name=name,
        kind=type(layer).__name__,
        n_parameters=f"{n_parameters:,}",
        shapes=str(shapes)[1:-1],
    )
