"""What becomes of the gradients of a strategy's models: they are left alone, or summed by a `GradientEngine`."""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.collectives import algorithms
from hpcdist.collectives.objects import all_gather_objects
from hpcdist.errors import UsageError
from hpcdist.gradients.comm_hook import CommHook
from hpcdist.gradients.engine import GradientEngine
from hpcdist.gradients.reducer import Reducer
from hpcdist.program import owners
from hpcdist.program.owners import Stepper
from hpcdist.program.single_replica import SingleReplicaSteps


class Sums(Protocol):
    """What a strategy does with models, and with the gradients of its replicas.

    Where `Strategy` has a method of the same name, its arguments and errors are described there.
    """

    @property
    def is_mean(self) -> bool | None:
        """Whether gradients are averaged, weighted by rows. None if that is not settled."""

    def watching(self) -> AbstractContextManager[None]:
        """Manage every module, parameter and optimizer that is built in the block."""

    def writing(self) -> AbstractContextManager[None]:
        """Let the block write, once for all local replicas, to the parameters that they share."""

    def prepare_run(self, args: Any) -> None:
        """Make models equal before their first use. Collective over the ranks of the role at that use."""

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make the models of the strategy among some objects equal, and end a round of local steps.

        Collective over the ranks of the role if there are such models.
        """

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring the strategy's objects among some to one state, to be saved.

        Collective over the ranks of the role if servers hold any of the objects.
        """

    def publish(self, objects: Iterable[Any]) -> None:
        """Use the values that were loaded into the strategy's objects among some.

        Collective over the ranks of the role if servers hold any of the objects.
        """

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in the scope, or a buffer of a module built there."""

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return who makes the steps of an optimizer."""

    def update(self, variable: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make calls that change a variable, and return their results: None for each where another rank calls.

        Collective over the ranks of the host if they share the variable.
        """

    def stop(self) -> None:
        """Forget the work that replicas had begun before an error stopped them."""

    def note_sums(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are results of an all_reduce."""

    def are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether it is the result of an all_reduce."""

    def note_crossing(self) -> None:
        """Note that a backward goes from each replica's loss into the graphs of other replicas."""

    def are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether it is a gradient that a backward has summed over all replicas."""

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let a hook sum the gradients of each bucket."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate without a sum."""

    def set_row_count(self, n_rows: int) -> None:
        """Weigh this replica's next backward by a number of rows."""

    def take_scaled_loss(self, loss: Any) -> None:
        """Sum gradients from the first backward of this loss on, unless it is known that they are averaged."""

    def mark_scaled(self, loss: Any) -> None:
        """Mark backwards that reach this loss as backwards of a scaled loss; it settles no way to combine gradients."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that the bits of summed gradients depend on."""

    def state_dict(self) -> dict[str, Any]:
        """Return seed and step of the random numbers, and all else that a restart needs.

        Collective over the ranks of the role.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""


class NoSums:
    """`Sums` of a single replica, whose gradients are the sums already.

    Args:
        steps: watches modules and optimizers of the scope, for random numbers keyed by step. None if nobody does.
    """

    is_mean = False

    def __init__(self, steps: SingleReplicaSteps | None = None) -> None:
        self._steps = steps

    def watching(self) -> AbstractContextManager[None]:
        """Watch modules and optimizers that are built in the block, if steps are watched."""
        return nullcontext() if self._steps is None else self._steps.watching()

    def writing(self) -> AbstractContextManager[None]:
        """Let the block write: nobody shares parameters."""
        return nullcontext()

    def prepare_run(self, args: Any) -> None:
        """Do nothing: one replica is equal to itself."""

    def prepare(self, objects: Iterable[Any]) -> None:
        """Do nothing: one replica is equal to itself."""

    def collect(self, objects: Iterable[Any]) -> None:
        """Do nothing: this process has all of the state."""

    def publish(self, objects: Iterable[Any]) -> None:
        """Do nothing: the loaded values are in use."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made in the scope; if steps are not watched, whether no strategy owns it."""
        if self._steps is None:
            return not any(owner.owns(tensor) for owner in owners.alive())
        return self._steps.modules.holds(tensor)

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return that this rank makes the steps."""
        return Stepper.EVERY_RANK

    def update(self, variable: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make the calls, and return their results."""
        return [call() for call in calls]

    def stop(self) -> None:
        """Do nothing: no other replica waits."""

    def note_sums(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: a single replica's gradients are the sums."""

    def are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return that no tensor was noted."""
        return [False] * len(tensors)

    def note_crossing(self) -> None:
        """Do nothing: there are no other graphs."""

    def are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return that no backward has summed anything."""
        return [False] * len(tensors)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Do nothing: a hook is not called with a single replica."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards accumulate, as they do anyhow."""
        return nullcontext()

    def set_row_count(self, n_rows: int) -> None:
        """Do nothing: one replica weighs the same whatever its rows."""

    def take_scaled_loss(self, loss: Any) -> None:
        """Do nothing: the gradient of a single replica is the sum."""

    def mark_scaled(self, loss: Any) -> None:
        """Do nothing: the gradient of a single replica is the sum."""

    def describe(self) -> dict[str, Any]:
        """Return nothing: no bits depend on a sum."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return seed and step of the random numbers, if steps are watched."""
        if self._steps is None:
            return {}
        generators = self._steps.generators
        return {
            "seed": generators.seed,
            "step": generators.step,
            "libraries": [generators.libraries()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random numbers of a checkpoint, if steps are watched."""
        if self._steps is not None:
            self._steps.generators.restore(state["seed"], state["step"], state["libraries"][0])


class EngineSums:
    """`Sums` of several replicas, by a gradient engine.

    Args:
        engine: plans models, and sums what backwards have made.
        reducer: sums buckets.
        is_fixed: whether the number of replicas was given.
    """

    def __init__(self, engine: GradientEngine, reducer: Reducer, is_fixed: bool) -> None:
        self._engine = engine
        self._reducer = reducer
        self._is_fixed = is_fixed

    @property
    def is_mean(self) -> bool | None:
        """Whether gradients are averaged, weighted by rows. None if that is not settled."""
        return self._engine.sums.op.is_mean

    def watching(self) -> AbstractContextManager[None]:
        """Keep every module that is built in the block equal on all ranks."""
        return self._engine.planner.watching()

    def writing(self) -> AbstractContextManager[None]:
        """Let the block write, once for all local replicas, to the parameters that they share."""
        return self._engine.writing()

    def prepare_run(self, args: Any) -> None:
        """Make models equal before their first use."""
        self._engine.planner.prepare_run(args)

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make models that have not been used yet equal, and end a round of local steps."""
        self._engine.planner.prepare_objects(objects)

    def collect(self, objects: Iterable[Any]) -> None:
        """Fetch the values of some objects from servers that hold them."""
        self._engine.managed.storage.collect(objects)

    def publish(self, objects: Iterable[Any]) -> None:
        """Send the loaded values to servers; a round of local steps of models among the objects is over."""
        loaded_objects = list(objects)
        self._engine.managed.storage.publish(loaded_objects)
        rounds = self._engine.sums.rounds
        modules = [item for item in loaded_objects if isinstance(item, nn.Module)]
        if rounds is not None and any(map(self._is_ours, modules)):
            rounds.forget()

    def _is_ours(self, module: nn.Module) -> bool:
        """Return whether a module has a parameter of the scope."""
        return any(map(self.owns, module.parameters()))

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in the scope, or a buffer of a module built there."""
        return self._engine.managed.modules.holds(tensor)

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return who makes the steps of an optimizer: whoever steps one of its parameters."""
        storage = self._engine.managed.storage
        for group in optimizer.param_groups:
            if any(map(storage.holds, group["params"])):
                return storage.stepper
        return Stepper.EVERY_RANK

    def update(self, variable: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make the calls, and return their results; None for each where another rank of the host calls."""
        storage = self._engine.managed.storage
        if not storage.holds(variable):
            return [call() for call in calls]
        with storage.changing() as is_ours:
            if not is_ours:
                return [None] * len(calls)
            return [call() for call in calls]

    def stop(self) -> None:
        """Forget the work that replicas had begun before an error stopped them."""
        self._engine.stop_replicas()

    def note_sums(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are sums, which an optimizer may step on as gradients."""
        self._engine.steps.note_sums(tensors)

    def are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether it is the result of an all_reduce."""
        return self._engine.steps.are_noted(tensors)

    def note_crossing(self) -> None:
        """Note that a backward goes from each replica's loss into the graphs of other replicas."""
        self._engine.backward.note_crossing()

    def are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether it is a gradient that a backward has summed over all replicas."""
        return self._engine.steps.are_summed_gradients(tensors)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let a hook sum the gradients of each bucket."""
        self._engine.planner.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate; a step on gradients that were not summed raises."""
        return self._engine.backward.no_sync()

    def set_row_count(self, n_rows: int) -> None:
        """Weigh this replica's next backward by a number of rows."""
        if n_rows < 0:
            raise UsageError(
                f"set_row_count: expected at least 0 rows, got {n_rows}; give those of this replica."
            )
        scheduler = self._engine.scheduler
        local_index = scheduler.local_index if scheduler.is_running else 0
        self._engine.sums.weights.set_row_count(local_index, operator.index(n_rows))

    def take_scaled_loss(self, loss: Any) -> None:
        """Sum gradients from the first backward of this loss on, unless it is known that they are averaged."""
        if isinstance(loss, torch.Tensor):
            self._engine.backward.take_scaled_loss(loss)

    def mark_scaled(self, loss: Any) -> None:
        """Mark backwards that reach this loss as backwards of a scaled loss."""
        is_summed = self._engine.sums.n_replicas > 1 and self._engine.managed.storage.is_summed
        if isinstance(loss, torch.Tensor) and is_summed:
            self._engine.backward.mark_scaled(loss)

    def describe(self) -> dict[str, Any]:
        """Return the settings that the bits of summed gradients depend on; the number of replicas if it was given."""
        n_replicas = self._engine.sums.n_replicas
        rounds = self._engine.sums.rounds
        return {
            **self._reducer.describe(),
            "replicas": n_replicas if self._is_fixed else None,
            "comm_hook": self._engine.planner.comm_hook,
            "local_steps": None if rounds is None else str(rounds),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return seed and step of the random numbers, the states of each rank's libraries, and AUTO's algorithms.

        Equal on all ranks. Collective over the ranks of the role.
        """
        generators = self._engine.generators
        group = self._reducer.group
        libraries = [generators.libraries()]
        if group.size > 1:
            libraries = all_gather_objects(libraries[0], group.world.role_comm)
        if all(state == libraries[0] for state in libraries):
            libraries = libraries[:1]
        table = algorithms.measurements_of(group)
        return {
            "seed": generators.seed,
            "step": generators.step,
            "algorithms": table,
            "libraries": libraries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random numbers and the measured algorithms of a checkpoint."""
        group = self._reducer.group
        libraries = state["libraries"]
        rank = group.rank if len(libraries) > 1 else 0
        # None for a rank that the saved job did not have: its libraries keep their numbers
        rank_libraries = libraries[rank] if rank < len(libraries) else None
        self._engine.generators.restore(state["seed"], state["step"], rank_libraries)
        if state.get("algorithms"):
            algorithms.restore_measurements(group, state["algorithms"])
