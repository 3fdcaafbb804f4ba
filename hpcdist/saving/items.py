"""The kinds of objects that a Checkpoint holds: one question for each, and what the answer lets a caller use.

An object's methods decide its kind, not its class, so wrappers of modules and optimizers of other libraries are saved
as torch's are. This module does not import torch.
"""

from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """An object that gives and takes its state, as torch's objects do."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state."""


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
