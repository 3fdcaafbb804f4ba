"""How long the steps of this rank take, and its rare calls such as evaluations, measured from poll to poll."""

from collections.abc import Callable

from hpcdist.saving.durations import Durations
from hpcdist.stopping.deadline import Calls


class Pace:
    """Measures the time from the end of one poll to the next one.

    Not collective.

    Args:
        clock: seconds in which the job runs.

    Attributes:
        steps: durations of the steps.
        calls: durations of the calls that are no steps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps = Durations()
        self.calls = Calls(clock)
        self._clock = clock
        self._polled_at = clock()
        self._first_step = 0
        self._last_step = 0

    def begin(self, step: int) -> None:
        """Begin to measure, with `step` done by earlier attempts."""
        self._polled_at = self._clock()
        self._first_step = step
        self._last_step = step

    def arrive(self, step: int) -> bool:
        """Return whether a step was made since the last poll, and record its duration.

        Args:
            step: steps so far.
        """
        has_stepped = step > self._last_step
        self._last_step = step
        if has_stepped:
            self.steps.add(self._clock() - self._polled_at)
        return has_stepped

    def leave(self) -> None:
        """Note the end of a poll."""
        self._polled_at = self._clock()

    def note_call(self, step: int) -> None:
        """Record the duration of a call that has just ended, including the time between the last poll and the call.

        Before the first step of an attempt nothing is recorded: a call of half the time limit would prevent every step.
        """
        if step > self._first_step:
            self.calls.add(self._clock() - self._polled_at)
