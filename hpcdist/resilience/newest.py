"""The newest state on any rank, on the chief's disk or in the memory of a node, and how all ranks get it."""

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
    """Finds the newest state and hands it to all ranks.

    Args:
        world: chief and workers.
        tier: the chief's, on the disk; unused elsewhere.
        progress: of that tier: others wait as long as it comes forward.
        memory: the copies of this node, on its first rank; None elsewhere.
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
        """Return the newest checkpoint on the rank that has read it, and on all ranks its place and that rank.

        `is_in_memory` tells from then on whether it was a copy in memory.

        Copies in memory are looked for first; the chief then reads the disk unless they are as new.

        Collective: chief and workers.

        Args:
            suspects: steps that are taken only if there is no other on the disk.
            before_reading: is called on the chief with the place of one that it reads from the disk.

        Raises:
            CheckpointError: when there are checkpoints and none verifies; on every rank alike.
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
        """Return the newest checkpoint on disk; None if there is none, or memory has one that is as new."""
        on_disk = self._tier.folder.places()
        if in_memory is not None and not (on_disk and on_disk[-1] > in_memory):
            return None
        try:
            found = self._tier.folder.read_latest(suspects, before_reading)
        except CheckpointError as error:
            if in_memory is None:
                raise
            logger.warning("restore: goes on from memory: %s", error)
            return None
        return found if found and (in_memory is None or found.place > in_memory) else None

    def _newest(self, found: Found | None) -> tuple[Place | None, int]:
        """Return the newest place on any rank, and the first rank that has it."""
        own = Place(-1, -1) if found is None else found.place
        generation = self._world.all_reduce_int(own.generation, MPI.MAX, self._comm)
        step = self._world.all_reduce_int(own.step if own.generation == generation else -1, MPI.MAX, self._comm)
        newest = Place(generation, step)
        root = self._world.all_reduce_int(self._comm.rank if own == newest else self._comm.size, MPI.MIN, self._comm)
        return (None if generation < 0 else newest), root

    def broadcast(self, found: Found | None, root: int) -> tuple[Any, list[NamedArray]]:
        """Return the state and arrays that `root` has found, on all ranks. Collective: chief and workers."""
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
