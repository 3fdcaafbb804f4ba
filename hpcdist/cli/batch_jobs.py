"""Jobs of Slurm that `hpcdist submit` has made. The comment of a job names its run folder."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from hpcdist.cli.batch_scripts import COMMENT, TASK
from hpcdist.errors import UsageError

_JOB = re.compile(r"\d+(_\d+)?$")
#: A field of scontrol, whose value may have spaces.
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
_ANSWER_S = 10.0
#: Fields of squeue, separated by tabs: id, number in an array, state, time left, reason, comment.
_FORMAT = "%i\t%K\t%T\t%L\t%R\t%k"


class BatchJobState(NamedTuple):
    """State of a job as squeue prints it. `run_dir` is empty if `hpcdist submit` has not made the job."""

    job: str
    state: str
    time_left: str
    reason: str
    run_dir: str

    def __str__(self) -> str:
        return f"{self.state}, {self.time_left} left, {self.reason}"


class JobRecord(NamedTuple):
    """What Slurm's controller holds of a job, also for some minutes after its end; "" for what it does not know.

    Attributes:
        state: such as FAILED.
        exit_code: exit code of the script.
        log: path of the file of its output.
        run_dir: run folder, if `hpcdist submit` has made the job.
    """

    state: str
    exit_code: str
    log: str
    run_dir: str


def is_job_number(run: str) -> bool:
    """Return whether `run` is the number of a job of Slurm, or of an array's task, and not a folder."""
    return bool(_JOB.match(run)) and not Path(run).exists()


def run_folder(run: str) -> Path:
    """Return the run folder that `run` names: the folder itself, or the one of a job of Slurm by its number.

    Raises:
        UsageError: if Slurm does not know the job, if `hpcdist submit` has not made it, or if it is a whole array.
    """
    if not is_job_number(run):
        return Path(run)
    jobs = _states_of(run)
    if len(jobs) > 1:
        tasks = ", ".join(job.job for job in jobs[:4])
        raise UsageError(f"expected one job, got {run}, an array with {tasks}; name one of them.")
    run_dir = jobs[0].run_dir if jobs else record_of(run).run_dir
    if not run_dir:
        raise UsageError(
            f"expected a run folder, or a job of `hpcdist submit` that Slurm knows, got {run!r}; give the run folder."
        )
    return Path(run_dir)


def state_of(job: str) -> BatchJobState | None:
    """Return the state of a job that waits or runs; None if Slurm does not know the job, or is not installed."""
    return next(iter(_states_of(job)), None)


def is_gone(job: str) -> bool:
    """Return whether Slurm answers here, and has no such job that waits or runs."""
    if state_of(job) is not None:
        return False
    return _answer_of("squeue", "--me", "--noheader") is not None


def waiting_or_running(folder: Path) -> BatchJobState | None:
    """Return a job of this user that waits or runs for a run folder; None if there is none."""
    for job in own_jobs():
        if Path(job.run_dir).resolve() == folder.resolve():
            return job
    return None


def cancel(job: str) -> bool:
    """Cancel a job if it still waits; return whether Slurm has accepted the request."""
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
    """Return the state of a job, or of each task of an array."""
    text = _answer_of("squeue", "--noheader", "--array", "--jobs", job, "--format", _FORMAT)
    return _parse(text or "")


def own_jobs() -> list[BatchJobState]:
    """Return the jobs of this user that `hpcdist submit` has made and that wait or run."""
    text = _answer_of("squeue", "--me", "--noheader", "--array", "--format", _FORMAT)
    return [job for job in _parse(text or "") if job.run_dir]


def _parse(text: str) -> list[BatchJobState]:
    """Return the jobs that squeue has printed; lines of another form are left out."""
    jobs = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 6:
            continue
        job, task, state, time_left, reason, comment = fields
        run_dir = _run_dir_in(comment, task)
        jobs.append(BatchJobState(job, state, time_left, reason, run_dir))
    return jobs


def _run_dir_in(comment: str, task: str) -> str:
    """Return the run folder that a job's comment names, or "" for another comment.

    Args:
        comment: comment of the job.
        task: number of the task, which replaces `TASK` in the run folder of an array.
    """
    if not comment.startswith(COMMENT):
        return ""
    return comment.removeprefix(COMMENT).replace(TASK, task)


def record_of(job: str) -> JobRecord:
    """Return what Slurm's controller holds of a job."""
    text = _answer_of("scontrol", "--oneliner", "show", "job", job) or ""
    fields = dict(_FIELD.findall(text))
    exit_code, _, _ = fields.get("ExitCode", "").partition(":")
    run_dir = _run_dir_in(fields.get("Comment", ""), fields.get("ArrayTaskId", ""))
    return JobRecord(fields.get("JobState", ""), exit_code, fields.get("StdOut", ""), run_dir)


def _answer_of(*command: str) -> str | None:
    """Return what a command of Slurm prints; None if it fails or is not installed."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        # ValueError: a run folder's ledger may hold any text as the id of the job
        return None
    if done.returncode:
        return None
    return done.stdout
