"""Signals in child processes. A batch system sends its signals to all processes of a job; they are for the ranks.

A worker of a data loader that ended on one would end its rank with it, in the middle of a step and before the save.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

#: Signals that batch systems send, or can be configured to send, before they end a job; and Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold back stop signals from this thread, and from processes that are started inside the block, until its end.

    A process that is starting does not ignore them yet. Python's helper processes (resource tracker, fork server),
    which live on, never ignore all of them. The price: later processes of a fork server that is started here hold them
    back too, unless they call `obey_only`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # this unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_only(owner: int) -> None:
    """End this process on a stop signal from process `owner`, and ignore those from other processes.

    For the main thread of a child process.
    """
    for number in STOP_SIGNALS:
        # a handler, not SIG_IGN, which would discard the signal before sigwaitinfo sees it; it runs in threads of
        # libraries that do not block the signal, and a stop of the owner that reaches one of these is lost
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with, args=(owner,), name="hpcdist-signals", daemon=True).start()


def _ignore(number: int, frame: object) -> None:
    pass


def _end_with(owner: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != owner:
        pass
    os._exit(0)  # as torch's own workers do: any other code is an error of the loader
