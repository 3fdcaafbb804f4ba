"""The interface of every strategy, and what a strategy does with one replica in this process: scope, run and inputs."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DatasetFunction, DistributedDataset, DistributedFromFunction, datasets_of
from hpcdist.data.iterator import Delivery
from hpcdist.data.options import InputContext, InputOptions
from hpcdist.data.rows import explaining_empty_parts
from hpcdist.errors import UsageError
from hpcdist.nest import Nest
from hpcdist.notices import of_one_rank
from hpcdist.strategy import context
from hpcdist.strategy.extended import StrategyExtended
from hpcdist.strategy.reducing import Reducing
from hpcdist.strategy.replica_context import OnlyReplica, ReplicaContext
from hpcdist.strategy.values import PerReplica, regroup, select


@dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy(Reducing):
    """What tf.distribute.Strategy offers, with one replica per process.

    This class alone is the pass-through strategy: one replica, nothing to communicate.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas whose gradients are summed."""
        return 1

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, logs and saves for the job."""
        return True

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
        self._require_cross_replica("scope", "enter it before run")
        with context.entered(self), self._entering():
            yield self

    @contextmanager
    def _entering(self) -> Iterator[None]:
        """Do what makes modules and tensors of the block this strategy's."""
        with self._watching(), self._placing():
            yield

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _placing(self) -> AbstractContextManager[Any]:
        """Make tensors of the block on this replica's device; no time is spent in every call where they are anyway."""
        device = self._placed_on
        is_default = device is None or device == torch.get_default_device()
        return nullcontext() if is_default or device is None else device

    @property
    def _placed_on(self) -> torch.device | None:
        """Where what is made in scope and run is put; None: wherever the caller's code puts it."""
        return None

    @property
    def _device(self) -> torch.device:
        """Where this process computes."""
        return torch.get_default_device()

    @property
    def _parameter_device(self) -> torch.device:
        """Where the variables are."""
        return self._device

    def _has_made(self, variable: Tensor) -> bool:
        return not any(strategy._has_made(variable) for strategy in context.alive())

    def _broadcast(self, value: Tensor) -> Tensor:
        """Return the chief's value."""
        return value

    def _update_copies(self, var: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return [call() for call in calls]

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None, options: Any = None
    ) -> Any:
        """Call fn(*args, **kwargs) for each replica of this process, and return what they return.

        Several replicas run one after another, and meet at the end of a backward, at an optimizer's step (made once, by
        the last one), at `all_reduce`, `all_gather` and `merge_call`. They share the modules' parameters; each has
        gradients, buffers and random numbers of its own. An error in one stops the others.

        Collective at the first use of a model made in the scope, at the first call where num_replicas was given, and
        where `fn` reduces.

        Args:
            fn: the same calls in the same order on every replica.
            args: tuple or list; a DistributedValues in it becomes the replica's own value.
            kwargs: the same, by name.
            options: taken for tf.distribute's sake.

        Returns:
            What `fn` returns, with PerReplica values for leaves; plain values where one replica per rank is the default
            (no num_replicas), or all replicas return the same object.

        Raises:
            UsageError: when args is no list or tuple, or replicas return different structures.
            RuntimeError: inside `run`.
            DesyncError: when the replicas of this process do not make the same calls.
        """
        if not isinstance(args, (list, tuple)):
            raise UsageError(f"run: expected args as a tuple or list, got {type(args).__name__}; write args=(x,).")
        entry = context.current()
        if entry is not None and entry.replica is not None and len(self._own_replicas) > 1:
            raise RuntimeError("run: expected a call outside strategy.run, got one inside; call the function itself.")
        self._prepare(args)
        calls = [
            functools.partial(self._call, ReplicaContext(self, replica, place), fn, args, kwargs or {})
            for place, replica in enumerate(self._own_replicas)
        ]
        try:
            return self._regroup(self._turns.run(calls))
        except BaseException:
            self._stop_replicas()
            raise

    def _call(self, replica: ReplicaContext, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = select(replica.place, args), select(replica.place, kwargs)
        with context.entered(self, replica), self._placing(), explaining_empty_parts((args, kwargs)):
            return fn(*args, **kwargs)

    def _regroup(self, results: Sequence[Any]) -> Any:
        return regroup(results)

    def _stop_replicas(self) -> None:
        """Forget what replicas had begun that an error has stopped."""

    def _merge_call(
        self, replica: ReplicaContext, merge_fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        def combine(brought: list[Any]) -> list[Any]:
            all_args, all_kwargs = regroup(brought)
            with self._turns.between(), context.entered(self):
                result = merge_fn(self, *all_args, **all_kwargs)
            return [select(place, result) for place in range(len(brought))]

        return self._turns.merge("a merge_call", (tuple(args), kwargs), combine)

    def _prepare(self, args: Any) -> None:
        """Make models equal before their first use."""

    def experimental_distribute_values_from_function(self, value_fn: Callable[["ValueContext"], Any]) -> Any:
        """Return value_fn(ValueContext) of each local replica as a PerReplica value; not collective."""
        self._require_cross_replica("experimental_distribute_values_from_function", "call it before run")
        with self._placing():
            return PerReplica([value_fn(ValueContext(one, self.num_replicas_in_sync)) for one in self._own_replicas])

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return this replica's parts of a dataset whose batches are global batches.

        Collective where replicas are on several ranks: they agree on the seed of the order.

        Raises:
            DataError: when `dataset` is no hpcdist.Dataset with a batch size; on every rank alike.
        """
        return DistributedDataset(dataset, range(1), 1, self._delivery(), options)

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Return the batches of the dataset that a function makes for this input pipeline.

        Nothing is divided, batched or mixed here: the function returns batches for one replica, of the rows that are
        this pipeline's, such as by `dataset.shard(context.num_input_pipelines, context.input_pipeline_id)`.

        Collective where replicas are on several ranks, and so is each step of the iteration: it goes on until no rank
        has data, and ranks that are out before get parts with 0 rows.

        Args:
            dataset_fn: called with an InputContext; returns an hpcdist.Dataset with a batch size.
            options: of the input.

        Raises:
            DataError: of the function, or when it returns something else; on every rank alike.
        """
        made = datasets_of(dataset_fn, [InputContext()])
        return DistributedFromFunction(made, range(1), 1, self._delivery(), options)

    def _delivery(self) -> Delivery:
        """Return what is connected to the batches of a new distributed dataset."""
        return Delivery(of_one_rank.poll, device=self._placed_on)

    def experimental_make_numpy_dataset(self, numpy_input: Nest, session: None = None) -> Dataset:
        """Return `Dataset.from_tensor_slices(numpy_input)`; `session` is ignored."""
        return Dataset.from_tensor_slices(numpy_input)

    make_experimental_numpy_dataset = experimental_make_numpy_dataset

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate without a sum; the next one outside sums everything."""
        return nullcontext()

    @property
    def is_summing(self) -> bool:
        """Whether it is known that gradients are summed."""
        return True

    def use_sum_of_scaled_losses(self) -> bool:
        """Sum gradients from now on, as losses are divided by the global batch; False if the strategy averages them."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: seed and step. Equal on all ranks."""
        return {}

    def describe_sums(self) -> dict[str, str | None]:
        """Return what the bits of summed gradients depend on, as recorded with each checkpoint. Equal on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


_default = Strategy()
_only_replica = OnlyReplica(_default, 0, 0)


def get_replica_context() -> ReplicaContext | None:
    """Return the replica that the caller is in; outside all strategies the only one; None in a scope or merge_call."""
    entry = context.current()
    return _only_replica if entry is None else entry.replica


def in_cross_replica_context() -> bool:
    """Return whether the caller is in a scope, but in no replica."""
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
    """Return the strategies that a loss computed here may belong to: the current one, else all that are alive."""
    entry = context.current()
    return [entry.strategy] if entry else context.alive() or [_default]
