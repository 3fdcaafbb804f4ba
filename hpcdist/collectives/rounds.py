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
    schedule: Schedule,
    array: Array,
    group: Group,
    op: Op,
    comm: MPI.Comm | None = None,
) -> None:
    """Run this rank's rounds on a flat buffer.

    Collective over `comm`. Blocking, bounded.

    Args:
        schedule: rounds of this rank.
        array: (n_elements,), overwritten.
        group: ranks that reduce together; it bounds the waits.
        op: the reduction.
        comm: communicator of the group whose ranks the schedule is for; default: all ranks of the group.

    Cost: as planned, and scratch memory of the longest message.
    """
    comm = comm or group.comm
    scratch = np.empty(0, array.dtype)
    for planned_round in schedule:  # rounds are made one by one
        round_op: Op | None = None
        if planned_round.is_sum:
            round_op = op
            longest = max(map(_length, planned_round.receives), default=0)
            if longest > scratch.size:
                scratch = np.empty(longest, array.dtype)
        sends: list[MPI.Request] = []
        for message in planned_round.sends:
            for segment in _segments(message, array.itemsize):
                sends.append(comm.Isend(array[segment].view("u1"), message.peer))
        for message in planned_round.receives:
            _receive(message, array, scratch, group, comm, round_op)
        group.wait(sends)


def _receive(
    message: Message,
    array: Array,
    scratch: Array,
    group: Group,
    comm: MPI.Comm,
    op: Op | None,
) -> None:
    """Receive a message segment by segment; combine each segment with the buffer on arrival, if an op is given."""
    target = array
    shift = 0
    if op:
        target = scratch
        shift = message.start
    segments = _segments(message, array.itemsize)
    buffers: list[Array] = []
    requests: list[MPI.Request] = []
    for segment in segments:
        buffer = target[segment.start - shift : segment.stop - shift]
        buffers.append(buffer)
        requests.append(comm.Irecv(buffer.view("u1"), message.peer))
    for segment, buffer, request in zip(segments, buffers, requests, strict=True):
        group.wait([request])
        if op:
            combine(op.ufunc, array[segment], buffer, array[segment])


def _segments(message: Message, itemsize: int) -> list[slice]:
    """Return the ranges of elements in which a message travels, in order."""
    n_segment = max(1, SEGMENT_BYTES // itemsize)
    starts = range(message.start, message.stop, n_segment)
    return [slice(start, min(start + n_segment, message.stop)) for start in starts]


def _length(message: Message) -> int:
    return message.stop - message.start
