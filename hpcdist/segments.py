"""The memory through which MPICH's ranks of a host talk: its names in /dev/shm stay behind when a rank is killed."""

import contextlib
import glob
import os
import re
import time

_PATTERN = re.compile(r"/dev/shm/mpich_shm_\S+")
#: A segment is made and opened by all ranks of a host within this time.
STALE_S = 600


def unlink_own() -> None:
    """Take the names of this job's segments away. To be called when MPI has started.

    MPI_Init returns when every rank of the host has opened them (MPICH 5, ch4/shm/posix: MPIDI_POSIX_comm_bootstrap).
    """
    for name in _open_in("self"):
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            os.unlink(name)


def sweep_stale() -> None:
    """Remove segments of this user that nobody has open: a rank of theirs was killed while MPI started."""
    old = {name for name in glob.glob("/dev/shm/mpich_shm_*") if _is_old(name)}
    if old:  # seldom: it takes a look at every process
        for name in old.difference(*map(_open_in, filter(str.isdecimal, os.listdir("/proc")))):
            with contextlib.suppress(FileNotFoundError):  # another rank sweeps too
                os.unlink(name)


def _is_old(segment: str) -> bool:
    try:
        status = os.stat(segment)
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S


def _open_in(process: str) -> set[str]:
    """Return the names of the segments that a process has open; none of other users' processes."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            return set(_PATTERN.findall(maps.read()))
    except OSError:
        return set()
