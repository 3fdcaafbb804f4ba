"""The plan of a strategy's models: equal on all ranks at their first use, with buckets for their gradients.

Models are planned when they are used, not when they are built: initialisers run later, and modules are copied and
moved. Every rank compares names, shapes, strides, dtypes and settings with the chief's, whose values are broadcast.
"""

import functools
import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import UsageError, agreed
from hpcdist.gradients.backward import Backward
from hpcdist.gradients.buffers import BufferRecord
from hpcdist.gradients.comm_hook import CommHook, name_of_hook
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.managed import Managed
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.sharded import ShardedSlot
from hpcdist.gradients.slot import Slot
from hpcdist.gradients.sparse import SparseSlot
from hpcdist.gradients.sums import GradientSums
from hpcdist.program import end_of_program, owners, torch_hooks
from hpcdist.program.equal_batches import warn_of_equal_batches
from hpcdist.program.generators import StepGenerators
from hpcdist.program.local_metrics import warn_of_local_metrics
from hpcdist.program.model_plan import IdentitySet, ModelPlan, explain_difference, plan_model
from hpcdist.program.settings import describe_settings, explain_settings, parameters_of
from hpcdist.program.tensors import from_array, layout, to_array
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.storage.zero_redundancy import ZeroRedundancyOptimizer, why_not

logger = logging.getLogger("hpcdist")


