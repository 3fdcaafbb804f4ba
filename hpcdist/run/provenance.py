"""Provenance of a checkpoint: the versions, threads and placement that the bits of further training depend on."""

import logging
import platform
import time
from functools import cache
from importlib.metadata import version
from typing import Any

from hpcdist.program.tensors import describe_numerics
from hpcdist.runtime.mpi import library_name
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: Facts that the bits of further training depend on; a restore warns if one has changed.
_BITS_DEPEND_ON = [
    "ranks",
    "hosts",
    "threads",
    "instruction_set",
    "torch",
    "mpi",
    "all_reduce",
    "wire",
    "replicas",
    "comm_hook",
    "local_steps",
]
#: Facts that do not change bits if the number of replicas is fixed.
_OF_PLACEMENT = ("ranks", "hosts", "mpi")


def describe(world: World, sums: dict[str, Any]) -> dict[str, Any]:
    """Return versions, ranks, hosts, threads, how gradients are summed, and the time. Not collective."""
    return {
        **_versions(),
        **describe_numerics(),
        **sums,
        "python": platform.python_version(),
        "mpi": library_name(),
        "ranks": world.role_comm.size,
        "hosts": world.n_hosts,
        "host": platform.node(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@cache  # reading them opens files, while training waits
def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("hpcdist", "numpy", "h5py", "mpi4py")}


def warn_of_changes(written: dict[str, Any], now: dict[str, Any]) -> None:
    """Log which facts have changed since a checkpoint was written, if the change may alter bits."""
    has_fixed_replicas = (
        now.get("replicas") is not None and written.get("replicas") == now["replicas"]
    )
    changes = []
    for key in _BITS_DEPEND_ON:
        if has_fixed_replicas and key in _OF_PLACEMENT:
            continue
        # older files lack some facts
        if key in written and key in now and written[key] != now[key]:
            changes.append(f"{key} {written[key]} -> {now[key]}")
    if changes:
        logger.warning(
            "restore: bits may differ from an unbroken run, as these changed: %s",
            ", ".join(changes),
        )
