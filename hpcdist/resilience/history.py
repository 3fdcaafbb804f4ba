"""The recorded attempts of a run: how many in a row made no progress, and what they resumed from."""

import contextlib
import logging

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import RESTORING, Place, crashed_twice
from hpcdist.errors import CheckpointError

logger = logging.getLogger("hpcdist")


class History:
    """Counts attempts without progress. This attempt counts as one of them until it ends in an orderly way.

    Not collective: chief only. On other ranks it only knows what this attempt has restored.

    Args:
        folder: the checkpoints' folder.

    All methods raise:
        CheckpointError: if the folder cannot be read or written.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._restored: Place | None = None
        self._is_noted = self._has_trained = False
        self._n_before = 0
        self._suspects: set[int] = set()

    @property
    def first_step(self) -> int:
        """The step that this attempt resumes from; -1 for a new run, and before the restore."""
        return -1 if self._restored is None else self._restored.step

    def n_fruitless(self, last_step: int) -> int:
        """Return the number of consecutive attempts without progress, this one included; 0 if it has made progress.

        Args:
            last_step: last durable step of this attempt.
        """
        return 0 if last_step > self.first_step else self._n_before + 1

    def count(self) -> None:
        """Count the earlier attempts without progress, and log the suspect steps that the restore skipped.

        Called again after the restore, as the restored step shows whether those attempts made progress.
        """
        self._n_before = len(self._folder.fruitless_attempts(self.first_step))
        for step in self._suspects:
            if step > self.first_step:
                logger.warning(
                    "restore: skipped step %d: two attempts resumed from it and died before another save", step
                )

    def suspects(self) -> set[int]:
        """Return the steps that two consecutive attempts resumed from and then died without a newer checkpoint."""
        self._suspects = crashed_twice(self._folder.fruitless_attempts())
        return self._suspects

    def restored(self, place: Place) -> None:
        """Record in this process what the attempt resumes from. On all ranks."""
        self._restored = place

    def note_start(self) -> None:
        """Count this attempt as dead before it reads anything."""
        self._folder.note_attempt(RESTORING)

    def note_place(self, place: Place | None) -> None:
        """Record what this attempt resumes from, before reading and loading it, which may kill the process."""
        self._folder.note_attempt(_name(place))
        self._is_noted = True

    def note_save(self, step: int) -> None:
        """Record, before the first save of a later step, that this attempt has trained on what it restored.

        If the disk is too full for the record, the save itself will report it.
        """
        if self._is_noted and not self._has_trained and step > self.first_step:
            self._has_trained = True
            with contextlib.suppress(CheckpointError):
                self._folder.note_attempt(_name(self._restored), has_trained=True)

    def note_end(self) -> None:
        """Record that this attempt ends in an orderly way."""
        self._folder.note_attempt(_name(self._restored), has_ended=True)


def _name(place: Place | None) -> str | None:
    return None if place is None else str(place)
