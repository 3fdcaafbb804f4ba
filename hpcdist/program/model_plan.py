"""Which parameters and buffers a strategy manages, found by walking the modules made in its scope."""

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
from hpcdist.program import torch_hooks
from hpcdist.program.tensors import is_storable, layout


class ModelBuffer:
    """A module's buffer by name: modules may put a new tensor there. The module is held weakly.

    Attributes:
        name: see above.
        place: id of the module, and the buffer's name in it.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name = name
        self.place = (id(module), key)
        self._module = weakref.ref(module)
        self._key = key

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that is there now; None when the module is gone or has removed it."""
        module = self._module()
        return None if module is None else module._buffers.get(self._key)


T = TypeVar("T")


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
        """Add an object, as the last one even if it has the id of one that is gone."""
        if item not in self:
            self._references.pop(id(item), None)
            self._references[id(item)] = torch_hooks.weak_reference(item)


class ModuleSet(IdentitySet[nn.Module]):
    """The modules made in a scope, in the order in which they were first seen, and parameters that are in no module."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: IdentitySet[nn.Parameter] = IdentitySet()

    def add_parameter(self, parameter: nn.Parameter) -> None:
        """Add a parameter made in the scope: as one of no module, for as long as no module of the scope holds it."""
        self._parameters.add(parameter)

    def bare_parameters(self) -> list[nn.Parameter]:
        """Return the parameters made in the scope that are in none of its modules, in the order of their making."""
        registered_ids = {id(parameter) for module in self for parameter in module.parameters()}
        return [parameter for parameter in self._parameters if id(parameter) not in registered_ids]

    def parameters(self) -> IdentitySet[nn.Parameter]:
        """Return every parameter of the scope as it is now, including frozen ones."""
        registered_parameters = [parameter for module in self for parameter in module.parameters()]
        return IdentitySet([*registered_parameters, *self.bare_parameters()])

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter of the scope, or a buffer of one of the modules."""
        module_tensors = [
            module_tensor
            for module in self
            for module_tensor in (*module.parameters(), *module.buffers())
        ]
        return any(candidate is tensor for candidate in (*module_tensors, *self._parameters))

    def ids(self) -> set[int]:
        """Return the ids of the modules and of their parts."""
        ids: set[int] = set()
        for root in self.roots():
            ids.update(id(part) for part in root.modules())
        return ids

    def roots(self) -> list[nn.Module]:
        """Return the modules that are alive and no other one's child."""
        alive = list(self)
        children = {
            id(child) for module in alive for child in module.modules() if child is not module
        }
        return [module for module in alive if id(module) not in children]


@dataclass(frozen=True)
class ModelPlan:
    """All tensors of some modules, by name, in the order of the modules.

    Attributes:
        parameters: every parameter once, including frozen ones.
        buffers: every buffer.
        sparse: parameters whose gradients may be sparse: those of modules with a true attribute `sparse`.
    """

    parameters: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[ModelBuffer, ...]
    sparse: IdentitySet[nn.Parameter] = field(default_factory=IdentitySet)

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that need a gradient."""
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]

    @property
    def averaged(self) -> list[tuple[ModelBuffer, Tensor]]:
        """Buffers of floats, such as BatchNorm's running statistics."""
        return [
            (buffer, tensor)
            for buffer, tensor in self._buffer_tensors()
            if dtype_name(tensor) in SUM_DTYPES
        ]

    def _buffer_tensors(self) -> list[tuple[ModelBuffer, Tensor]]:
        return [
            (buffer, tensor) for buffer in self.buffers if (tensor := buffer.tensor) is not None
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (parameter for _, parameter in self.parameters)
        yield from (tensor for _, tensor in self._buffer_tensors())

    def describe(self) -> str:
        """Return one line per tensor: name, layout, and whether it needs a gradient."""
        rows = [
            f"{name} {layout(tensor)} {tensor.requires_grad}{' sparse' if tensor in self.sparse else ''}"
            for name, tensor in self.parameters
        ]
        return "\n".join(
            rows
            + [
                f"{buffer.name} {layout(tensor)} buffer"
                for buffer, tensor in self._buffer_tensors()
            ]
        )


def plan_model(
    roots: list[nn.Module], bare: Iterable[nn.Parameter] = (), has_several_replicas: bool = True
) -> ModelPlan:
    """Return the tensors of `roots`, and parameters that are in no module, every parameter once.

    Raises:
        ConfigurationError: for a parameter that has no shape yet or whose gradient cannot be summed, and an embedding
            whose forward writes to it; on this rank only.
    """
    parameters: list[tuple[str, nn.Parameter]] = []
    buffers: list[ModelBuffer] = []
    seen: set[int] = set()
    for number, root in enumerate(roots):
        prefix = f"{number}:" if len(roots) > 1 else ""
        for name, parameter in root.named_parameters(prefix=""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                _check_parameter(prefix + name, parameter)
                parameters.append((prefix + name, parameter))
        for module_name, module in root.named_modules():
            if has_several_replicas:
                _check_module(prefix + module_name, module)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = prefix + ".".join(filter(None, (module_name, key)))
                    if has_several_replicas:
                        _check_buffer(name, buffer)
                    buffers.append(ModelBuffer(name, module, key))
    for number, parameter in enumerate(bare):
        _check_parameter(f"parameter {number}", parameter)
        parameters.append((f"parameter {number}", parameter))
    modules = [
        module
        for root in roots
        for module in root.modules()
        if getattr(module, "sparse", False) is True
    ]
    sparse = IdentitySet(
        parameter for module in modules for parameter in module.parameters(recurse=False)
    )
    return ModelPlan(tuple(parameters), tuple(buffers), sparse)


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
    if buffer.layout is not torch.strided:
        kind = str(buffer.layout).removeprefix("torch.")
    elif not is_storable(buffer.dtype):
        kind = dtype_name(buffer)
    elif any(
        not stride and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        kind = "expanded"  # torch does not restore it either
    else:
        return
    raise ConfigurationError(
        f"strategy: expected dense buffers of a dtype that numpy has, which can be made equal on all ranks, got {kind} "
        f"{name!r}; make it dense, as by contiguous(), or assign it as a plain attribute, made alike on every rank."
    )


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise ConfigurationError(
            f"strategy: expected an embedding without max_norm, which changes the rows that each replica uses in its "
            f"forward, got {name!r} with {module.max_norm:g}; leave it out, and scale all rows after each step."
        )


def explain_difference(own_model: str, roots: str) -> DesyncError:
    """Return the error for a rank whose model is described by `own_model` where the chief's is described by `roots`."""
    own_rows = own_model.splitlines()
    root_rows = roots.splitlines()
    first = next(
        (own_row, root_row)
        for own_row, root_row in zip_longest(own_rows, root_rows)
        if own_row != root_row
    )
    own_row, root_row = (row or "nothing" for row in first)
    return DesyncError(
        f"strategy: expected the chief's model of {len(root_rows)} tensors, got {len(own_rows)}, first difference "
        f"{own_row!r} where the chief has {root_row!r}; build the same model on every rank."
    )
