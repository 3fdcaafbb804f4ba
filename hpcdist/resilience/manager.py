"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; the disk is the chief's."""

import atexit
import functools
import json
import logging
import operator
import os
import platform
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any

import numpy as np

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import Place, crashed_twice
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.checkpoint.writer import BackgroundWriter
from hpcdist.collectives import mpi
from hpcdist.collectives.group import group_of
from hpcdist.errors import UsageError
from hpcdist.gradients.numerics import describe_numerics
from hpcdist.mpi import library_name
from hpcdist.resilience.checkpoint import Checkpoint

logger = logging.getLogger("hpcdist")

#: Facts that the bits of further training depend on; a restore under others warns.
_BITS_DEPEND_ON = ("ranks", "hosts", "threads", "instruction_set", "torch", "mpi", "all_reduce", "wire", "replicas")
#: They do not depend on these where the number of replicas was given.
_OF_PLACEMENT = ("ranks", "hosts", "mpi")


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
    ) -> None:
        self.checkpoint = checkpoint
        self._retention = Retention(max_to_keep, keep_every_n_hours, keep_best, best_mode)
        self._folder = CheckpointFolder(directory)
        self._world = checkpoint.world
        self._comm = self._world.role_comm
        self._is_writer = self._world.is_chief
        self._image = FileImage()
        self._writer = BackgroundWriter()
        self._saving: list[Future[Any]] = []
        self._n_committed = self._n_fruitless = 0
        self._restored: str | None = None
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._folder.begin()
                self._n_fruitless = len(self._folder.fruitless_attempts())
        atexit.register(_finish, weakref.ref(self))

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return str(self._folder.path)

    @property
    def generation(self) -> int:
        """The number of this attempt: known to the chief."""
        return self._folder.generation

    @property
    def fruitless_attempts(self) -> int:
        """How many attempts in a row, this one included, have not committed a checkpoint: known to the chief.

        Attempts before this one count if they used `begin_attempt`, and did not come to `end_attempt`.
        """
        return 0 if self._n_committed else self._n_fruitless + 1

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
        path, gathered = self._folder.path, self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._is_writer:
                path = self._folder.new_data_path(step)
                lay_out(self._image, *self.checkpoint.collect(gathered))
                facts = {"time_s": time.time(), "metrics": {k: float(v) for k, v in (metrics or {}).items()}}
                committing = self._writer.submit(
                    functools.partial(self._folder.commit, step, path, self._image, self._written(), **facts)
                )
                tidying = self._writer.submit(functools.partial(self._tidy, committing))
                self._saving = [tidying] if blocking else [committing, tidying]
                if blocking:
                    committing.result()
        self.checkpoint.step = step
        return self._path(path)

    def _tidy(self, committing: "Future[Manifest]") -> None:
        if committing.exception() is None:
            self._n_committed += 1
            self._folder.prune(committing.result(), self._retention)

    def wait(self) -> None:
        """Return when the last save is durable and was read back.

        Collective: chief and workers.

        Raises:
            CheckpointError: when it cannot be written, on every rank alike.
        """
        with self._world.agreed(self._comm):
            self._finish_saving()

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, []
        for part in saving:
            part.result()

    def _path(self, path: Any) -> str:
        """Return the path of the chief's file on every rank."""
        name = os.path.relpath(path, self._folder.path) if self._is_writer else ""
        return str(self._folder.path / self._world.broadcast_text(name, 0, self._comm))

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None when there is none.

        Collective: chief and workers. The chief reads and broadcasts: others do not touch the folder.

        Raises:
            CheckpointError: when no checkpoint verifies, or it is of another model or a newer format; on every rank
            alike.
        """
        return self._restore(set())

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
                suspects = crashed_twice(self._folder.fruitless_attempts())
        for suspect in suspects:
            logger.warning("restore: %s is stepped over: two attempts died after it, before they had another", suspect)
        path = self._restore(suspects)
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

    def _note_attempt(self, has_ended: bool) -> None:
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._folder.note_attempt(self._restored, has_ended)

    def _restore(self, suspects: set[str]) -> str | None:
        self.wait()
        found: tuple[Place, Manifest, Any, list[NamedArray]] | None = None
        with self._world.agreed(self._comm):
            if self._comm.rank == 0:
                found = self._folder.read_latest(suspects)
        step = int(self._world.broadcast_text(str(found[0].step if found else -1), 0, self._comm))
        if step < 0:
            return None
        state, arrays = self._broadcast(found)
        path = self._path(found[0].manifest(self._folder.path).with_name(found[1].file) if found else "")
        with self._world.agreed(self._comm):
            self.checkpoint.apply(state, arrays, os.path.basename(path))
            if self._is_writer and found:
                self._folder.go_on_from(found[0])
        if found and self._is_writer:
            self._restored = str(found[0])
            _warn_of_changes(found[1].written, self._written())
        self.checkpoint.step = step
        return path

    def _broadcast(self, found: tuple[Place, Manifest, Any, list[NamedArray]] | None) -> tuple[Any, list[NamedArray]]:
        rows = [[a.name, a.dtype, a.values.dtype.str, a.values.shape] for a in found[3]] if found else []
        text = json.dumps([found[2], rows]) if found else ""
        state, rows = json.loads(self._world.broadcast_text(text, 0, self._comm))
        group, arrays = group_of(self._comm), []
        for number, (name, dtype, stored, shape) in enumerate(rows):
            values = np.ascontiguousarray(found[3][number].values) if found else np.empty(shape, np.dtype(stored))
            with group.recorded("broadcast", values):
                mpi.broadcast(values, group.comm)
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
        alive._finish_saving()


def _warn_of_changes(written: dict[str, Any], now: dict[str, Any]) -> None:
    is_counted = now.get("replicas") is not None and written.get("replicas") == now["replicas"]
    telling = [key for key in _BITS_DEPEND_ON if not (is_counted and key in _OF_PLACEMENT)]
    known = [key for key in telling if key in written and key in now]  # an older file may not tell
    changes = [f"{key} {written[key]} -> {now[key]}" for key in known if written[key] != now[key]]
    if changes:
        logger.warning("restore: bits may differ from an unbroken run, as these changed: %s", ", ".join(changes))
