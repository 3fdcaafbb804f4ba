"""What follows from the records of a run: goodput, stragglers, and when each step was made. Pure."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from hpcdist.cli.run_records import AttemptRecords, RankRecords, Run, Window

#: A rank is a straggler if a part of its steps takes longer than the median's by this share of a whole step.
STRAGGLER_SHARE = 0.1
#: Where the time of a run goes, in the order of pictures.
_GOODPUT_PARTS = (
    "kept steps",
    "lost steps",
    "saves",
    "between steps",
    "start-up",
    "waiting for the next attempt",
    "unrecorded",
)
#: Parts of a window that are a part of its steps.
_STEP_PARTS = ("compute", "input", "communication")
#: Parts of steps that ranks do by themselves, each with its verb.
_OWN_WORK = {"compute": "computes", "input": "waits for input"}


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run or an attempt went, from its first process to the last thing that is known.

    Attributes:
        parts: seconds of kept steps, steps that were lost and repeated, saves, time between steps, start-up, waiting
            between attempts, and time that is in no record.
        elapsed_s: seconds of all parts.
        n_lost: number of steps that were repeated.
    """

    parts: dict[str, float]
    elapsed_s: float
    n_lost: int

    @property
    def share(self) -> float:
        """The part of the time that went into steps that were kept."""
        if not self.elapsed_s:
            return 0.0
        return self.parts["kept steps"] / self.elapsed_s


def goodput_of(run: Run) -> Goodput:
    """Return where the time of a run went, by the chief's records."""
    parts = dict.fromkeys(_GOODPUT_PARTS, 0.0)
    elapsed_s = 0.0
    n_lost = 0
    for index, attempt in enumerate(run.attempts):
        later_attempts = run.attempts[index + 1 :]
        goodput = _goodput_of_attempt(attempt, later_attempts)
        if goodput is None:
            continue
        for part, seconds in goodput.parts.items():
            parts[part] += seconds
        elapsed_s += goodput.elapsed_s
        n_lost += goodput.n_lost
    return Goodput(parts, elapsed_s, n_lost)


def _goodput_of_attempt(
    attempt: AttemptRecords, later_attempts: Sequence[AttemptRecords]
) -> Goodput | None:
    """Return where the time of an attempt went, until the next one began. None if its times are not known."""
    began = attempt.began
    ended = attempt.ended
    if began is None or ended is None:
        return None
    next_began = _next_began(ended, later_attempts)
    elapsed_s = next_began - began
    windows = attempt.chief_windows
    started_up = windows[0].began if windows else ended
    recorded = _recorded_times(windows, _last_kept_step(later_attempts))
    parts = {
        "kept steps": recorded.kept_s,
        "lost steps": recorded.lost_s,
        "saves": recorded.save_s,
        "between steps": recorded.between_s,
        "start-up": started_up - began,
        "waiting for the next attempt": next_began - ended,
    }
    recorded_s = sum(parts.values())
    parts["unrecorded"] = max(0.0, elapsed_s - recorded_s)
    return Goodput(parts, elapsed_s, recorded.n_lost)


def _next_began(ended: float, later_attempts: Sequence[AttemptRecords]) -> float:
    """Return when the next attempt began, at the earliest at the end of this one. Without a next one, that end."""
    for later_attempt in later_attempts:
        if later_attempt.began is not None:
            return max(later_attempt.began, ended)
    return ended


def _last_kept_step(later_attempts: Sequence[AttemptRecords]) -> int | None:
    """Return the last step that no later attempt repeated. None if later attempts repeated no step."""
    first_steps = [
        attempt.first_step for attempt in later_attempts if attempt.first_step is not None
    ]
    return min(first_steps, default=None)


@dataclass(frozen=True)
class _RecordedTimes:
    """Where the time of the windows of an attempt went.

    Attributes:
        kept_s: seconds of steps that were kept.
        lost_s: seconds of steps that were repeated.
        save_s: seconds of saves.
        between_s: seconds between steps.
        n_lost: number of steps that were repeated.
    """

    kept_s: float
    lost_s: float
    save_s: float
    between_s: float
    n_lost: int


def _recorded_times(windows: Sequence[Window], last_kept_step: int | None) -> _RecordedTimes:
    """Return where the time of windows went. The steps of a window count as equally long.

    Args:
        windows: windows of the chief.
        last_kept_step: last step that is kept. None if all are.
    """
    kept_s = 0.0
    lost_s = 0.0
    save_s = 0.0
    between_s = 0.0
    n_lost = 0
    for window in windows:
        save_s += window.seconds["save"]
        between_s += window.seconds["between"]
        if window.steps is None:
            continue
        first, last = window.steps
        n_steps = last - first + 1
        n_kept = n_steps
        if last_kept_step is not None:
            n_up_to_last_kept = max(0, last_kept_step - first + 1)
            n_kept = min(n_steps, n_up_to_last_kept)
        kept_s += window.step_s * n_kept / n_steps
        lost_s += window.step_s * (n_steps - n_kept) / n_steps
        n_lost += n_steps - n_kept
    return _RecordedTimes(kept_s, lost_s, save_s, between_s, n_lost)


# -- windows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowSums:
    """Sums over some windows of a rank.

    Attributes:
        n_steps: number of steps.
        n_rows: number of rows that the steps used.
        length_s: seconds of the windows.
        step_s: seconds in steps.
        total_stale: pushes of other workers that the rank's pushes had not seen.
        most_stale: most pushes that a single push had not seen.
    """

    n_steps: int
    n_rows: int
    length_s: float
    step_s: float
    total_stale: int
    most_stale: int


