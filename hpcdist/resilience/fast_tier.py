"""The fast tier: a copy of the state in the memory of every node, for a restart inside the same allocation.

The job may lose a process, or a node; what is left starts again from the newest copy that verifies, and reads no shared
file system for it. The memory is gone with the allocation: checkpoints on disk stay what counts.

All users of a node may write to /dev/shm, and a digest does not tell who wrote: copies are made in, and taken from, a
folder that nobody else can write to.
"""

import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable, generations
from hpcdist.checkpoint.durable import Disk
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
        directory: on a file system in memory, such as /dev/shm; every node has its own. If others may write to it, it
            must be sticky, as /dev/shm is.
        run_id: names the run, so that no other's copies are taken for its own.
        generation: of this attempt.
    """

    def __init__(self, directory: str | os.PathLike[str], run_id: str, generation: int) -> None:
        self._tier: Tier | None = None
        name = re.sub(r"\W", "-", run_id)  # the file that it was read from may hold anything
        self._path = Path(directory) / f"hpcdist-{os.getuid()}-{name}"
        self._disk = Disk()
        self._folder = CheckpointFolder(self._path, self._disk)
        self._try(lambda: self._begin(generation))

    def _begin(self, generation: int) -> None:
        durable.make_folders(self._disk, self._path.parent)
        with contextlib.suppress(FileExistsError):  # of an attempt before, or of somebody else
            self._disk.make_folder(self._path, 0o700)
        self._require_own()
        self._folder.begin(generation)
        self._tier = Tier(self._folder, Retention(max_to_keep=1))

    def _require_own(self) -> None:
        """Raise CheckpointError unless the folder is one that nobody else can have written to."""
        status = os.lstat(self._path)
        is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_closed or status.st_uid != os.getuid():
            raise CheckpointError(
                f"fast tier: expected a folder that only user {os.getuid()} can write to at {self._path}, got "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}; have it removed."
            )

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except (CheckpointError, OSError, MemoryError) as error:
            self._tier = None
            logger.warning("fast tier: goes on without copies in memory on this node: %s", error)

    @property
    def is_kept(self) -> bool:
        """Whether copies are made: False from the first on that could not be."""
        return self._tier is not None

    def save(self, step: int, state: Any, arrays: list[NamedArray], written: dict[str, Any]) -> None:
        """Copy a state; returns as soon as it was copied once."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: tier.save(step, state, arrays, written, {}))

    def find(self) -> Found | None:
        """Return the newest copy that verifies; None without one, or where others can have written it."""
        try:
            self._require_own()
            return CheckpointReader(self._path).read_latest()
        except (FileNotFoundError, NotADirectoryError):  # it could not be made, which was told
            return None
        except (CheckpointError, OSError) as error:
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
        self._require_own()  # a link would lead to folders that must stay
        found = generations.generations(self._path)
        for generation in found:
            if generation <= self._folder.generation:
                shutil.rmtree(self._path / generations.folder_name(generation))
        if not any(generation > self._folder.generation for generation in found):
            shutil.rmtree(self._path)
