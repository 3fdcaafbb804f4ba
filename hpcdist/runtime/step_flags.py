"""Requests to stop or to save, piggybacked on the gradient all-reduce, so that they cost no extra message.

Two numbers are summed along with the gradients: how many replicas request a stop, and how many a save. All ranks learn
the same after the same step. The code that sums gradients calls `request_numbers` and `record_requests`; the handler of
stops attaches itself as the requester.
"""

import enum
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hpcdist.runtime.loop_state import LoopState
from hpcdist.runtime.parts import Part, PartSource

#: Count of numbers that travel with a sum.
N_NUMBERS = 2
#: Numbers of a rank that requests nothing.
_NOTHING = (0.0, 0.0)


class Request(enum.IntFlag):
    """A rank's request to all ranks at the end of a backward. Where only one fits a message, the largest wins."""

    NONE = 0
    SAVE = 1
    STOP = 2  # saves too


class Requester(Protocol):
    """Requests stops and saves, and acts on the requests of any rank between two steps."""

    def requested(self) -> Request:
        """Return this rank's request now. Called at every sum; not collective."""

    def stop(self, reason: str) -> None:
        """Request a stop from now on. Not collective."""

    def poll_between_batches(self) -> None:
        """Act on requests: the program is between two batches. Collective over the ranks of the role."""

    def note_unsafe_point(self) -> None:
        """Check whether a stop has waited too long for a point between two iterations. Not collective."""

    def poll_after_pass(self) -> None:
        """Act on a stop after a pass, such as in a validation. Collective over the ranks of the role."""

    def leave_if_overdue(self, quiet_s: float) -> None:
        """End the job without a save if no work was done in the grace period since a stop request. From any thread.

        Args:
            quiet_s: seconds since the last work was done.
        """


class StepFlags:
    """The step flags of one world.

    Args:
        is_alone: whether the world has one rank.

    Attributes:
        requester: object that requests on this rank; None if there is none.
        n_sums: number of sums that carried flags so far; equal on all ranks at the same point of the program.
        is_in_round: whether replicas differ until a later sum, so that nothing may be saved; equal on all ranks, too.
        loop: state of the program's own loop.
    """

    def __init__(self, is_alone: bool = False) -> None:
        self.requester: Requester | None = None
        self.n_sums = 0
        self.is_in_round = False
        self.loop = LoopState(is_alone)
        self._received = Request.NONE

    @property
    def n_steps(self) -> int:
        """Number of optimizer steps that the strategies have made so far; equal on all ranks at the same point."""
        return self.loop.n_steps - self.loop.n_reported

    def attach(
        self,
        requester: Requester,
        optimizers: Iterable[Any] = (),
        saved: Iterable[Any] = (),
    ) -> None:
        """Let `requester` request and act from now on, in place of an earlier one.

        Args:
            requester: object that requests and acts; see `Requester`.
            optimizers: optimizers that every iteration of the program's loop is expected to step.
            saved: objects whose state it saves.
        """
        self.requester = requester
        self._received = Request.NONE
        self.loop.begin(optimizers, saved)

    def detach(self, requester: Requester) -> None:
        """Forget `requester`, unless another one has taken its place."""
        if self.requester is requester:
            self.requester = None
            self.loop.end()

    def count_step(self, optimizer: Any = None, owner: int | None = None) -> None:
        """Count an optimizer step.

        Args:
            optimizer: optimizer that has stepped.
            owner: number of the strategy on whose gradients it has stepped; see `PartSource`.
        """
        self.loop.expect_training(owner)
        self.loop.note_step(optimizer)
        if self.requester is not None:
            self.requester.note_unsafe_point()

    def begin_round(self) -> None:
        """Note that replicas differ from now on: nothing may be saved."""
        self.is_in_round = True

    def end_round(self) -> None:
        """Note that replicas are equal again."""
        self.is_in_round = False

    def request_numbers(self) -> tuple[float, float]:
        """Return the numbers that this rank adds to a sum."""
        return _NOTHING if self.requester is None else encode(self.requester.requested())

    def record_requests(self, totals: Sequence[float]) -> None:
        """Record the sums over all replicas."""
        self.n_sums += 1
        if any(totals):
            self._received |= decode(totals)

    @property
    def is_stop_known(self) -> bool:
        """Whether a request to stop has come with a sum, and was not taken yet."""
        return Request.STOP in self._received

    def take(self) -> Request:
        """Return the requests since the last call; equal on all ranks."""
        received = self._received
        self._received = Request.NONE
        return received

    def poll(self, is_end_of_pass: bool = False, is_shared: bool = True) -> None:
        """Let the requester act between two steps. Collective over the ranks of the role where there is a requester.

        Args:
            is_end_of_pass: whether all batches of a pass were trained on, and its loop is about to end.
            is_shared: whether all ranks come here, whatever one of them does alone.
        """
        if self.requester is None:
            return
        self.loop.note_safe_point(is_shared)
        if is_end_of_pass:
            self.loop.note_end_of_pass()
        if not self.is_in_round:
            self.requester.poll_between_batches()

    def poll_at_draw(self, source: PartSource, is_for_training: bool, is_last: bool) -> None:
        """Let the requester act if a program that asks for its next part is between two iterations.

        Collective over the ranks of the role where there is a requester.

        Args:
            source: source that is asked for a part.
            is_for_training: whether gradients are recorded.
            is_last: whether the pass is known to have no more parts.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if self.requester is None or not is_main:  # another thread draws while the loop trains
            return
        if self.loop.is_safe_draw(source, is_for_training, is_last):
            is_shared = source.is_trusted or not self.loop.is_training
            self.poll(is_end_of_pass=is_last and source.is_trained, is_shared=is_shared)
        elif self.loop.is_after_pass and source.keeper is None and not self.is_in_round:
            self.requester.poll_after_pass()
        else:
            self.requester.note_unsafe_point()

    def poll_at_forward(self, parts: Sequence[Part]) -> None:
        """Let the requester act if a forward of these parts begins an iteration.

        Collective over the ranks of the role where there is a requester.
        """
        if self.requester is not None and self.loop.is_safe_forward(parts):
            self.poll(is_shared=False)


#: The flags of a job of one rank. Strategies of one replica use them without starting MPI.
single_rank_flags = StepFlags(is_alone=True)


def encode(request: Request) -> tuple[float, float]:
    """Return a request as numbers that can be summed over up to 2**24 replicas, in float32 too."""
    return float(Request.STOP in request), float(Request.SAVE in request)


def decode(totals: Sequence[float]) -> Request:
    """Return the requests of any replica, given the sums over all of them."""
    n_stops, n_saves = totals
    request = Request.NONE
    if n_stops:
        request |= Request.STOP
    if n_saves:
        request |= Request.SAVE
    return request
