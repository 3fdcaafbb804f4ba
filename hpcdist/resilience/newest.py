"""Find the newest state, on the chief's disk or in a node's memory, and broadcast it to all ranks."""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.checkpoint.generations import Place
from hpcdist.checkpoint.reader import Found
from hpcdist.checkpoint.tier import Tier
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
        tier: the saver of the chief's disk; unused on other ranks.
        progress: progress of that disk: other ranks wait while it makes progress.
        memory: this node's fast tier, on its first rank; None elsewhere.

    Attributes:
        is_in_memory: whether `find` chose a copy in memory; equal on all ranks.
    """

    def __init__(self, world: World, tier: Tier, progress: DiskProgress, memory: FastTier | None) -> None:
        self._world = world
        self._comm = world.role_comm
        self._tier = tier
        self._progress = progress
        self._memory = memory
        self.is_in_memory = False

    def find(
        self, suspects: set[int], before_reading: Callable[[Place], None]
    ) -> tuple[Found | None, Place | None, int]:
        """Return the newest checkpoint, on the rank that has read it; and, on all ranks, its place and that rank.

        Searches copies in memory first. The chief then reads the disk unless memory is as new.

        Collective: chief and workers.

        Args:
            suspects: steps to use only if the disk has no other.
            before_reading: called on the chief with the place of each checkpoint before reading it from disk.

        Raises:
            CheckpointError: if checkpoints exist and none verifies; on all ranks.
        """
        found = self._memory.find() if self._memory is not None else None
        if found is not None and found.place.step in suspects:
            found = None
        in_memory, _ = self._newest(found)
        if self._comm.rank == 0:
            self._tier.read(lambda: self._read_disk(suspects, in_memory, before_reading))
        found = self._progress.wait_for(self._tier.is_reading, self._tier.finish_reading) or found
        place, root = self._newest(found)
        self.is_in_memory = place is not None and place == in_memory
        return (found if self._comm.rank == root else None), place, root

    def _read_disk(
        self, suspects: set[int], in_memory: Place | None, before_reading: Callable[[Place], None]
    ) -> Found | None:
        """Return the newest checkpoint on disk; None if there is none, or if memory is as new."""
        on_disk = self._tier.folder.places()
        if in_memory is not None and not (on_disk and on_disk[-1] > in_memory):
            return None
        try:
            found = self._tier.folder.read_latest(suspects, before_reading)
        except CheckpointError as error:
            if in_memory is None:
                raise
            logger.warning("restore: resuming from memory: %s", error)
            return None
        return found if found and (in_memory is None or found.place > in_memory) else None

    def _newest(self, found: Found | None) -> tuple[Place | None, int]:
        """Return the newest place on any rank, and the lowest rank that has it."""
        own = Place(-1, -1) if found is None else found.place
        generation = self._world.all_reduce_int(own.generation, MPI.MAX, self._comm)
        step = self._world.all_reduce_int(own.step if own.generation == generation else -1, MPI.MAX, self._comm)
        newest = Place(generation, step)
        root = self._world.all_reduce_int(self._comm.rank if own == newest else self._comm.size, MPI.MIN, self._comm)
        return (None if generation < 0 else newest), root

    def broadcast(self, found: Found | None, root: int) -> tuple[Any, list[NamedArray]]:
        """Return on all ranks the state and arrays that `root` has found. Collective: chief and workers."""
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
