"""Measured durations, of which the recent ones count."""

import bisect
import statistics
from collections import deque

#: Durations that are kept of each kind: only recent ones, as the cost of a step changes with the data.
N_REMEMBERED = 500


class Durations:
    """The last `N_REMEMBERED` durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Add a duration and drop the oldest one if `N_REMEMBERED` are kept."""
        if len(self._last) == N_REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._last.popleft())]
        self._last.append(seconds)
        bisect.insort(self._sorted, seconds)

    @property
    def n_remembered(self) -> int:
        """Number of durations kept; at most `N_REMEMBERED`."""
        return len(self._last)

    @property
    def is_measured(self) -> bool:
        """Whether a duration has been added."""
        return self.n_remembered > 0

    @property
    def p99(self) -> float:
        """The 99th percentile; 0 before the first."""
        n = len(self._sorted)
        if n == 0:
            return 0.0
        return self._sorted[min(n - 1, n * 99 // 100)]

    @property
    def median(self) -> float:
        """The median; 0 before the first."""
        if not self._sorted:
            return 0.0
        return statistics.median(self._sorted)

    @property
    def spread(self) -> float:
        """The 99th percentile minus the median."""
        return self.p99 - self.median
