"""Jobs of Slurm whose comment names a run folder: those of `hpcdist submit`, and of a chain."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpcdist.cli.batch_scripts import COMMENT, TASK
from hpcdist.errors import UsageError

_JOB = re.compile(r"\d+(_\d+)?$")
#: A field of scontrol, whose value may have spaces.
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
_ANSWER_S = 10.0
#: Fields of squeue, separated by tabs: job, id, number in an array, state, time left, reason, comment.
_FORMAT = "%i\t%A\t%K\t%T\t%L\t%R\t%k"


class BatchJobState(NamedTuple):
    """State of a job as squeue prints it.

    Attributes:
        job: number of the job; of a task of an array with its number, such as 21_3.
        id: what SLURM_JOB_ID is in the job: a task of an array has one of its own.
        state: such as RUNNING.
        time_left: time until the limit.
        reason: why the job waits, or its nodes.
        run_dir: run folder by the job's comment; empty without such a comment.
    """

    job: str
    id: str
    state: str
    time_left: str
    reason: str
    run_dir: str

    def __str__(self) -> str:
        return f"{self.state}, {self.time_left} left, {self.reason}"

    def is_for(self, folder: Path) -> bool:
        """Return whether the job works in a run folder, by its comment."""
        return bool(self.run_dir) and Path(self.run_dir).resolve() == folder.resolve()


class JobRecord(NamedTuple):
    """What Slurm's controller holds of a job, also for some minutes after its end; "" for what it does not know.

    Attributes:
        state: such as FAILED.
        end: "exit code 78", or "signal 9".
        log: path of the file of its output.
        run_dir: run folder by the job's comment.
    """

    state: str = ""
    end: str = ""
    log: str = ""
    run_dir: str = ""


class Lookup(NamedTuple):
    """What Slurm knows of the job of a run.

    Attributes:
        state: the job that waits or runs; None if there is none, or without an answer of Slurm.
        gone: number of the job if it neither waits nor runs any more; "" if that is not known.
    """

    state: BatchJobState | None
    gone: str


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
    records: list[JobRecord] = []
    if not jobs:
        records = _records_of(run)
    tasks = [job.job for job in jobs]
    if len(jobs) > 1 or len(records) > 1:
        names = ", ".join(tasks[:4]) or f"{run}_1 and others"
        raise UsageError(f"expected one job, got {run}, an array with {names}; name one of them.")
    run_dirs = [job.run_dir for job in jobs] + [record.run_dir for record in records]
    run_dir = "".join(run_dirs)
    if not run_dir:
        raise UsageError(
            f"expected a run folder, or a job of `hpcdist submit` that Slurm knows, got {run!r}; give the run folder."
        )
    return Path(run_dir)


def look_up(job: str, folder: Path) -> Lookup:
    """Return what Slurm knows of the job of a run.

    Another job may go on with the run, or begin it: the next one of a chain, or one that was submitted since.

    Args:
        job: number of the job that is known to have worked in the folder; "" if none is.
        folder: run folder, which may not exist yet.
    """
    own_states = _all_own_jobs()
    state = _of_run(job, folder, own_states or ())
    is_own = not folder.exists() or folder.stat().st_uid == os.getuid()
    if state is None and _JOB.match(job):  # it may be somebody else's
        state = _of_run(job, folder, _states_of(job))
    is_known = is_own and own_states is not None
    gone = ""
    if state is None and is_known and _JOB.match(job):
        gone = job
    return Lookup(state, gone)


def _of_run(
    job: str,
    folder: Path,
    jobs: Sequence[BatchJobState],
) -> BatchJobState | None:
    """Return the job that works in a run folder, or is to; None if there is none among `jobs`.

    The job by that number comes first, then one that runs.
    """
    best: BatchJobState | None = None
    best_rank = 0
    for candidate in jobs:
        is_named = job in (candidate.job, candidate.id)
        # all waiting tasks of an array share an id, and their folders differ
        if not candidate.is_for(folder) and (candidate.run_dir or not is_named):
            continue
        rank = 1 + 2 * is_named + (candidate.state != "PENDING")
        if rank > best_rank:
            best = candidate
            best_rank = rank
    return best


def state_of(job: str) -> BatchJobState | None:
    """Return the state of a job that waits or runs; None if Slurm does not know the job, or is not installed."""
    return next(iter(_states_of(job)), None)


def record_of(job: str, folder: Path) -> JobRecord:
    """Return what Slurm's controller holds of a job of a run; nothing if the job by that number has another folder."""
    for record in _records_of(job):
        if not record.run_dir or Path(record.run_dir).resolve() == folder.resolve():
            return record
    return JobRecord()


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


def own_jobs() -> list[BatchJobState]:
    """Return the jobs of this user that `hpcdist submit` has made and that wait or run."""
    jobs = _all_own_jobs() or []
    return [job for job in jobs if job.run_dir]


def _states_of(job: str) -> list[BatchJobState]:
    """Return the state of a job, or of each task of an array."""
    text = _answer_of("squeue", "--noheader", "--array", "--jobs", job, "--format", _FORMAT)
    return _parse(text or "")


def _all_own_jobs() -> list[BatchJobState] | None:
    """Return the jobs of this user that wait or run; None without an answer of Slurm."""
    text = _answer_of("squeue", "--me", "--noheader", "--array", "--format", _FORMAT)
    if text is None:
        return None
    return _parse(text)


def _records_of(job: str) -> list[JobRecord]:
    """Return what Slurm's controller holds of a job, or of each task of an array."""
    text = _answer_of("scontrol", "--oneliner", "show", "job", job) or ""
    records: list[JobRecord] = []
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if not fields:
            continue
        code, _, number = fields.get("ExitCode", "").partition(":")
        end = f"exit code {code}"
        if number not in ("", "0"):
            end = f"signal {number}"
        run_dir = _run_dir_in(fields.get("Comment", ""), fields.get("ArrayTaskId", ""))
        record = JobRecord(fields.get("JobState", ""), end, fields.get("StdOut", ""), run_dir)
        records.append(record)
    return records


def _parse(text: str) -> list[BatchJobState]:
    """Return the jobs that squeue has printed; lines of another form are left out."""
    jobs = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 7:
            continue
        job, number, task, state, time_left, reason, comment = fields
        run_dir = _run_dir_in(comment, task)
        jobs.append(BatchJobState(job, number, state, time_left, reason, run_dir))
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
