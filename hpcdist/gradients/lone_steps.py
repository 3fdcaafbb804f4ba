"""One replica on its own: random numbers keyed by seed and step, so that restarts are exact."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import Optimizer

from hpcdist.gradients import torch_hooks
from hpcdist.gradients.generators import StepGenerators
from hpcdist.gradients.model_plan import IdentitySet, ModuleSet
from hpcdist.notices import of_one_rank


class LoneSteps:
    """Looks after the modules and optimizers of one replica that nothing is summed with.

    Attributes:
        modules: made in the scope.
        generators: random numbers keyed by seed and step, as those of the only rank of a job.
    """

    def __init__(self) -> None:
        self.modules = ModuleSet()
        self.generators = StepGenerators(0)
        self._optimizers: IdentitySet[Optimizer] = IdentitySet()
        for handle in torch_hooks.around_any_step(self._before_step, self._after_step):
            weakref.finalize(self, handle.remove)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after every module and optimizer that is built in the block."""
        with torch_hooks.on_built(self.modules.add, self._optimizers.add):
            yield
        if self.generators.seed is None:
            self.generators.start(torch.initial_seed())

    def _before_step(self, optimizer: Optimizer) -> None:
        """Do nothing: gradients are whole already."""

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._optimizers or self._steps_ours(optimizer):
            self.generators.advance()
            of_one_rank.n_steps += 1

    def _steps_ours(self, optimizer: Optimizer) -> bool:
        own = self.modules.parameters()
        return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
