"""What every resolver answers, and the resolver that is told the answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from hpcdist.cluster.spec import ClusterSpec, Task


class ClusterResolver(ABC):
    """Finds the cluster that this process belongs to, and this process's task in it."""

    @abstractmethod
    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the cluster, and this process's task or None where the rank is to decide.

        Args:
            rank: this process's rank among all.
            size: the number of ranks; an empty cluster means that every rank is a worker.

        Raises:
            ConfigurationError: when the description is not valid, on this rank only.
        """

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster as this process alone sees it."""

    @property
    @abstractmethod
    def task_type(self) -> str | None:
        """This process's task type, or None when nothing says so."""

    @property
    @abstractmethod
    def task_id(self) -> int | None:
        """This process's task index, or None when nothing says so."""

    @property
    def host_names(self) -> Mapping[str, Task]:
        """Host name -> the one task whose address names it; empty when addresses are labels."""
        return {}


class SimpleClusterResolver(ClusterResolver):
    """A resolver that is told the answer.

    Args:
        cluster_spec: the cluster; empty where every rank is a worker.
        task_type, task_id: this process's task; None where the rank is to decide.
        environment, num_accelerators, rpc_layer: accepted as in TensorFlow; they say nothing to MPI.

    Raises:
        ConfigurationError: when the cluster has no such task.
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
        self._task = None if task_type is None else Task(task_type, task_id or 0)
        if self._task and cluster_spec:
            cluster_spec.check_task(self._task)

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return what the constructor was told."""
        return self._spec, self._task

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._spec

    @property
    def task_type(self) -> str | None:
        """This process's task type."""
        return self._task.type if self._task else None

    @property
    def task_id(self) -> int | None:
        """This process's task index."""
        return self._task.index if self._task else None
