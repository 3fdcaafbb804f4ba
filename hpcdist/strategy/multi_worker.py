"""MultiWorkerMirroredStrategy: replicas on all worker ranks, gradients summed over all of them."""

import operator
from dataclasses import replace
from typing import Any

import torch

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.collectives.cross_device_ops import CrossDeviceOps, options_with
from hpcdist.collectives.group import Group, group_of
from hpcdist.collectives.ops import ReduceOp
from hpcdist.collectives.options import CommunicationImplementation, CommunicationOptions
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.gradients.engine import GradientEngine
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.devices import plan_devices
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.program import owners
from hpcdist.program.loop_watch import watch_loop
from hpcdist.runtime.library_numbers import LIBRARIES
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World
from hpcdist.storage.storage import PrivateStorage, Storage
from hpcdist.strategy.base import Strategy, get_strategy
from hpcdist.strategy.cross_replica_context import Parts
from hpcdist.strategy.devices import parse_device, require_device
from hpcdist.strategy.inputs import RankInputs
from hpcdist.strategy.replicas import RankReplicas
from hpcdist.strategy.sums import EngineSums


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all chief and worker ranks; each holds one replica of every model, or several.

    Inside `scope()` modules start identical everywhere; `loss.backward()` leaves the sum of all replicas' gradients in
    `parameter.grad`, private to the rank (the next backward reuses its memory: clone a gradient that you keep), and
    `optimizer.step()` is the user's own. An evaluator rank is a cluster of one.

    >>> strategy = hpcdist.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective over all ranks.

    Args:
        cluster_resolver: says which tasks there are; default: TF_CONFIG, else HPCDIST_ROLES, else every rank a worker.
            A CollectiveCommunication in its place is the algorithm, as in older versions of tf.distribute.
        communication_options: algorithm, bucket size, order and wire of the all-reduce; default: all chosen.
        num_replicas: number of replicas of the job, at least the number of ranks. Weights, losses and metrics then have
            the same bits on any number of ranks, and steps go through `run`. Default: one per rank.
        gradient_op: SUM (losses are divided by the global batch) or MEAN (losses are means over the local batch;
            replicas are weighted by their rows). Default: SUM from the first backward of a loss that
            `compute_average_loss` scaled; a backward of another loss raises.
        cross_device_ops: algorithm that sums gradients, in place of the algorithm that the options choose.
        communication: the same as a CollectiveCommunication, as in older versions of tf.distribute.
        device: device of this rank, such as "cpu" or "cuda:1". "cuda" is the rank's GPU, in the order of the ranks of a
            host; that is the default where torch sees GPUs. It becomes torch's current GPU; modules and tensors of the
            scope and of `run` are made there, batches arrive there, and gradients are summed by NCCL where every rank
            has NCCL and a GPU that no other rank uses. Ranks that hold several replicas compute on the host.

    Attributes:
        world: roles and communicators of all ranks. own_replicas: numbers of the replicas of this rank.
        group, reducer, engine: objects that communicate and sum, for diagnosis; see ARCHITECTURE.md.

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
        op: ReduceOp | None = None
        is_mean: bool | None = None
        if gradient_op is not None:
            op = ReduceOp.parse(gradient_op)
            is_mean = op is ReduceOp.MEAN
        if isinstance(cluster_resolver, CommunicationImplementation):
            communication = cluster_resolver
            cluster_resolver = None
        self.world: World = self._make_world(cluster_resolver)
        self._check_cluster()
        self._comm = self.world.role_comm
        device_of_rank = self._choose_device(device, num_replicas)
        options = self._choose_options(communication_options, communication, cross_device_ops, op)
        is_fixed = num_replicas is not None
        if is_fixed and options.is_ordered is None and options.may_be_ordered:
            options = replace(options, is_ordered=True)
        self.group: Group = group_of(self._comm, options.timeout_seconds, self.world)
        self.reducer = Reducer(
            self.group, options, self._plan_replicas(num_replicas), device_of_rank
        )
        self.engine = GradientEngine(
            self.world, self.reducer, is_mean, self._is_entered, is_fixed, self._make_storage()
        )
        replicas = RankReplicas(self.group, self.reducer, self.engine.scheduler, is_fixed)
        inputs = RankInputs(
            self.world, replicas, self.engine, self._choose_batch_device(device_of_rank)
        )
        super().__init__(
            Parts(replicas, EngineSums(self.engine, self.reducer, is_fixed), inputs, device_of_rank)
        )
        if options.local_steps > 1:
            self.engine.make_local_steps(options.local_steps, options.first_local_step)
        if "OMP_NUM_THREADS" not in read_environment() and self.world.size > 1:
            torch.set_num_threads(self.world.cores_per_rank)  # ranks share the cores of their node
        owners.add(self)
        self._share_library_seeds()
        watch_loop(self.world.step_flags).seed_batches(
            self.engine.sums.number, self.engine.generators
        )

    def _choose_options(
        self,
        options: CommunicationOptions | None,
        communication: CommunicationImplementation | None,
        cross_device_ops: CrossDeviceOps | None,
        op: ReduceOp | None,
    ) -> CommunicationOptions:
        """Return the options of the all-reduce, with the algorithm that another argument names."""
        chosen = options or CommunicationOptions()
        if communication is not None:
            chosen = replace(chosen, implementation=communication)
        if cross_device_ops is not None:
            chosen = options_with(cross_device_ops, chosen)
        if chosen.wire_dtype == "float16" and op is ReduceOp.MEAN:
            raise agreed(
                ConfigurationError(
                    "MultiWorkerMirroredStrategy: expected wire_dtype bfloat16 with ReduceOp.MEAN, whose gradients "
                    "travel multiplied by rows, got float16, which they overflow; use bfloat16, or SUM."
                )
            )
        return chosen

    def _share_library_seeds(self) -> None:
        """Seed the random numbers of Python and numpy as the chief's, unless the program has seeded them by rank.

        So `numpy.random.permutation(n)[rank::size]` loses no row. Collective over the ranks of the role.
        """
        if self._comm.size == 1:
            return
        for numbers in LIBRARIES:
            digest = numbers.digest()
            is_equal = self.world.all_equal(str(digest), self._comm)
            if not is_equal and not self.world.all_reduce_int(numbers.n_seeds, MPI.MAX, self._comm):
                numbers.share(int(self.world.broadcast_text(str(digest), 0, self._comm)))

    def __str__(self) -> str:
        replicas = _counted(self.num_replicas_in_sync, "replica")
        ranks = _counted(self._comm.size, "rank")
        hosts = _counted(self.world.n_hosts, "host")
        place = f"{ranks} on {hosts}; this is {self.world} on {self.device}"
        return f"{type(self).__name__}: {replicas}, {place}; {self._describe_steps()}"

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

    def _choose_device(
        self,
        name: str | torch.device | None,
        num_replicas: int | None,
    ) -> torch.device | None:
        """Return the device that this rank computes on, None for the host by default. A GPU becomes torch's current.

        Collective over the ranks of the role.
        """
        n_gpus = torch.cuda.device_count()
        node = self.world.node_comm
        device: torch.device | None = None
        if name is None and n_gpus and num_replicas is not None and num_replicas > self._comm.size:
            # several replicas of a rank share its parameters there
            device = torch.device("cpu")
        is_planned = name is None or str(name).lower().lstrip("/") in ("cuda", "gpu")
        with self.world.agreed(self._comm):
            if n_gpus and device is None and is_planned:
                device = torch.device("cuda", plan_devices(node.size, n_gpus)[node.rank])
            elif name is not None:
                device = parse_device(name, type(self).__name__)
            if device is not None:
                require_device(device, type(self).__name__)
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

    def _choose_batch_device(self, device_of_rank: torch.device | None) -> torch.device | None:
        """Return the device where batches arrive. None for the host."""
        return device_of_rank

    def _make_storage(self) -> Storage:
        """Return the storage of the parameters."""
        return PrivateStorage()

    def _is_entered(self) -> bool:
        return get_strategy() is self

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
        """The device of this rank: a GPU, or the host."""
        return torch.device("cpu") if self._placed_on is None else self._placed_on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random numbers and the measured algorithms of a checkpoint."""
        super().load_state_dict(state)
        self.world.note_step(state["step"])


def _counted(n: int, noun: str) -> str:
    """Return a number and a noun, with an s for more than one."""
    return f"{n} {noun}s" if n > 1 else f"{n} {noun}"
