"""Waiting for the chief's disk: as long as it comes forward, however long a file takes, and not longer."""

import time
from collections.abc import Callable
from typing import TypeVar

from hpcdist.checkpoint.image import BLOCK_BYTES
from hpcdist.checkpoint.tier import Tier
from hpcdist.errors import CheckpointError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import AWAKE_S
from hpcdist.runtime.world import World

#: While the chief's disk is busy, it tells the others so this often.
BEAT_S = 5.0

_Result = TypeVar("_Result")


class DiskProgress:
    """Tells a disk that is slow from one that is stuck, and lets all ranks of a role know.

    It is the disk of the role's rank 0, called the chief here. An evaluator is alone in its role, and reads by itself.

    Args:
        world: chief and workers, or an evaluator.
        tier: what their rank 0 reads and writes with; unused elsewhere.
    """

    def __init__(self, world: World, tier: Tier) -> None:
        self._world = world
        self._tier = tier
        self._begin()

    def _begin(self) -> None:
        self._n_blocks, self._waited_s, self._looked_s = self._tier.n_blocks, 0.0, time.monotonic()
        self._is_stuck = False

    def wait_for(self, is_busy: Callable[[float], bool], finish: Callable[[], _Result]) -> _Result | None:
        """Wait until the chief's disk is no longer busy, then have the chief finish; return what that returns there.

        Collective: the ranks of the role.

        Args:
            is_busy: of the chief's tier: waits for some seconds and returns whether to go on.
            finish: of the chief's tier; raises what went wrong.

        Raises:
            CheckpointError: of `finish`, or when the disk takes no block for too long; on every rank alike.
        """
        self._begin()
        while self._is_chief_busy(is_busy):
            pass
        result = None
        with self._world.agreed(self._world.role_comm):
            if self._world.role_comm.rank == 0:
                result = finish()
        return result

    @property
    def is_settled(self) -> bool:
        """Whether no save of this process is under way, and none has failed that nobody was told of."""
        return self._tier.is_settled

    def finish_alone(self, while_waiting: Callable[[], None]) -> None:
        """Wait for the disk of this process, as long as it comes forward; a second for one that was found stuck.

        Not collective.

        Args:
            while_waiting: is called about once a second.

        Raises:
            CheckpointError: when the last save cannot be written.
        """
        if not self._is_stuck:
            self._begin()
        while self._tier.is_busy(1.0):
            while_waiting()
            self._require_progress()
        self._tier.finish()

    def _is_chief_busy(self, is_busy: Callable[[float], bool]) -> bool:
        """Return whether the chief is still writing. Collective: they; each turn is bounded."""
        own = False
        with self._world.agreed(self._world.role_comm):
            if self._world.role_comm.rank == 0:
                own = is_busy(min(BEAT_S, self._world.timeout_s / 4))
                self._require_progress()
        return self._world.all_reduce_int(int(own), MPI.MAX, self._world.role_comm) > 0

    def _require_progress(self) -> None:
        now = time.monotonic()
        self._waited_s += min(now - self._looked_s, BEAT_S + AWAKE_S)  # more: the job was suspended
        self._looked_s = now
        if self._tier.n_blocks != self._n_blocks:
            self._n_blocks, self._waited_s = self._tier.n_blocks, 0.0
        if self._waited_s > self._world.timeout_s:
            self._is_stuck = True
            raise CheckpointError(
                f"checkpoint: expected the disk of {self._tier.folder.path} to take or give {BLOCK_BYTES} bytes within "
                f"{self._world.timeout_s:g} s, got none; look after the file system (HPCDIST_TIMEOUT_S sets the limit)."
            )
