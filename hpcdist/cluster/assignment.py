"""Assigns a task to each rank: a pure function of the cluster and three numbers per rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import ConfigurationError

NONE = -1


@dataclass(frozen=True)
class RankFacts:
    """One rank's own facts: three numbers, so that a large world exchanges 12 bytes per rank.

    Attributes:
        declared: position in `ClusterSpec.tasks()` of the task that the rank was given, or NONE.
        node: number of the rank's host; hosts are numbered by their lowest rank.
        named: position of the entry whose address names this rank's host, or NONE.
    """

    declared: int
    node: int
    named: int


def assign_tasks(spec: ClusterSpec, facts: Sequence[RankFacts]) -> list[Task]:
    """Return the task of every rank.

    A chief or worker entry owns one or more ranks, all on one host; a ps or evaluator entry owns one rank. Declared
    tasks are used as they are. Otherwise, if there are as many ranks as entries, ranks take entries in the order chief,
    worker, ps, evaluator. Else each host is one entry, matched by name if addresses name hosts, else in host order.

    Raises:
        ConfigurationError: if ranks and entries do not match.
    """
    entries = list(spec.tasks())
    declared = [rank for rank, fact in enumerate(facts) if fact.declared != NONE]
    if declared and len(declared) != len(facts):
        undeclared = next(rank for rank, fact in enumerate(facts) if fact.declared == NONE)
        raise ConfigurationError(
            f"cluster: expected a task on every rank or none, got one on rank {declared[0]} and none on rank "
            f'{undeclared}; set "task" for each rank, or drop it: tasks then follow the ranks.'
        )
    if declared:
        owned = [fact.declared for fact in facts]
    elif len(entries) == len(facts):
        owned = list(range(len(entries)))
    else:
        owned = _entries_by_host(spec, entries, facts)
    _check_owned(spec, entries, owned, facts)
    return [entries[entry] for entry in owned]


def _entries_by_host(
    spec: ClusterSpec, entries: list[Task], facts: Sequence[RankFacts]
) -> list[int]:
    nodes = sorted({fact.node for fact in facts})
    if len(nodes) != len(entries) or len(facts) < len(entries):
        raise ConfigurationError(
            f"cluster: expected {len(entries)} ranks, or {len(entries)} hosts, for {spec}, got {len(facts)} ranks on "
            f"{len(nodes)} hosts; start one rank per entry (mpirun -n {len(entries)}) or one host per entry."
        )
    if all(fact.named != NONE for fact in facts) and len({fact.named for fact in facts}) == len(
        nodes
    ):
        return [fact.named for fact in facts]
    return [nodes.index(fact.node) for fact in facts]


def _check_owned(
    spec: ClusterSpec, entries: list[Task], owned: list[int], facts: Sequence[RankFacts]
) -> None:
    if len(owned) == 1 and len(entries) > 1:
        raise ConfigurationError(
            f"cluster: expected a rank for each entry of {spec}, got {entries[owned[0]]} alone in a world of 1; start "
            f"all of them by one launcher (mpirun -n {len(entries)}, or srun): plain processes do not find each other."
        )
    if len(set(owned)) == 1 and len(entries) > 1:
        raise ConfigurationError(
            f"cluster: expected a different task on every rank, got {entries[owned[0]]} on all {len(owned)}; "
            f'drop "task" from TF_CONFIG: tasks then follow the ranks.'
        )
    ranks_of: dict[int, list[int]] = {}
    for rank, entry_index in enumerate(owned):
        ranks_of.setdefault(entry_index, []).append(rank)
    for index, entry in enumerate(entries):
        ranks = ranks_of.get(index, [])
        nodes = {facts[rank].node for rank in ranks}
        if not ranks:
            raise ConfigurationError(
                f"cluster: expected a rank for each entry of {spec}, got none for {entry} among {len(owned)} ranks; "
                f"start more ranks or remove the entry."
            )
        if len(nodes) > 1 or (len(ranks) > 1 and not entry.is_training):
            limit = "ranks on one host" if entry.is_training else "one rank"
            raise ConfigurationError(
                f"cluster: expected {limit} for {entry}, got ranks {ranks[:8]} on {len(nodes)} hosts; "
                f'give each rank its own task, or drop "task": tasks then follow the ranks.'
            )
