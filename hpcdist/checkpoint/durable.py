"""The seam to the file system: every durable operation of a checkpoint goes through here.

Replacing a file so that a crash leaves the old one or the new one takes four steps: write beside it, fsync the file,
rename, fsync the folder. (T. Pillai et al., All File Systems Are Not Created Equal, OSDI 2014.)
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

#: Files being written are called NAME.tmp-PID; a reader never looks at them.
_TEMPORARY = re.compile(r"\.tmp-\d+$")
#: What lockf says on file systems without locks: there is no guard then.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and their names durable.

    Raises:
        OSError: when the file system refuses.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def lock_file(path: Path) -> None:
    """Lock a file for as long as this process lives; the same process may lock it again.

    The descriptor is left open on purpose: POSIX drops a process's lock when any descriptor of the file is closed.

    Raises:
        OSError: when another process holds the lock, or the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise OSError(error.errno, "another job that is writing there") from None
        if error.errno not in _NO_LOCKS:
            raise


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Make `path` what write(temporary path) writes, wholly or not at all.

    Args:
        path: the file to make or replace.
        write: writes the whole file at the path it is given; on the same file system.

    Raises:
        OSError: when the file system refuses; `path` is then as it was and the temporary file is gone.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write(temporary)
        fsync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file if it is there. A crash may bring it back until the folder is synced."""
    path.unlink(missing_ok=True)


def sweep_temporary(folder: Path) -> None:
    """Remove what writers that were killed left behind. Only one process may write to the folder."""
    for path in folder.iterdir():
        if _TEMPORARY.search(path.name):
            remove(path)
