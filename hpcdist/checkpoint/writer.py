"""A thread that carries out one save at a time while training goes on."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class BackgroundWriter:
    """Runs what it is given, one after the other, in a daemon thread that is started at the first use."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], Any]) -> "Future[Any]":
        """Have `act()` run in the thread; return its result to come."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpcdist-checkpoint-writer", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._todo.put((act, future))
        return future

    def _run(self) -> None:
        while True:
            act, future = self._todo.get()
            try:
                future.set_result(act())
            except BaseException as error:  # noqa: BLE001  raised again where the result is awaited
                future.set_exception(error)
