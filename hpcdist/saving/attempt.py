"""One attempt of a job: it keeps `decision.json` true, so that the launcher knows what to do however it ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.cluster.environment import launcher_of, read_environment, run_note
from hpcdist.errors import (
    CheckpointError,
    CheckpointMismatch,
    DesyncError,
    ExitCode,
    NoProgressError,
)
from hpcdist.run.decision import (
    Decision,
    decide,
    has_progress,
    without_progress,
)
from hpcdist.run.ledger import Launch
from hpcdist.run.record import RunRecord
from hpcdist.run.side_errors import SideErrors
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World
from hpcdist.saving.manager import CheckpointManager

logger = logging.getLogger("hpcdist")


class RunAttempt:
    """Records in the ledger how the attempt ends, and writes the decision that follows to `decision.json`.

    The chief decides and writes. All methods but `refused`, `record_desync`, `record_stop` and `record_end` are
    collective: chief and workers.

    Args:
        world: the ranks of the job.
        manager: writes the checkpoints; the run folder is the parent of its folder.
        knows_progress: whether an attempt without a newer checkpoint of this manager made no progress. If the user's
            own function saves, progress is unknown: the verdict stays "requeue" until the program finishes.

    Attributes:
        folder: the run folder.
        record: decision.json.
        has_progress: whether the attempt is known to have made progress, or it does not matter; equal on all ranks.
    """

    def __init__(
        self, world: World, manager: CheckpointManager, knows_progress: bool = True
    ) -> None:
        self._world = world
        self._manager = manager
        self.folder = Path(manager.directory).parent
        self._launch = Launch.of_this_process()
        self._is_counted = knows_progress and self._launch.job is not None
        self.record = RunRecord(manager.store, self._is_counted, self._launch.job)
        self._warns = knows_progress and not self._is_counted
        self.has_progress = not knows_progress
        self._file_errors: dict[Path, SideErrors] = {}

    def begin(self) -> None:
        """Begin the attempt, and write the decision that applies if it dies before its first checkpoint.

        Raises:
            NoProgressError: after too many attempts without progress; on all ranks. No attempt begins then.
            CheckpointError: if the folder cannot be written; on all ranks.
        """
        is_new_try = False
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                is_new_try = not self.record.file.is_there()
                if not is_new_try:
                    self._manager.ledger.refresh()
                    self._require_progress()
        self._manager.begin_attempt(self._any(is_new_try))
        self.renew()
        if self._world.is_chief:
            self._name_folder()
        self._manager.call_after_commit(self._note_commit)

    def _name_folder(self) -> None:
        """Name the run folder to `hpcdist run`, which reads the decision there. It cannot be told on another host.

        A program that a rank has started, and that trains alone, names none.
        """
        environ = read_environment()
        note = run_note(environ)
        if note is not None and launcher_of(environ) is not None:
            with suppress(OSError, UnicodeError):
                durable.replace_text(Disk(), note, str(self.folder))

    def _require_progress(self) -> None:
        attempts = self._manager.ledger.attempts()
        if not self._manager.is_attempt_in_progress:
            attempts.append(self._launch.attempt(0))  # this one, as it would begin
        decision = decide(attempts, self._is_counted)
        if decision.exit_code is not None:
            # an earlier restore has begun this attempt, which must not count
            if self._manager.is_attempt_in_progress:
                self._manager.ledger.end("refused", decision.reason)
            raise NoProgressError(
                f"PreemptionCheckpointHandler: expected attempts that make progress, got {decision.reason}; fix what "
                f"ends them, then remove {self.record.file.path} to try again."
            )
        n_earlier = len(without_progress(attempts)) - 1
        if self._warns and n_earlier >= 3:
            logger.warning(
                "%d attempts in a row made no progress: as a batch job this one would not start, unless you remove %s.",
                n_earlier,
                self.record.file.path,
            )

    def renew(self) -> None:
        """Write the decision again, as the restore may have changed it.

        Raises:
            CheckpointError: if it cannot be written; on all ranks.
        """
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self.record.write(None)

    def refused(self, error: CheckpointError) -> None:
        """Note that this attempt failed to restore, or that its checkpoint is of another program.

        Not collective; a failed write is logged, as the error is about to be raised.
        """
        if self._world.is_chief and self._manager.attempt:
            how = "refused" if isinstance(error, CheckpointMismatch) else "failed"
            with self._logging_failures():
                self._manager.ledger.end(how, str(error))
        self._manager.give_up_attempt()

    def committed(self, step: int) -> None:
        """Write the decision again, once a checkpoint is durable and was read back: it may be progress.

        Raises:
            CheckpointError: if it cannot be written; on all ranks.
        """
        self._manager.wait()
        is_reached = False
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self.record.write(step)
                is_reached = has_progress(self._manager.ledger.attempts()[-1])
        self.has_progress = self._any(is_reached) or self.has_progress

    def _note_commit(self, step: int) -> None:
        """Write the decision again after a commit, and the errors of metrics files."""
        self.record.write(step)
        for file in self._manager.checkpoint.files():
            if file.path not in self._file_errors:
                self._file_errors[file.path] = SideErrors(self.folder, file.path.stem)
            self._file_errors[file.path].update(file.retries)

    def _any(self, is_true: bool) -> bool:
        """Return whether something holds on any rank. Collective over chief and workers."""
        return self._world.all_reduce_int(int(is_true), MPI.MAX, self._world.role_comm) > 0

    def stopped(
        self, request: StopRequest, step: int, is_excused: bool, is_late: bool
    ) -> tuple[ExitCode, str]:
        """Record that the attempt was asked to stop; return the exit code for all ranks, and its reason.

        Args:
            request: the request, equal on all ranks.
            step: step of the last checkpoint.
            is_excused: whether the batch system asked, and chose the time, as in a preemption.
            is_late: whether there is no time left for a save.

        Raises:
            CheckpointError: if the decision or the last save cannot be written; on all ranks.
        """
        is_excused = is_excused and self._launch.job is not None
        decision = self._end(step, request, is_excused, is_late)
        code = ExitCode.RUN_AGAIN
        reason = request.reason
        if decision is not None:  # on the chief
            code = code if decision.exit_code is None else decision.exit_code
            reason = decision.reason
        text = f"{code.value} {reason}"
        text = self._world.broadcast_text(text, 0, self._world.role_comm)
        number, _, agreed_reason = text.partition(" ")
        return ExitCode(int(number)), agreed_reason

    def finished(self, step: int) -> None:
        """Record that the program has finished.

        Raises:
            CheckpointError: if the decision or the last save cannot be written; on all ranks.
        """
        self._end(step)

    def _end(
        self,
        step: int,
        request: StopRequest | None = None,
        is_excused: bool = False,
        is_late: bool = False,
    ) -> Decision | None:
        """Record how the attempt ends; return the decision that follows on the chief, None elsewhere."""
        self._manager.end_attempt(request, is_excused, is_late)
        decision = None
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                decision = self.record.write(step)
        return decision

    def record_desync(self, error: DesyncError) -> None:
        """Record that ranks differ: the job must not be requeued before a person has looked at it.

        Not collective: diverged ranks may be at different points of the program. A failed write is logged.
        """
        if self._world.is_chief:
            with self._logging_failures():
                self._manager.ledger.end("diverged", str(error))

    def record_stop(self, request: StopRequest) -> None:
        """Record that the attempt was asked to stop, and did so without a save. Not collective. Failures are logged."""
        if self._world.is_chief:
            is_excused = request.may_be_preemption and self._launch.job is not None
            with self._logging_failures():
                self._manager.ledger.end_stopped(request, is_excused)

    @contextmanager
    def _logging_failures(self) -> Iterator[None]:
        """Write the decision that follows from what the block writes to the ledger; log a failure of either."""
        try:
            yield
            self.record.write(None)
        except CheckpointError as unwritten:
            logger.warning("%s", unwritten)

    def record_end(self, step: int) -> None:
        """Record, while this rank exits, that the program has finished, unless a later attempt has begun.

        Removes copies in memory. Not collective. A failure is logged.
        """
        self._manager.forget_copies()
        if self._world.is_chief:
            self.record.finish(step)
