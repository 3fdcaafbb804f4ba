"""Role maps such as `chief:1,ps:2,evaluator:1,worker:*`: text to counts, counts to tasks in rank order."""

from collections.abc import Mapping

from hpcdist.cluster.spec import SINGLE_TASK_TYPES, TASK_TYPES, ClusterSpec, Task
from hpcdist.errors import ConfigurationError

_EXAMPLE = "write for example chief:1,ps:2,worker:*"


def parse_roles(text: str) -> dict[str, int | None]:
    """Parse a role map; `*` (all remaining ranks) becomes None. The order of the text is kept.

    Raises:
        ConfigurationError: on an unknown or repeated type, a count that is not a number above 0, or two `*`.
    """
    counts: dict[str, int | None] = {}
    for part in text.split(","):
        type_, _, count = (piece.strip() for piece in part.partition(":"))
        if type_ not in TASK_TYPES or type_ in counts:
            raise ConfigurationError(
                f"roles: expected each of {', '.join(TASK_TYPES)} at most once, got {part!r} in {text!r}; {_EXAMPLE}."
            )
        counts[type_] = _parse_count(count, part, text)
        if type_ in SINGLE_TASK_TYPES and counts[type_] != 1:
            raise ConfigurationError(f"roles: expected at most one {type_}, got {part!r}; write {type_}:1.")
    if list(counts.values()).count(None) > 1:
        raise ConfigurationError(f"roles: expected at most one *, got {text!r}; {_EXAMPLE}.")
    return counts


def _parse_count(count: str, part: str, text: str) -> int | None:
    if count == "*":
        return None
    if not count.isdecimal() or int(count) < 1:
        raise ConfigurationError(f"roles: expected a count above 0 or *, got {part!r} in {text!r}; {_EXAMPLE}.")
    return int(count)


def tasks_of_roles(counts: Mapping[str, int | None], size: int) -> list[Task]:
    """Return the task of every rank 0..size-1: types in the map's order, `*` taking what is left.

    Raises:
        ConfigurationError: when the roles need another number of ranks than there are.
    """
    fixed = sum(count for count in counts.values() if count is not None)
    is_open = None in counts.values()
    rest = size - fixed
    if rest < (1 if is_open else 0) or (rest > 0 and not is_open):
        wanted = f"at least {fixed + 1}" if is_open else f"exactly {fixed}"
        text = ",".join(f"{type_}:{'*' if count is None else count}" for type_, count in counts.items())
        raise ConfigurationError(
            f"roles: expected {wanted} ranks for {text}, got {size}; start that many (mpirun -n) or change the roles."
        )
    return [Task(type_, index) for type_, count in counts.items() for index in range(rest if count is None else count)]


def spec_of_tasks(tasks: list[Task]) -> ClusterSpec:
    """Return the cluster in which rank r has tasks[r]; addresses are labels `rank-r`."""
    jobs: dict[str, list[str]] = {}
    for rank, task in enumerate(tasks):
        jobs.setdefault(task.type, []).append(f"rank-{rank}")
    return ClusterSpec(jobs)
