"""`hpcdist.broadcast`: one rank's values on all of them."""

from typing import Any

from hpcdist.collectives import mpi
from hpcdist.collectives.buffers import host_array
from hpcdist.collectives.group import group_of
from hpcdist.mpi import MPI


def broadcast(buffer: Any, root: int = 0, comm: MPI.Comm | None = None) -> None:
    """Replace `buffer` by root's.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten except on root.
        root: the rank of `comm` whose values are taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for a buffer that is not contiguous or not of numbers; on this rank only, before anything is
            sent.

    Cost: as the MPI library's Bcast, in pieces of 1 GiB.
    """
    group = group_of(comm)
    with group.recorded("broadcast", buffer), host_array(buffer) as array:
        mpi.broadcast(array, group.comm, root)
