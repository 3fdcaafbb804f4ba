"""ParameterServerStrategy: variables on servers, to which workers push gradients, each at its own pace."""

import atexit
import collections
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.errors import ConfigurationError, HpcdistError, agreed
from hpcdist.ps.client import Client
from hpcdist.ps.entry import EntryParameters, SilentClient
from hpcdist.ps.serve import serve
from hpcdist.ps.served import ServedParameters
from hpcdist.ps.server import Neighbours, Rules, Server
from hpcdist.ps.transport import Mailbox, find_neighbours
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import OwnMemory
from hpcdist.runtime.world import World
from hpcdist.storage.storage import PrivateStorage, Storage
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.strategy.own_gradients import GradientsAndParameters

#: How much longer a worker waits for an answer than servers let it wait for other workers: servers name the late ones.
_LATE_S = 30.0
#: Between nodes a push goes to a server in parts of about this many bytes: each is applied, and its new values sent,
#: while the next ones come. Only the answer to the last part comes beside nothing else.
CHUNK_BYTES = 1 << 19
#: Advice for a cluster without servers or workers.
_SET_ROLES = "set HPCDIST_ROLES=ps:1,worker:* or TF_CONFIG"
_Coordinator = TypeVar("_Coordinator")
#: The worlds whose servers are taken: ps ranks serve one strategy, and a second one finds it out here.
_worlds: "weakref.WeakSet[World]" = weakref.WeakSet()


