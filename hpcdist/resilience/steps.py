"""Counting the steps of a job, for each way to write its training loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.runtime.step_flags import StepFlags


class StepCount:
    """Counts calls of `run`, or optimizer steps if they happen outside such calls.

    Once the optimizer has stepped outside `run`, a call without an optimizer step, such as an evaluation, no longer
    counts. Earlier calls stay counted, as checkpoints and records may bear their numbers. If the program reports its
    steps, optimizer steps do not count.

    Not collective; equal on all ranks that make equal steps and calls.

    Args:
        flags: counts the steps of optimizers.
        base: steps of earlier attempts.
        is_outside: whether an earlier attempt has seen the optimizer step outside `run`.

    Attributes:
        was_evaluation: whether the last call seems to be an evaluation: the optimizer did not step in it, and this
            attempt had counted a step before it, so that it is not the first step of a numpy program.
    """

    def __init__(self, flags: StepFlags, base: int, is_outside: bool = False) -> None:
        self._flags = flags
        self._counted = self._base = base
        self._seen = flags.n_steps
        self._was_outside, self._is_inside, self._is_reported = is_outside, False, False
        self.was_evaluation = False

    @property
    def value(self) -> int:
        """Steps so far, earlier attempts included."""
        n_steps = 0 if self._is_reported else self._flags.n_steps - self._seen
        return self._counted + (min(n_steps, 1) if self._is_inside else n_steps)

    @property
    def is_outside(self) -> bool:
        """Whether the optimizer has stepped outside `run`; saved for the next attempt."""
        return self._was_outside or (not self._is_inside and self._flags.n_steps > self._seen)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as a call; if it raises, only if the optimizer has stepped in it."""
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
        """Count a step that the program reports.

        Args:
            saved: the last saved step: before the first report it may be an optimizer's count.
        """
        self._counted = max(self._counted + 1, saved)
        self._seen, self._is_reported = self._flags.n_steps, True
