"""The interface of every strategy, and the strategy of a single replica: scope, run and inputs."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import Optimizer

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.from_function import DatasetFunction, DistributedFromFunction
from hpcdist.data.options import InputOptions
from hpcdist.data.rows import explaining_empty_parts
from hpcdist.errors import UsageError
from hpcdist.gradients.comm_hook import CommHook
from hpcdist.nest import Nest
from hpcdist.program import owners, torch_hooks
from hpcdist.program.owners import Stepper
from hpcdist.strategy import context
from hpcdist.strategy.cross_replica_context import CrossReplicaContext
from hpcdist.strategy.extended import StrategyExtended
from hpcdist.strategy.own_gradients import GradientsAndParameters, apply_gradients, offer
from hpcdist.strategy.values import regroup, select


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy(CrossReplicaContext):
    """What tf.distribute.Strategy offers; a process holds one replica unless it asks for more.

    A strategy is the choice of its parts. This class alone is the pass-through strategy: one replica, nothing to
    communicate.

    Args:
        parts: the parts that the strategy is made of; default: the parts of a single replica.

    Attributes:
        replicas, sums, inputs: the strategy's parts, for hpcdist's own modules and for diagnosis.
    """

    def __str__(self) -> str:
        return f"{type(self).__name__}: 1 replica on {self.device}"

    @property
    def cluster_resolver(self) -> Any:
        """Who is in the cluster; None without one, as in tf.distribute."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """The interface for code that does the strategy's work itself, such as an optimizer written by the user."""
        return StrategyExtended(self)

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Make this the current strategy; modules built in the block are kept equal on all replicas.

        Not collective: models are made equal at their first use. A scope may be entered again inside itself. Modules
        built inside `run` belong to the replica; with more than one replica, an optimizer that steps them raises.

        >>> with strategy.scope():
        ...     model = torch.nn.Linear(4, 3)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        Raises:
            RuntimeError: inside `run`, or inside another strategy.
        """
        self.require_cross_replica("scope", "enter it before run")
        with context.entered(self), self._entering():
            yield self

    @contextmanager
    def _entering(self) -> Iterator[None]:
        """Let modules and tensors that are made in the block belong to this strategy."""
        with (
            self.sums.watching(),
            torch_hooks.on_optimizer_built(functools.partial(offer, self)),
            self._placing(),
        ):
            yield

    # -- objects ----------------------------------------------------------------------------------------------------

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make those of the objects that are models of this strategy equal on all ranks, as their first use does.

        A round of local steps ends. Collective over the ranks of the role if there are such models.
        """
        self.sums.prepare(objects)

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring those of the objects that are this strategy's to one state before a save.

        Values on parameter servers are fetched.

        Collective over the ranks of the role if servers hold any of the objects.
        """
        self.sums.collect(objects)

    def publish(self, objects: Iterable[Any]) -> None:
        """Use the values loaded into those of the objects that are this strategy's; send them to servers, if any.

        Collective over the ranks of the role if servers hold any of the objects.
        """
        self.sums.publish(objects)

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return who makes the steps of an optimizer, and so has its state. Not collective."""
        return self.sums.stepper_of(optimizer)

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call fn(*args, **kwargs) for each replica of this process, and return the results of all calls.

        Several replicas run one after another, with barriers at the end of a backward, at an optimizer's step (made
        once, by the last replica), at `all_reduce`, `all_gather` and `merge_call`. They share the modules' parameters;
        gradients, buffers and random numbers exist once per replica. An error in one replica stops all of them.

        Collective over the ranks of the role at the first use of a model made in the scope, at the first call of `run`
        if num_replicas was given, and where `fn` reduces.

        >>> for batch in batches:
        ...     strategy.run(train_step, args=batch)

        Args:
            fn: function. The calls in it that wait for other replicas (backward, step, all_reduce ...) are the same,
                in the same order, on every replica.
            args: tuple or list of arguments; a DistributedValues in it becomes the replica's own value.
            kwargs: arguments by name, treated in the same way.
            options: accepted for compatibility.

        Returns:
            What `fn` returns, with PerReplica values for leaves; plain values where one replica per rank is the default
            (no num_replicas), or all replicas return the same object.

        Raises:
            UsageError: when args is not a list or tuple, or replicas return different structures; where num_replicas
                was given, when `fn` writes to parameters or optimizers' settings outside of a step or `merge_call`.
            RuntimeError: inside `run`, as in tf.distribute; without a strategy it may be nested.
            DesyncError: when the replicas of this process do not make the same calls.
        """
        if not isinstance(args, (list, tuple)):
            raise UsageError(
                f"run: expected args as a tuple or list, got {type(args).__name__}; write args=(x,)."
            )
        entry = context.current()
        if entry is not None and entry.replica is not None and not self._is_pass_through:
            raise RuntimeError(
                "run: expected a call outside strategy.run, got one inside; call the function itself."
            )
        self.sums.prepare_run(args)
        calls = [
            functools.partial(
                self._call, context.Replica(number, local_index), fn, args, kwargs or {}
            )
            for local_index, number in enumerate(self.own_replicas)
        ]
        try:
            return self.replicas.regroup(self.scheduler.run(calls))
        except BaseException:
            self.sums.stop()
            raise

    def _call(
        self,
        replica: context.Replica,
        fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        args = select(replica.local_index, args)
        kwargs = select(replica.local_index, kwargs)
        with (
            context.entered(self, replica),
            self._placing(),
            explaining_empty_parts((args, kwargs)),
        ):
            return fn(*args, **kwargs)

    def apply_gradients(
        self,
        optimizer: Optimizer,
        grads_and_params: GradientsAndParameters,
    ) -> None:
        """Sum gradients of the program's own over all replicas into `parameter.grad`, and call `optimizer.step()`.

        For gradients that `backward` has not summed, such as the results of torch.autograd.grad; gradients that
        `backward` or `all_reduce` has summed are not summed again. Optimizers made in the scope have it as a method:
        `optimizer.apply_gradients(zip(gradients, model.parameters()))`.

        Collective over all replicas, inside `run`; with one replica per rank by default (no num_replicas) also outside.

        Args:
            optimizer: optimizer of parameters made in the scope. Parameters that no pair names are not stepped.
            grads_and_params: pairs as from zip, of the same parameters in the same order on every replica. A gradient
                has its parameter's shape and dtype, or is None: a parameter with None on all replicas is not stepped.

        Raises:
            UsageError: for parameters of another optimizer, other shapes, gradients of which some are sums already, and
                replicas whose gradients do not fit together.
            RuntimeError: outside `run`, where num_replicas was given.

        Cost: one all-reduce for each dtype, after all gradients are there, whereas `backward` sums while it computes.
        """
        entry = context.current()
        if entry is not None and entry.replica is not None:
            apply_gradients(get_strategy(), optimizer, grads_and_params)
        elif self.replicas.is_fixed:
            raise RuntimeError(
                "apply_gradients: expected a call inside strategy.run, got one outside; run the step."
            )
        else:
            self.run(self.apply_gradients, args=(optimizer, grads_and_params))

    def _merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        def combine(contributed: list[Any]) -> list[Any]:
            all_args, all_kwargs = regroup(contributed, self.replicas.is_fixed, keeps_objects=False)
            with self.scheduler.merging(), context.entered(self):
                result = merge_fn(self, *all_args, **all_kwargs)
            return [select(local_index, result) for local_index in range(len(contributed))]

        return self.scheduler.merge("a merge_call", (tuple(args), kwargs), combine)

    def experimental_distribute_values_from_function(
        self,
        value_fn: Callable[["ValueContext"], Any],
    ) -> Any:
        """Return value_fn(ValueContext) of each local replica as a nest of PerReplica values. Not collective.

        The pass-through strategy returns the plain value, as in tf.distribute.
        """
        self.require_cross_replica(
            "experimental_distribute_values_from_function", "call it before run"
        )
        with self._placing():
            values = [
                value_fn(ValueContext(replica, self.num_replicas_in_sync))
                for replica in self.own_replicas
            ]
        if self._is_pass_through:
            return values[0]
        return regroup(values, has_no_plain=True)

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        is_sharded: bool = False,
    ) -> DistributedInput | Dataset:
        """Return the parts that this rank's replicas have of a dataset whose batches are global batches.

        Collective over the ranks of the role, where replicas are on several ranks: they agree on the seed of the order.

        >>> dataset = hpcdist.Dataset.from_tensor_slices((x, y)).shuffle(seed=1).batch(16)
        >>> batches = strategy.experimental_distribute_dataset(dataset)
        >>> len(batches)
        2

        Args:
            dataset: an hpcdist.Dataset with a batch size, or a torch DataLoader, whose batches are the global batches.
                Its workers, sampler and other settings are kept.
            options: options of the input.
            is_sharded: whether the dataset itself gives each rank other rows, as a stream that is cut by rank. Each
                replica then gets its share of the global batch while its rank has rows, and parts without rows until
                all ranks are out of rows; a restart needs the same number of ranks. An iterable dataset whose
                DataLoader has workers needs it, too.

        Returns:
            The parts, batch by batch. The pass-through strategy returns a dataset without a batch size as it is, as in
            tf.distribute.

        Raises:
            DataError: when `dataset` is something else; on every rank alike.
        """
        return self.inputs.distribute(dataset, options, is_sharded)

    def distribute_datasets_from_function(
        self,
        dataset_fn: DatasetFunction,
        options: InputOptions | None = None,
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes for this input pipeline.

        Nothing is divided, batched or shuffled here: the function returns batches for one replica, from this pipeline's
        rows, such as those of `dataset.shard(context.num_input_pipelines, context.input_pipeline_id)`.

        Collective over the ranks of the role, where replicas are on several ranks, and so is each step of the
        iteration: it continues until no rank has data, and ranks that run out earlier get parts with 0 rows.

        Args:
            dataset_fn: function of an InputContext that returns an hpcdist.Dataset with a batch size.
            options: options of the input.

        Raises:
            DataError: when the function raises it, or returns something else; on every rank alike.
        """
        return self.inputs.distribute_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Nest, session: None = None) -> Dataset:
        """Return `Dataset.from_tensor_slices(numpy_input)`; `session` is ignored."""
        return Dataset.from_tensor_slices(numpy_input)

    make_experimental_numpy_dataset = experimental_make_numpy_dataset

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let hook(state, bucket) sum the gradients of each bucket, as torch DDP's method does.

        Called on every rank at the end of each synchronized backward, with one bucket after another; all are started
        before the first is waited for. The collectives of a hook are hpcdist's, such as `hpcdist.all_reduce_async`.
        Counts, row weights and requests to stop travel apart from it, exactly. The hook is not called with a single
        replica; rows of sparse gradients do not go through it.

        Not collective; all ranks register the same hook, before the first use of a model.

        Args:
            state: object that is passed to every call, such as the errors that a compression carries from step to
                step. It is in no checkpoint.
            hook: function of the state and a `GradBucket`, whose `buffer()` has this rank's gradients as they enter the
                sum (with ReduceOp.MEAN multiplied by its rows; the strategy divides later). It returns their sum over
                all ranks, not their mean: a tensor, an hpcdist handle, or a torch.futures.Future; None where it
                overwrote the buffer. It must return the same bits on all ranks.

        Raises:
            UsageError: after the first use of a model, for a second hook, and with num_replicas or wire_dtype; on every
                rank alike.

        Cost: one more small all-reduce for the counts; buckets between hosts do not start while backward runs.
        """
        self.sums.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate this replica's gradients; the next one outside sums everything.

        `step` on gradients that were not summed raises.

        >>> with strategy.no_sync():
        ...     loss_of(x[:16], y[:16]).backward()
        >>> loss_of(x[16:], y[16:]).backward()  # sums the gradients of both
        """
        return self.sums.no_sync()

    def set_row_count(self, n_rows: int) -> None:
        """Weigh this replica's next backward by a number of rows, with ReduceOp.MEAN.

        For batches that no distributed dataset has handed out, such as the batches of a loop over indices, and for
        losses
        that are means over something else, such as tokens or weights: give the number of these. Not collective, but
        all replicas give a number, or no replica does.

        Args:
            n_rows: number of rows of this replica, at least 0.

        Raises:
            UsageError: for a negative number; on this rank only.
        """
        self.sums.set_row_count(n_rows)

    @property
    def is_summing(self) -> bool:
        """Whether gradients are known to be summed."""
        return self.sums.is_mean is False

    @property
    def is_averaging(self) -> bool:
        """Whether it is known that gradients are averaged."""
        return self.sums.is_mean is True

    def take_scaled_loss(self, loss: Any) -> None:
        """Sum gradients from the first backward of this loss on, unless it is known that they are averaged."""
        self.sums.take_scaled_loss(loss)

    def mark_scaled(self, loss: Any) -> None:
        """Mark backwards that reach this loss as of a scaled loss; it does not decide whether gradients are summed."""
        self.sums.mark_scaled(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: random numbers, steps, and the algorithms that AUTO chose.

        Random numbers are torch's seed, and the states of Python's and numpy's generators on each rank.
        Equal on all ranks. Collective over the ranks of the role, where replicas are on several ranks.
        """
        return self.sums.state_dict()

    def describe_sums(self) -> dict[str, Any]:
        """Return the settings that the bits of summed gradients depend on, for checkpoints. Equal on all ranks."""
        return self.sums.describe()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.sums.load_state_dict(state)


#: The strategy of code outside all scopes.
pass_through = Strategy()


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a scope and in no replica."""
    entry = context.current()
    return entry is not None and entry.replica is None


def has_strategy() -> bool:
    """Return whether the caller is inside a strategy other than the pass-through one."""
    return get_strategy() is not pass_through


def get_strategy() -> Strategy:
    """Return the strategy whose scope or run the caller is in; outside all, the pass-through strategy.

    >>> with strategy.scope():
    ...     hpcdist.get_strategy() is strategy
    True
    """
    entry = context.current()
    if entry is None:
        return pass_through
    assert isinstance(entry.strategy, Strategy), "only strategies are entered"
    return entry.strategy


def strategies_of_losses() -> list[Strategy]:
    """Return the strategies that a loss may belong to: the current one, else all that are alive."""
    if context.current() is not None:
        return [get_strategy()]
    return live_strategies() or [pass_through]


def live_strategies() -> list[Strategy]:
    """Return the strategies over ranks, such as MultiWorkerMirroredStrategy, that are alive, oldest first."""
    return [owner for owner in owners.alive() if isinstance(owner, Strategy)]


def mark_scaled(loss: Any) -> None:
    """Mark a loss as scaled for every live strategy: one backward may reach models of several."""
    for strategy in live_strategies():
        strategy.mark_scaled(loss)


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's scope for all code that follows, in every thread; None leaves it again.

    Raises:
        RuntimeError: inside a strategy's scope or run.
    """
    if context.is_inside():
        raise RuntimeError(
            f"experimental_set_strategy: expected a call outside every strategy's scope and run, got one inside "
            f"{type(get_strategy()).__name__}'s; leave it first."
        )
    # the pass-through strategy is the current one outside all scopes
    if strategy is None or strategy._is_pass_through:
        context.enter_everywhere(None, nullcontext())
    else:
        context.enter_everywhere(strategy, strategy._entering())
