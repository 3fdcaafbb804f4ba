"""Assigns a task to each rank: a pure function of the cluster and three numbers per rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import ConfigurationError

NONE = -1


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank: three numbers, so that a large world exchanges 12 bytes per rank.

    Attributes:
        declared: position in `ClusterSpec.tasks()` of the task that the environment gives the rank, or NONE.
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

    Args:
        spec: the cluster.
        facts: facts of every rank, in the order of ranks.

    Raises:
        ConfigurationError: if ranks and entries do not match.
    """
    entries = list(spec.tasks())
    declared = [fact.declared for fact in facts]
    n_declared = len(facts) - declared.count(NONE)
    if 0 < n_declared < len(facts):
        declared_rank = next(rank for rank, entry in enumerate(declared) if entry != NONE)
        undeclared_rank = declared.index(NONE)
        raise ConfigurationError(
            f"cluster: expected a task on every rank or none, got one on rank {declared_rank} and none on rank "
            f'{undeclared_rank}; set "task" for each rank, or drop it: tasks then follow the ranks.'
        )
    if n_declared:
        entry_of_rank = declared
    elif len(entries) == len(facts):
        entry_of_rank = list(range(len(entries)))
    else:
        entry_of_rank = _entries_by_host(spec, entries, facts)
    _check_entries(spec, entries, entry_of_rank, facts)
    return [entries[entry] for entry in entry_of_rank]


def _entries_by_host(
    spec: ClusterSpec, entries: list[Task], facts: Sequence[RankFacts]
) -> list[int]:
    """Return the position of each rank's entry, where each host is one entry."""
    node_of_rank = [fact.node for fact in facts]
    nodes = sorted(set(node_of_rank))
    n_entries = len(entries)
    n_ranks = len(facts)
    n_hosts = len(nodes)
    if n_hosts != n_entries or n_ranks < n_entries:
        raise ConfigurationError(
            f"cluster: expected {n_entries} ranks, or {n_entries} hosts, for {spec}, got {n_ranks} ranks on "
            f"{n_hosts} hosts; start one rank per entry (mpirun -n {n_entries}) or one host per entry."
        )
    named = [fact.named for fact in facts]
    if NONE not in named and len(set(named)) == n_hosts:
        return named
    return [nodes.index(node) for node in node_of_rank]


def _check_entries(
    spec: ClusterSpec,
    entries: list[Task],
    entry_of_rank: list[int],
    facts: Sequence[RankFacts],
) -> None:
    """Raise ConfigurationError unless each entry has its ranks: one, or several on one host if it trains."""
    n_entries = len(entries)
    n_ranks = len(entry_of_rank)
    if n_ranks == 1 and n_entries > 1:
        raise ConfigurationError(
            f"cluster: expected a rank for each entry of {spec}, got {entries[entry_of_rank[0]]} alone in a world of "
            f"1; start all of them by one launcher (mpirun -n {n_entries}, or srun): plain processes do not find each "
            f"other."
        )
    if len(set(entry_of_rank)) == 1 and n_entries > 1:
        raise ConfigurationError(
            f"cluster: expected a different task on every rank, got {entries[entry_of_rank[0]]} on all "
            f'{n_ranks}; drop "task" from TF_CONFIG: tasks then follow the ranks.'
        )
    ranks_of: dict[int, list[int]] = {}
    nodes_of: dict[int, set[int]] = {}
    for rank, entry_index in enumerate(entry_of_rank):
        ranks_of.setdefault(entry_index, []).append(rank)
        nodes_of.setdefault(entry_index, set()).add(facts[rank].node)
    for index, entry in enumerate(entries):
        if index not in ranks_of:
            raise ConfigurationError(
                f"cluster: expected a rank for each entry of {spec}, got none for {entry} among {n_ranks} ranks; "
                f"start more ranks or remove the entry."
            )
        ranks = ranks_of[index]
        n_hosts = len(nodes_of[index])
        if n_hosts > 1 or (len(ranks) > 1 and not entry.is_training):
            limit = "ranks on one host" if entry.is_training else "one rank"
            raise ConfigurationError(
                f"cluster: expected {limit} for {entry}, got ranks {ranks[:8]} on {n_hosts} hosts; "
                f'give each rank its own task, or drop "task": tasks then follow the ranks.'
            )
