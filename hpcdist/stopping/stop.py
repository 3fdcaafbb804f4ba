"""Sources of stop requests: a signal, a file, the user's function, a call. One flag combines them."""

import contextlib
import functools
import logging
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import FrameType
from typing import Any

from hpcdist.background import BackgroundThread
from hpcdist.checkpoint.durable import Disk
from hpcdist.child_processes import STOP_SIGNALS, obey_only
from hpcdist.errors import UsageError
from hpcdist.forks import make_lock
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.processes import stat_fields

logger = logging.getLogger("hpcdist")

#: Least seconds between two checks for the stop file: a check is a request to a shared file system.
FILE_LOOK_S = 2.0
#: Longest wait for that check in the training thread, and the time after which a check without an answer is reported.
FILE_WAIT_S = 0.001
SILENCE_S = 60.0
#: Text of a stop file after whose request the job is not run again.
STOP_FOR_GOOD = "hpcdist stop --for-good"
#: Characters of a stop file that are read.
_MAX_REQUEST = 200
#: Least seconds between two calls of the user's function.
WATCHER_LOOK_S = 1.0


#: Programs that start others and, unless told otherwise, keep signals from them: shells and container starters.
_WRAPPERS = (
    "bash",
    "sh",
    "dash",
    "zsh",
    "ksh",
    "tcsh",
    "starter",
    "starter-suid",
    "apptainer",
    "singularity",
    "conmon",
)


def wrapper_of(pid: int) -> str | None:
    """Return the program that started a process, if it is one that may keep signals from it; None otherwise."""
    try:
        parent = stat_fields(pid)[1]
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:  # the parent has just ended, or is another user's
        return None
    if name in _WRAPPERS:
        return name
    return None


class StopFlag:
    """Whether this rank has a stop request. The first one counts, and is never withdrawn.

    Not collective.

    Args:
        place: name of this rank in the reason, such as "rank 3".
        file: the stop file, a request while it exists; None on ranks that do not check it.
        watcher: returns whether the job is about to be ended; it must not block.
        clock: monotonic seconds.
        disk: file system calls, which tests replace.
    """

    def __init__(
        self,
        place: str,
        file: Path | None = None,
        watcher: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        self._place = place
        self._file = file
        self._watcher = watcher
        self._clock = clock
        self._disk = disk or Disk()
        self._request: StopRequest | None = None
        self._signals = SignalFlag(clock)
        self._file_looked_at = -float("inf")
        self._watcher_looked_at = -float("inf")
        self._looker = BackgroundThread("hpcdist-stop-file")
        self._look: Future[str | None] | None = None
        self._looking = make_lock()
        self._has_warned = False

    def watch_signals(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Treat these signals as stop requests until `close`.

        Raises:
            UsageError: outside the main thread, where Python allows no handlers.
        """
        self._signals.install(signals)

    def close(self) -> None:
        """Reinstall the earlier signal handlers."""
        self._signals.close()

    def ignore_signals(self) -> None:
        """Ignore the signals until the process has ended."""
        self._signals.ignore()

    def ask(self, reason: str) -> None:
        """Request a stop; from any thread, and in a signal handler: it takes no lock, and looks at no file."""
        if self._request is None and self._signals.received is None:
            self._request = self._request_from(f"{reason} on {self._place}")

    def find_request(self) -> StopRequest | None:
        """Return the stop request, None without one, after a look at all sources. It calls the user's function."""
        if self.find_request_in_any_thread() is None and self._is_watcher_alarmed():
            self._request = self._request_from(f"termination_watcher_fn on {self._place}")
        return self._request

    def find_request_in_any_thread(self) -> StopRequest | None:
        """Return the stop request, None without one. It does not call the user's function."""
        if self._request is not None:
            return self._request
        received = self._signals.received
        if received is not None:  # since it arrived, and not since it was seen
            source = f"{received.name} on {self._place}"
            self._request = StopRequest(source, asked_at=self._signals.received_at)
            return self._request
        text = self._text_in_file()
        if text is not None:
            self._request = self._request_from(f"stop file {self._file}", text == STOP_FOR_GOOD)
        return self._request

    def _request_from(self, source: str, is_for_good: bool = False) -> StopRequest:
        return StopRequest(source, is_for_good, self._clock())

    def _text_in_file(self) -> str | None:
        """Return the text of the stop file at the last look, None without a file; start the next look, if it is time.

        A file server that hangs stops the thread that looks, and not training.
        """
        if self._file is None:
            return None
        with self._looking:
            return self._look_for_file(self._file)

    def _look_for_file(self, file: Path) -> str | None:
        now = self._clock()
        if self._look is None and now - self._file_looked_at >= FILE_LOOK_S:
            self._file_looked_at = now
            self._has_warned = False
            self._look = self._looker.submit(functools.partial(_text_of_request, file))
            wait([self._look], FILE_WAIT_S)
        if self._look is None:
            return None
        if self._look.done():
            look = self._look
            self._look = None
            return look.result()
        if now - self._file_looked_at >= SILENCE_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "stop: expected %s to answer, got none for %d s; training goes on until the next save is due.",
                file.parent,
                SILENCE_S,
            )
        return None

    def _is_watcher_alarmed(self) -> bool:
        if self._watcher is None or self._clock() - self._watcher_looked_at < WATCHER_LOOK_S:
            return False
        self._watcher_looked_at = self._clock()
        return bool(self._watcher())

    def is_for_good(self) -> bool:
        """Return whether the stop file asks for an end for good, by a look at it now: it may have come late.

        Cost: waits for the file server, however long it hangs.
        """
        return self._file is not None and _text_of_request(self._file) == STOP_FOR_GOOD

    def remove_file(self) -> None:
        """Remove the stop file, if this rank checks one, so that the next attempt runs.

        Raises:
            OSError: if it exists and cannot be removed.
        """
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._file)


