"""Resolvers determine the cluster's tasks and this process's task, for example by a role map.

A role map is text such as `chief:1,ps:2,worker:*`.

The resolvers for TF_CONFIG and Slurm are in their own files.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from hpcdist.cluster.environment import launcher_of, read_environment, visible_gpus
from hpcdist.cluster.spec import SINGLE_TASK_TYPES, TASK_TYPES, Addresses, ClusterSpec, Task
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError, UsageError

logger = logging.getLogger("hpcdist")

_EXAMPLE = "write for example chief:1,ps:2,worker:*"


class ClusterResolver(ABC):
    """Finds the cluster that this process belongs to, and this process's task in it."""

    @abstractmethod
    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the cluster and this process's task, or None if the task follows from the rank.

        Args:
            rank: this process's rank among all.
            size: the number of ranks.

        Returns:
            The cluster, which is empty if every rank is a worker; and the task.

        Raises:
            ConfigurationError: if the description is not valid; on this rank only.
        """

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster from this process's view alone."""

    @property
    @abstractmethod
    def task_type(self) -> str | None:
        """This process's task type, or None if unknown."""

    @property
    @abstractmethod
    def task_id(self) -> int | None:
        """This process's task index, or None if unknown."""

    #: Protocol that comes before addresses in `master`, with "://", unless a call names another one.
    rpc_layer: str | None = None

    @property
    def host_names(self) -> Mapping[str, Task]:
        """Host name -> the one task whose address names it; empty if addresses are labels."""
        return {}

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return {"GPU": n} for the GPUs that this process may use, or {} without any. The arguments are ignored."""
        n_gpus = visible_gpus(read_environment())
        if n_gpus == 0:
            return {}
        return {"GPU": n_gpus}

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default of this process's; "" if the task or the cluster is unknown.

        Args:
            task_type: type of the task.
            task_id: index of the task.
            rpc_layer: protocol such as "grpc", which comes before the address, with "://".

        Raises:
            ConfigurationError: if the cluster has no such task.
        """
        if task_type is None:
            task_type = self.task_type
        if task_id is None:
            task_id = self.task_id
        if task_type is None or task_id is None or not self.cluster_spec():
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        layer = rpc_layer or self.rpc_layer
        if not layer:
            return address
        return f"{layer}://{address}"


class SimpleClusterResolver(ClusterResolver):
    """A resolver for a given cluster and task.

    Args:
        cluster_spec: the cluster; empty if every rank is a worker.
        task_type, task_id: this process's task; None if it follows from the rank.
        environment: accepted for compatibility and ignored.
        num_accelerators: kind of device -> number, which the method of this name returns.
        rpc_layer: protocol that comes before addresses in `master`, with "://".

    Raises:
        ConfigurationError: if the cluster has no such task.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._spec = cluster_spec
        self._task: Task | None = None
        if task_type is not None:
            self._task = Task(task_type, task_id or 0)
        self._accelerators = num_accelerators
        self.rpc_layer = rpc_layer
        if self._task and cluster_spec:
            cluster_spec.check_task(self._task)

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the cluster and the task that the constructor was given."""
        return self._spec, self._task

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the numbers that the constructor was given, else the GPUs that this process may use."""
        if self._accelerators is None:
            return super().num_accelerators()
        return dict(self._accelerators)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._spec

    @property
    def task_type(self) -> str | None:
        """This process's task type."""
        if self._task is None:
            return None
        return self._task.type

    @property
    def task_id(self) -> int | None:
        """This process's task index."""
        if self._task is None:
            return None
        return self._task.index


class Communicator(Protocol):
    """The two methods of an MPI communicator that a role map needs."""

    def Get_rank(self) -> int:  # noqa: N802 - the name is MPI's
        """Return this process's rank."""

    def Get_size(self) -> int:  # noqa: N802 - the name is MPI's
        """Return the number of ranks."""


