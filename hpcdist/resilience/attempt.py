"""One attempt of a job, as the run folder tells of it: what to do if it dies, and what became of it."""

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
    """Writes decisions at the turns of an attempt. The chief decides and writes.

    Collective: chief and workers, at every method but `gave_up` and `left`.

    Args:
        world: who they are.
        manager: of the checkpoints; the run folder is the parent of its folder.
        is_counted: whether an attempt without a newer checkpoint of the manager came no further. Where somebody else
            saves, nobody can know: the verdict is "requeue" then, until the program finishes.

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
        """Write down what shall happen if the attempt dies before its first checkpoint.

        Raises:
            NoProgressError: when attempts before it died again and again; on every rank alike.
            CheckpointError: when it cannot be written; on every rank alike.
        """
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self._begin()

    def renew(self) -> None:
        """Write it down again, now that it is known what the attempt goes on from. Raises as `begin`."""
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                self._decide()

    def _begin(self) -> None:
        earlier = self._file.read()
        self._step, self._n_idle = (earlier or {}).get("step"), (earlier or {}).get("idle_stops", 0)
        self._has_earlier = earlier is not None
        if at_start(self._n_fruitless, self._has_earlier).exit_code is None:
            self._manager.note_start()  # before "requeue" is written: who dies right after it counts
        self._decide()

    @property
    def _n_fruitless(self) -> int:
        return self._manager.fruitless_attempts if self._is_counted else 0

    def _decide(self) -> None:
        decision = at_start(self._n_fruitless, self._has_earlier)
        self._write(decision)
        if decision.exit_code is not None:
            raise NoProgressError(
                f"PreemptionCheckpointHandler: expected attempts that come further, got {decision.reason} without a "
                f"newer checkpoint; see to what ends them, then remove {self._file.path} to try again."
            )

    def committed(self, step: int) -> None:
        """Note the first checkpoint of this attempt.

        Raises:
            CheckpointError: when it cannot be written; on every rank alike.
        """
        self._manager.wait()
        self._note(at_first_commit(), step)

    def stopped(self, reason: str, step: int) -> tuple[ExitCode, str]:
        """Note that the attempt was asked to stop, and return the exit code for all ranks, and why it is that.

        Raises:
            CheckpointError: when it cannot be written, or the last save could not; on every rank alike.
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
        """Note that the program came to its end.

        Raises:
            CheckpointError: as `stopped`.
        """
        self._manager.end_attempt()
        self._note(at_end(), step)

    def gave_up(self, error: DesyncError) -> None:
        """Note that ranks differ: nobody shall run it again before a person has looked.

        Not collective: ranks that differ may not be at the same place. Where it cannot be written the log says so.
        """
        if self._world.is_chief:
            try:
                self._write(at_desync(str(error)))
            except CheckpointError as unwritten:
                logger.warning("%s", unwritten)

    def left(self, step: int) -> None:
        """Note that the program came to its end, on a rank that is leaving; nothing if another attempt has begun.

        Copies in memory are removed. Not collective.

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
            job=job_id(read_environment()),  # whose word it is, should two jobs have one folder
        )
