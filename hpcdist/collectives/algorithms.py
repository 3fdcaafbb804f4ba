"""The table of algorithms, how a route is carried out, and the measurement that AUTO decides by."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import halving, hierarchical, library, ring, shared_memory, slices
from hpcdist.collectives.gpu import hierarchical as gpu_hierarchical
from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op, divide
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import (
    SMALLEST_BYTES,
    Route,
    candidates,
    goes_by_halving,
    is_clearly_faster,
)
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.plan.placement import Placement
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
_SHARED_MEMORY = Implementation.SHARED_MEMORY
#: Sizes at which algorithms are compared; a size in between goes with the one below it.
MEASURED_BYTES = tuple(SMALLEST_BYTES << shift for shift in range(0, 14, 2))
#: Seconds for the rounds of one size. Where they do not suffice for the fewest rounds, this size and larger ones keep
#: the expected algorithm.
LIMIT_S = 0.08
#: Buffers rotate through this much memory so that they are not in the cache, as in real use.
ROTATED_BYTES = 64 << 20
#: Most and fewest rounds of a size. A round of a small size makes up to `_CALLS` calls, of `_CALLS_BYTES` together.
_ROUNDS = 20
_LEAST_ROUNDS = 8
_CALLS = 4
_CALLS_BYTES = 64 << 10


def run(
    route: Route,
    buffer: Any,
    group: Group,
    op: Op = SUM,
    wire: Wire = PLAIN,
    bucket: int = 0,
    divisor: float | None = None,
) -> None:
    """Replace `buffer` by its reduction over all ranks, by the algorithm of a route.

    Collective over `group.comm`. Blocking.

    Args:
        route: how the buffer is summed; equal on all ranks.
        buffer: a contiguous host array; a device buffer where the route says so.
        group: the ranks.
        op: the reduction.
        wire: how elements travel between hosts, for HIERARCHICAL.
        bucket: number that names the buffer to a wire that remembers its rounding errors.
        divisor: number that the result is divided by; None if it is not divided.
    """
    algorithm = route.algorithm
    if algorithm is _SHARED_MEMORY:  # first, as small sums should cost little
        shared_memory.all_reduce(buffer, group, op, divisor)
        return
    if not isinstance(algorithm, Implementation):
        algorithm.all_reduce(buffer.reshape(-1), group.comm, library.mpi_op(op))
    elif algorithm is not Implementation.HIERARCHICAL:
        ALGORITHMS[algorithm](buffer, group, op)
    elif route.is_on_device:
        gpu_hierarchical.all_reduce(buffer, group, op)
    elif op.mpi_name == "SUM" and wire is PLAIN and _is_by_halving(route, group.placement):
        slices.all_reduce(buffer, group, op)
    else:
        hierarchical.all_reduce(buffer, group, op, route.is_ordered, wire, bucket)
    if divisor is None:
        return
    if isinstance(buffer, np.ndarray):
        divide(buffer, divisor)
    else:
        buffer /= divisor


def _is_by_halving(route: Route, placement: Placement) -> bool:
    """Return whether a hierarchical sum is made by halving in lanes, in an order that the route allows."""
    has_right_order = placement.is_aligned or not route.is_ordered
    return has_right_order and goes_by_halving(placement)


def reduce_by_auto(
    array: npt.NDArray[Any],
    group: Group,
    op: Op,
    divisor: float | None = None,
) -> None:
    """Replace a host array by its reduction over all ranks, by the algorithm that AUTO chooses for its size.

    Collective over `group.comm`. Blocking. The first call of 4 KiB or more measures. Arguments are those of `run`.
    """
    nbytes = array.nbytes
    if nbytes >= SMALLEST_BYTES and group.facts.table is None and group.size > 1:
        if group.facts.can_share_memory and group.size == group.node_comm.size:
            shared_memory.require_same(array, op, group)
        measure(group)
    for end_bytes, route in group.auto_routes:
        if nbytes < end_bytes:
            run(route, array, group, op, divisor=divisor)
            return


def restore_measurements(group: Group, table: list[tuple[int, str]]) -> None:
    """Choose as the table of a checkpoint says, so that a restart sums in the same order. Not collective.

    A table of a run on one host is of no use on several: these measure again.
    """
    rows = tuple((least_bytes, Implementation(name)) for least_bytes, name in table)
    is_of_one_host = any(algorithm is Implementation.SHARED_MEMORY for _, algorithm in rows)
    if len(group.placement.hosts) == 1 or not is_of_one_host:
        group.set_facts(replace(group.facts, table=rows))


def measurements_of(group: Group) -> list[tuple[int, str]] | None:
    """Return the table that was measured or restored, as a checkpoint stores it; None when none was needed yet."""
    table = group.facts.table
    if table is None:
        return None
    return [(least_bytes, algorithm.value) for least_bytes, algorithm in table]


def measure(group: Group) -> None:
    """Measure which algorithm is the fastest for which size, unless that is known already.

    Collective over `group.comm` where it is not known. The times of the slowest rank decide. Takes less than a second.
    """
    if group.facts.table is not None or group.size == 1 or not group.facts.can_share_memory:
        return
    rows = [(nbytes, candidates(group.placement, nbytes)[0]) for nbytes in MEASURED_BYTES]
    arena = np.empty(ROTATED_BYTES // 4, np.float32)
    arena.fill(0)  # now, not page by page in what is timed; sums of zeros never overflow
    for number, nbytes in enumerate(MEASURED_BYTES):
        contenders = candidates(group.placement, nbytes)
        times = _times(group, _rotate(arena, nbytes), contenders, nbytes)
        has_evidence = len(times) >= _LEAST_ROUNDS
        expected_times = times[:, 0]
        other_times = times[:, 1]
        if has_evidence and is_clearly_faster(other_times, expected_times):
            rows[number] = nbytes, contenders[1]
        if group.rank == 0:
            _log_choice(rows[number], contenders, times)
        if not has_evidence:
            break
    group.set_facts(replace(group.facts, table=tuple(rows)))


def _log_choice(
    row: tuple[int, Implementation],
    contenders: tuple[Implementation, Implementation],
    times: npt.NDArray[np.float64],
) -> None:
    """Log the row of the table that was measured, and the median times (n_rounds, 2) of the contenders."""
    nbytes, chosen = row
    descriptions = []
    for contender, median_s in zip(contenders, np.median(times, 0), strict=True):
        descriptions.append(f"{contender.value} {1e6 * median_s:.1f} us")
    contender_times = ", ".join(descriptions)
    logger.info(
        "all_reduce: AUTO takes %s from %d bytes on: %s", chosen.value, nbytes, contender_times
    )


def _times(
    group: Group,
    buffers: Iterator[npt.NDArray[Any]],
    names: tuple[Implementation, Implementation],
    nbytes: int,
) -> npt.NDArray[np.float64]:
    """Return the seconds of one call on the slowest rank, (n_rounds, 2), by each of two algorithms in turn."""
    n_calls = max(1, min(_CALLS, _CALLS_BYTES // nbytes))
    is_aligned = group.placement.is_aligned
    routes = [Route(name, is_ordered=is_aligned) for name in names]

    def take_rounds(n_rounds: int) -> npt.NDArray[np.float64]:
        times = np.zeros((n_rounds, 2))
        for number in range(n_rounds):
            columns = (0, 1) if number % 2 else (1, 0)
            for column in columns:
                arrays = [next(buffers) for _ in range(n_calls)]
                group.wait([group.comm.Ibarrier()])
                # the wait above sleeps: a rank that wakes late must not be what is measured
                group.comm.Barrier()
                started = time.perf_counter()
                for array in arrays:
                    run(routes[column], array, group)
                elapsed_s = time.perf_counter() - started
                times[number, column] = elapsed_s / n_calls
        group.comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return times

    first_times = take_rounds(3)[1:]  # the very first makes connections and slots
    round_s = n_calls * first_times.min(0).sum()
    n_rounds = min(_ROUNDS, int(LIMIT_S / round_s))
    if n_rounds < _LEAST_ROUNDS:
        return first_times
    return take_rounds(n_rounds)


def _rotate(arena: npt.NDArray[Any], nbytes: int) -> Iterator[npt.NDArray[Any]]:
    """Yield parts of `nbytes` of the arena in turn, for ever."""
    n_elements = nbytes // arena.itemsize
    last_start = arena.size - n_elements
    while True:
        for start in range(0, last_start + 1, n_elements):
            yield arena[start : start + n_elements]
