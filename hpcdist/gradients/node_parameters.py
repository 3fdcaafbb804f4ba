"""Parameters that the ranks of a host hold once, in memory that they share."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.gradients.model_plan import IdentitySet
from hpcdist.gradients.tensors import is_dense
from hpcdist.runtime.node_memory import NodeWindow

#: Tensors start at multiples of this, so that no two share a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Shared:
    """A parameter and its shared memory. A parameter on the host is this memory; one on a device is a copy of it."""

    name: str
    parameter: "weakref.ref[nn.Parameter]"
    memory: Tensor


class NodeParameters:
    """One copy of parameters for the ranks of each host.

    Args:
        group: the ranks.

    Attributes:
        shared: the parameters that are there, with their memory.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_first = group.node_comm.rank == 0
        self.shared: list[Shared] = []
        self._adopted: IdentitySet[nn.Parameter] = IdentitySet()

    @torch.no_grad()
    def adopt(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Move parameters, equal on all ranks, to the shared memory; those on devices are copied there.

        Collective where there are new ones: the group, with the same parameters in the same order.

        Raises:
            CollectiveError: when a host has too little memory; on its ranks.
        """
        new = [(name, parameter) for name, parameter in named if parameter not in self._adopted]
        self.shared = [one for one in self.shared if one.parameter() is not None]
        if not new:
            return
        sizes = [padded(parameter.nbytes) for _, parameter in new]
        memories = cut_memory(allocate(self._group, sum(sizes)), sizes)
        for (name, parameter), memory in zip(new, memories, strict=True):
            shared = shaped_as(memory[: parameter.nbytes].view(parameter.dtype), parameter)
            if self._is_first:
                shared.copy_(parameter)
            self.shared.append(Shared(name, weakref.ref(parameter), shared))
            self._adopted.add(parameter)
        self.wait()
        for one, (_, parameter) in zip(self.shared[-len(new) :], new, strict=True):
            if is_on_host(parameter):
                parameter.data = one.memory

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the parameters."""
        return isinstance(tensor, nn.Parameter) and tensor in self._adopted

    def require_unmoved(self) -> None:
        """Raise GradientError when a parameter is no longer in the shared memory; on this rank only."""
        for one in self.shared:
            parameter = one.parameter()
            if parameter is not None and is_on_host(parameter) and parameter.data_ptr() != one.memory.data_ptr():
                raise GradientError(
                    f"step: expected {one.name!r} in the memory that all ranks share, got it moved or converted; "
                    f"move and convert the model before its first use."
                )

    def wait(self) -> None:
        """Wait for the other ranks of the host. Collective: they."""
        with self._group.recorded("change of shared parameters", None):
            self._group.barrier.wait()


def allocate(group: Group, nbytes: int) -> Tensor:
    """Return bytes that the ranks of this host share, zero at first, spread over their NUMA domains.

    Collective: the ranks of the host.

    Raises:
        CollectiveError: when the host has too little memory; on all of them.
    """
    window = NodeWindow(group.node_comm, -(-max(1, nbytes) // group.node_comm.size), group.world)
    return torch.frombuffer(window.pieces[0].obj, dtype=torch.uint8)  # the pieces follow one another in one mapping


def cut_memory(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return parts of flat memory, one after the other."""
    return list(torch.split(memory[: sum(sizes)], list(sizes)))


def is_on_host(parameter: Tensor) -> bool:
    """Return whether a tensor is in host memory."""
    return parameter.device.type == "cpu"


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor of so many takes there."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def shaped_as(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return flat memory as a tensor of a parameter's shape, with its strides if it is dense."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
