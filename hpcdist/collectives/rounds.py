"""Runs a schedule of `plan/schedules.py` on a buffer: the one loop behind the ring and recursive halving."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import Op, combine
from hpcdist.plan.schedules import Message, Schedule
from hpcdist.runtime.mpi import MPI

Array = npt.NDArray[Any]
#: Messages are cut into segments of this size, so that one is added while the next is in flight.
SEGMENT_BYTES = 1 << 20


def run_schedule(
    schedule: Schedule, array: Array, group: Group, op: Op, comm: MPI.Comm | None = None
) -> None:
    """Run this rank's rounds on a flat buffer.

    Collective: `comm`. Blocking, bounded.

    Args:
        schedule: of this rank.
        array: (n_elements,), overwritten.
        group: waits for the messages.
        op: the reduction.
        comm: of the group's communicators the one whose ranks the schedule is for; default: all of the group.

    Cost: as planned; scratch of the longest message.
    """
    comm = comm or group.comm
    scratch = np.empty(0, array.dtype)
    for one_round in schedule:
        longest = max(
            (_length(message) for message in one_round.receives if one_round.is_sum), default=0
        )
        if longest > scratch.size:  # rounds are made one by one
            scratch = np.empty(longest, array.dtype)
        sends = [
            comm.Isend(array[start:stop].view("u1"), message.peer)
            for message in one_round.sends
            for start, stop in _segments(message, array.itemsize)
        ]
        for message in one_round.receives:
            _receive(message, array, scratch, group, comm, op if one_round.is_sum else None)
        group.wait(sends)


def _receive(
    message: Message, array: Array, scratch: Array, group: Group, comm: MPI.Comm, op: Op | None
) -> None:
    """Receive a message segment by segment; combine each with the buffer when it is there, if an op is given."""
    segments = [slice(start, stop) for start, stop in _segments(message, array.itemsize)]
    target, shift = (scratch, message.start) if op else (array, 0)
    buffers = [target[span.start - shift : span.stop - shift] for span in segments]
    requests: list[MPI.Request] = [
        comm.Irecv(buffer.view("u1"), message.peer) for buffer in buffers
    ]
    for segment, buffer, request in zip(segments, buffers, requests, strict=True):
        group.wait([request])
        if op:
            combine(op.ufunc, array[segment], buffer, array[segment])


def _segments(message: Message, itemsize: int) -> list[tuple[int, int]]:
    n_segment = max(1, SEGMENT_BYTES // itemsize)
    starts = range(message.start, message.stop, n_segment)
    return [(start, min(start + n_segment, message.stop)) for start in starts]


def _length(message: Message) -> int:
    return message.stop - message.start
