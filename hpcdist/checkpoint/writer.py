"""A thread that carries out one save at a time while training goes on."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Todo = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class BackgroundWriter:
    """Runs what it is given, one after the other, in a daemon thread that starts at the first use and ends with it."""

    def __init__(self) -> None:
        self._todo: _Todo = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], Any]) -> "Future[Any]":
        """Have `act()` run in the thread; return its result to come."""
        if self._thread is None:
            name = "hpcdist-checkpoint-writer"
            self._thread = threading.Thread(target=_run, args=(self._todo,), name=name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._todo.put, None)
        future: Future[Any] = Future()
        self._todo.put((act, future))
        return future


def _run(todo: _Todo) -> None:
    while (order := todo.get()) is not None:
        act, future = order
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001  raised again where the result is awaited
            future.set_exception(error)
        del order, act, future  # what was saved may be freed
