"""When to stop so that the last save is done before the job is ended: the rule, and the measures it takes."""

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable

#: Measures that are remembered of each kind: the last ones, as the cost of a step changes with the data.
N_REMEMBERED = 500
#: A call is expected again for so many times as long as it took: what comes more seldom takes under 1 % of the time.
EXPECTED_TIMES = 100
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
    def n_remembered(self) -> int:
        """How many there are; at most `N_REMEMBERED`."""
        return len(self._last)

    @property
    def is_measured(self) -> bool:
        """Whether there is any."""
        return self.n_remembered > 0

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


class Calls:
    """The calls that may be long and come seldom, such as evaluations: no percentile of many shorter ones knows them.

    Each is expected again for `EXPECTED_TIMES` times as long as it took. So an evaluation between thousands of short
    calls is remembered, and one that was long once, by compilation or a pause, is not for ever. Who measures leaves out
    those before the first step of an attempt: else one that takes half of the time would let none make a step.

    Args:
        clock: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expected: list[tuple[float, float]] = []

    def add(self, seconds: float) -> None:
        """Take note of one more, which is over.

        Those not longer are forgotten: they would be sooner than this one. Few stay, as each took more than a hundredth
        of the time since.
        """
        now = self._clock()
        longer = [(other_s, until) for other_s, until in self._expected if other_s > seconds and until > now]
        self._expected = [*longer, (seconds, now + EXPECTED_TIMES * seconds)]

    @property
    def n_remembered(self) -> int:
        """How many are remembered; at most `EXPECTED_TIMES` and one."""
        return len(self._expected)

    @property
    def longest_s(self) -> float:
        """The longest that is expected again; 0 without one."""
        now = self._clock()
        return max((seconds for seconds, until in self._expected if until > now), default=0.0)


def slack_s(step: Durations, save: Durations) -> float:
    """Return the time to keep free besides a step and a save: their measured spread, or the stated minimum."""
    return max(MIN_SLACK_S, step.spread + save.spread)


def needed_s(step: Durations, save: Durations, n_saves: int = 1, call_s: float = 0.0) -> float:
    """Return the time that the end of a job takes: the step that is under way, or a longer call, saves, and slack."""
    return max(step.p99, call_s) + n_saves * save.p99 + slack_s(step, save)


def must_stop(left_s: float, step: Durations, save: Durations, n_saves: int = 1, call_s: float = 0.0) -> bool:
    """Return whether the next step or call may be the last that leaves time for so many saves."""
    return left_s <= needed_s(step, save, n_saves, call_s)


class Deadline:
    """The time at which the job will be ended, and what has to fit in before.

    Args:
        end: when, by `clock`.
        step, save: measured durations; shared with who measures. That of a save lasts until it was read back and noted.
        clock: seconds since 1970, as batch systems give the end.
        n_saves: returns how many saves the end will take: 2 where it has to wait for one before it can make its own.
        calls: what may come in place of a step, and is not interrupted either; shared likewise.

    Attributes:
        end: see above; it may be moved, where the batch system gives more time or less.
        step, save, n_saves, calls: see above.
    """

    def __init__(
        self,
        end: float,
        step: Durations,
        save: Durations,
        clock: Callable[[], float] = time.time,
        n_saves: Callable[[], int] = lambda: 1,
        calls: Calls | None = None,
    ) -> None:
        self.end = end
        self.step, self.save, self.n_saves = step, save, n_saves
        self.calls = calls or Calls()
        self._clock = clock
        self._start = clock()

    @property
    def left_s(self) -> float:
        """Time left; below 0 when it is over."""
        return self.end - self._clock()

    @property
    def is_near(self) -> bool:
        """Whether to stop now."""
        return must_stop(self.left_s, self.step, self.save, self.n_saves(), self.calls.longest_s)

    @property
    def wants_measure(self) -> bool:
        """Whether no save was measured yet, and a tenth of the time is over: one should be made to know its cost."""
        return not self.save.is_measured and self.left_s < 0.9 * (self.end - self._start)

    @property
    def can_save(self) -> bool:
        """Whether the last save fits into the time left, with the one before it if that is under way."""
        return self.left_s > self.n_saves() * self.save.p99

    def describe(self) -> str:
        """Return the rule with what is known now, as one line."""
        n_saves, call_s = self.n_saves(), self.calls.longest_s
        save = f"{n_saves * self.save.p99:.3g} s" if self.save.is_measured else "not measured yet"
        line = (
            f"deadline in {self.left_s:.0f} s; stops when p99 step (or longer call of run) + p99 saves + slack is left,"
            f" now {max(self.step.p99, call_s):.3g} s + {save} + {slack_s(self.step, self.save):.3g} s"
        )
        if must_stop(self.left_s, self.step, self.save, n_saves, call_s):
            return f"{line}: no step fits in, so this attempt stops at once"
        return line
