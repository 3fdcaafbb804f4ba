"""The program that `hpcdist doctor` runs on each rank: starts MPI, measures, and prints lines that begin with `MARK`.

python -m hpcdist.cli.probe facts [FOLDER]      rank 0 prints the facts of all ranks, as JSON
python -m hpcdist.cli.probe signals             each rank prints that it is ready, and the signal that it receives
"""

import ctypes
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from hpcdist.checkpoint import durable
from hpcdist.cli.findings import MARK, RankFacts
from hpcdist.cluster.environment import read_environment, visible_gpus
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import CollectiveError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_window import NodeWindow
from hpcdist.runtime.process import make_world
from hpcdist.runtime.waiting import wait_until
from hpcdist.runtime.world import World

_COPY_BYTES = 64 << 20
_LINK_BYTES = 4 << 20
_N_ROUNDS = 20
#: Variables by which launchers tell ranks of each other, and the interface's name; Open MPI's mpirun sets both.
_PMI = (("PMIX_RANK", "PMIx"), ("PMI_RANK", "PMI"))
#: Longest time for a host to see a file that another host has made.
_SEEN_S = 10.0
#: Longest time that a rank waits for a signal.
_WAITING_S = 15.0


def main() -> None:
    """Print the facts of all ranks, or the signals that come, as the command line asks."""
    world = make_world()
    if sys.argv[1] == "signals":
        note_signals(world)
        return
    folder = ""
    if len(sys.argv) > 2:
        folder = sys.argv[2]
    facts_by_rank = world.comm.gather(vars(_facts_of(world, folder)), 0)
    if world.rank == 0:
        _print(json.dumps(facts_by_rank))


def _print(text: str) -> None:
    """Print a line at once, by one call, so that it does not mix with the lines of other ranks."""
    os.write(1, f"{MARK}{text}\n".encode())


def _facts_of(world: World, folder: str) -> RankFacts:
    """Return the facts of this rank. Collective over all ranks.

    Args:
        world: all ranks.
        folder: run folder to look for; empty for none.
    """
    environ = read_environment()
    shm = os.statvfs("/dev/shm")
    latency_s, link_bytes_s, skew_s = _measure_links(world)
    copy_bytes_s = _measure_copies(world)
    can_share = _can_share(world)
    folder_error = ""
    if folder:
        folder_error = _look_for_folder(world, Path(folder))
    return RankFacts(
        rank=world.rank,
        host=MPI.Get_processor_name(),
        task=str(world.task),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        n_host_cores=os.cpu_count() or 1,
        omp_threads=whole_number(environ.get("OMP_NUM_THREADS", "")) or 0,
        n_gpus=visible_gpus(environ),
        copy_bytes_s=copy_bytes_s,
        shm_bytes=shm.f_bavail * shm.f_frsize,
        can_share=can_share,
        skew_s=skew_s,
        latency_s=latency_s,
        link_bytes_s=link_bytes_s,
        folder_error=folder_error,
        pmi=next((kind for name, kind in _PMI if name in environ), ""),
        is_cuda_aware=_is_cuda_aware(),
    )


def _is_cuda_aware() -> bool | None:
    """Return whether the MPI library says that it takes GPU memory; None if it does not say.

    Open MPI, MPICH and MVAPICH offer a function that answers.
    """
    library_path = re.search(r"\S+/libmpi\.so\S*", Path("/proc/self/maps").read_text())
    if library_path is None:
        return None
    query = getattr(ctypes.CDLL(library_path[0]), "MPIX_Query_cuda_support", None)
    if query is None:
        return None
    return bool(query())


