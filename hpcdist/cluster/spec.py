"""ClusterSpec and Task: the frozen description of a job and of one process's task in it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import ConfigurationError

#: The task types, in the order in which entries are counted.
TASK_TYPES = ("chief", "worker", "ps", "evaluator")
#: Task types of which a cluster has at most one.
SINGLE_TASK_TYPES = ("chief", "evaluator")
#: Task types that compute gradients; together they form the worker group.
TRAINING_TASK_TYPES = ("chief", "worker")


@dataclass(frozen=True)
class Task:
    """One entry of a cluster: its type and its index within the type.

    Raises:
        ConfigurationError: on an unknown type, or an index that is not an integer from 0.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        if self.type not in TASK_TYPES or type(self.index) is not int or self.index < 0:
            raise ConfigurationError(
                f"task: expected a type of {', '.join(TASK_TYPES)} and an index from 0, got {self.type!r} "
                f"{self.index!r}; correct the task."
            )

    def __str__(self) -> str:
        return f"{self.type} {self.index}"

    @property
    def is_training(self) -> bool:
        """Whether the task computes gradients (chief or worker)."""
        return self.type in TRAINING_TASK_TYPES


@dataclass(frozen=True, init=False)
class ClusterSpec:
    """Task types and the addresses of their tasks, validated once.

    Args:
        jobs: task type -> addresses. Addresses are labels: hpcdist opens no socket.

    Raises:
        ConfigurationError: on an unknown type, two chiefs, two evaluators, or an address that is empty, not text or
            given twice.
    """

    _jobs: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(self, jobs: Mapping[str, Sequence[str]]) -> None:
        for type_, addresses in jobs.items():
            _check_job(type_, addresses)
        _check_distinct([address for addresses in jobs.values() for address in addresses])
        ordered = tuple((type_, tuple(jobs[type_])) for type_ in TASK_TYPES if jobs.get(type_))
        object.__setattr__(self, "_jobs", ordered)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __str__(self) -> str:
        return ", ".join(f"{type_}:{len(addresses)}" for type_, addresses in self._jobs) or "no tasks"

    @property
    def jobs(self) -> list[str]:
        """The task types that have at least one task."""
        return [type_ for type_, _ in self._jobs]

    def as_dict(self) -> dict[str, list[str]]:
        """Return task type -> addresses."""
        return {type_: list(addresses) for type_, addresses in self._jobs}

    def job_tasks(self, type_: str) -> list[str]:
        """Return the addresses of one task type.

        Raises:
            ConfigurationError: if the cluster has no such type.
        """
        for known, addresses in self._jobs:
            if known == type_:
                return list(addresses)
        raise ConfigurationError(f"cluster: expected a task type of {self.jobs}, got {type_!r}; add it to the cluster.")

    def num_tasks(self, type_: str) -> int:
        """Return the number of tasks of one type; 0 for a type that the cluster does not have."""
        return len(self.as_dict().get(type_, ()))

    def task_indices(self, type_: str) -> list[int]:
        """Return the indices of the tasks of one type: all from 0 on.

        Raises:
            ConfigurationError: if the cluster has no such type.
        """
        return list(range(len(self.job_tasks(type_))))

    def task_address(self, type_: str, index: int) -> str:
        """Return the address of one task.

        Raises:
            ConfigurationError: if there is no such type or index.
        """
        self.check_task(Task(type_, index))
        return self.job_tasks(type_)[index]

    def tasks(self) -> Iterator[Task]:
        """Yield every task: chief, workers, ps, evaluator."""
        for type_, addresses in self._jobs:
            for index in range(len(addresses)):
                yield Task(type_, index)

    @property
    def chief(self) -> Task:
        """The task that saves and logs: the chief entry, or worker 0 without one."""
        return Task("chief" if self.num_tasks("chief") else "worker", 0)

    def check_task(self, task: Task) -> None:
        """Raise ConfigurationError unless `task` is one of this cluster's."""
        count = len(self.job_tasks(task.type))
        if not 0 <= task.index < count:
            raise ConfigurationError(
                f"cluster: expected a {task.type} index from 0 to {count - 1}, got {task.index}; "
                f"give the task an index that the cluster lists."
            )


def _check_job(type_: str, addresses: Sequence[str]) -> None:
    if type_ not in TASK_TYPES:
        raise ConfigurationError(
            f"cluster: expected task types of {', '.join(TASK_TYPES)}, got {type_!r}; rename or remove it."
        )
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise ConfigurationError(
            f"cluster: expected a list of addresses for {type_!r}, got {addresses!r}; write a JSON list."
        )
    if type_ in SINGLE_TASK_TYPES and len(addresses) > 1:
        raise ConfigurationError(
            f"cluster: expected at most one {type_}, got {len(addresses)}; keep one entry in cluster.{type_}."
        )
    for address in addresses:
        if not isinstance(address, str) or not address.strip():
            raise ConfigurationError(
                f"cluster: expected addresses as text in cluster.{type_}, got {address!r}; name a host or a label."
            )


def _check_distinct(addresses: list[str]) -> None:
    for address, times in Counter(addresses).items():
        if times > 1:
            raise ConfigurationError(
                f"cluster: expected every address once, got {address!r} {times} times; give each task its own "
                "(host:port)."
            )
