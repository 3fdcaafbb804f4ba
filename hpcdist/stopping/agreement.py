"""Agreement on stop and save requests: all ranks learn of a request at the same poll."""

import time
from collections.abc import Callable

from hpcdist.errors import DesyncError
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.step_flags import Request
from hpcdist.runtime.world import World

#: First and largest number of polls without a gradient all-reduce between two explicit all-reduces.
FIRST_POLLS = 2
MAX_POLLS = 32
#: Target time between two explicit all-reduces: far below a batch system's notice, far above their cost.
ASK_EVERY_S = 0.1
_TIME_BITS = 48


class Agreement:
    """Makes all ranks of one role act on a request of any of them at the same poll.

    Requests are piggybacked on the gradient all-reduce: after one, a poll only reads a number. Without gradients, as in
    evaluation or numpy programs, every k-th poll is an all-reduce of 8 bytes. k is derived from the slowest rank's time
    between polls and is equal on all ranks. A single rank does not communicate.

    Args:
        world: all ranks of this rank's role must poll equally often.
        requested: returns this rank's current request.
        clock: monotonic seconds.

    Attributes:
        n_messages: explicit all-reduces so far.
    """

    def __init__(
        self,
        world: World,
        requested: Callable[[], Request],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._requested = requested
        self._clock = clock
        self._n_seen = world.step_flags.n_sums
        self._n_polls = 0
        self._every = FIRST_POLLS
        self._since = clock()
        self.n_messages = 0

    def poll(self, at_once: bool = False, may_ask: bool = True) -> Request:
        """Return the requests of all ranks; equal on all ranks. Collective over the ranks of the role.

        Those that came with gradients are complete; of an explicit all-reduce the strongest one is known.

        Args:
            at_once: all-reduce now unless gradients have carried the requests; must be equal on all ranks.
            may_ask: whether to all-reduce at all. In a loop that trains, the next gradients carry the requests, and one
                rank alone may draw a batch, such as to look at it.
        """
        if self._world.role_comm.size == 1:
            return self._requested()
        if self._world.step_flags.n_sums > self._n_seen:
            self._n_seen = self._world.step_flags.n_sums
            self._start_again()
            return self._world.step_flags.take()
        if not may_ask:
            return Request.NONE
        self._n_polls += 1
        if at_once or self._n_polls >= self._every:
            return self._ask()
        return Request.NONE

    def require_same_step(self, step: int) -> None:
        """Raise unless all ranks of the role are at the same step. Collective over the ranks of the role.

        Raises:
            DesyncError: on all ranks.
        """
        if not self._world.all_equal(str(step), self._world.role_comm):
            error = DesyncError(
                f"PreemptionCheckpointHandler: expected all ranks to stop after the same step, got {step} here; "
                f"let all ranks make the same steps and polls."
            )
            self._world.agree(error, self._world.role_comm)

    def require_same_positions(self, positions: str) -> None:
        """Raise unless all ranks of the role are at the same batch of each dataset.

        Collective over the ranks of the role.

        Raises:
            DesyncError: on all ranks.
        """
        if not self._world.all_equal(positions, self._world.role_comm):
            error = DesyncError(
                "PreemptionCheckpointHandler: expected all ranks to have drawn the same batches of each distributed "
                "dataset, got others here; let all ranks draw them: what one rank alone needs, as for a plot, it reads "
                "from the dataset itself."
            )
            self._world.agree(error, self._world.role_comm)

    def first_request(self, local_request: StopRequest | None) -> StopRequest | None:
        """Return, on all ranks, the request of the lowest rank that has one. Collective over the ranks of the role."""
        comm = self._world.role_comm
        candidate = comm.size
        text = ""
        if local_request is not None:
            candidate = comm.rank
            text = local_request.to_text()
        lowest = self._world.all_reduce_int(candidate, MPI.MIN, comm)
        if lowest == comm.size:
            return None
        return StopRequest.from_text(self._world.broadcast_text(text, lowest, comm))

    def any_rank(self, is_true: bool) -> bool:
        """Return whether `is_true` holds on any rank of the role. Collective over the ranks of the role."""
        return self._world.all_reduce_int(int(is_true), MPI.MAX, self._world.role_comm) > 0

    def _start_again(self) -> None:
        self._n_polls = 0
        self._every = FIRST_POLLS
        self._since = self._clock()

    def _ask(self) -> Request:
        """All-reduce the requests, and agree on the number of polls until the next all-reduce.

        Collective over the ranks of the role.

        Cost: one all-reduce (maximum) of 8 bytes: the request in the high bits, the time between polls in the low
        bits. A stop on one rank hides a save on another.
        """
        time_mask = (1 << _TIME_BITS) - 1
        poll_us = int((self._clock() - self._since) * 1e6 / self._n_polls)
        message = int(self._requested()) << _TIME_BITS | min(poll_us, time_mask)
        strongest = self._world.all_reduce_int(message, MPI.MAX, self._world.role_comm)
        request = strongest >> _TIME_BITS
        slowest_poll_us = max(strongest & time_mask, 1)
        self.n_messages += 1
        self._n_polls = 0
        self._since = self._clock()
        n_polls = max(int(ASK_EVERY_S * 1e6 / slowest_poll_us), 1)
        self._every = min(n_polls, MAX_POLLS, 2 * self._every)
        return Request(request)
