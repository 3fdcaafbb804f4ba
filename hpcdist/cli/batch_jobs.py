"""Slurm's jobs that `hpcdist submit` has made: which run folder is whose, as their comments say."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from hpcdist.cli.batch_scripts import COMMENT, TASK
from hpcdist.errors import UsageError

_JOB = re.compile(r"\d+(_\d+)?$")
_ANSWER_S = 10.0
#: Fields of squeue, with what cannot be in them between: id, number in an array, state, time left, reason, comment.
_FORMAT = "%i\t%K\t%T\t%L\t%R\t%k"


class BatchJobState(NamedTuple):
    """What squeue says of a job; `run_dir` is empty for one that `hpcdist submit` has not made."""

    job: str
    state: str
    time_left: str
    reason: str
    run_dir: str

    def __str__(self) -> str:
        return f"{self.state}, {self.time_left} left, {self.reason}"


def is_job_number(run: str) -> bool:
    """Return whether a job of Slurm is meant, or a task of an array, and not a folder."""
    return bool(_JOB.match(run)) and not Path(run).exists()


def run_folder(run: str) -> Path:
    """Return the run folder that is meant: a folder, or that of a job of Slurm by its number.

    Raises:
        UsageError: if Slurm does not know the job, if `hpcdist submit` has not made it, or if it is a whole array.
    """
    if not is_job_number(run):
        return Path(run)
    jobs = _states_of(run)
    if len(jobs) > 1:
        raise UsageError(
            f"expected one job, got {run}, an array with {', '.join(job.job for job in jobs[:4])}; name one of them."
        )
    text = jobs[0].run_dir if jobs else _run_dir_of_ended(run)
    if not text:
        raise UsageError(
            f"expected a run folder, or a job of `hpcdist submit` that Slurm knows, got {run!r}; give the run folder."
        )
    return Path(text)


def state_of(job: str) -> BatchJobState | None:
    """Return what Slurm says of a job that waits or runs; None where it does not know it, or is not here."""
    return next(iter(_states_of(job)), None)


def cancel(job: str) -> bool:
    """Cancel a job if it still waits; return whether Slurm has taken the request."""
    try:
        done = subprocess.run(
            ["scancel", "--state=PENDING", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _states_of(job: str) -> list[BatchJobState]:
    """Return what Slurm says of a job, or of each task of an array."""
    return _parse(_output_of("squeue", "--noheader", "--array", "--jobs", job, "--format", _FORMAT))


def own_jobs() -> list[BatchJobState]:
    """Return the jobs of this user that `hpcdist submit` has made and that wait or run."""
    listed = _output_of("squeue", "--me", "--noheader", "--array", "--format", _FORMAT)
    return [job for job in _parse(listed) if job.run_dir]


def _parse(text: str) -> list[BatchJobState]:
    job_states = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 6:
            job, task, state, time_left, reason, comment = (field.strip() for field in fields)
            job_states.append(
                BatchJobState(job, state, time_left, reason, _run_dir_in(comment, task))
            )
    return job_states


def _run_dir_in(comment: str, task: str) -> str:
    """Return the run folder that a comment names, of one task where it is that of an array; "" for another comment."""
    return comment.removeprefix(COMMENT).replace(TASK, task) if comment.startswith(COMMENT) else ""


def _run_dir_of_ended(job: str) -> str:
    """Return the run folder of a job that has ended; Slurm knows it for some minutes."""
    text = _output_of("scontrol", "--oneliner", "show", "job", job)
    comment = re.search(r" Comment=(\S+)", text)
    task = re.search(r" ArrayTaskId=(\d+)", text)
    return _run_dir_in(comment[1], task[1] if task else "") if comment else ""


def _output_of(*command: str) -> str:
    """Return what a command of Slurm prints; "" where it fails, or there is none."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        # a job's id may be any text of a run folder
        return ""
    return done.stdout if done.returncode == 0 else ""
