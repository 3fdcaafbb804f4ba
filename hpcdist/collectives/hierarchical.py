"""All-reduce in two levels: through shared memory in each host, and in one lane per local rank across hosts."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.shared_memory import require_same
from hpcdist.collectives.staging import Stage, add_rows
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.placement import LanePlan
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_window import NodeWindow

Array = npt.NDArray[Any]
#: Most and fewest bytes of a chunk on one rank; three chunks are in flight at once.
CHUNK_BYTES = 1 << 20
LEAST_CHUNK_BYTES = 64 << 10
#: What a chunk costs besides its bytes: messages, and sleeps of those that wait for them.
CHUNK_S = 1e-4
#: Bytes whose sum is timed to learn what a byte costs.
_PROBE_BYTES = (16 << 10, 256 << 10)
#: Slots in shared memory. A slot is free again when every local rank has read the result, two chunks later.
DEPTH = 4


def all_reduce(
    array: npt.NDArray[Any],
    group: Group,
    op: Op = SUM,
    is_ordered: bool | None = None,
    wire: Wire = PLAIN,
    key: int = 0,
) -> None:
    """Replace `array` by its reduction over all ranks.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes; compared inside each host.

    Args:
        array: C-contiguous, of numbers, on the host; overwritten.
        group: any placement.
        op: the reduction.
        is_ordered: combine in the binary tree over all ranks, whatever the placement. Default: where that costs no more
            bytes, on hosts that hold aligned powers of two. Otherwise hosts are combined in a tree over hosts.
        wire: how elements travel between hosts.
        key: names the array to a wire that remembers what it rounded away.

    Cost: each host sends 2(m-1)/m * n bytes and receives as many, with m hosts and n = array.nbytes, or up to
        log2(ranks of a host) times more in the first half of an ordered sum over unaligned hosts. Two message
        latencies; a host works on one chunk while others are on the wire. The first call of a group times small sums.

    Source: lanes as in Traff & Hunold, Decomposing collectives for exploiting multi-lane communication (CLUSTER 2020,
        arXiv 1910.13373); ours sums in an order that is fixed by rank numbers.
    """
    flat = array.reshape(-1)
    ordered = group.placement.is_aligned if is_ordered is None else is_ordered
    if group.node_comm.size > 1:
        require_same(flat, op, group)
    # a wire rounds by chunks: if their size followed a measured time, so would the bits
    size_bytes = CHUNK_BYTES
    if wire is PLAIN:
        size_bytes = chunk_bytes(flat.nbytes, seconds_per_byte(group))
    chunk_size = size_bytes // flat.itemsize
    starts = range(0, flat.size, chunk_size)
    chunks = [_Chunk(group, flat[start : start + chunk_size], start) for start in starts]
    plan = group.lane_plan(ordered)
    begins = [functools.partial(chunk.begin, op, plan, wire, key) for chunk in chunks]
    run_pipeline(begins, chunks)


def _make_stage(group: Group) -> Stage:
    """Return the slots of a group. Collective over the group's ranks of this host."""
    window = NodeWindow(group.node_comm, DEPTH * CHUNK_BYTES, group.world)
    local_rank = group.node_comm.rank
    return Stage(window.pieces, local_rank, DEPTH, CHUNK_BYTES, group.placement.n_lanes)


class InFlight(Protocol):
    """A chunk whose messages are on their way."""

    def combine(self) -> None:
        """Combine what other hosts sent, and send them the result."""

    def finish(self) -> None:
        """Wait for the other hosts' results."""


def run_pipeline(begins: Sequence[Callable[[], None]], chunks: Sequence[InFlight]) -> None:
    """Begin, combine and finish each chunk, in one order on all ranks, with three in flight."""
    n_chunks = len(chunks)
    for step in range(n_chunks + 2):
        if step < n_chunks:
            begins[step]()
        if 0 <= step - 1 < n_chunks:
            chunks[step - 1].combine()
        if step - 2 >= 0:
            chunks[step - 2].finish()


