"""What counts as a step of a job, whichever way its program is written."""

from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.runtime.step_flags import StepFlags


class StepCount:
    """Counts calls of `run`, or steps of the optimizer where they are made outside of such calls.

    A program whose optimizer steps outside may pass an evaluation to `run`: a call without a step is none there, from
    the first step on. Earlier calls stay counted: checkpoints and records may have their numbers. Where the program
    says itself that a step was made, those of the optimizer do not count.

    Not collective; equal on all ranks that make equal steps and calls.

    Args:
        flags: count the steps of optimizers.
        base: steps made by earlier attempts.
        is_outside: whether the optimizer was seen to step outside of calls by then.

    Attributes:
        was_evaluation: whether the last call was one, as far as is known: no step of the optimizer was made in it, and
            something was counted before it in this attempt, so that it is not the first step of a numpy program.
    """

    def __init__(self, flags: StepFlags, base: int, is_outside: bool = False) -> None:
        self._flags = flags
        self._counted = self._base = base
        self._seen = flags.n_steps
        self._was_outside, self._is_inside, self._is_told = is_outside, False, False
        self.was_evaluation = False

    @property
    def value(self) -> int:
        """Steps made so far, with those of earlier attempts."""
        n_steps = 0 if self._is_told else self._flags.n_steps - self._seen
        return self._counted + (min(n_steps, 1) if self._is_inside else n_steps)

    @property
    def is_outside(self) -> bool:
        """Whether the optimizer was seen to step outside of calls; kept with `value` for the next attempt."""
        return self._was_outside or (not self._is_inside and self._flags.n_steps > self._seen)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as a call; one that raises, only if the optimizer has stepped in it."""
        self._was_outside, has_begun = self.is_outside, self.value > self._base
        self._counted, self._seen, self._is_inside = self.value, self._flags.n_steps, True
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            has_stepped = self._flags.n_steps > self._seen
            self._counted += int(has_stepped or (is_whole and not self._was_outside))
            self._seen, self._is_inside = self._flags.n_steps, False
            self.was_evaluation = has_begun and not has_stepped

    def count_reported(self, saved: int) -> None:
        """Count a step that the program says it made.

        Args:
            saved: the last number that was saved: before the first such word it may be one of the optimizer's.
        """
        self._counted = max(self._counted + 1, saved)
        self._seen, self._is_told = self._flags.n_steps, True
