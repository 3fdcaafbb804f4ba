"""How much more memory this process may take: that of the machine, and of the memory cgroups that batch systems set.

In a cgroup, memory is charged when it is first touched, and a process that exceeds its limit is killed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

#: Of each version of cgroups: the files with limit and usage, and the prefix of names in memory.stat.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may still take, page cache that can be dropped included; None if unknown.

    Args:
        root: where /proc and /sys are, for tests.

    Cost: some ten small files of /proc and /sys.
    """
    limits = [*_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]
    return min(limits) if limits else None


def _of_machine(path: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield what each memory cgroup of this process, and each above it, leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            version, mount = (1, "sys/fs/cgroup/memory") if controllers else (2, "sys/fs/cgroup")
            path = Path(name.lstrip("/"))
            for ancestor in (path, *path.parents):
                yield from _left_in(root / mount / ancestor, version)


def _left_in(group: Path, version: int) -> Iterator[int]:
    """Yield how many bytes a cgroup leaves; nothing without a limit, or outside of this container."""
    limit_file, usage_file, prefix = _FILES[version]
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit, usage = (int((group / name).read_text()) for name in (limit_file, usage_file))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield (
            limit
            - usage
            + sum(int(stat.get(prefix + name, "0")) for name in ("inactive_file", "active_file"))
        )
