"""The parameters and buffers that a strategy manages, found by walking the modules made in its scope."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.errors import ConfigurationError, DesyncError
from hpcdist.program import tensor_internals
from hpcdist.program.tensors import is_storable, layout


class ModelBuffer:
    """A module's buffer by name: modules may put a new tensor there. The module is held weakly.

    Attributes:
        name: name of the buffer in the model.
        place: id of the module, and the buffer's name in the module.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name = name
        self.place = (id(module), key)
        self._module = weakref.ref(module)
        self._key = key

    @property
    def tensor(self) -> Tensor | None:
        """The buffer's current tensor; None when the module is gone or has removed it."""
        module = self._module()
        if module is None:
            return None
        return module._buffers.get(self._key)


T = TypeVar("T")
#: A parameter with its name in the model.
NamedParameter = tuple[str, nn.Parameter]


class IdentitySet(Generic[T]):
    """Objects held weakly and compared by identity, in the order in which they were added."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references: dict[int, Callable[[], T | None]] = {}
        for item in items:
            self.add(item)

    def __contains__(self, item: T) -> bool:
        reference = self._references.get(id(item))
        return reference is not None and reference() is item

    def __iter__(self) -> Iterator[T]:
        alive: list[T] = []
        for number, reference in list(self._references.items()):
            item = reference()
            if item is None:
                del self._references[number]
            else:
                alive.append(item)
        yield from alive

    def add(self, item: T) -> None:
        """Add an object as the last one, even if it has the id of an object that is gone."""
        if item not in self:
            self._references.pop(id(item), None)
            self._references[id(item)] = tensor_internals.weak_reference(item)


class ModuleSet(IdentitySet[nn.Module]):
    """The modules made in a scope, in the order in which they were first seen, and parameters that are in no module."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: IdentitySet[nn.Parameter] = IdentitySet()

    def add_parameter(self, parameter: nn.Parameter) -> None:
        """Add a parameter made in the scope. It counts as one of no module while no module of the scope holds it."""
        self._parameters.add(parameter)

    def bare_parameters(self) -> list[nn.Parameter]:
        """Return the parameters made in the scope that are in none of its modules, in the order of their making."""
        registered_ids: set[int] = set()
        for module in self:
            registered_ids.update(map(id, module.parameters()))
        return [parameter for parameter in self._parameters if id(parameter) not in registered_ids]

    def parameters(self) -> IdentitySet[nn.Parameter]:
        """Return every parameter of the scope as it is now, including frozen ones."""
        parameters: IdentitySet[nn.Parameter] = IdentitySet()
        for module in self:
            for parameter in module.parameters():
                parameters.add(parameter)
        for parameter in self.bare_parameters():
            parameters.add(parameter)
        return parameters

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter of the scope, or a buffer of one of the modules."""
        tensors: list[Tensor] = []
        for module in self:
            tensors += module.parameters()
            tensors += module.buffers()
        tensors += self._parameters
        return any(candidate is tensor for candidate in tensors)

    def ids(self) -> set[int]:
        """Return the ids of the modules and of their parts."""
        ids: set[int] = set()
        for root in self.roots():
            ids.update(map(id, root.modules()))
        return ids

    def roots(self) -> list[nn.Module]:
        """Return the modules that are alive and are no child of another module."""
        alive = list(self)
        child_ids: set[int] = set()
        for module in alive:
            for part in module.modules():
                if part is not module:
                    child_ids.add(id(part))
        return [module for module in alive if id(module) not in child_ids]


@dataclass(frozen=True)
class ModelPlan:
    """All tensors of some modules, by name, in the order of the modules.

    Attributes:
        parameters: every parameter once, including frozen ones.
        buffers: every buffer.
        sparse: parameters whose gradients may be sparse, as they are of modules with a true attribute `sparse`.
    """

    parameters: tuple[NamedParameter, ...]
    buffers: tuple[ModelBuffer, ...]
    sparse: IdentitySet[nn.Parameter] = field(default_factory=IdentitySet)

    @property
    def trained(self) -> list[NamedParameter]:
        """Parameters that need a gradient."""
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]

    @property
    def averaged(self) -> list[tuple[ModelBuffer, Tensor]]:
        """Buffers of floats, such as BatchNorm's running statistics."""
        averaged: list[tuple[ModelBuffer, Tensor]] = []
        for buffer, tensor in self._buffer_tensors():
            if dtype_name(tensor) in SUM_DTYPES:
                averaged.append((buffer, tensor))
        return averaged

    def _buffer_tensors(self) -> list[tuple[ModelBuffer, Tensor]]:
        """Return the buffers that exist, with their current tensors."""
        pairs: list[tuple[ModelBuffer, Tensor]] = []
        for buffer in self.buffers:
            tensor = buffer.tensor
            if tensor is not None:
                pairs.append((buffer, tensor))
        return pairs

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (parameter for _, parameter in self.parameters)
        yield from (tensor for _, tensor in self._buffer_tensors())

    def describe(self) -> str:
        """Return one line per tensor: name, layout, and whether it needs a gradient."""
        lines: list[str] = []
        for name, parameter in self.parameters:
            suffix = " sparse" if parameter in self.sparse else ""
            needs_gradient = parameter.requires_grad
            parameter_layout = layout(parameter)
            lines.append(f"{name} {parameter_layout} {needs_gradient}{suffix}")
        for buffer, tensor in self._buffer_tensors():
            lines.append(f"{buffer.name} {layout(tensor)} buffer")
        return "\n".join(lines)


