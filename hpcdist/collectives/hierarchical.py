"""All-reduce in two levels: through shared memory in each host, and in one lane per local rank across hosts."""

from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.lane_exchange import LaneExchange
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.shared_memory import compare, mark_of
from hpcdist.collectives.staging import Stage, add_rows
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.plan.lanes import LanePlan

Array = npt.NDArray[Any]
#: Bytes of a chunk on one rank. At 1 Gbit/s it takes 8 ms and its latencies 0.2; three are on their way at once.
CHUNK_BYTES = 1 << 20
#: A slot is free again when every local rank has read the result: two chunks later, so the fourth may take it.
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

    Collective: `group.comm`. Blocking. Same shape and dtype required on every rank: yes; compared inside each host.

    Args:
        array: C-contiguous, of numbers, on the host; overwritten.
        group: any placement.
        op: the reduction.
        is_ordered: combine in the binary tree over all ranks, whatever the placement. Default: where that costs no more
            bytes, which is on hosts that hold aligned powers of two. Else hosts are combined in a tree over hosts.
        wire: how elements are written between hosts.
        key: names the array to a wire that remembers what it rounded away.

    Cost: each host sends 2(m-1)/m * n bytes and receives as many, with m hosts and n = array.nbytes, or up to
        log2(ranks of a host) times more in the first half of an ordered sum over unaligned hosts. Two message
        latencies; host work on a chunk runs while others are on the wire.

    Source: lanes as in Traff & Hunold, Decomposing collectives for exploiting multi-lane communication (CLUSTER 2020,
        arXiv 1910.13373); ours sums in an order that is fixed by rank numbers.
    """
    flat = array.reshape(-1)
    ordered = group.keep("aligned", lambda: group.placement.is_aligned) if is_ordered is None else is_ordered
    if group.node_comm.size > 1:
        compare(group.barrier.wait_with(mark_of(flat, op)), group)
    n_chunk = CHUNK_BYTES // flat.itemsize
    starts = range(0, flat.size, n_chunk)
    chunks = [_Chunk(group, flat[start : start + n_chunk], start) for start in starts]
    for step in range(len(chunks) + 2):
        if step < len(chunks):
            chunks[step].begin(op, group.lane_plan(ordered), wire, key)
        if 0 <= step - 1 < len(chunks):
            chunks[step - 1].combine()
        if step - 2 >= 0:
            chunks[step - 2].finish()


class _Chunk:
    """One chunk on its way. The three calls of all chunks come in one fixed order on all ranks.

    Args:
        group: the ranks.
        elements: the chunk in the user's array.
        start: its first element there.
    """

    def __init__(self, group: Group, elements: Array, start: int) -> None:
        self._group = group
        self._is_alone = group.node_comm.size == 1
        self._elements = elements
        self._start = start
        self._exchange: LaneExchange | None = None

    def begin(self, op: Op, plan: LanePlan, wire: Wire, key: int) -> None:
        """Sum in the host, and send each other host its part of this rank's slice."""
        rows, start = [self._elements], self._start
        if not self._is_alone:
            group = self._group
            self._stage = group.keep(
                "stage of lanes", lambda: Stage(group, DEPTH, CHUNK_BYTES, group.placement.n_lanes)
            )
            self._views = self._stage.next_views(self._elements.dtype, self._elements.size)
            rows = self._stage.put(self._elements, self._views)
            start += self._views.own.start
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
        """Wait for the other hosts' results, and give all local ranks the whole."""
        if self._exchange is not None:
            self._exchange.finish()
        if not self._is_alone:
            self._stage.publish(self._rows, self._views)
            self._group.barrier.wait()
            self._stage.take(self._elements, self._views)
