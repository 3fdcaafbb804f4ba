"""MultiWorkerMirroredStrategy: one replica per worker rank, gradients summed over all of them."""

import functools
import itertools
import secrets
from contextlib import AbstractContextManager
from typing import Any

import torch

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolver import ClusterResolver
from hpcdist.collectives import mpi, selection
from hpcdist.collectives.cross_device_ops import CrossDeviceOps
from hpcdist.collectives.group import group_of
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset, check_distributable
from hpcdist.data.from_function import DatasetFunction, DistributedFromFunction, contexts_of, datasets_of
from hpcdist.data.options import InputOptions
from hpcdist.errors import ConfigurationError, DataError, agreed
from hpcdist.gradients.engine import GradientEngine
from hpcdist.gradients.reducer import Reducer
from hpcdist.mpi import MPI
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy, get_strategy
from hpcdist.strategy.reduce_op import ReduceOp
from hpcdist.world import World, make_world


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all chief and worker ranks; each holds one replica of every model.

    Inside `scope()` modules start identical everywhere; `loss.backward()` leaves the sum of all replicas' gradients in
    `parameter.grad`, private to the rank (the next backward reuses its memory: clone what you keep), and
    `optimizer.step()` is the user's own. An evaluator rank is a cluster of
    one.

    Collective: all ranks.

    Args:
        cluster_resolver: says which tasks there are; default: TF_CONFIG, else HPCDIST_ROLES, else every rank a worker.
        communication_options: algorithm, bucket size, order and wire of the all-reduce; default: all chosen.
        gradient_op: SUM (losses are divided by the global batch) or MEAN (losses are means over the local batch;
            replicas weigh by their rows). Default: SUM once `compute_average_loss` was called, else the first backward
            of more than one replica raises.
        cross_device_ops: what sums gradients, instead of what the options choose.

    Raises:
        ConfigurationError: on every rank alike, when the cluster does not add up or has ps tasks.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        gradient_op: ReduceOp | str | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        op = None if gradient_op is None else ReduceOp.parse(gradient_op)
        self.world: World = make_world(cluster_resolver)
        if self.world.spec.num_tasks("ps"):
            raise agreed(
                ConfigurationError(
                    f"MultiWorkerMirroredStrategy: expected chief, worker and evaluator tasks, got {self.world.spec}; "
                    f"remove the ps tasks."
                )
            )
        self._comm = self.world.role_comm
        is_mean = None if op is None else op is ReduceOp.MEAN
        options = communication_options or CommunicationOptions()
        if options.wire_dtype == "float16" and op is ReduceOp.MEAN:
            raise agreed(
                ConfigurationError(
                    "MultiWorkerMirroredStrategy: expected wire_dtype bfloat16 with ReduceOp.MEAN, whose gradients "
                    "travel multiplied by rows, got float16, which they overflow; use bfloat16, or SUM."
                )
            )
        self._group = group_of(self._comm, options.timeout_seconds)
        reducer = Reducer(self._group, options, cross_device_ops)
        self._engine = GradientEngine(self.world, reducer, is_mean, self._is_entered)
        self._dataset_numbers = itertools.count()
        self._set_threads()
        context.register(self)

    def _is_entered(self) -> bool:
        return get_strategy() is self

    def _set_threads(self) -> None:
        """Share the node's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
        if "OMP_NUM_THREADS" not in read_environment() and self._comm.size > 1:
            torch.set_num_threads(self.world.cores_per_rank)

    @property
    def num_replicas_in_sync(self) -> int:
        """One per chief or worker rank."""
        return self._comm.size

    @property
    def is_chief(self) -> bool:
        """Whether this rank prints, logs and saves for the job."""
        return self.world.is_chief

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster as agreed, and this rank's task in it."""
        return self.world.cluster_resolver

    def _watching(self) -> AbstractContextManager[None]:
        return self._engine.watching()

    def _prepare(self, args: Any) -> None:
        self._engine.prepare(args)

    def _sum_over_replicas(self, array: Any) -> None:
        with self._group.recorded("reduce", array):
            mpi.all_reduce(array, self._group)

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return this replica's parts of a dataset; see `Strategy.experimental_distribute_dataset`."""
        with self.world.agreed(self._comm):
            check_distributable(dataset, self._comm.size)
        chiefs_seed = self.world.broadcast_text(str(dataset.order.seed), 0, self._comm)
        if dataset.has_drawn_seed and chiefs_seed != "None":
            dataset = dataset.with_drawn_seed(int(chiefs_seed))
        own = f"{dataset.order} with a {'drawn' if dataset.has_drawn_seed else 'given'} seed and {dataset.policy}"
        chiefs = self.world.broadcast_text(own, 0, self._comm)
        with self.world.agreed(self._comm):
            if own != chiefs:
                raise DataError(
                    f"experimental_distribute_dataset: expected the dataset of the chief, {chiefs}, got {own}; give "
                    f"every rank the same rows, batch and seed."
                )
        hand = functools.partial(self._hand_rows, next(self._dataset_numbers))
        return DistributedDataset(
            dataset, self._local_replicas, self._comm.size, hand, options=options, agree_rows=self._agree_rows
        )

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Return batches of this rank's own dataset; see `Strategy.distribute_datasets_from_function`."""
        replicas, comm = self._local_replicas, self._comm
        with self.world.agreed(comm):
            made = datasets_of(dataset_fn, contexts_of(options, replicas, (comm.rank, comm.size), comm.size))
        seed = int(self.world.broadcast_text(str(secrets.randbits(62)), 0, comm))
        hand = functools.partial(self._hand_rows, next(self._dataset_numbers))
        distributed = DistributedFromFunction(
            made, replicas, comm.size, hand, options=options, agree_end=self._agree_end
        )
        distributed.set_seed(seed)
        return distributed

    @property
    def _local_replicas(self) -> range:
        """The replicas of this rank."""
        return range(self._comm.rank, self._comm.rank + 1)

    def _hand_rows(self, source: int, rows: list[int] | None) -> None:
        """Tell the engine how many rows the parts have that are handed out, or that a pass is over."""
        self._engine.backward.rows.hand(source, None if rows is None else sum(rows))

    def _agree_end(self, is_out: bool) -> bool:
        """Return whether all ranks are out of data. Collective: all ranks; bounded."""
        return self.world.all_reduce_int(int(is_out), MPI.MIN, self._comm) == 1

    def _agree_rows(self, n_rows: int) -> None:
        """Raise on all ranks unless their streams gave batches of the same length. Collective: all ranks; bounded."""
        least = self.world.all_reduce_int(n_rows, MPI.MIN, self._comm)
        most = self.world.all_reduce_int(n_rows, MPI.MAX, self._comm)
        if least != most:
            raise agreed(
                DataError(
                    f"experimental_distribute_dataset: expected the same rows on every rank, got global batches of "
                    f"{least} to {most} rows at one step; let generators yield the same everywhere, or use "
                    f"distribute_datasets_from_function."
                )
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate this replica's gradients; the next one outside sums everything.

        `step` on gradients that were not summed raises.
        """
        return self._engine.backward.no_sync()

    @property
    def is_summing(self) -> bool:
        """Whether it is known that gradients are summed."""
        return self._engine.backward.is_mean is False

    def use_sum_of_scaled_losses(self) -> bool:
        """Sum gradients from now on; False if the strategy was made to average them."""
        if self._engine.backward.is_mean is None:
            self._engine.backward.is_mean = False
        return not self._engine.backward.is_mean

    def state_dict(self) -> dict[str, Any]:
        """Return seed and step of the random numbers, and which algorithms AUTO chose. Equal on all ranks."""
        generators, table = self._engine.generators, selection.table_of(group_of(self._comm))
        return {"seed": generators.seed, "step": generators.step, "algorithms": table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the random numbers of a checkpoint."""
        self._engine.generators.restore(state["seed"], state["step"])
        if state.get("algorithms"):
            selection.restore_table(group_of(self._comm), state["algorithms"])
        self.world.step = state["step"]
