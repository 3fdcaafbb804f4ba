"""When a worker may begin its next step, and after which step all workers stop or save: arithmetic of the servers.

A worker's clock is the number of steps that it has pushed.
"""

from collections.abc import Iterable

from hpcdist.runtime.step_flags import Request


class Clocks:
    """The clocks of all workers, as one server has seen their pushes.

    Args:
        workers: numbers of the workers.
        max_staleness: number s such that a worker begins step c (from 0) only when every other live worker has pushed
            step c - 1 - s. With None every step begins at once.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter server (NIPS 2013).
    """

    def __init__(
        self,
        workers: Iterable[int],
        max_staleness: int | None = None,
    ) -> None:
        self._pushed = dict.fromkeys(workers, 0)
        self._max_staleness = max_staleness

    @property
    def live(self) -> list[int]:
        """The workers that have not left."""
        return list(self._pushed)

    @property
    def latest(self) -> int:
        """Clock of the worker that is ahead of all other workers."""
        return max(self._pushed.values(), default=0)

    @property
    def earliest(self) -> int:
        """Clock of the worker that all other workers are ahead of."""
        return min(self._pushed.values(), default=0)

    def push(self, worker: int, clock: int) -> None:
        """Note that a worker has pushed its step number clock - 1. A clock never goes back."""
        self._pushed[worker] = max(clock, self._pushed.get(worker, 0))

    def leave(self, worker: int) -> None:
        """Do not wait for a worker any more: it has ended its program."""
        self._pushed.pop(worker, None)

    def awaited(self, step: int) -> list[int]:
        """Return the workers whose pushes must come before a step may begin.

        >>> clocks = Clocks(range(3), max_staleness=1)
        >>> clocks.push(0, 1), clocks.push(0, 2), clocks.push(1, 1)
        (None, None, None)
        >>> clocks.awaited(1), clocks.awaited(2)
        ([], [2])
        """
        if self._max_staleness is None:
            return []
        required_clock = step - self._max_staleness
        return [worker for worker, clock in self._pushed.items() if clock < required_clock]


class RequestClock:
    """After which step all workers act on a request to stop or to save.

    A worker that asks cannot know how far the other workers are. The server that all workers push to sets a step that
    none has pushed yet. Each acts on the request after that step, so that all workers are at the same step.
    """

    def __init__(self) -> None:
        self._due: dict[Request, int] = {}

    def ask(self, requests: Request, clock: int, latest: int) -> None:
        """Take the requests of a worker.

        Args:
            requests: requests, as flags.
            clock: clock of the worker that asks.
            latest: clock of the worker that is ahead of all other workers.
        """
        for kind in (Request.STOP, Request.SAVE):
            # otherwise all workers will act on an earlier request, or have just done so
            if kind in requests and clock > self._due.get(kind, -1):
                self._due[kind] = latest + 1

    def due(self, clock: int) -> Request:
        """Return the requests that a worker acts on after the push that brings it to this clock."""
        due_requests = Request.NONE
        for kind, step in self._due.items():
            if step == clock:
                due_requests |= kind
        return due_requests
