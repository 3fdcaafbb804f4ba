"""How much more memory this process may take: that of the machine, and of the memory cgroups that batch systems set.

In a cgroup, memory is charged when it is first touched, and a process that exceeds its limit is killed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _CgroupFiles(NamedTuple):
    """Names of the files in which a version of cgroups says what a group may take and has taken.

    Attributes:
        limit: name of the file with the limit in bytes.
        usage: name of the file with the bytes in use.
        stat_prefix: prefix of the names in memory.stat.
    """

    limit: str
    usage: str
    stat_prefix: str


_CGROUPS_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_CGROUPS_2 = _CgroupFiles("memory.max", "memory.current", "")
#: Names in memory.stat of the parts of the page cache, which can be dropped.
_PAGE_CACHE = ("inactive_file", "active_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may still take, page cache that can be dropped included; None if unknown.

    Args:
        root: folder that holds /proc and /sys, for tests.

    Cost: some ten small files of /proc and /sys.
    """
    limits = list(_of_machine(root / "proc/meminfo"))
    limits += _of_cgroups(root)
    return min(limits, default=None)


def _of_machine(path: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                kibibytes = int(line.split()[1])
                yield kibibytes << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield how many bytes each memory cgroup of this process, and each cgroup above it, leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
            files = _CGROUPS_2
        elif controllers == "memory":
            mount = root / "sys/fs/cgroup/memory"
            files = _CGROUPS_1
        else:
            continue
        path = Path(name.lstrip("/"))
        for ancestor in (path, *path.parents):
            yield from _left_in(mount / ancestor, files)


def _left_in(group: Path, files: _CgroupFiles) -> Iterator[int]:
    """Yield how many bytes a cgroup leaves; nothing without a limit, or outside of this container."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = int((group / files.limit).read_text())
        usage = int((group / files.usage).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in lines)
        page_cache = 0
        for name in _PAGE_CACHE:
            nbytes = stat.get(files.stat_prefix + name, "0")
            page_cache += int(nbytes)
        yield limit - usage + page_cache