class MPIClusterResolver(ClusterResolver):
    """Assigns roles to ranks in the order of a role map.

    >>> resolver = hpcdist.MPIClusterResolver(roles="worker:*")
    >>> resolver.task_type
    'worker'

    Args:
        roles: a role map such as "chief:1,ps:2,evaluator:1,worker:*"; default: HPCDIST_ROLES, else every rank a worker.
        comm: the communicator of the ranks; default: all ranks. Without it, the properties use the launcher's
            variables, as MPI may not be initialized yet.
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: if the role map is not valid.
    """

    def __init__(
        self,
        roles: str | None = None,
        comm: Communicator | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        source = read_environment() if environ is None else environ
        self._counts = parse_roles(roles or source.get("HPCDIST_ROLES") or "worker:*")
        self._launcher = launcher_of(source)
        self.comm = comm

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the role map stretched over `size` ranks, and the task of `rank`."""
        tasks = tasks_of_roles(self._counts, size)
        return spec_of_tasks(tasks), tasks[rank]

    def _rank_and_size(self) -> tuple[int, int]:
        if self.comm is not None:
            return self.comm.Get_rank(), self.comm.Get_size()
        if self._launcher is None:
            return 0, 1
        return self._launcher.rank, self._launcher.size

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of all ranks."""
        return self.resolve(*self._rank_and_size())[0]

    @property
    def task_type(self) -> str:
        """This rank's task type."""
        return self._own_task().type

    @property
    def task_id(self) -> int:
        """This rank's task index."""
        return self._own_task().index

    def _own_task(self) -> Task:
        rank, size = self._rank_and_size()
        return tasks_of_roles(self._counts, size)[rank]


def parse_roles(text: str) -> dict[str, int | None]:
    """Parse a role map into type -> number of ranks, in the order of the text; `*`, all remaining ranks, becomes None.

    Raises:
        ConfigurationError: on an unknown or repeated type, a count that is not a number above 0, or two `*`.
    """
    counts: dict[str, int | None] = {}
    for part in text.split(","):
        type_, _, count = part.partition(":")
        type_ = type_.strip()
        if type_ not in TASK_TYPES or type_ in counts:
            valid_types = ", ".join(TASK_TYPES)
            raise ConfigurationError(
                f"roles: expected each of {valid_types} at most once, got {part!r} in {text!r}; {_EXAMPLE}."
            )
        counts[type_] = _parse_count(count.strip(), part, text)
        if type_ in SINGLE_TASK_TYPES and counts[type_] != 1:
            raise ConfigurationError(
                f"roles: expected at most one {type_}, got {part!r}; write {type_}:1."
            )
    if list(counts.values()).count(None) > 1:
        raise ConfigurationError(f"roles: expected at most one *, got {text!r}; {_EXAMPLE}.")
    return counts


def _parse_count(count: str, part: str, text: str) -> int | None:
    if count == "*":
        return None
    n_ranks = whole_number(count)
    if not n_ranks:
        raise ConfigurationError(
            f"roles: expected a count above 0 or *, got {part!r} in {text!r}; {_EXAMPLE}."
        )
    return n_ranks


def tasks_of_roles(counts: Mapping[str, int | None], size: int) -> list[Task]:
    """Return the task of every rank: types in the map's order, and `*` for the remaining ranks.

    Args:
        counts: type -> number of ranks, None for all remaining ranks.
        size: number of ranks.

    Raises:
        ConfigurationError: if the roles need another number of ranks.
    """
    n_fixed = sum(count or 0 for count in counts.values())
    n_remaining = size - n_fixed
    is_open = None in counts.values()
    fits = n_remaining >= 1 if is_open else n_remaining == 0
    if not fits:
        wanted = f"at least {n_fixed + 1}" if is_open else f"exactly {n_fixed}"
        text = ",".join(f"{type_}:{count or '*'}" for type_, count in counts.items())
        raise ConfigurationError(
            f"roles: expected {wanted} ranks for {text}, got {size}; start that many (mpirun -n) or change the roles."
        )
    tasks = []
    for type_, count in counts.items():
        n_tasks = n_remaining if count is None else count
        for index in range(n_tasks):
            tasks.append(Task(type_, index))
    return tasks


def spec_of_tasks(tasks: list[Task]) -> ClusterSpec:
    """Return the cluster in which rank r has tasks[r]; addresses are labels `rank-r`."""
    jobs: dict[str, list[str]] = {}
    for rank, task in enumerate(tasks):
        jobs.setdefault(task.type, []).append(f"rank-{rank}")
    return ClusterSpec(jobs)


class UnionResolver(ClusterResolver):
    """Joins clusters: concatenates the tasks of each type in the order of the resolvers; each address counts once.

    This process's task comes from the first resolver that has one.

    Args:
        resolvers: resolvers of the clusters, at least one.

    Raises:
        UsageError: without resolvers, or if an argument is no resolver.
    """

    def __init__(self, *resolvers: ClusterResolver) -> None:
        are_resolvers = all(isinstance(resolver, ClusterResolver) for resolver in resolvers)
        if not resolvers or not are_resolvers:
            types = ", ".join(type(argument).__name__ for argument in resolvers)
            raise UsageError(
                f"UnionResolver: expected cluster resolvers, got {types}; "
                f"pass one or more, such as TFConfigClusterResolver()."
            )
        self._resolvers = resolvers

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the joined cluster, and this process's task in it."""
        specs = []
        own_spec = None
        own_task = None
        for resolver in self._resolvers:
            spec, task = resolver.resolve(rank, size)
            specs.append(spec)
            if own_task is None and task is not None:
                own_spec = spec
                own_task = task
        joined = _join(specs)
        if own_spec is None or own_task is None:
            return joined, None
        return joined, _renumbered(own_task, own_spec, joined)

    def cluster_spec(self) -> ClusterSpec:
        """Return the joined cluster."""
        return _join([resolver.cluster_spec() for resolver in self._resolvers])

    @property
    def task_type(self) -> str | None:
        """This process's task type."""
        task = self._own_task()
        if task is None:
            return None
        return task.type

    @property
    def task_id(self) -> int | None:
        """This process's task index in the joined cluster."""
        task = self._own_task()
        if task is None:
            return None
        return task.index

    def _own_task(self) -> Task | None:
        for resolver in self._resolvers:
            if resolver.task_type is not None:
                task = Task(resolver.task_type, resolver.task_id or 0)
                return _renumbered(task, resolver.cluster_spec(), self.cluster_spec())
        return None


def _join(specs: list[ClusterSpec]) -> ClusterSpec:
    """Return the cluster of all tasks of some clusters."""
    specs_of: dict[str, list[ClusterSpec]] = {}
    for spec in specs:
        for type_ in spec.jobs:
            specs_of.setdefault(type_, []).append(spec)
    jobs = {}
    for type_ in sorted(specs_of):
        jobs[type_] = _join_tasks(type_, specs_of[type_])
    return ClusterSpec(jobs)


def _join_tasks(type_: str, specs: list[ClusterSpec]) -> Addresses:
    """Return the different addresses of a type in order; if a cluster leaves out indices, all tasks keep their indices.

    Args:
        type_: type of the tasks.
        specs: clusters that have tasks of this type.

    Raises:
        ConfigurationError: if an index that is kept has two addresses.
    """
    keeps_indices = any(None in spec.job_tasks(type_) for spec in specs)
    addresses = []
    address_of: dict[int, str] = {}
    for spec in specs:
        for index in spec.task_indices(type_):
            address = spec.task_address(type_, index)
            addresses.append(address)
            if keeps_indices and address_of.setdefault(index, address) != address:
                raise ConfigurationError(
                    f"UnionResolver: expected one address of {type_} {index}, got {address_of[index]!r} and "
                    f"{address!r}; number the tasks alike."
                )
    if keeps_indices:
        return address_of
    return list(dict.fromkeys(addresses))


def _renumbered(task: Task, spec: ClusterSpec, joined: ClusterSpec) -> Task:
    """Return a task of one cluster with its index in the joined one."""
    if not spec:
        return task
    address = spec.task_address(task.type, task.index)
    return Task(task.type, joined.job_tasks(task.type).index(address))


class TPUClusterResolver(SimpleClusterResolver):
    """Every rank is a worker with an XLA device of its machine. It performs no lookup and opens no connection.

    Args:
        tpu: "local", "" or None, or the TPU's name, which is only a label. With an address, such as
            grpc://10.0.0.2:8470, the ranks use the TPUs of the hosts that they run on, and a warning is logged.
        zone, project: accepted for compatibility and ignored.
        job_name: type of the tasks; must be "worker".

    Raises:
        ConfigurationError: if job_name is another type; on this rank only.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
    ) -> None:
        if tpu is not None and ":" in tpu:
            logger.warning(
                "TPUClusterResolver: expected tpu='local' or a TPU's name, got the address %r: the ranks use the TPU "
                "of their own hosts.",
                tpu,
            )
        if job_name != "worker":
            raise ConfigurationError(
                f"TPUClusterResolver: expected job_name 'worker', got {job_name!r}; leave it out."
            )
        self.tpu = tpu or "local"
        super().__init__(ClusterSpec({}))

    def cluster_spec(self) -> ClusterSpec:
        """Return all ranks as workers, by the launcher's variables."""
        return MPIClusterResolver("worker:*").cluster_spec()

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the TPU's name, whichever task is asked for."""
        return self.tpu
