"""UnionResolver: the tasks of several resolvers as one cluster."""

from hpcdist.cluster.resolver import ClusterResolver
from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import UsageError


class UnionResolver(ClusterResolver):
    """Joins clusters: tasks of one type follow one another, in the order of the resolvers; each address counts once.

    This process's task is that of the first resolver that knows one.

    Args:
        resolvers: at least one.

    Raises:
        UsageError: without resolvers, or for anything that is none.
    """

    def __init__(self, *resolvers: ClusterResolver) -> None:
        if not resolvers or not all(isinstance(resolver, ClusterResolver) for resolver in resolvers):
            raise UsageError(
                f"UnionResolver: expected cluster resolvers, got {', '.join(type(one).__name__ for one in resolvers)}; "
                f"pass one or more, such as TFConfigClusterResolver()."
            )
        self._resolvers = resolvers

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the joined cluster, and this process's task in it."""
        found = [resolver.resolve(rank, size) for resolver in self._resolvers]
        joined = _join([spec for spec, _ in found])
        return joined, next((_moved(task, spec, joined) for spec, task in found if task is not None), None)

    def cluster_spec(self) -> ClusterSpec:
        """Return the joined cluster."""
        return _join([resolver.cluster_spec() for resolver in self._resolvers])

    @property
    def task_type(self) -> str | None:
        """This process's task type."""
        task = self._own_task()
        return None if task is None else task.type

    @property
    def task_id(self) -> int | None:
        """This process's task index in the joined cluster."""
        task = self._own_task()
        return None if task is None else task.index

    def _own_task(self) -> Task | None:
        for resolver in self._resolvers:
            if resolver.task_type is not None:
                task = Task(resolver.task_type, resolver.task_id or 0)
                return _moved(task, resolver.cluster_spec(), self.cluster_spec())
        return None


def _join(specs: list[ClusterSpec]) -> ClusterSpec:
    jobs: dict[str, list[str]] = {}
    for spec in specs:
        for type_, addresses in spec.as_dict().items():
            known = jobs.setdefault(type_, [])
            known += [address for address in addresses if address not in known]
    return ClusterSpec(jobs)


def _moved(task: Task, spec: ClusterSpec, joined: ClusterSpec) -> Task:
    """Return a task of one cluster as the joined one numbers it."""
    if not spec:
        return task
    return Task(task.type, joined.job_tasks(task.type).index(spec.task_address(task.type, task.index)))
