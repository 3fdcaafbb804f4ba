"""Waiting for the chief's disk: as long as it makes progress, however long a file takes."""

import time
from collections.abc import Callable
from typing import TypeVar

from hpcdist.checkpoint.image import BLOCK_BYTES
from hpcdist.checkpoint.saver import Saver
from hpcdist.errors import CheckpointError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import AWAKE_S
from hpcdist.runtime.world import World

#: Seconds between the chief's reports to other ranks that its disk is busy.
BEAT_S = 5.0

_Result = TypeVar("_Result")


class DiskProgress:
    """Distinguishes a slow disk from a stuck one, on all ranks of a role.

    The disk is that of the role's rank 0, called the chief here. An evaluator is alone in its role.

    Args:
        world: chief and workers, or an evaluator.
        saver: that of the role's rank 0; unused on other ranks.
    """

    def __init__(self, world: World, saver: Saver) -> None:
        self._world = world
        self._saver = saver
        self._begin()

    def _begin(self) -> None:
        self._n_blocks, self._waited_s, self._looked_s = self._saver.n_blocks, 0.0, time.monotonic()
        self._is_stuck = False

    def wait_for(self, is_busy: Callable[[float], bool], finish: Callable[[], _Result]) -> _Result | None:
        """Wait until the chief's disk is idle, then call `finish` on the chief; return its result there.

        Collective: the ranks of the role.

        Args:
            is_busy: a method of the chief's saver: waits up to the given seconds and returns whether it is still busy.
            finish: a method of the chief's saver: raises the error of the work, if any.

        Raises:
            CheckpointError: from `finish`, or if the disk transfers no block within the timeout; on all ranks.
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
        """Whether no save of this process is in progress and no failure is unreported."""
        return self._saver.is_settled

    def finish_alone(self, while_waiting: Callable[[], None]) -> None:
        """Wait for this process's disk while it makes progress; at most a second if it was found stuck.

        Not collective.

        Args:
            while_waiting: called about once a second.

        Raises:
            CheckpointError: if the last save cannot be written.
        """
        if not self._is_stuck:
            self._begin()
        while self._saver.is_busy(1.0):
            while_waiting()
            self._require_progress()
        self._saver.finish()

    def _is_chief_busy(self, is_busy: Callable[[float], bool]) -> bool:
        """Return whether the chief's disk is busy. Collective: the ranks of the role; each call is bounded."""
        own = False
        with self._world.agreed(self._world.role_comm):
            if self._world.role_comm.rank == 0:
                own = is_busy(min(BEAT_S, self._world.timeout_s / 4))
                self._require_progress()
        return self._world.all_reduce_int(int(own), MPI.MAX, self._world.role_comm) > 0

    def _require_progress(self) -> None:
        now = time.monotonic()
        self._waited_s += min(now - self._looked_s, BEAT_S + AWAKE_S)  # a longer gap means that the job was suspended
        self._looked_s = now
        if self._saver.n_blocks != self._n_blocks:
            self._n_blocks, self._waited_s = self._saver.n_blocks, 0.0
        if self._waited_s > self._world.timeout_s:
            self._is_stuck = True
            raise CheckpointError(
                f"checkpoint: expected the disk of {self._saver.store.path} to take or give {BLOCK_BYTES} bytes within "
                f"{self._world.timeout_s:g} s, got none; check the file system (HPCDIST_TIMEOUT_S sets the limit)."
            )
