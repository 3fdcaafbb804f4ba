"""All-reduce, broadcast and gather by the MPI library itself: the oracle for every other algorithm."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.errors import DesyncError
from hpcdist.runtime.mpi import MPI

#: Larger arrays go in pieces, as MPI 3 counts elements and bytes in 32 bits.
PIECE_BYTES = 1 << 30


def all_reduce(array: npt.NDArray[Any], group: Group, op: Op = SUM) -> None:
    """Replace `array` by its reduction over all ranks.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: C-contiguous, of a dtype that MPI knows, on the host; overwritten.
        group: any size >= 1.
        op: the reduction, in an order that the library chooses.

    Raises:
        DesyncError: when ranks differ in op, dtype or size: on a rank whose neighbour on its host differs, or where the
            library finds it. The other ranks may have a wrong result.

    Cost: chosen by the library; at best 2(P-1)/P * n elements sent per rank. A microsecond for the comparison.
    """
    marks = group.marks
    dtype = array.dtype
    differing_call = None
    if marks is not None:
        mark = marks.begin(op.title, dtype.kind, dtype.itemsize, array.nbytes)
        differing_call = marks.other_size(mark)
    if differing_call is None:
        try:
            _reduce(array, group.comm, op)
        except MPI.Exception as error:
            mpi_message = error.Get_error_string().splitlines()[0]
            raise _differs(array, op, group, f"{mpi_message!r} from MPI") from error
        if marks is not None:
            differing_call = marks.other_call(mark)
    if differing_call is not None:
        raise _differs(array, op, group, differing_call)


def mpi_op(op: Op) -> MPI.Op:
    """Return MPI's name for a reduction."""
    operation: MPI.Op = getattr(MPI, op.mpi_name)
    return operation


def _reduce(array: npt.NDArray[Any], comm: MPI.Comm, op: Op) -> None:
    operation = mpi_op(op)
    if array.nbytes <= PIECE_BYTES:
        comm.Allreduce(MPI.IN_PLACE, array, operation)
        return
    flat = array.reshape(-1)
    n_piece = PIECE_BYTES // array.itemsize
    for start in range(0, flat.size, n_piece):
        piece = flat[start : start + n_piece]
        comm.Allreduce(MPI.IN_PLACE, piece, operation)


def _differs(
    array: npt.NDArray[Any],
    op: Op,
    group: Group,
    actual: str,
) -> DesyncError:
    return DesyncError(
        f"{op.title}: expected the same call on every rank, {array.dtype} of {array.nbytes} bytes on {group.world}, "
        f"got {actual}; let all ranks make the same calls in the same order: HPCDIST_DEBUG=collectives names them."
    )


def broadcast(
    array: npt.NDArray[Any],
    comm: MPI.Comm,
    root: int = 0,
) -> None:
    """Replace the values of `array` by those that root has.

    Collective over `comm`. Blocking. Same number of bytes required on every rank: yes.

    Args:
        array: C-contiguous, of any dtype, on the host; overwritten except on root.
        comm: any size >= 1.
        root: the rank whose values are taken.

    Cost: chosen by the library.
    """
    flat_bytes = array.reshape(-1).view("u1")
    for start in range(0, flat_bytes.size, PIECE_BYTES):
        piece = flat_bytes[start : start + PIECE_BYTES]
        comm.Bcast(piece, root)


def all_gather(
    local_array: npt.NDArray[Any],
    counts: Sequence[int],
    joined: npt.NDArray[Any],
    group: Group,
) -> None:
    """Put the flat arrays of all ranks into `joined`, in the order of the ranks.

    Collective over `group.comm`. Blocking. Same dtype and counts required on every rank: yes.

    Args:
        local_array: this rank's array, contiguous, of any dtype, on the host.
        counts: elements of each rank's array.
        joined: array for the elements of all ranks, contiguous; overwritten.
        group: any size >= 1.

    Cost: chosen by the library; every rank receives the bytes of all other ranks. From 1 GiB on a broadcast for each
        rank.
    """
    local_bytes = local_array.view("u1")
    joined_bytes = joined.view("u1")
    sizes = [count * local_array.itemsize for count in counts]
    if joined_bytes.size < PIECE_BYTES:
        request = group.comm.Iallgatherv(local_bytes, [joined_bytes, sizes])
        group.wait([request], buffers=[local_bytes, joined_bytes])
        return
    start = 0
    for rank, size in enumerate(sizes):
        part = joined_bytes[start : start + size]
        if rank == group.rank:
            part[...] = local_bytes
        broadcast(part, group.comm, rank)
        start += size
