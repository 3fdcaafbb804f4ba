"""ClusterSpec and Task: the frozen description of a job and of one process's task in it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


#: Addresses in order, or by index where some indices are left out.
Addresses = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, init=False)
class ClusterSpec:
    """Task types and the addresses of their tasks, validated once.

    Args:
        jobs: task type -> addresses, a list or a dict by index, which may leave out indices; or a ClusterSpec.
            Addresses are labels: hpcdist opens no socket.

    Raises:
        ConfigurationError: a ValueError, on an unknown type, two chiefs, two evaluators, an index that is no whole
            number from 0, or an address that is empty, not text or given twice.
    """

    _jobs: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]

    def __init__(self, jobs: "Mapping[str, Addresses] | ClusterSpec") -> None:
        addresses_by_type = jobs.as_dict() if isinstance(jobs, ClusterSpec) else jobs
        numbered = {
            type_: _numbered(type_, addresses) for type_, addresses in addresses_by_type.items()
        }
        _check_distinct([address for tasks in numbered.values() for _, address in tasks])
        ordered = tuple((type_, numbered[type_]) for type_ in TASK_TYPES if numbered.get(type_))
        object.__setattr__(self, "_jobs", ordered)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __str__(self) -> str:
        return ", ".join(f"{type_}:{len(tasks)}" for type_, tasks in self._jobs) or "no tasks"

    @property
    def jobs(self) -> list[str]:
        """The task types that have at least one task."""
        return [type_ for type_, _ in self._jobs]

    def has_tasks(self, type_: str) -> bool:
        """Return whether there is a task of a type."""
        return type_ in self.jobs

    def as_dict(self) -> dict[str, Any]:
        """Return task type -> addresses: a list, or a dict by index where an index is left out."""
        return {type_: self._addresses(tasks) for type_, tasks in self._jobs}

    @staticmethod
    def _addresses(tasks: tuple[tuple[int, str], ...]) -> Any:
        is_dense = [index for index, _ in tasks] == list(range(len(tasks)))
        return [address for _, address in tasks] if is_dense else dict(tasks)

    def _tasks_of(self, type_: str) -> dict[int, str]:
        for job_type, tasks in self._jobs:
            if job_type == type_:
                return dict(tasks)
        raise ConfigurationError(
            f"cluster: expected a task type of {self.jobs}, got {type_!r}; add it to the cluster."
        )

    def job_tasks(self, type_: str) -> list[str | None]:
        """Return the addresses of one task type by index; None for an index that is left out.

        Raises:
            ConfigurationError: if the cluster has no such type.
        """
        tasks = self._tasks_of(type_)
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def num_tasks(self, type_: str) -> int:
        """Return the number of tasks of one type.

        Raises:
            ConfigurationError: if the cluster has no such type; `has_tasks` asks.
        """
        return len(self._tasks_of(type_))

    def task_indices(self, type_: str) -> list[int]:
        """Return the indices of the tasks of one type, ascending.

        Raises:
            ConfigurationError: if the cluster has no such type.
        """
        return list(self._tasks_of(type_))

    def task_address(self, type_: str, index: int) -> str:
        """Return the address of one task.

        Raises:
            ConfigurationError: if there is no such type or index.
        """
        self.check_task(Task(type_, index))
        return self._tasks_of(type_)[index]

    def tasks(self) -> Iterator[Task]:
        """Yield every task: chief, workers, ps, evaluator."""
        for type_, tasks in self._jobs:
            for index, _ in tasks:
                yield Task(type_, index)

    @property
    def chief(self) -> Task:
        """The task that saves and logs: the chief entry, or the first worker without one."""
        if self.has_tasks("chief") or not self.has_tasks("worker"):
            return Task("chief" if self.has_tasks("chief") else "worker", 0)
        return Task("worker", self.task_indices("worker")[0])

    def check_task(self, task: Task) -> None:
        """Raise ConfigurationError unless `task` is one of this cluster's."""
        indices = self.task_indices(task.type)
        if task.index not in indices:
            is_dense = indices == list(range(len(indices)))
            valid_indices = (
                f"from 0 to {len(indices) - 1}"
                if is_dense
                else f"of {', '.join(map(str, indices))}"
            )
            raise ConfigurationError(
                f"cluster: expected a {task.type} index {valid_indices}, got {task.index}; "
                f"give the task an index that the cluster lists."
            )


def _numbered(type_: str, addresses: Addresses) -> tuple[tuple[int, str], ...]:
    """Return (index, address) of the tasks of one type, by index; checked."""
    if type_ not in TASK_TYPES:
        raise ConfigurationError(
            f"cluster: expected task types of {', '.join(TASK_TYPES)}, got {type_!r}; rename or remove it."
        )
    if isinstance(addresses, str) or not isinstance(addresses, (Sequence, Mapping)):
        raise ConfigurationError(
            f"cluster: expected a list of addresses for {type_!r}, got {addresses!r}; write a JSON list."
        )
    if type_ in SINGLE_TASK_TYPES and len(addresses) > 1:
        raise ConfigurationError(
            f"cluster: expected at most one {type_}, got {len(addresses)}; keep one entry in cluster.{type_}."
        )
    indexed_addresses = list(
        addresses.items() if isinstance(addresses, Mapping) else enumerate(addresses)
    )
    for index, address in indexed_addresses:
        if not str(index).isdecimal() or isinstance(index, bool):
            raise ConfigurationError(
                f"cluster: expected indices from 0 in cluster.{type_}, got {index!r}; number the tasks."
            )
        if not isinstance(address, str) or not address.strip():
            raise ConfigurationError(
                f"cluster: expected addresses as text in cluster.{type_}, got {address!r}; name a host or a label."
            )
    # JSON has texts for keys
    return tuple(sorted((int(index), address) for index, address in indexed_addresses))


def _check_distinct(addresses: list[str]) -> None:
    for address, times in Counter(addresses).items():
        if times > 1:
            raise ConfigurationError(
                f"cluster: expected every address once, got {address!r} {times} times; give each task its own "
                "(host:port)."
            )
