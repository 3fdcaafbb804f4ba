"""The all-reduce of one chunk's slice over a lane, in three calls, so that several chunks can be on their way."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import Op
from hpcdist.collectives.staging import add_rows
from hpcdist.collectives.wire import Wire
from hpcdist.mpi import MPI
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.lanes import LanePlan

Array = npt.NDArray[Any]


class LaneExchange:
    """Direct exchange between the hosts of a lane: everyone owns a part, receives its addends, sends the result.

    `begin`, `combine` and `finish` are called once each, in the same order of chunks on every rank of the lane.

    Args:
        group: has a lane on this rank.
        plan: which rows travel and how they are combined.
        op: the reduction.
        wire: how elements travel.
        rows: this rank's slice as each local rank has it; the host's partial sums are in the rows `plan.kept`. The
            result is left in `rows[0]`.
        key: names the buffer and the slice's place in it, to the wire.
    """

    def __init__(
        self, group: Group, plan: LanePlan, op: Op, wire: Wire, rows: list[Array], key: tuple[int, int]
    ) -> None:
        assert group.lane_comm is not None, "only ranks with a lane exchange"
        self._group, self._lane = group, group.lane_comm
        self._plan, self._op, self._wire = plan, op, wire
        self._rows = rows
        self._key = key
        self._others = [peer for peer in range(self._lane.size) if peer != self._lane.rank]
        self._parts = [block_bounds(rows[0].size, self._lane.size, peer) for peer in range(self._lane.size)]
        self._own = slice(*self._parts[self._lane.rank])
        self._requests: list[MPI.Request] = []
        self._sent: list[Array] = []

    def begin(self) -> None:
        """Send each host its part of this host's partial sums; expect theirs of the own part."""
        own = self._rows[0][self._own]
        self._arriving = {
            (peer, row): self._wire.empty(np.empty_like(own))
            for peer in self._others
            for row in range(self._plan.arriving[peer])
        }
        for (peer, _), buffer in self._arriving.items():
            self._receive(buffer, peer)
        for peer in self._others:
            for place in self._plan.kept:
                part = self._rows[place][slice(*self._parts[peer])]
                self._send(self._wire.encode(part, (*self._key, 0, place, peer)), peer)

    def combine(self) -> None:
        """Combine what came for the own part, and send the result to the others."""
        self._wait()
        rows = [row for host in range(self._lane.size) for row in self._addends(host)]
        add_rows(rows, self._plan.additions, self._op.ufunc)
        own = self._rows[0][self._own]
        own[...] = rows[self._plan.root]
        encoded = self._wire.encode(own, (*self._key, 1))
        self._wire.decode(encoded, own)  # so that the owner has the bits that the others get
        self._results = [(peer, self._rows[0][slice(*self._parts[peer])]) for peer in self._others]
        self._received = [self._wire.empty(part) for _, part in self._results]
        for (peer, _), buffer in zip(self._results, self._received, strict=True):
            self._receive(buffer, peer)
        for peer in self._others:
            self._send(encoded, peer)

    def finish(self) -> None:
        """Wait for the others' results."""
        self._wait()
        for (_, part), buffer in zip(self._results, self._received, strict=True):
            self._wire.decode(buffer, part)

    def _addends(self, host: int) -> list[Array]:
        """Return the partial sums of the own part that a host contributes."""
        if host == self._lane.rank:
            return [self._rows[place][self._own] for place in self._plan.kept]
        received = [self._arriving[host, row] for row in range(self._plan.arriving[host])]
        values = [self._values(buffer) for buffer in received]
        for buffer, row in zip(received, values, strict=True):
            self._wire.decode(buffer, row)
        return values

    def _values(self, buffer: Array) -> Array:
        own = self._rows[0][self._own]
        return buffer if buffer.dtype == own.dtype else np.empty_like(own)

    def _send(self, array: Array, peer: int) -> None:
        self._sent.append(array)
        self._requests.append(self._lane.Isend(array.view("u1"), peer))

    def _receive(self, array: Array, peer: int) -> None:
        self._requests.append(self._lane.Irecv(array.view("u1"), peer))

    def _wait(self) -> None:
        self._group.wait(self._requests)
        self._requests.clear()
        self._sent.clear()
