"""`hpcdist.all_reduce`: the plain function."""

from typing import Any

import numpy as np

from hpcdist.collectives import mpi, selection
from hpcdist.collectives.buffers import host_array
from hpcdist.collectives.group import Group, group_of
from hpcdist.collectives.ops import MEAN, Op, parse_op
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI


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
            float32; device arrays travel through the host, except with NCCL.
        op: "sum", "mean", "min", "max" or "product", in any case, or a ReduceOp.
        implementation: a `CommunicationImplementation` or its name; default AUTO, the fastest as measured at the first
            call of 4 KiB or more, in less than a second.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for an unknown op, a mean of integers, or a buffer that cannot be reduced; on this rank only,
            before anything is sent. When ranks of a host differ in op, dtype or count; on each of them.
        ConfigurationError: for an unknown implementation, or one that these ranks cannot have; on every rank.

    Cost: see the algorithms; one staged copy each way for half precision and device arrays.
    """
    reduction, group = parse_op(op), group_of(comm)
    chosen = Implementation.parse(implementation)
    if chosen is Implementation.NCCL:
        selection.ALGORITHMS[chosen](buffer, group, reduction)
        return
    with host_array(buffer) as array:
        _check_mean(array, reduction)
        _reduce(array, group, reduction, chosen)
        if reduction is MEAN:
            np.divide(array, group.size, out=array)


def _reduce(array: Any, group: Group, op: Op, chosen: Implementation) -> None:
    if chosen is Implementation.AUTO:
        chosen = selection.choose(group, array.nbytes)
    if chosen is Implementation.MPI or group.size == 1:
        mpi.all_reduce(array, group, op)
    else:
        selection.ALGORITHMS[chosen](array, group, op)


def _check_mean(array: Any, op: Op) -> None:
    if op is MEAN and array.dtype.kind not in "fc":
        raise CollectiveError(f"all_reduce: expected floats for a mean, got {array.dtype}; convert or use a sum.")
