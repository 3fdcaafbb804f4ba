"""Random numbers keyed by (seed, step, replica): the same draws after a restart, with nothing stored per rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor

#: Who draws outside `strategy.run` when replicas are counted apart from ranks: the same on every rank.
_OUTSIDE = "outside"


class StepGenerators:
    """Sets torch's default generators at the start of every step.

    Args:
        replica: id of this rank's replica; replicas draw different numbers. None: replicas are counted apart from
            ranks, and `enter` says which one draws.

    Attributes:
        seed: of the job; None until the chief's was taken.
        step: optimizer steps taken so far.
    """

    def __init__(self, replica: int | None) -> None:
        self._who: int | str = _OUTSIDE if replica is None else replica
        self._has_cuda = torch.cuda.is_available()
        self._states: dict[int | str, list[Tensor]] = {}
        self.seed: int | None = None
        self.step = 0

    def start(self, seed: int) -> None:
        """Take `seed`, unless a checkpoint brought one, and set the generators for the current step.

        Numbers of a step in which replicas have drawn go on: they would come a second time.
        """
        self.seed = seed if self.seed is None else self.seed
        if not self._states:
            self._set()

    def restore(self, seed: int | None, step: int) -> None:
        """Go on at `step` with the seed of a checkpoint."""
        self.seed, self.step = seed, step
        self._states.clear()
        if seed is not None:
            self._set()

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1
        self._states.clear()
        if self.seed is not None:
            self._set()

    def begin(self) -> None:
        """Let replicas draw."""
        self.leave(self._who)

    def end(self) -> None:
        """Let the code outside `run` draw again."""
        self._bring_back(_OUTSIDE)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let the block draw as code outside `run` does, whichever replica came last."""
        replica = self._who
        self.leave(replica)
        self._bring_back(_OUTSIDE)
        try:
            yield
        finally:
            self.leave(_OUTSIDE)
            self._bring_back(replica)

    def leave(self, replica: int | str) -> None:
        """Keep where a replica is in its numbers, until the next step."""
        if self.seed is not None:
            cuda = [torch.cuda.get_rng_state()] if self._has_cuda else []
            self._states[replica] = [torch.default_generator.get_state(), *cuda]

    def enter(self, replica: int) -> None:
        """Go on in a replica's numbers; from their start where it has not drawn in this step."""
        self._bring_back(replica)

    def _bring_back(self, who: int | str) -> None:
        self._who = who
        if self.seed is None:
            return
        if who not in self._states:
            self._set()
            return
        state, *cuda = self._states[who]
        torch.default_generator.set_state(state)
        if cuda:
            torch.cuda.set_rng_state(cuda[0])

    def _set(self) -> None:
        key = xxhash.xxh3_64_intdigest(f"{self.seed} {self.step} {self._who}".encode()) >> 1
        torch.default_generator.manual_seed(key)
        if self._has_cuda:
            torch.cuda.manual_seed(key)
