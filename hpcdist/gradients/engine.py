"""The gradient engine: models start identical, and `loss.backward()` leaves the sum over all replicas in `.grad`.

One engine per strategy. It plans at the first use of a model made in the strategy's scope, and from then on runs the
plan without asking: every replica joins every bucket of every synchronized backward, and a count per parameter tells a
gradient of zero from no gradient at all.
"""

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import GradientError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.backward import BackwardSum
from hpcdist.gradients.buffers import BufferRecord
from hpcdist.gradients.central_storage import CentralStorage
from hpcdist.gradients.generators import StepGenerators
from hpcdist.gradients.merged_buffers import MergedBuffers
from hpcdist.gradients.model_plan import IdentitySet, ModelPlan, ModuleSet, explain_difference, plan_model
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replica_backward import ReplicaBackwardSum
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.tensors import from_array, layout, to_array
from hpcdist.gradients.turns import Switched, Turns
from hpcdist.world import World

logger = logging.getLogger("hpcdist")

#: First bytes of a batch that are compared between ranks.
_COMPARED_BYTES = 1 << 20


class GradientEngine:
    """Keeps the replicas of one strategy equal.

    Args:
        world: who is where; the ranks of `world.role_comm` hold the replicas, the chief's first.
        reducer: sums buckets over the replicas, and broadcasts the chief's values.
        is_mean: whether gradients are averaged by rows instead of summed; None until someone says.
        is_entered: returns whether the caller is inside the strategy's scope or run.
        is_counted: whether the number of replicas was given: random numbers then do not depend on ranks.

    Attributes:
        backward: sums the gradients.
        turns: lets this rank's replicas run.
        generators: random numbers keyed by seed, step and replica.
        storage: holds the parameters once for all ranks; None where each has its own.
    """

    def __init__(
        self,
        world: World,
        reducer: Reducer,
        is_mean: bool | None,
        is_entered: Callable[[], bool],
        is_counted: bool = False,
    ) -> None:
        self._world = world
        self._comm = world.role_comm
        self._is_entered = is_entered
        self._is_counted = is_counted
        self._reducer = reducer
        own, self._n_replicas = reducer.own_replicas, reducer.replicas.n_replicas
        self.generators = StepGenerators(None if is_counted else self._comm.rank)
        self._state = ReplicaState(own[-1])
        self._merged = MergedBuffers(functools.partial(world.agree, comm=self._comm))
        counted: list[Switched] = [self._merged, self.generators] if is_counted else []
        self.turns = Turns(own, [*counted, self._state] if len(own) > 1 else counted)
        self.backward: BackwardSum = (
            BackwardSum(reducer, is_mean)
            if len(own) == 1
            else ReplicaBackwardSum(reducer, is_mean, self.turns, self._state)
        )
        self.backward.notices = world.notices
        self.backward.on_averaged = self._merged.share if is_counted else None
        self.storage: CentralStorage | None = None
        self._stepped: dict[int | None, list[Tensor | None]] = {}
        self._modules = ModuleSet()
        self._keepers: weakref.WeakKeyDictionary[nn.Module, GradientEngine] = weakref.WeakKeyDictionary()
        self._parameters: dict[int, ParameterRecord] = {}
        self._trained: IdentitySet[nn.Parameter] = IdentitySet()
        self._broadcast_already: IdentitySet[Tensor] = IdentitySet()
        self._optimizers: IdentitySet[Optimizer] = IdentitySet()
        self._forward_handle: torch_hooks.Handle | None = None
        for handle in torch_hooks.around_any_step(self._before_step, self._after_step):
            weakref.finalize(self, handle.remove)

    # -- models ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after every module and optimizer that is built in the block, but for modules built in a run in it.

        A plan made in the middle of a step would find replicas that have begun it and others that have not.
        """
        try:
            with torch_hooks.on_built(self._see, self._optimizers.add):
                yield
        finally:
            self._look_again()

    def _see(self, module: nn.Module) -> None:
        if self.turns.is_running:  # a replica's own, such as a loss or a copy; `step` refuses its parameters
            return
        self._modules.add(module)
        self._keepers[module] = self
        self._expect_use()

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer of a module built in the scope."""
        return self._modules.holds(tensor)

    def _look_again(self) -> None:
        """Plan anew at the next use when a parameter that is trained now was not when the plan was made."""
        if any(p.requires_grad and p not in self._trained for p in self._modules.parameters()):
            self._expect_use()

    def _expect_use(self) -> None:
        """Prepare at the next forward of a module of ours. Till then modules keep the engine alive, then parameters."""
        if self._forward_handle is None:
            for module in self._modules:
                self._keepers[module] = self
            self._forward_handle = torch_hooks.before_any_forward(functools.partial(_prepare_keeper, self._keepers))
            weakref.finalize(self, self._forward_handle.remove)

    def prepare_run(self, batch: Any) -> None:
        """Do what `prepare` does; counted replicas draw numbers of their own from then on, with a model or without.

        Collective as `prepare`, and at the first call where replicas are counted: `world.role_comm`.
        """
        self.prepare(batch)
        if self._is_counted and self.generators.seed is None:
            self._start_generators()

    @torch.inference_mode(False)
    def prepare(self, batch: Any = None) -> None:
        """Make the models of the scope equal on all ranks and plan their buckets, if that is not done yet.

        Collective at the first use of a model: `world.role_comm`.

        Args:
            batch: what the model is about to be fed, to find ranks that are fed the same.

        Raises:
            DesyncError, ConfigurationError: on every rank alike, when the models differ or cannot be summed.
        """
        if self._forward_handle is None or torch_hooks.backward_id() != -1:  # a checkpoint runs its part again: not now
            return
        self._forward_handle.remove()
        self._forward_handle = None
        self._keepers.clear()
        plan = self._agreed_plan()
        self._broadcast(plan)
        if self.storage is not None:
            self.storage.adopt(plan.parameters)
        self._start_generators()
        self._trained = IdentitySet(parameter for _, parameter in plan.trained)
        if self._n_replicas > 1:
            self._plan_buckets(plan)
            self._warn_of_equal_batches(batch)

    def _agreed_plan(self) -> ModelPlan:
        plan = ModelPlan((), ())
        with self._world.agreed(self._comm):
            gc.collect()  # whether a module that nobody uses is still there must not differ between ranks
            plan = plan_model(self._modules.roots())
        self._agree_on(plan.describe())
        return plan

    def _agree_on(self, own: str) -> None:
        """Raise DesyncError on all ranks unless all describe their tensors alike, one a line."""
        if not self._world.all_equal(own, self._comm):
            chiefs = self._world.broadcast_text(own, 0, self._comm)
            self._world.agree(None if own == chiefs else explain_difference(own, chiefs), self._comm)

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
        for name, parameter in plan.trained:
            if self._record_of(parameter) is None:
                self._parameters.pop(id(parameter), None)  # of one that is gone: its place would differ between ranks
                record = self._parameters[id(parameter)] = ParameterRecord(name, parameter)
                self.backward.hook(record, parameter)
        records = [(record, record.parameter) for record in self._parameters.values()]
        alive = [(record, owner) for record, owner in records if owner is not None]
        self._agree_on("\n".join(f"{record.name} {layout(owner)}" for record, owner in alive))
        self._parameters = {id(owner): record for record, owner in alive}
        self.backward.plan(alive, [BufferRecord(place, tensor) for place, tensor in plan.averaged])
        self._state.watch([record for record, _ in alive], plan.buffers)
        self._merged.watch(plan.buffers)

    def _record_of(self, parameter: nn.Parameter) -> ParameterRecord | None:
        record = self._parameters.get(id(parameter))
        return record if record is not None and record.parameter is parameter else None

    def _warn_of_equal_batches(self, batch: Any) -> None:
        """Say so when every rank is fed the same rows: a plain DataLoader does that."""
        if self._comm.size == 1:
            return
        digest = _digest(batch)
        is_equal = self._world.all_equal(digest, self._comm)
        if is_equal and digest and self._comm.rank == 0:
            logger.warning(
                "strategy: expected each of %d ranks to be fed its own part of the batch, got the same first batch "
                "on all; if it comes from a plain DataLoader, use strategy.experimental_distribute_dataset.",
                self._comm.size,
            )

    # -- steps ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._n_replicas == 1:
            return
        parameters = _parameters_of(optimizer)
        if not self._is_ours(optimizer, parameters):
            return
        if len(self.turns.replicas) > 1 and self.turns.replica is not None:
            self.turns.meet("an optimizer's step")
            if not self.turns.is_last:
                self._take_gradients(self.turns.replica, parameters)
                return
        for parameter in parameters:
            self._check_gradient(parameter)
        if self.storage is not None and not self.storage.begin_change():
            self._take_gradients(self.turns.replica, parameters)

    def _take_gradients(self, replica: int | None, parameters: list[nn.Parameter]) -> None:
        """Leave the optimizer nothing to do: the last replica has made the step, or the chief makes it."""
        self._stepped[replica] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _is_ours(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
        """Return whether an optimizer was built or is used in the scope, or steps a parameter of its modules."""
        if optimizer not in self._optimizers and not self._is_entered():
            known = self._modules.parameters()
            if not any(parameter in known for parameter in parameters):
                return False
        self._optimizers.add(optimizer)
        return True

    def _check_gradient(self, parameter: nn.Parameter) -> None:
        record = self._record_of(parameter)
        if parameter.grad is None:
            return
        if record is None:
            raise GradientError(
                f"step: expected parameters made in strategy.scope() and in use since, got one of shape "
                f"{tuple(parameter.shape)} whose gradient was not summed; build it in the scope before "
                f"strategy.run, enter the scope again after unfreezing, and call the model itself or strategy.run."
            )
        if record.is_local or self.backward.is_running:
            raise GradientError(
                f"step: expected gradients summed over the replicas, got a local one in {record.name!r}; run the last "
                f"backward outside no_sync and step after it."
            )
        if not record.is_trustworthy(parameter):
            raise GradientError(
                f"step: expected the gradient of {record.name!r} as backward left it, got another tensor; change it in "
                f"place (grad.mul_, grad.copy_) so that every rank changes the same sum."
            )

    def stop_replicas(self) -> None:
        """Forget what several local replicas had begun that an error has stopped."""
        self._stepped.clear()
        if isinstance(self.backward, ReplicaBackwardSum):
            self.backward.stop()

    def _give_gradients_back(self, replica: int | None, parameters: list[nn.Parameter]) -> None:
        for parameter, gradient in zip(parameters, self._stepped.pop(replica), strict=True):
            if parameter.grad is not None:
                raise GradientError(
                    "step: expected a step without a closure, as one rank steps for all, got a gradient made in it; "
                    "call backward before optimizer.step()."
                )
            parameter.grad = gradient

    def _after_step(self, optimizer: Optimizer) -> None:
        replica, parameters = self.turns.replica, _parameters_of(optimizer)
        if replica in self._stepped:
            self._give_gradients_back(replica, parameters)
            if replica is not None and not self.turns.is_last:
                return
        if self.storage is not None and self._is_ours(optimizer, parameters):
            self.storage.end_change()
        if any(parameter in self._trained for parameter in parameters):
            self.generators.advance()
            self._world.step = self.generators.step
            self._world.notices.n_steps += 1
        if replica is not None and self._n_replicas > 1 and self._is_ours(optimizer, parameters):
            self.turns.part()


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _prepare_keeper(
    keepers: "weakref.WeakKeyDictionary[nn.Module, GradientEngine]", module: nn.Module, args: tuple[Any, ...]
) -> None:
    engine = keepers.get(module)
    if engine is not None:
        engine.prepare(args)


def _digest(batch: Any) -> str:
    """Return a digest of the first tensor with rows in `batch`; empty text when there is none."""
    if isinstance(batch, Tensor) and batch.layout is torch.strided and batch.dim() > 0 and batch.numel() > 0:
        array = to_array(batch)[0].reshape(-1).view("u1")
        return xxhash.xxh3_64_hexdigest(array[:_COMPARED_BYTES].tobytes())
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next(filter(None, (_digest(item) for item in items)), "")
