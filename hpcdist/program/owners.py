"""Whose an object is: the strategies that are alive, for code that does not know of strategies.

A checkpoint holds models and optimizers, and does not know which strategy has made them, nor what that has to do before
they are saved. So it asks all strategies in turn, each of which looks for its own. The same for losses and gradients
outside of every scope.
"""

import enum
import gc
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hpcdist.program.model_plan import IdentitySet


class Stepper(enum.Enum):
    """Who makes an optimizer's steps, and so has its state."""

    EVERY_RANK = "every rank"
    CHIEF = "the chief"
    SERVERS = "parameter servers"


class Owner(Protocol):
    """A strategy, as seen by those that save and load objects."""

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make the models of this owner among some objects equal on all ranks. Collective if there are any."""

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring this owner's objects among some to one state, to be saved. Collective if there are any."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Use what was loaded into this owner's objects among some. Collective if there are any."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in this owner's scope, or a buffer of a module built there."""

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return who makes the steps of an optimizer."""


#: Owners that are alive, in the order in which they were made, which is the same on all ranks.
_owners: "IdentitySet[Owner]" = IdentitySet()
#: What lives as long as a module, by identity: a module may define == in its own way, as those of torchmetrics do.
_keepers: MutableMapping[nn.Module, object] = WeakIdKeyDictionary()


def add(owner: Owner) -> None:
    """Ask this owner, too, from now on and for as long as it lives."""
    _owners.add(owner)


def alive() -> list[Owner]:
    """Return the owners that are alive, in the order in which they were made."""
    return list(_owners)


def prepare(objects: Sequence[Any]) -> None:
    """Make models that have not been used yet equal on all ranks. Collective if there are any: their ranks."""
    for owner in alive():
        owner.prepare(objects)


def collect(objects: Sequence[Any]) -> None:
    """Bring objects on parameter servers to one state on all workers. Collective if there are any: the workers."""
    for owner in alive():
        owner.collect(objects)


def publish(objects: Sequence[Any]) -> None:
    """Give parameter servers what was loaded into objects that they hold. Collective if there are any: the workers."""
    for owner in alive():
        owner.publish(objects)


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Return who makes the steps of an optimizer."""
    for owner in alive():
        stepper = owner.stepper_of(optimizer)
        if stepper is not Stepper.EVERY_RANK:
            return stepper
    return Stepper.EVERY_RANK


def live_with(module: nn.Module, keeper: object) -> None:
    """Let an object live as long as a module, which it must not hold: steps are checked while there is a model."""
    _keepers[module] = keeper


def collect_garbage() -> None:
    """Let go of strategies whose modules are garbage: first the modules, then what has lived with them."""
    gc.unfreeze()  # what was frozen may have become garbage since
    gc.collect()
    gc.collect()