class ParameterServerStrategy(MultiWorkerMirroredStrategy):
    """Training on worker ranks whose variables are on ps ranks, in shards, with the state of optimizers.

    Every worker runs the program; or workers serve, and the chief schedules functions on them, by a
    `ClusterCoordinator`. `backward` leaves a worker's own gradients in `parameter.grad`; `optimizer.step()` pushes
    them, servers update the variables, and the worker gets the new values. ps ranks serve inside this constructor, and
    exit there with the chief's exit code when all workers have ended.

    Asynchronous (default): each push is applied as it comes, so that runs differ in their bits. Losses may be scaled in
    any way: divided by the rows of all workers, the pushes of a round together are one step of SGD; divided by a
    worker's own rows, each push is one step.

    Where worker entries have several ranks, the same number in each, asynchronous training takes these for the replicas
    of a worker: they make each step together, the sum of their gradients is one push, and they have the same values.
    Scale losses by `compute_average_loss`; `num_replicas_in_sync` is the number of ranks of an entry, as in TensorFlow.

    With max_staleness=s it is a stale synchronous parallel server: a worker begins step c (from 0) only when every live
    worker has pushed step c - 1 - s; it waits at the end of its step, and no push is refused for its age.

    Synchronous: the gradients of all workers are summed in the order of workers and applied once, with the bits of
    MultiWorkerMirroredStrategy. Losses are divided by the global batch (`compute_average_loss`). Clipping acts on a
    worker's own gradients, before the sum.

    What holds: a push is applied exactly once; a worker's values contain its own pushes; versions of a shard only grow.
    Shards on several servers, and between nodes also on one, may be of different versions, except in synchronous
    training. Buffers, such as BatchNorm's statistics, are each worker's own, and checkpoints have the chief's. A save
    waits until no push is under way, so that it is one state; it loads on any number of servers, with any partitioner.

    A job whose rank dies, worker or ps, ends and starts again from its last checkpoint.

    >>> strategy = hpcdist.ParameterServerStrategy()     # mpirun -n 5 with HPCDIST_ROLES=ps:2,worker:*
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective over all ranks.

    Args:
        cluster_resolver: says which tasks there are, with at least one ps and one worker or chief; default:
            TF_CONFIG, else HPCDIST_ROLES.
        variable_partitioner: splits variables into shards, such as `MinSizePartitioner`; default: each is whole.
        max_staleness: number of steps s that a worker may be ahead of the slowest live worker. None for no bound.
        synchronous: whether the gradients of all workers are summed and applied once.
        placement: "round_robin", as in TensorFlow, or "bytes": a shard goes to the server with the fewest bytes.
        non_finite: treatment of a step whose gradients are not all finite: "reject", an error, or "skip", which leaves
            the step out and counts it; see `statistics`.
        device: device of a worker, as in `MultiWorkerMirroredStrategy`; servers keep variables in host memory.

    Attributes:
        world: roles and communicators of all ranks.

    Raises:
        ConfigurationError: on every rank alike, when the cluster or the options do not add up.
        SystemExit: on ps ranks, when the job has ended.
    """

    _entry_comm: MPI.Comm

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        max_staleness: int | None = None,
        synchronous: bool = False,
        *,
        placement: str = "round_robin",
        non_finite: str = "reject",
        device: str | torch.device | None = None,
    ) -> None:
        self._partitioner = variable_partitioner
        self._placement = placement
        self._non_finite = non_finite
        self._rules = Rules(max_staleness, synchronous)
        self._client: Client | None = None
        #: With a coordinator: communicator of all ranks, for functions and their results alone.
        self.closures_comm: MPI.Comm | None = None
        self._coordinator: Any = None
        super().__init__(cluster_resolver, device=device)

    def _check_cluster(self) -> None:
        """Check cluster and options; on a ps rank, serve and exit."""
        tasks = self.world.spec
        n_workers = sum(task.is_training for task in self.world.tasks)
        if not tasks.has_tasks("ps"):
            raise _misfit("ps tasks", tasks, _SET_ROLES)
        if n_workers == 0:
            raise _misfit("worker tasks", tasks, _SET_ROLES)
        max_staleness = self._rules.max_staleness
        if max_staleness is not None and not max_staleness >= 0:  # nor NaN
            advice = "0 waits for every worker"
            raise _misfit("max_staleness of at least 0", max_staleness, advice)
        if max_staleness is not None and self._rules.is_synchronous:
            raise _misfit("max_staleness or synchronous", "both", "leave one out")
        if self._placement not in ("round_robin", "bytes"):
            raise _misfit("round_robin or bytes", self._placement, "correct placement")
        if self._non_finite not in ("reject", "skip"):
            raise _misfit("reject or skip", self._non_finite, "correct non_finite")
        if self.world in _worlds:
            raise ConfigurationError(
                f"ParameterServerStrategy: expected one for the ranks of a job, got another one on {self.world}: the "
                f"servers of the first have no place for it; use that one."
            )
        _worlds.add(self.world)
        self._agree_rules()
        self._take_part()

    def _agree_rules(self) -> None:
        """Take the chief's rules, as ranks that serve get no arguments. Collective over all ranks."""
        world = self.world
        rules = self._rules
        local_rules = json.dumps([rules.max_staleness, rules.is_synchronous, self._non_finite])
        chief_rules = world.broadcast_text(local_rules, self.client_ranks[0], world.comm)
        with world.agreed():
            if local_rules != chief_rules and world.task.is_training and world.coordinator is None:
                raise ConfigurationError(
                    f"ParameterServerStrategy: expected max_staleness, synchronous and non_finite as on the chief, "
                    f"{chief_rules}, got {local_rules}; give every worker the same."
                )
        max_staleness, is_synchronous, self._non_finite = json.loads(chief_rules)
        self._rules = Rules(max_staleness, is_synchronous)
        if world.coordinator is not None and self._rules != Rules():
            raise agreed(
                ConfigurationError(
                    f"ParameterServerStrategy: expected neither max_staleness nor synchronous with workers that serve: "
                    f"all would wait for one without a function, got {chief_rules}; leave them out, or let every "
                    f"worker run the program."
                )
            )

    @property
    def _steps_by_entries(self) -> bool:
        """Whether the ranks of a worker entry make each step together; else each rank is a separate worker.

        In synchronous training servers sum the gradients of all ranks anyhow, in the order of an all-reduce.
        """
        return self.world.coordinator is None and not self._rules.is_synchronous

    @property
    def client_ranks(self) -> list[int]:
        """The ranks that servers know as workers, in the order of their numbers: the chief or coordinator first."""
        tasks = self.world.tasks
        ranks = [rank for rank, task in enumerate(tasks) if task.is_training]
        if self._steps_by_entries:  # the first rank of each entry
            ranks = [rank for rank in ranks if tasks.index(tasks[rank]) == rank]

        def order_of(rank: int) -> tuple[bool, bool, int, int]:
            is_coordinator = rank == self.world.coordinator
            is_chief = tasks[rank].type == "chief"
            return (not is_coordinator, not is_chief, tasks[rank].index, rank)

        return sorted(ranks, key=order_of)

    def _take_part(self) -> None:
        """Serve on a ps rank; become a client of the servers on a worker. Collective over all ranks."""
        world = self.world
        workers = self.client_ranks
        servers = [rank for rank, task in enumerate(world.tasks) if task.type == "ps"]
        # making a communicator blocks: nobody may be missing then
        world.wait(world.comm.Ibarrier())
        comm = world.comm.Dup()
        if world.coordinator is not None:
            self.closures_comm = world.comm.Dup()
        self._check_entries()
        is_replica = world.task.is_training and self._steps_by_entries
        color = world.tasks.index(world.task) if is_replica else world.rank
        self._entry_comm = comm.Split(color, world.rank)
        node = find_neighbours(comm)
        is_one_node = world.all_reduce_int(int(len(node) == world.size - 1), MPI.MIN, world.comm)
        mailbox = Mailbox(comm, node)
        if world.task.type == "ps":
            if "OMP_NUM_THREADS" not in read_environment():
                torch.set_num_threads(world.cores_per_rank)
            workers_here = frozenset(n for n, rank in enumerate(workers) if rank in node)
            packers = {n: mailbox.packer(rank) for n, rank in enumerate(workers)}
            server = Server(packers, self._rules, Neighbours(workers_here, OwnMemory))
            sys.exit(serve(world, mailbox, server, workers))
        if world.task.is_training:
            # the rank that speaks with the servers for the ranks of its entry
            speaker = world.rank if world.rank in workers else world.tasks.index(world.task)
            make_client = Client if speaker == world.rank else SilentClient
            chunk_bytes = None if is_one_node else CHUNK_BYTES
            limit_s = world.timeout_s + _LATE_S
            number = workers.index(speaker)
            self._client = make_client(
                mailbox, servers, number, world.describe(), limit_s, chunk_bytes
            )
            # it may outlive this strategy: servers wait for every worker
            atexit.register(self._client.leave)

    def _check_entries(self) -> None:
        """Raise ConfigurationError on all ranks unless entries whose ranks step together have equally many ranks."""
        sizes = collections.Counter(task for task in self.world.tasks if task.is_training)
        if self._steps_by_entries and len(set(sizes.values())) > 1:
            counts = ", ".join(f"{task} {n}" for task, n in sizes.items())
            raise agreed(
                ConfigurationError(
                    f"ParameterServerStrategy: expected as many ranks in each worker entry, got {counts}; start as "
                    f"many on each host, or name each rank in the cluster."
                )
            )

    def the_coordinator(self, make: Callable[[], _Coordinator]) -> _Coordinator:
        """Return the one coordinator of this strategy, made at the first call."""
        if self._coordinator is None:
            self._coordinator = make()
        coordinator: _Coordinator = self._coordinator
        return coordinator

    @property
    def served(self) -> ServedParameters:
        """The variables on servers, as this worker sees them."""
        storage = self.engine.managed.storage
        assert isinstance(storage, ServedParameters), "every worker has them"
        return storage

    def _make_storage(self) -> Storage:
        if self._client is None:  # an evaluator
            return PrivateStorage()
        needs_sum = self._rules.is_synchronous and self.world.role_comm.size > 1
        is_by_bytes = self._placement == "bytes"
        skips = self._non_finite == "skip"
        if self._entry_comm.size > 1:
            return EntryParameters(
                self._entry_comm, self.world, self._client, self._partitioner, is_by_bytes, skips
            )
        return ServedParameters(
            self.world, self._client, self._partitioner, is_by_bytes, skips, needs_sum
        )

    def _describe_steps(self) -> str:
        n_servers = sum(task.type == "ps" for task in self.world.tasks)
        plural = "s" if n_servers > 1 else ""
        return f"gradients go to {n_servers} parameter server{plural}"

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed: all if synchronous, else the ranks of this worker entry."""
        return self.n_replicas if self._rules.is_synchronous else self._entry_comm.size

    def apply_gradients(
        self,
        optimizer: Optimizer,
        grads_and_params: GradientsAndParameters,
    ) -> None:
        """Push gradients that the program has computed: put them into `parameter.grad`, and call `optimizer.step()`."""
        for gradient, parameter in grads_and_params:
            parameter.grad = gradient
        optimizer.step()

    def refresh(self) -> None:
        """Bring every worker to the values after all pushes so far, such as for an evaluation.

        Collective over the workers. Saves do so themselves.
        """
        if self._client is not None:
            self.served.refresh([])

    def statistics(self) -> dict[str, Any]:
        """Return counts of all servers, as of now.

        Not collective. Empty where another rank of the worker entry speaks with the servers.

        `pushes`: pushes that the first server got. `skipped`: this worker's steps that were left out. `versions`:
        updates of each shard, by server. `staleness`: number of pushes by age, in updates, when they were applied.

        Cost: a message to each server, and its answer.
        """
        if self._client is None:
            return {}
        server_reports = self._client.statistics()
        if not server_reports:
            return {}
        ages: dict[int, int] = {}
        for server_report in server_reports:
            for age, n in server_report["staleness"].items():
                ages[int(age)] = ages.get(int(age), 0) + n
        return {
            "pushes": server_reports[0]["pushes"],
            "skipped": self.served.n_skipped,
            "versions": [server_report["versions"] for server_report in server_reports],
            "staleness": dict(sorted(ages.items())),
        }

    def describe_sums(self) -> dict[str, Any]:
        """Return the settings that the bits of weights depend on, as each checkpoint records them."""
        kind = f"asynchronous, max_staleness {self._rules.max_staleness}"
        if self._rules.is_synchronous:
            kind = "synchronous"
        n_workers = len(self.client_ranks) - int(self.world.coordinator is not None)
        return {
            "parameter_servers": kind,
            "workers": n_workers,
            "ranks_per_worker": self._entry_comm.size,
        }


def _misfit(expected: str, actual: object, advice: str) -> HpcdistError:
    """Return the error of a cluster or option that does not fit, which all ranks raise."""
    return agreed(
        ConfigurationError(f"ParameterServerStrategy: expected {expected}, got {actual}; {advice}.")
    )
