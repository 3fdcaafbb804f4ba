"""The table of algorithms, how a route is carried out, and the measurement that AUTO decides by."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import halving, hierarchical, library, ring, shared_memory
from hpcdist.collectives.gpu import hierarchical as gpu_hierarchical
from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op, silently
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import SMALLEST_BYTES, Route
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.runtime.mpi import MPI

logger = logging.getLogger("hpcdist")

AllReduce = Callable[[npt.NDArray[Any], Group, Op], None]
#: Every built-in algorithm on host buffers. To remove one, delete its file, its line here and its test parameter.
ALGORITHMS: Mapping[Implementation, AllReduce] = {
    Implementation.MPI: library.all_reduce,
    Implementation.SHARED_MEMORY: shared_memory.all_reduce,
    Implementation.HIERARCHICAL: hierarchical.all_reduce,
    Implementation.RING: ring.all_reduce,
    Implementation.HALVING: halving.all_reduce,
    Implementation.NCCL: nccl.all_reduce,
}
#: Sizes at which algorithms are compared; a size in between goes with the one below it.
MEASURED_BYTES = tuple(SMALLEST_BYTES << shift for shift in range(0, 14, 2))
#: Time after which no larger size is measured. Larger sizes go by ours, which moves the fewest bytes.
LIMIT_S = 0.4
#: Ours must be this much faster than the library's to be taken: times measured once are noisy.
MARGIN = 1.1
#: Buffers rotate through this much memory so that they are not in the cache, as in real use.
ROTATED_BYTES = 64 << 20
#: Rounds of small and of large sizes.
_ROUNDS, _LARGE_ROUNDS, _LARGE_BYTES = 20, 5, 1 << 20


@silently
def run(route: Route, buffer: Any, group: Group, op: Op = SUM, wire: Wire = PLAIN, bucket: int = 0) -> None:
    """Replace `buffer` by its reduction over all ranks, by the algorithm of a route.

    Collective: `group.comm`. Blocking.

    Args:
        route: equal on all ranks.
        buffer: a contiguous host array; a device buffer where the route says so.
        group: the ranks.
        op: the reduction.
        wire: how elements travel between hosts, for HIERARCHICAL.
        bucket: names the buffer to a wire that remembers what it rounded away.
    """
    if not isinstance(route.algorithm, Implementation):
        route.algorithm.all_reduce(buffer.reshape(-1), group.comm, op.mpi_op)
    elif route.algorithm is not Implementation.HIERARCHICAL:
        ALGORITHMS[route.algorithm](buffer, group, op)
    elif route.is_on_device:
        gpu_hierarchical.all_reduce(buffer, group, op)
    else:
        hierarchical.all_reduce(buffer, group, op, route.is_ordered, wire, bucket)


def fastest_route(group: Group, nbytes: int) -> Route:
    """Return what AUTO chooses for a host array of this size.

    Collective where that is not measured yet: `group.comm`.
    """
    if nbytes >= SMALLEST_BYTES:
        measure(group)
    return next(route for least_bytes, route in group.auto_routes if nbytes >= least_bytes)


def restore_measurements(group: Group, table: list[tuple[int, str]]) -> None:
    """Choose as the table of a checkpoint says, so that a restart sums in the same order. Not collective."""
    rows = tuple((least_bytes, Implementation(name)) for least_bytes, name in table)
    has_one_host_only = any(algorithm is Implementation.SHARED_MEMORY for _, algorithm in rows)
    if len(group.placement.hosts) == 1 or not has_one_host_only:  # else it is of a run on one host: measure again
        group.set_facts(replace(group.facts, table=rows))


def measurements_of(group: Group) -> list[tuple[int, str]] | None:
    """Return the table that was measured or restored, as a checkpoint stores it; None when none was needed yet."""
    table = group.facts.table
    return None if table is None else [(least_bytes, algorithm.value) for least_bytes, algorithm in table]


def measure(group: Group) -> None:
    """Measure which algorithm is the fastest for which size, unless that is known already.

    Collective where it is not known: `group.comm`. The times of rank 0 decide. Takes less than a second.
    """
    if group.facts.table is not None or group.size == 1 or not group.facts.can_share_memory:
        return
    ours = Implementation.SHARED_MEMORY if len(group.placement.hosts) == 1 else Implementation.HIERARCHICAL
    rows: list[tuple[int, Implementation]] = []
    started = time.perf_counter()
    arena = np.empty(ROTATED_BYTES // 4, np.float32)
    arena.fill(0)  # now, not page by page in what is timed; sums of zeros never overflow
    for nbytes in MEASURED_BYTES:
        n_rounds = _ROUNDS if nbytes < _LARGE_BYTES else _LARGE_ROUNDS
        times = _times(group, _rotate(arena, nbytes), (Implementation.MPI, ours), n_rounds)
        is_better = times[Implementation.MPI] > MARGIN * times[ours]
        is_ours = group.world.all_reduce_int(int(is_better and group.rank == 0), MPI.MAX, group.comm)
        rows.append((nbytes, ours if is_ours else Implementation.MPI))
        if group.rank == 0:
            took = ", ".join(f"{name.value} {1e6 * seconds:.1f} us" for name, seconds in times.items())
            logger.info("all_reduce: AUTO takes %s from %d bytes on: %s", rows[-1][1].value, nbytes, took)
        is_late = group.rank == 0 and time.perf_counter() - started > LIMIT_S
        if group.world.all_reduce_int(int(is_late), MPI.MAX, group.comm):
            rows.append((4 * nbytes, ours))
            break
    group.set_facts(replace(group.facts, table=tuple(rows)))


def _times(
    group: Group, buffers: Iterator[npt.NDArray[Any]], candidates: tuple[Implementation, ...], n_rounds: int
) -> dict[Implementation, float]:
    """Return this rank's best time of each candidate, taken in turn."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(n_rounds):
        for candidate in candidates:
            array = next(buffers)
            group.wait([group.comm.Ibarrier()])
            group.comm.Barrier()  # the wait above sleeps: a rank that wakes late must not be what is measured
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
