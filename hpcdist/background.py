"""One background thread that makes calls in the order in which they were submitted."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hpcdist.forks import make_lock

_Queue = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class BackgroundThread:
    """A daemon thread that starts at the first submit, or at `start`, and ends with this object, or at `stop`.

    Args:
        name: name of the thread, as debuggers show it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._starting = make_lock()  # several threads may submit

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Make `call` after all calls that were submitted before; return the future of its result.

        Raises:
            RuntimeError: after `stop`.
        """
        if self._is_stopped:
            raise RuntimeError(
                f"{self._name}: expected a call before the thread was stopped, got one after it."
            )
        self.start()
        future: Future[Any] = Future()
        self._queue.put((call, future))
        return future

    def start(self) -> None:
        """Start the thread, if that is not done: from Python 3.12 on a program that exits can start no threads."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
                # hooks at exit may still need it
                weakref.finalize(self, self._queue.put, None).atexit = False

    def stop(self, timeout_s: float) -> None:
        """End the thread after the submitted calls, and wait for it, at most `timeout_s`."""
        self._is_stopped = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)


def _run(submitted: _Queue) -> None:
    while (item := submitted.get()) is not None:
        call, future = item
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            failure = error
        # before the waiting thread continues: objects of the call must be free by then, on all ranks alike
        del item, call
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
        del future, result, failure
