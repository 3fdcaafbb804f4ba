"""ClusterCoordinator: one program that schedules functions on workers, as in tf.distribute.coordinator."""

import atexit
from collections.abc import Callable
from typing import Any

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.from_function import DistributedFromFunction
from hpcdist.errors import ConfigurationError, PSUnavailable, UsageError
from hpcdist.nest import map_nest
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.coordination.definitions import Definitions
from hpcdist.strategy.coordination.dispatch import Dispatcher
from hpcdist.strategy.coordination.queue import Closure
from hpcdist.strategy.coordination.values import (
    LOOK_S,
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
)
from hpcdist.strategy.coordination.worker import seed_of
from hpcdist.strategy.parameter_server import ParameterServerStrategy


class ClusterCoordinator:
    """Schedules functions on the workers, which serve, and gets their results.

    The program runs on one rank, the chief. Functions are sent with the objects that they use: modules, optimizers,
    variables and metrics of the scope, datasets and resources of workers by name, all else by value, as with
    cloudpickle. A function begins with values that contain the pushes of all functions that had ended when it was
    scheduled; `optimizer.step()` in it pushes gradients, and gets new values. Its changes of buffers, variables and
    metrics are made on the coordinator when it ends. Learning rates, `train()` or `eval()` of modules, and which
    parameters are frozen, are as at the call of `schedule`. A module is sent once: its parts must not change later.

    A function is run at least once. If its worker falls silent, another worker runs it, too; its pushes stay, and it
    pushes the remaining gradients if its worker goes on. If a function fails, the error is raised by the next
    `schedule`, `join` or `done`, once, and the functions that have not begun are cancelled. No function runs any more
    then, except on silent workers. If a parameter server does not answer, that is PSUnavailable, and stays. A rank
    that dies ends the job, which starts again from its last checkpoint.

    A stop request, to whichever rank, is acted on in `join`, when all functions have ended: a
    `PreemptionCheckpointHandler` saves there. Its steps are the steps of the optimizers. Functions that have not ended
    within the grace period of its TerminationConfig, or 20 s, are waited for no longer: the job ends with code 75, and
    the last save counts. Schedule no more between two `join` than that time allows.

    >>> coordinator = hpcdist.ClusterCoordinator(strategy)
    >>> iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
    >>> for _ in range(100):
    ...     coordinator.schedule(train_step, args=(iterator,))
    >>> coordinator.join()

    Not collective: one rank. There is one coordinator for a strategy: a second call returns it.

    Args:
        strategy: the only one of a job whose workers and servers are in `hpcdist.Server(resolver).join()`.
        closure_timeout_s: seconds after which a function counts as failed: `schedule`, `join` or `done` raise
            ClosureTimeoutError, and its worker is given nothing until it is done. Default: no limit. A second call
            with another value changes nothing.

    Raises:
        UsageError: for another kind of strategy.
        ConfigurationError: where the workers run the program themselves.
    """

    _dispatcher: Dispatcher

    def __new__(
        cls,
        strategy: Strategy,
        closure_timeout_s: float | None = None,
    ) -> "ClusterCoordinator":
        """Return the coordinator of a strategy."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise UsageError(
                f"ClusterCoordinator: expected a ParameterServerStrategy, got {type(strategy).__name__}; make one."
            )
        return strategy.the_coordinator(lambda: object.__new__(cls))

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        closure_timeout_s: float | None = None,
    ) -> None:
        if hasattr(self, "_dispatcher"):  # made by an earlier call
            return
        world = strategy.world
        comm = strategy.closures_comm
        if world.coordinator != world.rank or comm is None:
            raise ConfigurationError(
                f"ClusterCoordinator: expected workers in hpcdist.Server(resolver).join(), got {world.spec}, whose "
                f"workers run the program themselves; let ranks of task_type worker and ps call it."
            )
        self._strategy = strategy
        self._world = world
        self._definitions = Definitions(strategy, strategy.engine, strategy.served)
        if closure_timeout_s is not None and not closure_timeout_s > 0:
            raise UsageError(
                f"ClusterCoordinator: expected closure_timeout_s above 0, got {closure_timeout_s}; leave it out for no "
                f"limit."
            )
        self._dispatcher = Dispatcher(
            world, comm, strategy.client_ranks[1:], self._definitions, closure_timeout_s
        )
        self._n_scheduled = 0
        self._n_steps = 0
        atexit.register(self.leave)

    def leave(self, code: int = -1) -> None:
        """Let the workers leave, once their functions have ended; nothing can be scheduled any more.

        Called when the program ends.

        Args:
            code: exit code of workers and servers; -1 for the exit code of this program.
        """
        atexit.unregister(self.leave)
        if not self._dispatcher.is_over:
            self._dispatcher.stop(code)
            self._strategy.served.client.leave(code)

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy that this is the coordinator of."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue:
        """Let a worker call fn(*args, **kwargs) as soon as one is free, and return a RemoteValue for its result.

        Returns at once, unless 262,144 functions wait already. Where functions take less than 50 ms, a worker gets its
        next function beforehand, which waits for the one that runs. To be called from one thread.

        Args:
            fn: function that is called in the strategy's scope; it may call `strategy.run`. Functions run in any order.
            args: arguments; PerWorkerValues among them become the worker's own values.
            kwargs: arguments by name, treated in the same way.

        Raises:
            UsageError: when it cannot be sent; for a RemoteValue among the arguments.
            Exception: the first one of functions that failed since the last was raised. `fn` is cancelled then.
        """
        if not callable(fn):
            raise UsageError(
                f"schedule: expected a function, got {type(fn).__name__}; pass the function itself."
            )
        self._require_running("schedule")
        payload = self._definitions.dump(fn, tuple(args or ()), dict(kwargs or {}))
        queue = self._dispatcher.queue
        changed = self._dispatcher.changed
        generators = self._strategy.engine.generators
        self._n_scheduled += 1
        closure = Closure(
            number=self._n_scheduled,
            name=getattr(fn, "__name__", type(fn).__name__),
            payload=payload,
            used=(fn, args, kwargs),
            n_before=queue.n_ended,
            seed=seed_of(generators.seed, generators.step, self._n_scheduled),
        )
        self._world.step_flags.begin_round()  # functions push: nothing may be saved until `join`
        with changed:
            while queue.is_full and not queue.has_failed:
                changed.wait(LOOK_S)
            queue.put(closure)
            changed.notify_all()
        self._raise_error()
        return closure.result

    def join(self) -> None:
        """Wait until all functions have ended; bring this rank's variables up to date; act on stop and save requests.

        It waits as long as functions run: those that take longer than HPCDIST_TIMEOUT_S are reported with their stacks.

        Raises:
            Exception: as `schedule`.
            CollectiveTimeoutError: when no worker has been heard of for HPCDIST_TIMEOUT_S.
        """
        self._require_running("join")
        dispatcher = self._dispatcher
        with dispatcher.changed:
            while not (dispatcher.queue.is_idle or dispatcher.queue.has_failed):
                dispatcher.changed.wait(LOOK_S)
        self._raise_error()
        try:
            self._strategy.served.pull()
        except PSUnavailable as error:
            dispatcher.queue.note_error(error)
            raise
        n_new = dispatcher.n_steps - self._n_steps
        self._n_steps = dispatcher.n_steps
        generators = self._strategy.engine.generators
        if n_new:
            generators.restore(generators.seed, generators.step + n_new)
        self._world.step_flags.end_round()
        self._world.step_flags.poll()

    def done(self) -> bool:
        """Return whether all functions have ended. Raises as `schedule`."""
        self._raise_error()
        with self._dispatcher.changed:
            return self._dispatcher.queue.is_idle

    def _require_running(self, call: str) -> None:
        if self._dispatcher.is_over:
            raise UsageError(
                f"{call}: expected workers that serve, got a coordinator that has let them leave; call it before that."
            )

    def _raise_error(self) -> None:
        """Raise the first error, if there is one, once nothing runs any more."""
        queue = self._dispatcher.queue
        changed = self._dispatcher.changed
        with changed:
            if not queue.has_failed:
                return
            queue.cancel_waiting()
            while queue.has_running:
                changed.wait(LOOK_S)
                queue.cancel_waiting()  # functions that were put back
            error = queue.take_error()
        if error is not None:
            raise error

    def fetch(self, val: Any) -> Any:
        """Wait for the RemoteValues of a nest, and return it with their results, as `RemoteValue.fetch` does."""
        return map_nest(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Return a dataset that each worker makes for itself: all of it, nothing is divided among workers.

        Pass `iter` of it to functions, which call `next` on it. Workers make it at its first use, and again when they
        are started again: its position is not saved. Without a given seed each worker has another order.

        Args:
            dataset_fn: a function that returns a dataset, an iterable, or a result of the strategy's `distribute_...`
                methods; or a Dataset or DistributedDataset.

        Raises:
            UsageError: for anything else.
        """
        strategy = self.strategy
        if isinstance(dataset_fn, DistributedDataset):
            dataset = dataset_fn.dataset
            options = dataset_fn.options
            return PerWorkerDataset(
                lambda: strategy.experimental_distribute_dataset(dataset, options)
            )
        if isinstance(dataset_fn, DistributedFromFunction):
            first_dataset = dataset_fn.datasets[0]
            options = dataset_fn.options
            return PerWorkerDataset(
                lambda: strategy.distribute_datasets_from_function(lambda _: first_dataset, options)
            )
        if isinstance(dataset_fn, Dataset):
            return PerWorkerDataset(lambda: dataset_fn)
        if not callable(dataset_fn):
            raise UsageError(
                f"create_per_worker_dataset: expected a dataset or a function that returns one, got "
                f"{type(dataset_fn).__name__}; pass a function."
            )
        return PerWorkerDataset(dataset_fn)

    def create_per_worker_resource(
        self,
        fn: Callable[..., Any],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
    ) -> PerWorkerValues:
        """Return a value that each worker makes by fn(*args, **kwargs) at its first use, such as a compiled function.

        Args:
            fn: function that makes the value.
            args: arguments of the function.
            kwargs: arguments of the function by name.
        """
        positional_args = tuple(args or ())
        named = dict(kwargs or {})
        return PerWorkerValues(lambda: fn(*positional_args, **named))
