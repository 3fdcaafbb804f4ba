"""A clock of the seconds in which this process runs, by which deadlines are counted.

Batch systems suspend jobs and do not count that time; clocks of nodes are set, forwards and backwards. A deadline that
is a time of day would then be believed to be over by a job that has hours left.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from hpcdist.forks import make_lock

#: Time between two looks of the thread.
BEAT_S = 1.0
#: A longer time between two looks is a pause, unless the process has computed in it.
PAUSE_S = 5.0
#: The wall clock was set if it moves that much beside the monotonic one.
JUMP_S = 5.0


def _main_thread_s() -> float:
    """Return the seconds that a processor has spent on the main thread. Those of all threads say less: they add up."""
    thread = threading.main_thread().ident
    assert thread is not None, "it has started"
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class Clocks(NamedTuple):
    """The clocks of the system, which tests replace.

    Attributes:
        monotonic: seconds, which nobody sets.
        computed: seconds that a processor has spent on the main thread.
        wall: seconds since 1970, which administrators and time servers set.
    """

    monotonic: Callable[[], float] = time.monotonic
    computed: Callable[[], float] = _main_thread_s
    wall: Callable[[], float] = time.time


class RunningClock:
    """Returns, when it is called, seconds from some moment on, without those in which this process was suspended.

    A daemon thread looks every second; while the process is suspended, it cannot. A main thread that holds the
    interpreter for long keeps it from looking, too, but computes in that time. From any thread.

    A main thread that a file server keeps from running, as at a page fault of a mapped file, looks suspended.

    Args:
        clocks: clocks of the system.

    Attributes:
        n_interruptions: number of pauses and jumps of the wall clock so far.
    """

    def __init__(self, clocks: Clocks | None = None) -> None:
        self.n_interruptions = 0
        self._clocks = clocks or Clocks()
        self._paused_s = 0.0
        self._looked_s = self._clocks.monotonic()
        self._computed_s = self._clocks.computed()
        self._offset_s = self._clocks.wall() - self._looked_s
        self._lock = make_lock()
        stopped = threading.Event()
        weakref.finalize(self, stopped.set).atexit = False
        self._stopped = stopped
        self._thread = threading.Thread(
            target=_look_until, args=(weakref.ref(self), stopped), name="hpcdist-clock", daemon=True
        )

    def start(self) -> None:
        """Start the thread: from now on pauses are noticed."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def __call__(self) -> float:
        """Return the time, as `look`."""
        return self.look()

    def look(self) -> float:
        """Return the time, and note what has happened since the last look."""
        with self._lock:
            now = self._clocks.monotonic()
            computed_s = self._clocks.computed()
            gap_s = now - self._looked_s
            is_paused = gap_s > PAUSE_S and computed_s - self._computed_s < gap_s / 2
            if is_paused:
                self._paused_s += gap_s - BEAT_S
            offset_s = self._clocks.wall() - now
            has_jumped = abs(offset_s - self._offset_s) > JUMP_S
            if has_jumped:
                self._offset_s = offset_s
            self.n_interruptions += int(is_paused or has_jumped)
            self._looked_s = now
            self._computed_s = computed_s
            return now - self._paused_s


def _look_until(clock: "weakref.ref[RunningClock]", stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        running_clock = clock()
        if running_clock is None:
            return
        running_clock.look()
        del running_clock  # or the thread would keep it
