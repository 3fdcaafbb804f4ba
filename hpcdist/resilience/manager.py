"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; only the chief uses the disk."""

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
        checkpoint: the objects to save.
        directory: the folder; created if missing. Only the chief needs access. Each manager writes into a new
            generation in it, and so replaces earlier writers.
        max_to_keep: number of checkpoints to keep; older ones are removed once a newer one is committed and read back.
        keep_every_n_hours: of the older ones, keep the first, and each that is this much later than the one kept
            before it.
        keep_best: name of a metric passed to `save`: the checkpoint with its best value is kept too.
        best_mode: "min" or "max": which value is best.
        fast_directory: an in-memory folder on every node, such as /dev/shm, for the copies of `save_fast`. A restore
            uses the newest state that verifies, on disk or in memory.

    Attributes:
        checkpoint: see above.
        latest_path: path of the last saved or restored checkpoint.
        saved_step: its step; before the first, the step of the Checkpoint, which other managers may save too.
        saved_at: time of that save or restore, by `time.monotonic`.
        last_save_s: duration of the save before the last, read-back included, on the chief; None elsewhere.

    Raises:
        CheckpointError: if the folder cannot be written; on all ranks.
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
        """Return this node's fast tier on its first rank, None on others."""
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
        """The checkpoints' folder."""
        return str(self._tier.folder.path)

    @property
    def generation(self) -> int:
        """The number of this attempt. Valid on the chief only."""
        return self._tier.folder.generation

    @property
    def fruitless_attempts(self) -> int:
        """Number of consecutive attempts without progress, this one included. Valid on the chief only.

        An attempt has made progress if a checkpoint of a later step than it resumed from is durable and was read back,
        or if the next attempt resumed from a later step, from a copy in memory.

        Earlier attempts count if they called `begin_attempt` and did not reach `end_attempt`.
        """
        return self._history.n_fruitless(self._tier.verified_step)

    @property
    def is_saving(self) -> bool:
        """Whether a save is not yet durable and read back. Valid on the chief only."""
        return self._is_writer and self._tier.is_busy(0)

    # -- save -----------------------------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None, *, blocking: bool = True) -> str:
        """Commit the state after `step` optimizer steps and return the file's path on every rank.

        Collective: chief and workers. The chief copies the state; a background thread writes it. The next save, `wait`
        and the end of the program wait for that thread. Older checkpoints are pruned after the file was read back.

        Args:
            step: optimizer steps taken; at least the last step in the folder.
            metrics: numbers to store in the manifest, from the chief; see `keep_best`. Without them, a step that is
                saved again keeps its metrics.
            blocking: whether to return once the file is durable; otherwise return once the state is copied.

        Raises:
            CheckpointError: if this save or the previous one cannot be written, on all ranks; earlier checkpoints are
                untouched.

        Cost: one copy of the arrays on the chief; with `blocking`, also the time to write them.
        """
        step = operator.index(step)
        if not 0 <= step < 1 << 63:
            raise UsageError(f"save: expected a step from 0 to 2**63 - 1, got {step}; count optimizer steps.")
        return self._save(step, metrics, blocking, is_changed=True)

    def save_if_changed(self, step: int) -> str:
        """Save like `save`, unless the chief's state equals the last saved or restored one.

        A checkpoint of the same step is replaced and keeps its metrics.

        Collective: chief and workers.

        Raises:
            CheckpointError: as `save`.

        Cost: one copy of the arrays on the chief and one read of it; if the state has changed, also that of `save`.
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
        """Record that `step` is saved, by this manager or by a user's function in its place. On all ranks."""
        self.checkpoint.step = self.saved_step = step
        self.saved_at = time.monotonic()

    def _measure_last(self) -> None:
        if self._tier.last_save_s is not None:
            self.last_save_s = self._collect_s + self._tier.last_save_s

    def save_fast(self, step: int) -> None:
        """Copy the state after `step` optimizer steps to the memory of every node; see `fast_directory`.

        The state must be equal on all ranks, as models, optimizers, distributed datasets and metrics are. A node that
        cannot make a copy logs it and continues without.

        Collective: chief and workers.

        Raises:
            CheckpointError: if the records of a MetricsFile cannot be made durable, on all ranks.

        Cost: one copy of the arrays on the first rank of each node; no disk, except for new records of a MetricsFile.
        """
        gathered = self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._memory is not None and (
                self._memory.is_kept or self._is_writer
            ):  # the chief makes metrics durable
                self._memory.save(step, *self.checkpoint.collect(gathered), self._written())

    def wait(self) -> None:
        """Wait until the last save is durable and was read back.

        Collective: chief and workers.

        Raises:
            CheckpointError: if it cannot be written, on all ranks.
        """
        self._progress.wait_for(self._tier.is_busy, self._tier.finish)
        if self._memory is not None:
            self._memory.finish()

    def check_equal(self) -> None:
        """Raise unless all ranks hold the same models and optimizers, bit for bit.

        If they differ, checkpoints stay and copies in memory are removed.

        Collective: chief and workers.

        Raises:
            DesyncError: on all ranks, naming those that differ; exit code 76, "do not requeue".

        Cost: every rank reads its models and optimizers once; two all-reduces of 8 bytes.
        """
        try:
            require_equal(digest_of(*self.checkpoint.collect_equal()), self._world)
        except DesyncError:
            self.forget_copies()  # they are newer than the last comparison, and may be a diverged rank's
            raise

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None for an empty folder.

        Collective: chief and workers. The chief reads and broadcasts; other ranks do not access the folder.

        Raises:
            CheckpointError: if checkpoints exist but none verifies, or if the checkpoint belongs to another model or
                has a newer format; on all ranks.
        """
        return self._restore(set(), lambda place: None)

    def note_start(self) -> None:
        """Count this attempt as dead until it has a checkpoint or ends in an orderly way.

        Not collective: chief only. Call it before `begin_attempt`, as restoring may kill the process.

        Raises:
            CheckpointError: if the record cannot be written.
        """
        self._history.note_start()

    def begin_attempt(self) -> str | None:
        """Restore like `restore_or_initialize`, and record the source, so that repeated deaths are detected.

        A checkpoint is skipped if two consecutive attempts resumed from it and died without a newer one.

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
        except CheckpointError:  # an error is not a death: the checkpoint that was read is no suspect
            with self._world.agreed(self._comm):
                if self._is_writer:
                    self.note_start()
            raise
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._history.count()
        if self._is_in_memory:  # write it to disk before the copies in memory can be removed
            self.save(self.checkpoint.step, blocking=False)
        return path

    def check_current(self) -> None:
        """Raise AttemptReplaced if a later attempt of this run has begun. Not collective: chief only."""
        self._tier.folder.check_current()

    def end_attempt(self) -> None:
        """Record that this attempt ends in an orderly way: it finished, or was asked to stop.

        Collective: chief and workers.

        Raises:
            CheckpointError: if the record or the last save cannot be written; on all ranks.
        """
        self.wait()
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._history.note_end()
        self.forget_copies()

    def note_end(self) -> None:
        """Record the end like `end_attempt`, on a chief that is exiting with its last save written. Not collective.

        Raises:
            CheckpointError: if the record cannot be written.
        """
        self._history.note_end()

    def forget_copies(self) -> None:
        """Remove this node's copies in memory, if this rank keeps them."""
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
                self._tier.folder.resume_from(place)
                self._tier.last = found.manifest if found else None
        if self._memory is not None:
            self._memory.resume_from(place)
        if found:
            warn_of_changes(found.manifest.written, self._written())
        self._history.restored(place)
        self.latest_path = path
        self.note_saved(place.step)
        return path

    def _written(self) -> dict[str, Any]:
        return describe(self._world, self.checkpoint.describe_sums())
