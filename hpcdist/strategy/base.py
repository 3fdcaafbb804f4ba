"""The interface of every strategy, and the strategy of a single replica: scope, run, values and inputs."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.ops import ReduceOp
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.from_function import DatasetFunction, DistributedFromFunction
from hpcdist.data.options import InputOptions
from hpcdist.data.rows import explaining_empty_parts
from hpcdist.errors import UsageError
from hpcdist.gradients.comm_hook import CommHook
from hpcdist.nest import Nest, form_of, leaves, with_leaves
from hpcdist.program import owners, torch_hooks
from hpcdist.program.owners import Stepper
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.strategy import context
from hpcdist.strategy.extended import StrategyExtended
from hpcdist.strategy.inputs import Inputs, OneInput
from hpcdist.strategy.own_gradients import GradientsAndParameters, apply_gradients, offer
from hpcdist.strategy.ranks import Ranks
from hpcdist.strategy.reduce import Axis, check_axis, gather_values, reduce_over_axis, reduce_values
from hpcdist.strategy.replica_context import OnlyReplica, ReplicaContext
from hpcdist.strategy.replicas import OneReplica, Replicas
from hpcdist.strategy.sums import NoSums, Sums
from hpcdist.strategy.values import DistributedValues, local_values, regroup, select


@dataclass(frozen=True)
class Parts:
    """The parts that a strategy is made of. The default parts serve a single replica that nobody watches.

    Attributes:
        replicas: numbers of the replicas, and the operations that combine their values.
        sums: treatment of models and gradients.
        inputs: division of datasets.
        device: device of the tensors and modules that are made in scope and run. None if the caller's code decides.
    """

    replicas: Replicas = field(default_factory=OneReplica)
    sums: Sums = field(default_factory=NoSums)
    inputs: Inputs = field(default_factory=lambda: OneInput(takes_unbatched=True))
    device: torch.device | None = None


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy(Ranks):
    """What tf.distribute.Strategy offers; a process holds one replica unless it asks for more.

    A strategy is the choice of its parts. This class alone is the pass-through strategy: one replica, nothing to
    communicate.

    Args:
        parts: the parts that the strategy is made of; default: the parts of a single replica.

    Attributes:
        replicas, sums, inputs: the strategy's parts, for diagnosis.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        chosen = Parts() if parts is None else parts
        self.replicas = chosen.replicas
        self.sums = chosen.sums
        self.inputs = chosen.inputs
        self._placed = chosen.device
        self._is_pass_through = parts is None
        self._variable_numbers = itertools.count(1)

    def __str__(self) -> str:
        return f"{type(self).__name__}: 1 replica on {self.device}"

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed: num_replicas, or by default one per chief or worker rank."""
        return self.replicas.n_replicas

    @property
    def n_replicas(self) -> int:
        """Number of replicas whose values `reduce`, variables and metrics combine, and that share a global batch."""
        return self.replicas.n_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, logs and saves for the job."""
        return True

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

        Raises:
            RuntimeError: inside `run`, or inside another strategy.
        """
        self.require_cross_replica("scope", "enter it before run")
        with context.entered(self), self._entering():
            yield self

    @contextmanager
    def _entering(self) -> Iterator[None]:
        """Make modules and tensors of the block this strategy's."""
        with (
            self.sums.watching(),
            torch_hooks.on_optimizer_built(functools.partial(offer, self)),
            self._placing(),
        ):
            yield

    @property
    def own_replicas(self) -> range:
        """Numbers of the replicas of this process."""
        return self.replicas.local

    @property
    def scheduler(self) -> ReplicaScheduler:
        """Runs the replicas of this process."""
        return self.replicas.scheduler

    def sum_over_replicas(self, rows: list[Any]) -> Any:
        """Return the sum of flat host arrays, one of each local replica, over all replicas. May overwrite them.

        Collective over the ranks of the role.
        """
        return self.replicas.add(rows)

    def gather_over_ranks(self, rows: Any, error: UsageError | None) -> tuple[Any, int]:
        """Return the joined (rows, ...) host arrays of all ranks, and where this rank's begins; or raise on all.

        Collective over the ranks of the role.
        """
        return self.replicas.append_rows(rows, error)

    def _placing(self) -> AbstractContextManager[Any]:
        """Make tensors of the block on this replica's device; free where that is the default device."""
        device = self._placed_on
        if device is None or device == torch.get_default_device():
            return nullcontext()
        return device

    @property
    def _placed_on(self) -> torch.device | None:
        """The device of tensors and modules made in scope and run. None if the caller's code decides."""
        return self._placed

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return torch.get_default_device() if self._placed is None else self._placed

    @property
    def _parameter_device(self) -> torch.device:
        """The device that the variables are on."""
        return self.device

    # -- objects ----------------------------------------------------------------------------------------------------

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in this scope, or a buffer of a module built in it."""
        return self.sums.owns(tensor)

    def prepare(self, objects: Iterable[Any]) -> None:
        """Make the models of this strategy among some objects equal on all ranks, as their first use does.

        A round of local steps ends. Collective over the ranks of the role if there are such models.
        """
        self.sums.prepare(objects)

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring this strategy's objects among some to one state before a save, from parameter servers if there are any.

        Collective over the ranks of the role if servers hold any of the objects.
        """
        self.sums.collect(objects)

    def publish(self, objects: Iterable[Any]) -> None:
        """Use the values loaded into this strategy's objects among some: send them to parameter servers, if any.

        Collective over the ranks of the role if servers hold any of the objects.
        """
        self.sums.publish(objects)

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """Return which rank makes the steps of an optimizer, and so has its state. Not collective."""
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

        Collective over the ranks of the role at the first use of a model made in the scope, at the first call where
        num_replicas was given, and where `fn` reduces.

        Args:
            fn: function that makes the same calls in the same order on every replica.
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
                self._call, ReplicaContext(self, replica, local_index), fn, args, kwargs or {}
            )
            for local_index, replica in enumerate(self.own_replicas)
        ]
        try:
            return self.replicas.regroup(self.scheduler.run(calls))
        except BaseException:
            self.sums.stop()
            raise

    def _call(
        self,
        replica: ReplicaContext,
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

        Cost: one all-reduce for each dtype, after all gradients are there: `backward` sums while it computes.
        """
        entry = context.current()
        if entry is not None and entry.replica is not None:
            apply_gradients(entry.replica, optimizer, grads_and_params)
        elif self.replicas.is_fixed:
            raise RuntimeError(
                "apply_gradients: expected a call inside strategy.run, got one outside; run the step."
            )
        else:
            self.run(self.apply_gradients, args=(optimizer, grads_and_params))

    def number_variable(self) -> int:
        """Return the number of the next variable: variables are made in the same order on all ranks."""
        return next(self._variable_numbers)

    def _merge_call(
        self,
        replica: ReplicaContext,
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

    # -- values of all replicas -------------------------------------------------------------------------------------

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Return `value` reduced over all replicas and, first, over `axis` inside each.

        Collective over the ranks of the role. Same dtype required on every replica: yes; same shape: yes, but for
        reduced axes.

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length are weighted by their length.
            value: PerReplica, or, with one replica in this process, its value: torch tensor, numpy array or number.
                With several replicas in this process, or where num_replicas above 1 was given, a plain value counts for
                each replica; its SUM with axis None is refused, as in tf.distribute. With axis None also a sparse COO
                tensor, whose entries are joined, and a nest of such values.
            axis: None (over replicas only), an int, or a tuple or list of ints; negative ones count from the end.

        Returns:
            The same kind of value, on the host, equal on every rank.

        Raises, on every rank alike:
            ValueError: for an axis out of range, values of different shape or an unknown op.
            TypeError: for an axis of another type. RuntimeError: inside `run`.
        """
        self.require_cross_replica("reduce", "return the value from run and reduce it")
        op = ReduceOp.parse(reduce_op)
        check_axis(axis)
        if axis is None:
            return with_leaves(value, self.reduce_all(op, leaves(value), form_of(value)))
        values, error = self._values_of("reduce", value, is_everyones=True)
        return reduce_over_axis(self, op, values, axis, error)

    def reduce_all(self, op: ReduceOp, values: Sequence[Any], form: str = "") -> list[Any]:
        """Return several values, each reduced over all replicas; one sum for each dtype.

        Collective over the ranks of the role.

        Args:
            op: SUM or MEAN.
            values: values to reduce, as for `reduce`.
            form: form of the nest whose leaves they are, as text.
        """
        if not values:
            return []
        local_by_value: list[list[Any]] = []
        error: UsageError | None = None
        for value in values:
            values_of_replicas, refusal = self._values_of(
                "reduce", value, is_everyones=op is ReduceOp.MEAN
            )
            local_by_value.append(values_of_replicas)
            error = error or refusal
        by_replica: list[list[Any]] = []
        if error is None:
            by_replica = [list(column) for column in zip(*local_by_value, strict=True)]
        return reduce_values(self, op, by_replica, [form] * len(by_replica), error)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas joined along `axis`, in the order of replicas, on every rank.

        Collective over the ranks of the role. Same dtype and dimensions required on every replica: yes, but for `axis`.

        Args:
            value: PerReplica, or, with one replica in this process, its value: torch tensor or numpy array.
            axis: dimension along which the values are joined; a negative number counts from the end.

        Raises:
            ValueError: for numbers, an axis out of range, or shapes that do not fit.
            RuntimeError: inside `run`, where ReplicaContext.all_gather is meant.
        """
        self.require_cross_replica("gather", "use get_replica_context().all_gather there")
        values, error = self._values_of("gather", value)
        return gather_values(self, values, axis, error)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas as a tuple; a plain value becomes a tuple of one."""
        return local_values(value)

    def _values_of(
        self,
        call: str,
        value: Any,
        is_everyones: bool = False,
    ) -> tuple[list[Any], UsageError | None]:
        """Return the values of this process's replicas, or the error that says why there are none.

        Args:
            call: name of the caller, for messages.
            value: DistributedValues, a variable, or a plain value.
            is_everyones: whether a plain value counts for every replica, as in tf.distribute. Otherwise it is the
                value of the process's only replica, and refused where num_replicas above 1 was given.
        """
        values = local_values(value)
        n_local = len(self.own_replicas)
        is_plain = not isinstance(value, DistributedValues) and not hasattr(value, "local_copies")
        if is_plain and is_everyones:
            return [value] * n_local, None
        is_refused = is_plain and self.replicas.is_fixed and self.num_replicas_in_sync > 1
        if not is_refused and len(values) == n_local:
            return list(values), None
        return [], UsageError(
            f"{call}: expected a PerReplica value of this rank's {n_local} replicas, got {len(values)} "
            f"({type(value).__name__}); pass what strategy.run returned."
        )

    def require_cross_replica(self, call: str, advice: str) -> None:
        """Raise RuntimeError inside `run` and inside `extended.update`."""
        entry = context.current()
        if entry is None:
            return
        if entry.replica is not None:
            where = "replica context, inside it"
        elif entry.updated is not None:
            where = "update context, inside extended.update"
        else:
            return
        raise RuntimeError(
            f"{call}: expected cross-replica context, outside strategy.run, got {where}; {advice}."
        )

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
        """Return this replica's parts of a dataset whose batches are global batches.

        Collective over the ranks of the role, where replicas are on several ranks: they agree on the seed of the order.

        Args:
            dataset: an hpcdist.Dataset with a batch size, or a torch DataLoader, whose batch is the global one then.
                Its workers, sampler and other settings are kept.
            options: options of the input.
            is_sharded: whether the dataset itself gives each rank other rows, as a stream that is cut by rank. Each
                replica then gets its share of the global batch while its rank has rows, and parts without rows until
                all ranks are out of rows; a restart needs the same number of ranks. Streams with workers need it too.

        Raises:
            DataError: when `dataset` is something else; on every rank alike. The pass-through strategy returns a
                dataset without a batch size as it is, as in tf.distribute.
        """
        return self.inputs.distribute(dataset, options, is_sharded)

    def distribute_datasets_from_function(
        self,
        dataset_fn: DatasetFunction,
        options: InputOptions | None = None,
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes for this input pipeline.

        Nothing is divided, batched or mixed here: the function returns batches for one replica, from this pipeline's
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
        """
        return self.sums.no_sync()

    def set_row_count(self, n_rows: int) -> None:
        """Weigh this replica's next backward by a number of rows, with ReduceOp.MEAN.

        For batches that no distributed dataset has handed out, such as the batches of an index loop, and for losses
        that are means over something else, such as tokens or weights: give the number of these. Not collective, but
        every replica must give a number, or none.

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
        """Mark backwards that reach this loss as backwards of a scaled loss; it settles no way to combine gradients."""
        self.sums.mark_scaled(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: random numbers of every rank, steps, and the algorithms that AUTO chose.

        Equal on all ranks. Collective over the ranks of the role, where replicas are on several ranks.
        """
        return self.sums.state_dict()

    def describe_sums(self) -> dict[str, Any]:
        """Return the settings that the bits of summed gradients depend on, for checkpoints. Equal on all ranks."""
        return self.sums.describe()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.sums.load_state_dict(state)


_default = Strategy()
_only_replica = OnlyReplica(_default, 0, 0)


def get_replica_context() -> ReplicaContext | None:
    """Return the caller's replica: the only one outside all strategies; None in a scope or a merge_call."""
    entry = context.current()
    return _only_replica if entry is None else entry.replica


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a scope and in no replica."""
    entry = context.current()
    return entry is not None and entry.replica is None


def has_strategy() -> bool:
    """Return whether the caller is inside a strategy other than the pass-through one."""
    return get_strategy() is not _default


def get_strategy() -> Strategy:
    """Return the strategy whose scope or run the caller is in; outside all, the pass-through strategy."""
    entry = context.current()
    return entry.strategy if entry else _default


def strategies_of_losses() -> list[Strategy]:
    """Return the strategies that a loss may belong to: the current one, else all that are alive."""
    entry = context.current()
    return [entry.strategy] if entry else live_strategies() or [_default]


def live_strategies() -> list[Strategy]:
    """Return the strategies that are alive and whose models are on ranks of a job, in the order of their making."""
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
            f"experimental_set_strategy: expected a call outside every strategy's scope and run, must not be called "
            f"inside one, got the scope of {type(get_strategy()).__name__}; leave it first."
        )
    # the pass-through strategy is the current one outside all scopes
    if strategy is None or strategy._is_pass_through:
        context.enter_everywhere(None, nullcontext())
    else:
        context.enter_everywhere(strategy, strategy._entering())
