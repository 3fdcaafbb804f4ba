"""All-reduce, broadcast and gather by the MPI library itself: the oracle for every other algorithm."""

from collections.abc import Sequence
from itertools import accumulate
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

    Collective: `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: C-contiguous, of a dtype that MPI knows, on the host; overwritten.
        group: any size >= 1.
        op: the reduction, in an order that the library chooses.

    Raises:
        DesyncError: when ranks differ in op, dtype or size: on a rank whose neighbour on its host differs, or where the
            library finds it. The others may have a wrong result.

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
            raise _differs(
                array, op, group, f"{error.Get_error_string().splitlines()[0]!r} from MPI"
            ) from error
        if marks is not None:
            differing_call = marks.other_call(mark)
    if differing_call is not None:
        raise _differs(array, op, group, differing_call)


def mpi_op(op: Op) -> MPI.Op:
    """Return MPI's name for a reduction."""
    operation: MPI.Op = getattr(MPI, op.mpi_name)
    return operation


def _reduce(array: npt.NDArray[Any], comm: MPI.Comm, op: Op) -> None:
    if array.nbytes <= PIECE_BYTES:
        comm.Allreduce(MPI.IN_PLACE, array, mpi_op(op))
        return
    flat = array.reshape(-1)
    n_piece = PIECE_BYTES // array.itemsize
    for start in range(0, flat.size, n_piece):
        comm.Allreduce(MPI.IN_PLACE, flat[start : start + n_piece], mpi_op(op))


def _differs(array: npt.NDArray[Any], op: Op, group: Group, actual: str) -> DesyncError:
    return DesyncError(
        f"{op.title}: expected the same call on every rank, {array.dtype} of {array.nbytes} bytes on {group.world}, "
        f"got {actual}; let all ranks make the same calls in the same order: HPCDIST_DEBUG=collectives names them."
    )


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


def all_gather(
    local_array: npt.NDArray[Any], counts: Sequence[int], joined: npt.NDArray[Any], group: Group
) -> None:
    """Put the flat arrays of all ranks into `joined`, in the order of the ranks.

    Collective: `group.comm`. Blocking. Same dtype and counts required on every rank: yes.

    Args:
        local_array: this rank's, contiguous, of any dtype, on the host.
        counts: elements of each rank's array.
        joined: as many elements as all of them, contiguous; overwritten.
        group: any size >= 1.

    Cost: chosen by the library; every rank receives all others' bytes. From 1 GiB on a broadcast for each rank.
    """
    ends = [count * local_array.itemsize for count in accumulate(counts)]
    flat = joined.view("u1")
    if flat.size < PIECE_BYTES:
        sizes = [count * local_array.itemsize for count in counts]
        group.wait([group.comm.Iallgatherv(local_array.view("u1"), [flat, sizes])])
        return
    for rank, (count, stop) in enumerate(zip(counts, ends, strict=True)):
        part = flat[stop - count * local_array.itemsize : stop]
        if rank == group.rank:
            part[...] = local_array.view("u1")
        broadcast(part, group.comm, rank)
