"""Batch systems by table: the variables and commands of Slurm, PBS, LSF and Flux, and how to read their output.

Slurm's are tested on a real one; the others only against their manuals.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

#: Signals that job.py waits for. It blocks them, so that none is lost between two waits.
WAITED_FOR = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM}


class Facts(NamedTuple):
    """What a batch system knows of a job. Each default means unknown.

    Attributes:
        state: state of the job, by Slurm's names; empty without an answer.
        is_ending: whether the job is being ended for another reason than its time limit.
        is_preempted: whether the job was preempted since its last start.
        can_requeue: whether the job may be requeued.
        n_restarts: how often the job was restarted.
        end_s: when the job will be ended, in seconds since 1970.
        script_node: node of the batch script.
        nodes: nodes of the job, as the batch system writes them.
        log: path of the job's standard error.
    """

    state: str = ""
    is_ending: bool = False
    is_preempted: bool = False
    can_requeue: bool = True
    n_restarts: int | None = None
    end_s: float | None = None
    script_node: str = ""
    nodes: str = ""
    log: str = ""


def facts_of_slurm(text: str, now_s: float) -> Facts:
    """Read the output of `scontrol --oneliner show job`, with times in seconds since 1970: a time of day may repeat."""
    pairs = re.findall(r"(?:^| )(\w+)=(\S+)", text)
    fields = dict(reversed(pairs))  # the first value of each name

    def number(name: str) -> int | None:
        value = fields.get(name, "")
        return int(value) if value.isdecimal() else None

    state = fields.get("JobState", "")
    is_ending = state in ("CANCELLED", "COMPLETING") and fields.get("Reason") != "TimeLimit"
    started_s = number("StartTime") or 0
    preempted_s = number("PreemptTime")
    return Facts(
        state,
        is_ending=is_ending,
        is_preempted=preempted_s is not None and preempted_s >= started_s,
        can_requeue=fields.get("Requeue") == "1",
        n_restarts=number("Restarts"),
        end_s=number("EndTime"),
        script_node=fields.get("BatchHost", ""),
        nodes=fields.get("NodeList", ""),
        log=fields.get("StdErr", ""),
    )


def facts_of_pbs(text: str, now_s: float) -> Facts:
    """Read the output of `qstat -f`."""
    fields = dict(re.findall(r"^\s+([\w.]+) = (.+)$", text, re.MULTILINE))
    end_s = None
    with contextlib.suppress(KeyError, ValueError):
        hours, minutes, seconds = map(int, fields["Resource_List.walltime"].split(":"))
        limit_s = hours * 3600 + minutes * 60 + seconds
        start_s = time.mktime(time.strptime(fields["stime"]))
        end_s = start_s + limit_s
    state: str = fields.get("job_state", "")
    n_restarts = None
    n_runs = fields.get("run_count", "")
    if n_runs.isdecimal():
        n_restarts = int(n_runs) - 1
    return Facts(
        {"R": "RUNNING", "E": "COMPLETING"}.get(state, state),
        can_requeue=fields.get("Rerunable") == "True",
        n_restarts=n_restarts,
        end_s=end_s,
    )


def facts_of_lsf(text: str, now_s: float) -> Facts:
    """Read the output of `bjobs -noheader -o "stat time_left"`, such as "RUN 0:58 L"."""
    match = re.match(r"\s*(\w+)(?:\s+(\d+):(\d+))?", text)
    if match is None:
        return Facts()
    state, hours, minutes = match.groups()
    if state == "RUN":
        state = "RUNNING"
    end_s = None
    if hours is not None:
        end_s = now_s + int(hours) * 3600 + int(minutes) * 60
    return Facts(str(state), end_s=end_s)


def facts_of_flux(text: str, now_s: float) -> Facts:
    """Read the output of `flux job timeleft`, which answers while the job runs: seconds, or infinity."""
    try:
        left_s = float(text)
    except ValueError:
        return Facts()
    end_s = None
    if left_s != float("inf"):
        end_s = now_s + left_s
    return Facts("RUNNING", can_requeue=False, end_s=end_s)


class BatchSystem(NamedTuple):
    """The variables and commands of a batch system. In a command, {job} is replaced by the job's id.

    Attributes:
        id_variable: name of the variable that holds the job's id.
        show: command that prints the facts of the job.
        read: function of the output of `show`, and of the time, that returns the facts.
        requeue: command that has the job run again; empty if there is none.
        cancel: command that ends or removes a job.
    """

    id_variable: str
    show: tuple[str, ...]
    read: Callable[[str, float], Facts]
    requeue: tuple[str, ...]
    cancel: tuple[str, ...]


SLURM = BatchSystem(
    "SLURM_JOB_ID",
    ("scontrol", "--oneliner", "show", "job", "{job}"),
    facts_of_slurm,
    ("scontrol", "requeue", "{job}"),
    ("scancel", "{job}"),
)
PBS = BatchSystem(
    "PBS_JOBID",
    ("qstat", "-f", "{job}"),
    facts_of_pbs,
    ("qrerun", "{job}"),
    ("qdel", "{job}"),
)
LSF = BatchSystem(
    "LSB_JOBID",
    ("bjobs", "-noheader", "-o", "stat time_left", "{job}"),
    facts_of_lsf,
    ("brequeue", "{job}"),
    ("bkill", "{job}"),
)
# the script runs inside the job's Flux instance; the parent of this instance knows the job
FLUX = BatchSystem(
    "FLUX_JOB_ID",
    ("flux", "job", "timeleft"),
    facts_of_flux,
    (),
    ("flux", "--parent", "cancel", "{job}"),
)


def batch_system(environ: Mapping[str, str]) -> BatchSystem:
    """Return the batch system of this job, by its variables."""
    for system in (SLURM, PBS, LSF, FLUX):
        if environ.get(system.id_variable):
            return system
    raise SystemExit(
        "expected to run in a batch job of Slurm, PBS, LSF or Flux, got none of their variables"
    )


def receive_signals() -> None:
    """Unblock the signals that job.py blocks. Called in a child process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)


def output_of(command: Sequence[str], **environ: str) -> str | None:
    """Return what a command prints; None if it fails, is missing, or takes over half a minute."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            env={**os.environ, **environ},
            preexec_fn=receive_signals,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return None
    return done.stdout
