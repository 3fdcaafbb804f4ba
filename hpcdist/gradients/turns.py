"""Several replicas in one process: each runs in a thread of its own, one at a time, and they meet at merge points.

The replicas go in the order of their numbers, each until its next merge point: the end of a backward, an optimizer's
step, an all_reduce, a merge_call, its end. The last one to arrive does what is to be done once. So what happens is the
same in every run, and no lock is needed anywhere else.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from hpcdist.errors import DesyncError


class Switched(Protocol):
    """Keeps what is private to a replica while another one runs."""

    def begin(self) -> None:
        """Take note that a run begins."""

    def end(self) -> None:
        """Take note that all replicas have ended, or were stopped."""

    def merging(self) -> AbstractContextManager[None]:
        """Let the block, which belongs to no replica, change what all of them have."""

    def leave(self, replica: int) -> None:
        """Put a replica's state away."""

    def enter(self, replica: int) -> None:
        """Bring a replica's state back; of one that begins, what it finds."""


class _StoppedError(BaseException):
    """Unwinds a replica that waits when another one has failed."""


class Turns:
    """The local replicas, whose turn it is, and how far each has come.

    Not collective: other ranks have turns of their own.

    Args:
        replicas: numbers of this rank's replicas.
        switched: keeps their states apart.
    """

    def __init__(self, replicas: range, switched: Sequence[Switched]) -> None:
        self.replicas = replicas
        self._switched = switched
        self._local = threading.local()
        self._is_running = False
        self._brought: list[Any] = [None] * len(replicas)
        self._results: Sequence[Any] = ()
        self._error: Exception | None = None

    @property
    def replica(self) -> int | None:
        """The replica that the calling code belongs to; None outside `run`, and in what a `merge` calls."""
        replica: int | None = getattr(self._local, "replica", None)
        return replica

    @property
    def is_running(self) -> bool:
        """Whether `run` is under way."""
        return self._is_running

    @property
    def is_last(self) -> bool:
        """Whether the calling replica is the last one here."""
        return self.replica == self.replicas[-1]

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function for each local replica; return what they returned.

        Raises:
            What a replica raised, when the others have been stopped. DesyncError: when they meet at different points.
        """
        if self._is_running and (len(self.replicas) > 1 or self._switched):
            raise RuntimeError("run: expected a call outside strategy.run, got one inside; call the function itself.")
        was_running, self._is_running = self._is_running, True
        for state in self._switched:
            state.begin()
        try:
            return [self._run_alone(calls[0])] if len(calls) == 1 else self._run_in_threads(calls)
        finally:
            self._is_running = was_running
            for state in self._switched:
                state.end()

    def _run_in_threads(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        round_ = self._round = _Round(self.replicas)
        threads = [
            threading.Thread(target=self._thread, args=(round_, place, call, contextvars.copy_context()), daemon=True)
            for place, call in enumerate(map(_with_modes, calls))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: nobody goes on behind the caller's back
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
        self._enter(replica)
        try:
            return call()
        finally:
            self._leave(replica)
            self._local.replica = None

    def _thread(self, round_: "_Round", place: int, call: Callable[[], Any], context: contextvars.Context) -> None:
        replica = self._local.replica = self.replicas[place]
        try:
            round_.await_turn(place)
            self._enter(replica)
            round_.results[place] = context.run(call)
            self._leave(replica)
            round_.arrive(place, "its end")
            round_.pass_on(place)
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001  raised again in the thread that called run
            round_.fail(error)

    def meet(self, point: str) -> None:
        """Wait until all local replicas are here: at once for the last one, which then must call `part`.

        Args:
            point: what the replica is about to do, such as "backward"; the same for all.

        Raises:
            DesyncError: when another replica is elsewhere; it ends all of them.
        """
        if len(self.replicas) == 1:
            return
        place = self.place
        self._round.arrive(place, point)
        if not self.is_last:
            self._wait(place)

    def part(self) -> None:
        """Let the other replicas go on, each until the next point; return when it is the last one's turn again."""
        if len(self.replicas) > 1 and self.is_last:
            self._wait(self.place)

    def merge(self, point: str, brought: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return this replica's part of combine(what all local replicas brought), which is called once.

        A single replica may call it anywhere: outside `run`, and in the threads that autograd has for devices.

        Raises:
            What `combine` raises, in all local replicas. DesyncError: as `meet`.
        """
        if len(self.replicas) == 1:
            return self._outside(combine, [brought])[0]
        place = self.place
        self._brought[place] = brought
        self.meet(point)
        if self.is_last:
            self._error = None
            try:
                self._results = self._outside(combine, self._brought)
            except Exception as error:  # noqa: BLE001 - each replica raises it, as a single one would
                self._error = error
        results, raised = self._results, self._error
        self.part()
        if raised is not None:
            raise raised
        return results[place]

    @contextmanager
    def between(self) -> Iterator[None]:
        """Run the user's code between replicas, inside what a `merge` calls: what it changes, all replicas see."""
        with ExitStack() as stack:
            for state in self._switched:
                stack.enter_context(state.merging())
            yield

    def _outside(self, combine: Callable[[list[Any]], Sequence[Any]], brought: list[Any]) -> Sequence[Any]:
        """Return combine(brought), which belongs to no replica."""
        replica, self._local.replica = self.replica, None
        try:
            return combine(brought)
        finally:
            self._local.replica = replica

    @property
    def place(self) -> int:
        """The place of the calling replica among the local ones."""
        assert self.replica is not None, "only replicas meet"
        return self.replicas.index(self.replica)

    def _wait(self, place: int) -> None:
        replica = self.replicas[place]
        self._leave(replica)
        self._round.pass_on(place)
        self._round.await_turn(place)
        self._enter(replica)

    def _leave(self, replica: int) -> None:
        for state in self._switched:
            state.leave(replica)

    def _enter(self, replica: int) -> None:
        for state in self._switched:
            state.enter(replica)


class _Round:
    """One `run`: whose turn it is, and where everybody is."""

    def __init__(self, replicas: range) -> None:
        self.results: list[Any] = [None] * len(replicas)
        self.error: BaseException | None = None
        self._replicas = replicas
        self._turns = [threading.Semaphore(0) for _ in replicas]
        self._turns[0].release()
        self._point = ""

    def await_turn(self, place: int) -> None:
        """Wait for this replica's turn. Bounded by what the others do, as their steps and collectives are."""
        self._turns[place].acquire()
        if self.error is not None:
            raise _StoppedError

    def pass_on(self, place: int) -> None:
        """Give the turn to the next replica."""
        self._turns[(place + 1) % len(self._turns)].release()

    def arrive(self, place: int, point: str) -> None:
        """Take note of where a replica is; the first one says where all must be."""
        if place == 0:
            self._point = point
        elif point != self._point:
            raise DesyncError(
                f"run: expected replica {self._replicas[place]} at {self._point}, as replica {self._replicas[0]}, got "
                f"it at {point}; let all replicas make the same calls in the same order."
            )

    def fail(self, error: BaseException) -> None:
        """Stop all replicas."""
        if self.error is None:
            self.error = error
        for turn in self._turns:
            turn.release()


def _with_modes(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return `call` with the modes of torch that each thread has for itself, as they are here."""
    is_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}

    def run() -> Any:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
            return _in_autocast(call, dtypes)

    return run


def _in_autocast(call: Callable[[], Any], dtypes: dict[str, torch.dtype]) -> Any:
    if not dtypes:
        return call()
    device, dtype = next(iter(dtypes.items()))
    rest = {name: other for name, other in dtypes.items() if name != device}
    with torch.autocast(device, dtype):
        return _in_autocast(call, rest)
