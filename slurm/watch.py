"""Requeue a job whose batch script was lost with its node. job.py starts this program on another node.

With --no-kill, Slurm keeps the job running without a script until its time limit.
"""

import contextlib
import os
import signal
import sys
import time

from batch_systems import Facts
from job import Job
from restart_rule import RUN_AGAIN, Launch
from run_folder import UnreadableError


def is_script_lost(facts: Facts, nodes: list[str]) -> bool:
    """Return whether Slurm has removed the script's node from a job, as it does once a node is silent for a while."""
    is_known = bool(facts.script_node and nodes)
    return facts.state == "RUNNING" and is_known and facts.script_node not in nodes


def act(job: Job, facts: Facts) -> None:
    """Have a job requeued that has lost its script, or end it, unless its decision cannot be read yet."""
    with contextlib.suppress(OSError):
        descriptor = os.open(facts.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, sys.stderr.fileno())
        os.close(descriptor)
    job.log("the node of the batch script is lost")
    try:
        decision = job.folder.decision()
    except UnreadableError:
        return
    verdict = "none"
    earlier = "none"
    reason = ""
    if decision is not None:
        earlier = decision.verdict
        reason = decision.reason
        if decision.job == job.id:
            verdict = decision.verdict
    launch = Launch(137, verdict, reason, earlier, is_signalled=True)
    code = job.leave(launch, is_script_lost=True)
    if code != RUN_AGAIN and job.successor:
        job.withdraw_successor()
    facts = job.look()
    must_end = code != RUN_AGAIN or job.successor
    if must_end and is_script_lost(facts, job.names_of(facts.nodes)):
        job.cancel()  # nothing else would end it


def main(successor: str) -> None:
    """Look every 30 s, or WATCH_PAUSE_S, until Slurm ends this process with the job."""
    # Slurm sends this signal to all steps near the time limit
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    job = Job(os.environ, successor)
    if not job.folder.has_marker():
        sys.exit(f"expected {job.folder.marker}, got none: this node does not see the run folder")
    while True:
        pause_s = float(os.environ.get("WATCH_PAUSE_S", "30"))
        time.sleep(pause_s)
        facts = job.look()
        if is_script_lost(facts, job.names_of(facts.nodes)):
            act(job, facts)


if __name__ == "__main__":
    main(sys.argv[1])
