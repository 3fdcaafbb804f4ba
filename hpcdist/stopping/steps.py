"""The steps of a job: counts them, however the loop is written, and tells if parameters changed since the last one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpcdist.runtime.step_flags import StepFlags


class StepCount:
    """Counts calls of `run`, and optimizer steps outside of them; steps in an evaluation do not count.

    Once the program reports its steps, optimizer steps outside of `run` count no longer.

    Not collective; equal on all ranks that make equal steps and calls.

    Args:
        flags: counts the steps of optimizers.
        base: steps of earlier attempts.
    """

    def __init__(self, flags: StepFlags, base: int) -> None:
        self._flags = flags
        self._counted = base
        self._n_at_begin = flags.n_steps
        self._seen = flags.n_steps
        self._is_inside = False
        self._is_evaluating = False
        self._is_reported = False

    @property
    def value(self) -> int:
        """Steps so far, earlier attempts included."""
        if self._is_inside or self._is_reported:
            return self._counted
        return self._counted + self._flags.n_steps - self._seen

    @property
    def has_optimizer_steps(self) -> bool:
        """Whether an optimizer has stepped in this attempt."""
        return self._flags.n_steps > self._n_at_begin

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as one step; if it raises, only if the optimizer has stepped in it."""
        if self._is_evaluating:
            yield
            return
        with self._inside():
            n_before = self._flags.n_steps
            is_whole = False
            try:
                yield
                is_whole = True
            finally:
                self._counted += int(is_whole or self._flags.n_steps > n_before)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Count nothing that happens in the block."""
        was_evaluating = self._is_evaluating
        self._is_evaluating = True
        try:
            with self._inside():
                yield
        finally:
            self._is_evaluating = was_evaluating

    @contextmanager
    def _inside(self) -> Iterator[None]:
        was_inside = self._is_inside
        self._counted = self.value
        self._is_inside = True
        try:
            yield
        finally:
            self._seen = self._flags.n_steps
            self._is_inside = was_inside

    def count_reported(self, saved: int) -> None:
        """Count a step that the program reports, unless it does so in an evaluation.

        Args:
            saved: step of the last save. The count never falls below it: a save before the first report was numbered
                by optimizer steps, which may be more.
        """
        if self._is_evaluating:
            return
        self._counted = max(self._counted + 1, saved)
        self._seen = self._flags.n_steps
        self._is_reported = True


class LastStepValues:
    """Tells whether parameters have changed since the last step, as when a program loads its best weights.

    Args:
        parameters: the parameters that are looked at.
        n_steps: number of steps so far.
    """

    def __init__(self, parameters: Sequence[Any], n_steps: int) -> None:
        self._parameters = parameters
        self._n_steps = n_steps
        self._versions: list[int] = []

    def note(self) -> None:
        """Note the parameters, which a step has just changed."""
        self._versions = self._versions_now()

    def note_after(self, n_steps: int) -> None:
        """Note the parameters if steps were made since the last call.

        Args:
            n_steps: number of steps so far.
        """
        if n_steps != self._n_steps:
            self._n_steps = n_steps
            self.note()

    def have_changed(self) -> bool:
        """Return whether parameters have changed since the last note."""
        return self._versions_now() != self._versions

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
