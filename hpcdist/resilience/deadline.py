"""When to stop so that the last save is done before the job is ended: the rule, and the measures it takes."""

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable

#: Measures that are remembered of each kind: the last ones, as the cost of a step changes with the data.
N_REMEMBERED = 500
#: The least time that is kept free besides a step and a save: for the agreement, and for leaving.
MIN_SLACK_S = 5.0


class Durations:
    """The last few durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Remember one more; the oldest is forgotten."""
        if len(self._last) == N_REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._last.popleft())]
        self._last.append(seconds)
        bisect.insort(self._sorted, seconds)

    @property
    def is_measured(self) -> bool:
        """Whether there is any."""
        return bool(self._last)

    @property
    def p99(self) -> float:
        """A duration that 99 in 100 do not exceed; 0 before the first."""
        n = len(self._sorted)
        return self._sorted[min(n - 1, n * 99 // 100)] if n else 0.0

    @property
    def median(self) -> float:
        """The usual duration; 0 before the first."""
        return statistics.median(self._sorted) if self._sorted else 0.0

    @property
    def spread(self) -> float:
        """How much longer the long ones are than the usual one."""
        return self.p99 - self.median


def slack_s(step: Durations, save: Durations) -> float:
    """Return the time to keep free besides a step and a save: their measured spread, or the stated minimum."""
    return max(MIN_SLACK_S, step.spread + save.spread)


def needed_s(step: Durations, save: Durations, n_saves: int = 1) -> float:
    """Return the time that the end of a job takes: the step that is under way, saves, and slack."""
    return step.p99 + n_saves * save.p99 + slack_s(step, save)


def must_stop(left_s: float, step: Durations, save: Durations, n_saves: int = 1) -> bool:
    """Return whether the next step may be the last that leaves time for so many saves."""
    return left_s <= needed_s(step, save, n_saves)


class Deadline:
    """The time at which the job will be ended, and what has to fit in before.

    Args:
        end: when, by `clock`.
        step, save: measured durations; shared with who measures. That of a save lasts until it was read back and noted.
        clock: seconds since 1970, as batch systems give the end.
        n_saves: returns how many saves the end will take: 2 where it has to wait for one before it can make its own.
    """

    def __init__(
        self,
        end: float,
        step: Durations,
        save: Durations,
        clock: Callable[[], float] = time.time,
        n_saves: Callable[[], int] = lambda: 1,
    ) -> None:
        self._end = end
        self._start = clock()
        self._step, self._save = step, save
        self._clock = clock
        self._n_saves = n_saves

    @property
    def left_s(self) -> float:
        """Time left; below 0 when it is over."""
        return self._end - self._clock()

    @property
    def is_near(self) -> bool:
        """Whether to stop now."""
        return must_stop(self.left_s, self._step, self._save, self._n_saves())

    @property
    def wants_measure(self) -> bool:
        """Whether no save was measured yet, and a tenth of the time is over: one should be made to know its cost."""
        return not self._save.is_measured and self.left_s < 0.9 * (self._end - self._start)

    @property
    def can_save(self) -> bool:
        """Whether the last save fits into the time left, with the one before it if that is under way."""
        return self.left_s > self._n_saves() * self._save.p99

    def describe(self) -> str:
        """Return the rule with what is known now, as one line."""
        n_saves = self._n_saves()
        save = f"{n_saves * self._save.p99:.3g} s" if self._save.is_measured else "not measured yet"
        line = (
            f"deadline in {self.left_s:.0f} s; stops when p99 step + p99 saves + slack is left, now "
            f"{self._step.p99:.3g} s + {save} + {slack_s(self._step, self._save):.3g} s"
        )
        if must_stop(self.left_s, self._step, self._save, n_saves):
            return f"{line}: no step fits in, so this attempt stops at once"
        return line
