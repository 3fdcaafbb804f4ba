"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; the disk is the chief's."""

import atexit
import logging
import operator
import os
import weakref
from collections.abc import Mapping
from typing import Any

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import RESTORING, Place, crashed_twice
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tier import Tier
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.resilience.checkpoint import Checkpoint
from hpcdist.resilience.circumstances import describe, warn_of_changes
from hpcdist.resilience.desync import digest_of, require_equal
from hpcdist.resilience.fast_tier import FastTier
from hpcdist.resilience.newest import NewestState
from hpcdist.resilience.progress import DiskProgress
from hpcdist.world import end_job

logger = logging.getLogger("hpcdist")


class CheckpointManager:
    """Saves and restores a Checkpoint in one folder: written by the chief, restored on all ranks.

    Collective: chief and workers.

    Args:
        checkpoint: what is saved.
        directory: the folder; made if need be. Only the chief needs to see it. Each manager writes into a new
            generation in it, and replaces whoever wrote there before.
        max_to_keep: older checkpoints are removed after a newer one was committed and read back.
        keep_every_n_hours: of the older ones, the first, and each that is so much later than the one kept before it.
        keep_best: name of a metric given to `save`: the checkpoint with its best value is kept too.
        best_mode: "min" or "max": which value is best.
        fast_directory: on every node a folder in memory, such as /dev/shm, for the copies of `save_fast`. A restore
            takes the newest state that verifies, wherever it is.

    Attributes:
        checkpoint: see above.
        latest_path: of the last checkpoint that was saved or restored.

    Raises:
        CheckpointError: when the folder cannot be written; on every rank alike.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int = 3,
        keep_every_n_hours: float | None = None,
        *,
        keep_best: str | None = None,
        best_mode: str = "min",
        fast_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._world = checkpoint.world
        self._comm = self._world.role_comm
        self._disk = Tier(CheckpointFolder(directory), Retention(max_to_keep, keep_every_n_hours, keep_best, best_mode))
        self._is_writer = self._world.is_chief
        self._progress = DiskProgress(self._world, self._disk)
        self._n_fruitless = 0
        self._restored: Place | None = None
        self._is_in_memory = False
        self.latest_path: str | None = None
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._disk.folder.begin()
                self._n_fruitless = len(self._disk.folder.fruitless_attempts())
        self._memory = None if fast_directory is None else self._begin_fast_tier(fast_directory)
        atexit.register(_finish, weakref.ref(self), os.getpid())

    def _begin_fast_tier(self, directory: str | os.PathLike[str]) -> FastTier | None:
        """Return the copies of this node on its first rank, None on others."""
        run_id = ""
        with self._world.agreed(self._comm):
            if self._is_writer:
                run_id = self._disk.folder.run_id()
        run_id, generation = self._world.broadcast_text(f"{run_id} {self.generation}", 0, self._comm).split()
        return FastTier(directory, run_id, int(generation)) if self._world.node_comm.rank == 0 else None

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return str(self._disk.folder.path)

    @property
    def generation(self) -> int:
        """The number of this attempt: known to the chief."""
        return self._disk.folder.generation

    @property
    def fruitless_attempts(self) -> int:
        """How many attempts in a row, this one included, have not come further than they were: known to the chief.

        An attempt has come further when a checkpoint of a later step than it went on from is durable and was read back,
        or when the next one went on from a later step: from a copy in memory.

        Attempts before this one count if they used `begin_attempt`, and did not come to `end_attempt`.
        """
        return 0 if self._disk.verified_step > self._first_step else self._n_fruitless + 1

    @property
    def _first_step(self) -> int:
        return -1 if self._restored is None else self._restored.step

    @property
    def is_saving(self) -> bool:
        """Whether a save is not durable and read back yet: known to the chief."""
        return self._is_writer and self._disk.is_busy(0)

    # -- save -----------------------------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None, *, blocking: bool = True) -> str:
        """Commit the state after `step` optimizer steps and return the file's path on every rank.

        Collective: chief and workers. The chief copies the state; a thread writes it. The next save, `wait` and the
        end of the program wait for that thread. What is older is pruned after the file was read back.

        Args:
            step: optimizer steps taken; not before the last one in the folder.
            metrics: numbers that are stored in the manifest, on the chief; see `keep_best`.
            blocking: whether to return when the file is durable; else as soon as the state was copied.

        Raises:
            CheckpointError: when this save or the one before cannot be written, on every rank alike; earlier
                checkpoints are untouched.

        Cost: one copy of the arrays on the chief, and with `blocking` the time of writing them.
        """
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"save: expected a step of at least 0, got {step}; count optimizer steps.")
        self.wait()
        path, gathered = "", self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._is_writer:
                state = self.checkpoint.collect(gathered)
                path = str(self._disk.save(step, *state, self._written(), metrics or {}))
        if blocking:
            self._progress.wait_for(self._disk.is_committing, self._disk.finish_commit)
        self.checkpoint.step = step
        self.latest_path = self._world.broadcast_text(path, 0, self._comm)
        return self.latest_path

    def save_fast(self, step: int) -> None:
        """Copy the state after `step` optimizer steps to the memory of every node; see `fast_directory`.

        What is saved must be equal on all ranks, as models, optimizers, distributed datasets and metrics are. Where a
        copy cannot be made, the log says so, and the node does without.

        Collective: chief and workers.

        Cost: one copy of the arrays on the first rank of each node; no disk.
        """
        gathered = self.checkpoint.gather()
        if self._memory is not None:
            self._memory.save(step, *self.checkpoint.collect(gathered), self._written())

    def wait(self) -> None:
        """Return when the last save is durable and was read back.

        Collective: chief and workers.

        Raises:
            CheckpointError: when it cannot be written, on every rank alike.
        """
        self._progress.wait_for(self._disk.is_busy, self._disk.finish)
        if self._memory is not None:
            self._memory.finish()

    def check_equal(self) -> None:
        """Raise unless all ranks hold the same models and optimizers, bit for bit. Checkpoints are left as they are.

        Collective: chief and workers.

        Raises:
            DesyncError: on every rank alike, naming those that differ; exit code 76, "do not requeue".

        Cost: every rank reads its models and optimizers once; two all-reduces of 8 bytes.
        """
        require_equal(digest_of(*self.checkpoint.collect_equal()), self._world)

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None when there is none.

        Collective: chief and workers. The chief reads and broadcasts: others do not touch the folder.

        Raises:
            CheckpointError: when no checkpoint verifies, or it is of another model or a newer format; on every rank
            alike.
        """
        return self._restore(set())

    def note_start(self) -> None:
        """Let this attempt count as one that died, until it has a checkpoint or comes to an end of its own.

        Not collective: for the chief, before `begin_attempt`: restoring may be what kills it.

        Raises:
            CheckpointError: when it cannot be noted.
        """
        self._disk.folder.note_attempt(RESTORING, has_ended=False)

    def begin_attempt(self) -> str | None:
        """Restore as `restore_or_initialize`, and note what from, so that a job that dies again and again is noticed.

        A checkpoint that two attempts in a row went on from, only to die before they had another, is stepped over.

        Collective: chief and workers.

        Raises:
            CheckpointError: as `restore_or_initialize`.
        """
        suspects: set[int] = set()
        with self._world.agreed(self._comm):
            if self._is_writer:
                suspects = crashed_twice(self._disk.folder.fruitless_attempts())
        for suspect in suspects:
            logger.warning(
                "restore: step %d is stepped over: two attempts died after it, before they had another", suspect
            )
        text = self._world.broadcast_text(" ".join(map(str, suspects)), 0, self._comm)
        path = self._restore({int(step) for step in text.split()})
        self._note_attempt(has_ended=False)
        with self._world.agreed(self._comm):
            if self._is_writer:  # again: what was restored tells whether those before had come further
                self._n_fruitless = len(self._disk.folder.fruitless_attempts(self._first_step))
        if self._is_in_memory:  # to the disk, before its copies may go
            self.save(self.checkpoint.step, blocking=False)
        return path

    def check_current(self) -> None:
        """Raise AttemptReplaced if a later attempt of this run has begun. Not collective: for the chief."""
        self._disk.folder.check_current()

    def end_attempt(self) -> None:
        """Note that this attempt comes to an end of its own: it finished, or was asked to stop.

        Collective: chief and workers.

        Raises:
            CheckpointError: when it cannot be noted, or the last save cannot be written; on every rank alike.
        """
        self.wait()
        self._note_attempt(has_ended=True)
        if self._memory is not None:
            self._memory.remove()

    def note_end(self) -> None:
        """Note as `end_attempt`, on a chief that is leaving, whose last save is written. Not collective.

        Raises:
            CheckpointError: when it cannot be noted.
        """
        self._disk.folder.note_attempt(self._restored_name, has_ended=True)

    @property
    def _restored_name(self) -> str | None:
        return None if self._restored is None else str(self._restored)

    def _note_attempt(self, has_ended: bool) -> None:
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._disk.folder.note_attempt(self._restored_name, has_ended)

    def _restore(self, suspects: set[int]) -> str | None:
        self.wait()
        newest = NewestState(self._world, self._disk.folder, self._memory)
        found, place, root = newest.find(suspects)
        self._is_in_memory = newest.is_in_memory
        if place is None:
            return None
        state, arrays = newest.broadcast(found, root)
        path = self._world.broadcast_text(str(found.path) if found else "", root, self._comm)
        with self._world.agreed(self._comm):
            self.checkpoint.apply(state, arrays, os.path.basename(path))
            if self._is_writer:
                self._disk.folder.go_on_from(place)
        if self._memory is not None:
            self._memory.go_on_from(place)
        if found:
            warn_of_changes(found.manifest.written, self._written())
        self._restored, self.checkpoint.step, self.latest_path = place, place.step, path
        return path

    def _written(self) -> dict[str, Any]:
        return describe(self._world, self.checkpoint.describe_sums())


def _finish(manager: "weakref.ref[CheckpointManager]", pid: int) -> None:
    """Let a save that is under way end before the process does."""
    alive = manager()
    if alive is None or os.getpid() != pid:  # a forked child has no such thread
        return
    try:
        alive._progress.finish_alone()
    except CheckpointError as error:  # Python would print it and leave with 0
        end_job(f"hpcdist: {error}\n", int(error.exit_code))
