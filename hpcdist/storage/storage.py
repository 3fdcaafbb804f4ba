"""Storage of a strategy's parameters: on each rank, once on a host, or on parameter servers."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer

from hpcdist.program.model_plan import NamedParameter
from hpcdist.program.owners import Stepper


class Storage(Protocol):
    """Holds parameters, and has a part in each step of an optimizer.

    Attributes:
        is_private: whether no other rank has this rank's parameters.
        is_summed: whether gradients are summed over all replicas before a step, on the ranks themselves.
        is_divided: whether each rank steps its share of the parameters.
        needs_sum: whether gradients are summed at all, so that losses must be scaled for the sum.
        stepper: the processes that make the steps of the held parameters.
    """

    is_private: bool
    is_summed: bool
    is_divided: bool
    needs_sum: bool
    stepper: Stepper

    def adopt(
        self,
        named: Sequence[NamedParameter],
        sparse: Iterable[nn.Parameter],
    ) -> None:
        """Hold parameters, equal on all ranks, from now on. Collective where there are new parameters."""

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor is a parameter that the ranks of a host share, or that servers hold."""

    def begin_step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Begin an optimizer's step; gradients are hidden where another process makes it."""

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """End an optimizer's step."""

    def changing(self) -> AbstractContextManager[bool]:
        """Let the program change parameters in the block; yield whether this rank changes them."""

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring the held objects among `objects` to one state, to be saved. Collective if there are any."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Use the state that was loaded into the held objects among `objects`. Collective if there are any."""


class PrivateStorage:
    """Parameters of which each rank has its own, and steps all; a `Storage`."""

    is_private = is_summed = needs_sum = True
    is_divided = False
    stepper = Stepper.EVERY_RANK

    def adopt(
        self,
        named: Sequence[NamedParameter],
        sparse: Iterable[nn.Parameter],
    ) -> None:
        """Leave parameters where they are."""

    def holds(self, tensor: Any) -> bool:
        """Return False: no other rank has this rank's parameters."""
        return False

    def begin_step(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Leave the step to the optimizer."""

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: no other rank waits for the step."""

    def changing(self) -> AbstractContextManager[bool]:
        """Let each rank change its own parameters."""
        return nullcontext(True)

    def collect(self, objects: Iterable[Any]) -> None:
        """Do nothing: each rank has the state of all objects."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Do nothing: the loaded state is in use."""
