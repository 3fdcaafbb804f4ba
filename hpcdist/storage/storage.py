"""Where the parameters of a strategy live: with each rank, once on a host, or on parameter servers."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer

from hpcdist.program.owners import Stepper


class Storage(Protocol):
    """Holds parameters, and has a part in each step of an optimizer.

    Attributes:
        is_private: whether no other rank has this rank's parameters.
        is_summed: whether gradients are summed over all replicas before a step, on the ranks themselves.
        is_divided: whether each rank steps its share of the parameters.
        needs_sum: whether gradients are summed at all, so that losses must be scaled for it.
        stepper: who makes the steps of what is held.
    """

    is_private: bool
    is_summed: bool
    is_divided: bool
    needs_sum: bool
    stepper: Stepper

    def adopt(
        self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter]
    ) -> None:
        """Hold parameters, equal on all ranks, from now on. Collective where there are new ones."""

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor is a parameter that ranks of a host have once, or that servers hold."""

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Begin an optimizer's step; gradients are hidden where another one makes it."""

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """End an optimizer's step."""

    def changing(self) -> AbstractContextManager[bool]:
        """Let the program change parameters in the block: yield whether this rank does it."""

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring what is held of some objects to one state, to be saved. Collective if there is anything."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Use what was loaded into those of some objects that are held. Collective if there are any."""


class PrivateStorage:
    """Parameters of which each rank has its own, and steps all of them; a `Storage`."""

    is_private = is_summed = needs_sum = True
    is_divided = False
    stepper = Stepper.EVERY_RANK

    def adopt(
        self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter]
    ) -> None:
        """Leave parameters where they are."""

    def holds(self, tensor: Any) -> bool:
        """Return False: no other rank has this rank's parameters."""
        return False

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Leave the step to the optimizer."""

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: no other rank waits for the step."""

    def changing(self) -> AbstractContextManager[bool]:
        """Let each rank change its own parameters."""
        return nullcontext(True)

    def collect(self, objects: Iterable[Any]) -> None:
        """Do nothing: each rank has the state of all objects."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Do nothing: what was loaded is in use."""
