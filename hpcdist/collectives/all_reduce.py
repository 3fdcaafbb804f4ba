"""`hpcdist.all_reduce`: the plain function."""

from typing import Any

import numpy as np

from hpcdist.collectives import mpi
from hpcdist.collectives.buffers import host_array
from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI
from hpcdist.world import make_world

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}


def all_reduce(buffer: Any, op: Any = "sum", comm: MPI.Comm | None = None) -> None:
    """Replace `buffer` by its reduction over all ranks.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten. float16 and bfloat16 are reduced in
            float32; device arrays travel through the host.
        op: "sum", "mean", "min", "max" or "product", in any case, or a ReduceOp.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for an unknown op, a mean of integers, or a buffer that cannot be reduced; on this rank only,
            before anything is sent.

    Cost: as `hpcdist.collectives.mpi.all_reduce`; one staged copy each way for half precision and device arrays.
    """
    name = str(getattr(op, "value", op)).lower()
    if name not in _OPS:
        raise CollectiveError(f"all_reduce: expected an op of {', '.join(_OPS)}, got {op!r}; name one of them.")
    comm = make_world().role_comm if comm is None else comm
    with host_array(buffer) as array:
        if name == "mean" and array.dtype.kind not in "fc":
            raise CollectiveError(f"all_reduce: expected floats for a mean, got {array.dtype}; convert or use a sum.")
        mpi.all_reduce(array, comm, _OPS[name])
        if name == "mean":
            np.divide(array, comm.size, out=array)
