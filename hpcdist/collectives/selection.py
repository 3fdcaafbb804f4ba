"""AUTO: which algorithm an all-reduce of some size gets, from times measured once and the same on every rank."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import halving, hierarchical, hierarchical_cuda, mpi, nccl, nccl_joining, ring, shared_memory
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
#: Ours must be this much faster than the library's to be taken, as times measured once are noisy.
MARGIN = 1.1
#: Buffers rotate through this much memory so that they are not in the cache, as in real use.
ROTATED_BYTES = 64 << 20
#: Rounds of small and of large sizes.
_ROUNDS, _LARGE_ROUNDS, _LARGE_BYTES = 20, 5, 1 << 20


def choose(group: Group, nbytes: int) -> Implementation:
    """Return the algorithm for a buffer of some size.

    Collective at the first call that is asked about at least SMALLEST_BYTES: `group.comm`, in which it takes below a
    second.
    """
    if group.size == 1 or not group.can_share_memory:
        group.library_bytes = mpi.PIECE_BYTES
        return Implementation.MPI
    if nbytes < SMALLEST_BYTES:
        group.library_bytes = max(group.library_bytes, SMALLEST_BYTES)
        return Implementation.MPI
    table = table_of(group)
    if table is None:
        restore_table(group, table := measure(group))
    return Implementation(next((name for least, name in reversed(table) if nbytes >= least), "MPI"))


def table_of(group: Group) -> list[tuple[int, str]] | None:
    """Return the table that was measured or restored; None when none was needed yet. Equal on all ranks."""
    table: list[tuple[int, str]] | None = group.kept("table")
    return table


def restore_table(group: Group, table: list[tuple[int, str]]) -> None:
    """Choose as a table says: one that was just measured, or a checkpoint's, so that a restart sums alike."""
    rows = [(least, name) for least, name in table]
    if len(group.placement.hosts) > 1 and any(name == Implementation.SHARED_MEMORY.value for _, name in rows):
        return  # of a run on one host: it is measured anew
    group.put("table", rows)
    others = [least for least, name in rows if name != Implementation.MPI.value]
    group.library_bytes = min([mpi.PIECE_BYTES, *others])


def measure(group: Group) -> list[tuple[int, str]]:
    """Return (bytes, algorithm) rows, ascending: from that many bytes on the algorithm is the fastest.

    Collective: `group.comm`. The chief's times decide.
    """
    rows: list[tuple[int, str]] = []
    started = time.perf_counter()
    other = Implementation.SHARED_MEMORY if len(group.placement.hosts) == 1 else Implementation.HIERARCHICAL
    arena = np.empty(ROTATED_BYTES // 4, np.float32)
    arena.fill(0)  # now, not page by page in what is timed; sums of zeros never overflow
    for nbytes in MEASURED_BYTES:
        n_rounds = _ROUNDS if nbytes < _LARGE_BYTES else _LARGE_ROUNDS
        times = _times(group, _rotate(arena, nbytes), (Implementation.MPI, other), n_rounds)
        is_better = times[Implementation.MPI] > MARGIN * times[other]
        chosen = group.world.all_reduce_int(int(is_better and group.rank == 0), MPI.MAX, group.comm)
        rows.append((nbytes, (other if chosen else Implementation.MPI).value))
        is_late = group.rank == 0 and time.perf_counter() - started > LIMIT_S
        if group.world.all_reduce_int(int(is_late), MPI.MAX, group.comm):
            return [*rows, (4 * nbytes, other.value)]
    return rows


def _times(
    group: Group, buffers: Iterator[npt.NDArray[Any]], candidates: tuple[Implementation, ...], n_rounds: int
) -> dict[Implementation, float]:
    """Return this rank's best time of each candidate, taken in turn."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(n_rounds):
        for candidate in candidates:
            array = next(buffers)
            group.wait([group.comm.Ibarrier()])
            group.comm.Barrier()  # awake: the wait above sleeps, and who wakes late would be measured
            started = time.perf_counter()
            ALGORITHMS[candidate](array, group, SUM)
            best[candidate] = min(best[candidate], time.perf_counter() - started)
    return best


def _rotate(arena: npt.NDArray[Any], nbytes: int) -> Iterator[npt.NDArray[Any]]:
    """Yield parts of `nbytes` of the arena in turn, for ever."""
    n_elements = nbytes // arena.itemsize
    while True:
        for start in range(0, arena.size - n_elements + 1, n_elements):
            yield arena[start : start + n_elements]


def on_device(group: Group, op: Op, implementation: Implementation, dtype: str) -> AllReduce | None:
    """Return the algorithm for a buffer on a GPU, None when it is to travel through the host.

    NCCL asked for by name is taken for any op and dtype, and says itself what it cannot carry.

    Collective at the first call with AUTO or HIERARCHICAL: `group.comm`, which finds out whether all ranks have NCCL.

    NCCL knows the links between GPUs and between hosts, so AUTO is NCCL where it can be had.
    """
    if implementation is Implementation.NCCL:
        return nccl.all_reduce
    is_asked = implementation in (Implementation.AUTO, Implementation.HIERARCHICAL)
    is_carried = op.name in nccl.OPS and dtype in nccl.DTYPES
    if not is_asked or not is_carried or not nccl_joining.is_available(group):
        return None
    is_by_lanes = implementation is Implementation.HIERARCHICAL and op is SUM and group.placement.is_even
    return hierarchical_cuda.all_reduce if is_by_lanes else nccl.all_reduce


def for_gradients(group: Group, implementation: Implementation) -> Implementation:
    """Return what AUTO is for gradients: the algorithm that sums in the order of replicas, whatever the size."""
    if implementation is not Implementation.AUTO:
        return implementation
    if not group.can_share_memory:
        return Implementation.MPI
    return Implementation.SHARED_MEMORY if len(group.placement.hosts) == 1 else Implementation.HIERARCHICAL
