"""`hpcdist.all_reduce` and `hpcdist.all_reduce_async`: the plain function, at once or in a thread."""

from typing import Any

import numpy as np

from hpcdist.collectives import selection
from hpcdist.collectives.buffers import host_array, is_plain
from hpcdist.collectives.cuda import dtype_of, is_device_buffer
from hpcdist.collectives.group import Group, group_of
from hpcdist.collectives.ops import MEAN, Op, parse_op
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.thread import Handle, thread_of
from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI

_IN_PLACE = MPI.IN_PLACE


def all_reduce(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | str | None = None,
    comm: MPI.Comm | None = None,
) -> None:
    """Replace `buffer` by its reduction over all ranks.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten. float16 and bfloat16 are reduced in
            float32. Device arrays go by NCCL where every rank has it and it has the dtype, else through the host.
        op: "sum", "mean", "min", "max" or "product", in any case, or a ReduceOp.
        implementation: a `CommunicationImplementation` or its name; default AUTO, the fastest as measured at the first
            call of 4 KiB or more, in less than a second.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for an unknown op, a mean of integers, or a buffer that cannot be reduced; on this rank only,
            before anything is sent. When ranks of a host differ in op, dtype or count and the sum goes through shared
            memory; on each of them. HPCDIST_DEBUG=collectives compares all calls.
        ConfigurationError: for an unknown implementation, or one that these ranks cannot have; on every rank.

    Cost: see the algorithms; one staged copy each way for half precision and device arrays.
    """
    group, reduction = group_of(comm), parse_op(op)
    if implementation is None and is_plain(buffer) and buffer.nbytes < group.library_bytes and not group.is_checked:
        _reduce_by_library(buffer, reduction, group)
        return
    reduce_buffer(buffer, reduction, Implementation.parse(implementation), group)


def all_reduce_async(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | str | None = None,
    comm: MPI.Comm | None = None,
) -> Handle:
    """Begin to replace `buffer` by its reduction over all ranks, in a thread, and return at once.

    Collective: `comm`. All ranks begin the same reductions in the same order.

    Args:
        buffer: as `all_reduce`; not to be read or written before `wait` has returned.
        op: as `all_reduce`.
        implementation: as `all_reduce`.
        comm: as `all_reduce`.

    Returns:
        A handle: `wait(timeout_s=None)` returns when the result is there and raises what went wrong; `is_done`.

    Raises:
        CollectiveError, ConfigurationError: for an unknown op or implementation; on every rank alike.

    Cost: as `all_reduce`, in a thread that sleeps while it waits.
    """
    reduction, chosen = parse_op(op), Implementation.parse(implementation)
    thread = thread_of(group_of(comm))
    return thread.submit(lambda: reduce_buffer(buffer, reduction, chosen, thread.group))


def _reduce_by_library(array: Any, op: Op, group: Group) -> None:
    """Do what the rest of this file does with a plain array that AUTO leaves to the library, in a third of the time."""
    if op is MEAN:
        _check_mean(array)
    journal = group.journal
    journal.enter(op.title, array.dtype, array.size)
    try:
        group.comm.Allreduce(_IN_PLACE, array, op.mpi_op)
    finally:
        journal.leave()
    if op is MEAN:
        np.divide(array, group.size, out=array)


def reduce_buffer(buffer: Any, op: Op, chosen: Implementation, group: Group) -> None:
    """Do what `all_reduce` does, in a given group. Collective: `group.comm`."""
    if is_device_buffer(buffer) or chosen is Implementation.NCCL:
        algorithm = selection.on_device(group, op, chosen, dtype_of(buffer))
        if algorithm is not None:
            with group.recorded(op.title, buffer):
                algorithm(buffer, group, op)
            return
    if is_plain(buffer):
        _reduce_array(buffer, op, chosen, group)
        return
    with host_array(buffer) as array:
        _reduce_array(array, op, chosen, group)


def _reduce_array(array: Any, op: Op, chosen: Implementation, group: Group) -> None:
    if op is MEAN:
        _check_mean(array)
    with group.recorded(op.title, array):
        _reduce(array, group, op, chosen)
    if op is MEAN:
        np.divide(array, group.size, out=array)


def _reduce(array: Any, group: Group, op: Op, chosen: Implementation) -> None:
    if chosen is Implementation.AUTO:
        chosen = selection.choose(group, array.nbytes)
    selection.ALGORITHMS[chosen](array, group, op)


def _check_mean(array: Any) -> None:
    if array.dtype.kind not in "fc":
        raise CollectiveError(f"all_reduce: expected floats for a mean, got {array.dtype}; convert or use a sum.")
