"""The kinds of objects that a Checkpoint holds: one question for each, and what the answer lets a caller use.

An object's methods decide its kind, not its class, so wrappers of modules and optimizers of other libraries are saved
as torch's are. This module does not import torch.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np

from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.torch_source import is_loader
from hpcdist.errors import UsageError
from hpcdist.program import owners
from hpcdist.program.owners import Stepper
from hpcdist.program.wrapped_modules import plain_state

#: Types of numbers and texts.
PLAIN = (bool, int, float, str)


class Stateful(Protocol):
    """An object that gives and takes its state, as torch's objects do."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state."""


class HasLocalState(Protocol):
    """An object whose state is gathered from all ranks, and of which this rank has a part."""

    def local_state(self) -> Any:
        """Return the part of this rank. Not collective."""


class SumsGradients(Protocol):
    """A strategy, which sums gradients over replicas."""

    def describe_sums(self) -> dict[str, Any]:
        """Return how gradients are summed, as JSON."""


def is_stateful(item: Any) -> TypeGuard[Stateful]:
    """Return whether an object gives and takes its state."""
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def is_module(item: Any) -> bool:
    """Return whether an object is a torch module, or a wrapper of one."""
    return hasattr(item, "named_parameters")


def is_optimizer(item: Any) -> bool:
    """Return whether an object is an optimizer."""
    return hasattr(item, "param_groups")


def is_strategy(item: Any) -> TypeGuard[SumsGradients]:
    """Return whether an object is a strategy."""
    return hasattr(item, "describe_sums")


def has_collective_state(item: Any) -> bool:
    """Return whether `state_dict` of an object is collective, as its state is gathered from all ranks."""
    return bool(getattr(item, "is_state_collective", False))


def has_local_state(item: Any) -> TypeGuard[HasLocalState]:
    """Return whether an object gives the part of its state that belongs to this rank."""
    return hasattr(item, "local_state")


def is_tensor(item: Any) -> bool:
    """Return whether an object is a torch tensor; this layer does not import torch."""
    return hasattr(item, "new_tensor")


def is_array(item: Any) -> bool:
    """Return whether an object is its own state: a numpy array or a tensor."""
    return isinstance(item, np.ndarray) or is_tensor(item)


def as_plain(item: Any) -> Any:
    """Return a number or text of numpy, or of a subclass, as Python's own; anything else as it is."""
    if isinstance(item, np.generic):
        item = item.item()
    for kind in PLAIN:
        if isinstance(item, kind):
            return kind(item)
    return item


def plain_kind(value: Any) -> str:
    """Return "number" or "text", or the name of any other type."""
    if type(value) in (bool, int, float):
        return "number"
    if type(value) is str:
        return "text"
    return type(value).__name__


def kind_of(item: Any) -> str:
    """Return the object's kind: the name of its class, unless its content alone counts.

    That is so for values and modules, and for strategies: a run may continue under another one.
    """
    if isinstance(item, PLAIN):
        return "value"
    if is_strategy(item):
        return "strategy"
    if is_tensor(item):
        return "tensor"
    if is_module(item):
        return "module"
    declared_kind: str = getattr(item, "checkpoint_kind", type(item).__name__)
    return declared_kind


def kinds_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of objects by their names."""
    return {name: kind_of(item) for name, item in objects.items()}


def require_state(name: str, item: Any) -> None:
    """Raise UsageError unless an object has a state that a Checkpoint can hold."""
    if is_loader(item):
        raise UsageError(
            f"Checkpoint: expected what strategy.experimental_distribute_dataset(loader) returns, got the "
            f"{type(item).__name__} itself for {name!r}, which counts what this rank has drawn, and not what "
            f"it has trained on; distribute it: its own state is not needed."
        )
    if is_array(item) or isinstance(as_plain(item), PLAIN):
        return
    if not is_stateful(item):
        raise UsageError(
            "Checkpoint: expected objects with state_dict and load_state_dict, arrays, tensors, numbers or "
            f"texts, got {type(item).__name__} for {name!r}; wrap it or leave it out."
        )


def settings_of(item: Any) -> Any:
    """Return what this rank holds of an object's state that can change without a step; None if there is no such part.

    Not collective.
    """
    if isinstance(item, PLAIN) or is_array(item):
        return item
    if is_optimizer(item):
        return [dict(group, params=None) for group in item.param_groups]
    if hasattr(item, "named_buffers"):
        return dict(item.named_buffers())
    if is_strategy(item) or isinstance(item, DistributedInput):
        return None
    if has_collective_state(item):
        return _local_state_of(item)
    return item.state_dict()


def _local_state_of(item: Any) -> Any:
    """Return the part of a gathered state that this rank holds; None if the object does not give it."""
    if has_local_state(item):
        return item.local_state()
    return None


def state_of(item: Any) -> Any:
    """Return an object's state: itself, if it is a value, an array or a tensor."""
    if is_array(item) or isinstance(item, PLAIN):
        return item
    if is_module(item):
        return plain_state(item)
    return item.state_dict()


def is_trained(module: Any) -> bool:
    """Return whether a module has parameters that training changes, and is no average of weights."""
    if hasattr(module, "update_parameters"):
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


def is_equal_everywhere(item: Any) -> bool:
    """Return whether all ranks hold the object: a module, a parameter, or an optimizer that every rank steps."""
    if is_module(item):
        return True
    if is_optimizer(item):
        return owners.stepper_of(item) is Stepper.EVERY_RANK
    return is_tensor(item) and bool(item.requires_grad)


def n_bytes_of(tensor: Any) -> int:
    """Return the number of bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())  # of sparse ones too


def optimizer_bytes(optimizer: Any) -> int:
    """Return roughly how many bytes a torch optimizer keeps for its parameters, by its options."""
    defaults = getattr(optimizer, "defaults", {})
    n_values_per_element = int(bool(defaults.get("momentum")))
    if "betas" in defaults:
        n_values_per_element = 2
    parameter_bytes = 0
    for group in optimizer.param_groups:
        parameter_bytes += sum(map(n_bytes_of, group["params"]))
    return n_values_per_element * parameter_bytes
