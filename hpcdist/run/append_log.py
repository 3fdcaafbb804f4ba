"""AppendLog: lines on their way to a file, which a background thread appends, so that training waits for no disk."""

import atexit
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpcdist.background import BackgroundThread
from hpcdist.forks import make_lock
from hpcdist.retries import Retries
from hpcdist.runtime.process import send_heartbeat

logger = logging.getLogger("hpcdist")

_Result = TypeVar("_Result")


class Line(NamedTuple):
    """A line of a log.

    Attributes:
        content: the line, with its end.
        step: the step that it is about; 0 where that does not matter.
    """

    content: bytes
    step: int = 0


class AppendLog:
    """Lines that wait for a thread to append them, all that wait at a time, and all or none of these.

    Lines leave the queue once they are in the file: where an append fails, the next one begins with them. If too many
    wait, the older half is lost, which is logged. A failure is logged, and later tries get rarer.

    Args:
        kind: kind of the records in texts and in the thread's name, such as "metrics".
        path: path of the file, for texts.
        append: function append(lines, last_step) that appends lines to the file; called in the thread. `last_step` is
            None, or the step after which lines that are in the file are undone. It may raise OSError.
        max_waiting: greatest number of lines that wait.
        limit_s: longest wait for the file system, in seconds.
        is_kept_at_exit: whether the exit of the program waits for the lines, within the limit.

    Attributes:
        retries: the last failure, and the time of the next try.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        append: Callable[[Sequence[Line], int | None], None],
        max_waiting: int,
        limit_s: float,
        is_kept_at_exit: bool,
    ) -> None:
        self.retries = Retries(f"{kind}: writing records to {path}")
        self._kind = kind
        self._path = path
        self._append = append
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self._is_kept_at_exit = is_kept_at_exit
        self._pid = os.getpid()
        self._thread = BackgroundThread(f"hpcdist-{kind}")
        self._unanswered: Future[Any] | None = None
        self._lock = make_lock()
        # with the lock
        self._lines: list[Line] = []
        self._n_removed = 0
        self._last_step: int | None = None
        self._will_append = False
        self._appending: Future[None] | None = None
        # for lines that hooks of the program write, which run before this one
        if is_kept_at_exit:
            atexit.register(_flush_if_alive, weakref.ref(self))

    @property
    def n_waiting(self) -> int:
        """Number of lines that are not in the file yet."""
        return len(self._lines)

    @property
    def _has_thread(self) -> bool:
        """Whether this is the process that made this object: a forked child does not have the thread."""
        return os.getpid() == self._pid

    def add(self, line: Line, may_start: bool = True) -> None:
        """Queue a line.

        Args:
            line: the line.
            may_start: whether to let the thread append now. It does so in any case if many lines wait.
        """
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > self._max_waiting:
                self._drop_oldest()
            is_long = len(self._lines) > self._max_waiting // 2
            if (may_start or is_long) and self.retries.is_due:
                self._start()

    def _drop_oldest(self) -> None:
        """Forget half of the lines, which cannot be written. The caller holds the lock."""
        n_dropped = len(self._lines) // 2
        del self._lines[:n_dropped]
        self._n_removed += n_dropped
        logger.warning(
            "%s: %d records that %s did not take are lost.", self._kind, n_dropped, self._path
        )

    def start(self) -> None:
        """Let the thread append the lines that wait."""
        with self._lock:
            if self._lines:
                self._start()

    def _start(self) -> None:
        """Let the thread append, unless it will anyway. The caller holds the lock."""
        if self._will_append:
            return
        if self._is_kept_at_exit:
            # also keeps this object alive until all is in the file
            atexit.register(self.flush_at_exit)
        self._will_append = True
        self._appending = self._thread.submit(functools.partial(self.try_to, self.append_waiting))

    def go_back_to(self, step: int) -> None:
        """Forget the lines of later steps, which are undone, and let the next append undo those in the file."""
        with self._lock:
            retained_lines = [line for line in self._lines if line.step <= step]
            self._n_removed += len(self._lines) - len(retained_lines)
            self._lines = retained_lines
            self._last_step = step

    def append_waiting(self) -> None:
        """Append the lines that wait now. In the thread.

        Raises:
            OSError: if the file system refuses.
        """
        with self._lock:
            self._will_append = False
            lines = self._lines[:]
            n_removed_before = self._n_removed
            last_step = self._last_step
            self._last_step = None
        self._append(lines, last_step)
        with self._lock:
            # of these lines, the first ones or the last
            n_removed = self._n_removed - n_removed_before
            del self._lines[: max(0, len(lines) - n_removed)]
            if not self._lines:
                atexit.unregister(self.flush_at_exit)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, for_s: float) -> bool:
        """Wait up to `for_s` seconds for the append under way; return whether all lines so far are in the file."""
        with self._lock:
            appending = self._appending
        if appending is not None and self._has_thread:
            wait([appending], for_s)
        with self._lock:
            return not self._lines and not self._will_append

    def call(self, act: Callable[[], _Result]) -> "Future[_Result]":
        """Let the thread call `act` after what it does now, and wait at most for the time limit."""
        called: Future[_Result] = self._thread.submit(act)
        wait([called], self._limit_s)
        return called

    def attempt(self, act: Callable[[], _Result], limit_s: float | None = None) -> _Result | None:
        """Return act() of the thread; None if it fails, which is logged, or is not done within the limit."""
        limit_s = limit_s or self._limit_s
        if self._is_hanging:
            return None  # it was waited for once
        called: Future[_Result | None] = self._thread.submit(functools.partial(self.try_to, act))
        wait([called], limit_s)
        if called.done():
            return called.result()
        self._unanswered = called
        self.retries.failed(f"no answer for {limit_s:g} s")
        return None

    @property
    def _is_hanging(self) -> bool:
        return self._unanswered is not None and not self._unanswered.done()

    def try_to(self, act: Callable[[], _Result]) -> _Result | None:
        """Return act(); None if the file system refuses, which is logged. In the thread."""
        try:
            result = act()
        except OSError as error:
            self.retries.failed(error)
            return None
        self.retries.succeeded()
        return result

    def flush_at_exit(self) -> None:
        """Write the lines that wait. A failure is logged only: the exit code of the job says how training ended."""
        if not self._has_thread or self.wait(0) or self._is_hanging:
            return
        until = time.monotonic() + self._limit_s
        last = self._thread.submit(functools.partial(self.try_to, self.append_waiting))
        while wait([last], 1.0).not_done and time.monotonic() < until:
            send_heartbeat()
        n_lost = self.n_waiting
        if n_lost:
            logger.warning(
                "%s: %d records that %s did not take are lost.", self._kind, n_lost, self._path
            )


def _flush_if_alive(log: "weakref.ref[AppendLog]") -> None:
    live_log = log()
    if live_log is not None:
        live_log.flush_at_exit()
