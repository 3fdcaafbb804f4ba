"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; the disk is the chief's."""

import atexit
import json
import logging
import operator
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from hpcdist.checkpoint.folder import CheckpointFolder, Found
from hpcdist.checkpoint.generations import Place, crashed_twice
from hpcdist.checkpoint.image import BLOCK_BYTES
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tier import Tier
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.collectives import mpi
from hpcdist.collectives.group import group_of
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.gradients.numerics import describe_numerics
from hpcdist.mpi import MPI, library_name
from hpcdist.resilience.checkpoint import Checkpoint
from hpcdist.resilience.desync import digest_of, require_equal
from hpcdist.resilience.fast_tier import FastTier

logger = logging.getLogger("hpcdist")

#: Facts that the bits of further training depend on; a restore under others warns.
_BITS_DEPEND_ON = ("ranks", "hosts", "threads", "instruction_set", "torch", "mpi", "all_reduce", "wire", "replicas")
#: They do not depend on these where the number of replicas was given.
_OF_PLACEMENT = ("ranks", "hosts", "mpi")


#: While the chief writes, it tells the others so this often.
BEAT_S = 5.0
#: A place as one number that all ranks compare: the generation above so many bits of the step.
_STEP_BITS = 40


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
        self._n_fruitless = self._n_blocks = 0
        self._moved_s = 0.0
        self._restored: Place | None = None
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._disk.folder.begin()
                self._n_fruitless = len(self._disk.folder.fruitless_attempts())
        self._memory = None if fast_directory is None else self._begin_fast_tier(fast_directory)
        atexit.register(_finish, weakref.ref(self))

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
        """How many attempts in a row, this one included, have not committed a checkpoint: known to the chief.

        Attempts before this one count if they used `begin_attempt`, and did not come to `end_attempt`.
        """
        return 0 if self._disk.n_committed else self._n_fruitless + 1

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
            self._wait_for(self._disk.is_committing, self._disk.finish_commit)
        self.checkpoint.step = step
        return self._world.broadcast_text(path, 0, self._comm)

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
        self._wait_for(self._disk.is_busy, self._disk.finish)
        if self._memory is not None:
            self._memory.finish()

    def _wait_for(self, is_busy: Callable[[float], bool], finish: Callable[[], None]) -> None:
        """Wait for the chief's disk for as long as it comes forward, which the chief tells others now and then."""
        self._n_blocks, self._moved_s = self._disk.n_blocks, time.monotonic()
        while self._is_chief_busy(is_busy):
            pass
        with self._world.agreed(self._comm):
            if self._is_writer:
                finish()

    def _is_chief_busy(self, is_busy: Callable[[float], bool]) -> bool:
        """Return whether the chief is still writing. Collective: chief and workers; each turn is bounded."""
        own = False
        with self._world.agreed(self._comm):
            if self._is_writer:
                own = is_busy(min(BEAT_S, self._world.timeout_s / 4))
                self._require_progress()
        return self._world.all_reduce_int(int(own), MPI.MAX, self._comm) > 0

    def _require_progress(self) -> None:
        now = time.monotonic()
        if self._disk.n_blocks != self._n_blocks:
            self._n_blocks, self._moved_s = self._disk.n_blocks, now
        if now - self._moved_s > self._world.timeout_s:
            raise CheckpointError(
                f"save: expected the disk of {self.directory} to take {BLOCK_BYTES} bytes within "
                f"{self._world.timeout_s:g} s, got none written; look after the file system (HPCDIST_TIMEOUT_S sets "
                f"the limit)."
            )

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
        self._disk.folder.note_attempt(None, has_ended=False)

    def begin_attempt(self) -> str | None:
        """Restore as `restore_or_initialize`, and note what from, so that a job that dies again and again is noticed.

        A checkpoint that two attempts in a row went on from, only to die before they had another, is stepped over.

        Collective: chief and workers.

        Raises:
            CheckpointError: as `restore_or_initialize`.
        """
        suspects: set[str] = set()
        with self._world.agreed(self._comm):
            if self._is_writer:
                suspects = crashed_twice(self._disk.folder.fruitless_attempts())
        for suspect in suspects:
            logger.warning("restore: %s is stepped over: two attempts died after it, before they had another", suspect)
        path = self._restore(set(self._world.broadcast_text(" ".join(suspects), 0, self._comm).split()))
        self._note_attempt(has_ended=False)
        return path

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

    def _note_attempt(self, has_ended: bool) -> None:
        restored = None if self._restored is None else str(self._restored)
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._disk.folder.note_attempt(restored, has_ended)

    def _restore(self, suspects: set[str]) -> str | None:
        self.wait()
        found, place, root = self._find(suspects)
        if place is None:
            return None
        state, arrays = self._broadcast(found, root)
        path = self._world.broadcast_text(str(found.path) if found else "", root, self._comm)
        with self._world.agreed(self._comm):
            self.checkpoint.apply(state, arrays, os.path.basename(path))
            if self._is_writer:
                self._disk.folder.go_on_from(place)
        if self._memory is not None:
            self._memory.go_on_from(place)
        if found:
            _warn_of_changes(found.manifest.written, self._written())
        self._restored, self.checkpoint.step = place, place.step
        return path

    def _find(self, suspects: set[str]) -> tuple[Found | None, Place | None, int]:
        """Return the newest checkpoint on the rank that has read it, and on all ranks its place and that rank.

        Copies in memory are looked for first; the chief then reads the disk unless they are as new.
        """
        found = self._memory.find() if self._memory is not None else None
        if found is not None and str(found.place) in suspects:
            found = None
        in_memory, _ = self._newest(found)
        with self._world.agreed(self._comm):
            if self._comm.rank == 0:
                found = self._read_disk(suspects, in_memory) or found
        place, root = self._newest(found)
        return (found if self._comm.rank == root else None), place, root

    def _read_disk(self, suspects: set[str], in_memory: Place | None) -> Found | None:
        """Return the newest checkpoint on disk; None if there is none, or memory has one that is as new."""
        on_disk = self._disk.folder.places()
        if in_memory is not None and not (on_disk and on_disk[-1] > in_memory):
            return None
        try:
            found = self._disk.folder.read_latest(suspects)
        except CheckpointError as error:
            if in_memory is None:
                raise
            logger.warning("restore: goes on from memory: %s", error)
            return None
        return found if found and (in_memory is None or found.place > in_memory) else None

    def _newest(self, found: Found | None) -> tuple[Place | None, int]:
        """Return the newest place on any rank, and the first rank that has it."""
        own = -1 if found is None else found.place.generation << _STEP_BITS | found.place.step
        newest = self._world.all_reduce_int(own, MPI.MAX, self._comm)
        root = self._world.all_reduce_int(self._comm.rank if own == newest else self._comm.size, MPI.MIN, self._comm)
        return (None if newest < 0 else Place(newest >> _STEP_BITS, newest & ((1 << _STEP_BITS) - 1))), root

    def _broadcast(self, found: Found | None, root: int) -> tuple[Any, list[NamedArray]]:
        rows = [[a.name, a.dtype, a.values.dtype.str, a.values.shape] for a in found.arrays] if found else []
        text = json.dumps([found.state, rows]) if found else ""
        state, rows = json.loads(self._world.broadcast_text(text, root, self._comm))
        group, arrays = group_of(self._comm), []
        for number, (name, dtype, stored, shape) in enumerate(rows):
            values = np.ascontiguousarray(found.arrays[number].values) if found else np.empty(shape, np.dtype(stored))
            with group.recorded("broadcast", values):
                mpi.broadcast(values, group.comm, root)
            arrays.append(NamedArray(name, dtype, values.reshape(shape)))
        return state, arrays

    def _written(self) -> dict[str, Any]:
        return {
            **{package: version(package) for package in ("hpcdist", "numpy", "h5py", "mpi4py")},
            **describe_numerics(),
            **self.checkpoint.describe_sums(),
            "python": platform.python_version(),
            "mpi": library_name(),
            "ranks": self._comm.size,
            "hosts": self._world.n_hosts,
            "host": platform.node(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def _finish(manager: "weakref.ref[CheckpointManager]") -> None:
    """Let a save that is under way end before the process does."""
    alive = manager()
    if alive is not None:
        alive._disk.finish()


def _warn_of_changes(written: dict[str, Any], now: dict[str, Any]) -> None:
    is_counted = now.get("replicas") is not None and written.get("replicas") == now["replicas"]
    telling = [key for key in _BITS_DEPEND_ON if not (is_counted and key in _OF_PLACEMENT)]
    known = [key for key in telling if key in written and key in now]  # an older file may not tell
    changes = [f"{key} {written[key]} -> {now[key]}" for key in known if written[key] != now[key]]
    if changes:
        logger.warning("restore: bits may differ from an unbroken run, as these changed: %s", ", ".join(changes))