def chunk_bytes(nbytes: int, byte_s: float) -> int:
    """Return the bytes of a chunk of an array that travels between hosts, a multiple of 64 KiB. Pure.

    With n/c chunks, each of which costs `CHUNK_S`, and two that are on the wire alone, at the start and at the end, the
    sum takes n/c * CHUNK_S + (n + 2c) * byte_s, which is least for c = sqrt(n * CHUNK_S / (2 * byte_s)).

    >>> [chunk_bytes(8 << 20, 1.5 / rate) >> 10 for rate in (25e6, 125e6, 12.5e9)]
    [64, 128, 1024]

    Args:
        nbytes: bytes of the array.
        byte_s: seconds that a byte of an array takes.
    """
    fastest_bytes = int(math.sqrt(nbytes * CHUNK_S / (2 * byte_s)))
    multiple_bytes = fastest_bytes // LEAST_CHUNK_BYTES * LEAST_CHUNK_BYTES
    return min(max(multiple_bytes, LEAST_CHUNK_BYTES), CHUNK_BYTES)


def seconds_per_byte(group: Group) -> float:
    """Return the seconds that a byte of an array takes between hosts, as timed once; equal on all ranks.

    Collective over `group.comm` at the first call.
    """
    if len(group.placement.hosts) == 1:
        return 1e-10  # one host: nothing is on a wire
    return group.keep("seconds per byte", lambda: _time_bytes(group))


def _time_bytes(group: Group) -> float:
    """Return the seconds that a byte takes: what a large sum takes longer than a small one, for each byte more."""
    small_bytes, large_bytes = _PROBE_BYTES
    small_s = _fastest_sum_s(group, small_bytes)
    large_s = _fastest_sum_s(group, large_bytes)
    femtoseconds = int(1e15 * (large_s - small_s) / (large_bytes - small_bytes))
    slowest_femtoseconds = group.world.all_reduce_int(femtoseconds, MPI.MAX, group.comm)
    return max(1, slowest_femtoseconds) / 1e15


