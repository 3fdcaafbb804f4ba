"""ClusterSpec and Task: the frozen descriptions of a cluster and of one process's task in it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hpcdist.cluster.whole_numbers import whole_number
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


#: (index, address) of the tasks of one type, ordered by index.
_Tasks = tuple[tuple[int, str], ...]
#: Addresses in the order of tasks, or index -> address if some indices are left out.
Addresses = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, init=False)
class ClusterSpec:
    """Task types and the addresses of their tasks, validated once.

    Args:
        jobs: task type -> addresses, which are a list, or a dict by index that may leave out indices; or a
            ClusterSpec. Addresses are labels: hpcdist opens no socket.

    Raises:
        ConfigurationError: a ValueError, on an unknown type, two chiefs, two evaluators, an index that is no whole
            number from 0, or an address that is empty, not text, or the address of another task.
    """

    _jobs: tuple[tuple[str, _Tasks], ...]

    def __init__(self, jobs: "Mapping[str, Addresses] | ClusterSpec") -> None:
        if isinstance(jobs, ClusterSpec):
            jobs = jobs.as_dict()
        tasks_of: dict[str, _Tasks] = {}
        all_addresses: list[str] = []
        for type_, addresses in jobs.items():
            tasks = _numbered(type_, addresses)
            tasks_of[type_] = tasks
            all_addresses += dict(tasks).values()
        _check_distinct(all_addresses)
        ordered: list[tuple[str, _Tasks]] = []
        for type_ in TASK_TYPES:
            if tasks_of.get(type_):
                ordered.append((type_, tasks_of[type_]))
        object.__setattr__(self, "_jobs", tuple(ordered))

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __str__(self) -> str:
        counts = [f"{type_}:{len(tasks)}" for type_, tasks in self._jobs]
        return ", ".join(counts) or "no tasks"

    @property
    def jobs(self) -> list[str]:
        """The task types that have at least one task."""
        return list(dict(self._jobs))

    def has_tasks(self, type_: str) -> bool:
        """Return whether there is a task of a type."""
        return type_ in self.jobs

    def as_dict(self) -> dict[str, Any]:
        """Return task type -> addresses: a list, or a dict by index where an index is left out."""
        return {type_: self._addresses(tasks) for type_, tasks in self._jobs}

    @staticmethod
    def _addresses(tasks: _Tasks) -> Any:
        """Return the addresses of a type: a list, or a dict by index if an index is left out."""
        address_of = dict(tasks)
        if list(address_of) == list(range(len(tasks))):
            return list(address_of.values())
        return address_of

    def _tasks_of(self, type_: str) -> dict[int, str]:
        """Return index -> address of the tasks of a type.

        Raises:
            ConfigurationError: if the cluster has no such type.
        """
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
        address_of = self._tasks_of(type_)
        n_indices = max(address_of) + 1
        return list(map(address_of.get, range(n_indices)))

    def num_tasks(self, type_: str) -> int:
        """Return the number of tasks of one type.

        Raises:
            ConfigurationError: if the cluster has no such type; `has_tasks` tells whether it has.
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
        if self.has_tasks("chief"):
            return Task("chief", 0)
        if self.has_tasks("worker"):
            return Task("worker", self.task_indices("worker")[0])
        return Task("worker", 0)

    def check_task(self, task: Task) -> None:
        """Raise ConfigurationError unless `task` belongs to this cluster."""
        indices = self.task_indices(task.type)
        if task.index in indices:
            return
        listed_indices = ", ".join(map(str, indices))
        valid_indices = f"of {listed_indices}"
        if indices == list(range(len(indices))):
            valid_indices = f"from 0 to {len(indices) - 1}"
        raise ConfigurationError(
            f"cluster: expected a {task.type} index {valid_indices}, got {task.index}; "
            f"give the task an index that the cluster lists."
        )


def _numbered(type_: str, addresses: Addresses) -> _Tasks:
    """Return (index, address) of the tasks of one type, ordered by index.

    Raises:
        ConfigurationError: if the type, an index or an address is not valid.
    """
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
    if not isinstance(addresses, Mapping):
        addresses = dict(enumerate(addresses))
    indices = []
    tasks = []
    for index, address in addresses.items():
        # a cluster that was read from JSON has texts as indices
        number = _index_number(index)
        if number is None:
            raise ConfigurationError(
                f"cluster: expected indices from 0 in cluster.{type_}, got {index!r}; number the tasks."
            )
        if not isinstance(address, str) or not address.strip():
            raise ConfigurationError(
                f"cluster: expected addresses as text in cluster.{type_}, got {address!r}; name a host or a label."
            )
        tasks.append((number, address))
        indices.append(number)
    for index, n_tasks in Counter(indices).items():
        if n_tasks > 1:
            raise ConfigurationError(
                f"cluster: expected every index once in cluster.{type_}, got {index} {n_tasks} times; number the tasks."
            )
    return tuple(sorted(tasks))


def _index_number(index: Any) -> int | None:
    """Return the index of a task as a number; None if it is no whole number from 0."""
    if isinstance(index, bool) or not isinstance(index, (str, Integral)):
        return None
    return whole_number(str(index))


def _check_distinct(addresses: list[str]) -> None:
    """Raise ConfigurationError if two tasks have the same address."""
    for address, n_tasks in Counter(addresses).items():
        if n_tasks > 1:
            raise ConfigurationError(
                f"cluster: expected every address once, got {address!r} {n_tasks} times; give each task its own "
                "(host:port)."
            )
