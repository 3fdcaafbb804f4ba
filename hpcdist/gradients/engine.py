"""The gradient engine: models start identical, and `loss.backward()` leaves the sum over all replicas in `.grad`.

One engine per strategy. It plans at the first use of a model made in the strategy's scope, and runs the plan from then
on: every replica joins every bucket of every synchronized backward, and a count per parameter distinguishes a gradient
of zero from no gradient at all.
"""

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from hpcdist.errors import ConfigurationError, GradientError, UsageError, agreed
from hpcdist.gradients.backward import Backward
from hpcdist.gradients.buffers import BufferRecord
from hpcdist.gradients.comm_hook import CommHook
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.local_rounds import LocalRounds
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.sharded import ShardedSlot
from hpcdist.gradients.slot import Slot
from hpcdist.gradients.sparse import SparseSlot
from hpcdist.gradients.sums import GradientSums
from hpcdist.program import end_of_program, torch_hooks
from hpcdist.program.equal_batches import digest_of_batch
from hpcdist.program.generators import StepGenerators
from hpcdist.program.local_metrics import warn_of_local_metrics
from hpcdist.program.loop_watch import watch_loop
from hpcdist.program.model_plan import IdentitySet, ModelPlan, ModuleSet, explain_difference, plan_model
from hpcdist.program.settings import describe_settings, explain_settings
from hpcdist.program.tensors import from_array, layout, to_array
from hpcdist.program.torch_hooks import Closure
from hpcdist.replicas.scheduler import ReplicaScheduler, Switched
from hpcdist.replicas.shared_writes import SharedWrites
from hpcdist.replicas.steps import ReplicaSteps
from hpcdist.runtime.world import World
from hpcdist.storage.host_storage import HostStorage
from hpcdist.storage.storage import Storage
from hpcdist.storage.zero_redundancy import ZeroRedundancyOptimizer, why_not

logger = logging.getLogger("hpcdist")


