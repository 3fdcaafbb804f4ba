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
        state: by Slurm's names; empty without an answer.
        is_ending: whether the job is being ended, but not as it is out of time.
        is_preempted: whether it was preempted since its last start.
        can_requeue: whether it may be requeued.
        n_restarts: how often it was restarted.
        end_s: when it will be ended, in seconds since 1970.
        script_node: the node of the batch script.
        nodes: its nodes, as the batch system writes them.
        log: path of its standard error.
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
    fields = dict(reversed(re.findall(r"(?:^| )(\w+)=(\S+)", text)))  # the first of each name

    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name, "").isdecimal() else None

    state = fields.get("JobState", "")
    preempted_s = number("PreemptTime")
    return Facts(
        state,
        is_ending=state in ("CANCELLED", "COMPLETING") and fields.get("Reason") != "TimeLimit",
        is_preempted=preempted_s is not None and preempted_s >= (number("StartTime") or 0),
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
        end_s = time.mktime(time.strptime(fields["stime"])) + hours * 3600 + minutes * 60 + seconds
    state: str = fields.get("job_state", "")
    runs = fields.get("run_count", "")
    return Facts(
        {"R": "RUNNING", "E": "COMPLETING"}.get(state, state),
        can_requeue=fields.get("Rerunable") == "True",
        n_restarts=int(runs) - 1 if runs.isdecimal() else None,
        end_s=end_s,
    )


def facts_of_lsf(text: str, now_s: float) -> Facts:
    """Read the output of `bjobs -noheader -o "stat time_left"`, such as "RUN 0:58 L"."""
    match = re.match(r"\s*(\w+)(?:\s+(\d+):(\d+))?", text)
    if match is None:
        return Facts()
    state, hours, minutes = match.groups()
    end_s = None if hours is None else now_s + int(hours) * 3600 + int(minutes) * 60
    return Facts("RUNNING" if state == "RUN" else str(state), end_s=end_s)


def facts_of_flux(text: str, now_s: float) -> Facts:
    """Read the output of `flux job timeleft`, which answers while the job runs: seconds, or infinity."""
    try:
        left_s = float(text)
    except ValueError:
        return Facts()
    return Facts(
        "RUNNING", can_requeue=False, end_s=None if left_s == float("inf") else now_s + left_s
    )


class BatchSystem(NamedTuple):
    """The variables and commands of a batch system. In commands, {job} stands for the job's id.

    Attributes:
        id_variable: holds the job's id.
        show: prints what `read` reads.
        read: from that output, and the time, to the facts.
        requeue: has the job run again; empty if there is no such command.
        cancel: ends or removes a job.
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
    "PBS_JOBID", ("qstat", "-f", "{job}"), facts_of_pbs, ("qrerun", "{job}"), ("qdel", "{job}")
)
LSF = BatchSystem(
    "LSB_JOBID",
    ("bjobs", "-noheader", "-o", "stat time_left", "{job}"),
    facts_of_lsf,
    ("brequeue", "{job}"),
    ("bkill", "{job}"),
)
FLUX = BatchSystem(  # the script runs in an instance of its own, whose parent knows the job
    "FLUX_JOB_ID",
    ("flux", "job", "timeleft"),
    facts_of_flux,
    (),
    ("flux", "--parent", "cancel", "{job}"),
)


def batch_system(environ: Mapping[str, str]) -> BatchSystem:
    """Return the batch system of this job, by its variables."""
    systems = [system for system in (SLURM, PBS, LSF, FLUX) if environ.get(system.id_variable)]
    if not systems:
        raise SystemExit(
            "expected to run in a batch job of Slurm, PBS, LSF or Flux, got none of their variables"
        )
    return systems[0]


def receive_signals() -> None:
    """In a child process: receive the signals that job.py blocks."""
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
    return done.stdout if done.returncode == 0 else None
