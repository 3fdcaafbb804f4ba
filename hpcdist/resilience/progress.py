"""Waiting for the chief's disk: as long as it comes forward, however long a file takes, and not longer."""

import time
from collections.abc import Callable

from hpcdist.checkpoint.image import BLOCK_BYTES
from hpcdist.checkpoint.tier import Tier
from hpcdist.errors import CheckpointError
from hpcdist.mpi import MPI
from hpcdist.world import World

#: While the chief writes, it tells the others so this often.
BEAT_S = 5.0


class DiskProgress:
    """Tells a disk that is slow from one that is stuck, and lets all ranks know.

    Args:
        world: chief and workers.
        disk: what the chief writes with; unused elsewhere.
    """

    def __init__(self, world: World, disk: Tier) -> None:
        self._world = world
        self._disk = disk
        self._begin()

    def _begin(self) -> None:
        self._n_blocks, self._moved_s = self._disk.n_blocks, time.monotonic()

    def wait_for(self, is_busy: Callable[[float], bool], finish: Callable[[], None]) -> None:
        """Wait until the chief's disk is no longer busy, then have the chief finish.

        Collective: chief and workers.

        Args:
            is_busy: of the chief's tier: waits for some seconds and returns whether to go on.
            finish: of the chief's tier; raises what went wrong.

        Raises:
            CheckpointError: of `finish`, or when the disk takes no block for too long; on every rank alike.
        """
        self._begin()
        while self._is_chief_busy(is_busy):
            pass
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                finish()

    def finish_alone(self) -> None:
        """Wait for the disk of this process, as long as it comes forward. Not collective.

        Raises:
            CheckpointError: when the last save cannot be written.
        """
        self._begin()
        while self._disk.is_busy(1.0):
            self._require_progress()
        self._disk.finish()

    def _is_chief_busy(self, is_busy: Callable[[float], bool]) -> bool:
        """Return whether the chief is still writing. Collective: chief and workers; each turn is bounded."""
        own = False
        with self._world.agreed(self._world.role_comm):
            if self._world.is_chief:
                own = is_busy(min(BEAT_S, self._world.timeout_s / 4))
                self._require_progress()
        return self._world.all_reduce_int(int(own), MPI.MAX, self._world.role_comm) > 0

    def _require_progress(self) -> None:
        now = time.monotonic()
        if self._disk.n_blocks != self._n_blocks:
            self._n_blocks, self._moved_s = self._disk.n_blocks, now
        if now - self._moved_s > self._world.timeout_s:
            raise CheckpointError(
                f"save: expected the disk of {self._disk.folder.path} to take {BLOCK_BYTES} bytes within "
                f"{self._world.timeout_s:g} s, got none written; look after the file system (HPCDIST_TIMEOUT_S sets "
                f"the limit)."
            )
