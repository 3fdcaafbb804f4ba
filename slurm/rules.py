"""What follows a launch: the rules, without the batch system."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

#: Exit codes of hpcdist after which the same command would end in the same way: usage, "do not requeue", configuration.
FINAL_CODES = (2, 76, 78)
#: The exit code that asks to be run again.
RUN_AGAIN = 75


class Ended(NamedTuple):
    """How a launch ended.

    Attributes:
        code: the launcher's exit code; 128 + n if signal n ended it.
        decision: requeue, stop or finished; "none" if the launch wrote no decision, "another" if another job has taken
            over the run.
        reason: that of the decision; for "another", the other job's id.
        earlier: the decision before the launch, of any job; "none" if this launch has replaced it.
        is_signalled: whether the exit code is that of a signal.
    """

    code: int
    decision: str = "none"
    reason: str = ""
    earlier: str = "none"
    is_signalled: bool = False


class End(NamedTuple):
    """End the job with an exit code, for a reason that is empty at a good end."""

    code: int
    why: str


class Requeue(NamedTuple):
    """Have the job requeued for a reason; if its program had not begun, only a few times in a row."""

    why: str
    is_early: bool = False


def action_after(ended: Ended, is_preempted: bool, is_out_of_time: bool) -> End | Requeue:
    """Return what follows a launch that is not restarted at once.

    | exit code      | decision | then                                                              |
    |----------------|----------|-------------------------------------------------------------------|
    | 2, 76, 78      | any      | end with it                                                       |
    | any            | finished | end with it                                                       |
    | any            | requeue  | requeue                                                           |
    | any            | stop     | end with 76                                                       |
    | any            | another  | end with 76                                                       |
    | 0, of a signal | none     | requeue, if the job was preempted; or out of time (early)         |
    | of a signal    | none     | requeue (early): a wrong command exits with 127 at most           |
    | any            | none     | requeue (early), if the run has begun in an earlier launch        |
    | any            | none     | end with it; with 1 in place of 0                                 |
    """
    code = ended.code
    if code in FINAL_CODES:
        return End(code, f"exit code {code}")
    if ended.decision == "finished":
        return End(code, "")
    if ended.decision == "requeue":
        return Requeue(ended.reason)
    if ended.decision == "stop":
        return End(76, ended.reason)
    if ended.decision == "another":
        return End(76, f"job {ended.reason} has taken over the run folder")
    if code == 0 or ended.is_signalled:
        if is_preempted:
            return Requeue("preempted before it had begun")
        if is_out_of_time:
            return Requeue("out of time before it had begun", is_early=True)
    if ended.is_signalled or ended.earlier == "requeue":
        return Requeue("died before it had begun", is_early=True)
    return not_begun(code)


def not_begun(code: int) -> End:
    """Return the end of a job whose program did not begin. It is no success, whatever the launcher says."""
    return End(code or 1, f"exit code {code} before it had begun")


def has_died(ended: Ended) -> bool:
    """Return whether a launch died: neither stopped on request nor ended with an error of its own."""
    if ended.code in (*FINAL_CODES, 74, RUN_AGAIN):
        return False
    return ended.decision == "none" or (ended.decision == "requeue" and ended.reason.startswith("died"))


def restart_nodes(
    ended: Ended, nodes: Sequence[str], answering: Sequence[str], failed: str | None
) -> Sequence[str] | None:
    """Return the nodes for a restart at once; None if there is to be none.

    Args:
        ended: how the launch ended.
        nodes: its nodes; none if they are not known.
        answering: those that can start a process: a batch system takes minutes to notice that one is lost.
        failed: the node whose rank a signal ended first; None if unknown. It may be sick, and is left out until
            the next requeue, unless a node is lost: Slurm kills the ranks on the others then.
    """
    if not has_died(ended) or (nodes and not answering):
        return None
    if answering != nodes:
        return answering
    if ended.decision == "none":  # on the same nodes it might fail again for the same reason
        return None
    return [node for node in nodes if node != failed] or nodes


#: What srun, MPICH's mpirun and Open MPI's print of the first rank that fails: its node, and how it ended.
_FAILURES = (
    re.compile(r"srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.+)"),
    re.compile(r"RUNNING AT (?P<node>\S+)\n=\s+EXIT CODE: (?P<how>\d+)$", re.MULTILINE),
    re.compile(r"on node (?P<node>\S+) exited on signal (?P<how>\d+)"),
)
_SIGNALS = re.compile(r"(Killed|Segmentation fault|Bus error|Illegal instruction|Aborted|[46789]$|11$)")


def failed_node(text: str) -> str | None:
    """Return the node whose rank a signal ended first, by what the launcher printed; None if no signal did."""
    found = [match for match in (pattern.search(text) for pattern in _FAILURES) if match is not None]
    first = min(found, key=re.Match.start, default=None)
    return first["node"] if first is not None and _SIGNALS.match(first["how"]) else None


def is_of_signal(code: int, launcher: str) -> bool:
    """Return whether an exit code is that of a signal. MPICH's mpirun exits with the number of a rank's signal."""
    is_mpirun = os.path.basename(launcher).startswith("mpi")
    return code > 128 or (is_mpirun and code in (4, 6, 7, 8, 9, 10, 11, 12, 15))


def filled(command: Sequence[str], nodes: str, n_nodes: int, ranks_per_node: int) -> list[str]:
    """Return a command with %nodes, %hosts, %n_nodes and %n_ranks replaced; see job.py."""
    values = {
        "nodes": nodes,
        "hosts": ",".join(f"{node}:{ranks_per_node}" for node in nodes.split(",")),
        "n_nodes": str(n_nodes),
        "n_ranks": str(n_nodes * ranks_per_node),
    }
    return [re.sub(r"%(n_nodes|n_ranks|nodes|hosts)\b", lambda found: values[found[1]], part) for part in command]