def _measure_copies(world: World) -> float:
    """Return bytes per second of a copy in memory while all ranks copy; the best of five. Collective over all ranks."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros(_COPY_BYTES, np.uint8)
    times = []
    for _ in range(5):
        world.wait(world.comm.Ibarrier())
        times.append(_seconds(lambda: np.copyto(target, source)))
    return _COPY_BYTES / min(times)


def _measure_links(world: World) -> tuple[float, float, float]:
    """Return latency, bytes per second and clock skew between rank 0 and this host's first rank.

    Rank 0 measures with one host after the other. The numbers are 0 on rank 0's host, and on ranks that are not the
    first of their host. Collective over all ranks.
    """
    is_first = world.hosts.node_comm.rank == 0
    first_ranks = world.comm.allgather(world.rank if is_first else -1)
    measurement = (0.0, 0.0, 0.0)
    for peer in [rank for rank in first_ranks if rank > 0]:
        if world.rank == 0:
            _answer(world, peer)
        elif world.rank == peer:
            measurement = _ask(world)
    return measurement


def _answer(world: World, peer: int) -> None:
    """Answer the messages of `_ask` on another rank."""
    small = np.zeros(1)
    large = np.zeros(_LINK_BYTES, np.uint8)
    for _ in range(_N_ROUNDS):
        world.comm.Recv(small, peer)
        small[0] = time.time()
        world.comm.Send(small, peer)
    for _ in range(3):
        world.comm.Recv(large, peer)
        world.comm.Send(large, peer)


def _ask(world: World) -> tuple[float, float, float]:
    """Return latency, bytes per second and clock skew between rank 0 and this rank."""
    small = np.zeros(1)
    large = np.zeros(_LINK_BYTES, np.uint8)
    rounds = []
    for _ in range(_N_ROUNDS):
        before = time.time()
        world.comm.Send(small, 0)
        world.comm.Recv(small, 0)
        after = time.time()
        rounds.append((after - before, (before + after) / 2 - small[0]))
    # the round that waited least tells the clock best
    shortest_s, skew_s = min(rounds)

    def there_and_back() -> None:
        world.comm.Send(large, 0)
        world.comm.Recv(large, 0)

    fastest_s = min(_seconds(there_and_back) for _ in range(3))
    return shortest_s / 2, 2 * _LINK_BYTES / fastest_s, float(skew_s)


def _can_share(world: World) -> bool:
    """Return whether the ranks of this host can share memory. Collective over all ranks."""
    try:
        NodeWindow(world.hosts.node_comm, 1 << 16, world)
    except CollectiveError:
        return False
    return True


def _look_for_folder(world: World, folder: Path) -> str:
    """Return why this rank does not see a file that rank 0 renames in a folder; empty if it sees the file.

    A folder that does not exist yet is not made: rank 0 uses the nearest one above it. Collective over all ranks.
    """
    path = Path()
    token = secrets.token_hex(8)
    error = ""
    if world.rank == 0:
        folder = folder.absolute()
        while not folder.is_dir():
            folder = folder.parent
        path = folder / f".hpcdist-doctor-{token}"
        try:
            durable.replace_text(durable.Disk(), path, token)
        except OSError as caught:
            error = f"cannot be written: {caught.strerror}"
    path, token, error = world.comm.bcast((path, token, error), 0)
    if not error and not wait_until(lambda: _holds(path, token), _SEEN_S, yields=0):
        error = f"does not show within {_SEEN_S:g} s what rank 0 has renamed in {path.parent}"
    world.wait(world.comm.Ibarrier())
    if world.rank == 0 and path.exists():
        durable.Disk().remove(path)
    return error


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _seconds(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def note_signals(world: World) -> None:
    """Print that this rank is ready, once all ranks are, and the first signal that comes. Collective over all ranks.

    It returns when the signal has come, or after `_WAITING_S`.
    """
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    world.wait(world.comm.Ibarrier())
    _print(f"ready {world.rank}")

    def has_come() -> bool:
        world.comm.Iprobe()  # so that MPI's messages of other ranks move on
        return bool(seen)

    wait_until(has_come, _WAITING_S, yields=0, max_sleep_s=0.02)
    for signal_number in seen[:1]:
        _print(f"{signal.Signals(signal_number).name} {world.rank}")


if __name__ == "__main__":
    main()
