"""State of modules, variables and metrics that no server holds: it travels with functions and their results.

Modules: whether they and their parameters are trained, buffers, and parameters that are frozen. Variables. A function
begins with the coordinator's values. What it has changed becomes the coordinator's; of several at once, the last one
wins, but for whole numbers and for variables that were only added to: there, differences are added. Metrics, and
variables whose copies are summed: what a function has seen is added to the coordinator's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdist.forks import make_rlock

#: A module: the number of the object that it is part of, and its place in that.
Place = tuple[int, int]
#: A tensor: the module that has it and its name there; or the number of a variable, and nothing.
Key = tuple[Place, str]
#: A change of a tensor: whether it is to be added, and the difference or the value.
Change = tuple[bool, Tensor]
#: What a function has changed: tensors, and, by number of object, what the object has seen.
Changes = tuple[dict[Key, Change], dict[int, Any]]
#: Whether modules are trained, and each of their own parameters.
Modes = dict[Place, tuple[bool, tuple[bool, ...]]]
#: Module buffers of up to this many bytes are compared by their values: torch does not count writes to `.data`.
_COMPARED_BYTES = 1 << 20
#: In place of a place in an object: it is a variable.
_VARIABLE = -1


def is_shared(obj: Any) -> bool:
    """Return whether an object is a variable or a metric, which has state that is shared."""
    return hasattr(type(obj), "take_seen")


class SharedState:
    """The shared state of some objects, on the coordinator, where several threads use it, or on a worker.

    Args:
        is_served: returns whether a server holds a parameter.

    Attributes:
        has_tensors: whether there are tensors with which a function must begin as the one before has left them.
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
                    parameters = (
                        parameter
                        for parameter in module._parameters.values()
                        if parameter is not None
                    )
                    self._frozen |= {
                        id(parameter) for parameter in parameters if not self._is_served(parameter)
                    }
                self._defined.add(id(obj))
            elif is_shared(obj) and obj.adds_up:
                self._seen[number] = obj
            elif is_shared(obj) and obj.parameter is None:
                self._variables[number] = obj
            self.has_tensors = next(self._tensors(), None) is not None

    def _parts_of(self, module: nn.Module, visited_ids: set[int]) -> Iterator[nn.Module]:
        """Yield a module, and those in it that travel with it, in an order that is the same on a worker."""
        visited_ids.add(id(module))
        yield module
        for child in module._modules.values():
            if (
                child is not None
                and id(child) not in self._defined
                and id(child) not in visited_ids
            ):
                yield from self._parts_of(child, visited_ids)

    def _tensors(self) -> Iterator[tuple[Key, Tensor, bool]]:
        """Yield each tensor, with its key, and whether it is compared by its values."""
        for place, module in self._modules.items():
            is_norm = isinstance(module, _NormBase)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (
                        (place, name),
                        buffer.detach(),
                        is_norm or buffer.nbytes <= _COMPARED_BYTES,
                    )
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
        if target is not None and target.shape == value.shape:
            target.copy_(value)
        else:
            module._buffers[name] = value if target is None else value.to(target.device)

    def _has_changed(self, key: Key, tensor: Tensor) -> bool:
        """Return whether a tensor has changed since it was noted."""
        noted_tensor, version, values = self._snapshots.get(key, (None, 0, None))
        if (
            noted_tensor is None
            or noted_tensor.data_ptr() != tensor.data_ptr()
            or tensor._version != version
        ):
            return True
        return values is not None and not torch.equal(values, tensor)

    def _note(self, key: Key, tensor: Tensor, must_copy: bool) -> None:
        self._snapshots[key] = (tensor, tensor._version, tensor.clone() if must_copy else None)

    # -- the coordinator --------------------------------------------------------------------------------------------

    def modes(self) -> Modes:
        """Return whether modules, and their parameters, are trained now."""
        with self._lock:
            return {
                place: (
                    module.training,
                    tuple(
                        parameter is not None and parameter.requires_grad
                        for parameter in module._parameters.values()
                    ),
                )
                for place, module in self._modules.items()
            }

    def private(self) -> nn.Parameter | None:
        """Return a parameter that is trained, or served, and that workers have copies of; None: there is none."""
        with self._lock:
            parameters = [
                parameter
                for module in self._modules.values()
                for parameter in module._parameters.values()
                if parameter is not None
            ]
        copied_parameters = [parameter for parameter in parameters if id(parameter) in self._frozen]
        return next(
            (
                parameter
                for parameter in copied_parameters
                if parameter.requires_grad or self._is_served(parameter)
            ),
            None,
        )

    @torch.no_grad()
    def news(self, sent: dict[Key, int]) -> dict[Key, Tensor]:
        """Return the tensors that a worker does not have as they are now.

        Args:
            sent: the number of changes of each tensor that the worker knows of; brought up to date.
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
                self._assign(
                    key,
                    current + value.to(current.device)
                    if is_added and current is not None
                    else value,
                )
            for number, contribution in seen.items():
                self._seen[number].add_seen(contribution)

    # -- a worker ---------------------------------------------------------------------------------------------------

    def set_modes(self, modes: Modes) -> None:
        """Train the modules and parameters that the coordinator trains."""
        for place, (is_training, are_trained) in modes.items():
            module = self._modules.get(place)
            if module is not None:
                module.training = is_training
                for parameter, is_trained in zip(
                    module._parameters.values(), are_trained, strict=False
                ):
                    if parameter is not None and parameter.requires_grad != is_trained:
                        parameter.requires_grad_(is_trained)

    @torch.no_grad()
    def begin(self, news: dict[Key, Tensor]) -> None:
        """Begin a function: take the coordinator's values, and note them."""
        for key, value in news.items():
            self._assign(key, value)
        self._snapshots.clear()
        for key, tensor, is_compared in self._tensors():
            self._note(
                key, tensor, must_copy=is_compared or _is_whole(tensor) or key[0][1] == _VARIABLE
            )
        for shared_object in self._variables.values():
            shared_object.take_assigned()
        for shared_object in self._seen.values():
            # what an earlier function has left that failed, or is in a new copy
            shared_object.take_seen()

    @torch.no_grad()
    def changes(self) -> Changes:
        """Return what has changed since `begin`."""
        changed = {}
        for key, tensor, _ in self._tensors():
            if self._has_changed(key, tensor):
                changed[key] = self._change(key, tensor)
        seen = {number: shared_object.take_seen() for number, shared_object in self._seen.items()}
        return changed, {
            number: contribution
            for number, contribution in seen.items()
            if contribution is not None
        }

    def _change(self, key: Key, after: Tensor) -> Change:
        before = self._snapshots.get(key, (None, 0, None))[2]
        number, index = key[0]
        is_sum = (
            not self._variables[number].take_assigned() if index == _VARIABLE else _is_whole(after)
        )
        if (
            is_sum
            and before is not None
            and before.shape == after.shape
            and before.dtype is not torch.bool
        ):
            return True, (after - before).cpu()
        return False, after.cpu().clone()


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
