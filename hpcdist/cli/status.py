"""`hpcdist status` prints what a run has done, from the files of its folder. `hpcdist stop` asks it to save and end."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.read import read_end
from hpcdist.checkpoint.store import Saved, Store, use_one
from hpcdist.cli.batch_jobs import (
    BatchJobState,
    Lookup,
    cancel,
    is_job_number,
    look_up,
    own_jobs,
    record_of,
    run_folder,
    state_of,
)
from hpcdist.cli.output import echo
from hpcdist.cli.run import read_decision
from hpcdist.cli.run_records import SideError, read_side_errors
from hpcdist.errors import CheckpointDamaged, UsageError
from hpcdist.run.ledger import Attempt, Ledger
from hpcdist.stopping.stop import STOP_FOR_GOOD

#: Bytes at the end of a file of metrics that are read first: most records are short.
_TAIL_BYTES = 64 << 10
#: Longest end of a file of metrics that is read.
_MAX_TAIL_BYTES = 32 << 20
_POLL_S = 0.5


@click.command()
@click.argument("run", required=False)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def status(run: str | None, is_json: bool) -> None:
    """Show what a run has done: attempts, newest checkpoint, metrics, and whether it is to run again.

    RUN is a run folder, or the number of a job of `hpcdist submit`; without it, such jobs of yours that wait or run are
    listed. Reads files only, and disturbs no job that runs.

    \b
    hpcdist status runs/train
    hpcdist status 1234
    """
    if run is None:
        _list_jobs(is_json)
        return
    folder = run_folder(run)
    lookup = _look_up(run, folder)
    if lookup.gone:
        _require_begun(lookup.gone, folder)
    if lookup.state is None:
        _require_run(folder)
    facts = _facts_of(folder, lookup)
    if is_json:
        echo(json.dumps(finite(facts), indent=1))
    else:
        for line in _lines(facts):
            echo(line)


@click.command()
@click.argument("run")
@click.option(
    "--wait",
    "limit_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Wait until it has ended.",
)
@click.option(
    "--for-good",
    "is_for_good",
    is_flag=True,
    help="It is not run again; a job that waits is cancelled.",
)
def stop(run: str, limit_s: float | None, is_for_good: bool) -> int:
    """Ask the job of a run folder, or of a job's number, to save after its step, and to end with exit code 75.

    Makes the file `stop` there, which the job removes once its end is recorded. A batch job of a recipe is requeued
    then, and resumes later; with --for-good it ends with exit code 76, and is not. The same command, submitted again,
    goes on.

    \b
    hpcdist stop runs/train --wait 60
    hpcdist stop 1234 --for-good
    """
    folder = run_folder(run)
    lookup = _look_up(run, folder)
    batch = lookup.state
    if batch is not None and batch.state == "PENDING":
        return _stop_waiting(batch, is_for_good)
    if batch is None:
        _require_run(folder)
    path = folder / "stop"
    if limit_s is not None and math.isnan(limit_s):
        raise UsageError("hpcdist stop: expected --wait as seconds, got nan; give a number.")
    attempts = Ledger(Store(folder / "checkpoints")).attempts()
    last_end = attempts[-1].end if attempts else ""
    decision = read_decision(folder)
    is_starting = batch is not None and not _is_of(attempts, batch)
    is_to_go_on = decision is None or decision.verdict == "requeue"
    goes_on = batch is not None and (is_starting or is_to_go_on)
    obstacle = ""
    if last_end and not goes_on:
        obstacle = f"one whose last attempt has ended ({last_end})"
    elif lookup.gone:
        obstacle = f"one whose job {lookup.gone} is not in the queue of this cluster"
    if obstacle:
        raise UsageError(
            f"hpcdist stop: expected a run that is under way in {folder}, got {obstacle}; the file `stop` would end "
            f"the next attempt; make it by hand if that is meant."
        )
    durable.make_folders(durable.Disk(), folder)
    request = STOP_FOR_GOOD if is_for_good else "hpcdist stop"
    durable.replace_text(durable.Disk(), path, f"{request}\n")
    outcome = "the job saves after its step, and ends"
    if last_end or is_starting:  # it is being requeued, or its next attempt has not begun yet
        outcome = "the next attempt saves after its first step, and ends"
    if is_for_good:
        outcome += ", and is not run again"
    elif batch is not None:
        outcome += ", and is run again; --for-good prevents that"
    echo(f"{path}: {outcome}")
    if limit_s is None:
        return 0
    return _wait_for_end(path, limit_s)


def _wait_for_end(stop_file: Path, limit_s: float) -> int:
    """Wait until a job has removed its stop file, or for `limit_s` seconds; return the exit code."""
    deadline = time.monotonic() + limit_s
    while stop_file.exists():
        if time.monotonic() > deadline:
            echo(
                f"hpcdist stop: expected the job to end within {limit_s:g} s, got {stop_file}, which is there",
                err=True,
            )
            return 1
        time.sleep(_POLL_S)
    return 0


def _look_up(run: str, folder: Path) -> Lookup:
    """Return what Slurm knows of the job of a run.

    Args:
        run: number of the job, or the run folder.
        folder: run folder; its last attempt names the job if `run` does not, or else the last start of a batch script.
    """
    if is_job_number(run):
        return look_up(run, folder)
    attempts = Ledger(Store(folder / "checkpoints")).attempts()
    job = _last_marked_job(folder)
    if attempts:
        job = attempts[-1].job or ""
    return look_up(job, folder)


def _stop_waiting(batch: BatchJobState, is_for_good: bool) -> int:
    """Cancel a job that waits, if it is stopped for good; return the exit code.

    Raises:
        UsageError: if the job is not stopped for good, as a job that waits has nothing to save.
    """
    if not is_for_good:
        raise UsageError(
            f"hpcdist stop: expected a job that runs, got {batch.job}, which waits {batch.reason}; add --for-good to "
            f"cancel it, or scancel {batch.job}."
        )
    if not cancel(batch.job):
        echo(
            f"hpcdist stop: expected scancel {batch.job} to succeed, got a failure; run it to see why",
            err=True,
        )
        return 1
    after = state_of(batch.job)
    if after is not None and after.state not in ("PENDING", "COMPLETING", "CANCELLED"):
        echo(
            f"hpcdist stop: job {batch.job} has begun meanwhile, and is {after.state}; ask again",
            err=True,
        )
        return 1
    echo(f"job {batch.job} waited, and is cancelled; what it has saved stays")
    return 0


def _require_begun(job: str, folder: Path) -> None:
    """Raise UsageError if there is no run in the folder of a batch job that has ended."""
    if _is_run(folder):
        return
    record = record_of(job, folder)
    end = ""
    advice = "read its log"
    if record.state:
        end = f" ({record.state}, {record.end})"
    if os.path.exists(record.log):
        advice = f"read its log, {record.log}"
    elif record.log:  # it has not started
        advice = "submit it again"
    raise UsageError(
        f"hpcdist status: expected a job that has begun to train in {folder}, got {job}, which has ended before that"
        f"{end}; {advice}."
    )


def _last_marked_job(folder: Path) -> str:
    """Return the job that has begun last in a run folder, by the files that its batch script made; "" without one."""
    newest = ""
    newest_time_s = 0.0
    for path in folder.glob("jobs/*"):
        time_s = path.stat().st_mtime
        if path.name.isdecimal() and time_s >= newest_time_s:
            newest = path.name
            newest_time_s = time_s
    return newest


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return (folder / "checkpoints").is_dir() or (folder / "decision.json").exists()


def _require_run(folder: Path) -> None:
    """Raise UsageError unless a folder is a run folder."""
    if not _is_run(folder):
        raise UsageError(
            f"expected a run that has begun, with checkpoints or a decision.json in its folder, got {str(folder)!r}, "
            f"which has none; give the folder that --run-dir names in the job, or look into the job's log."
        )


def _facts_of(folder: Path, lookup: Lookup) -> dict[str, Any]:
    """Return the facts of a run, for JSON. The folder of a batch job that waits may not exist yet."""
    store = Store(folder / "checkpoints")
    attempts = Ledger(store).attempts()
    decision = read_decision(folder)
    facts: dict[str, Any] = {
        "folder": str(folder),
        "decision": None,
        "reason": None,
        "n_attempts": 0,
        "attempt": None,
        "checkpoint": _newest(store, store.saved()),
        "metrics": _last_record(folder / "metrics.jsonl"),
        "batch": None,
        "errors": [dataclasses.asdict(error) for error in read_side_errors(folder)],
        "is_asked_to_stop": (folder / "stop").exists(),
        "gone_job": lookup.gone or None,
        "starting_job": None,
        "is_attempt_waiting": False,
        "log": None,
    }
    if decision is not None:
        facts["decision"] = decision.verdict
        facts["reason"] = decision.reason
    if attempts:
        facts["n_attempts"] = attempts[-1].number
        facts["attempt"] = _facts_of_attempt(attempts[-1])
    job = lookup.gone
    if lookup.state is not None:
        job = lookup.state.job
        facts["batch"] = str(lookup.state)
        is_of_attempt = _is_of(attempts, lookup.state)
        facts["is_attempt_waiting"] = is_of_attempt and lookup.state.state == "PENDING"
        if lookup.state.state == "RUNNING" and not is_of_attempt:
            facts["starting_job"] = job
    if job:
        facts["log"] = record_of(job, folder).log or None
    return facts


def _is_of(attempts: Sequence[Attempt], batch: BatchJobState) -> bool:
    """Return whether the last attempt was made by a batch job."""
    return bool(attempts) and attempts[-1].job in (batch.job, batch.id)


def _facts_of_attempt(attempt: Attempt) -> dict[str, Any]:
    """Return the facts of an attempt, for JSON."""
    return {
        "number": attempt.number,
        "job": attempt.job,
        "nodes": attempt.nodes,
        "resumed_step": attempt.resumed_step,
        "committed_step": None if attempt.committed_step < 0 else attempt.committed_step,
        "end": attempt.end or None,
        "reason": attempt.reason or None,
    }


def _newest(store: Store, saved: list[Saved]) -> dict[str, Any] | None:
    """Return the facts of the newest checkpoint whose index is sound; None if there is none."""
    for checkpoint in reversed(saved):
        path = store.path / str(checkpoint)
        try:
            index = use_one(path, lambda _, file: file.index)
        except CheckpointDamaged:
            continue
        return {
            "path": str(path),
            "step": index.step,
            "time_s": index.time_s,
            "metrics": index.metrics,
        }
    return None


def _last_record(path: Path) -> dict[str, Any] | None:
    """Return the last whole record of a file of metrics; None if there is none."""
    n_bytes = _TAIL_BYTES
    while True:
        try:
            text = read_end(path, n_bytes)
        except (OSError, ValueError):
            return None
        for line in reversed(text.splitlines()):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                # the line is being written, was cut off, or is none of ours
                continue
            if isinstance(record, dict):
                return record
        is_whole = len(text) < n_bytes // 4  # a character has up to four bytes
        if is_whole or n_bytes > _MAX_TAIL_BYTES:
            return None
        n_bytes *= 8


def finite(facts: Any) -> Any:
    """Return facts with None in place of numbers that JSON cannot express."""
    if isinstance(facts, dict):
        return {name: finite(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [finite(value) for value in facts]
    if isinstance(facts, float) and not math.isfinite(facts):
        return None
    return facts


def _list_jobs(is_json: bool) -> None:
    """Print the jobs of this user that wait or run."""
    jobs = own_jobs()
    if is_json:
        echo(json.dumps([job._asdict() for job in jobs], indent=1))
        return
    for job in jobs:
        echo(f"{job.job}  {job}  {job.run_dir}")
    if not jobs:
        echo(
            "no job of `hpcdist submit` waits or runs here; give a run folder to see a run",
            err=True,
        )


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a run."""
    stop_note = ", asked to stop" if facts["is_asked_to_stop"] else ""
    yield f"run         {facts['folder']}{stop_note}"
    attempt = facts["attempt"]
    gone_job = facts["gone_job"]
    starting_job = facts["starting_job"]
    if starting_job:
        yield f"to follow   job {starting_job} has started, and has not begun to train"
    elif facts["decision"] == "requeue" and gone_job:
        yield f"to follow   nothing by itself: job {gone_job} is not in the queue; started again, it resumes"
    elif facts["decision"]:
        has_ended = bool(gone_job) or bool(attempt and attempt["end"])
        yield _what_follows(facts["decision"], facts["reason"], has_ended)
    if attempt:
        is_over = facts["is_attempt_waiting"] or bool(gone_job or starting_job)
        yield _line_of_attempt(attempt, is_over)
    if facts["batch"]:
        yield f"Slurm       {facts['batch']}"
    if facts["log"]:
        yield f"log         {facts['log']}"
    for error in facts["errors"]:
        yield f"beside it   {SideError(**error)}, {_ago(time.time() - error['time_s'])} ago"
    checkpoint = facts["checkpoint"]
    if checkpoint:
        yield f"checkpoint  step {checkpoint['step']}, {_ago(time.time() - checkpoint['time_s'])} ago"
    if facts["metrics"]:
        values = [f"{name} {_short(value)}" for name, value in facts["metrics"].items()]
        yield f"metrics     {'  '.join(values)}"


