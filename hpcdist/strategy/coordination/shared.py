"""State of modules, variables and metrics that no server holds: it travels with functions and their results.

Buffers of modules, such as BatchNorm's statistics, and variables: a function begins with the coordinator's values, and
what it adds to them is added there. Metrics, and variables whose copies are summed: what a function has seen is added
to the coordinator's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import UsageError

#: A tensor: the number of the object that has it, and its name there.
Key = tuple[int, str]
#: A change of a tensor: whether it is to be added, and the difference or the value.
Change = tuple[bool, Tensor]
#: What a function has changed: tensors, and, by number of object, what the object has seen.
Changes = tuple[dict[Key, Change], dict[int, Any]]


def is_shared(obj: Any) -> bool:
    """Return whether an object is a variable or a metric, which has state that is shared."""
    return hasattr(type(obj), "take_seen")


class SharedState:
    """The shared state of some objects, on the coordinator or on a worker."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._variables: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._before: dict[Key, Tensor] = {}

    def add(self, number: int, obj: Any) -> None:
        """Add the state of an object."""
        if isinstance(obj, nn.Module):
            self._modules[number] = obj
        elif is_shared(obj) and obj.adds_up:
            self._seen[number] = obj
        elif is_shared(obj) and obj.parameter is None:
            self._variables[number] = obj

    @property
    def has_tensors(self) -> bool:
        """Whether there are tensors that a function must have as they are when it begins."""
        return bool(self._tensors())

    def _tensors(self) -> dict[Key, Tensor]:
        found = {
            (number, name): buffer
            for number, module in self._modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        return found | {(number, ""): one.local_copies[0] for number, one in self._variables.items()}

    # -- the coordinator --------------------------------------------------------------------------------------------

    def news(self, told: dict[Key, tuple[int, int]]) -> dict[Key, Tensor]:
        """Return the tensors that a worker does not have as they are now.

        Args:
            told: what it was sent before; brought up to date.
        """
        found = {}
        for key, tensor in self._tensors().items():
            state = (id(tensor), tensor._version)
            if told.get(key) != state:
                told[key] = state
                found[key] = tensor.detach().cpu().clone()
        return found

    @torch.no_grad()
    def apply(self, changes: Changes) -> None:
        """Make the changes of a function that a worker has run."""
        tensors, (changed, seen) = self._tensors(), changes
        for key, (is_added, sent) in changed.items():
            value = sent.to(tensors[key].device)
            tensors[key].copy_(tensors[key] + value if is_added else value)
        for number, one in seen.items():
            self._seen[number].add_seen(one)

    # -- a worker ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, news: dict[Key, Tensor]) -> None:
        """Begin a function: take the coordinator's values, and note them."""
        tensors = self._tensors()
        for key, sent in news.items():
            tensors[key].copy_(sent)
        self._before = {key: tensor.clone() for key, tensor in tensors.items()}
        for one in self._seen.values():
            one.take_seen()  # what an earlier function has left that failed, or is in a new copy

    @torch.no_grad()
    def changes(self) -> Changes:
        """Return what has changed since `begin`."""
        changed = {}
        tensors = self._tensors()
        for key in self._before.keys() & tensors.keys():
            if not torch.equal(self._before[key], tensors[key]):  # torch counts no writes of BatchNorm
                changed[key] = _change(self._before[key], tensors[key])
        seen = {number: one.take_seen() for number, one in self._seen.items()}
        return changed, {number: one for number, one in seen.items() if one is not None}


def _change(before: Tensor, after: Tensor) -> Change:
    """Return a change: the difference where there is one, else the new value."""
    if before.shape != after.shape:
        raise UsageError(
            f"schedule: expected functions that keep the shapes of buffers, got one that changed {tuple(before.shape)} "
            f"to {tuple(after.shape)}; call the model once before the first schedule."
        )
    if before.dtype is not torch.bool:
        difference = after - before
        if bool(torch.isfinite(difference).all()):
            return True, difference.cpu()
    return False, after.detach().cpu()
