"""What the run folder tells of attempts: how many in a row came no further, and what they went on from."""

import contextlib
import logging

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import RESTORING, Place, crashed_twice
from hpcdist.errors import CheckpointError

logger = logging.getLogger("hpcdist")


class History:
    """Counts attempts that came no further, and notes this one among them until it has come to an end of its own.

    Not collective: its methods are for the chief. Elsewhere it only knows what this attempt has restored.

    Args:
        folder: of the checkpoints.

    Raises of all methods:
        CheckpointError: when the folder cannot be read or written.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._restored: Place | None = None
        self._is_noted = self._has_trained = False
        self._n_before = 0
        self._suspects: set[int] = set()

    @property
    def first_step(self) -> int:
        """The step that this attempt goes on from; -1 for a new run, and before it has restored."""
        return -1 if self._restored is None else self._restored.step

    def n_fruitless(self, last_step: int) -> int:
        """Return how many attempts in a row, this one included, came no further; its last durable step is given."""
        return 0 if last_step > self.first_step else self._n_before + 1

    def count(self) -> None:
        """Count those before this one: again when it has restored, as what it found tells whether they came further.

        The log then names the suspects that were stepped over.
        """
        self._n_before = len(self._folder.fruitless_attempts(self.first_step))
        for step in self._suspects:
            if step > self.first_step:
                logger.warning("restore: step %d was stepped over: two attempts died after it, before another", step)

    def suspects(self) -> set[int]:
        """Return the steps that two attempts in a row went on from, only to die before they had another."""
        self._suspects = crashed_twice(self._folder.fruitless_attempts())
        return self._suspects

    def restored(self, place: Place) -> None:
        """Remember what this attempt goes on from. On all ranks."""
        self._restored = place

    def note_start(self) -> None:
        """Let this attempt count as one that died, though it has not read anything yet."""
        self._folder.note_attempt(RESTORING)

    def note_place(self, place: Place | None) -> None:
        """Note what this attempt goes on from, before that is read and loaded, which may kill it."""
        self._folder.note_attempt(_name(place))
        self._is_noted = True

    def note_save(self, step: int) -> None:
        """Note before the first save of a step later than what this attempt went on from that it has come so far.

        Where a disk is so full that this cannot be noted, the save itself tells.
        """
        if self._is_noted and not self._has_trained and step > self.first_step:
            self._has_trained = True
            with contextlib.suppress(CheckpointError):
                self._folder.note_attempt(_name(self._restored), has_trained=True)

    def note_end(self) -> None:
        """Note that this attempt comes to an end of its own."""
        self._folder.note_attempt(_name(self._restored), has_ended=True)


def _name(place: Place | None) -> str | None:
    return None if place is None else str(place)
