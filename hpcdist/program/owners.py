"""The owners of objects: the strategies that are alive, for code that does not know strategies.

A checkpoint holds models and optimizers. It does not know which strategy has made them, nor what the strategy has to do
before they are saved. So it asks all strategies in turn, and each strategy looks for its own objects. Losses and
gradients outside of every scope find their strategy in the same way.
"""

import enum
import gc
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.program.model_plan import IdentitySet


class Stepper(enum.Enum):
    """The processes that make an optimizer's steps, and so have its state."""

    EVERY_RANK = "every rank"
    CHIEF = "the chief"
    SERVERS = "parameter servers"


class Owner(Protocol):
    """A strategy, as seen by code that saves and loads objects."""

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make this owner's models among `objects` equal on all ranks; end a round of local steps.

        Collective if there are any.
        """

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring this owner's objects among `objects` to one state, to be saved. Collective if there are any."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Use the state that was loaded into this owner's objects among `objects`. Collective if there are any."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in this owner's scope, or a buffer of a module built there."""

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return who makes the steps of an optimizer."""


#: Owners that are alive, in the order in which they were made, which is the same on all ranks.
_owners: "IdentitySet[Owner]" = IdentitySet()
#: Name of the attribute by which a module or a parameter keeps its strategy.
_KEEPER = "_hpcdist_keeper"


def add(owner: Owner) -> None:
    """Ask this owner, too, from now on, for as long as it lives."""
    _owners.add(owner)


def alive() -> list[Owner]:
    """Return the owners that are alive, in the order in which they were made."""
    return list(_owners)


def prepare(objects: Sequence[Any]) -> None:
    """Make models equal on all ranks that have not been used yet, or that local steps let differ.

    Collective over the ranks of the owners, if there are any.
    """
    for owner in alive():
        owner.prepare(objects)


def collect(objects: Sequence[Any]) -> None:
    """Bring objects on parameter servers to one state on all workers. Collective over the workers if there are any."""
    for owner in alive():
        owner.collect(objects)


def publish(objects: Sequence[Any]) -> None:
    """Give parameter servers the state that was loaded into objects that they hold.

    Collective over the workers if there are any.
    """
    for owner in alive():
        owner.publish(objects)


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Return who makes the steps of an optimizer."""
    for owner in alive():
        stepper = owner.stepper_of(optimizer)
        if stepper is not Stepper.EVERY_RANK:
            return stepper
    return Stepper.EVERY_RANK


class _Keeper:
    """The attribute of a module or a parameter that keeps an object alive. Copies and pickles have an empty dict.

    It is an attribute, and no entry of a weak table, so that garbage collection follows it, also where the object that
    it keeps alive holds the module.
    """

    def __init__(self, kept_alive: object) -> None:
        self._kept_alive = kept_alive

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()


def live_with(item: nn.Module | nn.Parameter, keeper: object) -> None:
    """Let an object live as long as a module or a parameter, so that steps are checked while there is one to step."""
    vars(item)[_KEEPER] = _Keeper(keeper)


def leave(item: nn.Module | nn.Parameter) -> None:
    """Undo `live_with` for a module or a parameter."""
    vars(item).pop(_KEEPER, None)


def collect_garbage() -> None:
    """Free strategies whose modules are garbage. Python would do so at different times on different ranks."""
    gc.unfreeze()  # frozen objects may have become garbage since
    gc.collect()
