"""What any rank wants, learnt by all at the same poll: from sums of gradients, else by a message now and then."""

import time
from collections.abc import Callable

from hpcdist.errors import DesyncError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.step_flags import Request
from hpcdist.runtime.world import World

#: Polls without a sum of gradients before ranks ask each other, and the most that this grows to.
FIRST_POLLS, MAX_POLLS = 2, 32
#: Aimed at between two such messages: much less than a batch system's notice, much more than a message costs.
ASK_EVERY_S = 0.1
_TIME_BITS = 48


class Agreement:
    """Lets the ranks of one role act alike on what any of them wants.

    Between two polls with a sum of gradients the sum has told everyone, and a poll is a look at a number. Without one,
    in evaluation or in numpy programs, every k-th poll is an all-reduce of 8 bytes; k follows from the time between
    polls of the slowest rank, and is equal on all ranks. One rank asks nobody.

    Args:
        world: its ranks of this rank's role poll equally often.
        requested: returns what this rank requests now.
        clock: seconds that only go up.

    Attributes:
        n_messages: all-reduces made so far.
    """

    def __init__(
        self, world: World, requested: Callable[[], Request], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._world = world
        self._requested = requested
        self._clock = clock
        self._n_seen = world.step_flags.n_sums
        self._start_again()
        self.n_messages = 0

    def poll(self, at_once: bool = False) -> Request:
        """Return what any rank wanted, or the most of it; the same on all ranks. Collective: the ranks of the role.

        Args:
            at_once: ask, if no sum of gradients has told: equal on all ranks.
        """
        if self._world.role_comm.size == 1:
            return self._requested()
        if self._world.step_flags.n_sums > self._n_seen:
            self._n_seen = self._world.step_flags.n_sums
            self._start_again()
            return self._world.step_flags.take()
        self._n_polls += 1
        return self._ask() if at_once or self._n_polls >= self._every else Request.NONE

    def require_same_step(self, step: int) -> None:
        """Raise unless all ranks of the role have made as many steps. Collective: they.

        Raises:
            DesyncError: on every rank alike.
        """
        if not self._world.all_equal(str(step), self._world.role_comm):
            error = DesyncError(
                f"PreemptionCheckpointHandler: expected all ranks to stop after the same step, got {step} here; "
                f"let all ranks make the same steps and polls."
            )
            self._world.agree(error, self._world.role_comm)

    def first_reason(self, own: str | None) -> str | None:
        """Return the reason of the lowest rank of the role that has one, on all of them. Collective: they."""
        comm = self._world.role_comm
        lowest = self._world.all_reduce_int(comm.size if own is None else comm.rank, MPI.MIN, comm)
        return None if lowest == comm.size else self._world.broadcast_text(own or "", lowest, comm)

    def any_rank(self, is_true: bool) -> bool:
        """Return whether it is true on any rank of the role. Collective: they."""
        return self._world.all_reduce_int(int(is_true), MPI.MAX, self._world.role_comm) > 0

    def _start_again(self) -> None:
        self._n_polls, self._every, self._since = 0, FIRST_POLLS, self._clock()

    def _ask(self) -> Request:
        """Return what any rank wants now, and agree on when to ask again. Collective: the ranks of the role.

        Cost: one all-reduce of 8 bytes. The largest number wins: what is wanted first, then the time between polls. A
        stop on one rank hides a save on another.
        """
        elapsed_us = int((self._clock() - self._since) * 1e6 / self._n_polls)
        own = int(self._requested()) << _TIME_BITS | min(elapsed_us, (1 << _TIME_BITS) - 1)
        agreed = self._world.all_reduce_int(own, MPI.MAX, self._world.role_comm)
        want, poll_us = agreed >> _TIME_BITS, max(agreed & ((1 << _TIME_BITS) - 1), 1)
        self.n_messages += 1
        self._n_polls, self._since = 0, self._clock()
        self._every = min(max(int(ASK_EVERY_S * 1e6 / poll_us), 1), MAX_POLLS, 2 * self._every)
        return Request(want)
