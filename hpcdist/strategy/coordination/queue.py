"""The queue of scheduled functions, as a state machine: who runs what, and what becomes of it. No threads, no messages.

A closure is run at least once: one whose worker falls silent goes to another one, and the first result that comes
counts. Of the errors that come, the first is kept until it is taken; what has not begun is cancelled then.

Source: the semantics of tf.distribute.coordinator.ClusterCoordinator.
"""

import collections
from dataclasses import dataclass, field
from typing import Any

from hpcdist.errors import ClosureCancelledError, PSUnavailable
from hpcdist.ps.messages import Bytes
from hpcdist.strategy.coordination.values import RemoteValue

#: Closures that wait at most: as many as in TensorFlow.
CAPACITY = 262_144


@dataclass(eq=False)
class Closure:
    """A scheduled function with its arguments.

    Attributes:
        number: from 1, in the order of scheduling.
        name: of the function, for messages.
        payload: both, as a pickle.
        used: the function and its arguments, kept until it is over: workers forget what the program forgets.
        n_before: closures that had ended when it was scheduled.
        seed: of the random numbers in it, whichever worker runs it.
        result: what the caller of `schedule` holds.
        is_waiting: whether it waits for a worker.
        is_over: whether it has a result, an error, or was cancelled.
    """

    number: int
    name: str
    payload: Bytes
    used: Any
    n_before: int = 0
    seed: int = 0
    result: RemoteValue = field(default_factory=RemoteValue)
    is_waiting: bool = False
    is_over: bool = False


class ClosureQueue:
    """Closures that wait, and those that run.

    Args:
        capacity: closures that wait at most.

    Attributes:
        running: what each worker runs, and what it has been given to run next, by its number.
        n_ended: closures that have a result or an error.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._waiting: collections.deque[Closure] = collections.deque()
        self._lost: collections.defaultdict[int, list[Closure]] = collections.defaultdict(list)
        self._error: BaseException | None = None
        self.running: collections.defaultdict[int, list[Closure]] = collections.defaultdict(list)
        self.n_ended = 0

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may."""
        return len(self._waiting) >= self._capacity

    @property
    def n_waiting(self) -> int:
        """Closures that wait for a worker."""
        return len(self._waiting)

    @property
    def has_running(self) -> bool:
        """Whether a worker runs a closure."""
        return any(self.running.values())

    @property
    def has_failed(self) -> bool:
        """Whether there is an error to be taken."""
        return self._error is not None

    @property
    def is_idle(self) -> bool:
        """Whether no closure waits or runs."""
        return not self._waiting and not self.has_running

    def put(self, closure: Closure) -> None:
        """Let a closure wait for a worker."""
        closure.is_waiting = True
        self._waiting.append(closure)

    def take(self, worker: int) -> Closure | None:
        """Return the closure that a worker is to run after those that it has; None: none waits."""
        if not self._waiting:
            return None
        closure = self._waiting.popleft()
        closure.is_waiting = False
        self.running[worker].append(closure)
        return closure

    def is_awaited(self, worker: int) -> bool:
        """Return whether the result counts that is to come from a worker: another one may have been first."""
        return not self._first_of(worker)[0].is_over

    def awaited_number(self, worker: int) -> int:
        """Return the number of the closure whose result is to come from a worker."""
        return self._first_of(worker)[0].number

    def finish(self, worker: int, payload: Bytes) -> None:
        """Note the result that has come from a worker; no more than that where it does not count."""
        closure = self._returned(worker)
        if closure is not None:
            closure.result.set_result(payload)

    def fail(self, worker: int, error: BaseException) -> None:
        """Note the error that has come from a worker; not of one that was silent: another one runs the closure."""
        if self._lost[worker]:
            self._lost[worker].pop(0)
            return
        closure = self._returned(worker)
        if closure is not None:
            closure.result.set_error(error)
            self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """Keep an error, unless there is one already."""
        if self._error is None:
            self._error = error

    def lose(self, worker: int) -> None:
        """Put back what a worker has, as it has fallen silent: before what waits, as others may wait for it."""
        closures = self.running.pop(worker, [])
        self._lost[worker] += closures
        for closure in reversed(closures):
            if not closure.is_over and not closure.is_waiting:
                closure.is_waiting = True
                self._waiting.appendleft(closure)

    def time_out(self, worker: int, error: BaseException) -> None:
        """Let the closure that a worker runs fail, and put back what it was given to run next.

        What the worker returns later does not count.
        """
        closures = self.running.pop(worker, [])
        self._lost[worker] += closures
        for closure in reversed(closures[1:]):
            if not closure.is_over and not closure.is_waiting:
                closure.is_waiting = True
                self._waiting.appendleft(closure)
        if closures and not closures[0].is_over:
            closures[0].is_over = True
            closures[0].used = None
            closures[0].result.set_error(error)
            self.n_ended += 1
            self.note_error(error)

    def _first_of(self, worker: int) -> list[Closure]:
        """Return the list that begins with what a worker runs: of before it fell silent, if it did."""
        return self._lost[worker] or self.running[worker]

    def _returned(self, worker: int) -> Closure | None:
        """Return what a worker ran, which is over now; None if it was over before."""
        closure = self._first_of(worker).pop(0)
        if closure.is_over:
            return None
        closure.is_over = True
        closure.used = None
        self.n_ended += 1
        if closure.is_waiting:  # of a worker that was silent for a while
            closure.is_waiting = False
            self._waiting.remove(closure)
        return closure

    def cancel_waiting(
        self, reason: str = "another function had failed; schedule it again"
    ) -> None:
        """Cancel what has not begun."""
        while self._waiting:
            closure = self._waiting.popleft()
            closure.is_waiting = False
            closure.is_over = True
            closure.used = None
            closure.result.set_error(
                ClosureCancelledError(
                    f"schedule: expected {closure.name!r} to run, got it cancelled, as {reason}."
                )
            )

    def take_error(self) -> BaseException | None:
        """Return the first error that came since the last call. That of a parameter server stays."""
        error = self._error
        if not isinstance(error, PSUnavailable):
            self._error = None
        return error
