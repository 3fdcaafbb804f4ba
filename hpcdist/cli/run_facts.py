"""What follows from the records of a run: goodput, stragglers, and when each step was made. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hpcdist.cli.run_records import PARTS, AttemptRecords, RankRecords, Run, Window

#: A rank is a straggler if its own part of a step takes this much longer than the median's, of the whole step.
STRAGGLER_SHARE = 0.1
_GOODPUT_PARTS = (
    "kept steps",
    "lost steps",
    "saves",
    "between steps",
    "start-up",
    "waiting for the next attempt",
    "unrecorded",
)


@dataclass(frozen=True)
class Goodput:
    """Where the time of a whole run went, in seconds, from its first process to the last thing that is known.

    Attributes:
        parts: kept steps, steps that were lost and made again, saves, time between steps, start-up, waiting between
            attempts, and what is in no record.
        elapsed_s: all of it.
        n_lost: steps that were made again.
    """

    parts: dict[str, float]
    elapsed_s: float
    n_lost: int

    @property
    def share(self) -> float:
        """The part of the time that went into steps that were kept."""
        return self.parts["kept steps"] / self.elapsed_s if self.elapsed_s else 0.0


def goodput_of(run: Run) -> Goodput:
    """Return where the time of a run went, by the chief's records."""
    names = (
        "kept steps",
        "lost steps",
        "saves",
        "between steps",
        "start-up",
        "waiting for the next attempt",
        "unrecorded",
    )
    parts = dict.fromkeys(names, 0.0)
    n_lost, elapsed_s = 0, 0.0
    for attempt, following in zip(run.attempts, [*run.attempts[1:], None], strict=True):
        began, ended = attempt.began, attempt.ended
        if began is None or ended is None:
            continue
        next_began = following.began if following is not None else None
        until = ended if next_began is None else max(next_began, ended)
        limit = None if following is None else following.resumed_step
        kept_s, lost_s, lost = _kept_and_lost(attempt, limit)
        total = attempt.ranks[0].total if attempt.ranks else dict.fromkeys(PARTS, 0.0)
        first = attempt.ranks[0].windows[0].began if attempt.ranks and attempt.ranks[0].windows else ended
        known = {"kept steps": kept_s, "lost steps": lost_s, "saves": total["save"], "between steps": total["between"]}
        known |= {"start-up": first - began, "waiting for the next attempt": until - ended}
        for name, seconds in known.items():
            parts[name] += seconds
        parts["unrecorded"] += max(0.0, until - began - sum(known.values()))
        n_lost, elapsed_s = n_lost + lost, elapsed_s + until - began
    return Goodput(parts, elapsed_s, n_lost)


def _kept_and_lost(attempt: AttemptRecords, limit: int | None) -> tuple[float, float, int]:
    """Return seconds of the steps up to `limit`, and of those after it; and how many these are."""
    kept_s = lost_s = 0.0
    n_lost = 0
    for window in attempt.ranks[0].windows if attempt.ranks else ():
        if window.steps is None:
            continue
        first, last = window.steps
        n = last - first + 1
        n_kept = n if limit is None else min(n, max(0, limit - first + 1))
        kept_s += window.step_s * n_kept / n
        lost_s += window.step_s * (n - n_kept) / n
        n_lost += n - n_kept
    return kept_s, lost_s, n_lost


def stragglers_of(ranks: Sequence[RankRecords]) -> list[str]:
    """Return a line for each rank for which others wait: its own part of the steps takes longer than the median's."""
    counted = [one for one in ranks if one.n_steps]
    if len(counted) < 2:
        return []
    found = []
    for part in ("compute", "input"):
        own = {one.rank: one.total[part] / one.n_steps for one in counted}
        usual = median(own.values())
        step_s = median(sum(one.total[name] for name in PARTS[:3]) / one.n_steps for one in counted)
        late = [one for one in counted if own[one.rank] - usual > STRAGGLER_SHARE * step_s]
        hosts = {one.host for one in late}
        whole = {host for host in hosts if all(one in late for one in counted if one.host == host)}
        verb = "computes" if part == "compute" else "waits for input"
        for one in late:
            others = ", as all ranks of that host," if one.host in whole and len(late) > 1 else ""
            where = f"rank {one.rank} on {one.host}{others}"
            found.append(f"{where} {verb} {1e3 * own[one.rank]:.3g} ms a step, the median {1e3 * usual:.3g} ms")
    return found


def steps_in_time(run: Run) -> "StepClock":
    """Return when each step of a run was made, by the chief's records."""
    return StepClock([one for attempt in run.attempts for one in (attempt.ranks[0].windows if attempt.ranks else ())])


class StepClock:
    """When steps were made, in seconds since 1970; of a step that was made again, the last time.

    Args:
        windows: in the order of time, of all attempts.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self._points: list[tuple[int, float]] = []
        for window in windows:
            if window.steps is None:
                continue
            first, last = window.steps
            reached = self.time_of(first - 1)
            while self._points and self._points[-1][0] > first - 1:  # steps that are made again
                self._points.pop()
            self._points += [] if reached is None else [(first - 1, reached)]
            self._points += [(first - 1, window.began), (last, window.ended)]

    def time_of(self, step: int) -> float | None:
        """Return when a step was done, between what is known; None outside of it."""
        if not self._points or not self._points[0][0] <= step <= self._points[-1][0]:
            return None
        number = bisect.bisect_left(self._points, (step, -float("inf")))
        (after, after_s), (before, before_s) = self._points[number], self._points[max(0, number - 1)]
        return after_s if after == before else before_s + (after_s - before_s) * (step - before) / (after - before)


def numbers_of(metrics: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers in records of metrics by name, each with its step."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in metrics:
        for name, value in record.items():
            if name not in ("step", "epoch") and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, []).append((record["step"], float(value)))
    return found
