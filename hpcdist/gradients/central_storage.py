"""Parameters that the ranks of a host hold once, in shared memory; the chief alone steps them."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.gradients.hidden import hide_gradients, restore_gradients
from hpcdist.gradients.node_parameters import NodeParameters, is_on_host

#: The storages whose strategies are in use.
_alive: "weakref.WeakSet[CentralStorage]" = weakref.WeakSet()


class CentralStorage:
    """The host's one copy of all parameters.

    A step is made between two barriers: before the first one other ranks may still read, after the second one the
    chief has written. Parameters on devices are copied out by the chief and in by the others.

    Args:
        group: the ranks, all on one host.
    """

    is_summed = needs_sum = True

    def __init__(self, group: Group) -> None:
        self._is_chief = group.rank == 0
        self._parameters = NodeParameters(group)
        self._hidden: list[Tensor | None] | None = None  # gradients of a rank whose step the chief makes
        _alive.add(self)

    def adopt(self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter] = ()) -> None:
        """Move parameters to the shared memory; see `NodeParameters.adopt`."""
        self._parameters.adopt(named)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the parameters."""
        return self._parameters.holds(tensor)

    def begin_change(self) -> bool:
        """Wait until nobody reads the parameters; return whether this rank is the one that changes them.

        Collective: the group.

        Raises:
            GradientError: when a parameter was moved; on this rank only.
        """
        self._parameters.require_unmoved()
        self._parameters.wait()
        return self._is_chief

    @torch.no_grad()
    def end_change(self) -> None:
        """Return when the chief has changed the parameters. Collective: the group."""
        copies = [
            (parameter, one.memory)
            for one in self._parameters.shared
            if (parameter := one.parameter()) is not None and not is_on_host(parameter)
        ]
        if self._is_chief:
            for parameter, memory in copies:
                memory.copy_(parameter)
        self._parameters.wait()
        if not self._is_chief:
            for parameter, memory in copies:
                parameter.copy_(memory)

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


def is_stepped_by_chief(optimizer: Any) -> bool:
    """Return whether the chief alone makes an optimizer's steps, so that others have none of its state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(storage.holds(parameter) for storage in list(_alive) for parameter in parameters)
