"""Cleans up the shared memory segments that MPICH leaves in /dev/shm when a rank is killed."""

import contextlib
import glob
import os
import re
import time

_PATTERN = re.compile(r"/dev/shm/mpich_shm_\S+")
#: All ranks of a host have opened a segment this long after it was made.
STALE_S = 600


def unlink_own() -> None:
    """Unlink the names of this job's segments, which stay mapped. Call it once MPI has started.

    MPI_Init returns when every rank of the host has opened them (MPICH 5, ch4/shm/posix: MPIDI_POSIX_comm_bootstrap).
    """
    for name in _open_in("self"):
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            os.unlink(name)


def remove_stale() -> None:
    """Remove segments of this user that no process has open: a rank was killed while MPI started."""
    old = {name for name in glob.glob("/dev/shm/mpich_shm_*") if _is_old(name)}
    if not old:
        return
    # rare, and worth a look at every process
    processes = filter(str.isdecimal, os.listdir("/proc"))
    for name in old.difference(*map(_open_in, processes)):
        with contextlib.suppress(FileNotFoundError):  # another rank cleans up too
            os.unlink(name)


def _is_old(segment: str) -> bool:
    try:
        status = os.stat(segment)
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S


def _open_in(process: str) -> set[str]:
    """Return the names of the segments that a process has open; none for processes of other users."""
    try:
        with open(f"/proc/{process}/maps", errors="surrogateescape") as maps:
            return set(_PATTERN.findall(maps.read()))
    except OSError:
        return set()
