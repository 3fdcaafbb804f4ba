"""When to stop so that the last save completes before the job is ended: the rule and its measurements."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from hpcdist.background import BackgroundThread
from hpcdist.saving.durations import Durations
from hpcdist.stopping.running_clock import RunningClock

logger = logging.getLogger("hpcdist")

#: A call is expected again for this many times its duration: calls that are rarer take under 1 % of the time.
EXPECTED_TIMES = 100
#: Least reserve besides a step and a save, for the agreement and for leaving.
MIN_SLACK_S = 5.0
_DAY_S = 86400


class Calls:
    """Rare calls that may be long, such as evaluations: a percentile over many short steps would miss them.

    Each call is expected again for `EXPECTED_TIMES` times its duration. So an evaluation between thousands of steps is
    remembered, while a call that was slow once, through compilation or a pause, is forgotten in time. Callers leave out
    calls before the first step of an attempt: one that took half of the time limit would prevent every step.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expected: list[tuple[float, float]] = []

    def add(self, seconds: float) -> None:
        """Record a call that has just ended.

        Forgets calls that were not longer, as they also expire earlier. Few remain: each took more than a hundredth of
        the time since it ended.
        """
        now = self._clock()
        longer_calls = [
            (call_s, until) for call_s, until in self._expected if call_s > seconds and until > now
        ]
        self._expected = [*longer_calls, (seconds, now + EXPECTED_TIMES * seconds)]

    @property
    def n_remembered(self) -> int:
        """Number of calls that are kept; at most `EXPECTED_TIMES` + 1."""
        return len(self._expected)

    @property
    def longest_s(self) -> float:
        """The longest call that is expected again; 0 if none is."""
        now = self._clock()
        expected_s = [seconds for seconds, until in self._expected if until > now]
        return max(expected_s, default=0.0)


def slack_s(step: Durations, save: Durations) -> float:
    """Return the reserve besides a step and a save: their measured spread, at least `MIN_SLACK_S`."""
    return max(MIN_SLACK_S, step.spread + save.spread)


def needed_s(step: Durations, save: Durations, n_saves: int = 1, call_s: float = 0.0) -> float:
    """Return the time that ending the job takes: the current step, or a longer call, plus the saves and the slack."""
    return max(step.p99, call_s) + n_saves * save.p99 + slack_s(step, save)


def must_stop(
    left_s: float, step: Durations, save: Durations, n_saves: int = 1, call_s: float = 0.0
) -> bool:
    """Return whether another step or call might leave too little time for `n_saves` saves."""
    return left_s <= needed_s(step, save, n_saves, call_s)


class BatchEnd:
    """Asks the batch system for the end of this job after each interruption: a pause may have moved it.

    Not collective: the chief asks, in a thread.

    Args:
        clock: counts interruptions.
        ask: returns the seconds that the batch system leaves this job; None if it does not say.
    """

    def __init__(self, clock: RunningClock, ask: Callable[[], float | None]) -> None:
        self._clock = clock
        self._ask = ask
        self._n_seen = clock.n_interruptions
        self._thread = BackgroundThread("hpcdist-batch-end")
        self._answer: Future[float | None] | None = None

    def _find_end(self) -> float | None:
        """Return the end by the clock. The thread reads the clock, as the answer may be looked at much later."""
        left_s = self._ask()
        if left_s is None:
            return None
        return self._clock() + left_s

    def new_end(self) -> float | None:
        """Return the end, by the clock, once after an interruption when the answer has come; otherwise None."""
        self._clock.look()
        if self._answer is None and self._clock.n_interruptions != self._n_seen:
            self._n_seen = self._clock.n_interruptions
            self._answer = self._thread.submit(self._find_end)
        if self._answer is None or not self._answer.done():
            return None
        answer = self._answer
        self._answer = None
        error = answer.exception()
        if error is not None:
            logger.warning("expected the end of the job from the batch system, got %s", error)
            return None
        return answer.result()


class Deadline:
    """The time at which the job will be ended, and the work that must fit in before it.

    Args:
        end: time at which the job will be ended, in seconds of `clock`.
        step, save: measured durations, which the caller keeps adding to. A save includes its read-back.
        clock: seconds in which the job runs, see `RunningClock`; not the time of day, which may be set.
        n_saves: returns the number of saves at the end: 2 if an earlier one must finish first.
        calls: uninterrupted calls that may take the place of a step; also kept up to date by the caller.

    Attributes:
        end: time at which the job will be ended; moved when the batch system reports another end.
        step, save, n_saves, calls: the arguments of these names.
    """

    def __init__(
        self,
        end: float,
        step: Durations,
        save: Durations,
        clock: Callable[[], float] = time.monotonic,
        n_saves: Callable[[], int] = lambda: 1,
        calls: Calls | None = None,
    ) -> None:
        self.end = end
        self.step = step
        self.save = save
        self.n_saves = n_saves
        self.calls = calls or Calls()
        self._clock = clock
        self._start = clock()

    @property
    def left_s(self) -> float:
        """Seconds left; negative after the end."""
        return self.end - self._clock()

    @property
    def is_near(self) -> bool:
        """Whether to stop now."""
        return must_stop(self.left_s, self.step, self.save, self.n_saves(), self.calls.longest_s)

    @property
    def needs_measure(self) -> bool:
        """Whether to save now to measure the cost: a tenth of the time has passed without a measured save."""
        return not self.save.is_measured and self.left_s < 0.9 * (self.end - self._start)

    @property
    def can_save(self) -> bool:
        """Whether the last save, and one still in progress, fit into the time left."""
        return self.left_s > self.n_saves() * self.save.p99

    def describe(self) -> str:
        """Return one line for the log: when the job ends, and how long before that it will stop."""
        time_format = "%H:%M:%S" if self.left_s < _DAY_S else "%Y-%m-%d %H:%M:%S"
        end_at = time.localtime(time.time() + self.left_s)
        end = f"job ends at {time.strftime(time_format, end_at)}"
        n_saves = self.n_saves()
        call_s = self.calls.longest_s
        if must_stop(self.left_s, self.step, self.save, n_saves, call_s):
            return f"{end}; too soon for a step and a save, so this attempt stops at once"
        before_s = needed_s(self.step, self.save, n_saves, call_s)
        line = f"{end}; will save and stop about {before_s:.0f} s before that"
        if not self.save.is_measured:
            line += ", plus the time of a step and a save, once measured"
        return line
