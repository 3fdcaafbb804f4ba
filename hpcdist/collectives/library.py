"""All-reduce and broadcast by the MPI library itself: the oracle that every other algorithm is checked against."""

from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.runtime.mpi import MPI

#: Larger arrays go in pieces, as MPI 3 counts elements and bytes in 32 bits.
PIECE_BYTES = 1 << 30


def all_reduce(array: npt.NDArray[Any], group: Group, op: Op = SUM) -> None:
    """Replace `array` by its reduction over all ranks.

    Collective: `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: C-contiguous, of a dtype that MPI knows, on the host; overwritten.
        group: any size >= 1.
        op: the reduction, in an order that the library chooses.

    Cost: chosen by the library; at best 2(P-1)/P * n elements sent per rank.
    """
    if array.nbytes <= PIECE_BYTES:
        group.comm.Allreduce(MPI.IN_PLACE, array, op.mpi_op)
        return
    flat = array.reshape(-1)
    n_piece = max(1, PIECE_BYTES // array.itemsize)
    for start in range(0, flat.size, n_piece):
        group.comm.Allreduce(MPI.IN_PLACE, flat[start : start + n_piece], op.mpi_op)


def broadcast(array: npt.NDArray[Any], comm: MPI.Comm, root: int = 0) -> None:
    """Replace `array` by root's.

    Collective: `comm`. Blocking. Same number of bytes required on every rank: yes.

    Args:
        array: C-contiguous, of any dtype, on the host; overwritten except on root.
        comm: any size >= 1.
        root: the rank whose values are taken.

    Cost: chosen by the library.
    """
    flat = array.reshape(-1).view("u1")
    for start in range(0, flat.size, PIECE_BYTES):
        comm.Bcast(flat[start : start + PIECE_BYTES], root)
