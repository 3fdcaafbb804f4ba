"""`hpcdist trace`: the steps of all ranks on one clock, for chrome://tracing and ui.perfetto.dev."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.output import echo
from hpcdist.cli.run_records import (
    PARTS,
    AttemptRecords,
    RankRecords,
    Run,
    StepRecord,
    Window,
    read_run,
)
from hpcdist.errors import UsageError

#: Tracks of a rank.
_MAIN = 0
_BACKGROUND = 1
_WINDOWS = 2
_TRACKS = {_MAIN: "steps", _BACKGROUND: "sums in the background", _WINDOWS: "windows"}
#: Beginnings of the names of collectives that no rank leaves before all have entered them.
_SUMS = ("gradients ", "all_reduce ", "shares of gradients ")
#: An event in Chrome's format.
_Event = dict[str, Any]


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
    number = _traced_number(run, attempt)
    if number is None:
        raise UsageError(
            f"hpcdist trace: expected records of steps of attempt {attempt or 'any'} in {folder / 'trace'}, got none; "
            f"have a PreemptionCheckpointHandler or BackupAndRestore in the program, without HPCDIST_TRACE=off."
        )
    run_with_steps = read_run(folder, steps_of=number)
    traced = next(records for records in run_with_steps.attempts if records.number == number)
    path = out or folder / "trace.json"
    document = {"traceEvents": events_of(traced), "displayTimeUnit": "ms"}
    durable.replace_text(durable.Disk(), path, json.dumps(document))
    n_ranks = len(traced.ranks)
    n_steps = sum(len(rank.steps) for rank in traced.ranks)
    ranks = "rank" if n_ranks == 1 else "ranks"
    echo(f"{path}: {n_steps} steps of {n_ranks} {ranks}; open it in ui.perfetto.dev")


def _traced_number(run: Run, attempt: int | None) -> int | None:
    """Return the number of the attempt to trace. None if it has no records of ranks.

    Args:
        run: records of the run.
        attempt: number of the attempt that was asked for. None for the last one with steps, or else with ranks.
    """
    if attempt is None and run.last_trained is not None:
        return run.last_trained.number
    number = None
    for records in run.attempts:
        if records.ranks and attempt in (None, records.number):
            number = records.number
    return number


# -- events --------------------------------------------------------------------------------------------------------


def events_of(attempt: AttemptRecords) -> list[_Event]:
    """Return the events of an attempt in Chrome's format: times in microseconds since the first process began. Pure."""
    offsets = offsets_of(attempt.ranks)
    # seconds to add to times since 1970 by the clock of the rank's host
    corrections: dict[int, float] = {}
    for rank in attempt.ranks:
        corrections[rank.rank] = offsets[rank.host] - rank.clock_offset
    first_start = min(rank.process_began + corrections[rank.rank] for rank in attempt.ranks)
    events: list[_Event] = []
    for rank in attempt.ranks:
        monotonic_shift = offsets[rank.host] - first_start
        unix_shift = corrections[rank.rank] - first_start
        for event in _events_of_rank(rank, monotonic_shift, unix_shift):
            events.append({**event, "pid": rank.rank})
    return events


def _events_of_rank(
    rank: RankRecords, monotonic_shift: float, unix_shift: float
) -> Iterator[_Event]:
    """Yield the events of a rank.

    Args:
        rank: records of the rank.
        monotonic_shift: seconds to add to times of its monotonic clock.
        unix_shift: seconds to add to its times since 1970.
    """
    name = f"rank {rank.rank} ({rank.role}) on {rank.host}"
    yield {
        "ph": "M",
        "name": "process_name",
        "args": {"name": name},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "args": {"sort_index": rank.rank},
    }
    for track, title in _TRACKS.items():
        yield {
            "ph": "M",
            "name": "thread_name",
            "tid": track,
            "args": {"name": title},
        }
    for step in rank.steps:
        yield from _events_of_step(step, monotonic_shift)
    for window in rank.windows:
        if window.steps is not None:
            first, last = window.steps
            title = f"steps {first}-{last}"
            yield _event_of_window(title, window, unix_shift)


def _events_of_step(step: StepRecord, shift: float) -> Iterator[_Event]:
    title = f"step {step.step}"
    yield _event(title, "step", step.began, step.ended, shift, _MAIN)
    for kind, name, began, ended in step.spans:
        yield _event(name, kind, began, ended, shift, _MAIN)
    for kind, name, began, ended in step.background:
        yield _event(name, kind, began, ended, shift, _BACKGROUND)


