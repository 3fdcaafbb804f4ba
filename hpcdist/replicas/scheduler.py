"""The replica scheduler: several replicas in one process, each in a separate thread, one running at a time.

Replicas run in the order of their numbers, each until its next barrier: the end of a backward, an optimizer's step, an
all_reduce, an all_gather, a merge_call, its end. The last replica to arrive does the work that is done once, such as
the sum or the step, then releases the other replicas. So every run makes the same calls in the same order, and nothing
else needs a lock.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch

from hpcdist.errors import DesyncError, UsageError
from hpcdist.runtime.time_spent import REPLICA_THREAD


class Switched(Protocol):
    """State that is private to a replica and is switched when another one runs."""

    def begin_run(self) -> None:
        """Prepare for a run."""

    def end_run(self) -> None:
        """Clean up once all replicas have ended, or were stopped."""

    def merging(self) -> AbstractContextManager[None]:
        """Let the block, which belongs to no replica, change the state of all replicas."""

    def suspend(self, replica: int) -> None:
        """Save a replica's state."""

    def resume(self, replica: int) -> None:
        """Restore a replica's state; a replica that begins has the state that it finds."""


class _StoppedError(BaseException):
    """Unwinds a replica that waits, because another one has failed."""


class ReplicaScheduler:
    """Runs the replicas of this rank, one at a time.

    Not collective. Every rank has a scheduler.

    Args:
        replicas: numbers of this rank's replicas.
        switched: states that are private to a replica.
    """

    def __init__(self, replicas: range, switched: Sequence[Switched]) -> None:
        self.replicas = replicas
        self._switched = list(switched)
        self._local = threading.local()
        self._is_running = False
        self._contributions: list[Any] = [None] * len(replicas)
        self._results: Sequence[Any] = ()
        self._error: Exception | None = None
        self._round = _Round(replicas)

    def add_switched(self, state: Switched) -> None:
        """Add a state that is private to a replica. For calls between runs, or in a run of a single replica."""
        self._switched.append(state)

    @property
    def replica(self) -> int | None:
        """Number of the replica that the calling code belongs to; None outside `run` and in code that `merge` calls."""
        replica: int | None = getattr(self._local, "replica", None)
        return replica

    @property
    def is_running(self) -> bool:
        """Whether `run` is running."""
        return self._is_running

    @property
    def is_last(self) -> bool:
        """Whether the calling replica is the last one here."""
        return self.replica == self.replicas[-1]

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function for each local replica; return what they returned.

        Raises:
            What a replica raised, once the other replicas are stopped.
            DesyncError: when replicas arrive at different barriers.
        """
        if self._is_running and (len(self.replicas) > 1 or self._switched):
            raise RuntimeError(
                "run: expected a call outside strategy.run, got one inside; call the function itself."
            )
        was_running = self._is_running
        self._is_running = True
        for state in self._switched:
            state.begin_run()
        try:
            if len(calls) == 1:
                return [self._run_alone(calls[0])]
            return self._run_in_threads(calls)
        finally:
            self._is_running = was_running
            self._forget()
            for state in self._switched:
                state.end_run()

    def _forget(self) -> None:
        """Drop values and errors of replicas.

        A model's hooks hold this object, where the garbage collector cannot see it, and an error holds the frames in
        which the model is. An error that this object held would keep the strategy alive for ever.
        """
        self._contributions = [None] * len(self.replicas)
        self._results = ()
        self._error = None
        if len(self.replicas) > 1:
            self._round = _Round(self.replicas)

    def _run_in_threads(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        round_ = self._round
        threads = [
            threading.Thread(
                target=self._thread,
                args=(round_, index, call, contextvars.copy_context()),
                name=REPLICA_THREAD,
                daemon=True,
            )
            for index, call in enumerate(map(_with_torch_modes, calls))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: no replica may keep running after this call
            round_.fail(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if round_.error is not None:
            raise round_.error
        return round_.results

    def _run_alone(self, call: Callable[[], Any]) -> Any:
        replica = self._local.replica = self.replicas[0]
        self._resume(replica)
        try:
            result = call()
        except BaseException:
            with suppress(UsageError):
                # `SharedWrites`, which comes last, may raise it: the program's error is raised instead
                self._suspend(replica)
            raise
        else:
            self._suspend(replica)
        finally:
            self._local.replica = None
        return result

    def _thread(
        self, round_: "_Round", index: int, call: Callable[[], Any], context: contextvars.Context
    ) -> None:
        replica = self._local.replica = self.replicas[index]
        try:
            round_.wait_for_turn(index)
            self._resume(replica)
            round_.results[index] = context.run(call)
            self._suspend(replica)
            round_.arrive(index, "its end")
            round_.pass_turn(index)
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001  raised again in the thread that called run
            self._suspend_failed(replica)
            round_.fail(error)

    def barrier(self, point: str) -> None:
        """Wait until all local replicas are here. The last replica does not wait, and must call `release` afterwards.

        Args:
            point: name of the next action, such as "backward"; the same for all replicas.

        Raises:
            DesyncError: when replicas arrive at different points; it ends all of them.
        """
        if len(self.replicas) == 1:
            return
        index = self.local_index
        self._round.arrive(index, point)
        if not self.is_last:
            self._wait(index)

    def release(self) -> None:
        """Let the other replicas run, each until its next barrier; return when it is the last replica's turn again."""
        if len(self.replicas) > 1 and self.is_last:
            self._wait(self.local_index)

    def merge(
        self, point: str, contributed: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Return this replica's part of combine(contributions of all local replicas), which is called once.

        A single replica may call it anywhere: outside `run`, and in the threads that autograd has for devices.

        Raises:
            What `combine` raises, in all local replicas.
            DesyncError: when replicas arrive at different points; it ends all of them.
        """
        if len(self.replicas) == 1:
            return self._outside(combine, [contributed])[0]
        index = self.local_index
        self._contributions[index] = contributed
        self.barrier(point)
        if self.is_last:
            self._error = None
            try:
                self._results = self._outside(combine, self._contributions)
            except Exception as error:  # noqa: BLE001 - each replica raises it, as a single replica would
                self._error = error
        results = self._results
        raised = self._error
        self.release()
        if raised is not None:
            raise raised
        return results[index]

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Run the user's code in a merge: all replicas see its changes."""
        with ExitStack() as stack:
            for state in self._switched:
                stack.enter_context(state.merging())
            yield

    def _outside(
        self, combine: Callable[[list[Any]], Sequence[Any]], contributions: list[Any]
    ) -> Sequence[Any]:
        """Return combine(contributions), which belongs to no replica."""
        replica = self.replica
        self._local.replica = None
        try:
            return combine(contributions)
        finally:
            self._local.replica = replica

    @property
    def local_index(self) -> int:
        """Index of the calling replica among the replicas of this process."""
        assert self.replica is not None, "only replicas have an index"
        return self.replicas.index(self.replica)

    def _wait(self, index: int) -> None:
        replica = self.replicas[index]
        self._suspend(replica)
        self._round.pass_turn(index)
        self._round.wait_for_turn(index)
        self._resume(replica)

    def _suspend(self, replica: int) -> None:
        for state in self._switched:
            state.suspend(replica)

    def _suspend_failed(self, replica: int) -> None:
        """Save the state of a replica that has raised: it must not draw the same numbers again."""
        # `SharedWrites`, which comes last, may raise it: the program's error is raised instead
        with suppress(UsageError):
            self._suspend(replica)

    def _resume(self, replica: int) -> None:
        for state in self._switched:
            state.resume(replica)


class _Round:
    """One `run`: the replica whose turn it is, and the barrier at which replicas are."""

    def __init__(self, replicas: range) -> None:
        self.results: list[Any] = [None] * len(replicas)
        self.error: BaseException | None = None
        self._replicas = replicas
        self._turns = [threading.Semaphore(0) for _ in replicas]
        self._turns[0].release()
        self._point = ""

    def wait_for_turn(self, index: int) -> None:
        """Wait for this replica's turn. Bounded, as the other replicas' collectives are."""
        self._turns[index].acquire()
        if self.error is not None:
            raise _StoppedError

    def pass_turn(self, index: int) -> None:
        """Give the turn to the next replica."""
        self._turns[(index + 1) % len(self._turns)].release()

    def arrive(self, index: int, point: str) -> None:
        """Record where a replica is; the first replica decides where all must be."""
        if index == 0:
            self._point = point
        elif point != self._point:
            raise DesyncError(
                f"run: expected replica {self._replicas[index]} at {self._point}, as replica {self._replicas[0]}, got "
                f"it at {point}; let all replicas make the same calls in the same order."
            )

    def fail(self, error: BaseException) -> None:
        """Stop all replicas."""
        if self.error is None:
            self.error = error
        for turn in self._turns:
            turn.release()


def _with_torch_modes(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return `call` under the caller's torch modes and number of cores, which torch has for each thread.

    The bits of a matrix product depend on its number of threads, and a new thread begins with the default.
    """
    is_grad = torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    n_threads = torch.get_num_threads()
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}

    def run() -> Any:
        torch.set_num_threads(n_threads)
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
            return _in_autocast(call, dtypes)

    return run


def _in_autocast(call: Callable[[], Any], dtypes: dict[str, torch.dtype]) -> Any:
    """Return the result of a call under autocast to a dtype on each device."""
    if not dtypes:
        return call()
    device, dtype = next(iter(dtypes.items()))
    remaining_dtypes = {name: other_dtype for name, other_dtype in dtypes.items() if name != device}
    with torch.autocast(device, dtype):
        return _in_autocast(call, remaining_dtypes)
