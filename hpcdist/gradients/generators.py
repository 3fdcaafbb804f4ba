"""Random numbers keyed by (seed, step, replica): the same draws after a restart, with nothing stored per rank."""

import torch
import xxhash


class StepGenerators:
    """Sets torch's default generators at the start of every step.

    Args:
        replica: id of this rank's replica; replicas draw different numbers.

    Attributes:
        seed: of the job; None until the chief's was taken.
        step: optimizer steps taken so far.
    """

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._has_cuda = torch.cuda.is_available()
        self.seed: int | None = None
        self.step = 0

    def start(self, seed: int) -> None:
        """Take `seed`, unless a checkpoint brought one, and set the generators for the current step."""
        self.seed = seed if self.seed is None else self.seed
        self._set()

    def restore(self, seed: int | None, step: int) -> None:
        """Go on at `step` with the seed of a checkpoint."""
        self.seed, self.step = seed, step
        if seed is not None:
            self._set()

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1
        if self.seed is not None:
            self._set()

    def _set(self) -> None:
        key = xxhash.xxh3_64_intdigest(f"{self.seed} {self.step} {self._replica}".encode()) >> 1
        torch.default_generator.manual_seed(key)
        if self._has_cuda:
            torch.cuda.manual_seed(key)
