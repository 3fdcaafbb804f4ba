"""One attempt of a job as recorded in the run folder: what the launcher must do next, and how the attempt ended."""

import logging
from pathlib import Path

from hpcdist.cluster.environment import job_id, read_environment
from hpcdist.errors import CheckpointError, DesyncError, ExitCode, NoProgressError
from hpcdist.resilience.decision import (
    Decision,
    DecisionFile,
    Verdict,
    at_desync,
    at_end,
    at_first_commit,
    at_start,
    at_stop,
)
from hpcdist.resilience.manager import CheckpointManager
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")


class Attempt:
    """Writes the launcher's decision when an attempt starts, commits its first checkpoint and ends.

    The chief decides and writes. All methods but `record_desync` and `record_end` are collective: chief and workers.

    Args:
        world: the ranks of the job.
        manager: writes the checkpoints; the run folder is the parent of its folder.
        is_counted: whether an attempt without a newer checkpoint of this manager made no progress. If the user's own
            function saves, progress is unknown: the verdict stays "requeue" until the program finishes.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, world: World, manager: CheckpointManager, is_counted: bool = True) -> None:
        self._world = world
        self._manager = manager
        self.folder = Path(manager.directory).parent
        self._file = DecisionFile(self.folder)
        self._is_counted = is_counted
        self._n_idle = 0
        self._has_earlier = False
        self._step: int | None = None

    def begin(self) -> None:
        """Write the decision that applies if the attempt dies before its first checkpoint.

        Raises:
            NoProgressError: after too many attempts without progress; on all ranks.
            CheckpointError: if the decision cannot be written; on all ranks.
        """
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self._begin()

    def renew(self) -> None:
        """Write the decision again after the restore, which may change the count of attempts. Raises as `begin`."""
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self._decide()

    def _begin(self) -> None:
        earlier = self._file.read()
        self._step, self._n_idle = (earlier or {}).get("step"), (earlier or {}).get("idle_stops", 0)
        self._has_earlier = earlier is not None
        if at_start(self._n_fruitless, self._has_earlier).exit_code is None:
            self._manager.note_start()  # before "requeue" is written, so that a death right after it counts
        self._decide()

    @property
    def _n_fruitless(self) -> int:
        return self._manager.fruitless_attempts if self._is_counted else 0

    def _decide(self) -> None:
        decision = at_start(self._n_fruitless, self._has_earlier)
        self._write(decision)
        if decision.exit_code is not None:
            raise NoProgressError(
                f"PreemptionCheckpointHandler: expected attempts that make progress, got {decision.reason} without a "
                f"newer checkpoint; fix what ends them, then remove {self._file.path} to try again."
            )

    def committed(self, step: int) -> None:
        """Record that this attempt has committed its first checkpoint.

        Raises:
            CheckpointError: if the decision cannot be written; on all ranks.
        """
        self._manager.wait()
        self._note(at_first_commit(), step)

    def stopped(self, reason: str, step: int) -> tuple[ExitCode, str]:
        """Record that the attempt was asked to stop; return the exit code for all ranks, and its reason.

        Raises:
            CheckpointError: if the decision or the last save cannot be written; on all ranks.
        """
        self._manager.end_attempt()
        has_newer = self._manager.fruitless_attempts == 0
        self._n_idle = 0 if has_newer or not self._is_counted else self._n_idle + 1
        decision = at_stop(reason, self._n_idle)
        self._note(decision, step)
        own = f"{(decision.exit_code or ExitCode.RUN_AGAIN).value} {decision.reason}"
        code, _, why = self._world.broadcast_text(own, 0, self._world.role_comm).partition(" ")
        return ExitCode(int(code)), why

    def finished(self, step: int) -> None:
        """Record that the program has finished.

        Raises:
            CheckpointError: as `stopped`.
        """
        self._manager.end_attempt()
        self._note(at_end(), step)

    def record_desync(self, error: DesyncError) -> None:
        """Record that ranks differ: the job must not be requeued before a person has looked at it.

        Not collective: diverged ranks may be at different points of the program. A failed write is logged.
        """
        if self._world.is_chief:
            try:
                self._write(at_desync(str(error)))
            except CheckpointError as unwritten:
                logger.warning("%s", unwritten)

    def record_end(self, step: int) -> None:
        """Record, while this rank exits, that the program has finished, unless a later attempt has begun.

        Removes copies in memory. Not collective.

        Raises:
            CheckpointError: as `stopped`.
        """
        self._manager.forget_copies()
        if self._world.is_chief and (self._file.read() or {}).get("attempt") == self._manager.generation:
            self._manager.note_end()
            self._step, self._n_idle = step, 0
            self._write(at_end())

    def _note(self, decision: Decision, step: int) -> None:
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self._step = step
                if decision.verdict is Verdict.FINISHED or self._manager.fruitless_attempts == 0:
                    self._n_idle = 0
                self._write(decision)

    def _write(self, decision: Decision) -> None:
        self._manager.check_current()
        self._file.write(
            decision,
            self._step,
            attempt=self._manager.generation,
            fruitless_attempts=self._manager.fruitless_attempts,
            idle_stops=self._n_idle,
            job=job_id(read_environment()),  # the author, in case two jobs share a folder
        )
