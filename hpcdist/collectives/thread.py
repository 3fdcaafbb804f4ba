"""One thread that carries out collectives in the order in which they were handed over."""

import queue
import threading
from collections.abc import Callable

from hpcdist.collectives.group import Group
from hpcdist.errors import CollectiveTimeoutError


class Handle:
    """A collective that is under way.

    Its buffer belongs to it until `wait` returns.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the collective has ended.

        Args:
            timeout_s: longest wait; default: as long as the collective itself may take, which is bounded.

        Raises:
            CollectiveTimeoutError: when it takes longer. What the collective raised, if it did.
        """
        if not self._done.wait(timeout_s):
            raise CollectiveTimeoutError(
                f"wait: expected the collective to end within {timeout_s} s, got no end; wait longer, or look for a "
                f"rank that did not start it."
            )
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Carry out the collective in this thread."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            self._error = error
        self._done.set()


class CommunicationThread:
    """A thread with a group of its own, so that its collectives never meet those of the main thread.

    Collective: `group.comm`, for the group it makes.

    Args:
        group: whose ranks take part.

    Attributes:
        group: the thread's own.
    """

    def __init__(self, group: Group) -> None:
        self.group: Group = type(group)(group.comm, group.world, True, group.timeout_s, group.watchdog)
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name="hpcdist-communication", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Handle:
        """Carry out `call` after all earlier ones, and return at once. All ranks submit in the same order."""
        handle = Handle(call)
        self._queue.put(handle)
        return handle

    def free(self) -> None:
        """End the thread when it is done, and free its group. Collective: all ranks."""
        self._queue.put(None)
        self._thread.join(self.group.world.timeout_s)
        self.group.free()


def _serve(handles: "queue.SimpleQueue[Handle | None]") -> None:
    while (handle := handles.get()) is not None:
        handle.run()


def thread_of(group: Group) -> CommunicationThread:
    """Return the communication thread of a group, made at the first call. Collective then: `group.comm`."""
    return group.keep("thread", lambda: CommunicationThread(group), CommunicationThread.free)