class GradientEngine:
    """Keeps the replicas of one strategy equal.

    Args:
        world: who is where; the ranks of `world.role_comm` hold the replicas, the chief's first.
        reducer: sums buckets over the replicas, and broadcasts the chief's values.
        is_mean: whether gradients are averaged by rows instead of summed; None until it is settled.
        is_entered: returns whether the caller is inside the strategy's scope or run.
        has_fixed_replicas: whether the number of replicas was given: random numbers then do not depend on ranks.
        storage: where the parameters live.

    Attributes:
        storage: where the parameters live; by shares of the ranks from the first ZeroRedundancyOptimizer on.
        sums: what is summed, and how sums are published. backward: the hooks that feed it.
        scheduler: runs this rank's replicas.
        generators: random numbers keyed by seed, step and replica.
        modules: made in the scope. has_plan: whether all of them are planned.
    """

    def __init__(
        self,
        world: World,
        reducer: Reducer,
        is_mean: bool | None,
        is_entered: Callable[[], bool],
        has_fixed_replicas: bool,
        storage: Storage,
    ) -> None:
        self._world = world
        self._comm = world.role_comm
        self._is_entered = is_entered
        self._has_fixed_replicas = has_fixed_replicas
        self._reducer = reducer
        self.storage = storage
        replicas = reducer.own_replicas
        self._n_replicas = reducer.replicas.n_replicas
        self._is_summed = self._n_replicas > 1 and storage.is_summed
        self.generators = StepGenerators(None if has_fixed_replicas else self._comm.rank)
        self._optimizers: IdentitySet[Optimizer] = IdentitySet()
        self._state = ReplicaState(replicas, functools.partial(world.agree, comm=self._comm))
        has_one_copy = storage.is_summed and not storage.is_private
        is_shared = has_fixed_replicas or has_one_copy  # by replicas of a rank, or by the ranks of a host
        self._writes = SharedWrites(self._optimizers) if is_shared and self._n_replicas > 1 else None
        switched: list[Switched] = [self._state, self.generators] if has_fixed_replicas else []
        self.scheduler = ReplicaScheduler(replicas, switched if self._writes is None else [*switched, self._writes])
        has_several = len(replicas) > 1
        self.sums = GradientSums(reducer, is_mean, world.step_flags)
        self._replica_steps = ReplicaSteps(self.scheduler) if has_several else None
        self.backward = Backward(self.sums, self.scheduler, self._state, has_fixed_replicas)
        self.modules = ModuleSet()
        # Held weakly, by identity: a module may define == in its own way, as those of torchmetrics do.
        self._engines: MutableMapping[nn.Module, GradientEngine] = WeakIdKeyDictionary()
        self._slots: dict[int, Slot] = {}
        self._trained: IdentitySet[nn.Parameter] = IdentitySet()
        self._broadcast_already: IdentitySet[Tensor] = IdentitySet()
        self._own_sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._shapes: frozenset[torch.Size] = frozenset()
        #: Ends the watch for the next forward when it is called, or when this object is gone.
        self._end_forward_watch: weakref.finalize[[], GradientEngine] | None = None
        self._others: IdentitySet[Optimizer] = IdentitySet()
        self._has_warned = False
        self._hook_name: str | None = None
        #: Of the group, and of its communication thread, when the last part of a batch came.
        self._n_collectives: tuple[int, int] | None = None
        self._planned_buffers: set[tuple[int, str]] = set()
        self._planned_modules: set[int] = set()
        late_buffers = torch_hooks.on_buffer_registered(self._see_buffer)
        weakref.finalize(self, late_buffers.remove)
        before = torch_hooks.before_any_step(self._before_step)
        after = torch_hooks.after_any_step(self._after_step)
        if is_mean and self._n_replicas > 1:
            watch_loop(world.step_flags)
        weakref.finalize(self, before.remove)
        weakref.finalize(self, after.remove)

    # -- models ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Manage every module, parameter and optimizer that is built in the block, except in a run.

        A plan made in the middle of a step would find replicas that have begun it and others that have not.
        """
        try:
            with torch_hooks.on_built(self._see, self._see_parameter, self._see_optimizer):
                yield
        finally:  # plan again if a parameter has become trainable since the plan was made
            if any(p.requires_grad and p not in self._trained for p in self.modules.parameters()):
                self._plan_at_next_forward()

    def writing(self) -> AbstractContextManager[None]:
        """Let the block write to parameters in a replica's turn: it does so once for all local replicas."""
        return nullcontext() if self._writes is None else self._writes.merging()

    def _see(self, module: nn.Module) -> None:
        if self.scheduler.is_running:  # a replica's own, such as a loss or a copy; `step` refuses its parameters
            return
        self.modules.add(module)
        self._engines[module] = self
        self._plan_at_next_forward()

    def _see_parameter(self, parameter: nn.Parameter) -> None:
        if not self.scheduler.is_running:
            self.modules.add_parameter(parameter)
            self._plan_at_next_forward()

    def _see_buffer(self, module: nn.Module, name: str) -> None:
        """Plan again if a module of the scope gets a new buffer after its first use, such as a mask for pruning."""
        is_late = self.has_plan and (id(module), name) not in self._planned_buffers
        is_known = id(module) in self._planned_modules
        if is_late and is_known and not self.scheduler.is_running and not torch_hooks.is_in_forward():
            self._plan_at_next_forward()  # what a forward keeps for its inputs is each rank's own

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._world.step_flags.loop.expect_training(self.sums.number)

    @property
    def has_plan(self) -> bool:
        """Whether every module of the scope is planned, so that no forward will plan again."""
        return self._end_forward_watch is None

    def _plan_at_next_forward(self) -> None:
        """Prepare at the next forward of a managed module. Modules keep the engine alive until then."""
        if self._end_forward_watch is None:
            for module in self.modules:
                self._engines[module] = self
            handle = torch_hooks.before_any_forward(functools.partial(_prepare_engine, self._engines))
            self._end_forward_watch = weakref.finalize(self, handle.remove)

    def prepare_run(self, batch: Any) -> None:
        """Do what `prepare` does; draw random numbers by replica from the first call on, with or without a model.

        Collective as `prepare`, and at the first call with a fixed number of replicas: `world.role_comm`.
        """
        self.prepare(batch)
        if self.generators.seed is None and self._has_fixed_replicas:
            self._start_generators()
        elif self.generators.seed is None:
            self.generators.start_alone()

    def prepare_objects(self, objects: Iterable[Any]) -> None:
        """Make models among some objects equal: those not used yet, and those that local steps let differ.

        Collective if one of them was made in the scope: `world.role_comm`. See `prepare` and `average_round`.
        """
        wanted: set[int] = set()
        tensors: list[Tensor] = []
        for item in objects:
            if isinstance(item, nn.Module):
                wanted.update(id(part) for part in item.modules())
            copies = getattr(item, "local_copies", (item,))
            tensors += [copy for copy in copies if isinstance(copy, Tensor)]
        if any(id(module) in wanted for module in self.modules) or any(map(self.modules.holds, tensors)):
            self.prepare()
            self.average_round()

    @torch.inference_mode(False)
    def prepare(self, batch: Any = None) -> None:
        """Make the models of the scope equal on all ranks and plan their buckets, if that is not done yet.

        Collective at the first use of a model: `world.role_comm`.

        Args:
            batch: what the model is about to be fed, to find ranks that are fed the same.

        Raises:
            DesyncError, ConfigurationError: on every rank alike, when the models differ or cannot be summed.
        """
        is_in_backward = torch_hooks.is_in_backward()  # activation checkpointing runs a forward again
        if self._end_forward_watch is None or is_in_backward:
            return
        self._end_forward_watch()
        self._end_forward_watch = None
        self._engines.clear()
        is_plain = not torch_hooks.is_transforming()
        with torch_hooks.as_plain_code():
            self._prepare(batch if is_plain else None)

    def _prepare(self, batch: Any) -> None:
        plan = self._agreed_plan()
        self._planned_buffers = {buffer.place for buffer in plan.buffers}
        self._planned_modules = self.modules.ids()
        sharded = self._sharded_optimizers(plan)
        self._broadcast(plan)
        named = _stepped_by(sharded, plan) if self.storage.is_divided else plan.parameters
        self.storage.adopt(named, plan.sparse)
        self._start_generators()
        self._trained = IdentitySet(parameter for _, parameter in plan.trained)
        if self._is_summed:
            self._plan_buckets(plan)
        for optimizer in sharded:
            optimizer.shard([slot for slot in self.sums.slots if isinstance(slot, ShardedSlot)], self._reducer.group)
        if self._n_replicas > 1:
            self._warn_of_equal_batches(batch)
            if self._comm.rank == 0:
                warn_of_local_metrics()

    def _agreed_plan(self) -> ModelPlan:
        plan = ModelPlan((), ())
        with self._world.agreed(self._comm, "first use of a model"):
            gc.collect()  # whether an unused module is still there must not differ between ranks
            plan = plan_model(self.modules.roots(), self.modules.bare_parameters(), self._n_replicas > 1)
        self._require_same_tensors(plan.describe())
        settings = f"comm hook {self._hook_name}\n{describe_settings(self._optimizers)}"
        self._world.require_same(settings, self._comm, lambda chiefs: explain_settings(settings, chiefs))
        return plan

    def _sharded_optimizers(self, plan: ModelPlan) -> list[ZeroRedundancyOptimizer]:
        """Return the optimizers that step shares; then the ranks of a host hold parameters once.

        Raises:
            UsageError: when the strategy cannot sum by shares; on every rank alike.
        """
        sharded = [optimizer for optimizer in self._optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]
        if not sharded or self._n_replicas == 1:
            return []
        obstacles: list[str] = []
        if not self.storage.is_private and not self.storage.is_divided:
            obstacles.append("parameters that the strategy itself holds elsewhere")
        if self.sums.rounds is not None:
            obstacles.append("local_steps")
        if self._hook_name is not None:
            obstacles.append("a comm hook")
        reducer = self._reducer
        error = why_not(self._optimizers, plan, reducer.group, reducer.route, self._n_replicas, obstacles)
        if error is not None:
            raise agreed(error)
        if self.storage.is_private:
            if self._slots:
                raise agreed(
                    UsageError(
                        f"ZeroRedundancyOptimizer: expected it to be made before the first use of any model of the "
                        f"scope, got {len(self._slots)} parameters in use; make models and optimizers first."
                    )
                )
            self.storage = HostStorage(self._reducer.group, is_divided=True)
            self._writes = SharedWrites(self._optimizers)
            self.scheduler.add_switched(self._writes)
        return sharded

    def _require_same_tensors(self, description: str) -> None:
        """Raise DesyncError on all ranks unless all describe their tensors alike, one a line."""
        self._world.require_same(description, self._comm, lambda chiefs: explain_difference(description, chiefs))

    @torch.no_grad()
    def _broadcast(self, plan: ModelPlan) -> None:
        if self._comm.size == 1:
            return
        for tensor in [tensor for tensor in plan.tensors() if tensor not in self._broadcast_already]:
            array, dtype = to_array(tensor)
            self._reducer.broadcast(array)
            if self._comm.rank != 0:  # unseen by autograd, as the chief's is: a graph may hold the tensor already
                tensor.data.copy_(from_array(array, dtype))
            self._broadcast_already.add(tensor)

    def _start_generators(self) -> None:
        seed = self._world.broadcast_text(str(torch.initial_seed()), 0, self._comm)
        self.generators.start(int(seed))

    def _plan_buckets(self, plan: ModelPlan) -> None:
        is_sharded = self.storage.is_divided
        for name, parameter in plan.trained:
            if self._slot_of(parameter) is None:
                # not where a dead parameter with the same id was: the order of slots must not differ between ranks
                self._slots.pop(id(parameter), None)
                slot = self._new_slot(name, parameter, plan, is_sharded)
                self._slots[id(parameter)] = slot
                self.backward.hook(slot, parameter)
        slots = [(slot, slot.parameter) for slot in self._slots.values()]
        alive = [(slot, owner) for slot, owner in slots if owner is not None]
        self._require_same_tensors("\n".join(f"{slot.name} {layout(owner)}" for slot, owner in alive))
        self._slots = {id(owner): slot for slot, owner in alive}
        self.sums.plan([slot for slot, _ in alive], [BufferRecord(buffer, tensor) for buffer, tensor in plan.averaged])
        self.backward.require_host(self.sums.slots)
        self._shapes = frozenset(owner.shape for _, owner in alive)
        if self.storage.is_private and self._n_replicas > 1:
            self.sums.states.watch(plan.parameters, self._optimizers)
            end_of_program.watch(self._world, self.sums.states)
            logger.info("all parameters are compared within %d sums", self.sums.states.n_sums_of_rotation)
        self._state.watch([slot for slot, _ in alive], plan.buffers)
        if self._writes is not None:
            shared = [pair for pair in plan.parameters if not is_sharded or self.storage.holds(pair[1])]
            self._writes.watch(shared)

    def _new_slot(self, name: str, parameter: nn.Parameter, plan: ModelPlan, is_sharded: bool) -> Slot:
        if is_sharded:
            return ShardedSlot(name, parameter, self._reducer.group)
        if parameter in plan.sparse:
            return SparseSlot(name, parameter)
        return DenseSlot(name, parameter)

    def _slot_of(self, parameter: nn.Parameter) -> Slot | None:
        slot = self._slots.get(id(parameter))
        return slot if slot is not None and slot.reference() is parameter else None

    def _warn_of_equal_batches(self, batch: Any) -> None:
        """Warn when every rank is fed the same rows, as by a plain DataLoader."""
        if self._comm.size == 1:
            return
        digest = digest_of_batch(batch)
        is_equal = self._world.all_equal(digest, self._comm)
        if is_equal and digest and self._comm.rank == 0:
            logger.warning(
                "strategy: expected each of %d ranks to be fed its own part of the batch, got the same first batch "
                "on all; if it comes from a plain DataLoader, use strategy.experimental_distribute_dataset.",
                self._comm.size,
            )

    def make_local_steps(self, n_steps: int, first_step: int) -> None:
        """Let replicas step on their own gradients, and average every `n_steps` steps, from a step on. Not collective.

        Raises:
            ConfigurationError: where a rank has several replicas, or the ranks share one copy; on all ranks alike.
        """
        if self._n_replicas != self._comm.size or not self.storage.is_private:
            raise agreed(
                ConfigurationError(
                    f"strategy: expected one replica with weights of its own on each of {self._comm.size} ranks for "
                    f"local_steps, got {self._n_replicas} replicas{'' if self.storage.is_private else ' of one copy'}; "
                    f"use MultiWorkerMirroredStrategy without num_replicas."
                )
            )
        if self._n_replicas > 1:
            self.sums.make_rounds(LocalRounds(n_steps, first_step, self._reducer, self.generators, self._world))

    def average_round(self) -> None:
        """Average what local steps have made differ, and end the round; nothing if there were none since the last.

        Collective if there were: all replicas.
        """
        rounds = self.sums.rounds
        if rounds is None or not rounds.is_open:
            return
        named: list[tuple[str, Tensor]] = []
        for slot in self.sums.slots:
            parameter = slot.parameter
            if parameter is not None:
                named.append((slot.name, parameter))
        for record in self.sums.buffers:
            tensor = record.buffer.tensor
            if tensor is not None:
                named.append((record.buffer.name, tensor))
        rounds.average(named, self._optimizers)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let hook(state, bucket) sum each bucket; see `Strategy.register_comm_hook`. Not collective."""
        error = self._why_not_hooked(hook)
        if error is not None:
            raise agreed(error)
        self._hook_name = (
            f"{hook.__module__}.{hook.__qualname__}" if hasattr(hook, "__qualname__") else repr(type(hook))
        )
        self.sums.set_comm_hook(functools.partial(hook, state))

    def _why_not_hooked(self, hook: CommHook) -> UsageError | None:
        if not callable(hook):
            return UsageError(
                f"register_comm_hook: expected hook(state, bucket), got {type(hook).__name__}; pass a function."
            )
        if self._hook_name is not None or self.sums.slots:
            reason = "a planned model" if self._hook_name is None else f"{self._hook_name} registered already"
            return UsageError(
                f"register_comm_hook: expected one call before the first use of a model, got {reason}; register it "
                f"right after the strategy is made."
            )
        if self._n_replicas != self._comm.size or self._reducer.route.wire_dtype is not None:
            reason = "wire_dtype" if self._n_replicas == self._comm.size else f"{self._n_replicas} replicas"
            return UsageError(
                f"register_comm_hook: expected one replica on each of {self._comm.size} ranks, and no wire_dtype, got "
                f"{reason}; leave num_replicas and wire_dtype out."
            )
        return None

    @property
    def comm_hook(self) -> str | None:
        """Name of the registered hook."""
        return self._hook_name

    # -- steps ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Check that the optimizer steps on summed gradients; hide them where another replica or rank steps.

        Returns:
            A closure to be used in place of the given one, after which gradients are checked too.
        """
        has_servers = not self.storage.is_summed
        if self._n_replicas == 1 and not has_servers:
            return None
        parameters = _parameters_of(optimizer)
        if not self._is_ours(optimizer, parameters):
            if self._n_replicas > 1:
                self._require_scope(parameters)
            return None
        if has_servers:
            self._begin_served_step(optimizer, parameters, closure)
            return None
        if self.sums.is_local:
            _require_averageable(optimizer)
        if closure is not None and self.scheduler.replica is not None and self._n_replicas > self._comm.size:
            raise GradientError(
                f"step: expected a step without a closure in strategy.run, as {self._n_replicas} replicas on "
                f"{self._comm.size} ranks take it together, got one; call backward before optimizer.step(), or start "
                f"as many ranks as replicas."
            )
        if self._replica_steps is not None and not self._replica_steps.begin(parameters):
            return None
        self._require_summed(parameters)
        if self._replica_steps is not None:
            self._replica_steps.require_equal(parameters)
        if self._writes is not None:
            self._writes.end()
        self.storage.begin_step(optimizer, parameters)
        return None if closure is None else functools.partial(self._call_closure, closure, optimizer)

    def _begin_served_step(self, optimizer: Optimizer, parameters: list[nn.Parameter], closure: Closure | None) -> None:
        """Begin a step that parameter servers make of the gradients as backward left them."""
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
        if self.storage.needs_sum and has_gradients and self.sums.op.is_mean is not False:
            raise GradientError(
                "step: expected a loss scaled by hpcdist.compute_average_loss, as servers sum the gradients of all "
                "workers, got one that was not; scale it by the global batch."
            )
        if self._writes is not None:
            self._writes.end()
        self.storage.begin_step(optimizer, parameters)

    def _require_summed(self, parameters: list[nn.Parameter]) -> None:
        """Raise GradientError for gradients that no backward has summed; on this rank only."""
        self.backward.require_seen()
        if self.backward.is_running:
            self._require_no_gradients(parameters)
            return
        slots = self._slots
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
                if self.sums.is_local and self._is_local(slot, gradient):
                    continue
            if gradient not in self._own_sums:
                raise self._refusal(parameter)

    def _require_no_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Raise GradientError for a step inside a backward, or after one that failed; on this rank only."""
        hidden = self.backward.hidden_slots()
        for parameter in parameters:
            if parameter.grad is not None or self._slots.get(id(parameter)) in hidden:
                raise self._refusal(parameter)

    def _is_local(self, slot: Slot, gradient: Tensor | None) -> bool:
        """Return whether a gradient is what the calling replica, or the last one, has accumulated."""
        replica = self.scheduler.replica
        if replica is None:
            replica = self.scheduler.replicas[-1]
        return self._state.local.holds(replica, slot, gradient)

    def _call_closure(self, closure: Closure, optimizer: Optimizer) -> Any:
        """Return the loss of a closure, once the gradients that it leaves are checked.

        LBFGS decides by the loss, so it gets that of all replicas: each would take a way of its own otherwise. If the
        closure has reduced something after its backward, that is taken to be the loss. Collective then: all ranks.
        """
        loss = closure()
        self._require_summed(_parameters_of(optimizer))
        has_reduced = self._reducer.group.journal.n_entered > self.sums.n_entered_before
        if not isinstance(optimizer, LBFGS) or has_reduced:
            return loss
        weight = self.sums.last_weight if self.sums.op.is_mean else 1.0
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        sums = np.array([value * weight if weight else 0.0, weight])  # without rows it may be NaN
        self._reducer.sum_array(sums, "loss")
        total = sums[0] / sums[1] if self.sums.op.is_mean else sums[0]
        return loss.new_tensor(total) if isinstance(loss, Tensor) else float(total)

    def note_sums(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are sums over all replicas, which an optimizer may step on as gradients."""
        for tensor in tensors:
            self._own_sums[tensor] = None

    def are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which tensors `note_sums` was given."""
        return [tensor in self._own_sums for tensor in tensors]

    def are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which tensors are gradients as a synchronized backward has left them."""
        if self._n_replicas == 1 or not any(tensor.shape in self._shapes for tensor in tensors):
            return [False] * len(tensors)
        slots = {id(p.grad): slot for slot in self._slots.values() if (p := slot.parameter) is not None}
        return [self._is_sum(slots.get(id(tensor)), tensor) for tensor in tensors]

    def _is_sum(self, slot: Slot | None, gradient: Tensor) -> bool:
        if slot is None or not slot.holds_sum:
            return False
        return slot.is_left(gradient) or self._state.has_given(slot, gradient)

    def note_batch(self, is_over: bool) -> None:
        """Note that this rank got its part of a global batch, which a step will be made of, or that a pass is over."""
        self._n_collectives = None if is_over else (self._reducer.group.journal.n_entered, self._n_in_thread())

    def _n_in_thread(self) -> int:
        """Return how many collectives the communication thread of the group has entered; 0 without one."""
        thread = self._reducer.group.kept("thread")
        return 0 if thread is None else int(thread.group.journal.n_entered)

    def _require_scope(self, parameters: list[nn.Parameter]) -> None:
        """Raise if each rank trains a model of its own on its part of the batches: the scope was forgotten.

        That is so if nobody watches a parameter that has a gradient, and nothing has been reduced since the batch came
        that could be the largest such gradient: a loss is too small to be one. Beside a model of the scope another one
        may be meant to differ, such as a reference: it is logged, once. A rank may optimize plain tensors of its own,
        such as a perturbation of its rows. In `no_sync` the program says that it means it.
        """
        if self._n_collectives is None or not self.backward.is_syncing:
            return
        parameters = [parameter for parameter in parameters if isinstance(parameter, nn.Parameter)]
        unwatched = [parameter for parameter in parameters if not torch_hooks.is_watched(parameter)]
        sizes = [parameter.numel() for parameter in unwatched if parameter.grad is not None]
        n_entered, n_in_thread = self._n_collectives
        if not sizes or self._n_in_thread() != n_in_thread:
            return
        if not self._reducer.group.journal.has_carried(max(sizes), since=n_entered):
            text = (
                f"step: expected a model made in strategy.scope(), as the batches are those of its distributed "
                f"dataset, got one that no strategy looks after: {self._n_replicas} models would be trained apart; "
                f"make model and optimizer in the scope, sum the gradients by hpcdist.all_reduce, or, if they are "
                f"summed otherwise, step in strategy.no_sync()."
            )
            if not any(True for _ in self.modules):
                raise GradientError(text)
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s", text)

    def _refusal(self, parameter: nn.Parameter) -> GradientError:
        """Return the error of a parameter whose gradient is not the sum over the replicas."""
        slot = self._slot_of(parameter)
        if slot is None:
            return GradientError(
                f"step: expected parameters made in strategy.scope() and in use since, got one of shape "
                f"{tuple(parameter.shape)} whose gradient was not summed; build it in the scope before "
                f"strategy.run, enter the scope again after unfreezing, and call the model itself or strategy.run."
            )
        if self.backward.is_running or self._is_local(slot, parameter.grad):
            return GradientError(
                f"step: expected gradients summed over the replicas, got a local one in {slot.name!r}; run the last "
                f"backward outside no_sync and step after it."
            )
        return GradientError(
            f"step: expected the gradient of {slot.name!r} as backward left it, got another tensor; change it in "
            f"place (grad.mul_, grad.copy_) so that every rank changes the same sum."
        )

    def _is_ours(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
        """Return whether an optimizer was built or is used in the scope, or steps a parameter of its modules."""
        if optimizer in self._optimizers:
            return True
        if not self._is_entered():
            managed = self.modules.parameters()
            if not any(parameter in managed for parameter in parameters):
                return False
        self._optimizers.add(optimizer)
        return True

    def _after_step(self, optimizer: Optimizer) -> None:
        """Restore hidden gradients, count the step, and let the other replicas of this process run again."""
        parameters = _parameters_of(optimizer)
        if self._replica_steps is not None and not self._replica_steps.end(parameters):
            return
        is_local = self.sums.is_local
        if not self.storage.is_private and self._is_ours(optimizer, parameters):
            self.storage.end_step(parameters)
        if any(parameter in self._trained for parameter in parameters):
            self.generators.advance()
            self.sums.states.note_step()
            self._world.note_step(self.generators.step)
            self._world.step_flags.count_step(optimizer, self.sums.number)
            if is_local and self.sums.rounds is not None and self.sums.rounds.count_step():
                self.average_round()
        elif self._n_replicas > 1 and optimizer not in self._others:
            self._note_other(optimizer, parameters)
        if self.scheduler.replica is not None and self._is_ours(optimizer, parameters):
            if self._writes is not None:
                self._writes.begin()
            if self._replica_steps is not None:
                self._replica_steps.release()

    def _note_other(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        """Note the first step of an other optimizer; if its parameters are a copy of the model, compare it, too."""
        self._others.add(optimizer)
        shapes = [parameter.shape for _, parameter in self.sums.states.parameters()]
        if shapes and [parameter.shape for parameter in parameters] == shapes:
            copies = self.sums.copies.parameters()
            copies += [(f"parameter {number}", parameter) for number, parameter in enumerate(parameters)]
            self.sums.copies.watch(copies, ())

    def stop_replicas(self) -> None:
        """Forget what several local replicas had begun before an error stopped them."""
        self.backward.stop()
        if self._replica_steps is not None:
            self._replica_steps.stop()


def _require_averageable(optimizer: Optimizer) -> None:
    """Raise GradientError for a local step whose state cannot be averaged, or that one rank may leave out."""
    if isinstance(optimizer, LBFGS):
        raise GradientError(
            "step: expected an optimizer whose state can be averaged with local_steps, got LBFGS; take SGD or Adam."
        )
    if torch_hooks.is_step_of_scaler():
        raise GradientError(
            "step: expected every rank to make each of its local_steps, got a GradScaler, which skips steps on the "
            "ranks whose own gradients overflow; train in bfloat16, which needs none, or leave local_steps out."
        )


def _stepped_by(optimizers: Iterable[Optimizer], plan: ModelPlan) -> Sequence[tuple[str, nn.Parameter]]:
    """Return the parameters of a plan, with their names, that optimizers step."""
    stepped: set[int] = set()
    for optimizer in optimizers:
        stepped.update(id(parameter) for parameter in _parameters_of(optimizer))
    return [(name, parameter) for name, parameter in plan.parameters if id(parameter) in stepped]


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _prepare_engine(
    engines: MutableMapping[nn.Module, GradientEngine], module: nn.Module, args: tuple[Any, ...]
) -> None:
    engine = engines.get(module)
    if engine is not None:
        engine.prepare(args)
