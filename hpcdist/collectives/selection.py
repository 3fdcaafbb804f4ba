"""AUTO: which algorithm an all-reduce of some size gets, from times measured once and the same on every rank."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import halving, hierarchical, mpi, nccl, ring, shared_memory
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.mpi import MPI

AllReduce = Callable[[npt.NDArray[Any], Group, Op], None]
#: Every algorithm, by its public name. Taking one out means its file, this line and a test's parameter.
ALGORITHMS: Mapping[Implementation, AllReduce] = {
    Implementation.MPI: mpi.all_reduce,
    Implementation.SHARED_MEMORY: shared_memory.all_reduce,
    Implementation.HIERARCHICAL: hierarchical.all_reduce,
    Implementation.RING: ring.all_reduce,
    Implementation.HALVING: halving.all_reduce,
    Implementation.NCCL: nccl.all_reduce,
}
#: Below this size the library's own call is taken without asking: nothing of ours is faster.
SMALLEST_BYTES = 4096
#: Sizes at which algorithms are compared; one in between goes with the size below it.
MEASURED_BYTES = tuple(SMALLEST_BYTES << shift for shift in range(0, 14, 2))
#: Time after which no larger size is measured. What is not measured goes by ours, which moves the fewest bytes.
LIMIT_S = 0.4
#: Ours must be this much faster than the library's to be taken: measured once, on buffers that are in the cache.
MARGIN = 1.25
#: Rounds of small and of large sizes.
_ROUNDS, _LARGE_ROUNDS, _LARGE_BYTES = 5, 2, 1 << 18


def choose(group: Group, nbytes: int) -> Implementation:
    """Return the algorithm for a buffer of some size.

    Collective at the first call that is asked about at least SMALLEST_BYTES: `group.comm`, in which it takes below a
    second.
    """
    if nbytes < SMALLEST_BYTES or group.size == 1 or not group.can_share_memory:
        return Implementation.MPI
    table = group.keep("table", lambda: measure(group))
    return Implementation(next((name for least, name in reversed(table) if nbytes >= least), "MPI"))


def table_of(group: Group) -> list[tuple[int, str]] | None:
    """Return the table that was measured or restored; None when none was needed yet. Equal on all ranks."""
    table: list[tuple[int, str]] | None = group.kept("table")
    return table


def restore_table(group: Group, table: list[tuple[int, str]]) -> None:
    """Choose as a checkpoint's table says, so that a restart sums in the order of the run that it goes on with."""
    group.put("table", [(least, name) for least, name in table])


def measure(group: Group) -> list[tuple[int, str]]:
    """Return (bytes, algorithm) rows, ascending: from that many bytes on the algorithm is the fastest.

    Collective: `group.comm`. The chief's times decide.
    """
    rows: list[tuple[int, str]] = []
    started = time.perf_counter()
    other = Implementation.SHARED_MEMORY if len(group.placement.hosts) == 1 else Implementation.HIERARCHICAL
    for nbytes in MEASURED_BYTES:
        times = _times(group, nbytes, (Implementation.MPI, other))
        is_better = times[Implementation.MPI] > MARGIN * times[other]
        chosen = group.world.all_reduce_int(int(is_better and group.rank == 0), MPI.MAX, group.comm)
        rows.append((nbytes, (other if chosen else Implementation.MPI).value))
        is_late = group.rank == 0 and time.perf_counter() - started > LIMIT_S
        if group.world.all_reduce_int(int(is_late), MPI.MAX, group.comm):
            return [*rows, (4 * nbytes, other.value)]
    return rows


def _times(group: Group, nbytes: int, candidates: tuple[Implementation, ...]) -> dict[Implementation, float]:
    """Return this rank's best time of each candidate, taken in turn."""
    array = np.ones(nbytes // 4, np.float32)
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(_ROUNDS if nbytes < _LARGE_BYTES else _LARGE_ROUNDS):
        for candidate in candidates:
            array[:] = 1  # sums of sums would overflow, and infinities may be slow
            group.wait([group.comm.Ibarrier()])
            started = time.perf_counter()
            ALGORITHMS[candidate](array, group, SUM)
            best[candidate] = min(best[candidate], time.perf_counter() - started)
    return best


def for_gradients(group: Group, implementation: Implementation) -> Implementation:
    """Return what AUTO is for gradients: the algorithm that sums in the order of replicas, whatever the size."""
    if implementation is not Implementation.AUTO:
        return implementation
    if not group.can_share_memory:
        return Implementation.MPI
    return Implementation.SHARED_MEMORY if len(group.placement.hosts) == 1 else Implementation.HIERARCHICAL