def _event_of_window(name: str, window: Window, shift: float) -> _Event:
    event = _event(name, "window", window.began, window.ended, shift, _WINDOWS)
    seconds = {part: round(window.seconds[part], 6) for part in PARTS}
    return {**event, "args": {**seconds, "rows": window.rows}}


def _event(
    name: str,
    kind: str,
    began: float,
    ended: float,
    shift: float,
    track: int,
) -> _Event:
    """Return the event of something that lasted.

    Args:
        name: name that is shown.
        kind: category, for filters.
        began: start by a clock of the rank, in seconds.
        ended: end by the same clock.
        shift: seconds to add to that clock.
        track: track of the rank.
    """
    start_s = began + shift
    length_s = (ended + shift) - start_s
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": round(1e6 * start_s, 3),
        "dur": round(1e6 * length_s, 3),
        "tid": track,
    }


# -- clocks --------------------------------------------------------------------------------------------------------


class _SumKey(NamedTuple):
    """Which sum over all ranks: its step, and its number in the step, from 0."""

    step: int
    number: int


class _SumTimes(NamedTuple):
    """When a sum was entered and left, by the monotonic clock of a host.

    Attributes:
        last_entered: when the last rank of the host entered it.
        first_left: when the first rank of the host left it.
    """

    last_entered: float
    first_left: float


_Sums = dict[_SumKey, _SumTimes]


class _Bounds(NamedTuple):
    """Smallest and largest difference of two clocks that a sum allows, in seconds."""

    low: float
    high: float


def offsets_of(ranks: Sequence[RankRecords]) -> dict[str, float]:
    """Return what to add to each host's monotonic clock for seconds since 1970 by the clock of the first host.

    No rank leaves a sum over all ranks before all have entered it: each such sum bounds the difference of two clocks
    from both sides. A host's own clock counts if it is within these bounds, or if there are none. Ranks of a host
    share a clock.
    """
    reference = ranks[0].host
    host_offsets: dict[str, float] = {}
    for rank in ranks:
        host_offsets.setdefault(rank.host, rank.clock_offset)
    sums_by_host = _sums_by_host(ranks)
    offsets = {reference: host_offsets[reference]}
    for host, host_offset in host_offsets.items():
        if host == reference:
            continue
        bounds = _bounds_of_difference(sums_by_host[reference], sums_by_host[host])
        difference = _within(bounds, host_offset - offsets[reference])
        offsets[host] = offsets[reference] + difference
    return offsets


def _sums_by_host(ranks: Sequence[RankRecords]) -> dict[str, _Sums]:
    """Return when the ranks of each host entered and left the sums that they recorded."""
    sums_by_host: dict[str, _Sums] = {}
    for rank in ranks:
        sums = sums_by_host.setdefault(rank.host, {})
        for key, times in _sums_of(rank.steps):
            earlier = sums.get(key, times)
            last_entered = max(earlier.last_entered, times.last_entered)
            first_left = min(earlier.first_left, times.first_left)
            sums[key] = _SumTimes(last_entered, first_left)
    return sums_by_host


def _sums_of(steps: Sequence[StepRecord]) -> Iterator[tuple[_SumKey, _SumTimes]]:
    """Yield the sums over all ranks in the steps of a rank."""
    for step in steps:
        number = 0
        spans = (*step.spans, *step.background)
        for kind, name, began, ended in spans:
            if kind == "communication" and name.startswith(_SUMS):
                key = _SumKey(step.step, number)
                yield key, _SumTimes(last_entered=began, first_left=ended)
                number += 1


def _bounds_of_difference(reference_sums: _Sums, host_sums: _Sums) -> list[_Bounds]:
    """Return the bounds of the reference's clock less a host's clock, by each sum that both recorded."""
    bounds: list[_Bounds] = []
    for key, host_times in host_sums.items():
        reference_times = reference_sums.get(key)
        if reference_times is not None:
            low = reference_times.last_entered - host_times.first_left
            high = reference_times.first_left - host_times.last_entered
            bounds.append(_Bounds(low, high))
    return bounds


def _within(bounds: Sequence[_Bounds], difference: float) -> float:
    """Return a difference of clocks if all bounds allow it or there are none, or else their middle."""
    low = -math.inf
    high = math.inf
    for bound in bounds:
        low = max(low, bound.low)
        high = min(high, bound.high)
    if low <= difference <= high:
        return difference
    if low <= high:
        return (low + high) / 2
    # the clocks drift apart: as they were in the middle
    return median((bound.low + bound.high) / 2 for bound in bounds)
