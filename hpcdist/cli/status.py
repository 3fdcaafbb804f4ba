"""`hpcdist status` and `hpcdist stop`: what a run has done, from the files of its run folder; and asking it to save."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.read import read_end
from hpcdist.checkpoint.store import Saved, Store, use_one
from hpcdist.cli.batch_jobs import (
    BatchJobState,
    cancel,
    is_job_number,
    own_jobs,
    run_folder,
    state_of,
)
from hpcdist.cli.output import echo
from hpcdist.cli.run import read_decision
from hpcdist.cli.run_records import SideError, read_side_errors
from hpcdist.errors import CheckpointDamaged, UsageError
from hpcdist.run.ledger import Attempt, Ledger
from hpcdist.stopping.stop import STOP_FOR_GOOD

#: The end of a file of metrics that is read first: most records are short.
_TAIL_BYTES = 64 << 10
#: Most of it that is read.
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
    batch = _batch_of(run, folder)
    facts = _facts_of(folder if batch is not None else _require_run(folder), batch)
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

    Makes the file `stop` there, which the job removes when it has ended. A batch job of a recipe is requeued then, and
    resumes later; with --for-good it ends with exit code 76, and is not. The same command, submitted again, goes on.

    \b
    hpcdist stop runs/train --wait 60
    hpcdist stop 1234 --for-good
    """
    folder = run_folder(run)
    batch = _batch_of(run, folder)
    if batch is not None and batch.state == "PENDING":
        return _stop_waiting(batch, is_for_good)
    _require_run(folder)
    path = folder / "stop"
    if limit_s is not None and math.isnan(limit_s):
        raise UsageError("hpcdist stop: expected --wait as seconds, got nan; give a number.")
    attempts = Ledger(Store(folder / "checkpoints")).attempts()
    if attempts and attempts[-1].end:
        raise UsageError(
            f"hpcdist stop: expected a run that is under way in {folder}, got one whose last attempt has ended "
            f"({attempts[-1].end}); the file `stop` would end the next one after its first step."
        )
    durable.replace_text(
        durable.Disk(), path, f"{STOP_FOR_GOOD if is_for_good else 'hpcdist stop'}\n"
    )
    echo(
        f"{path}: the job saves after its step, and ends{', and is not run again' if is_for_good else ''}"
    )
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while deadline is not None and path.exists():
        if time.monotonic() > deadline:
            echo(
                f"hpcdist stop: expected the job to end within {limit_s:g} s, got {path}, which is there",
                err=True,
            )
            return 1
        time.sleep(_POLL_S)
    return 0


def _batch_of(run: str, folder: Path) -> BatchJobState | None:
    """Return what Slurm says of a job that waits or runs: of a number, or of the last attempt in a run folder."""
    if is_job_number(run):
        return state_of(run)
    attempts = Ledger(Store(folder / "checkpoints")).attempts()
    job = attempts[-1].job if attempts else None
    return None if job is None else state_of(job)


def _stop_waiting(batch: BatchJobState, is_for_good: bool) -> int:
    """Cancel a job that waits, or say that there is nothing to save; return the exit code."""
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


def _require_run(folder: Path) -> Path:
    """Return a run folder.

    Raises:
        UsageError: for what is none.
    """
    if not (folder / "checkpoints").is_dir() and not (folder / "decision.json").exists():
        raise UsageError(
            f"expected a run folder, with checkpoints or a decision.json, got {str(folder)!r}; give the folder that "
            f"--run-dir names in the job."
        )
    return folder


def _facts_of(folder: Path, batch: BatchJobState | None) -> dict[str, Any]:
    """Return what is known of a run, for JSON; of a batch job that waits there may be no folder yet."""
    store = Store(folder / "checkpoints")
    attempts = Ledger(store).attempts()
    decision = read_decision(folder)
    saved = store.saved()
    last = attempts[-1] if attempts else None
    return {
        "folder": str(folder),
        "decision": None if decision is None else decision.verdict,
        "reason": None if decision is None else decision.reason,
        "n_attempts": 0 if last is None else last.number,
        "attempt": None if last is None else _facts_of_attempt(last),
        "checkpoint": _newest(store, saved) if saved else None,
        "metrics": _last_record(folder / "metrics.jsonl"),
        "batch": None if batch is None else str(batch),
        "errors": [dataclasses.asdict(error) for error in read_side_errors(folder)],
        "is_asked_to_stop": (folder / "stop").exists(),
    }


def _facts_of_attempt(attempt: Attempt) -> dict[str, Any]:
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
    """Return the newest checkpoint whose index is sound."""
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
                # one that is being written, cut off, or none of ours
                continue
            if isinstance(record, dict):
                return record
        is_whole = len(text) < n_bytes // 4  # a character has up to four bytes
        if is_whole or n_bytes > _MAX_TAIL_BYTES:
            return None
        n_bytes *= 8


def finite(facts: Any) -> Any:
    """Return facts with None for numbers that JSON has no word for."""
    if isinstance(facts, dict):
        return {name: finite(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def _list_jobs(is_json: bool) -> None:
    jobs = own_jobs()
    if is_json:
        echo(json.dumps([job._asdict() for job in jobs], indent=1))
    for job in [] if is_json else jobs:
        echo(f"{job.job}  {job}  {job.run_dir}")
    if not jobs and not is_json:
        echo(
            "no job of `hpcdist submit` waits or runs here; give a run folder to see a run",
            err=True,
        )


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"run         {facts['folder']}" + (
        ", asked to stop" if facts["is_asked_to_stop"] else ""
    )
    attempt = facts["attempt"]
    if facts["decision"]:
        yield _what_follows(facts["decision"], facts["reason"], bool(attempt and attempt["end"]))
    if attempt:
        began = (
            "a new run"
            if attempt["resumed_step"] is None
            else f"from step {attempt['resumed_step']}"
        )
        where = f" in job {attempt['job']}" if attempt["job"] else ""
        has_died = (facts["batch"] or "").startswith("PENDING")
        state = "died without notice" if has_died else "runs, or died without notice"
        end = f"{attempt['end']}: {attempt['reason']}" if attempt["end"] else state
        nodes = ", ".join(attempt["nodes"]) or "an unknown host"
        yield f"attempt     {attempt['number']}{where} on {nodes}, {began}; {end}"
    if facts["batch"]:
        yield f"Slurm       {facts['batch']}"
    for error in facts["errors"]:
        yield f"beside it   {SideError(**error)}, {_ago(time.time() - error['time_s'])} ago"
    checkpoint = facts["checkpoint"]
    if checkpoint:
        yield f"checkpoint  step {checkpoint['step']}, {_ago(time.time() - checkpoint['time_s'])} ago"
    if facts["metrics"]:
        yield "metrics     " + "  ".join(
            f"{name} {_short(value)}" for name, value in facts["metrics"].items()
        )


def _what_follows(decision: str, reason: str, has_ended: bool) -> str:
    """Return the line that says whether a run is to go on."""
    if decision == "finished":
        return "to follow   nothing: it has finished"
    follows = "it is to be run again" if decision == "requeue" else "it is not to be run again"
    if has_ended:
        return f"to follow   {follows}: {reason}"
    return f"if it dies  {follows}" + (f": {reason}" if decision == "stop" else "")


def _ago(seconds: float) -> str:
    for unit_s, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0, seconds):.0f} seconds"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
