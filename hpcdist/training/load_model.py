"""load_model: a model from the one file that `Model.save` and ModelCheckpoint write."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from hpcdist.errors import CheckpointMismatch, UsageError
from hpcdist.saving.checkpoint import load_checkpoint, read_value
from hpcdist.training import optimizers
from hpcdist.training.description import NESTS, make_layers, make_nest, without_list
from hpcdist.training.model import Model


def load_model(filepath: Any, factory: Callable[[], Any] | None = None) -> Model:
    """Return a model that `Model.save` or ModelCheckpoint has written, with its optimizer, in the current strategy.

    Collective over chief and workers; the chief reads.

    >>> keras_model.save("model.h5")
    >>> model = hpcdist.load_model("model.h5")
    >>> model.predict(x).shape
    (32, 3)

    Args:
        filepath: path of the file.
        factory: function that makes the model, or its module, as it was; needed where it is not a Sequential of layers
            of torch.nn. Its model is compiled as the saved model was, unless it is compiled already.

    Raises:
        UsageError: when a factory is needed, and there is none.
        CheckpointMismatch: when the file is of another model, or of no model.
    """
    description = json.loads(read_value(filepath, "description", ""))
    layers = description["layers"]
    compiled = description["compiled"]
    if factory is None and layers is None:
        raise UsageError(
            f"load_model: expected a factory for {filepath}, whose model is not a Sequential of layers of torch.nn, "
            f"got none; give a function that makes it: load_model(path, lambda: MyModel())."
        )
    model = make_layers(layers) if factory is None else factory()
    if not isinstance(model, Model):
        model = Model(model)
    for name, parameter in model.net.named_parameters():
        if name in description["frozen"]:
            parameter.requires_grad_(False)
    if model.optimizer is None and compiled is not None:
        _compile_as(model, compiled, is_made_here=factory is None)
    objects: dict[str, Any] = {"model": model.net}
    if model.optimizer is not None and compiled is not None:
        name = optimizers.name_of(type(model.optimizer))
        if name != compiled["optimizer"]:
            raise CheckpointMismatch(
                f"load_model: expected the optimizer {compiled['optimizer']} of {filepath}, got {name}; compile with "
                f"that one."
            )
        objects["optimizer"] = model.optimizer
    load_checkpoint(filepath, **objects)
    return model


def _compile_as(
    model: Model,
    compiled: dict[str, Any],
    is_made_here: bool,
) -> None:
    """Compile a model as `describe_compiled` says.

    Args:
        model: the model.
        compiled: what its file says.
        is_made_here: whether there is no factory.

    Raises:
        CheckpointMismatch: for an optimizer that is neither one of torch nor one that has a name.
        UsageError: for a loss of the program's own.
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
            defaults[name] = without_list(value)
    compile_parameters = inspect.signature(model.compile).parameters
    unknown = sorted(set(compiled["options"]) - set(compile_parameters))
    if unknown:
        raise CheckpointMismatch(
            f"load_model: expected options of compile, got {unknown}; give a factory."
        )
    if compiled["lost"]:
        advice = "let the factory add them and call compile"
        if is_made_here:
            advice = "give a factory that makes the model, adds them and calls compile"
        raise UsageError(
            f"load_model: expected a model that its file holds as a whole, got one with {', '.join(compiled['lost'])} "
            f"that no file can hold; {advice}."
        )
    with model.strategy.scope():  # metrics belong to it
        nests = {name: make_nest(compiled.get(name)) for name in NESTS}
    model.compile(lambda parameters: kind(parameters, **defaults), **nests, **compiled["options"])
