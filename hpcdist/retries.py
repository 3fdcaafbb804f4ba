"""A task beside training that fails is logged, and tried again after longer and longer pauses; training continues."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("hpcdist")

#: The first pause, and the longest one.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class Retries:
    """Counts the failures in a row of one thing, and decides when to try it again.

    Args:
        name: name of the thing in the log, such as "TensorBoard runs/mnist/events".
        clock: function that returns monotonic seconds.

    Attributes:
        failure: last error. None once a try has succeeded.
        n_failures: number of failures in a row.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: str | None = None
        self.n_failures = 0
        self._name = name
        self._clock = clock
        self._retry_at_s = -float("inf")

    @property
    def is_due(self) -> bool:
        """Whether to try now."""
        return self._clock() >= self._retry_at_s

    @property
    def pause_s(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._retry_at_s - self._clock())

    def failed(self, error: Exception | str) -> None:
        """Log a failure, and let the next try wait twice as long as the last try."""
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.n_failures, 20), LONGEST_PAUSE_S)
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        self.failure = f"{self._name}: {' '.join(reason.split())}"
        self.n_failures += 1
        self._retry_at_s = self._clock() + pause_s
        logger.warning(
            "%s (failure %d in a row). Training goes on; the next try is in %g s.",
            self.failure,
            self.n_failures,
            pause_s,
        )

    def succeeded(self) -> None:
        """Log that it works again, if it did not."""
        if self.failure is not None:
            logger.warning("%s works again, after %d failures.", self._name, self.n_failures)
        self.failure = None
        self.n_failures = 0
        self._retry_at_s = -float("inf")
