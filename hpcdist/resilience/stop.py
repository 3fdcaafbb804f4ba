"""Who asks for a stop: a signal, a deadline, a file, a function of the user's, a call. One flag for all of them."""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import UsageError

#: What batch systems send before they end a job, or can be told to send.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: The stop file is looked for at most this often: a look is a request to a shared file system.
FILE_LOOK_S = 2.0
#: The user's own function is called at most this often.
WATCHER_LOOK_S = 1.0


class StopFlag:
    """Whether this rank wants the job to stop, and why. Once it wants to, it always does.

    Not collective.

    Args:
        place: who this rank is, for the reason, such as "rank 3".
        file: the file that asks for a stop while it exists; None on ranks that do not look.
        watcher: returns whether the job is about to be ended; it must not block.
        clock: seconds that only go up.
        disk: the seam to the file system.

    Attributes:
        since: when the request came, by `clock`; None without one.
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
        self._reason: str | None = None
        self._signals = SignalFlag()
        self._file_looked_at = self._watcher_looked_at = -float("inf")
        self.since: float | None = None

    def watch_signals(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        """Take these signals as requests, until `close`.

        Raises:
            UsageError: outside the main thread, where Python allows no handlers.
        """
        self._signals.install(signals)

    def close(self) -> None:
        """Give the signals back to who had them before."""
        self._signals.close()

    def ignore_signals(self) -> None:
        """Take no more signals until the process has ended."""
        self._signals.ignore()

    def ask(self, reason: str) -> None:
        """Ask for a stop; from any thread."""
        if self.reason is None:
            self._raise(f"{reason} on {self._place}")

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop, such as "SIGTERM on rank 3"; None when it does not."""
        if self._reason is None:
            received = self._signals.received
            if received is not None:
                self._raise(f"{received.name} on {self._place}")
            elif self._is_file_there():
                self._raise(f"stop file {self._file}")
            elif self._is_watcher_alarmed():
                self._raise(f"termination_watcher_fn on {self._place}")
        return self._reason

    def _raise(self, reason: str) -> None:
        self._reason, self.since = reason, self._clock()

    def _is_file_there(self) -> bool:
        if self._file is None or self._clock() - self._file_looked_at < FILE_LOOK_S:
            return False
        self._file_looked_at = self._clock()
        return os.path.exists(self._file)  # a file system that cannot tell has no file: Path.exists would raise

    def _is_watcher_alarmed(self) -> bool:
        if self._watcher is None or self._clock() - self._watcher_looked_at < WATCHER_LOOK_S:
            return False
        self._watcher_looked_at = self._clock()
        return bool(self._watcher())

    def remove_file(self) -> None:
        """Remove the stop file, if this rank looks at one: the next attempt shall run.

        Raises:
            OSError: when it is there and cannot be removed.
        """
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._file)


class SignalFlag:
    """Handlers that set an attribute and nothing else: no MPI, no lock, no output is safe where they run.

    A handler that the program had installed before is called too. A forked child gets the system's defaults.

    Attributes:
        received: the first signal that came; None before.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._earlier: dict[signal.Signals, Any] = {}
        self._ignored: set[signal.Signals] = set()
        self._handler = self._receive  # one object, to be recognized by

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
            self._earlier[number] = signal.signal(number, self._handler)
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _reset(this()))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        earlier = self._earlier.get(signal.Signals(number))
        if callable(earlier):
            earlier(number, frame)

    def close(self) -> None:
        """Put the earlier handlers back, where nobody has put others in place of these."""
        for number, earlier in self._earlier.items():
            is_ours = signal.getsignal(number) is (signal.SIG_IGN if number in self._ignored else self._handler)
            if is_ours:  # a handler that C code installed cannot be put back
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier = {}

    def ignore(self) -> None:
        """Ignore the signals from now on: the process is leaving, and Python gives handlers up before its very end."""
        for number in self._earlier:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_IGN)
                self._ignored.add(number)

    def reset(self) -> None:
        """Give a forked child the system's defaults: it must end when it is told to."""
        for number in self._earlier:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)
        self._earlier, self.received = {}, None


def _reset(flag: SignalFlag | None) -> None:
    if flag is not None:
        flag.reset()
