"""Read a checkpoint, a given one or the newest on the chief's disk or in a node's memory, and broadcast it."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcdist.checkpoint.layout import stored_dtype
from hpcdist.checkpoint.read import Index
from hpcdist.checkpoint.saver import Saver
from hpcdist.checkpoint.store import Found, Saved, read_one
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.collectives import library as mpi
from hpcdist.collectives.group import group_of
from hpcdist.errors import CheckpointError
from hpcdist.resilience.fast_tier import FastTier
from hpcdist.resilience.progress import DiskProgress
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")


class NewestState:
    """Finds the newest state and broadcasts it to all ranks.

    Args:
        world: chief and workers.
        saver: the saver of the chief's disk; unused on other ranks.
        progress: progress of that disk: other ranks wait while it makes progress.
        memory: this node's fast tier, on its first rank; None elsewhere.

    Attributes:
        is_in_memory: whether `find` chose a copy in memory; equal on all ranks.
    """

    def __init__(self, world: World, saver: Saver, progress: DiskProgress, memory: FastTier | None) -> None:
        self._world = world
        self._comm = world.role_comm
        self._saver = saver
        self._progress = progress
        self._memory = memory
        self.is_in_memory = False

    def find(
        self, skipped: set[int], before_reading: Callable[[Saved], None]
    ) -> tuple[Found | None, Saved | None, int]:
        """Return the newest checkpoint, on the rank that has read it; on all ranks, which one it is, and that rank.

        Searches copies in memory first. The chief then reads the disk unless memory is as new.

        Collective: chief and workers.

        Args:
            skipped: steps to use only if the disk has no other.
            before_reading: called on the chief with each checkpoint before reading it from disk.

        Raises:
            CheckpointError: if checkpoints exist and none verifies; on all ranks.
        """
        found = self._memory.find() if self._memory is not None else None
        if found is not None and found.saved.step in skipped:
            found = None
        in_memory, _ = self._newest(found)
        if self._comm.rank == 0:
            self._saver.read(lambda: self._read_disk(skipped, in_memory, before_reading))
        found = self._progress.wait_for(self._saver.is_reading, self._saver.finish_reading) or found
        saved, root = self._newest(found)
        self.is_in_memory = saved is not None and saved == in_memory
        return (found if self._comm.rank == root else None), saved, root

    def _read_disk(
        self, skipped: set[int], in_memory: Saved | None, before_reading: Callable[[Saved], None]
    ) -> Found | None:
        """Return the newest checkpoint on disk; None if there is none, or if memory is as new."""
        on_disk = self._saver.store.saved()
        if in_memory is not None and not (on_disk and on_disk[-1] > in_memory):
            return None
        try:
            found = self._saver.store.read_latest(skipped, before_reading)
        except CheckpointError as error:
            if in_memory is None:
                raise
            logger.warning("restore: resuming from memory: %s", error)
            return None
        return found if found and (in_memory is None or found.saved > in_memory) else None

    def _newest(self, found: Found | None) -> tuple[Saved | None, int]:
        """Return the newest checkpoint on any rank, and the lowest rank that has it."""
        own = Saved(-1, -1) if found is None else found.saved
        attempt = self._world.all_reduce_int(own.attempt, MPI.MAX, self._comm)
        step = self._world.all_reduce_int(own.step if own.attempt == attempt else -1, MPI.MAX, self._comm)
        newest = Saved(attempt, step)
        root = self._world.all_reduce_int(self._comm.rank if own == newest else self._comm.size, MPI.MIN, self._comm)
        return (None if attempt < 0 else newest), root

    def broadcast(self, found: Found | None, root: int) -> tuple[Index, list[NamedArray]]:
        """Return on all ranks the index and the arrays that `root` has found. Collective: chief and workers."""
        return _broadcast(self._world, found, root)


def read_everywhere(world: World, path: Path) -> tuple[Index, list[NamedArray]]:
    """Return on all ranks of the role the index and the arrays of the checkpoint at `path`, which rank 0 reads.

    Collective: the ranks of the role.

    Raises:
        CheckpointError: if it is not there, damaged, of a newer format or cannot be read; on all ranks.
    """
    found = None
    with world.agreed(world.role_comm):
        if world.role_comm.rank == 0:
            found = read_one(path)
    return _broadcast(world, found, 0)


def _broadcast(world: World, found: Found | None, root: int) -> tuple[Index, list[NamedArray]]:
    text = found.index.to_text() if found else ""
    index = Index.from_text(world.broadcast_text(text, root, world.role_comm))
    group, arrays = group_of(world.role_comm), []
    for number, one in enumerate(index.arrays):
        values = found.arrays[number].values if found else np.empty(one.shape, stored_dtype(one.dtype))
        with group.recorded("broadcast", values):
            mpi.broadcast(values, group.comm, root)
        arrays.append(NamedArray(one.name, one.dtype, values if one.dtype != "bool" else values.view(np.bool_)))
    return index, arrays
