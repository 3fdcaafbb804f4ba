"""RunRecord: ends an attempt in the ledger, and writes `decision.json` from it."""

import logging

from hpcdist.checkpoint.store import Store
from hpcdist.errors import (
    AttemptReplaced,
    CheckpointError,
    log,
)
from hpcdist.forks import make_lock
from hpcdist.run.decision import (
    Decision,
    DecisionFile,
    decide,
    without_progress,
)
from hpcdist.run.ledger import PROGRAM_HAS_FINISHED, Ledger

logger = logging.getLogger("hpcdist")


class RunRecord:
    """Ends an attempt in its ledger, and writes `decision.json` from that. Chief only.

    It holds no model, buffer or thread.

    Args:
        store: the folder of the checkpoints, with this attempt's number once it has begun.
        is_counted: whether attempts without progress end the run.
        job: id of the batch job; None outside of one.

    Attributes:
        file: decision.json, in the folder above.
    """

    def __init__(self, store: Store, is_counted: bool, job: str | None) -> None:
        self._store = store
        self._ledger = Ledger(store)
        self._is_counted = is_counted
        self._job = job
        self._writing = make_lock()  # the saver's thread writes too
        self.file = DecisionFile(store.path.parent)

    def end(self, how: str, reason: str) -> None:
        """Record how the attempt ends; see `Ledger.end`."""
        self._ledger.end(how, reason)

    def write(self, step: int | None) -> Decision:
        """Write the decision that follows from the ledger, and return it.

        Args:
            step: step of the last checkpoint; None for the last step that an attempt is known to have reached.

        Raises:
            AttemptReplaced: if a later attempt has begun.
            CheckpointError: if it cannot be written.
        """
        with self._writing:
            self._store.check_current(has_time=True)
            attempts = self._ledger.attempts()
            decision = decide(attempts, self._is_counted)
            if step is None and attempts[-1].reached_step >= 0:
                step = attempts[-1].reached_step
            facts = {
                "attempt": self._store.attempt,
                "attempts_without_progress": len(without_progress(attempts)),
                "job": self._job,
            }
            self.file.write(decision, step, **facts)
            return decision

    def finish(self, step: int) -> None:
        """Record that the run is finished, unless a later attempt has begun. A failure is logged.

        Args:
            step: step of the last checkpoint.
        """
        try:
            self.end("finished", PROGRAM_HAS_FINISHED)
            self.write(step)
        except AttemptReplaced:
            return  # the later attempt writes the decision
        except CheckpointError as error:
            log(str(error))

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints, of a run that is not to be resumed. A failed removal is logged."""
        self._store.remove_all()
