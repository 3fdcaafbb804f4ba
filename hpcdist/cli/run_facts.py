"""What follows from the records of a run: goodput, stragglers, and when each step was made. Pure."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from hpcdist.cli.run_records import PARTS, AttemptRecords, RankRecords, Run

#: A rank is a straggler if its own part of a step takes this much longer than the median's, of the whole step.
STRAGGLER_SHARE = 0.1


@dataclass(frozen=True)
class Goodput:
    """Where the time of a whole run went, in seconds, from its first process to the last thing that is known.

    Attributes:
        parts: kept steps, steps that were lost and repeated, saves, time between steps, start-up, waiting between
            attempts, and what is in no record.
        elapsed_s: all of it.
        n_lost: steps that were repeated.
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
    )
    parts = dict.fromkeys((*names, "unrecorded"), 0.0)
    n_lost = 0
    elapsed_s = 0.0
    for number, attempt in enumerate(run.attempts):
        began = attempt.began
        ended = attempt.ended
        later = run.attempts[number + 1 :]
        if began is None or ended is None:
            continue
        next_began = next(
            (later_attempt.began for later_attempt in later if later_attempt.began is not None),
            None,
        )
        until = ended if next_began is None else max(next_began, ended)
        kept_s, lost_s, lost = _kept_and_lost(attempt, _kept_up_to(later))
        windows = () if attempt.chief is None else attempt.chief.windows
        total = dict.fromkeys(PARTS, 0.0) if attempt.chief is None else attempt.chief.total
        start_s = windows[0].began - began if windows else ended - began
        recorded_seconds = (kept_s, lost_s, total["save"], total["between"], start_s, until - ended)
        for name, seconds in zip(names, recorded_seconds, strict=True):
            parts[name] += seconds
        parts["unrecorded"] += max(0.0, until - began - sum(recorded_seconds))
        n_lost = n_lost + lost
        elapsed_s = elapsed_s + until - began
    return Goodput(parts, elapsed_s, n_lost)


def _kept_up_to(later: Sequence[AttemptRecords]) -> int | None:
    """Return the last step that no later attempt repeated; None where none did."""
    return min(
        [attempt.first_step for attempt in later if attempt.first_step is not None], default=None
    )


def _kept_and_lost(attempt: AttemptRecords, limit: int | None) -> tuple[float, float, int]:
    """Return seconds of the steps up to `limit`, and of those after it; and how many these are."""
    kept_s = lost_s = 0.0
    n_lost = 0
    for window in () if attempt.chief is None else attempt.chief.windows:
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
    counted = [rank for rank in ranks if rank.n_steps]
    if len(counted) < 3:  # of two, none is usual
        return []
    straggler_lines = []
    for part in ("compute", "input"):
        seconds_by_rank = {rank.rank: rank.total[part] / rank.n_steps for rank in counted}
        usual = median_low(seconds_by_rank.values())
        step_s = median_low(
            sum(rank.total[name] for name in PARTS[:3]) / rank.n_steps for rank in counted
        )
        late = [
            rank
            for rank in counted
            if seconds_by_rank[rank.rank] - usual > STRAGGLER_SHARE * step_s
        ]
        hosts = {rank.host for rank in late}
        whole = {
            host for host in hosts if all(rank in late for rank in counted if rank.host == host)
        }
        verb = "computes" if part == "compute" else "waits for input"
        for straggler in late:
            n_there = sum(peer.host == straggler.host for peer in counted)
            host_note = (
                ", as all ranks of that host," if straggler.host in whole and n_there > 1 else ""
            )
            where = f"rank {straggler.rank} on {straggler.host}{host_note}"
            straggler_lines.append(
                f"{where} {verb} {1e3 * seconds_by_rank[straggler.rank]:.3g} ms a step, the median {1e3 * usual:.3g} ms"
            )
    return straggler_lines


class StepClock:
    """When steps were made, in seconds since 1970; of a step that was repeated, the last time.

    Between windows of the chief, and its checkpoints, steps count as equally long. What a killed attempt made after its
    last record was made before its end.

    Args:
        attempts: by number.
    """

    def __init__(self, attempts: Sequence[AttemptRecords]) -> None:
        self._points: list[tuple[int, float]] = []
        ended: float | None = None
        for attempt in attempts:
            points = _points_of(attempt)
            if not points:
                continue
            first = points[0][0]
            self._cut(first, ended)
            self._points += points
            ended = attempt.ended

    def _cut(self, first: int, ended: float | None) -> None:
        """Leave the points up to the step that an attempt resumed from, with that one itself."""
        if not self._points:
            return
        reached = self.time_of(first)
        while self._points and self._points[-1][0] > first:
            self._points.pop()
        if reached is None and ended is not None and self._points and self._points[-1][0] < first:
            reached = ended
        self._points += [] if reached is None else [(first, reached)]

    def time_of(self, step: int) -> float | None:
        """Return when a step was done, between what is known; None outside of it."""
        if not self._points or not self._points[0][0] <= step <= self._points[-1][0]:
            return None
        number = bisect.bisect_left(self._points, (step, -float("inf")))
        (after, after_s) = self._points[number]
        (before, before_s) = self._points[max(0, number - 1)]
        return (
            after_s
            if after == before
            else before_s + (after_s - before_s) * (step - before) / (after - before)
        )


def _points_of(attempt: AttemptRecords) -> list[tuple[int, float]]:
    """Return steps with the times at which they were done, ascending."""
    points: list[tuple[int, float]] = []
    for window in () if attempt.chief is None else attempt.chief.windows:
        if window.steps is not None and (not points or window.steps[0] > points[-1][0]):
            points += [(window.steps[0] - 1, window.began), (window.steps[1], window.ended)]
    last, last_s = points[-1] if points else (-1, 0.0)
    for commit in attempt.commits if points else ():
        if commit.step > last and commit.time_s > last_s:
            last = commit.step
            last_s = commit.time_s
            points.append((last, last_s))
    return points
