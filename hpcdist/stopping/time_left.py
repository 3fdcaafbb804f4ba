"""TimeLeft: the time until this job is ended by the batch system, at the program's limit, or after a grace period."""

import functools
import time
from collections.abc import Callable

from hpcdist.cluster.environment import job_end, read_environment
from hpcdist.cluster.slurm import time_left_s
from hpcdist.saving.durations import Durations
from hpcdist.stopping.deadline import BatchEnd, Deadline
from hpcdist.stopping.pace import Pace
from hpcdist.stopping.running_clock import RunningClock

#: A time limit beyond this is none.
_FAR_S = 1e9


class TimeLeft:
    """The deadline of the job, and the end of the grace period once there was a stop request.

    Not collective: clocks of ranks differ.

    Args:
        clock: seconds in which the job runs.
        limit_s: seconds from now after which the job will be ended; None for no limit of the program.
        has_grace_period: whether a stop request may begin a grace period.
        asks: whether this rank asks the batch system for the end of the job after an interruption.
        pace: durations of steps and calls.
        saves: durations of saves.
        n_saves: function that returns the number of saves that a stop takes.

    Attributes:
        deadline: the end of the batch job or the program's limit, whichever comes first; None without one.
        is_counting_down: whether a stop request was seen, and training continues in its grace period.
    """

    def __init__(
        self,
        clock: RunningClock,
        limit_s: float | None,
        has_grace_period: bool,
        asks: bool,
        pace: Pace,
        saves: Durations,
        n_saves: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._pace = pace
        self._saves = saves
        self._n_saves = n_saves
        self._limit_at: float | None = None
        if limit_s is not None and limit_s <= _FAR_S:
            self._limit_at = clock() + limit_s
        self._batch_end: BatchEnd | None = None
        self._grace_end: Deadline | None = None
        self.is_counting_down = False
        self.deadline = self._find_deadline(asks)
        if has_grace_period or self.deadline is not None:
            self._clock.start()

    def _find_deadline(self, asks: bool) -> Deadline | None:
        environ = read_environment()
        batch_end = job_end(environ)
        ends_at: list[float] = []
        if self._limit_at is not None:
            ends_at.append(self._limit_at)
        if batch_end is not None:
            ends_at.append(self._clock() + batch_end - time.time())
            if asks:
                self._batch_end = BatchEnd(self._clock, functools.partial(time_left_s, environ))
        if not ends_at:
            return None
        return self._deadline_at(min(ends_at))

    def _deadline_at(self, end_s: float) -> Deadline:
        return Deadline(
            end_s,
            self._pace.steps,
            self._saves,
            self._clock,
            n_saves=self._n_saves,
            calls=self._pace.calls,
        )

    @property
    def program_end(self) -> float | None:
        """The end of the program's own time limit, in seconds since 1970; None without one."""
        if self._limit_at is None:
            return None
        return time.time() + self._limit_at - self._clock()

    def follow_batch_end(self) -> str | None:
        """Move the deadline if the job was suspended or the clock was set, and Slurm reports another end.

        Returns:
            A line for the log; None if nothing has moved.
        """
        if self._batch_end is None:
            return None
        end_s = self._batch_end.new_end()
        if end_s is None or self.deadline is None:
            return None
        if self._limit_at is not None:
            end_s = min(end_s, self._limit_at)
        self.deadline.end = end_s
        return f"the job was suspended, or the clock was set: {self.deadline.describe()}"

    def count_down(self, grace_s: float, asked_at: float | None) -> None:
        """Begin the grace period of a stop request.

        Args:
            grace_s: length of the period, in seconds.
            asked_at: time of the request, by time.monotonic; None if it came to another rank.
        """
        self.is_counting_down = True
        if asked_at is not None:
            waited_s = time.monotonic() - asked_at
            self._grace_end = self._deadline_at(self._clock() + grace_s - waited_s)

    @property
    def is_job_end_near(self) -> bool:
        """Whether to stop because the job will be ended."""
        return self.deadline is not None and self.deadline.is_near

    @property
    def is_near(self) -> bool:
        """Whether to stop because the job will be ended, or the grace period is over."""
        is_grace_over = self._grace_end is not None and self._grace_end.is_near
        return self.is_job_end_near or is_grace_over

    @property
    def is_too_late(self) -> bool:
        """Whether a save seems not to fit into the time left: it is tried, and not waited for."""
        ends = (self.deadline, self._grace_end)
        return any(end is not None and not end.can_save for end in ends)

    @property
    def needs_measure(self) -> bool:
        """Whether to save now in order to measure the cost of a save before the deadline."""
        return self.deadline is not None and self.deadline.needs_measure

    def stop(self) -> None:
        """Stop looking for interruptions."""
        self._clock.stop()