def sums_of(windows: Sequence[Window]) -> WindowSums:
    """Return the sums over windows."""
    n_steps = 0
    n_rows = 0
    length_s = 0.0
    step_s = 0.0
    total_stale = 0
    most_stale = 0
    for window in windows:
        n_steps += window.n_steps
        n_rows += window.rows
        length_s += window.ended - window.began
        step_s += window.step_s
        total_stale += window.stale.total
        most_stale = max(most_stale, window.stale.most)
    return WindowSums(n_steps, n_rows, length_s, step_s, total_stale, most_stale)


# -- stragglers ----------------------------------------------------------------------------------------------------


def stragglers_of(ranks: Sequence[RankRecords]) -> list[str]:
    """Return a line for each rank for which others wait: its own part of the steps takes longer than the median's."""
    trained_ranks = [rank for rank in ranks if rank.n_steps]
    if len(trained_ranks) < 3:  # of two, none is usual
        return []
    usual_step_s = median_low(map(_mean_step_s, trained_ranks))
    lines: list[str] = []
    for part in _OWN_WORK:
        lines += _stragglers_in(part, trained_ranks, usual_step_s)
    return lines


def _stragglers_in(part: str, ranks: Sequence[RankRecords], usual_step_s: float) -> list[str]:
    """Return a line for each straggler in a part of the steps.

    Args:
        part: a part of steps that ranks do by themselves.
        ranks: ranks that have made steps.
        usual_step_s: median length of a step.
    """
    mean_s = {rank.rank: rank.seconds_in(part) / rank.n_steps for rank in ranks}
    usual_s = median_low(mean_s.values())
    limit_s = STRAGGLER_SHARE * usual_step_s
    stragglers = [rank for rank in ranks if mean_s[rank.rank] - usual_s > limit_s]
    usual_ms = 1e3 * usual_s
    lines: list[str] = []
    for straggler in stragglers:
        where = f"rank {straggler.rank} on {straggler.host}"
        if _is_slow_host(straggler.host, ranks, stragglers):
            where += ", as all ranks of that host,"
        verb = _OWN_WORK[part]
        own_ms = 1e3 * mean_s[straggler.rank]
        lines.append(f"{where} {verb} {own_ms:.3g} ms a step, the median {usual_ms:.3g} ms")
    return lines


def _mean_step_s(rank: RankRecords) -> float:
    return sum(map(rank.seconds_in, _STEP_PARTS)) / rank.n_steps


def _is_slow_host(
    host: str, ranks: Sequence[RankRecords], stragglers: Sequence[RankRecords]
) -> bool:
    """Return whether a host has several ranks, and all are stragglers."""
    n_ranks = 0
    for rank in ranks:
        if rank.host == host:
            n_ranks += 1
            if rank not in stragglers:
                return False
    return n_ranks > 1


# -- times of steps ------------------------------------------------------------------------------------------------


class _StepTime(NamedTuple):
    """When a step was done, in seconds since 1970."""

    step: int
    time_s: float


class StepClock:
    """When steps were made, in seconds since 1970. Of a step that was repeated, the last time counts.

    Between windows of the chief, and its checkpoints, steps count as equally long. What a killed attempt made after its
    last record was made before its end.

    Args:
        attempts: records of the attempts, by number.
    """

    def __init__(self, attempts: Sequence[AttemptRecords]) -> None:
        self._step_times: list[_StepTime] = []
        ended: float | None = None
        for attempt in attempts:
            step_times = _step_times_of(attempt)
            if not step_times:
                continue
            self._rewind(step_times[0].step, ended)
            self._step_times += step_times
            ended = attempt.ended

    def _rewind(self, resumed_step: int, ended: float | None) -> None:
        """Forget the steps after the one from which an attempt resumed, and end with that step.

        Args:
            resumed_step: step from which the attempt resumed.
            ended: end of the attempt before. None if it is not known.
        """
        if not self._step_times:
            return
        reached = self.time_of(resumed_step)
        while self._step_times and self._step_times[-1].step > resumed_step:
            self._step_times.pop()
        if reached is None and self._step_times:
            latest = self._step_times[-1]
            if latest.step < resumed_step:
                reached = ended
        if reached is not None:
            self._step_times.append(_StepTime(resumed_step, reached))

    def time_of(self, step: int) -> float | None:
        """Return when a step was done. None for a step before the first known one, or after the last."""
        if not self._step_times:
            return None
        earliest = self._step_times[0]
        latest = self._step_times[-1]
        if not earliest.step <= step <= latest.step:
            return None
        soonest = _StepTime(step, -math.inf)
        index = bisect.bisect_left(self._step_times, soonest)
        after = self._step_times[index]
        before = self._step_times[max(0, index - 1)]
        if after.step == before.step:
            return after.time_s
        length_s = after.time_s - before.time_s
        n_done = step - before.step
        n_steps = after.step - before.step
        return before.time_s + length_s * n_done / n_steps


def _step_times_of(attempt: AttemptRecords) -> list[_StepTime]:
    """Return when the chief was done with the steps that are recorded, ascending."""
    step_times: list[_StepTime] = []
    for window in attempt.chief_windows:
        if window.steps is None:
            continue
        first, last = window.steps
        if not step_times or first > step_times[-1].step:
            step_times.append(_StepTime(first - 1, window.began))
            step_times.append(_StepTime(last, window.ended))
    if not step_times:
        return []
    for commit in attempt.commits:
        latest = step_times[-1]
        if commit.step > latest.step and commit.time_s > latest.time_s:
            step_times.append(_StepTime(commit.step, commit.time_s))
    return step_times
