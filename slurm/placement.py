"""The nodes of a launch: which ones a restart gets, and which one failed first by what the launcher printed."""

import re
from collections.abc import Sequence

from restart_rule import Launch


def restart_nodes(
    launch: Launch, nodes: Sequence[str], answering: Sequence[str], failed_node: str | None
) -> Sequence[str] | None:
    """Return the nodes for a restart at once; None if there are none, or the same ones would fail again.

    Args:
        launch: how the launch ended.
        nodes: names of its nodes; empty if they are not known.
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


#: What srun, MPICH's mpirun and Open MPI's print of the first rank that fails: its node, and how it ended.
_FAILURES = (
    re.compile(r"srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.+)"),
    re.compile(r"RUNNING AT (?P<node>\S+)\n=\s+EXIT CODE: (?P<how>\d+)$", re.MULTILINE),
    re.compile(r"on node (?P<node>\S+) exited on signal (?P<how>\d+)"),
)
_SIGNALS = re.compile(
    r"(Killed|Segmentation fault|Bus error|Illegal instruction|Aborted|[46789]$|11$)"
)


def failed_node(text: str) -> str | None:
    """Return the node whose rank a signal ended first, by what the launcher printed; None if no signal did."""
    matches = [
        match for match in (pattern.search(text) for pattern in _FAILURES) if match is not None
    ]
    first = min(matches, key=re.Match.start, default=None)
    return first["node"] if first is not None and _SIGNALS.match(first["how"]) else None


def filled(command: Sequence[str], nodes: str, n_nodes: int, ranks_per_node: int) -> list[str]:
    """Return a command with %nodes, %hosts, %n_nodes and %n_ranks replaced; see job.py."""
    values = {
        "nodes": nodes,
        "hosts": ",".join(f"{node}:{ranks_per_node}" for node in nodes.split(",")),
        "n_nodes": str(n_nodes),
        "n_ranks": str(n_nodes * ranks_per_node),
    }
    return [
        re.sub(
            r"%(n_nodes|n_ranks|nodes|hosts)\b", lambda placeholder: values[placeholder[1]], part
        )
        for part in command
    ]
