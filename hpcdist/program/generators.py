"""Random numbers keyed by (seed, step, replica): the same draws after a restart.

They are set after each step, and again where the loop gets the next batch, so numbers that a restarted program draws
before its loop do not matter. Further batches of a step have different numbers. A batch that is drawn while another one
waits for its backward, as by a loop that draws ahead, changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor

from hpcdist.program.library_keys import LibraryKeys

#: Key of the numbers drawn outside `strategy.run` where the number of replicas is fixed; equal on every rank.
_OUTSIDE = "outside"


class StepGenerators:
    """Seeds torch's default generators, and with `LibraryKeys` the generators of Python and numpy.

    Args:
        replica: number of this rank's replica. Replicas draw different numbers of torch, and equal numbers of Python
            and numpy. None if the number of replicas is fixed, and the scheduler says which replica draws.

    Attributes:
        seed: seed of the job; None before the chief's seed is known.
        step: number of optimizer steps taken so far.
    """

    def __init__(self, replica: int | None) -> None:
        self._drawer: int | str = _OUTSIDE if replica is None else replica
        self._has_cuda = torch.cuda.is_available()
        self._states: dict[int | str, list[Tensor]] = {}
        self._libraries = LibraryKeys()
        self.seed: int | None = None
        self.step = 0
        self._place = "step 0"
        self._n_backwards_at_step: int | None = None
        self._is_agreed = False
        self._key: int | None = None  # the seed of the generators since they were set last

    def start(self, seed: int) -> None:
        """Use `seed`, which all ranks have agreed on, and set the generators for the current place.

        Where the generators are set for the place already, their sequences continue, as the same numbers must not come
        twice. They do not continue if the program has set a seed since.
        """
        has_own_seed = self.seed is not None and torch.initial_seed() == self._key
        is_running = bool(self._states) or has_own_seed
        if not self._is_agreed:
            self.seed = seed
            self._is_agreed = True
        self._libraries.start(seed)
        if not is_running:
            self._set()

    def start_alone(self) -> None:
        """Use this rank's own seed until all ranks agree on a seed. They draw different numbers in any case."""
        self.seed = torch.initial_seed()
        self._set()

    def restore(
        self,
        seed: int | None,
        step: int,
        libraries: list[dict[str, Any]] | None = None,
    ) -> None:
        """Resume at `step` with a checkpoint's seed and its states of the libraries."""
        self.seed = seed
        self.step = step
        self._is_agreed = seed is not None
        self._place = f"step {step}"
        self._n_backwards_at_step = None
        self._states.clear()
        if libraries is not None:
            self._libraries.restore(libraries, self._place)
        if seed is not None:
            self._set()

    def libraries(self) -> list[dict[str, Any]]:
        """Return the states of the random numbers of Python and numpy on this rank, for a checkpoint."""
        return self._libraries.state()

    def advance(self) -> None:
        """Start the next step."""
        self.step += 1
        self._n_backwards_at_step = None
        self._begin(f"step {self.step}")
        self._libraries.seed(self._place)

    def begin_batch(self, n_backwards: int) -> None:
        """Start a batch of this step: the first one, or one more, whose gradients are added.

        Args:
            n_backwards: number of backwards that the program has made so far. Batches that no backward uses, as of a
                validation, do not count, so that a restart after the step draws the same numbers.
        """
        if self._n_backwards_at_step is None:
            self._n_backwards_at_step = n_backwards
        n_added = n_backwards - self._n_backwards_at_step
        place = f"step {self.step}"
        if n_added:
            place = f"step {self.step}, backward {n_added}"
        self._begin(place)
        self._libraries.begin_batch(self._place)

    def _begin(self, place: str) -> None:
        """Set the generators for a place in training."""
        self._place = place
        self._states.clear()
        if self.seed is not None:
            self._set()

    def begin_run(self) -> None:
        """Let replicas draw."""
        self.suspend(self._drawer)
        self._libraries.begin_run()

    def end_run(self) -> None:
        """Let the code outside `run` draw again."""
        self._libraries.end_run()
        self._restore(_OUTSIDE)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let the block draw as code outside `run` does, whichever replica has drawn last."""
        replica = self._drawer
        self.suspend(replica)
        self._restore(_OUTSIDE)
        try:
            yield
        finally:
            self.suspend(_OUTSIDE)
            self._restore(replica)

    def suspend(self, replica: int | str) -> None:
        """Save how far a replica has drawn, until the next place."""
        self._libraries.suspend(replica)
        if self.seed is not None:
            cuda = [torch.cuda.get_rng_state()] if self._has_cuda else []
            self._states[replica] = [torch.default_generator.get_state(), *cuda]

    def resume(self, replica: int) -> None:
        """Continue a replica's sequence; from its start where it has not drawn at this place."""
        self._libraries.resume(replica)
        self._restore(replica)

    def _restore(self, replica: int | str) -> None:
        self._drawer = replica
        if self.seed is None:
            return
        if replica not in self._states:
            self._set()
            return
        state, *cuda = self._states[replica]
        torch.default_generator.set_state(state)
        if cuda:
            torch.cuda.set_rng_state(cuda[0])

    def _set(self) -> None:
        """Seed torch's generators for the current place and drawer."""
        name = f"{self.seed} {self._place} {self._drawer}"
        key = xxhash.xxh3_64_intdigest(name.encode()) >> 1
        self._key = key
        torch.default_generator.manual_seed(key)
        if self._has_cuda:
            torch.cuda.manual_seed(key)
