"""The objects of a strategy: modules and optimizers of its scope, their storage, and the slots of gradients."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.group import Group
from hpcdist.gradients.slot import Slot
from hpcdist.program.model_plan import IdentitySet, ModuleSet
from hpcdist.replicas.shared_writes import SharedWrites
from hpcdist.storage.host_storage import HostStorage
from hpcdist.storage.storage import Storage


class Managed:
    """The objects of one strategy: the planner adds to them, and steps are checked against them.

    Args:
        storage: storage of the parameters.
        is_watched: whether writes to parameters that several replicas share are looked for.
        is_entered: function that returns whether the caller is inside the strategy's scope or run. Its owner lives as
            long as this object.

    Attributes:
        modules: modules made in the scope.
        optimizers: optimizers made or used in the scope.
        trained: parameters that are planned to be trained.
        slots: slot of each trained parameter, by the id of the parameter.
        shapes: shapes of trained parameters.
        storage: storage of the parameters; with each rank's share from the first ZeroRedundancyOptimizer on.
        writes: finds writes to parameters that replicas share; None where each replica has its own parameters.
    """

    def __init__(
        self,
        storage: Storage,
        is_watched: bool,
        is_entered: Callable[[], bool],
    ) -> None:
        self.modules = ModuleSet()
        self.optimizers: IdentitySet[Optimizer] = IdentitySet()
        self.trained: IdentitySet[nn.Parameter] = IdentitySet()
        self.slots: dict[int, Slot] = {}
        self.shapes: frozenset[torch.Size] = frozenset()
        self.storage = storage
        self.writes = SharedWrites(self.optimizers) if is_watched else None
        self._is_entered = is_entered

    def slot_of(self, parameter: nn.Parameter) -> Slot | None:
        """Return the slot of a trained parameter; None for another parameter."""
        slot = self.slots.get(id(parameter))
        if slot is None or slot.reference() is not parameter:
            return None
        return slot

    def is_ours(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> bool:
        """Return whether an optimizer was built or is used in the scope, or steps a parameter of its modules."""
        if optimizer in self.optimizers:
            return True
        if not self._is_entered():
            managed = self.modules.parameters()
            if not any(parameter in managed for parameter in parameters):
                return False
        self.optimizers.add(optimizer)
        return True

    def train(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note which parameters are trained from now on."""
        self.trained = IdentitySet(parameters)

    def use_slots(
        self,
        slots: dict[int, Slot],
        shapes: Iterable[torch.Size],
    ) -> None:
        """Take the slots of a new plan, and the shapes of their parameters."""
        self.slots = slots
        self.shapes = frozenset(shapes)

    def divide_storage(self, group: Group) -> SharedWrites:
        """Let the ranks of a host hold parameters once, and each rank step its share; return the finder of writes."""
        self.storage = HostStorage(group, is_divided=True)
        self.writes = SharedWrites(self.optimizers)
        return self.writes
