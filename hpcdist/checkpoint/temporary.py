"""Names of files that are being written, and whether their writer is still alive.

A process id is no identity: each container counts its own processes, and two hosts may write in one folder. So names
are random, and a writer holds a lock on its file for as long as it lives. Locks are sound among the processes of one
kernel, and the name holds the identifier of its boot. Whether a writer on another host lives, only the age of its
file tells.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path

#: Names are .FILE.tmp-BOOT-RANDOM: hidden, and in the folder of the file, so that a rename stays in one file system.
_TEMPORARY = re.compile(r"\.(.+)\.tmp-([0-9a-f]{8})-[0-9a-f]{16}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN_BOOT = "0" * 8
#: A file whose writer no lock can show (another host, no locks, an unknown boot) is abandoned after this long without
#: a change.
ABANDONED_AFTER_S = 3600.0
#: Errors of file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def _boot() -> str:
    """Return the first digits of the random identifier of this boot of the kernel; zeros where it is unknown."""
    try:
        return _BOOT_ID.read_text()[:8]
    except OSError:
        return _UNKNOWN_BOOT


def temporary_path(path: Path) -> Path:
    """Return a new name, beside `path`, under which its content is written before it is renamed to `path`."""
    suffix = f"tmp-{_boot()}-{secrets.token_hex(8)}"
    return path.with_name(f".{path.name}.{suffix}")


def file_of(name: str) -> str | None:
    """Return the name of the file that a temporary file was to become; None if `name` is not one of our names."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else match[1]


def hold(descriptor: int) -> bool:
    """Lock a new file until the last duplicate of its descriptor is closed; return whether it is locked.

    It is not if a sweeper came first, and may remove the file.
    """
    if _lock(descriptor) is False:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; return False if another one has locked it, None if the file system has no locks.

    It is a lock of the open file (F_OFD_SETLK), which does not exclude the flock that HDF5's readers take on a local
    file system.
    """
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yield whether the writer of a temporary file has died; no writer can take the file during the block."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield _is_abandoned(path, descriptor)
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path, descriptor: int) -> bool:
    age_s = time.time() - os.fstat(descriptor).st_mtime
    is_old = age_s > ABANDONED_AFTER_S
    is_of_this_boot = _is_of_this_boot(path.name)
    has_lock = _lock(descriptor)
    if has_lock is None:
        return is_old
    return has_lock and (is_of_this_boot or is_old)


def _is_of_this_boot(name: str) -> bool:
    """Return whether the temporary file of this name was made since this kernel was booted."""
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    boot = _boot()
    return boot != _UNKNOWN_BOOT and match[2] == boot
