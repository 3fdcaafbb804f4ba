"""The gradient engine: models start identical, and `loss.backward()` leaves the sum over all replicas in `.grad`.

Each strategy has one engine, made of these parts. The planner makes models equal at their first use and plans their
sums. `Backward` takes the gradients of each backward, `GradientSums` sums and publishes them, and `StepChecks` checks
that optimizers step on sums. Every replica joins every bucket of every synchronized backward, and a count per parameter
distinguishes a gradient of zero from no gradient at all.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from hpcdist.errors import ConfigurationError, agreed
from hpcdist.gradients.backward import Backward
from hpcdist.gradients.local_rounds import LocalRounds
from hpcdist.gradients.managed import Managed
from hpcdist.gradients.planner import Planner
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replica_state import ReplicaState
from hpcdist.gradients.step_checks import StepChecks
from hpcdist.gradients.sums import GradientSums
from hpcdist.program.generators import StepGenerators
from hpcdist.program.loop_watch import watch_loop
from hpcdist.replicas.scheduler import ReplicaScheduler, Switched
from hpcdist.runtime.world import World
from hpcdist.storage.storage import Storage


class GradientEngine:
    """Keeps the replicas of one strategy equal.

    Args:
        world: world of the strategy; the ranks of `world.role_comm` hold the replicas, the chief's first.
        reducer: sums buckets over the replicas, and broadcasts the chief's values.
        is_mean: whether gradients are averaged by rows instead of summed; None until it is settled.
        is_entered: function that returns whether the caller is inside the strategy's scope or run.
        has_fixed_replicas: whether the number of replicas was set: random numbers then do not depend on ranks.
        storage: storage of the parameters.

    Attributes:
        managed: the models and optimizers of the scope, and the storage of their parameters.
        scheduler: runs this rank's replicas.
        generators: random numbers keyed by seed, step and replica.
        sums: sums gradients, and publishes the sums.
        backward: takes the gradients of each backward to the sums.
        planner: plans models at their first use.
        steps: checks the gradients that optimizers step on.
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
        self._n_replicas = reducer.replicas.n_replicas
        has_one_copy = storage.is_summed and not storage.is_private
        # replicas of a rank, or the ranks of a host, share parameters
        is_shared = has_fixed_replicas or has_one_copy
        self.managed = Managed(storage, is_shared and self._n_replicas > 1, is_entered)
        replica = None if has_fixed_replicas else world.role_comm.rank
        self.generators = StepGenerators(replica)
        agree = functools.partial(world.agree, comm=world.role_comm)
        state = ReplicaState(reducer.own_replicas, agree)
        switched: list[Switched] = [state, self.generators] if has_fixed_replicas else []
        if self.managed.writes is not None:
            switched.append(self.managed.writes)
        self.scheduler = ReplicaScheduler(reducer.own_replicas, switched)
        self.sums = GradientSums(reducer, is_mean, world.step_flags)
        self.backward = Backward(self.sums, self.scheduler, state, has_fixed_replicas)
        self.planner = Planner(
            self.managed,
            self.sums,
            self.backward,
            state,
            self.scheduler,
            self.generators,
            has_fixed_replicas,
        )
        self.steps = StepChecks(
            self.managed, self.sums, self.backward, state, self.scheduler, self.generators
        )
        if is_mean and self._n_replicas > 1:
            watch_loop(world.step_flags)

    def writing(self) -> AbstractContextManager[None]:
        """Let the block write to parameters in a replica's turn. It writes once for all local replicas."""
        writes = self.managed.writes
        if writes is None:
            return nullcontext()
        return writes.merging()

    def make_local_steps(self, n_steps: int, first_step: int) -> None:
        """Let replicas step on their own gradients from `first_step` on, and average every `n_steps`. Not collective.

        Raises:
            ConfigurationError: where a rank has several replicas, or the ranks share one copy; on all ranks alike.
        """
        n_ranks = self._world.role_comm.size
        is_private = self.managed.storage.is_private
        if self._n_replicas != n_ranks or not is_private:
            replicas = f"{self._n_replicas} replicas"
            if not is_private:
                replicas += " of one copy"
            raise agreed(
                ConfigurationError(
                    f"strategy: expected one replica with weights of its own on each of {n_ranks} ranks for "
                    f"local_steps, got {replicas}; use MultiWorkerMirroredStrategy without num_replicas."
                )
            )
        if self._n_replicas > 1:
            rounds = LocalRounds(
                n_steps, first_step, self.sums.reducer, self.generators, self._world
            )
            self.sums.make_rounds(rounds)

    def stop_replicas(self) -> None:
        """Forget the backwards and steps that several local replicas had begun before an error stopped them."""
        self.backward.stop()
        self.steps.stop()
