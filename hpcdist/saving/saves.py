"""The saves of one attempt: the scheduled ones, copies and comparisons between them, and the last one."""

import logging
import time
from collections.abc import Callable
from typing import Any

from hpcdist.errors import CheckpointError
from hpcdist.saving.attempt import RunAttempt
from hpcdist.saving.durations import Durations
from hpcdist.saving.manager import CheckpointManager
from hpcdist.saving.schedule import SaveSchedule, is_crossed

logger = logging.getLogger("hpcdist")


class AttemptSaves:
    """Follows a schedule after each step, and measures the cost of saves.

    Args:
        manager: saves and copies.
        attempt: records the first checkpoint.
        schedule: when to save, copy and compare.
        save_fn: the user's function that saves in place of the manager; None if the manager saves.
        clock: seconds in which the job runs.

    Attributes:
        times: durations of saves, read-back included: the first save on all ranks, every save on the chief.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        attempt: RunAttempt,
        schedule: SaveSchedule,
        save_fn: Callable[..., Any] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._attempt = attempt
        self._schedule = schedule
        self._save_fn = save_fn
        self._clock = clock
        self.times = Durations()
        self._stalls = Durations()
        self._has_saved = False
        self._is_noted = False
        self._n_checks = 0
        self._compared_at: int | None = None
        self._is_restored = False
        self._checked_at = 0
        self._began_at = manager.saved_step

    def begin(self, step: int, is_restored: bool) -> None:
        """Start the schedule at a step, before the first save.

        Args:
            step: steps so far.
            is_restored: whether a checkpoint holds this step.
        """
        self._is_restored = is_restored
        self._checked_at = step
        self._began_at = self._manager.saved_step

    def is_late(self, step: int) -> bool:
        """Return whether a save is due by time, by the clock of this process."""
        cost_s = self._stalls.median if self._stalls.is_measured else None
        interval_s = self._schedule.interval_s(cost_s)
        waited_s = time.monotonic() - self._manager.saved_at
        return step > self._manager.saved_step and interval_s is not None and waited_s >= interval_s

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by the number of steps. Equal on all ranks."""
        return is_crossed(self._schedule.every_steps, step, self._manager.saved_step)

    def n_at_end(self, step: int) -> int:
        """Return how many saves a stop after this step takes: 2 if a due or running save precedes the last one."""
        if self.is_late(step) or self.is_due(step + 1) or self._manager.is_saving:
            return 2
        return 1

    def check(self, step: int) -> bool:
        """Compare the ranks, if due; return whether a copy in memory is due. The first call takes the memory of saves.

        Collective over chief and workers if due. The result is equal on all ranks.

        Raises:
            DesyncError: if ranks differ; on all ranks.
            CheckpointError: if memory is insufficient; on all ranks.
        """
        last = self._checked_at
        self._checked_at = step
        self._n_checks += 1
        if self._n_checks == 1 and self._save_fn is None:
            self._manager.reserve()
        elif self._n_checks == 2 and self._save_fn is None:
            self._manager.require_model_copies()
        if is_crossed(self._schedule.compare_every_steps, step, last):
            self._compare(step)
        return is_crossed(self._schedule.in_memory_every_steps, step, last)

    def copy(self, step: int) -> None:
        """Copy the state to the memory of every node. Collective over chief and workers."""
        self._manager.save_fast(step)

    def note_saved(self) -> None:
        """Record the attempt's first checkpoint if the program itself saved it.

        Collective over chief and workers if there is one.

        Raises:
            CheckpointError: if the decision cannot be written, on all ranks.
        """
        if self._has_saved or self._is_noted or self._save_fn is not None:
            return
        if self._manager.saved_step > self._began_at:
            self._attempt.committed(self._manager.saved_step)
            self._is_noted = True

    def _compare(self, step: int) -> None:
        if step != self._compared_at:
            self._manager.check_equal()
            self._compared_at = step

    def _compare_before_save(self, step: int) -> None:
        """Compare the ranks before the user's function saves, if the schedule compares: the manager always does."""
        if self._save_fn is not None and self._schedule.compare_every_steps is not None:
            self._compare(step)

    def _is_saved(self, step: int) -> bool:
        return step == self._manager.saved_step and (self._has_saved or self._is_restored)

    def end(self, step: int) -> None:
        """Save at the program's end, even a saved step if its state has changed since, as by records of metrics.

        Collective over chief and workers. Raises the errors of `save`.
        """
        self._compared_at = None  # code after the last step may have made ranks differ
        if not self._is_saved(step):
            self.save(step, is_last=True)
        elif self._save_fn is None:
            self._manager.save(step, if_changed=True, check_interval=False)

    def try_to_save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Begin a last save for which the time may be too short, and do not wait for it; return whether it has begun.

        The program's exit waits, as long as the batch system lets it. The user's function is not called: it may leave
        a part of a file in place of its last file. An error is logged: the last save counts.

        Collective over chief and workers.

        Args:
            step: steps so far.
            args: positional arguments for `manager.save`, after the step.
            kwargs: keyword arguments for `manager.save`.

        Raises:
            DesyncError: if ranks differ; on all ranks.
        """
        if self._save_fn is not None:
            return False
        options = {
            "blocking": False,
            "check_interval": False,
            "if_changed": self._is_saved(step),
            **kwargs,
        }
        try:
            self._manager.save(step, *args, **options)
        except CheckpointError as error:
            logger.warning("the last save failed: %s", error)
            return False
        return True

    def save(
        self, step: int, *args: Any, is_last: bool, in_memory: bool = False, **kwargs: Any
    ) -> None:
        """Save, unless this step is saved. The first save waits for the disk, to measure the cost of a save.

        If the schedule compares ranks, they are also compared before each call of the user's function.

        Collective over chief and workers.

        Args:
            step: steps so far.
            args: positional arguments for `save_fn`, or for `manager.save`, after the step.
            is_last: whether the program stops or ends after it: it waits for the disk then, too.
            in_memory: whether a copy in memory is due as well.
            kwargs: keyword arguments for `save_fn` or `manager.save`.

        Raises:
            CheckpointError: if the checkpoint cannot be written, on all ranks.
            DesyncError: if ranks differ; on all ranks.
        """
        if self._is_saved(step):
            # state may have changed between two steps, as in a validation
            if is_last and self._save_fn is None:
                self._manager.save(step, if_changed=True, check_interval=False)
            return
        started = self._clock()
        is_first = not self._has_saved
        self._compare_before_save(step)
        compare_s = self._clock() - started
        if self._save_fn is not None:
            self._save_fn(*args, **kwargs)
            self._manager.note_saved(step)
            if in_memory:
                self.copy(step)
        else:
            options = {
                "blocking": is_last or is_first,
                "in_memory": in_memory,
                "check_interval": False,
                **kwargs,
            }
            self._manager.save(step, *args, **options)
        self._has_saved = True
        stall_s = self._clock() - started
        if is_first or not self._attempt.has_progress:
            self._attempt.committed(step)
        if is_first:
            self.times.add(self._clock() - started)  # `committed` has waited for the read-back
        elif self._save_fn is not None:
            self.times.add(stall_s)
        elif self._manager.last_save_s is not None:  # of the last save that was read back
            self.times.add(compare_s + self._manager.last_save_s)
        if not is_last:
            self._stalls.add(stall_s)