def plan_model(
    roots: list[nn.Module],
    bare: Iterable[nn.Parameter] = (),
    has_several_replicas: bool = True,
) -> ModelPlan:
    """Return the tensors of some modules, and parameters that are in no module, every parameter once.

    Args:
        roots: modules that are no children of other modules.
        bare: parameters that are in no module.
        has_several_replicas: whether modules and buffers must fit several replicas.

    Raises:
        ConfigurationError: for a parameter that has no shape yet or whose gradient cannot be summed, and an embedding
            whose forward writes to it; on this rank only.
    """
    parameters: list[NamedParameter] = []
    buffers: list[ModelBuffer] = []
    seen: set[int] = set()
    for number, root in enumerate(roots):
        prefix = f"{number}:" if len(roots) > 1 else ""
        for parameter_name, parameter in root.named_parameters(prefix=""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                name = prefix + parameter_name
                _check_parameter(name, parameter)
                parameters.append((name, parameter))
        for module_name, module in root.named_modules():
            if has_several_replicas:
                _check_module(prefix + module_name, module)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    buffer_name = f"{module_name}.{key}" if module_name else key
                    name = prefix + buffer_name
                    if has_several_replicas:
                        _check_buffer(name, buffer)
                    buffers.append(ModelBuffer(name, module, key))
    for number, parameter in enumerate(bare):
        name = f"parameter {number}"
        _check_parameter(name, parameter)
        parameters.append((name, parameter))
    return ModelPlan(tuple(parameters), tuple(buffers), _sparse_parameters(roots))


def _sparse_parameters(roots: Iterable[nn.Module]) -> IdentitySet[nn.Parameter]:
    """Return the parameters of modules with a true attribute `sparse`."""
    sparse: IdentitySet[nn.Parameter] = IdentitySet()
    for root in roots:
        for module in root.modules():
            if getattr(module, "sparse", False) is True:
                for parameter in module.parameters(recurse=False):
                    sparse.add(parameter)
    return sparse


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ConfigurationError(
            f"strategy: expected parameters with shapes, got uninitialized {name!r}; build lazy modules with their "
            "sizes."
        )
    if parameter.requires_grad and dtype_name(parameter) not in SUM_DTYPES:
        raise ConfigurationError(
            f"strategy: expected parameters of {', '.join(SUM_DTYPES)}, got {name!r} of {dtype_name(parameter)}; "
            f"convert the module."
        )


def _check_buffer(name: str, buffer: Tensor) -> None:
    """Raise ConfigurationError for a buffer that cannot be made equal on all ranks."""
    if buffer.layout is not torch.strided:
        kind = str(buffer.layout).removeprefix("torch.")
    elif not is_storable(buffer.dtype):
        kind = dtype_name(buffer)
    elif _is_expanded(buffer):
        kind = "expanded"  # torch does not restore it either
    else:
        return
    raise ConfigurationError(
        f"strategy: expected dense buffers of a dtype that numpy has, which can be made equal on all ranks, got {kind} "
        f"{name!r}; make it dense, as by contiguous(), or assign it as a plain attribute, made alike on every rank."
    )


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory, as after `expand`."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs)


def _check_module(name: str, module: nn.Module) -> None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.max_norm is not None:
        raise ConfigurationError(
            f"strategy: expected an embedding without max_norm, which changes the rows that each replica uses in its "
            f"forward, got {name!r} with {module.max_norm:g}; leave it out, and scale all rows after each step."
        )


def explain_difference(own_model: str, roots: str) -> DesyncError:
    """Return the error for a rank whose model is described by `own_model` where the chief's is described by `roots`."""
    own_rows = own_model.splitlines()
    root_rows = roots.splitlines()
    pairs = zip_longest(own_rows, root_rows, fillvalue="nothing")
    own_row, root_row = next(
        (own_row, root_row) for own_row, root_row in pairs if own_row != root_row
    )
    return DesyncError(
        f"strategy: expected the chief's model of {len(root_rows)} tensors, got {len(own_rows)}, first difference "
        f"{own_row!r} where the chief has {root_row!r}; build the same model on every rank."
    )
