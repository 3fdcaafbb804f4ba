"""What Linux tells of a process, in /proc."""

import functools
import os
import time
from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the process's name: its state, its parent and so on.

    Raises:
        OSError: if there is no such process, or it is hidden.
    """
    # the name, in parentheses, may have spaces and parentheses
    _, _, behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return behind_name.split()


@functools.cache  # readers of records tell those of one process by it
def process_began() -> float:
    """Return when this process was started, in seconds since 1970; now, where Linux does not tell."""
    try:
        ticks = int(stat_fields(os.getpid())[19])
    except (OSError, ValueError, IndexError):  # as in a container without /proc
        return time.time()
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + ticks / os.sysconf("SC_CLK_TCK")
