"""MPIClusterResolver: roles from ranks."""

from collections.abc import Mapping
from typing import Protocol

from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.cluster.resolver import ClusterResolver
from hpcdist.cluster.roles import parse_roles, spec_of_tasks, tasks_of_roles
from hpcdist.cluster.spec import ClusterSpec, Task


class Communicator(Protocol):
    """The two calls of an MPI communicator that a role map needs."""

    def Get_rank(self) -> int:  # noqa: N802 - the name is MPI's
        """Return this process's rank."""

    def Get_size(self) -> int:  # noqa: N802 - the name is MPI's
        """Return the number of ranks."""


class MPIClusterResolver(ClusterResolver):
    """Gives roles to ranks in the order of a role map.

    Args:
        roles: a role map such as "chief:1,ps:2,evaluator:1,worker:*"; default: HPCDIST_ROLES, else every rank a worker.
        comm: the communicator whose ranks are meant; default: all ranks. Without it, questions asked before a strategy
            exists are answered from the launcher's variables.
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: when the role map is not valid.
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

    def _place(self) -> tuple[int, int]:
        if self.comm is not None:
            return self.comm.Get_rank(), self.comm.Get_size()
        return (self._launcher.rank, self._launcher.size) if self._launcher else (0, 1)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of all ranks."""
        return self.resolve(*self._place())[0]

    @property
    def task_type(self) -> str:
        """This rank's task type."""
        return self._own_task().type

    @property
    def task_id(self) -> int:
        """This rank's task index."""
        return self._own_task().index

    def _own_task(self) -> Task:
        rank, size = self._place()
        return tasks_of_roles(self._counts, size)[rank]
