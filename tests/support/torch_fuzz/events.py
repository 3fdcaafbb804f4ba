"""What happens between the steps of a program, outside of `strategy.run`."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fuzz.models import N_OUT, make_rows
from torch_fuzz.training import Training, make_optimizer


def load_own_state(training: Training) -> None:
    """Load copies of the states of models and optimizers."""
    for model in _models(training):
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    for optimizer in training.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_from_bytes(training: Training) -> None:
    """Pickle and load the states."""
    for item in (*_models(training), *training.optimizers):
        memory = io.BytesIO()
        torch.save(item.state_dict(), memory)
        memory.seek(0)
        item.load_state_dict(torch.load(memory))


def save_and_restore(training: Training) -> None:
    """Save a checkpoint, change everything, and restore it."""
    objects: dict[str, Any] = {f"model{number}": model for number, model in enumerate(_models(training))}
    objects.update({f"optimizer{number}": optimizer for number, optimizer in enumerate(training.optimizers)})
    training.backend.save_and_restore(objects, lambda: _disturb(training))


@torch.no_grad()
def _disturb(training: Training) -> None:
    for model in _models(training):
        for parameter in model.parameters():
            parameter.add_(1.0)
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.mul_(2.0)


@torch.no_grad()
def decay(training: Training) -> None:
    """Shrink all weights, alike on all ranks."""
    for parameter in training.model.parameters():
        parameter.mul_(0.9)


@torch.no_grad()
def write_weights(training: Training) -> None:
    """Set weights to values that all ranks know, past torch's counters."""
    for number, parameter in enumerate(training.model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data.lerp_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), 0.05)


def freeze(training: Training) -> None:
    """Freeze every third parameter; its gradient stays where it is."""
    for parameter in list(training.model.parameters())[::3]:
        parameter.requires_grad_(False)


def unfreeze(training: Training) -> None:
    """Unfreeze all, in the scope."""
    with training.backend.scope():
        training.model.requires_grad_(True)


def unfreeze_elsewhere(training: Training) -> None:
    """Unfreeze all, outside of the scope: what was frozen at the first use is refused at a step."""
    training.model.requires_grad_(True)


def add_head(training: Training) -> None:
    """Add a layer, and its parameters to the optimizer."""
    with training.backend.scope():
        head = nn.Linear(N_OUT, N_OUT).to(training.dtype)
        _fill(head, 3)
        training.model.heads.append(head)
        training.optimizers[0].add_param_group({"params": list(head.parameters()), "lr": 0.01})
    training.make_schedulers()


def replace_heads(training: Training) -> None:
    """Replace the layers behind the trunk, and the optimizer."""
    with training.backend.scope():
        for number in range(len(training.model.heads)):
            head = nn.Linear(N_OUT, N_OUT).to(training.dtype)
            _fill(head, number)
            training.model.heads[number] = head
    _make_optimizer(training)


def replace_model(training: Training) -> None:
    """Train a copy made in the scope, and drop the model."""
    with training.backend.scope():
        training.model = copy.deepcopy(training.model)
    _make_optimizer(training)


def keep_copy(training: Training) -> None:
    """Keep a copy of the model, made in the scope, that nobody trains."""
    with training.backend.scope():
        training.kept.append(copy.deepcopy(training.model))


def assign_state(training: Training) -> None:
    """Replace all parameters by those of a state dict, in the scope, and the optimizer."""
    state = {key: value.clone() for key, value in training.model.state_dict().items()}
    needs = {key: parameter.requires_grad for key, parameter in training.model.named_parameters(remove_duplicate=False)}
    with training.backend.scope():
        training.model.load_state_dict(state, assign=True)
        for key, parameter in training.model.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(needs[key])
    _make_optimizer(training)


def _make_optimizer(training: Training) -> None:
    spec = training.program.optimizers[0]
    training.optimizers[0] = make_optimizer(training.backend, spec, training.model.parameters())
    training.make_schedulers()


@torch.no_grad()
def _fill(layer: nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)


def evaluate(training: Training) -> None:
    """Look at rows of no dataset, without a graph."""
    rows = make_rows(4, 99, training.dtype)
    modes = {module: module.training for module in training.model.modules()}
    with torch.inference_mode():
        training.model.eval()(rows)
    for module, mode in modes.items():
        module.training = mode


def zero_model(training: Training) -> None:
    training.model.zero_grad(set_to_none=False)


def drop_gradients(training: Training) -> None:
    training.model.zero_grad(set_to_none=True)


def zeros_by_hand(training: Training) -> None:
    """Give every parameter a gradient of zeros."""
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def scale_gradients(training: Training) -> None:
    """Change in place what the last step has left."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.25)


def swap_average(training: Training) -> None:
    """Continue from the averaged weights."""
    if training.average is not None:
        training.model.load_state_dict(training.average.module.state_dict())


def turn_layout(training: Training) -> None:
    """Change the strides of convolutions' weights."""
    training.model.to(memory_format=torch.channels_last)


def fresh_optimizer(training: Training) -> None:
    _make_optimizer(training)


def hook_gradients(training: Training) -> None:
    """Let a hook of the program's own halve every other gradient, as it is made."""
    for parameter in list(training.model.parameters())[::2]:
        if parameter.requires_grad:
            parameter.register_hook(_half)


def _half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def _models(training: Training) -> list[nn.Module]:
    return [training.model, *([] if training.critic is None else [training.critic])]


#: Events by name.
EVENTS: dict[str, Callable[[Training], None]] = {
    "load own state": load_own_state,
    "load from bytes": load_from_bytes,
    "save and restore": save_and_restore,
    "decay": decay,
    "write weights": write_weights,
    "freeze": freeze,
    "unfreeze": unfreeze,
    "unfreeze elsewhere": unfreeze_elsewhere,
    "add head": add_head,
    "replace heads": replace_heads,
    "replace model": replace_model,
    "keep copy": keep_copy,
    "assign state": assign_state,
    "evaluate": evaluate,
    "zero model": zero_model,
    "drop gradients": drop_gradients,
    "zeros by hand": zeros_by_hand,
    "scale gradients": scale_gradients,
    "swap average": swap_average,
    "turn layout": turn_layout,
    "fresh optimizer": fresh_optimizer,
    "hook gradients": hook_gradients,
}
#: Those that write to weights, which belongs on the chief where parameters are in central storage.
WRITES_WEIGHTS = {"load own state", "load from bytes", "decay", "write weights", "swap average"}
#: Those that read or replace gradients, or give an optimizer other parameters after the first use.
NEEDS_WHOLE_GRADIENTS = {
    "add head",
    "replace heads",
    "replace model",
    "assign state",
    "scale gradients",
    "fresh optimizer",
}
#: Those that may be refused, at a step or before.
MAY_BE_REFUSED = {"unfreeze elsewhere", "zeros by hand", "turn layout"}