class Planner:
    """Watches the objects that are built in the scope, and plans them at their first use.

    Args:
        managed: the objects of the strategy.
        sums: sums the gradients of a plan.
        backward: takes part in every backward that reaches a planned parameter.
        state: switches gradients and buffers between replicas.
        scheduler: runs this rank's replicas.
        generators: random numbers keyed by seed, step and replica.
        has_fixed_replicas: whether the number of replicas was set: random numbers then do not depend on ranks.
    """

    def __init__(
        self,
        managed: Managed,
        sums: GradientSums,
        backward: Backward,
        state: ReplicaState,
        scheduler: ReplicaScheduler,
        generators: StepGenerators,
        has_fixed_replicas: bool,
    ) -> None:
        self._managed = managed
        self._sums = sums
        self._backward = backward
        self._state = state
        self._scheduler = scheduler
        self._generators = generators
        self._has_fixed_replicas = has_fixed_replicas
        self._reducer = sums.reducer
        self._world = sums.reducer.group.world
        self._comm = self._world.role_comm
        self._n_replicas = sums.n_replicas
        self._broadcast_already: IdentitySet[Tensor] = IdentitySet()
        #: Ends the watch for the next forward when it is called, or when this object is gone.
        self._end_forward_watch: weakref.finalize[[], Planner] | None = None
        self._hook_name: str | None = None
        self._planned_buffers: set[tuple[int, str]] = set()
        self._planned_modules: set[int] = set()
        late_buffers = torch_hooks.on_buffer_registered(self._see_buffer)
        weakref.finalize(self, late_buffers.remove)

    # -- models ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Manage every module, parameter and optimizer that is built in the block, except in a run.

        During a run, a plan could be made in the middle of a step, which some replicas have begun and others have not.
        """
        try:
            with torch_hooks.on_built(self._see, self._see_parameter, self._see_optimizer):
                yield
        finally:
            # a parameter may have become trainable since the plan was made
            trained = self._managed.trained
            parameters = self._managed.modules.parameters()
            if any(
                parameter.requires_grad and parameter not in trained for parameter in parameters
            ):
                self._plan_at_next_forward()

    def _see(self, module: nn.Module) -> None:
        # a module of a replica alone, such as a loss or a copy; `step` refuses its parameters
        if self._scheduler.is_running:
            return
        self._managed.modules.add(module)
        owners.live_with(module, self)
        self._plan_at_next_forward()

    def _see_parameter(self, parameter: nn.Parameter) -> None:
        if not self._scheduler.is_running:
            self._managed.modules.add_parameter(parameter)
            owners.live_with(parameter, self)  # until the plan, by which it may belong to a module
            self._plan_at_next_forward()

    def _see_buffer(self, module: nn.Module, name: str) -> None:
        """Plan again if a module of the scope gets a new buffer after its first use, such as a mask for pruning."""
        is_late = self.has_plan and (id(module), name) not in self._planned_buffers
        is_known = id(module) in self._planned_modules
        if not is_late or not is_known or self._scheduler.is_running:
            return
        # a buffer that a forward registers for its inputs belongs to this rank alone
        if not torch_hooks.is_in_forward():
            self._plan_at_next_forward()

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        self._managed.optimizers.add(optimizer)
        self._world.step_flags.loop.expect_training(self._sums.number)

    @property
    def has_plan(self) -> bool:
        """Whether every module of the scope is planned, so that no forward will plan again."""
        return self._end_forward_watch is None

    def _plan_at_next_forward(self) -> None:
        """Prepare at the next forward of a managed module."""
        if self._end_forward_watch is None:
            prepare = functools.partial(_prepare_for, weakref.ref(self))
            handle = torch_hooks.before_any_forward(prepare)
            self._end_forward_watch = weakref.finalize(self, handle.remove)

    def prepare_module(self, module: nn.Module, batch: Any) -> None:
        """Do what `prepare` does if a module was made in the scope."""
        if module in self._managed.modules:
            self.prepare(_fed(batch))

    def prepare_run(self, batch: Any) -> None:
        """Do what `prepare` does; draw random numbers by replica from the first call on, with or without a model.

        Collective over `world.role_comm` where `prepare` is, and at the first call with a fixed number of replicas.
        """
        self.prepare(_fed(batch))
        if self._generators.seed is None and self._has_fixed_replicas:
            self._start_generators()
        elif self._generators.seed is None:
            self._generators.start_alone()

    @torch.inference_mode(False)
    def prepare(self, batch: Any = None) -> None:
        """Make the models of the scope equal on all ranks and plan their buckets, if they are not planned yet.

        Collective over `world.role_comm` at the first use of a model.

        Args:
            batch: inputs that the model is about to get, to find ranks that get the same inputs.

        Raises:
            DesyncError, ConfigurationError: on every rank alike, when the models differ or cannot be summed.
        """
        # activation checkpointing runs a forward again
        is_in_backward = torch_hooks.is_in_backward()
        if self._end_forward_watch is None or is_in_backward:
            return
        self._end_forward_watch()
        self._end_forward_watch = None
        is_plain = not torch_hooks.is_transforming()
        with torch_hooks.as_plain_code():
            self._prepare(batch if is_plain else None)

    def prepare_objects(self, objects: Iterable[Any]) -> None:
        """Make models among some objects equal, if they have not been used yet or differ because of local steps.

        Collective over `world.role_comm` if one of them was made in the scope. See `GradientSums.average_round`.
        """
        module_ids: set[int] = set()
        tensors: list[Tensor] = []
        for item in objects:
            if isinstance(item, nn.Module):
                module_ids.update(map(id, item.modules()))
            for copy in getattr(item, "local_copies", (item,)):
                if isinstance(copy, Tensor):
                    tensors.append(copy)
        modules = self._managed.modules
        has_modules = any(id(module) in module_ids for module in modules)
        if has_modules or any(map(modules.holds, tensors)):
            self.prepare()
            self._sums.average_round()

    def _prepare(self, batch: Any) -> None:
        """Plan the models of the scope. Collective over `world.role_comm`."""
        plan = self._agreed_plan()
        self._planned_buffers = {buffer.place for buffer in plan.buffers}
        self._planned_modules = self._managed.modules.ids()
        for module in self._managed.modules:
            for parameter in module.parameters():
                owners.leave(parameter)
        sharded = self._sharded_optimizers(plan)
        self._broadcast(plan)
        storage = self._managed.storage
        named: Sequence[tuple[str, nn.Parameter]] = plan.parameters
        # in the order of buckets, so that shares of parameters lie side by side as gradients do
        if storage.is_divided:
            named = _stepped_by(sharded, plan)[::-1]
        storage.adopt(named, plan.sparse)
        self._start_generators()
        self._managed.train(parameter for _, parameter in plan.trained)
        if self._n_replicas > 1 and storage.is_summed:
            self._plan_slots(plan)
        shares = [slot for slot in self._sums.slots if isinstance(slot, ShardedSlot)]
        for optimizer in sharded:
            optimizer.shard(shares, self._reducer.group)
        if self._n_replicas > 1:
            warn_of_equal_batches(batch, self._world)
            if self._comm.rank == 0:
                warn_of_local_metrics()

    def _agreed_plan(self) -> ModelPlan:
        """Return the plan of the scope's models, which is the same on all ranks. Collective over `world.role_comm`."""
        plan = ModelPlan((), ())
        with self._world.agreed(self._comm, "first use of a model"):
            gc.collect()  # whether an unused module still exists must not differ between ranks
            modules = self._managed.modules
            plan = plan_model(modules.roots(), modules.bare_parameters(), self._n_replicas > 1)
        self._require_same_tensors(plan.describe())
        settings = f"comm hook {self._hook_name}\n{describe_settings(self._managed.optimizers)}"
        self._world.require_same(
            settings, self._comm, lambda chiefs: explain_settings(settings, chiefs)
        )
        return plan

    def _sharded_optimizers(self, plan: ModelPlan) -> list[ZeroRedundancyOptimizer]:
        """Return the optimizers that step shares. If there are any, the ranks of a host hold parameters once.

        Raises:
            UsageError: when the strategy cannot sum by shares; on every rank alike.
        """
        managed = self._managed
        sharded: list[ZeroRedundancyOptimizer] = []
        for optimizer in managed.optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                sharded.append(optimizer)
        if not sharded or self._n_replicas == 1:
            return []
        obstacles: list[str] = []
        if not managed.storage.is_private and not managed.storage.is_divided:
            obstacles.append("parameters that the strategy itself holds elsewhere")
        if self._sums.rounds is not None:
            obstacles.append("local_steps")
        if self._hook_name is not None:
            obstacles.append("a comm hook")
        reducer = self._reducer
        error = why_not(
            managed.optimizers, plan, reducer.group, reducer.route, self._n_replicas, obstacles
        )
        if error is None and managed.storage.is_private and managed.slots:
            error = UsageError(
                f"ZeroRedundancyOptimizer: expected it to be made before the first use of any model of the "
                f"scope, got {len(managed.slots)} parameters in use; make models and optimizers first."
            )
        if error is not None:
            raise agreed(error)
        if managed.storage.is_private:
            self._scheduler.add_switched(managed.divide_storage(reducer.group))
        return sharded

    def _require_same_tensors(self, description: str) -> None:
        """Raise DesyncError on all ranks unless all describe their tensors alike, one a line."""
        self._world.require_same(
            description, self._comm, lambda chiefs: explain_difference(description, chiefs)
        )

    @torch.no_grad()
    def _broadcast(self, plan: ModelPlan) -> None:
        """Give all ranks the chief's values of tensors that were not planned before. Collective over all ranks."""
        if self._comm.size == 1:
            return
        tensors = [tensor for tensor in plan.tensors() if tensor not in self._broadcast_already]
        for tensor in tensors:
            array, dtype = to_array(tensor)
            self._reducer.broadcast(array)
            # unseen by autograd, as on the chief: a graph may hold the tensor already
            if self._comm.rank != 0:
                tensor.data.copy_(from_array(array, dtype))
            self._broadcast_already.add(tensor)

    def _start_generators(self) -> None:
        """Key random numbers by the chief's seed. Collective over all ranks."""
        seed = self._world.broadcast_text(str(torch.initial_seed()), 0, self._comm)
        self._generators.start(int(seed))

    def _plan_slots(self, plan: ModelPlan) -> None:
        """Give each trained parameter a slot, and plan their sums. Collective over all ranks."""
        alive = self._slots_of(plan)  # keeps the parameters alive
        slots: list[Slot] = []
        slots_by_id: dict[int, Slot] = {}
        lines: list[str] = []
        for slot, parameter in alive:
            slots.append(slot)
            slots_by_id[id(parameter)] = slot
            lines.append(f"{slot.name} {layout(parameter)}")
        self._require_same_tensors("\n".join(lines))
        self._managed.use_slots(slots_by_id, {slot.shape for slot in slots})
        buffer_records: list[BufferRecord] = []
        for buffer, tensor in plan.averaged:
            buffer_records.append(BufferRecord(buffer, tensor))
        self._sums.plan(slots, buffer_records)
        self._backward.require_host(self._sums.slots)
        self._state.watch(slots, plan.buffers)
        self._watch_parameters(plan)

    def _slots_of(self, plan: ModelPlan) -> list[tuple[Slot, nn.Parameter]]:
        """Return the slots of earlier plans whose parameters are alive, then those of new parameters."""
        slots = dict(self._managed.slots)
        for name, parameter in plan.trained:
            if self._managed.slot_of(parameter) is None:
                # not at the place of a dead parameter of the same id: the order of slots must not differ between ranks
                slots.pop(id(parameter), None)
                slot = self._new_slot(name, parameter, plan)
                slots[id(parameter)] = slot
                self._backward.hook(slot, parameter)
        pairs: list[tuple[Slot, nn.Parameter]] = []
        for slot in slots.values():
            alive_parameter = slot.parameter
            if alive_parameter is not None:
                pairs.append((slot, alive_parameter))
        return pairs

    def _new_slot(
        self,
        name: str,
        parameter: nn.Parameter,
        plan: ModelPlan,
    ) -> Slot:
        if self._managed.storage.is_divided:
            return ShardedSlot(name, parameter, self._reducer.group)
        if parameter in plan.sparse:
            return SparseSlot(name, parameter)
        return DenseSlot(name, parameter)

    def _watch_parameters(self, plan: ModelPlan) -> None:
        """Compare parameters between ranks, and look for writes to parameters that several replicas share."""
        storage = self._managed.storage
        if storage.is_private:
            states = self._sums.states
            states.watch(plan.parameters)
            end_of_program.watch(self._world, states)
            logger.info("all parameters are compared within %d sums", states.n_sums_of_rotation)
        writes = self._managed.writes
        if writes is None:
            return
        shared: list[tuple[str, nn.Parameter]] = []
        for name, parameter in plan.parameters:
            if not storage.is_divided or storage.holds(parameter):
                shared.append((name, parameter))
        writes.watch(shared)

    # -- comm hooks -------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let hook(state, bucket) sum each bucket; see `Strategy.register_comm_hook`. Not collective."""
        error = self._why_not_hooked(hook)
        if error is not None:
            raise agreed(error)
        self._hook_name = name_of_hook(hook)
        self._sums.set_comm_hook(functools.partial(hook, state))

    def _why_not_hooked(self, hook: CommHook) -> UsageError | None:
        """Return the error for a hook that cannot be registered; None if it can."""
        if not callable(hook):
            return UsageError(
                f"register_comm_hook: expected hook(state, bucket), got {type(hook).__name__}; pass a function."
            )
        if self._hook_name is not None or self._sums.slots:
            reason = "a planned model"
            if self._hook_name is not None:
                reason = f"{self._hook_name} registered already"
            return UsageError(
                f"register_comm_hook: expected one call before the first use of a model, got {reason}; register it "
                f"right after the strategy is made."
            )
        has_one_each = self._n_replicas == self._comm.size
        if not has_one_each or self._reducer.route.wire_dtype is not None:
            reason = "wire_dtype" if has_one_each else f"{self._n_replicas} replicas"
            return UsageError(
                f"register_comm_hook: expected one replica on each of {self._comm.size} ranks, and no wire_dtype, got "
                f"{reason}; leave num_replicas and wire_dtype out."
            )
        return None

    @property
    def comm_hook(self) -> str | None:
        """Name of the registered hook."""
        return self._hook_name


def _fed(batch: Any) -> Any:
    """Return a batch that each rank should have a part of; None without gradients: all ranks may validate the same."""
    if torch.is_grad_enabled():
        return batch
    return None


def _stepped_by(
    optimizers: Iterable[Optimizer],
    plan: ModelPlan,
) -> Sequence[tuple[str, nn.Parameter]]:
    """Return the parameters of a plan, with their names, that optimizers step."""
    stepped_ids: set[int] = set()
    for optimizer in optimizers:
        stepped_ids.update(map(id, parameters_of(optimizer)))
    return [pair for pair in plan.parameters if id(pair[1]) in stepped_ids]


def _prepare_for(
    reference: "weakref.ref[Planner]",
    module: nn.Module,
    args: tuple[Any, ...],
) -> None:
    """Plan before the forward of a module, if it was made in the scope."""
    planner = reference()
    if planner is not None:
        planner.prepare_module(module, args)
