"""The handle of a collective that runs in the background."""

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from hpcdist.errors import CollectiveTimeoutError
from hpcdist.runtime.time_spent import time_spent


class Handle:
    """A collective that runs in the background. Its buffer belongs to it until `wait` returns."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """The error that it raised, once it has ended; None if it raised none."""
        return self._future.exception()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return the collective's result, when it has ended: None where it overwrites its buffer.

        Args:
            timeout_s: longest wait; default: as long as the collective itself may take, which is bounded.

        Raises:
            CollectiveTimeoutError: when it takes longer.
            BaseException: the error of the collective, if it raised one.
        """
        if self._future.done():
            return self._future.result()
        try:
            with time_spent.timed("communication", "wait for a collective"):
                return self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():  # it has ended meanwhile, or the error is the collective's
                return self._future.result()
            raise CollectiveTimeoutError(
                f"wait: expected the collective to end within {timeout_s} s, got no end; wait longer, or look for a "
                f"rank that did not start it."
            ) from None
