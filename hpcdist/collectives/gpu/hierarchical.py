"""All-reduce of GPUs on several hosts: NCCL inside the host, MPI between hosts from pinned host memory."""

import functools
from collections.abc import Callable
from typing import Any

from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.gpu.cupy_door import (
    DeviceArray,
    HostArray,
    copy_into,
    device_array,
    padded,
    staged_all_reduce,
)
from hpcdist.collectives.gpu.nccl import NcclCommunicator, check, communicator_of, queue_for
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.errors import CollectiveError
from hpcdist.plan.devices import equal_part
from hpcdist.runtime.mpi import MPI

#: NCCL is fastest on parts that start at a multiple of 16 bytes.
_ALIGNMENT_BYTES = 16


def all_reduce(
    buffer: Any,
    group: Group,
    op: Op = SUM,
    lane_all_reduce: Callable[[HostArray], None] | None = None,
) -> None:
    """Replace `buffer` by its sum over the group.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    NCCL reduce-scatter in the host, all-reduce of each part in its lane, NCCL all-gather in the host. NCCL has
    finished before the lane starts, so it never runs together with MPI. On one host this is `nccl.all_reduce`.

    Args:
        buffer: as `nccl.all_reduce`; overwritten.
        op: the sum; lanes carry no other reduction.
        group: any size >= 1, with the same number of ranks on every host.
        lane_all_reduce: function that sums a numpy array, a piece of this rank's part, over `group.lane_comm` in
            place; default: MPI's sum.

    Raises:
        CollectiveError: for a buffer that NCCL cannot carry, or another op; on this rank only. For hosts with
            different numbers of ranks; on every rank alike.
        ConfigurationError: as `nccl.communicator_of`; on every rank alike.

    Cost: with p ranks on each of m hosts: 2(p-1)/p * n elements sent per rank inside the host, 2(m-1)/m * n/p between
        hosts, n/p to host memory and back; n of scratch when n is no multiple of p times 16 bytes.
    """
    array = device_array(buffer)
    if op is not SUM:
        raise CollectiveError(
            f"hierarchical: expected a sum of GPU buffers, got {op.name}; choose NCCL for it."
        )
    check(array, op.name)
    if not array.size:
        return
    if group.node_comm.size == group.comm.size:
        nccl.all_reduce(buffer, group)
        return
    if not group.placement.is_even:
        raise _uneven(group)
    lane = lane_all_reduce or functools.partial(_sum_over_lane, group)
    node = communicator_of(group, group.node_comm, array.device)
    with queue_for(array, group):
        _reduce_in_steps(array, node, lane)


def _reduce_in_steps(
    array: DeviceArray,
    node: NcclCommunicator,
    lane: Callable[[HostArray], None],
) -> None:
    n_aligned = max(1, _ALIGNMENT_BYTES // array.array.itemsize)
    n_part = equal_part(array.size, node.size, n_aligned)
    whole = padded(array, n_part * node.size)
    start = node.rank * n_part
    owned_slice = whole[start : start + n_part]
    node.reduce_scatter(whole, owned_slice)
    node.wait()  # bounded, and reports a failed peer; the copies below would wait silently
    staged_all_reduce(owned_slice, lane)
    node.all_gather(owned_slice, whole)
    if whole is not array:
        copy_into(array, whole[: array.size])
    node.wait()


def _sum_over_lane(group: Group, host: HostArray) -> None:
    assert group.lane_comm is not None, "hosts with as many ranks each have a lane for every rank"
    group.lane_comm.Allreduce(MPI.IN_PLACE, host, MPI.SUM)


def _uneven(group: Group) -> CollectiveError:
    """Return the error of hosts with different numbers of ranks: their parts would not match. All ranks raise it."""
    sizes = [len(ranks) for ranks in group.placement.hosts]
    error = CollectiveError(
        f"hierarchical: expected the same number of ranks on every host, got {min(sizes)} to {max(sizes)}; start as "
        f"many on each, or choose NCCL."
    )
    error.is_agreed = True
    return error
