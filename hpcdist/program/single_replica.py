"""A strategy of one replica: random numbers keyed by seed and step, so that restarts are exact."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import Optimizer

from hpcdist.program import torch_hooks
from hpcdist.program.generators import StepGenerators
from hpcdist.program.loop_watch import watch_loop
from hpcdist.program.model_plan import IdentitySet, ModuleSet
from hpcdist.runtime.step_flags import single_rank_flags

#: Owner of the parts of strategies of one replica, whose gradients nobody weighs.
_OWNER = 0


class SingleReplicaSteps:
    """Watches the modules and optimizers of a single replica, whose gradients are not summed.

    Attributes:
        modules: modules made in the scope.
        generators: random numbers keyed by seed and step, as for the only rank of a job.
    """

    def __init__(self) -> None:
        self.modules = ModuleSet()
        self.generators = StepGenerators(0)
        self._optimizers: IdentitySet[Optimizer] = IdentitySet()
        step_handle = torch_hooks.after_any_step(self._after_step)
        weakref.finalize(self, step_handle.remove)
        watch_loop(single_rank_flags).seed_batches(_OWNER, self.generators)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every module, parameter and optimizer that is built in the block."""
        with torch_hooks.on_built(
            self.modules.add, self.modules.add_parameter, self._see_optimizer
        ):
            yield
        if self.generators.seed is None:
            self.generators.start(torch.initial_seed())

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        single_rank_flags.loop.expect_training(_OWNER)

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._optimizers or self._steps_ours(optimizer):
            self.generators.advance()
            single_rank_flags.count_step(optimizer, _OWNER)

    def _steps_ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a parameter of the scope."""
        scope_parameters = self.modules.parameters()
        for group in optimizer.param_groups:
            if any(parameter in scope_parameters for parameter in group["params"]):
                return True
        return False
