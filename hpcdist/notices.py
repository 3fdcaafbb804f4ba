"""What ranks tell each other with every sum of gradients, so that it costs no message of its own.

A notice is two numbers that are summed along, of those who want a stop and those who want a save: all learn what any of
them wanted. Who sums calls `send` and `receive`; who wants something is the watcher.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

#: How many numbers a notice is.
N_NUMBERS = 2


class Want(enum.IntFlag):
    """What a rank wants all ranks to do at the end of the step. Of several, the largest may be all that is heard."""

    NOTHING = 0
    SAVE = 1
    STOP = 2  # saves too


class Watcher(Protocol):
    """Wants something, and looks at the end of each step whether any rank does."""

    def wants(self) -> Want:
        """Return what this rank wants now. Called often; not collective."""

    def poll(self) -> None:
        """Act on what is wanted: a loop is between two steps. Collective: the ranks of the role."""


class Notices:
    """The notices of one world.

    Attributes:
        watcher: who wants something; None where nobody does.
        n_carried: sums that carried notices so far; equal on all ranks at the same point of the program.
        n_steps: steps that optimizers of the strategies have made so far; equal likewise.
    """

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.n_carried = self.n_steps = 0
        self._heard = Want.NOTHING

    def send(self) -> tuple[float, float]:
        """Return what this rank adds to sums."""
        return encode(Want.NOTHING if self.watcher is None else self.watcher.wants())

    def receive(self, totals: Sequence[float]) -> None:
        """Take note of the sums over all replicas."""
        self.n_carried += 1
        self._heard |= decode(totals)

    def take(self) -> Want:
        """Return what was wanted since the last call; equal on all ranks."""
        heard, self._heard = self._heard, Want.NOTHING
        return heard

    def poll(self) -> None:
        """Let the watcher act between two steps. Collective where there is one: the ranks of the role."""
        if self.watcher is not None:
            self.watcher.poll()


#: Of a process that is a job of its own: strategies of one replica tell it of their loops and steps, without MPI.
of_one_rank = Notices()


def encode(want: Want) -> tuple[float, float]:
    """Return a wish as numbers that can be summed over up to 2**24 replicas, in float32 too."""
    return float(Want.STOP in want), float(Want.SAVE in want)


def decode(totals: Sequence[float]) -> Want:
    """Return what any of the replicas wanted, of the sums of what all did."""
    n_stops, n_saves = totals
    return (Want.STOP if n_stops else Want.NOTHING) | (Want.SAVE if n_saves else Want.NOTHING)
