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
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold back stop signals from this thread, and from processes that it spawns inside the block, until its end.

    A process that is being started does not ignore them yet. One that a fork server starts is not protected.
    """
    resource_tracker.ensure_running()  # at its start it unblocks some of them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_only(owner: int) -> None:
    """End this process on a stop signal that process `owner` sends, as to end it, and ignore those of others.

    For the main thread of a child process.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)  # for threads that libraries have started and that do not block it
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with, args=(owner,), name="hpcdist-signals", daemon=True).start()


def _ignore(number: int, frame: object) -> None:
    pass


def _end_with(owner: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != owner:
        pass
    os._exit(0)  # as torch's own workers do: any other code is an error of the loader