def _fastest_sum_s(group: Group, nbytes: int) -> float:
    """Return the seconds of the fastest of three sums of a buffer. Collective over `group.comm`."""
    plan = group.lane_plan(False)
    times = []
    for _ in range(3):
        group.wait([group.comm.Ibarrier()])
        started = time.perf_counter()
        zeros = np.zeros(min(nbytes, CHUNK_BYTES) // 4, np.float32)
        chunk = _Chunk(group, zeros, 0)
        begin = functools.partial(chunk.begin, SUM, plan, PLAIN, -1)
        run_pipeline([begin], [chunk])
        times.append(time.perf_counter() - started)
    return min(times)


class _Chunk:
    """One chunk in flight. The three calls of all chunks come in one fixed order on all ranks.

    Args:
        group: the ranks.
        elements: the chunk in the user's array.
        start: position of the chunk's first element in the array.
    """

    def __init__(self, group: Group, elements: Array, start: int) -> None:
        self._group = group
        self._is_alone = group.node_comm.size == 1
        self._elements = elements
        self._start = start
        self._exchange: LaneExchange | None = None

    def begin(
        self,
        op: Op,
        plan: LanePlan,
        wire: Wire,
        key: int,
    ) -> None:
        """Sum in the host, and send each other host its part of this rank's slice."""
        rows = [self._elements]
        start = self._start
        if not self._is_alone:
            group = self._group
            self._stage = group.keep("stage of lanes", lambda: _make_stage(group))
            self._views = self._stage.next_views(self._elements.dtype, self._elements.size)
            rows = self._stage.put(self._elements, self._views)
            start += self._views.owned_range.start
            group.barrier.wait()
            add_rows(rows, plan.local_additions, op.ufunc)
        self._rows = rows
        if self._group.lane_comm is not None:
            self._exchange = LaneExchange(self._group, plan, op, wire, rows, (key, start))
            self._exchange.begin()

    def combine(self) -> None:
        """Combine what other hosts sent, and send them the result."""
        if self._exchange is not None:
            self._exchange.combine()

    def finish(self) -> None:
        """Wait for the other hosts' results, and give all local ranks the whole chunk."""
        if self._exchange is not None:
            self._exchange.finish()
        if not self._is_alone:
            self._stage.publish(self._rows, self._views)
            self._group.barrier.wait()
            self._stage.take(self._elements, self._views)


class LaneExchange:
    """The all-reduce of one chunk's slice over a lane: each rank owns a part, receives its addends, sends the result.

    `begin`, `combine` and `finish` are called once each, in the same order of chunks on every rank of the lane, so that
    several chunks can be in flight.

    Args:
        group: ranks of the all-reduce; this rank has a lane.
        plan: which rows travel and how they are combined.
        op: the reduction.
        wire: how elements travel.
        rows: this rank's slice as each local rank has it; the host's sums are in the rows `plan.retained_rows`. The
            result is left in `rows[0]`.
        key: number of the buffer and start of the slice in it, which name the slice to the wire.
    """

    def __init__(
        self,
        group: Group,
        plan: LanePlan,
        op: Op,
        wire: Wire,
        rows: list[Array],
        key: tuple[int, int],
    ) -> None:
        assert group.lane_comm is not None, "only ranks with a lane exchange"
        self._group = group
        self._lane = group.lane_comm
        self._plan = plan
        self._op = op
        self._wire = wire
        self._rows = rows
        self._key = key
        n_hosts = self._lane.size
        n_elements = rows[0].size
        self._peers: list[int] = []
        self._parts: list[slice] = []
        for peer in range(n_hosts):
            start, stop = block_bounds(n_elements, n_hosts, peer)
            self._parts.append(slice(start, stop))
            if peer != self._lane.rank:
                self._peers.append(peer)
        self._owned_range = self._parts[self._lane.rank]
        self._requests: list[MPI.Request] = []
        self._sent: list[Array] = []

    def begin(self) -> None:
        """Send each host its part of this host's sums; receive the other hosts' sums of this rank's part."""
        owned_part = self._rows[0][self._owned_range]
        self._arriving: dict[tuple[int, int], Array] = {}
        for peer in self._peers:
            for row in range(self._plan.arriving[peer]):
                buffer = self._wire.empty(np.empty_like(owned_part))
                self._arriving[peer, row] = buffer
                self._receive(buffer, peer)
        for peer in self._peers:
            for local_rank in self._plan.retained_rows:
                part = self._rows[local_rank][self._parts[peer]]
                encoded = self._wire.encode(part, (*self._key, 0, local_rank, peer))
                self._send(encoded, peer)

    def combine(self) -> None:
        """Combine what arrived for this rank's part, and send the result to the others."""
        self._wait()
        rows: list[Array] = []
        for host in range(self._lane.size):
            rows += self._addends(host)
        add_rows(rows, self._plan.additions, self._op.ufunc)
        owned_part = self._rows[0][self._owned_range]
        owned_part[...] = rows[self._plan.root]
        encoded = self._wire.encode(owned_part, (*self._key, 1))
        self._wire.decode(encoded, owned_part)  # so that the owner has the same bits as the others
        self._arriving_results: list[tuple[Array, Array]] = []
        for peer in self._peers:
            part = self._rows[0][self._parts[peer]]
            buffer = self._wire.empty(part)
            self._arriving_results.append((part, buffer))
            self._receive(buffer, peer)
        for peer in self._peers:
            self._send(encoded, peer)

    def finish(self) -> None:
        """Wait for the other hosts' results."""
        self._wait()
        for part, buffer in self._arriving_results:
            self._wire.decode(buffer, part)

    def _addends(self, host: int) -> list[Array]:
        """Return the sums that a host contributes to this rank's part."""
        if host == self._lane.rank:
            retained_rows = self._plan.retained_rows
            return [self._rows[local_rank][self._owned_range] for local_rank in retained_rows]
        owned_part = self._rows[0][self._owned_range]
        addends = []
        for row in range(self._plan.arriving[host]):
            buffer = self._arriving[host, row]
            is_encoded = buffer.dtype != owned_part.dtype
            addend = np.empty_like(owned_part) if is_encoded else buffer
            self._wire.decode(buffer, addend)
            addends.append(addend)
        return addends

    def _send(self, array: Array, peer: int) -> None:
        """Start to send an array, which is kept until `_wait` returns."""
        self._sent.append(array)
        self._requests.append(self._lane.Isend(array.view("u1"), peer))

    def _receive(self, array: Array, peer: int) -> None:
        self._requests.append(self._lane.Irecv(array.view("u1"), peer))

    def _wait(self) -> None:
        self._group.wait(self._requests)
        self._requests.clear()
        self._sent.clear()
