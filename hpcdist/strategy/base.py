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
from hpcdist.data.distributed import DistributedInput
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
    """What a strategy is made of. The default parts are those of a single replica that nobody watches.

    Attributes:
        replicas: which replicas there are, and how their values are combined.
        sums: what becomes of models and gradients.
        inputs: how datasets are divided.
        device: where what is made in scope and run is; None: the caller's code decides.
    """

    replicas: Replicas = field(default_factory=OneReplica)
    sums: Sums = field(default_factory=NoSums)
    inputs: Inputs = field(default_factory=lambda: OneInput(takes_unbatched=True))
    device: torch.device | None = None


@dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy(Ranks):
    """What tf.distribute.Strategy offers; a process holds one replica unless it asks for more.

    A strategy is the choice of its parts. This class alone is the pass-through strategy: one replica, nothing to
    communicate.

    Args:
        parts: what the strategy is made of; default: the parts of a single replica.

    Attributes:
        replicas, sums, inputs: its parts, for diagnosis.
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
        """Replicas whose gradients are summed: as many as were asked for, or one per chief or worker rank."""
        return self.replicas.n_replicas

    @property
    def n_replicas(self) -> int:
        """Replicas whose values `reduce`, variables and metrics combine, and that share each global batch."""
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
        """What code that does the strategy's work itself needs, such as an optimizer of its own."""
        return StrategyExtended(self)

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Make this the current strategy; modules built in the block are kept equal on all replicas.

        Not collective: models are made equal at their first use. A scope may be entered again inside itself. Modules
        built inside `run` are the replica's own; with more than one replica, an optimizer that steps them raises.

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
        """The replicas of this process."""
        return self.replicas.local

    @property
    def scheduler(self) -> ReplicaScheduler:
        """Runs the replicas of this process."""
        return self.replicas.scheduler

    def sum_over_replicas(self, rows: list[Any]) -> Any:
        """Return the sum of flat host arrays, one of each local replica, over all replicas. May overwrite them.

        Collective: all ranks.
        """
        return self.replicas.add(rows)

    def gather_over_ranks(self, rows: Any, error: UsageError | None) -> tuple[Any, int]:
        """Return the (rows, ...) host arrays of all ranks joined, and where this rank's begins; or raise on all.

        Collective: all ranks.
        """
        return self.replicas.append_rows(rows, error)

    def _placing(self) -> AbstractContextManager[Any]:
        """Make tensors of the block on this replica's device; free where that is the default device."""
        device = self._placed_on
        is_default = device is None or device == torch.get_default_device()
        return nullcontext() if is_default or device is None else device

    @property
    def _placed_on(self) -> torch.device | None:
        """The device of what is made in scope and run; None: the caller's code decides."""
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

        A round of local steps ends. Collective if there are any: all ranks.
        """
        self.sums.prepare(objects)

    def collect(self, objects: Iterable[Any]) -> None:
        """Bring this strategy's objects among some to one state before a save, from parameter servers if there are any.

        Collective if there is anything to bring: all ranks.
        """
        self.sums.collect(objects)

    def publish(self, objects: Iterable[Any]) -> None:
        """Use what was loaded into this strategy's objects among some: give it to parameter servers if there are any.

        Collective if there is anything to give: all ranks.
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
        """Call fn(*args, **kwargs) for each replica of this process, and return what they return.

        Several replicas run one after another, with barriers at the end of a backward, at an optimizer's step (made
        once, by the last one), at `all_reduce`, `all_gather` and `merge_call`. They share the modules' parameters; each
        has gradients, buffers and random numbers of its own. An error in one stops the others.

        Collective at the first use of a model made in the scope, at the first call where num_replicas was given, and
        where `fn` reduces.

        Args:
            fn: the same calls in the same order on every replica.
            args: tuple or list; a DistributedValues in it becomes the replica's own value.
            kwargs: the same, by name.
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
        self, replica: ReplicaContext, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
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
        self, optimizer: Optimizer, grads_and_params: GradientsAndParameters
    ) -> None:
        """Sum gradients of the program's own over all replicas into `parameter.grad`, and call `optimizer.step()`.

        For gradients that `backward` has not summed, as those of torch.autograd.grad; what it or `all_reduce` has
        summed is not summed again. Optimizers made in the scope have it as a method:
        `optimizer.apply_gradients(zip(gradients, model.parameters()))`.

        Collective: all replicas, inside `run`; with one replica per rank by default (no num_replicas) also outside.

        Args:
            optimizer: of parameters made in the scope. Those that are not given are not stepped.
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

        Collective: all ranks. Same dtype required on every replica: yes; same shape: yes, but for reduced axes.

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length are weighted by their length.
            value: PerReplica, or, with one replica in this process, its value: torch tensor, numpy array or number.
                With several, a plain value counts for each; its SUM with axis None is refused, as in tf.distribute.
                With axis None also a sparse COO tensor, whose entries are joined, and a nest of such values.
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
        """Return several values, each reduced over all replicas; one sum for each dtype. Collective: all ranks.

        Args:
            op: SUM or MEAN.
            values: as for `reduce`.
            form: of the nest that they are the leaves of.
        """
        if not values:
            return []
        local: list[list[Any]] = []  # of each value, those of the local replicas
        error: UsageError | None = None
        for value in values:
            values_of_replicas, refusal = self._values_of(
                "reduce", value, is_everyones=op is ReduceOp.MEAN
            )
            local.append(values_of_replicas)
            error = error or refusal
        by_replica = (
            [] if error is not None else [list(column) for column in zip(*local, strict=True)]
        )
        return reduce_values(self, op, by_replica, [form for _ in by_replica], error)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas joined along `axis`, in the order of replicas, on every rank.

        Collective: all ranks. Same dtype and dimensions required on every replica: yes, but for `axis`.

        Args:
            value: PerReplica, or, with one replica in this process, its value: torch tensor or numpy array.
            axis: negative ones count from the end.

        Raises:
            ValueError: for numbers, an axis out of range, or shapes that do not fit.
            RuntimeError: inside `run`, where ReplicaContext.all_gather is meant.
        """
        self.require_cross_replica("gather", "use get_replica_context().all_gather there")
        values, error = self._values_of("gather", value)
        return gather_values(self, values, axis, error)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas as a tuple; of a plain value, itself alone."""
        return local_values(value)

    def _values_of(
        self, call: str, value: Any, is_everyones: bool = False
    ) -> tuple[list[Any], UsageError | None]:
        """Return the values of this process's replicas, or why there are none: ranks with one replica may have theirs.

        Args:
            call: for messages.
            value: DistributedValues, a variable, or a plain value.
            is_everyones: whether a plain value is every replica's, as in tf.distribute.
        """
        values = local_values(value)
        n_local = len(self.own_replicas)
        is_plain = not isinstance(value, DistributedValues) and not hasattr(value, "local_copies")
        if is_plain and is_everyones:
            return [value] * n_local, None
        is_nobodys = is_plain and self.replicas.is_fixed and self.num_replicas_in_sync > 1
        if not is_nobodys and len(values) == n_local:
            return list(values), None
        return [], UsageError(
            f"{call}: expected a PerReplica value of this rank's {n_local} replicas, got {len(values)} "
            f"({type(value).__name__}); pass what strategy.run returned."
        )

    def require_cross_replica(self, call: str, advice: str) -> None:
        """Raise RuntimeError inside `run` and inside `extended.update`."""
        entry = context.current()
        if entry is not None and (entry.replica is not None or entry.updated is not None):
            where = (
                "update context, inside extended.update"
                if entry.replica is None
                else "replica context, inside it"
            )
            raise RuntimeError(
                f"{call}: expected cross-replica context, outside strategy.run, got {where}; {advice}."
            )

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[["ValueContext"], Any]
    ) -> Any:
        """Return value_fn(ValueContext) of each local replica: a nest of PerReplica values. Not collective.

        Without a strategy: the plain value, as in tf.distribute.
        """
        self.require_cross_replica(
            "experimental_distribute_values_from_function", "call it before run"
        )
        with self._placing():
            values = [
                value_fn(ValueContext(replica, self.num_replicas_in_sync))
                for replica in self.own_replicas
            ]
        return values[0] if self._is_pass_through else regroup(values, has_no_plain=True)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, is_sharded: bool = False
    ) -> DistributedInput | Dataset:
        """Return this replica's parts of a dataset whose batches are global batches.

        Collective where replicas are on several ranks: they agree on the seed of the order.

        Args:
            dataset: an hpcdist.Dataset with a batch size, or a torch DataLoader, whose batch is the global one then.
                Its workers, sampler and other settings are kept.
            options: of the input.
            is_sharded: whether the dataset itself gives each rank other rows, as a stream that is cut by rank. Each
                replica gets its share of the global batch then while its rank has rows, and parts without rows until
                all ranks are out of rows; a restart needs as many ranks. So does one of a stream with workers.

        Raises:
            DataError: when `dataset` is something else; on every rank alike. Without a strategy one without a batch
                size is returned as it is, as in tf.distribute.
        """
        return self.inputs.distribute(dataset, options, is_sharded)

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes for this input pipeline.

        Nothing is divided, batched or mixed here: the function returns batches for one replica, of the rows that are
        this pipeline's, such as by `dataset.shard(context.num_input_pipelines, context.input_pipeline_id)`.

        Collective where replicas are on several ranks, and so is each step of the iteration: it continues until no
        rank has data, and ranks that run out earlier get parts with 0 rows.

        Args:
            dataset_fn: called with an InputContext; returns an hpcdist.Dataset with a batch size.
            options: of the input.

        Raises:
            DataError: of the function, or when it returns something else; on every rank alike.
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
        Counts, row weights and requests to stop travel apart from it, exactly. Not called with a single replica; rows
        of sparse gradients do not go through it.

        Not collective; all ranks register the same hook, before the first use of a model.

        Args:
            state: passed to every call, such as what a compression keeps between steps. It is in no checkpoint.
            hook: gets a `GradBucket`: `buffer()` has this rank's gradients as they enter the sum (with ReduceOp.MEAN
                multiplied by its rows; the strategy divides later). Returns their sum over all ranks, not their mean:
                a tensor, an hpcdist handle, or a torch.futures.Future; None where it overwrote the buffer. It must
                return the same bits on all ranks.

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

        For batches that no distributed dataset has handed out, such as those of an index loop, and for losses that are
        means over something else, such as tokens or weights: give their number. Not collective, but every replica must
        give a number, or none.

        Args:
            n_rows: of this replica, at least 0.

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
        """Mark backwards that reach this loss as those of a scaled loss; it does not settle how gradients combine."""
        self.sums.mark_scaled(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: random numbers of every rank, steps, and which algorithms AUTO chose.

        Equal on all ranks. Collective where replicas are on several ranks.
        """
        return self.sums.state_dict()

    def describe_sums(self) -> dict[str, Any]:
        """Return what the bits of summed gradients depend on, as each checkpoint records it. Equal on all ranks."""
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
    """Return the strategies whose models are on ranks of a job and that are alive, in the order of their making."""
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
    # the pass-through one is what is left without any
    if strategy is None or strategy._is_pass_through:
        context.enter_everywhere(None, nullcontext())
    else:
        context.enter_everywhere(strategy, strategy._entering())