def _text_of_request(file: Path) -> str | None:
    """Return the text of a stop file; "" if it cannot be read, None if there is none."""
    if not os.path.exists(file):  # False on an I/O error too, where Path.exists would raise
        return None
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return stream.read(_MAX_REQUEST).strip()
    except OSError:
        return ""


class SignalFlag:
    """Signal handlers that only set an attribute: MPI, locks and output are unsafe in a handler.

    They also call a handler that the program had installed. A forked child gets the default handlers; a
    worker of torch's DataLoader obeys its parent only.

    Attributes:
        received: the first signal received; None before.
        received_at: when it arrived, by `clock`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.received: signal.Signals | None = None
        self.received_at: float | None = None
        self._earlier: dict[signal.Signals, Any] = {}
        self._ignored: set[signal.Signals] = set()
        self._handler = self._receive  # one bound method, so that identity tests work

    def install(self, signals: Sequence[signal.Signals]) -> None:
        """Install the handlers.

        Raises:
            UsageError: outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "PreemptionCheckpointHandler: expected the main thread, where Python handles signals, got "
                f"{threading.current_thread().name}; make it there."
            )
        for number in signals:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number in (signal.SIGINT, signal.SIGHUP) and is_ignored:
                # a job in the background, or under nohup, which a terminal is not meant to end
                continue
            self._earlier[number] = signal.signal(number, self._handler)
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _reset(this()))
        multiprocessing.util.register_after_fork(self, _leave_to_parent)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received_at = self._clock()
            self.received = signal.Signals(number)
        earlier = self._earlier.get(signal.Signals(number))
        if number == signal.SIGINT and earlier is signal.default_int_handler:
            # the first Ctrl-C asks for a stop, the second one ends the program
            signal.signal(number, earlier)
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    b"\nhpcdist: Ctrl-C: saving and stopping after this step; press it again to end at once\n",
                )
        elif callable(earlier):
            earlier(number, frame)

    def close(self) -> None:
        """Reinstall the earlier handlers, except where the program has replaced these."""
        for number, earlier in self._earlier.items():
            expected = signal.SIG_IGN if number in self._ignored else self._handler
            if signal.getsignal(number) is expected:
                # a handler that C code installed is None here, and cannot be put back
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier = {}

    def ignore(self) -> None:
        """Ignore the signals from now on: the process is exiting, and Python drops handlers before its very end."""
        for number in self._earlier:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_IGN)
                self._ignored.add(number)

    def reset(self) -> None:
        """Install the default handlers in a forked child, so that signals end it."""
        for number in self._earlier:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)
        self.received = None

    @property
    def is_installed(self) -> bool:
        """Whether the handlers were installed, and not closed."""
        return bool(self._earlier)


def _reset(flag: SignalFlag | None) -> None:
    if flag is not None:
        flag.reset()


def _leave_to_parent(flag: SignalFlag) -> None:
    target = getattr(multiprocessing.current_process(), "_target", None)
    if flag.is_installed and getattr(target, "__module__", "").startswith("torch.utils.data"):
        obey_only(os.getppid())
