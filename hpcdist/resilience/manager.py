"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; the disk is the chief's."""

import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import Place
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tier import Tier
from hpcdist.errors import CheckpointError, DesyncError, UsageError
from hpcdist.resilience.at_exit import finish_at_exit
from hpcdist.resilience.checkpoint import Checkpoint
from hpcdist.resilience.circumstances import describe, warn_of_changes
from hpcdist.resilience.desync import digest_of, require_equal
from hpcdist.resilience.fast_tier import FastTier
from hpcdist.resilience.history import History
from hpcdist.resilience.newest import NewestState
from hpcdist.resilience.progress import DiskProgress


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
        saved_step: the step of that; before, the step that the Checkpoint was at. Other managers may save it too.
        saved_at: when that was, by `time.monotonic`.
        last_save_s: how long the save before the last took on the chief, until it was read back; None elsewhere.

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
        self._tier = Tier(CheckpointFolder(directory), Retention(max_to_keep, keep_every_n_hours, keep_best, best_mode))
        self._is_writer = self._world.is_chief
        self._progress = DiskProgress(self._world, self._tier)
        self._history = History(self._tier.folder)
        self._is_in_memory = False
        self.latest_path: str | None = None
        self.last_save_s: float | None = None
        self._collect_s = 0.0
        self.note_saved(checkpoint.step)
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._tier.folder.begin()
                self._history.count()
                self.check_current()
                checkpoint.claim_files()
        self._memory = None if fast_directory is None else self._begin_fast_tier(fast_directory)
        finish_at_exit(self, self._progress)

    def _begin_fast_tier(self, directory: str | os.PathLike[str]) -> FastTier | None:
        """Return the copies of this node on its first rank, None on others."""
        if self._world.task.type not in ("chief", "worker"):  # an evaluator only reads
            return None
        run_id = ""
        with self._world.agreed(self._comm):
            if self._is_writer:
                run_id = self._tier.folder.run_id()
        run_id, generation = self._world.broadcast_text(f"{run_id} {self.generation}", 0, self._comm).split()
        return FastTier(directory, run_id, int(generation)) if self._world.node_comm.rank == 0 else None

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return str(self._tier.folder.path)

    @property
    def generation(self) -> int:
        """The number of this attempt: known to the chief."""
        return self._tier.folder.generation

    @property
    def fruitless_attempts(self) -> int:
        """How many attempts in a row, this one included, have not come further than they were: known to the chief.

        An attempt has come further when a checkpoint of a later step than it went on from is durable and was read back,
        or when the next one went on from a later step: from a copy in memory.

        Attempts before this one count if they used `begin_attempt`, and did not come to `end_attempt`.
        """
        return self._history.n_fruitless(self._tier.verified_step)

    @property
    def is_saving(self) -> bool:
        """Whether a save is not durable and read back yet: known to the chief."""
        return self._is_writer and self._tier.is_busy(0)

    # -- save -----------------------------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None, *, blocking: bool = True) -> str:
        """Commit the state after `step` optimizer steps and return the file's path on every rank.

        Collective: chief and workers. The chief copies the state; a thread writes it. The next save, `wait` and the
        end of the program wait for that thread. What is older is pruned after the file was read back.

        Args:
            step: optimizer steps taken; not before the last one in the folder.
            metrics: numbers that are stored in the manifest, on the chief; see `keep_best`. Without them, a step that
                is saved again keeps those that it has.
            blocking: whether to return when the file is durable; else as soon as the state was copied.

        Raises:
            CheckpointError: when this save or the one before cannot be written, on every rank alike; earlier
                checkpoints are untouched.

        Cost: one copy of the arrays on the chief, and with `blocking` the time of writing them.
        """
        step = operator.index(step)
        if not 0 <= step < 1 << 63:
            raise UsageError(f"save: expected a step from 0 to 2**63 - 1, got {step}; count optimizer steps.")
        return self._save(step, metrics, blocking, is_changed=True)

    def save_if_changed(self, step: int) -> str:
        """Save as `save`, unless the chief's state is what was saved or restored last.

        A checkpoint of the same step is replaced, and keeps its metrics.

        Collective: chief and workers.

        Raises:
            CheckpointError: as `save`.

        Cost: one copy of the arrays on the chief, a look at each byte of it, and where it has changed that of `save`.
        """
        return self._save(step, None, blocking=True, is_changed=False)

    def _save(self, step: int, metrics: Mapping[str, float] | None, blocking: bool, is_changed: bool) -> str:
        self.wait()
        self._measure_last()
        started = time.monotonic()
        path, gathered = "", self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._history.note_save(step)
                state = self.checkpoint.collect(gathered)
                self._collect_s = time.monotonic() - started
                path = str(self._tier.save(step, *state, self._written(), metrics, is_changed) or self.latest_path)
        if blocking:
            self._progress.wait_for(self._tier.is_committing, self._tier.finish_commit)
        self.latest_path = self._world.broadcast_text(path, 0, self._comm)
        self.note_saved(step)
        return self.latest_path

    def note_saved(self, step: int) -> None:
        """Take note that a step is safe: of a save here, or by somebody else in this manager's place. On all ranks."""
        self.checkpoint.step = self.saved_step = step
        self.saved_at = time.monotonic()

    def _measure_last(self) -> None:
        if self._tier.last_save_s is not None:
            self.last_save_s = self._collect_s + self._tier.last_save_s

    def save_fast(self, step: int) -> None:
        """Copy the state after `step` optimizer steps to the memory of every node; see `fast_directory`.

        What is saved must be equal on all ranks, as models, optimizers, distributed datasets and metrics are. Where a
        copy cannot be made, the log says so, and the node does without.

        Collective: chief and workers.

        Raises:
            CheckpointError: when the records of a MetricsFile cannot be made durable, on every rank alike.

        Cost: one copy of the arrays on the first rank of each node; no disk, but for new records of a MetricsFile.
        """
        gathered = self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._memory is not None and (self._memory.is_kept or self._is_writer):  # it makes metrics durable
                self._memory.save(step, *self.checkpoint.collect(gathered), self._written())

    def wait(self) -> None:
        """Return when the last save is durable and was read back.

        Collective: chief and workers.

        Raises:
            CheckpointError: when it cannot be written, on every rank alike.
        """
        self._progress.wait_for(self._tier.is_busy, self._tier.finish)
        if self._memory is not None:
            self._memory.finish()

    def check_equal(self) -> None:
        """Raise unless all ranks hold the same models and optimizers, bit for bit.

        Checkpoints are left as they are; copies in memory are removed.

        Collective: chief and workers.

        Raises:
            DesyncError: on every rank alike, naming those that differ; exit code 76, "do not requeue".

        Cost: every rank reads its models and optimizers once; two all-reduces of 8 bytes.
        """
        try:
            require_equal(digest_of(*self.checkpoint.collect_equal()), self._world)
        except DesyncError:
            self.forget_copies()  # made since ranks were last compared, maybe by one that is wrong
            raise

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None when there is none.

        Collective: chief and workers. The chief reads and broadcasts: others do not touch the folder.

        Raises:
            CheckpointError: when no checkpoint verifies, or it is of another model or a newer format; on every rank
            alike.
        """
        return self._restore(set(), lambda place: None)

    def note_start(self) -> None:
        """Let this attempt count as one that died, until it has a checkpoint or comes to an end of its own.

        Not collective: for the chief, before `begin_attempt`: restoring may be what kills it.

        Raises:
            CheckpointError: when it cannot be noted.
        """
        self._history.note_start()

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
                suspects = self._history.suspects()
        text = self._world.broadcast_text(" ".join(map(str, suspects)), 0, self._comm)
        try:
            path = self._restore({int(step) for step in text.split()}, self._history.note_place)
        except CheckpointError:  # it has not died of what it read: that is no suspect
            with self._world.agreed(self._comm):
                if self._is_writer:
                    self.note_start()
            raise
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._history.count()
        if self._is_in_memory:  # to the disk, before its copies may go
            self.save(self.checkpoint.step, blocking=False)
        return path

    def check_current(self) -> None:
        """Raise AttemptReplaced if a later attempt of this run has begun. Not collective: for the chief."""
        self._tier.folder.check_current()

    def end_attempt(self) -> None:
        """Note that this attempt comes to an end of its own: it finished, or was asked to stop.

        Collective: chief and workers.

        Raises:
            CheckpointError: when it cannot be noted, or the last save cannot be written; on every rank alike.
        """
        self.wait()
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._history.note_end()
        self.forget_copies()

    def note_end(self) -> None:
        """Note as `end_attempt`, on a chief that is leaving, whose last save is written. Not collective.

        Raises:
            CheckpointError: when it cannot be noted.
        """
        self._history.note_end()

    def forget_copies(self) -> None:
        """Remove the copies in the memory of this node, if this rank keeps them: they are needed no more."""
        if self._memory is not None:
            self._memory.remove()

    def _restore(self, suspects: set[int], note: Callable[[Place | None], None]) -> str | None:
        self.wait()
        newest = NewestState(self._world, self._tier, self._progress, self._memory)
        found, place, root = newest.find(suspects, note)
        self._is_in_memory = newest.is_in_memory
        with self._world.agreed(self._comm):
            if self._is_writer and (place is None or newest.is_in_memory):
                note(place)
        if place is None:
            self.note_saved(self.checkpoint.step)
            return None
        state, arrays = newest.broadcast(found, root)
        path = self._world.broadcast_text(str(found.path) if found else "", root, self._comm)
        with self._world.agreed(self._comm):
            self.checkpoint.apply(state, arrays, os.path.basename(path))
            if self._is_writer:
                self._tier.folder.go_on_from(place)
                self._tier.last = found.manifest if found else None
        if self._memory is not None:
            self._memory.go_on_from(place)
        if found:
            warn_of_changes(found.manifest.written, self._written())
        self._history.restored(place)
        self.latest_path = path
        self.note_saved(place.step)
        return path

    def _written(self) -> dict[str, Any]:
        return describe(self._world, self.checkpoint.describe_sums())
