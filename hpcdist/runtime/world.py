"""The world of a job: hosts and roles of its ranks, and how ranks agree.

A `World` clones the communicator it is given, assigns roles to ranks, and builds the communicators that everything else
uses. Set-up errors are agreed: every rank raises the same text.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from hpcdist.cluster.assignment import NONE, RankFacts, assign_tasks
from hpcdist.cluster.environment import (
    DEBUG_NAMES,
    Launcher,
    check_names,
    debug_names,
    launcher_of,
    logs_json,
    origin_of,
    read_environment,
    timeout_s,
    trace_mode,
    unused_tasks,
)
from hpcdist.cluster.resolvers import ClusterResolver, MPIClusterResolver, SimpleClusterResolver
from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.cluster.tf_config import TFConfigClusterResolver
from hpcdist.errors import ConfigurationError, DesyncError, HpcdistError, agreed, error_class
from hpcdist.runtime.hosts import Hosts
from hpcdist.runtime.mpi import MPI, library_name, start_timeout_s
from hpcdist.runtime.step_flags import StepFlags, single_rank_flags
from hpcdist.runtime.time_spent import time_spent
from hpcdist.runtime.waiting import late, wait_until

#: Longest sleep while ranks wait for each other outside of steps.
MAX_SLEEP_S = 0.005


def _alone(launcher: Launcher) -> ConfigurationError:
    """Return the error of a process that a launcher has started as one of several, but whose world has one rank.

    All processes are alone if the launcher is of another MPI library; rank 0 explains that. A process that is the only
    one has inherited the launcher's variables.
    """
    if launcher.rank == 0:
        return ConfigurationError(
            f"world: expected {launcher.size} ranks as started by {launcher.name}, got a world of 1 with "
            f"{library_name()}; start with the mpirun of that same MPI library, or by srun --mpi=pmi2 (MPICH) "
            f"or --mpi=pmix (Open MPI)."
        )
    error = ConfigurationError(
        f"world: expected {launcher.size} ranks as started by {launcher.name}, got a world of 1 for rank "
        f"{launcher.rank}; see what rank 0 says. If there is none, the launcher's variables are inherited from another "
        f"program: unset {launcher.size_variable} and {launcher.rank_variable}."
    )
    error.is_reporter = True
    return error


class World:
    """All ranks of a job, their roles, and where this rank is among them.

    Collective over all ranks of `comm`.

    Args:
        resolver: says which tasks there are; default: TF_CONFIG, else HPCDIST_ROLES, else every rank is a worker.
        comm: communicator of the ranks that take part; default: all ranks. It is cloned and left alone.
        serves: whether this rank serves another rank, in place of running the program: see `coordinator`.

    Attributes:
        rank: number of this rank in `comm`. size: number of ranks in `comm`.
        comm: communicator of all ranks, a clone of the argument.
        role_comm: communicator of the ranks of this rank's role: chief and workers together, all ps together, each
            evaluator alone. With a coordinator each worker is alone, too.
        coordinator: rank that runs the program, where the workers serve; None where all of them run it.
        hosts: hosts of `role_comm`. node_comm: communicator of its ranks on this host. n_hosts: number of its hosts.
        spec: cluster. task: entry of this rank in it. tasks: entries of all ranks.
        side_ranks: ranks in `comm` that end when the chief does: evaluators, parameter servers, workers that serve.
        cores_per_rank: number of cores that this rank may use without taking another rank's.
        is_crowded: whether this host has more ranks than cores.
        timeout_s: longest wait for other ranks, in seconds.
        debug: names in HPCDIST_DEBUG, on any rank.
        step: number of the step that this rank is in, for messages; None outside training.
        step_flags: requests that travel with every sum of gradients.
        roles_from: source of the roles: "the program", or a variable's name, or "default".

    Raises:
        ConfigurationError: on every rank alike, when roles, launcher and ranks do not add up.
    """

    def __init__(
        self,
        resolver: ClusterResolver | None = None,
        comm: MPI.Comm | None = None,
        serves: bool = False,
    ) -> None:
        parent_comm = comm or getattr(resolver, "comm", None) or MPI.COMM_WORLD
        self.rank = parent_comm.rank
        self.size = parent_comm.size
        self.step: int | None = None
        self.step_flags = single_rank_flags if self.size == 1 else StepFlags()
        self._task: Task | None = None
        self._before_free: list[Callable[[], None]] = []
        self._pending: list[object] = []
        self.timeout_s = start_timeout_s()
        self.debug: frozenset[str] = frozenset()
        self.roles_from = "the program"
        # once all have arrived, making communicators blocks on nobody
        self.wait(parent_comm.Ibarrier())
        self.comm: MPI.Comm = parent_comm.Dup()
        environ = self._agreed_environment()
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.spec, tasks = self._agreed_tasks(resolver, environ, node)
        self.tasks = tuple(tasks)
        self.task = tasks[self.rank]
        self._task = self.task
        self.coordinator = self._agreed_coordinator(serves)
        self.side_ranks = self._find_side_ranks()
        self.cores_per_rank, self.is_crowded = _share_of_cores(node)
        node.Free()
        order = list(self.spec.tasks())
        key = order.index(self.task) * self.size + self.rank
        self.role_comm: MPI.Comm = self.comm.Split(self._role_color(), key)
        self.hosts = Hosts(self.role_comm, self.wait)
        self.node_comm = self.hosts.node_comm
        self.n_hosts = len(self.hosts.placement.hosts)

    def __str__(self) -> str:
        if self._task:
            return f"rank {self.rank} ({self._task})"
        return f"rank {self.rank}"

    @property
    def is_chief(self) -> bool:
        """Whether this rank saves and logs for the job: the first rank of the chief entry."""
        return self.task == self.spec.chief and self.role_comm.rank == 0

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Resolver of the cluster and this rank's task as they were agreed."""
        return SimpleClusterResolver(self.spec, self.task.type, self.task.index)

    def note_step(self, step: int) -> None:
        """Note the step that this rank is in, for messages."""
        self.step = step

    def describe(self) -> str:
        """Return the name of this rank and, in training, its step."""
        if self.step is None:
            return str(self)
        return f"{self} at step {self.step}"

    def call_before_free(self, act: Callable[[], None]) -> None:
        """Have `act` called before the communicators are freed, after all ranks have left their programs."""
        self._before_free.append(act)

    def free(self) -> None:
        """Free the communicators. Collective over all ranks."""
        for act in self._before_free:
            act()
        self.role_comm.Free()
        self.hosts.free()
        self.comm.Free()

    def agree(
        self,
        error: HpcdistError | None,
        comm: MPI.Comm | None = None,
        call: str = "",
    ) -> None:
        """Raise the lowest failing rank's error on every rank, or return on every rank.

        Collective over `comm`, default all ranks. Waits at most `timeout_s`.

        Args:
            error: error of this rank, or None.
            comm: communicator of the ranks that agree.
            call: name of the call that this rank makes, which must be the same on all ranks.

        Raises:
            HpcdistError: the failing rank's error, as its class and text with `is_agreed` set; on every rank.
            DesyncError: if a rank makes another call; on every rank.
            CollectiveTimeoutError: when a rank does not arrive; on the ranks that did.

        Cost: one all-reduce of 24 bytes when all is well.
        """
        comm = comm or self.comm
        code = zlib.crc32(call.encode())
        send = np.array([comm.rank if error else comm.size, code, -code], np.int64)
        receive = np.empty(3, np.int64)
        self.wait(comm.Iallreduce(send, receive, MPI.MIN), send, receive)
        lowest, least_code, negative_code = receive.tolist()
        if least_code != -negative_code:
            this_call = call or "another call"
            self.require_same(
                this_call,
                comm,
                lambda roots_call: DesyncError(
                    f"{call or roots_call}: expected the same call on every rank, got {roots_call} on rank 0 and "
                    f"{this_call} here; it is collective: make it on every rank, or on none."
                ),
            )
        if lowest == comm.size:
            return
        n_failed = self.all_reduce_int(int(error is not None), MPI.SUM, comm)
        where = ""
        if n_failed < comm.size:
            more = ""
            if n_failed > 1:
                more = f" and {n_failed - 1} more"
            where = f" [{self}{more}]"
        report = f"{type(error).__name__}\n{error}{where}"
        name, text = self.broadcast_text(report, lowest, comm).split("\n", 1)
        agreed = error_class(name)(text)
        agreed.is_agreed = True
        # in a world of one, the launcher says which rank prints: there may be many such worlds
        if self.size > 1:
            agreed.is_reporter = comm.rank == 0
        elif error is not None:
            agreed.is_reporter = error.is_reporter
        raise agreed from error

    @contextmanager
    def agreed(self, comm: MPI.Comm | None = None, call: str = "") -> Iterator[None]:
        """Run a block in which this rank may fail; at its end all ranks of `comm` fail alike or none does.

        Collective over `comm`, default all ranks, at the end of the block.

        Args:
            comm: communicator of the ranks that agree.
            call: name of the call that this rank makes, which must be the same on all ranks.
        """
        error = None
        try:
            yield
        except HpcdistError as caught:
            error = caught
        self.agree(error, comm, call)

    def all_reduce_int(self, value: int, op: MPI.Op, comm: MPI.Comm) -> int:
        """Return `value`, an int of at most 63 bits, reduced over `comm`.

        Collective over `comm`; bounded by `timeout_s`.
        """
        send = np.array([value], np.int64)
        receive = np.empty(1, np.int64)
        self.wait(comm.Iallreduce(send, receive, op), send, receive)
        return int(receive[0])

    def broadcast_text(self, text: str, root: int, comm: MPI.Comm) -> str:
        """Return root's text. Collective over `comm`; bounded by `timeout_s`."""
        data = np.frombuffer(text.encode() if comm.rank == root else b"", np.uint8)
        length = self.all_reduce_int(len(data), MPI.MAX, comm)
        buffer = np.empty(length, np.uint8)
        if comm.rank == root:
            buffer[:] = data
        self.wait(comm.Ibcast(buffer, root))
        return buffer.tobytes().decode()

    def all_equal(self, text: str, comm: MPI.Comm) -> bool:
        """Return whether all ranks hold the same text, by digests of 63 bits. Collective over `comm`."""
        digest = xxhash.xxh3_64_intdigest(text.encode()) >> 1
        largest = -self.all_reduce_int(-digest, MPI.MIN, comm)
        smallest = self.all_reduce_int(digest, MPI.MIN, comm)
        return largest == smallest

    def require_same(
        self,
        text: str,
        comm: MPI.Comm,
        explain: Callable[[str], HpcdistError],
    ) -> None:
        """Return when all ranks hold the same text, else raise the error of the lowest rank that differs.

        Collective over `comm`; bounded by `timeout_s`.

        Args:
            text: text of this rank.
            comm: communicator of the ranks to compare.
            explain: function of the text of rank 0 of `comm` that returns the error of a rank whose text differs.

        Raises:
            HpcdistError: as `agree`; on every rank.

        Cost: two all-reduces of 8 bytes when all is well.
        """
        if self.all_equal(text, comm):
            return
        roots_text = self.broadcast_text(text, 0, comm)
        error = None
        if text != roots_text:
            error = explain(roots_text)
        self.agree(error, comm)

    def wait(self, request: MPI.Request, *buffers: object) -> None:
        """Wait for a non-blocking collective, at most `timeout_s`.

        Args:
            request: the collective.
            buffers: its arrays, where `keep_pending` asks for them.

        Raises:
            CollectiveTimeoutError: on this rank; it ends the job, as others may be anywhere.
        """
        with time_spent.timed("communication", "agreement"):
            is_in_time = wait_until(request.Test, self.timeout_s, max_sleep_s=MAX_SLEEP_S)
        if not is_in_time:
            self.keep_pending(request, *buffers)
            raise late("world", self.timeout_s, "some ranks", self)

    def keep_pending(self, request: MPI.Request, *buffers: object) -> None:
        """Keep the memory of a collective that this rank no longer waits for: MPI writes to it when the others come.

        From any thread.

        Args:
            request: the collective.
            buffers: its arrays. mpi4py's requests hold them, but for reductions and Iallgatherv.
        """
        self._pending.append((request, buffers))

    def _find_side_ranks(self) -> tuple[int, ...]:
        """Return the ranks that end when the chief does; see `side_ranks`."""
        side_types = ["evaluator", "ps"]
        if self.coordinator is not None:
            side_types.append("worker")
        side_ranks: list[int] = []
        for rank, task in enumerate(self.tasks):
            if task.type in side_types and rank != self.coordinator:
                side_ranks.append(rank)
        return tuple(side_ranks)

    def _role_color(self) -> int:
        """Return the number of this rank's group of ranks with one role; see `role_comm`."""
        if self.task.type == "ps":
            return 1
        if self.task.type == "evaluator":
            return 2
        if self.coordinator is None:
            return 0
        return 3 + self.rank

    def _agreed_environment(self) -> Mapping[str, str]:
        """Return the environment, checked on all ranks. Collective over all ranks."""
        environ: Mapping[str, str] = {}
        with self.agreed():
            environ = read_environment()
            check_names(environ)
            self.timeout_s = timeout_s(environ)
            self.debug = debug_names(environ)
            trace_mode(environ)
            logs_json(environ)
            launcher = launcher_of(environ)
            if launcher and launcher.size > 1 and MPI.COMM_WORLD.size == 1:
                raise _alone(launcher)
            if (n_tasks := unused_tasks(environ)) > 1 and MPI.COMM_WORLD.size == 1:
                raise ConfigurationError(
                    f"world: expected {n_tasks} ranks, one for each task of this Slurm job, got a program that no "
                    f"launcher started; start it by srun or mpirun, or as one process on purpose by srun -n 1."
                )
        # a check that one rank makes with the others, all of them must make
        debug: set[str] = set()
        for name in DEBUG_NAMES:
            if self.all_reduce_int(int(name in self.debug), MPI.MAX, self.comm):
                debug.add(name)
        self.debug = frozenset(debug)
        return environ

    def _agreed_tasks(
        self,
        resolver: ClusterResolver | None,
        environ: Mapping[str, str],
        node: MPI.Comm,
    ) -> tuple[ClusterSpec, list[Task]]:
        """Return the cluster and the task of every rank. Collective over all ranks."""
        spec = ClusterSpec({})
        declared = None
        with self.agreed():
            if resolver is None:
                if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
                    resolver = TFConfigClusterResolver(environ=environ)
                    self.roles_from = "TF_CONFIG"
                else:
                    resolver = MPIClusterResolver(environ=environ)
                    self.roles_from = origin_of(environ, "HPCDIST_ROLES")
            spec, declared = resolver.resolve(self.rank, self.size)
            if not spec:
                resolver = MPIClusterResolver(environ={})
                spec, declared = resolver.resolve(self.rank, self.size)
        cluster = repr(spec.as_dict())
        self.require_same(
            cluster,
            self.comm,
            lambda roots: ConfigurationError(
                f"cluster: expected the cluster of rank 0, {roots}, got {cluster}; set the same cluster on every rank."
            ),
        )
        spec = self._with_evaluator(spec, declared)
        assert resolver is not None, "agreed above"
        facts = self._gather_facts(list(spec.tasks()), declared, resolver.host_names, node)
        tasks: list[Task] = []
        with self.agreed():
            tasks = assign_tasks(spec, facts)
        return spec, tasks

    def _with_evaluator(self, spec: ClusterSpec, declared: Task | None) -> ClusterSpec:
        """Return the cluster with an evaluator if a rank is one that it does not list, as is usual in TF_CONFIG.

        An evaluator that was started alone is a cluster by itself: the other tasks run elsewhere.

        Collective over all ranks.
        """
        is_evaluator = declared is not None and declared.type == "evaluator"
        is_unlisted = is_evaluator and not spec.has_tasks("evaluator")
        n_unlisted = self.all_reduce_int(int(is_unlisted), MPI.SUM, self.comm)
        if not n_unlisted:
            return spec
        is_alone = n_unlisted == self.size == 1
        tasks: dict[str, Any] = {}
        if not is_alone:
            tasks = spec.as_dict()
        tasks["evaluator"] = ["evaluator, which the cluster does not list"]
        return ClusterSpec(tasks)

    def _gather_facts(
        self,
        entries: list[Task],
        declared: Task | None,
        hosts: Mapping[str, Task],
        node: MPI.Comm,
    ) -> list[RankFacts]:
        """Return the facts of all ranks from which their tasks follow. Collective over all ranks."""
        host = MPI.Get_processor_name()
        named = hosts.get(host) or hosts.get(host.partition(".")[0])
        lowest = self.all_reduce_int(self.rank, MPI.MIN, node)
        local_facts = [
            entries.index(declared) if declared else NONE,
            lowest,
            entries.index(named) if named else NONE,
        ]
        facts = np.empty((self.size, 3), np.int32)
        self.wait(self.comm.Iallgather(np.array(local_facts, np.int32), facts))
        return [RankFacts(*row) for row in facts.tolist()]

    def _agreed_coordinator(self, serves: bool) -> int | None:
        """Return the rank that runs the program, if the workers serve; None if all workers run it.

        Collective over all ranks.
        """
        flags = np.empty(self.size, np.int32)
        self.wait(self.comm.Iallgather(np.array([serves], np.int32), flags))
        serving_workers: list[int] = []
        serving_evaluators: list[int] = []
        program_ranks: list[int] = []
        for rank, task in enumerate(self.tasks):
            if task.is_training and not flags[rank]:
                program_ranks.append(rank)
            elif task.is_training:
                serving_workers.append(rank)
            elif task.type == "evaluator" and flags[rank]:
                serving_evaluators.append(rank)
        if not serving_workers and not serving_evaluators:
            return None
        is_chiefs_program = (
            len(program_ranks) == 1 and self.tasks[program_ranks[0]] == self.spec.chief
        )
        if not is_chiefs_program or serving_evaluators:
            raise agreed(
                ConfigurationError(
                    f"roles: expected every worker and ps to serve, and the chief alone to run the program, got the "
                    f"program on ranks {program_ranks} and evaluators {serving_evaluators} that serve; choose by "
                    f"resolver.task_type which ranks serve."
                )
            )
        return program_ranks[0]


def _share_of_cores(node: MPI.Comm) -> tuple[int, bool]:
    """Return this rank's share of its cores, and whether more ranks than cores share any rank's cores.

    The share is all of its cores if no other rank may use them, else an equal part. Collective over `node`.
    """
    cores = frozenset(os.sched_getaffinity(0))
    sets = node.allgather(cores)

    def n_sharing(rank_cores: frozenset[int]) -> int:
        return sum(1 for peer_cores in sets if peer_cores & rank_cores)

    is_crowded = any(n_sharing(rank_cores) > len(rank_cores) for rank_cores in sets)
    return max(1, len(cores) // n_sharing(cores)), is_crowded
