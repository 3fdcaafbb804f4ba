"""Chooses the nodes of a restart, and finds the node that failed first in the output of a launcher."""

import re
from collections.abc import Sequence

from restart_rule import Launch


def restart_nodes(
    launch: Launch,
    nodes: Sequence[str],
    answering: Sequence[str],
    failed_node: str | None,
) -> Sequence[str] | None:
    """Return the nodes for a restart at once; None if there are none, or if the same nodes would fail again.

    Args:
        launch: how the launch ended.
        nodes: names of the launch's nodes; empty if they are not known.
        answering: names of the nodes that can start a process: a batch system takes minutes to notice a lost one.
        failed_node: node whose rank a signal ended first; None if unknown. It may be sick, and is left out until the
            next requeue, unless a node is lost: Slurm kills the ranks on the others then.
    """
    if nodes and not answering:
        return None
    if answering != nodes:
        return answering
    if launch.decision == "none":  # on the same nodes it might fail again for the same reason
        return None
    return [node for node in nodes if node != failed_node] or nodes


#: Lines of srun, MPICH's mpirun and Open MPI's mpirun about a rank that fails: its node, and how it ended.
_FAILURES = (
    re.compile(r"srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.+)"),
    re.compile(r"RUNNING AT (?P<node>\S+)\n=\s+EXIT CODE: (?P<how>\d+)$", re.MULTILINE),
    re.compile(r"on node (?P<node>\S+) exited on signal (?P<how>\d+)"),
)
_SIGNALS = re.compile(
    r"(Killed|Segmentation fault|Bus error|Illegal instruction|Aborted|[46789]$|11$)"
)
_PLACEHOLDER = re.compile(r"%(n_nodes|n_ranks|nodes|hosts)\b")


def failed_node(text: str) -> str | None:
    """Return the node whose rank a signal ended first, by what the launcher printed; None if no signal did."""
    first = None
    for pattern in _FAILURES:
        failure = pattern.search(text)
        if failure is None:
            continue
        if first is None or failure.start() < first.start():
            first = failure
    if first is None or not _SIGNALS.match(first["how"]):
        return None
    return first["node"]


def filled(
    command: Sequence[str],
    nodes: str,
    n_nodes: int,
    ranks_per_node: int,
) -> list[str]:
    """Return a command with %nodes, %hosts, %n_nodes and %n_ranks replaced, as the top of job.py says."""
    hosts = [f"{node}:{ranks_per_node}" for node in nodes.split(",")]
    values = {
        "nodes": nodes,
        "hosts": ",".join(hosts),
        "n_nodes": str(n_nodes),
        "n_ranks": str(n_nodes * ranks_per_node),
    }

    def value_of(placeholder: "re.Match[str]") -> str:
        return values[placeholder[1]]

    return [_PLACEHOLDER.sub(value_of, part) for part in command]
