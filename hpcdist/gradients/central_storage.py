"""Parameters that the ranks of a node hold once, in shared memory; the chief alone steps them."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.gradients.hidden import hide_gradients, restore_gradients
from hpcdist.gradients.model_plan import IdentitySet
from hpcdist.gradients.tensors import is_dense
from hpcdist.runtime.node_memory import NodeWindow

#: Parameters start at multiples of this, so that no two share a cache line.
_ALIGNMENT = 64
#: The storages whose strategies are in use.
_alive: "weakref.WeakSet[CentralStorage]" = weakref.WeakSet()


@dataclass(frozen=True)
class _Shared:
    """A parameter and its shared memory. A parameter on the host is this memory; one on a device is a copy of it."""

    name: str
    parameter: "weakref.ref[nn.Parameter]"
    shared: Tensor


class CentralStorage:
    """The node's one copy of all parameters.

    A step is made between two barriers: before the first one other ranks may still read, after the second one the
    chief has written. Parameters on devices are copied out by the chief and in by the others.

    Args:
        group: the ranks, all on one host.
    """

    is_summed = needs_sum = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_chief = group.rank == 0
        self._shared: list[_Shared] = []
        self._adopted: IdentitySet[nn.Parameter] = IdentitySet()
        self._hidden: list[Tensor | None] | None = None  # gradients of a rank whose step the chief makes
        _alive.add(self)

    @torch.no_grad()
    def adopt(self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter] = ()) -> None:
        """Move parameters, equal on all ranks, to the shared memory; those on devices are copied there.

        Collective where there are new ones: the group, with the same parameters in the same order.

        Raises:
            CollectiveError: when the node has too little memory; on every rank.
        """
        new = [(name, parameter) for name, parameter in named if parameter not in self._adopted]
        self._shared = [one for one in self._shared if one.parameter() is not None]
        if not new:
            return
        memory = self._allocate(sum(_padded(parameter) for _, parameter in new))
        start = 0
        for name, parameter in new:
            shared = _shaped(memory[start : start + parameter.nbytes], parameter)
            start += _padded(parameter)
            if self._is_chief:
                shared.copy_(parameter)
            self._shared.append(_Shared(name, weakref.ref(parameter), shared))
            self._adopted.add(parameter)
        self._wait()
        for one, (_, parameter) in zip(self._shared[-len(new) :], new, strict=True):
            if _is_on_host(parameter):
                parameter.data = one.shared

    def _allocate(self, nbytes: int) -> Tensor:
        """Return shared bytes, spread over the ranks' NUMA domains: the pieces follow one another in one mapping."""
        window = NodeWindow(self._group.node_comm, -(-nbytes // self._group.size), self._group.world)
        return torch.frombuffer(window.pieces[0].obj, dtype=torch.uint8)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the parameters."""
        return isinstance(tensor, nn.Parameter) and tensor in self._adopted

    def begin_change(self) -> bool:
        """Wait until nobody reads the parameters; return whether this rank is the one that changes them.

        Collective: the group.

        Raises:
            GradientError: when a parameter was moved; on this rank only.
        """
        for one in self._shared:
            parameter = one.parameter()
            if parameter is not None and _is_on_host(parameter) and parameter.data_ptr() != one.shared.data_ptr():
                raise GradientError(
                    f"step: expected {one.name!r} in the memory that all ranks share, got it moved or converted; "
                    f"move and convert the model before its first use."
                )
        self._wait()
        return self._is_chief

    @torch.no_grad()
    def end_change(self) -> None:
        """Return when the chief has changed the parameters. Collective: the group."""
        copies = [
            (parameter, one.shared)
            for one in self._shared
            if (parameter := one.parameter()) is not None and not _is_on_host(parameter)
        ]
        if self._is_chief:
            for parameter, shared in copies:
                shared.copy_(parameter)
        self._wait()
        if not self._is_chief:
            for parameter, shared in copies:
                parameter.copy_(shared)

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Begin an optimizer's step: on ranks other than the chief its gradients are hidden. As `begin_change`."""
        self._hidden = None if self.begin_change() else hide_gradients(parameters)

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """End an optimizer's step. Collective: the group.

        Raises:
            GradientError: when it has made gradients in a closure; on this rank only.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            restore_gradients(parameters, hidden)
        self.end_change()

    @contextmanager
    def changing(self) -> Iterator[bool]:
        """Let one rank change the parameters in the block: yield whether it is this one. Collective: the group."""
        yield self.begin_change()
        self.end_change()

    def _wait(self) -> None:
        with self._group.recorded("change of central parameters", None):
            self._group.barrier.wait()


def is_stepped_by_chief(optimizer: Any) -> bool:
    """Return whether the chief alone makes an optimizer's steps, so that others have none of its state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(storage.holds(parameter) for storage in list(_alive) for parameter in parameters)


def _is_on_host(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu"


def _padded(parameter: Tensor) -> int:
    return -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT


def _shaped(memory: Tensor, parameter: Tensor) -> Tensor:
    """Return bytes as a tensor of a parameter's dtype and shape, with its strides if it is dense."""
    flat = memory.view(parameter.dtype)
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
