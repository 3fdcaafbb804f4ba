"""Checks of an optimizer's step: its gradients must be sums over all replicas, and the right replica makes it."""

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from hpcdist.errors import GradientError
from hpcdist.gradients.backward import Backward
from hpcdist.gradients.managed import Managed
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.slot import Slot
from hpcdist.gradients.sums import GradientSums
from hpcdist.program import torch_hooks
from hpcdist.program.generators import StepGenerators
from hpcdist.program.model_plan import IdentitySet
from hpcdist.program.settings import parameters_of
from hpcdist.program.torch_hooks import Closure
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.replicas.steps import ReplicaSteps

logger = logging.getLogger("hpcdist")


class StepChecks:
    """Sees every optimizer's step of the process, before and after.

    Args:
        managed: the objects of the strategy.
        sums: sums of the gradients.
        backward: knows whether a backward runs.
        state: gradients that replicas have accumulated under no_sync.
        scheduler: runs this rank's replicas.
        generators: random numbers, which count the steps.
    """

    def __init__(
        self,
        managed: Managed,
        sums: GradientSums,
        backward: Backward,
        state: ReplicaState,
        scheduler: ReplicaScheduler,
        generators: StepGenerators,
    ) -> None:
        self._managed = managed
        self._sums = sums
        self._backward = backward
        self._state = state
        self._scheduler = scheduler
        self._generators = generators
        self._reducer = sums.reducer
        self._group = sums.reducer.group
        self._n_replicas = sums.n_replicas
        self._replica_steps = ReplicaSteps(scheduler) if len(scheduler.replicas) > 1 else None
        self._noted_sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._foreign_optimizers: IdentitySet[Optimizer] = IdentitySet()
        self._has_warned = False
        #: Numbers of collectives of the group, and of its communication thread, when the last part of a batch came.
        self._n_collectives: tuple[int, int] | None = None
        before = torch_hooks.before_any_step(self._before_step)
        after = torch_hooks.after_any_step(self._after_step)
        weakref.finalize(self, before.remove)
        weakref.finalize(self, after.remove)

    def stop(self) -> None:
        """Forget the steps that several local replicas had begun before an error stopped them."""
        if self._replica_steps is not None:
            self._replica_steps.stop()

    # -- before a step ----------------------------------------------------------------------------------------------

    def _before_step(
        self,
        optimizer: Optimizer,
        closure: Closure | None,
    ) -> Closure | None:
        """Check that the optimizer steps on summed gradients; hide them where another replica or rank steps.

        Returns:
            A closure that replaces `closure`, and checks the gradients too. None to leave the closure as it is.
        """
        storage = self._managed.storage
        if self._n_replicas == 1 and storage.is_summed:
            return None
        parameters = parameters_of(optimizer)
        if not self._managed.is_ours(optimizer, parameters):
            if self._n_replicas > 1:
                self._require_scope(parameters)
            return None
        if not storage.is_summed:
            self._require_served_step(parameters, closure)
        elif not self._may_step(optimizer, parameters, closure):
            return None
        if self._managed.writes is not None:
            self._managed.writes.end()
        storage.begin_step(optimizer, parameters)
        if closure is None:
            return None
        return functools.partial(self._call_closure, closure, optimizer)

    def _may_step(
        self,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        closure: Closure | None,
    ) -> bool:
        """Return whether this replica makes a step, and not another replica of this process.

        Raises:
            GradientError: unless the step is on sums; on this rank only.
        """
        if self._sums.is_local:
            _require_averageable(optimizer)
        n_ranks = self._group.size
        has_several = self._n_replicas > n_ranks
        if closure is not None and has_several and self._scheduler.replica is not None:
            raise GradientError(
                f"step: expected a step without a closure in strategy.run, as {self._n_replicas} replicas on "
                f"{n_ranks} ranks take it together, got one; call backward before optimizer.step(), or start "
                f"as many ranks as replicas."
            )
        if self._replica_steps is not None and not self._replica_steps.begin(parameters):
            return False
        self._require_summed(parameters)
        if self._replica_steps is not None:
            self._replica_steps.require_equal(parameters)
        return True

    def _require_served_step(
        self,
        parameters: list[nn.Parameter],
        closure: Closure | None,
    ) -> None:
        """Raise GradientError unless parameter servers can make a step of the gradients; on this rank only."""
        if closure is not None:
            raise GradientError(
                "step: expected a step without a closure, which parameter servers make, got one; call backward before "
                "optimizer.step()."
            )
        if torch_hooks.is_step_of_scaler():
            raise GradientError(
                "step: expected every worker to make each step, got a GradScaler, which skips steps on workers whose "
                "own gradients overflow; train in bfloat16, which needs none."
            )
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if self._managed.storage.needs_sum and has_gradients and self._sums.op.is_mean is not False:
            raise GradientError(
                "step: expected a loss scaled by hpcdist.compute_average_loss, as servers sum the gradients of all "
                "workers, got one that was not; scale it by the global batch."
            )

    def _require_summed(self, parameters: list[nn.Parameter]) -> None:
        """Raise GradientError for gradients that no backward has summed; on this rank only."""
        self._backward.require_seen()
        if self._backward.is_running:
            self._require_no_gradients(parameters)
            return
        slots = self._managed.slots
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            slot = slots.get(id(parameter))
            if slot is not None:
                if gradient is slot.published and gradient.data_ptr() == slot.address:
                    continue
                if slot.reference() is parameter and slot.is_left(gradient):
                    continue
                if self._sums.is_local and self._is_local(slot, gradient):
                    continue
            if gradient not in self._noted_sums:
                raise self._refusal(parameter)

    def _require_no_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Raise GradientError for a step inside a backward, or after one that failed; on this rank only."""
        hidden = self._backward.hidden_slots()
        for parameter in parameters:
            if parameter.grad is not None or self._managed.slots.get(id(parameter)) in hidden:
                raise self._refusal(parameter)

    def _is_local(self, slot: Slot, gradient: Tensor | None) -> bool:
        """Return whether a gradient was accumulated by the calling replica; outside of `run`, by the last replica."""
        replica = self._scheduler.replica
        if replica is None:
            replica = self._scheduler.replicas[-1]
        return self._state.local.holds(replica, slot, gradient)

    def _call_closure(self, closure: Closure, optimizer: Optimizer) -> Any:
        """Return the loss of a closure, once the gradients that it leaves are checked.

        LBFGS decides by the loss, so it gets the loss of all replicas, and all replicas decide alike. This is
        collective over all ranks. If the closure has reduced a value after its backward, the value is taken to be the
        loss of all replicas.
        """
        loss = closure()
        self._require_summed(parameters_of(optimizer))
        has_reduced = self._group.journal.n_entered > self._sums.n_entered_before
        if not isinstance(optimizer, LBFGS) or has_reduced:
            return loss
        is_mean = self._sums.op.is_mean
        weight = self._sums.last_weight if is_mean else 1.0
        local_loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        weighed_loss = local_loss * weight if weight else 0.0  # without rows the loss may be NaN
        sums = np.array([weighed_loss, weight])
        self._reducer.sum_array(sums, "loss")
        total_loss = sums[0]
        if is_mean:
            total_loss = total_loss / sums[1]
        if isinstance(loss, Tensor):
            return loss.new_tensor(total_loss)
        return float(total_loss)

    def note_sums(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are sums over all replicas, which an optimizer may step on as gradients."""
        for tensor in tensors:
            self._noted_sums[tensor] = None

    def are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return, for each tensor, whether `note_sums` has noted it."""
        return [tensor in self._noted_sums for tensor in tensors]

    def are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return, for each tensor, whether it is a gradient that a synchronized backward has left."""
        shapes = self._managed.shapes
        if self._n_replicas == 1 or not any(tensor.shape in shapes for tensor in tensors):
            return [False] * len(tensors)
        slots: dict[int, Slot] = {}
        for slot in self._managed.slots.values():
            parameter = slot.parameter
            if parameter is not None:
                slots[id(parameter.grad)] = slot
        return [self._is_sum(slots.get(id(tensor)), tensor) for tensor in tensors]

    def _is_sum(self, slot: Slot | None, gradient: Tensor) -> bool:
        """Return whether a gradient is the published sum of a slot, or a replica's copy."""
        if slot is None or not slot.holds_sum:
            return False
        return slot.is_left(gradient) or self._state.has_given(slot, gradient)

    def note_batch(self, is_over: bool) -> None:
        """Note that this rank got its part of a global batch, for the next step, or that a pass is over."""
        self._n_collectives = None
        if not is_over:
            self._n_collectives = (self._group.journal.n_entered, self._n_in_thread())

    def _n_in_thread(self) -> int:
        """Return the number of collectives that the group's communication thread has entered; 0 without a thread."""
        thread = self._group.peek("thread")
        if thread is None:
            return 0
        return int(thread.group.journal.n_entered)

    def _require_scope(self, parameters: list[nn.Parameter]) -> None:
        """Raise GradientError if each rank trains a separate model on its part of the batches: the scope was forgotten.

        This is so if a parameter with a gradient is not watched, and no collective since the batch came could have
        reduced the largest such gradient; a loss is too small. Beside a model of the scope another model may be meant
        to differ, such as a reference: this is logged, once. A rank may also optimize plain tensors, such as a
        perturbation of its rows. In `no_sync` the program says that models are meant to differ.
        """
        if self._n_collectives is None or not self._backward.is_syncing:
            return
        sizes: list[int] = []
        for parameter in parameters:
            if not isinstance(parameter, nn.Parameter) or torch_hooks.is_watched(parameter):
                continue
            if parameter.grad is not None:
                sizes.append(parameter.numel())
        n_entered, n_in_thread = self._n_collectives
        if not sizes or self._n_in_thread() != n_in_thread:
            return
        if not self._group.journal.has_carried(max(sizes), since=n_entered):
            text = (
                f"step: expected a model made in strategy.scope(), as the batches are those of its distributed "
                f"dataset, got one that no strategy looks after: {self._n_replicas} models would be trained apart; "
                f"make model and optimizer in the scope, sum the gradients by hpcdist.all_reduce, or, if they are "
                f"summed otherwise, step in strategy.no_sync()."
            )
            if not any(True for _ in self._managed.modules):
                raise GradientError(text)
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s", text)

    def _refusal(self, parameter: nn.Parameter) -> GradientError:
        """Return the error of a parameter whose gradient is not the sum over the replicas."""
        slot = self._managed.slot_of(parameter)
        if slot is None:
            return GradientError(
                f"step: expected parameters made in strategy.scope() and in use since, got one of shape "
                f"{tuple(parameter.shape)} whose gradient was not summed; build it in the scope before "
                f"strategy.run, enter the scope again after unfreezing, and call the model itself or strategy.run."
            )
        if self._backward.is_running or self._is_local(slot, parameter.grad):
            return GradientError(
                f"step: expected gradients summed over the replicas, got a local one in {slot.name!r}; run the last "
                f"backward outside no_sync and step after it."
            )
        return GradientError(
            f"step: expected the gradient of {slot.name!r} as backward left it, got another tensor; change it in "
            f"place (grad.mul_, grad.copy_) so that every rank changes the same sum."
        )

    def _after_step(self, optimizer: Optimizer) -> None:
        """Restore hidden gradients, count the step, and let the other replicas of this process run again."""
        parameters = parameters_of(optimizer)
        if self._replica_steps is not None and not self._replica_steps.end(parameters):
            return
        is_local = self._sums.is_local
        if not self._managed.storage.is_private and self._managed.is_ours(optimizer, parameters):
            self._managed.storage.end_step(parameters)
        if any(parameter in self._managed.trained for parameter in parameters):
            self._generators.advance()
            if is_local:
                # before anybody notes what the step has left
                self._sums.count_local_step(optimizer)
            self._sums.states.note_step(optimizer)
            self._group.world.note_step(self._generators.step)
            self._group.world.step_flags.count_step(optimizer, self._sums.number)
        elif self._n_replicas > 1 and optimizer not in self._foreign_optimizers:
            self._note_other(optimizer, parameters)
        if self._scheduler.replica is not None and self._managed.is_ours(optimizer, parameters):
            if self._managed.writes is not None:
                self._managed.writes.begin()
            if self._replica_steps is not None:
                self._replica_steps.release()

    def _note_other(
        self,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
    ) -> None:
        """Note the first step of another optimizer; if its parameters are a copy of the model, compare them, too."""
        self._foreign_optimizers.add(optimizer)
        model_shapes = [parameter.shape for _, parameter in self._sums.states.parameters()]
        shapes = [parameter.shape for parameter in parameters]
        if not model_shapes or shapes != model_shapes:
            return
        copies = self._sums.copies.parameters()
        for number, parameter in enumerate(parameters):
            copies.append((f"parameter {number}", parameter))
        self._sums.copies.watch(copies)


def _require_averageable(optimizer: Optimizer) -> None:
    """Raise GradientError for a local step of an optimizer that cannot be averaged, or that a rank may leave out."""
    if isinstance(optimizer, LBFGS):
        raise GradientError(
            "step: expected an optimizer whose state can be averaged with local_steps, got LBFGS; take SGD or Adam."
        )
    if torch_hooks.is_step_of_scaler():
        raise GradientError(
            "step: expected every rank to make each of its local_steps, got a GradScaler, which skips steps on the "
            "ranks whose own gradients overflow; train in bfloat16, which needs none, or leave local_steps out."
        )
