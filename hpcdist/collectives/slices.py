"""Sums of which each rank of a host gets its own share only, half of an all-reduce; and the whole one, on many hosts.

Across hosts a share is summed in its lane, by the ranks that own it on each host: directly, as in `hierarchical.py`,
or, on many hosts, by recursive halving. The bits are those of an all-reduce by shared memory on one host, and of a
hierarchical one on several.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import hierarchical
from hpcdist.collectives.group import Group
from hpcdist.collectives.hierarchical import LaneExchange, run_pipeline, seconds_per_byte
from hpcdist.collectives.node_sums import chunk_bytes
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.rounds import run_schedule
from hpcdist.collectives.route import goes_by_halving
from hpcdist.collectives.shared_memory import require_same
from hpcdist.collectives.staging import add_rows_into, copy
from hpcdist.collectives.wire import PLAIN
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.replicas import plan_row_additions
from hpcdist.plan.schedules import plan_halving
from hpcdist.runtime.node_window import NodeWindow

Array = npt.NDArray[Any]
#: (start, stop) of each owner's share of a flat array, by local rank.
Bounds = Sequence[tuple[int, int]]


class SliceSums:
    """Sums over the ranks of a group, share by share; the first `n_owners` local ranks of each host own one.

    Collective over `group.comm`. All calls but `sum_rows` are collective too, in one order.

    Args:
        group: the ranks.

    Attributes:
        n_owners: number of ranks of each host that own a share, the ranks that have a lane.
        local_rank: number of this rank on its host.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.n_owners = group.placement.n_lanes
        self.local_rank = group.node_comm.rank
        self._additions: Sequence[tuple[int, int]] = plan_row_additions(group.node_comm.size)
        self._byte_s = 0.0
        if not goes_by_halving(group.placement):
            self._plan = group.lane_plan(group.placement.is_aligned)
            self._additions = self._plan.local_additions
            self._byte_s = seconds_per_byte(group)
        self._slot_bytes = chunk_bytes(group.node_comm.size)
        self._window: NodeWindow | None = None
        self._number = 0

    def sum_rows(self, rows: list[Array]) -> None:
        """Leave the sum of rows, one of each local rank, in this rank's row. Rows are overwritten. Not collective."""
        if len(rows) > 1 and rows[0].size:
            add_rows_into(rows[self.local_rank], rows, self._additions)

    def reduce(self, array: Array, bounds: Bounds) -> None:
        """Leave the sum over the host of this rank's share in `array`, whose other elements stay.

        Collective over the ranks of the host.

        Args:
            array: flat array, private to the rank.
            bounds: share of each owner.

        Cost: each rank writes the elements that other ranks own to memory smaller than the cache, and reads the other
            ranks' values of the elements that it owns; a barrier for 3 MiB of all ranks together.
        """
        if self._group.node_comm.size == 1:
            return
        local_rank = self.local_rank
        n_piece = self._slot_bytes // array.itemsize // self.n_owners
        longest = max(stop - start for start, stop in bounds)
        # ranks beyond the owners own nothing
        owned_start, owned_stop = (*bounds, (0, 0))[min(local_rank, self.n_owners)]
        for first in range(0, longest, n_piece):
            slots = self._next_slots(array.dtype)
            local_slot = slots[local_rank]
            for owner, (start, stop) in enumerate(bounds):
                piece_start = start + first
                piece = array[piece_start : min(stop, piece_start + n_piece)]
                if owner != local_rank and piece.size:
                    place = local_slot[owner * n_piece :][: piece.size]
                    copy(place, piece)
            self._group.barrier.wait()
            piece_start = owned_start + first
            owned_piece = array[piece_start : min(owned_stop, piece_start + n_piece)]
            rows = [slot[local_rank * n_piece :][: owned_piece.size] for slot in slots]
            rows[local_rank] = owned_piece
            self.sum_rows(rows)

    def gather(self, array: Array, bounds: Bounds) -> None:
        """Give all ranks of the host the share of each owner; arguments as `reduce`.

        Collective over the ranks of the host.
        """
        if self._group.node_comm.size == 1:
            return
        local_rank = self.local_rank
        n_piece = self._slot_bytes // array.itemsize
        longest = max(stop - start for start, stop in bounds)
        owned_start, owned_stop = (*bounds, (0, 0))[min(local_rank, self.n_owners)]
        for first in range(0, longest, n_piece):
            slots = self._next_slots(array.dtype)
            piece_start = owned_start + first
            owned_piece = array[piece_start : min(owned_stop, piece_start + n_piece)]
            copy(slots[local_rank][: owned_piece.size], owned_piece)
            self._group.barrier.wait()
            for owner, (start, stop) in enumerate(bounds):
                piece_start = start + first
                piece = array[piece_start : min(stop, piece_start + n_piece)]
                if owner != local_rank and piece.size:
                    copy(piece, slots[owner][: piece.size])

    def _next_slots(self, dtype: np.dtype[Any]) -> list[Array]:
        """Return every local rank's slot. Two are used in turn: before one is written again lies a barrier."""
        n_bytes = self._slot_bytes
        if self._window is None:
            self._window = NodeWindow(self._group.node_comm, 2 * n_bytes, self._group.world)
        start = self._number % 2 * n_bytes
        stop = start + n_bytes
        self._number += 1
        return [np.frombuffer(piece[start:stop], dtype) for piece in self._window.pieces]

    def sum_over_hosts(self, owned_share: Array) -> None:
        """Replace this rank's share, summed over its host, by the sum over all hosts.

        Collective over the ranks of its lane.

        Cost: as the part of a hierarchical all-reduce between hosts.
        """
        lane = self._group.lane_comm
        if lane is None or lane.size == 1:
            return
        if goes_by_halving(self._group.placement):
            schedule = plan_halving(lane.size, lane.rank, owned_share.size)
            run_schedule(schedule, owned_share, self._group, SUM, lane)
            return
        n_chunk = hierarchical.chunk_bytes(owned_share.nbytes, self._byte_s) // owned_share.itemsize
        exchanges: list[LaneExchange] = []
        for start in range(0, owned_share.size, n_chunk):
            rows = [owned_share[start : start + n_chunk]]
            key = (0, start)
            exchanges.append(LaneExchange(self._group, self._plan, SUM, PLAIN, rows, key))
        begins = [exchange.begin for exchange in exchanges]
        run_pipeline(begins, exchanges)


def all_reduce(array: Array, group: Group, op: Op = SUM) -> None:
    """Replace `array` by its sum over all ranks, on many hosts.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes; compared inside each host.

    Args:
        array: C-contiguous, of numbers, on the host; overwritten.
        group: ranks on hosts for which `route.goes_by_halving`.
        op: SUM or MEAN.

    Cost: 2(m-1)/m * n bytes from each host with m hosts, in 2 log2 m messages of each rank with a lane, where
        `hierarchical.all_reduce` sends 2(m-1) for each chunk.
    """
    flat = array.reshape(-1)
    sums = group.keep(SliceSums, lambda: SliceSums(group))
    if group.node_comm.size > 1:
        require_same(flat, op, group)
    bounds = [block_bounds(flat.size, sums.n_owners, owner) for owner in range(sums.n_owners)]
    sums.reduce(flat, bounds)
    if sums.local_rank < sums.n_owners:
        start, stop = bounds[sums.local_rank]
        sums.sum_over_hosts(flat[start:stop])
    sums.gather(flat, bounds)
