"""Start of the worker processes of a loader, so that they do not disturb MPI.

A forked worker inherits the memory of its rank. Where MPI uses a card with remote direct memory access (RDMA), pages
that the card writes to may become the worker's after a fork, and messages of the rank are lost. Hence a host with such
a card, or one on which that is unknown, starts workers by a fork server, which has no MPI.

https://docs.open-mpi.org/en/main/tuning-apps/fork-system-popen.html
"""

import functools
import logging
import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from hpcdist.child_processes import signals_held_back
from hpcdist.cluster.environment import without_launch

logger = logging.getLogger("hpcdist")

#: Folders in which Linux lists cards for RDMA: InfiniBand, RoCE, Omni-Path and EFA; Slingshot.
_RDMA_FOLDERS = ("class/infiniband", "class/cxi")
_SYS = Path("/sys")


def worker_context(loader: Any) -> Any:
    """Return the multiprocessing context that starts the workers of a DataLoader; start its fork server, if any."""
    method = start_method_of(loader)
    if method == "fork" and not is_fork_safe():
        method = "forkserver"
    if method == "forkserver":
        start_fork_server()
    return multiprocessing.get_context(method)


def prepare_workers(loader: Any) -> None:
    """Let a DataLoader that the program iterates over start its workers so that they do not disturb MPI.

    Its `multiprocessing_context` is replaced where workers would be forked and must not be.
    """
    if not loader.num_workers:
        return
    context = worker_context(loader)
    if context.get_start_method() != start_method_of(loader):
        loader.multiprocessing_context = context


def start_method_of(loader: Any) -> str:
    """Return the start method that the program wants for the workers of a DataLoader."""
    if loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    chosen_method = multiprocessing.get_start_method(allow_none=True)
    return chosen_method or multiprocessing.get_all_start_methods()[0]


@functools.lru_cache(maxsize=1)
def is_fork_safe() -> bool:
    """Return whether MPI is known to use no card that a fork disturbs; the first time, log if it is not."""
    cards = rdma_cards(_SYS)
    if cards is not None and not cards:
        return True
    reason = "unknown network cards" if cards is None else f"cards for RDMA ({', '.join(cards)})"
    logger.warning(
        "DataLoader: workers are started by forkserver instead of fork, as this host has %s; let the dataset be sent "
        "to processes, and put the program under if __name__ == '__main__'.",
        reason,
    )
    return False


def rdma_cards(sys_folder: Path) -> Sequence[str] | None:
    """Return the names of a host's cards for RDMA; None where that is unknown.

    Args:
        sys_folder: folder in which the kernel describes the host, /sys.
    """
    if not (sys_folder / "class").is_dir():
        return None
    names: list[str] = []
    for folder in _RDMA_FOLDERS:
        path = sys_folder / folder
        if path.is_dir():
            names += sorted(card.name for card in path.iterdir())
    return names


def start_fork_server() -> None:
    """Start the fork server of this process, unless it runs, in an environment that names no launcher.

    It keeps its first environment for all processes that it starts, which are no ranks.
    """
    with signals_held_back(), without_launch():
        forkserver.ensure_running()
