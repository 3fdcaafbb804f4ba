"""The interface of every strategy, and what a strategy does with one replica in this process."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.from_function import DatasetFunction, DistributedFromFunction, datasets_of
from hpcdist.data.nest import Nest
from hpcdist.data.options import InputContext, InputOptions
from hpcdist.data.reading import explaining_empty_parts
from hpcdist.errors import UsageError
from hpcdist.strategy import context
from hpcdist.strategy.local_reduce import Axis, check_axis, reduce_rows
from hpcdist.strategy.reduce_op import ReduceOp


class Strategy:
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

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Make this the current strategy; modules built in the block are kept equal on all replicas.

        Not collective: models are made equal at their first use.
        """
        with context.entered(self, is_replica=False), self._watching():
            yield self

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Return fn(*args, **kwargs), called once for this process's replica.

        Collective at the first use of a model made in the scope, and where `fn` reduces.

        Raises:
            UsageError: when args is no list or tuple.
        """
        if not isinstance(args, (list, tuple)):
            raise UsageError(f"run: expected args as a tuple or list, got {type(args).__name__}; write args=(x,).")
        self._prepare(args)
        with context.entered(self, is_replica=True), explaining_empty_parts((args, kwargs)):
            return fn(*args, **(kwargs or {}))

    def _prepare(self, args: Any) -> None:
        """Make models equal before their first use."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Return `value` reduced over all replicas and, first, over `axis` inside each.

        Collective: all replicas. Same dtype required on every rank: yes; same shape: yes, but for reduced axes.

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length weigh by their length.
            value: this replica's: torch tensor, numpy array or number.
            axis: None (over replicas only), an int, or a tuple or list of ints; negative ones count from the end.

        Returns:
            The same kind of value, on the host, equal on every rank.

        Raises:
            ValueError: for an axis out of range, values of different shape or an unknown op.
            TypeError: for an axis of another type. RuntimeError: inside `run`.
        """
        entry = context.current()
        if entry is not None and entry.is_replica:
            raise RuntimeError(
                "reduce: expected a call outside strategy.run, got one inside; return the value from run and reduce it."
            )
        op = ReduceOp.parse(reduce_op)
        check_axis(axis)
        return reduce_rows(op, value, axis, self._sum_over_replicas)

    def _sum_over_replicas(self, array: Any) -> None:
        """Replace a host array by its sum over all replicas."""

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return this replica's parts of a dataset whose batches are global batches.

        Collective where replicas are on several ranks: they agree on the seed of the order.

        Raises:
            DataError: when `dataset` is no hpcdist.Dataset with a batch size; on every rank alike.
        """
        return DistributedDataset(dataset, range(1), 1, options=options)

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
        return DistributedFromFunction(made, range(1), 1, options=options)

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


_default = Strategy()


def get_strategy() -> Strategy:
    """Return the strategy whose scope or run the caller is in; outside all, the pass-through strategy."""
    entry = context.current()
    return entry.strategy if entry else _default


def strategies_of_losses() -> list[Strategy]:
    """Return the strategies that a loss computed here may belong to: the current one, else all that are alive."""
    entry = context.current()
    return [entry.strategy] if entry else context.alive() or [_default]
