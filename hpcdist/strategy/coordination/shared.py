"""State of modules, variables and metrics that no server holds: it travels with functions and their results.

Modules: whether they and their parameters are trained, buffers, and parameters that are frozen. Variables. A function
begins with the coordinator's values. Values that it has changed become the coordinator's; of several functions at once,
the last one wins, but for whole numbers and for variables that were only added to: there, differences are added.
Metrics, and variables whose copies are summed: the numbers that a function has seen are added to the coordinator's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.forks import make_rlock

#: Name of a module: the number of the object that it is part of, and its place in that object.
Place = tuple[int, int]
#: Name of a tensor: its module and its name there; for a variable (number, `_VARIABLE`) and "".
Key = tuple[Place, str]
#: Change of a tensor: whether it is to be added, and the difference or the value.
Change = tuple[bool, Tensor]
#: Changes by a function: of tensors, and, by number of object, the numbers that the object has seen.
Changes = tuple[dict[Key, Change], dict[int, Any]]
#: For each module whether it is trained, and for each parameter that it holds directly whether that is trained.
Modes = dict[Place, tuple[bool, tuple[bool, ...]]]
#: Module buffers of up to this many bytes are compared by their values: torch does not count writes to `.data`.
_COMPARED_BYTES = 1 << 20
#: Stands in a key for the place in an object, where the object is a variable.
_VARIABLE = -1


def is_shared(obj: Any) -> bool:
    """Return whether an object is a variable or a metric, which has state that is shared."""
    return hasattr(type(obj), "take_seen")


class SharedState:
    """The shared state of some objects, on the coordinator, where several threads use it, or on a worker.

    Args:
        is_served: returns whether a server holds a parameter.

    Attributes:
        has_tensors: whether there are tensors whose changes by one function the next function must begin with.
    """

    def __init__(self, is_served: Callable[[Any], bool]) -> None:
        self._is_served = is_served
        self._lock = make_rlock()
        self._modules: dict[Place, nn.Module] = {}
        self._defined: set[int] = set()
        self._frozen: set[int] = set()
        self._variables: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._snapshots: dict[Key, tuple[Tensor, int, Tensor | None]] = {}
        self._changes: dict[Key, int] = {}
        self.has_tensors = False

    def add(self, number: int, obj: Any) -> None:
        """Add the state of an object, and of the modules in it that were not added by themselves."""
        with self._lock:
            if isinstance(obj, nn.Module):
                for index, module in enumerate(self._parts_of(obj, set())):
                    self._modules[number, index] = module
                    for parameter in module._parameters.values():
                        if parameter is not None and not self._is_served(parameter):
                            self._frozen.add(id(parameter))
                self._defined.add(id(obj))
            elif is_shared(obj) and obj.adds_up:
                self._seen[number] = obj
            elif is_shared(obj) and obj.parameter is None:
                self._variables[number] = obj
            self.has_tensors = next(self._tensors(), None) is not None

    def _parts_of(self, module: nn.Module, visited_ids: set[int]) -> Iterator[nn.Module]:
        """Yield a module, and the modules in it that travel with it, in an order that is the same on a worker."""
        visited_ids.add(id(module))
        yield module
        for child in module._modules.values():
            if child is None or id(child) in self._defined or id(child) in visited_ids:
                continue
            yield from self._parts_of(child, visited_ids)

    def _tensors(self) -> Iterator[tuple[Key, Tensor, bool]]:
        """Yield each tensor, with its key, and whether it is compared by its values."""
        for place, module in self._modules.items():
            is_norm = isinstance(module, _NormBase)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    is_compared = is_norm or buffer.nbytes <= _COMPARED_BYTES
                    yield (place, name), buffer.detach(), is_compared
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self._frozen:
                    yield (place, name), parameter.detach(), False
        for number, variable in self._variables.items():
            yield ((number, _VARIABLE), ""), variable.local_copies[0], False

    def _assign(self, key: Key, value: Tensor) -> None:
        """Set a tensor, if its object is here; a buffer may be new, or of another shape."""
        (number, index), name = key
        if index == _VARIABLE:
            if number in self._variables:
                self._variables[number].local_copies[0].copy_(value)
            return
        module = self._modules.get((number, index))
        if module is None:
            return  # its definition could not be loaded
        target = module._buffers.get(name, module._parameters.get(name))
        if target is None:
            module._buffers[name] = value
        elif target.shape == value.shape:
            target.copy_(value)
        else:
            module._buffers[name] = value.to(target.device)

    def _has_changed(self, key: Key, tensor: Tensor) -> bool:
        """Return whether a tensor has changed since it was noted."""
        noted_tensor, version, values = self._snapshots.get(key, (None, 0, None))
        if noted_tensor is None or tensor._version != version:
            return True
        if noted_tensor.data_ptr() != tensor.data_ptr():
            return True
        return values is not None and not torch.equal(values, tensor)

    def _note(self, key: Key, tensor: Tensor, must_copy: bool) -> None:
        """Note a tensor as it is now, so that a change can be seen; with `must_copy` its values, too."""
        values = tensor.clone() if must_copy else None
        self._snapshots[key] = (tensor, tensor._version, values)

    # -- the coordinator --------------------------------------------------------------------------------------------

    def modes(self) -> Modes:
        """Return whether modules, and their parameters, are trained now."""
        modes: Modes = {}
        with self._lock:
            for place, module in self._modules.items():
                are_trained = tuple(
                    parameter is not None and parameter.requires_grad
                    for parameter in module._parameters.values()
                )
                modes[place] = (module.training, are_trained)
        return modes

    def private(self) -> nn.Parameter | None:
        """Return a parameter that is trained, or served, although workers have copies of it; None if there is none."""
        copied_parameters: list[nn.Parameter] = []
        with self._lock:
            for module in self._modules.values():
                for parameter in module._parameters.values():
                    if parameter is not None and id(parameter) in self._frozen:
                        copied_parameters.append(parameter)
        for parameter in copied_parameters:
            if parameter.requires_grad or self._is_served(parameter):
                return parameter
        return None

    @torch.no_grad()
    def news(self, sent: dict[Key, int]) -> dict[Key, Tensor]:
        """Return the tensors that have changed since the worker got them.

        Args:
            sent: number of changes of each tensor that the worker knows of; brought up to date.
        """
        updates = {}
        with self._lock:
            for key, tensor, is_compared in self._tensors():
                if self._has_changed(key, tensor):
                    self._note(key, tensor, must_copy=is_compared)
                    self._changes[key] = self._changes.get(key, 0) + 1
                if sent.get(key) != self._changes[key]:
                    sent[key] = self._changes[key]
                    updates[key] = tensor.cpu().clone()
        return updates

    @torch.no_grad()
    def apply(self, changes: Changes) -> None:
        """Make the changes of a function that a worker has run."""
        with self._lock:
            changed, seen = changes
            tensors = {key: tensor for key, tensor, _ in self._tensors()}
            for key, (is_added, value) in changed.items():
                current = tensors.get(key)
                if is_added and current is not None:
                    value = current + value.to(current.device)
                self._assign(key, value)
            for number, contribution in seen.items():
                self._seen[number].add_seen(contribution)

    # -- a worker ---------------------------------------------------------------------------------------------------

    def set_modes(self, modes: Modes) -> None:
        """Train the modules and parameters that the coordinator trains."""
        for place, (is_training, are_trained) in modes.items():
            module = self._modules.get(place)
            if module is None:
                continue
            module.training = is_training
            parameters = module._parameters.values()
            for parameter, is_trained in zip(parameters, are_trained, strict=False):
                if parameter is not None and parameter.requires_grad != is_trained:
                    parameter.requires_grad_(is_trained)

    @torch.no_grad()
    def begin(self, news: dict[Key, Tensor]) -> None:
        """Begin a function: take the coordinator's values, and note them."""
        for key, value in news.items():
            self._assign(key, value)
        self._snapshots.clear()
        for key, tensor, is_compared in self._tensors():
            is_variable = key[0][1] == _VARIABLE
            self._note(key, tensor, must_copy=is_compared or _is_whole(tensor) or is_variable)
        for shared_object in self._variables.values():
            shared_object.take_assigned()
        for shared_object in self._seen.values():
            # drop the numbers that a failed function has left, or that a new copy has
            shared_object.take_seen()

    @torch.no_grad()
    def changes(self) -> Changes:
        """Return the changes since `begin`."""
        changed = {}
        for key, tensor, _ in self._tensors():
            if self._has_changed(key, tensor):
                changed[key] = self._change(key, tensor)
        seen: dict[int, Any] = {}
        for number, shared_object in self._seen.items():
            contribution = shared_object.take_seen()
            if contribution is not None:
                seen[number] = contribution
        return changed, seen

    def _change(self, key: Key, after: Tensor) -> Change:
        """Return the change of a tensor: the difference where differences are added, else the value."""
        before = self._snapshots.get(key, (None, 0, None))[2]
        number, index = key[0]
        is_added = _is_whole(after)
        if index == _VARIABLE:
            is_added = not self._variables[number].take_assigned()
        if not is_added or before is None:
            return False, after.cpu().clone()
        if before.shape != after.shape or before.dtype is torch.bool:
            return False, after.cpu().clone()
        return True, (after - before).cpu()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are whole numbers or bools."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
