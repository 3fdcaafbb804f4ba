"""The fast tier: a copy of the state in the memory of every node, for a restart inside the same allocation.

If the job loses a process or a node, the rest restarts from the newest copy that verifies, without reading the shared
file system. The memory is lost with the allocation, so checkpoints on disk remain authoritative.

All users of a node may write to /dev/shm, and a digest does not identify its author. So copies are written to, and read
from, a folder that only this user can write to.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.available_memory import available_bytes
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.errors import CheckpointError

logger = logging.getLogger("hpcdist")

_PREFIX = "hpcdist"
#: Age after which copies that no process holds are removed, in seconds: a job that has died restarts sooner.
STALE_S = 3600.0


class FastTier:
    """The copies of one node, kept by its first rank. If a copy fails, the node logs it once and continues without.

    Memory per node: the copy, and during a save the next copy, besides the saver's buffer.

    Args:
        directory: folder on an in-memory file system, such as /dev/shm; each node has its own. If other users may write
            to it, it must be sticky, as /dev/shm is.
        name: name of the job, with which the memory is lost, and of the run: other copies are not read.
        attempt: number of this attempt.

    Attributes:
        is_kept: whether copies are made: False after the first failure, or `stop`.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str, attempt: int) -> None:
        # a part was read from a file, which may hold any characters
        name = re.sub(r"\W", "-", name)
        folder_name = f"{_PREFIX}-{os.getuid()}-{name}"
        self._path = Path(directory).absolute() / folder_name
        self._disk = Disk()
        self._store = Store(self._path, self._disk)
        self.is_kept = True
        with self.tolerated():
            durable.make_folders(self._disk, self._path.parent)
            self._hold()
            self._sweep()
            self._store.begin(attempt)

    def _hold(self) -> None:
        """Make the folder, and lock it until this process ends, however it ends: it is in use."""
        for _ in range(10):
            with contextlib.suppress(FileExistsError):  # from an earlier attempt, or another user's
                self._disk.make_folder(self._path, 0o700)
            self._require_own()
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if _lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, self._path):
                os.utime(descriptor)  # another job removes old folders only
                weakref.finalize(self, os.close, descriptor)
                return
            os.close(descriptor)
            time.sleep(0.1)
        raise CheckpointError(
            f"fast tier: expected to lock {self._path}, got a lock of another process; have it removed."
        )

    def _sweep(self) -> None:
        """Remove copies of this user's jobs that are gone for good: nothing else would before the node restarts."""
        folder_names = f"{_PREFIX}-{os.getuid()}-*"
        for path in self._path.parent.glob(folder_names):
            with contextlib.suppress(OSError):  # just removed, or no folder
                if path != self._path and time.time() - path.lstat().st_mtime > STALE_S:
                    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                    try:
                        if _lock(descriptor, fcntl.LOCK_EX):
                            shutil.rmtree(path)
                            logger.warning(
                                "fast tier: removed %s, the copies of a job that is gone.", path
                            )
                    finally:
                        os.close(descriptor)

    def _require_own(self) -> None:
        """Raise CheckpointError unless only this user can have written to the folder."""
        status = os.lstat(self._path)
        others_may_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        is_closed = stat.S_ISDIR(status.st_mode) and not others_may_write
        if not is_closed or status.st_uid != os.getuid():
            raise CheckpointError(
                f"fast tier: expected a folder that only user {os.getuid()} can write to at {self._path}, got "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}; have it removed."
            )

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Stop making copies if the block fails, and log why."""
        try:
            yield
        except (CheckpointError, OSError, MemoryError) as error:
            if self.is_kept:
                self.is_kept = False
                logger.warning(
                    "fast tier: continues without copies in memory on this node: %s", error
                )

    def commit(self, step: int, image: FileImage) -> None:
        """Make a file the copy of this step, in place of the last copy, unless copies have ended.

        Raises:
            CheckpointError: if the memory is full, or copies are a later attempt's.
        """
        if self.is_kept:
            self._store.path_of(step)  # raises if the step is not a later one
            self._store.commit(step, image)
            saved = Saved(self._store.attempt, step)
            self._store.verify_and_prune(saved, Retention(max_to_keep=1))

    def require_memory(self, nbytes: int) -> None:
        """Raise CheckpointError unless two copies of `nbytes` fit into memory: a new one is made beside the old one."""
        available = available_bytes()
        # copies of an earlier attempt give their memory to the new ones
        earlier_bytes = sum(_size_of(path) for path in self._path.glob("step-*.h5"))
        if available is not None and available + earlier_bytes < 2 * nbytes:
            raise CheckpointError(
                f"fast tier: expected {2 * nbytes} bytes of memory for a copy and the next one, got {available} "
                f"available; ask the batch system for more."
            )

    @property
    def n_blocks_read(self) -> int:
        """Blocks read back so far."""
        return self._store.n_blocks_read

    def stop(self) -> None:
        """Make no copies from now on."""
        self.is_kept = False

    def find(self) -> tuple[Saved, Path] | None:
        """Return the newest copy that verifies, and its path; None without one, or if others could have written it."""
        try:
            self._require_own()
            return Store(self._path).latest()
        except (FileNotFoundError, NotADirectoryError):  # creating it failed, which was logged
            return None
        except (CheckpointError, OSError) as error:
            logger.warning("fast tier: %s", error)
            return None

    def resume_from(self, saved: Saved) -> None:
        """Expect later steps than the restored checkpoint's, from whichever tier it was read."""
        if self.is_kept:
            with self.tolerated():
                self._store.resume_from(saved)

    def remove(self) -> None:
        """Free the memory: remove the copies of this attempt and of earlier ones. A failure is logged."""
        try:
            self._require_own()  # a link could lead to folders of others
            self._store.check_current()  # a later attempt may restore from them
            shutil.rmtree(self._path, onerror=_unless_gone)
        except FileNotFoundError:  # another node, which shares this memory, was quicker
            return
        except (CheckpointError, OSError) as error:
            logger.warning("fast tier: copies in memory stay on this node: %s", error)


def _size_of(path: Path) -> int:
    # just removed by another node, which shares this memory
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a folder unless another process has locked it; return whether it is locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to an open folder: it may have been removed before it was locked."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _unless_gone(call: Any, path: str, error: Any) -> None:
    """Raise an error of `rmtree`, but not where another node, which shares this memory, was quicker."""
    if not issubclass(error[0], FileNotFoundError):
        raise error[1]