def _line_of_attempt(attempt: dict[str, Any], is_over: bool) -> str:
    """Return the line about the last attempt.

    Args:
        attempt: facts of the attempt.
        is_over: whether it does not run, as its batch job waits for its next start, or has left the queue.
    """
    job = ""
    if attempt["job"]:
        job = f" in job {attempt['job']}"
    nodes = ", ".join(attempt["nodes"]) or "an unknown host"
    began = "a new run"
    if attempt["resumed_step"] is not None:
        began = f"from step {attempt['resumed_step']}"
    if attempt["end"]:
        end = f"{attempt['end']}: {attempt['reason']}"
    elif is_over:
        end = "died by a signal or an error"
    else:
        end = "runs, or died by a signal or an error"
    return f"attempt     {attempt['number']}{job} on {nodes}, {began}; {end}"


def _what_follows(decision: str, reason: str, has_ended: bool) -> str:
    """Return the line about whether a run is to be run again."""
    if decision == "finished":
        return "to follow   nothing: it has finished"
    follows = "it is to be run again" if decision == "requeue" else "it is not to be run again"
    if has_ended:
        return f"to follow   {follows}: {reason}"
    if decision == "stop":
        return f"if it dies  {follows}: {reason}"
    return f"if it dies  {follows}"


def _ago(seconds: float) -> str:
    """Return a time span in the largest unit of which it has at least two."""
    for unit_s, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0, seconds):.0f} seconds"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
