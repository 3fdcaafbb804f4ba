"""Parameters that the ranks of a host hold once, in memory that they share.

A step is made between two barriers. Before the first one other ranks may still read; after the second one all ranks
have written. With CentralStorageStrategy the chief steps all parameters, with a ZeroRedundancyOptimizer each rank steps
its share.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.program import tensor_internals
from hpcdist.program.hidden import hide_gradients, restore_gradients
from hpcdist.program.model_plan import IdentitySet, NamedParameter
from hpcdist.program.owners import Stepper
from hpcdist.program.tensors import is_dense
from hpcdist.runtime.node_window import NodeWindow

#: Tensors start at multiples of this number of bytes, so that no two share a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Shared:
    """A parameter and its shared memory. A parameter on the host is in this memory; one on a device is a copy."""

    name: str
    parameter: Callable[[], nn.Parameter | None]
    memory: Tensor


class HostStorage:
    """One copy of parameters for the ranks of each host; a `Storage`.

    Args:
        group: the ranks.
        is_divided: whether each rank steps its share; otherwise the chief steps all, and the group is on one host.

    Attributes:
        is_divided: whether each rank steps its share.
        stepper: the processes that make an optimizer's step: the chief, or all ranks together.
        shared: the held parameters, with their memory.
    """

    is_summed = needs_sum = True
    is_private = False

    def __init__(self, group: Group, is_divided: bool) -> None:
        self.is_divided = is_divided
        self.stepper = Stepper.EVERY_RANK if is_divided else Stepper.CHIEF
        self.shared: list[Shared] = []
        self._group = group
        self._is_first = group.node_comm.rank == 0
        # parameters on the host, with the addresses of their memory
        self._addresses: list[tuple[Shared, int]] = []
        self._copies: list[tuple[Shared, torch.device]] = []  # parameters on devices
        self._adopted: IdentitySet[nn.Parameter] = IdentitySet()
        # gradients of a rank whose step the chief makes
        self._hidden: list[Tensor | None] | None = None

    @torch.no_grad()
    def adopt(
        self,
        named: Sequence[NamedParameter],
        sparse: Iterable[nn.Parameter] = (),
    ) -> None:
        """Move parameters, equal on all ranks, to the shared memory; copy parameters on devices to it.

        Collective over the group where there are new parameters, with the same parameters in the same order.

        Raises:
            CollectiveFailed: when a host has too little memory; on its ranks.
        """
        self.shared = [shared for shared in self.shared if shared.parameter() is not None]
        new_parameters: list[NamedParameter] = []
        sizes: list[int] = []
        for name, parameter in named:
            if parameter not in self._adopted:
                new_parameters.append((name, parameter))
                sizes.append(padded(parameter.nbytes))
        if not new_parameters:
            self._sort_by_device()
            return
        memory_of_all = allocate(self._group, sum(sizes))
        memories = cut_memory(memory_of_all, sizes)
        new_tensors: list[tuple[nn.Parameter, Tensor]] = []
        for (name, parameter), memory in zip(new_parameters, memories, strict=True):
            elements = memory[: parameter.nbytes].view(parameter.dtype)
            tensor = shaped_as(elements, parameter)
            if self._is_first:
                tensor.copy_(parameter)
            new_tensors.append((parameter, tensor))
            reference = tensor_internals.weak_reference(parameter)
            self.shared.append(Shared(name, reference, tensor))
            self._adopted.add(parameter)
        self._wait()
        for parameter, tensor in new_tensors:
            if is_on_host(parameter):
                parameter.data = tensor
        self._sort_by_device()

    def _sort_by_device(self) -> None:
        """Distinguish parameters in the shared memory from copies on devices."""
        self._addresses = []
        self._copies = []
        for shared in self.shared:
            parameter = shared.parameter()
            if parameter is not None and is_on_host(parameter):
                self._addresses.append((shared, shared.memory.data_ptr()))
            elif parameter is not None:
                self._copies.append((shared, parameter.device))

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor is one of the parameters."""
        return isinstance(tensor, nn.Parameter) and tensor in self._adopted

    def begin_step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Wait until nobody reads the parameters; hide gradients on ranks whose step the chief makes.

        Collective over the ranks of the host.

        Raises:
            GradientError: when a parameter was moved; on this rank only.
        """
        self.begin_change()
        if not self.is_divided and not self._is_first:
            self._hidden = hide_gradients(parameters)

    def begin_change(self) -> None:
        """Wait until nobody reads the parameters. Collective over the ranks of the host.

        Raises:
            GradientError: when a parameter was moved; on this rank only.
        """
        self._require_unmoved()
        self._wait()

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return when all ranks have written. Collective over the ranks of the host.

        Raises:
            GradientError: when a step whose gradients were hidden has made gradients in a closure; on this rank only.
        """
        hidden = self._hidden
        self._hidden = None
        if hidden is not None:
            restore_gradients(parameters, hidden)
        self.end_change(parameters)

    @torch.no_grad()
    def end_change(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return when all ranks have written. Collective over the ranks of the host.

        Args:
            parameters: parameters that may have changed. Their version counters, which do not count the writes of other
                ranks, are incremented here.
        """
        if self._is_first:
            for parameter, memory in self._copies_on_devices():
                memory.copy_(parameter)
        self._wait()
        if not self._is_first:
            for parameter, memory in self._copies_on_devices():
                parameter.copy_(memory)
        tensor_internals.increment_versions(parameters)

    def _copies_on_devices(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters on devices that are alive, with the shared memory that they copy."""
        copies: list[tuple[nn.Parameter, Tensor]] = []
        for shared, _ in self._copies:
            parameter = shared.parameter()
            if parameter is not None:
                copies.append((parameter, shared.memory))
        return copies

    @contextmanager
    def changing(self) -> Iterator[bool]:
        """Let one rank of each host change parameters in the block; yield whether it is this rank.

        Collective over the ranks of the host.
        """
        self.begin_change()
        yield self._is_first
        parameters: list[nn.Parameter] = []
        for shared in self.shared:
            parameter = shared.parameter()
            if parameter is not None:
                parameters.append(parameter)
        self.end_change(parameters)

    def collect(self, objects: Iterable[Any]) -> None:
        """Do nothing: all ranks of a host read the same memory."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Do nothing: the loaded state is in use."""

    def _require_unmoved(self) -> None:
        """Raise GradientError when a parameter is no longer in the shared memory; on this rank only."""
        for shared, address in self._addresses:
            parameter = shared.parameter()
            if parameter is not None and parameter.data_ptr() != address:
                raise _moved(shared)
        for shared, device in self._copies:
            parameter = shared.parameter()
            if parameter is not None and parameter.device != device:
                raise _moved(shared)

    def _wait(self) -> None:
        """Wait for the other ranks of the host. Collective over the ranks of the host."""
        with self._group.recorded("change of shared parameters", None):
            self._group.barrier.wait()


def _moved(shared: Shared) -> GradientError:
    return GradientError(
        f"step: expected {shared.name!r} in the memory that all ranks share, got it moved or converted; move and "
        f"convert the model before its first use."
    )


def allocate(group: Group, nbytes: int) -> Tensor:
    """Return bytes that the ranks of this host share, zero at first, spread over their NUMA domains.

    Collective over the ranks of the host.

    Raises:
        CollectiveFailed: when the host has too little memory; on all its ranks.
    """
    piece_bytes = -(-max(1, nbytes) // group.node_comm.size)
    window = NodeWindow(group.node_comm, piece_bytes, group.world)
    # the pieces follow one another in one mapping
    return torch.frombuffer(window.pieces[0].obj, dtype=torch.uint8)


def cut_memory(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return parts of flat memory, one after the other."""
    used_memory = memory[: sum(sizes)]
    parts = torch.split(used_memory, list(sizes))
    return list(parts)


def is_on_host(parameter: Tensor) -> bool:
    """Return whether a tensor is in host memory."""
    return parameter.device.type == "cpu"


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in shared memory."""
    n_lines = -(-nbytes // _ALIGNMENT)
    return n_lines * _ALIGNMENT


def shaped_as(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return flat memory as a tensor of a parameter's shape, with its strides if it is dense."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
