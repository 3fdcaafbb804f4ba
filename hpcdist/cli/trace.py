"""`hpcdist trace`: the steps of all ranks on one clock, for chrome://tracing and ui.perfetto.dev."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.output import echo
from hpcdist.cli.run_records import PARTS, AttemptRecords, RankRecords, StepRecord, read_run
from hpcdist.errors import UsageError

#: Tracks of a rank.
_MAIN, _BACKGROUND, _WINDOWS = range(3)
_TRACKS = {_MAIN: "steps", _BACKGROUND: "sums in the background", _WINDOWS: "windows"}
#: Collectives that no rank leaves before all have entered them.
_SUMS = ("gradients ", "all_reduce ", "shares of gradients ")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--attempt", type=click.IntRange(1), help="Default: the last one with records.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Default: trace.json in the run folder."
)
def command(folder: Path, attempt: int | None, out: Path | None) -> None:
    """Write what all ranks recorded of their steps as one file that ui.perfetto.dev and chrome://tracing open.

    A run records its first 32 steps, and fewer and fewer of the later ones; with HPCDIST_TRACE=all, each. Each rank has
    a track of steps, with what it waited for in them, one of sums in the background, and one of sums over many steps.
    Hosts' clocks are set by the sums that they made together.

    \b
    hpcdist trace runs/train
    HPCDIST_TRACE=all hpcdist run -n 4 train.py --run-dir runs/a && hpcdist trace runs/a
    """
    run = read_run(folder)
    chosen = [
        attempt_records
        for attempt_records in run.attempts
        if attempt_records.ranks and attempt in (None, attempt_records.number)
    ]
    last = run.last_trained if attempt is None else None
    if not chosen:
        raise UsageError(
            f"hpcdist trace: expected records of steps of attempt {attempt or 'any'} in {folder / 'trace'}, got none; "
            f"have a PreemptionCheckpointHandler or BackupAndRestore in the program, without HPCDIST_TRACE=off."
        )
    number = (last or chosen[-1]).number
    traced_attempt = next(
        attempt_records
        for attempt_records in read_run(folder, steps_of=number).attempts
        if attempt_records.number == number
    )
    path = out or folder / "trace.json"
    events = events_of(traced_attempt)
    durable.replace_text(
        durable.Disk(), path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    )
    n_steps = sum(len(rank.steps) for rank in traced_attempt.ranks)
    ranks = "rank" if len(traced_attempt.ranks) == 1 else "ranks"
    echo(
        f"{path}: {n_steps} steps of {len(traced_attempt.ranks)} {ranks}; open it in ui.perfetto.dev"
    )


def events_of(attempt: AttemptRecords) -> list[dict[str, Any]]:
    """Return the events of an attempt in Chrome's format: times in microseconds since the first process began. Pure."""
    offsets = offsets_of(attempt.ranks)
    corrections = {
        rank_records.rank: offsets[rank_records.host]
        - (rank_records.clock[1] - rank_records.clock[0])
        for rank_records in attempt.ranks
    }
    zero = min(
        rank_records.process_began + corrections[rank_records.rank]
        for rank_records in attempt.ranks
    )
    events = []
    for rank in attempt.ranks:
        of_rank = _events_of_rank(rank, offsets[rank.host] - zero, corrections[rank.rank] - zero)
        events += [{**event, "pid": rank.rank} for event in of_rank]
    return events


def _events_of_rank(
    rank: RankRecords, of_monotonic: float, of_unix: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank.

    Args:
        rank: its records.
        of_monotonic: what to add to times of its monotonic clock.
        of_unix: what to add to its times since 1970.
    """
    name = f"rank {rank.rank} ({rank.role}) on {rank.host}"
    yield {"ph": "M", "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank.rank}}
    for track, title in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": title}}
    for step_record in rank.steps:
        yield _span(
            f"step {step_record.step}",
            "step",
            step_record.began + of_monotonic,
            step_record.ended + of_monotonic,
            _MAIN,
        )
        for track, spans in ((_MAIN, step_record.spans), (_BACKGROUND, step_record.background)):
            for kind, span_name, began, ended in spans:
                yield _span(span_name, kind, began + of_monotonic, ended + of_monotonic, track)
    for window in rank.windows:
        if window.steps is not None:
            title = f"steps {window.steps[0]}-{window.steps[1]}"
            event = _span(title, "window", window.began + of_unix, window.ended + of_unix, _WINDOWS)
            shares = {part: round(window.seconds[part], 6) for part in PARTS}
            yield {**event, "args": {**shares, "rows": window.rows}}


def _span(name: str, kind: str, began: float, ended: float, track: int) -> dict[str, Any]:
    times = {"ts": round(1e6 * began, 3), "dur": round(1e6 * (ended - began), 3)}
    return {"ph": "X", "name": name, "cat": kind, **times, "tid": track}


def offsets_of(ranks: Sequence[RankRecords]) -> dict[str, float]:
    """Return what to add to each host's monotonic clock for seconds since 1970 by the clock of the first host.

    No rank leaves a sum over all ranks before all have entered it: each such sum bounds the difference of two clocks
    from both sides. Where a host's own clock is within these bounds it counts, and so it does without any. Ranks of a
    host share a clock.
    """
    first = ranks[0]
    sums: dict[str, dict[tuple[int, int], tuple[float, float]]] = {}
    for rank in ranks:
        of_host = sums.setdefault(rank.host, {})
        for key, (began, ended) in _sums_of(rank.steps):
            last, soonest = of_host.get(key, (began, ended))
            of_host[key] = max(last, began), min(soonest, ended)
    local_offsets = {rank.host: rank.clock[1] - rank.clock[0] for rank in reversed(ranks)}
    corrected_offsets = {first.host: local_offsets[first.host]}
    for host in local_offsets:
        if host == first.host:
            continue
        shared = [
            (sums[first.host][key], sums[host][key])
            for key in sums[host]
            if key in sums[first.host]
        ]
        bounds = [
            (entered - exited_here, left_first - entered_here)
            for (entered, left_first), (entered_here, exited_here) in shared
        ]
        difference = local_offsets[host] - local_offsets[first.host]
        if bounds:
            low = max(low for low, _ in bounds)
            high = min(high for _, high in bounds)
            if low > high:  # the clocks drift apart: as they were in the middle
                low = high = median((low + high) / 2 for low, high in bounds)
            difference = difference if low <= difference <= high else (low + high) / 2
        corrected_offsets[host] = local_offsets[first.host] + difference
    return corrected_offsets


def _sums_of(steps: Sequence[StepRecord]) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """Yield sums over all ranks: which step and its number there, and when it was entered and left."""
    for step_record in steps:
        number = 0
        for kind, name, began, ended in (*step_record.spans, *step_record.background):
            if kind == "communication" and name.startswith(_SUMS):
                yield (step_record.step, number), (began, ended)
                number += 1
