"""The queue of scheduled functions, as a state machine: which worker runs which, and how each ends. No threads.

It sends no messages. A closure is run at least once: if its worker falls silent, another worker gets it, too, and the
first result that comes counts. The first error is kept until it is taken; closures that have not begun are cancelled
then.

Source: the semantics of tf.distribute.coordinator.ClusterCoordinator.
"""

import collections
from dataclasses import dataclass, field
from typing import Any

from hpcdist.errors import ClosureCancelledError, PSUnavailable
from hpcdist.ps.messages import Bytes
from hpcdist.strategy.coordination.values import RemoteValue

#: Largest number of closures that wait, as in TensorFlow.
CAPACITY = 262_144


@dataclass(eq=False)
class Closure:
    """A scheduled function with its arguments.

    Attributes:
        number: number of the closure, from 1, in the order of scheduling.
        name: name of the function, for messages.
        payload: the function and its arguments, as a pickle.
        used: the function and its arguments, kept until it is over: workers forget objects that the program forgets.
        n_before: number of closures that had ended when it was scheduled.
        seed: seed of the random numbers in it, whichever worker runs it.
        result: future result, which the caller of `schedule` holds.
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
    """The closures that wait or run.

    Args:
        capacity: largest number of closures that wait.

    Attributes:
        running: by number of the worker, the closure that it runs, and those that it has been sent to run next.
        n_ended: number of closures that have a result or an error.
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
        """Whether no more closures may wait."""
        return len(self._waiting) >= self._capacity

    @property
    def n_waiting(self) -> int:
        """Number of closures that wait for a worker."""
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
        """Return the closure that a worker is to run after those that it has; None if no closure waits."""
        if not self._waiting:
            return None
        closure = self._waiting.popleft()
        closure.is_waiting = False
        self.running[worker].append(closure)
        return closure

    def is_awaited(self, worker: int) -> bool:
        """Return whether a worker's next result counts: another worker may have been first."""
        return not self._first_of(worker)[0].is_over

    def awaited_number(self, worker: int) -> int:
        """Return the number of the closure whose result a worker sends next."""
        return self._first_of(worker)[0].number

    def finish(self, worker: int, payload: Bytes) -> None:
        """Take the result that has come from a worker; drop it where it does not count."""
        closure = self._returned(worker)
        if closure is not None:
            closure.result.set_result(payload)

    def fail(self, worker: int, error: BaseException) -> None:
        """Take the error that has come from a worker; drop it if the worker was silent, as another runs the closure."""
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
        """Put the closures of a worker that has fallen silent before all that wait, as programs may wait for them."""
        closures = self.running.pop(worker, [])
        self._lost[worker] += closures
        for closure in reversed(closures):
            if not closure.is_over and not closure.is_waiting:
                closure.is_waiting = True
                self._waiting.appendleft(closure)

    def time_out(self, worker: int, error: BaseException) -> None:
        """Let the closure that a worker runs fail, and put back those that it was sent to run next.

        Results that the worker sends later do not count.
        """
        closures = self.running.pop(worker, [])
        self._lost[worker] += closures
        for closure in reversed(closures[1:]):
            if not closure.is_over and not closure.is_waiting:
                closure.is_waiting = True
                self._waiting.appendleft(closure)
        if closures and not closures[0].is_over:
            late_closure = closures[0]
            late_closure.is_over = True
            late_closure.used = None
            late_closure.result.set_error(error)
            self.n_ended += 1
            self.note_error(error)

    def _first_of(self, worker: int) -> list[Closure]:
        """Return the list that begins with the closure that a worker runs: if it was silent, the list from before."""
        return self._lost[worker] or self.running[worker]

    def _returned(self, worker: int) -> Closure | None:
        """Return the closure that a worker ran, which is over now; None if it was over before."""
        closure = self._first_of(worker).pop(0)
        if closure.is_over:
            return None
        closure.is_over = True
        closure.used = None
        self.n_ended += 1
        if closure.is_waiting:  # its worker was silent for a while
            closure.is_waiting = False
            self._waiting.remove(closure)
        return closure

    def cancel_waiting(
        self,
        reason: str = "another function had failed; schedule it again",
    ) -> None:
        """Cancel the closures that have not begun."""
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
        """Return the first error that came since the last call. The error of a parameter server stays."""
        error = self._error
        if not isinstance(error, PSUnavailable):
            self._error = None
        return error
