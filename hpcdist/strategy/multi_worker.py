"""MultiWorkerMirroredStrategy: replicas on all worker ranks, gradients summed over all of them."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.collectives import algorithms, library
from hpcdist.collectives.cross_device_ops import CrossDeviceOps, options_with
from hpcdist.collectives.group import Group, group_of
from hpcdist.collectives.moves import gather_rows
from hpcdist.collectives.objects import all_gather_objects
from hpcdist.collectives.ops import ReduceOp
from hpcdist.collectives.options import CommunicationImplementation, CommunicationOptions
from hpcdist.data.distributed import DistributedDataset, DistributedInput, as_dataset, check_distributable
from hpcdist.data.distributed_loader import DistributedLoader, has_own_sampler
from hpcdist.data.distributed_stream import DistributedStream, has_stream_in_workers
from hpcdist.data.from_function import (
    DatasetFunction,
    DistributedFromFunction,
    contexts_of,
    datasets_of,
    sharded_dataset,
)
from hpcdist.data.iterator import Delivery
from hpcdist.data.options import AutoShardPolicy, InputOptions
from hpcdist.data.row_numbers import program_seed
from hpcdist.data.same_rows import RANDOM, are_random, describe_rows
from hpcdist.data.sampler_order import drawn_seed
from hpcdist.data.sources import RowSource
from hpcdist.data.stream_worker import Shares
from hpcdist.data.torch_source import ItemsSource, describe_sampler
from hpcdist.errors import ConfigurationError, DataError, UsageError, agreed
from hpcdist.gradients.comm_hook import CommHook
from hpcdist.gradients.engine import GradientEngine
from hpcdist.gradients.local_sums import sum_rows
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.devices import plan_devices
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.program.loop_watch import watch_loop
from hpcdist.program.tensors import from_array, to_array
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.runtime.library_numbers import LIBRARIES
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World
from hpcdist.storage.storage import Storage
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy, get_strategy
from hpcdist.strategy.devices import parse_device, require_device
from hpcdist.strategy.values import regroup

#: Number of leaves of a row for which ranks compare whether they are random; one bit of an int64 each.
_MAX_LEAVES = 62


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all chief and worker ranks; each holds one replica of every model, or several.

    Inside `scope()` modules start identical everywhere; `loss.backward()` leaves the sum of all replicas' gradients in
    `parameter.grad`, private to the rank (the next backward reuses its memory: clone what you keep), and
    `optimizer.step()` is the user's own. An evaluator rank is a cluster of
    one.

    >>> strategy = hpcdist.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective: all ranks.

    Args:
        cluster_resolver: says which tasks there are; default: TF_CONFIG, else HPCDIST_ROLES, else every rank a worker.
            A CollectiveCommunication in its place is the algorithm, as in older versions of tf.distribute.
        communication_options: algorithm, bucket size, order and wire of the all-reduce; default: all chosen.
        num_replicas: replicas of the job, however many ranks it has; at least as many. Weights, losses and metrics then
            have the same bits on any number of ranks, and steps go through `run`. Default: one per rank.
        gradient_op: SUM (losses are divided by the global batch) or MEAN (losses are means over the local batch;
            replicas are weighted by their rows). Default: SUM from the first backward of a loss that
            `compute_average_loss` scaled; a backward of another one raises.
        cross_device_ops: the algorithm that sums gradients, instead of what the options choose.
        communication: likewise by a CollectiveCommunication, as in older versions of tf.distribute.
        device: of this rank, such as "cpu" or "cuda:1". "cuda": its GPU, in the order of the ranks of a host; default:
            that where torch sees any. It becomes torch's current one; modules and tensors of the scope and of `run` are
            made there, batches arrive there, and gradients are summed by NCCL where every rank has it and a GPU of its
            own. Ranks that hold several replicas compute on the host.

    Attributes:
        device: this rank's: a GPU, or the host.
        world: who is where. own_replicas: the replicas of this rank.
        group, reducer, engine: what it communicates and sums with, for diagnosis; see ARCHITECTURE.md.

    Raises:
        ConfigurationError: on every rank alike, when the cluster does not add up or has ps tasks.
    """

    #: Whether `state_dict` gathers what belongs to each rank.
    is_state_collective = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | CommunicationImplementation | None = None,
        communication_options: CommunicationOptions | None = None,
        num_replicas: int | None = None,
        gradient_op: ReduceOp | str | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication: CommunicationImplementation | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if isinstance(cluster_resolver, CommunicationImplementation):
            cluster_resolver, communication = None, cluster_resolver
        if communication is not None:
            communication_options = replace(
                communication_options or CommunicationOptions(), implementation=communication
            )
        op = None if gradient_op is None else ReduceOp.parse(gradient_op)
        self.world: World = self._make_world(cluster_resolver)
        self._check_cluster()
        self._comm = self.world.role_comm
        self._placed = self._choose_device(device, num_replicas)
        is_mean = None if op is None else op is ReduceOp.MEAN
        options = communication_options or CommunicationOptions()
        if cross_device_ops is not None:
            options = options_with(cross_device_ops, options)
        if options.wire_dtype == "float16" and op is ReduceOp.MEAN:
            raise agreed(
                ConfigurationError(
                    "MultiWorkerMirroredStrategy: expected wire_dtype bfloat16 with ReduceOp.MEAN, whose gradients "
                    "travel multiplied by rows, got float16, which they overflow; use bfloat16, or SUM."
                )
            )
        self.group: Group = group_of(self._comm, options.timeout_seconds, self.world)
        self._has_fixed_replicas = num_replicas is not None
        if self._has_fixed_replicas and options.is_ordered is None and options.may_be_ordered:
            options = replace(options, is_ordered=True)
        self.reducer = Reducer(self.group, options, self._plan_replicas(num_replicas), self._placed)
        self._storage = self._make_storage()
        self.engine = GradientEngine(
            self.world, self.reducer, is_mean, self._is_entered, self._has_fixed_replicas, self._storage
        )
        if options.local_steps > 1:
            self.engine.make_local_steps(options.local_steps, options.first_local_step)
        if "OMP_NUM_THREADS" not in read_environment() and self.world.size > 1:
            torch.set_num_threads(self.world.cores_per_rank)  # ranks share the cores of their node
        context.register(self)
        self._share_library_seeds()
        watch_loop(self.world.step_flags).seed_batches(self.engine.sums.number, self.engine.generators)

    def _share_library_seeds(self) -> None:
        """Seed the random numbers of Python and numpy as the chief's, unless the program has seeded them by rank.

        So `numpy.random.permutation(n)[rank::size]` loses no row. Collective: the ranks of this role.
        """
        if self._comm.size == 1:
            return
        for numbers in LIBRARIES:
            digest = numbers.digest()
            is_equal = self.world.all_equal(str(digest), self._comm)
            if not is_equal and not self.world.all_reduce_int(numbers.n_seeds, MPI.MAX, self._comm):
                numbers.share(int(self.world.broadcast_text(str(digest), 0, self._comm)))

    def __str__(self) -> str:
        ranks, hosts = self._comm.size, self.world.n_hosts
        where = f"{ranks} rank{'s'[: ranks > 1]} on {hosts} host{'s'[: hosts > 1]}"
        replicas = f"{self.num_replicas_in_sync} replica{'s'[: self.num_replicas_in_sync > 1]}"
        who = f"this is {self.world} on {self.device}"
        return f"{type(self).__name__}: {replicas}, {where}; {who}; {self._describe_steps()}"

    def _describe_steps(self) -> str:
        return f"gradients are summed by {self.reducer.route.name}"

    def _make_world(self, resolver: ClusterResolver | None) -> World:
        """Return the world of this strategy. Collective where one is made."""
        return make_world(resolver)

    def _check_cluster(self) -> None:
        """Raise ConfigurationError on all ranks unless the cluster has the tasks that this strategy is for."""
        if self.world.spec.has_tasks("ps"):
            raise agreed(
                ConfigurationError(
                    f"{type(self).__name__}: expected chief, worker and evaluator tasks, got {self.world.spec}; "
                    f"remove the ps tasks, or use ParameterServerStrategy."
                )
            )

    def _choose_device(self, given: str | torch.device | None, num_replicas: int | None) -> torch.device | None:
        """Return where this rank computes; a GPU becomes torch's current one. None: on the host, by default.

        Collective: the ranks of this role.
        """
        name, n_gpus, node = type(self).__name__, torch.cuda.device_count(), self.world.node_comm
        is_own = str(given).lower().lstrip("/") in ("cuda", "gpu")
        if given is None and n_gpus and num_replicas is not None and num_replicas > self._comm.size:
            device: torch.device | None = torch.device("cpu")  # several replicas of a rank share its parameters there
        else:
            device = None
        with self.world.agreed(self._comm):
            if n_gpus and device is None and (given is None or is_own):
                device = torch.device("cuda", plan_devices(node.size, n_gpus)[node.rank])
            elif given is not None:
                device = parse_device(given, name)
            if device is not None:
                require_device(device, name)
                if device.type == "cuda":
                    torch.cuda.set_device(device)
        return device

    def _plan_replicas(self, num_replicas: int | None) -> ReplicaPlan:
        n_ranks = self._comm.size
        n_replicas = n_ranks if num_replicas is None else operator.index(num_replicas)
        if n_replicas < n_ranks:
            raise agreed(
                ConfigurationError(
                    f"{type(self).__name__}: expected num_replicas of at least the {n_ranks} ranks, got {n_replicas}; "
                    f"start fewer ranks, or more replicas."
                )
            )
        return ReplicaPlan(n_replicas, n_ranks)

    def _make_storage(self) -> Storage | None:
        """Return what holds the parameters once for all ranks; None: each rank has its own."""
        return None

    def _update_copies(self, var: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        storage = self.engine.shared_storage(var)
        if storage is None:
            return super()._update_copies(var, calls)
        with storage.changing() as is_ours:
            return super()._update_copies(var, calls) if is_ours else [None for _ in calls]

    def _is_entered(self) -> bool:
        return get_strategy() is self

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of the job: as given, or one per chief or worker rank."""
        return self.reducer.replicas.n_replicas

    @property
    def own_replicas(self) -> range:
        """The replicas of this rank."""
        return self.reducer.own_replicas

    @property
    def scheduler(self) -> ReplicaScheduler:
        """Runs the replicas of this rank."""
        return self.engine.scheduler

    def _regroup(self, results: Sequence[Any]) -> Any:
        return regroup(results, is_single_kept=True) if self._has_fixed_replicas else super()._regroup(results)

    @property
    def _is_mean(self) -> bool | None:  # type: ignore[override]
        return self.engine.sums.op.is_mean

    def _note_sums(self, tensors: Sequence[Tensor]) -> None:
        self.engine.note_sums(tensors)

    def _note_crossing(self) -> None:
        self.engine.backward.note_crossing()

    def _are_noted(self, tensors: Sequence[Tensor]) -> list[bool]:
        return self.engine.are_noted(tensors)

    def _are_summed_gradients(self, tensors: Sequence[Tensor]) -> list[bool]:
        return self.engine.are_summed_gradients(tensors)

    def _stop_replicas(self) -> None:
        self.engine.stop_replicas()

    @property
    def is_chief(self) -> bool:
        """Whether this rank prints, logs and saves for the job; an evaluator is its own chief, as in tf.distribute."""
        return self.world.is_chief or self.world.task.type == "evaluator"

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster as agreed, and this rank's task in it."""
        return self.world.cluster_resolver

    @property
    def device(self) -> torch.device:
        """This rank's device: see the class."""
        return torch.device("cpu") if self._placed is None else self._placed

    @property
    def _placed_on(self) -> torch.device | None:
        return self._placed

    def _has_made(self, variable: Tensor) -> bool:
        return self.engine.has_made(variable)

    def _broadcast(self, value: Tensor) -> Tensor:
        array, dtype = to_array(value.clone())
        with self.group.recorded("broadcast", array):
            library.broadcast(array, self._comm)
        return from_array(array, dtype)

    def _writing(self) -> AbstractContextManager[None]:
        return self.engine.writing()

    def _watching(self) -> AbstractContextManager[None]:
        return self.engine.watching()

    def _prepare(self, args: Any) -> None:
        self.engine.prepare_run(args)

    def sum_over_replicas(self, rows: list[Any]) -> Any:
        """Return the sum of flat host arrays, one of each local replica, over all replicas. Collective: all ranks."""
        if self._has_fixed_replicas:
            return sum_rows(self.reducer, rows, "reduce")
        with self.group.recorded("reduce", rows[0]):
            library.all_reduce(rows[0], self.group)
            return rows[0]

    def gather_over_ranks(self, rows: Any, error: UsageError | None) -> tuple[Any, int]:
        """Return the rows of all ranks joined, and where this rank's begin; or raise. Collective: all ranks."""
        self.world.agree(error, self._comm)
        counts = gather_rows(np.array([len(rows)]), self.group)
        return gather_rows(rows, self.group), int(counts[: self._comm.rank].sum())

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, is_sharded: bool = False
    ) -> DistributedInput:
        """Return this replica's parts of a dataset; see `Strategy.experimental_distribute_dataset`."""
        self.world.agree(None, self._comm, "experimental_distribute_dataset")
        if is_sharded and has_own_sampler(dataset):
            raise UsageError(
                f"experimental_distribute_dataset: expected a stream for is_sharded=True, got a DataLoader with "
                f"{describe_sampler(dataset)}; leave the sampler out, or train on the loader itself with "
                f"hpcdist.DistributedSampler."
            )
        if has_stream_in_workers(dataset):
            return self._distribute_stream(dataset, options, is_sharded)
        if is_sharded:
            return self.distribute_datasets_from_function(
                lambda context: sharded_dataset(as_dataset(dataset), self.n_replicas), options
            )
        if has_own_sampler(dataset):
            return self._distribute_loader(dataset, options)
        with self.world.agreed(self._comm):
            dataset = as_dataset(dataset)
            check_distributable(dataset, self.n_replicas)
        seeds = f"{dataset.order.seed} {program_seed()}"
        chiefs_seed, random_seed = self.world.broadcast_text(seeds, 0, self._comm).split()
        if dataset.has_drawn_seed and chiefs_seed != "None":
            dataset = dataset.with_drawn_seed(int(chiefs_seed))
        own = f"{dataset.order} with a {'drawn' if dataset.has_drawn_seed else 'given'} seed and {dataset.policy}"
        self.world.require_same(
            own,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the dataset of the chief, {chiefs}, got {own}; give every "
                f"rank the same rows, batch and seed."
            ),
        )
        if isinstance(dataset.source, RowSource) and dataset.policy is not AutoShardPolicy.OFF:
            self._require_same_rows(dataset.source)  # with OFF a rank may have a shard of its own
        delivery = self._delivery()
        return DistributedDataset(
            dataset, self.own_replicas, self.n_replicas, delivery, options, random_seed=int(random_seed)
        )

    def _distribute_loader(self, loader: Any, options: InputOptions | None) -> DistributedLoader:
        """Return this replica's parts of a DataLoader with a sampler of its own. Collective: all ranks."""
        seed = int(self.world.broadcast_text(str(drawn_seed(loader)), 0, self._comm))
        with self.world.agreed(self._comm):
            distributed = DistributedLoader(
                loader,
                seed,
                self.own_replicas,
                self.n_replicas,
                lambda own, refusal: self.world.require_same(own, self._comm, refusal),
                self._delivery(),
                options,
            )
        distributed.check_order()
        if hasattr(loader.dataset, "__len__"):
            self._require_same_rows(ItemsSource(loader.dataset, loader))
        return distributed

    def _distribute_stream(self, loader: Any, options: InputOptions | None, is_sharded: bool) -> DistributedStream:
        """Return this rank's share of a stream that workers draw. Collective: all ranks."""
        settings = f"{loader.num_workers} workers, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        self.world.require_same(
            settings,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the loader of the chief, {chiefs}, got {settings}; make "
                f"the same one on every rank."
            ),
        )
        shares = Shares(self._comm.rank, self._comm.size, loader.num_workers, is_sharded)
        seed = int(self.world.broadcast_text(str(drawn_seed(loader)), 0, self._comm))
        with self.world.agreed(self._comm):
            distributed = DistributedStream(
                loader, shares, self.own_replicas, self.n_replicas, self._gather, self._delivery(), options
            )
        distributed.set_seed(seed)
        return distributed

    def _gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks. Collective: all ranks."""
        return all_gather_objects(value, self._comm)

    def _require_same_rows(self, source: RowSource) -> None:
        """Raise DataError on all ranks unless a sample of the rows is the same on all, or random on one. Collective."""
        if self._comm.size == 1:
            return
        own = describe_rows(source)
        if self.world.all_equal(own, self._comm):
            return
        is_random = RANDOM in own or are_random(source)  # a random transform may have done nothing twice
        if self.world.all_reduce_int(int(is_random), MPI.MAX, self._comm):
            own = f"{source.n_rows} rows"
        self.world.require_same(
            own,
            self._comm,
            lambda chiefs: DataError(
                f"experimental_distribute_dataset: expected the same rows on every rank, as each reads a part of every "
                f"batch: {chiefs} on the chief, got {own}; draw them by a seeded generator, as by torch.randn(..., "
                f"generator=torch.Generator().manual_seed(1)) and random_split(..., generator=...), or use "
                f"distribute_datasets_from_function."
            ),
        )

    def distribute_datasets_from_function(
        self, dataset_fn: DatasetFunction, options: InputOptions | None = None
    ) -> DistributedFromFunction:
        """Return batches of this rank's own dataset; see `Strategy.distribute_datasets_from_function`."""
        self.world.agree(None, self._comm, "distribute_datasets_from_function")
        replicas, n_replicas, comm = self.own_replicas, self.n_replicas, self._comm
        with self.world.agreed(comm):
            made = datasets_of(dataset_fn, contexts_of(options, replicas, (comm.rank, comm.size), n_replicas))
        seed = int(self.world.broadcast_text(str(program_seed() >> 1), 0, comm))
        distributed = DistributedFromFunction(made, replicas, n_replicas, self._delivery(), options)
        distributed.set_seed(seed)
        own = f"drop_remainder={distributed.ends_with_first}"
        self.world.require_same(
            own,
            comm,
            lambda chiefs: DataError(
                f"distribute_datasets_from_function: expected {chiefs} in batch, as on the chief, got {own}; make "
                f"batches alike on every rank."
            ),
        )
        return distributed

    def _delivery(self) -> Delivery:
        flags = self.world.step_flags
        return Delivery(
            flags=flags,
            owner=self.engine.sums.number,
            on_batch=self._note_batch,
            on_part=watch_loop(flags).hand_out,
            wrap=functools.partial(regroup, has_no_plain=True) if self._has_fixed_replicas else None,
            device=self._placed_on,
            agree_rows=self._agree_rows,
            agree_first_rows=self._agree_first_rows,
            agree_end=self._agree_end,
        )

    def _note_batch(self, rows: list[int] | None) -> None:
        """Note that a step will be made of a batch, or that none is expected any more."""
        self.engine.note_batch(is_over=rows is None)

    def set_row_count(self, n_rows: int) -> None:
        """Weigh this replica's next backward by a number of rows; see `Strategy.set_row_count`."""
        if n_rows < 0:
            raise UsageError(f"set_row_count: expected at least 0 rows, got {n_rows}; give those of this replica.")
        local_index = self.scheduler.local_index if self.scheduler.is_running else 0
        self.engine.sums.weights.set_row_count(local_index, operator.index(n_rows))

    def _agree_end(self, is_out: bool, ends_with_first: bool) -> bool:
        """Return whether all ranks, or one, have run out of data. Collective: all ranks; bounded."""
        return self.world.all_reduce_int(int(is_out), MPI.MAX if ends_with_first else MPI.MIN, self._comm) == 1

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

    def _agree_first_rows(self, digest: int, describe: Callable[[], list[int | None]]) -> bool:
        """Raise on all ranks unless their streams begin with the same rows, as far as these are not random.

        Collective: all ranks; bounded.

        Returns:
            Whether `describe` was called.
        """
        if self.world.all_equal(str(digest), self._comm):
            return False
        own_rows = describe()
        random_leaves = 0
        for number, leaf in enumerate(own_rows):
            random_leaves |= (leaf is None) << number % _MAX_LEAVES
        random_leaves = self.world.all_reduce_int(random_leaves, MPI.BOR, self._comm)
        same_rows: list[int | None] = []
        for number, leaf in enumerate(own_rows):
            is_random = random_leaves >> number % _MAX_LEAVES & 1
            same_rows.append(None if is_random else leaf)
        are_same = self.world.all_equal(str(same_rows), self._comm)
        if are_same and any(leaf is not None for leaf in same_rows):
            return True
        raise agreed(
            DataError(
                "experimental_distribute_dataset: expected streams that yield the same rows on every rank, as each "
                "keeps its part of every batch, got others at the beginning of a pass; pass is_sharded=True if the "
                "dataset itself gives each rank other rows, or draw random numbers from seeded generators."
            )
        )

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let hook(state, bucket) sum the gradients of each bucket; see `Strategy.register_comm_hook`."""
        self.engine.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards in the block accumulate this replica's gradients; the next one outside sums everything.

        `step` on gradients that were not summed raises.
        """
        return self.engine.backward.no_sync()

    @property
    def is_summing(self) -> bool:
        """Whether it is known that gradients are summed."""
        return self.engine.sums.op.is_mean is False

    def take_scaled_loss(self, loss: Any) -> None:
        """Sum gradients from the first backward of this loss on, unless it is known that they are averaged."""
        if isinstance(loss, torch.Tensor):
            self.engine.backward.take_scaled_loss(loss)

    @property
    def is_averaging(self) -> bool:
        """Whether it is known that gradients are averaged."""
        return self.engine.sums.op.is_mean is True

    def mark_scaled(self, loss: Any) -> None:
        """Mark backwards that reach this loss as those of a scaled loss."""
        if isinstance(loss, torch.Tensor) and self.num_replicas_in_sync > 1:
            self.engine.backward.mark_scaled(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return seed and step of the random numbers, those of each rank's libraries, and which algorithms AUTO chose.

        Equal on all ranks. Collective: all ranks.
        """
        generators, table = self.engine.generators, algorithms.measurements_of(group_of(self._comm, None, self.world))
        libraries = self._gather(generators.libraries()) if self._comm.size > 1 else [generators.libraries()]
        if all(state == libraries[0] for state in libraries):
            libraries = libraries[:1]
        return {"seed": generators.seed, "step": generators.step, "algorithms": table, "libraries": libraries}

    def describe_sums(self) -> dict[str, Any]:
        """Return what the bits of summed gradients depend on; the number of replicas where it was given."""
        n_replicas = self.num_replicas_in_sync if self._has_fixed_replicas else None
        described = {**self.reducer.describe(), "replicas": n_replicas, "comm_hook": self.engine.comm_hook}
        rounds = self.engine.sums.rounds
        return {**described, "local_steps": None if rounds is None else str(rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random numbers and the measured algorithms of a checkpoint."""
        libraries = state["libraries"]
        rank = self._comm.rank if len(libraries) > 1 else 0
        own_libraries = libraries[rank] if rank < len(libraries) else None  # a new rank has numbers of its own
        self.engine.generators.restore(state["seed"], state["step"], own_libraries)
        if state.get("algorithms"):
            algorithms.restore_measurements(group_of(self._comm, None, self.world), state["algorithms"])
        self.world.step = state["step"]
