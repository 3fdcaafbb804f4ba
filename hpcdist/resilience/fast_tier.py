"""The fast tier: a copy of the state in the memory of every node, for a restart inside the same allocation.

The job may lose a process, or a node; what is left starts again from the newest copy that verifies, and reads no shared
file system for it. The memory is gone with the allocation: checkpoints on disk stay what counts.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import generations
from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import Place
from hpcdist.checkpoint.reader import CheckpointReader, Found
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tier import Tier
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointError

logger = logging.getLogger("hpcdist")


class FastTier:
    """The copies of one node, kept by its first rank. Copies that cannot be made are told once, and done without.

    Memory: on each node the room that a file is laid out in, the copy, and while a newer one is written that too.

    Args:
        directory: on a file system in memory, such as /dev/shm; every node has its own.
        run_id: names the run, so that no other's copies are taken for its own.
        generation: of this attempt.
    """

    def __init__(self, directory: str | os.PathLike[str], run_id: str, generation: int) -> None:
        self._tier: Tier | None = None
        self._path = Path(directory) / f"hpcdist-{os.getuid()}-{run_id}"
        self._folder = CheckpointFolder(self._path)
        self._try(lambda: self._begin(generation))

    def _begin(self, generation: int) -> None:
        self._folder.begin(generation)
        self._tier = Tier(self._folder, Retention(max_to_keep=1))

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except (CheckpointError, OSError, MemoryError) as error:
            self._tier = None
            logger.warning("fast tier: goes on without copies in memory on this node: %s", error)

    def save(self, step: int, state: Any, arrays: list[NamedArray], written: dict[str, Any]) -> None:
        """Copy a state; returns as soon as it was copied once."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: tier.save(step, state, arrays, written, {}))

    def find(self) -> Found | None:
        """Return the newest copy that verifies; None without one."""
        try:
            return CheckpointReader(self._path).read_latest()
        except CheckpointError as error:
            logger.warning("fast tier: %s", error)
            return None

    def go_on_from(self, place: Place) -> None:
        """Expect steps after the checkpoint in use, wherever it was read."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: tier.folder.go_on_from(place))

    def finish(self) -> None:
        """Return when the last copy is complete."""
        tier = self._tier
        if tier is not None:
            self._try(tier.finish)

    def remove(self) -> None:
        """Give the memory back: this attempt needs no copies any more, nor do those before it."""
        self.finish()
        self._try(self._remove)
        self._tier = None

    def _remove(self) -> None:
        found = generations.generations(self._path)
        for generation in found:
            if generation <= self._folder.generation:
                shutil.rmtree(self._path / generations.folder_name(generation))
        if not any(generation > self._folder.generation for generation in found):
            shutil.rmtree(self._path)
