"""The public collectives on Python objects: pickles that travel inside the job only. Meant for small values.

Each takes any communicator and blocks; the watchdog ends the job when a rank does not come.
"""

from collections.abc import Sequence
from typing import Any

from hpcdist.collectives.group import group_of
from hpcdist.errors import CollectiveError
from hpcdist.runtime.mpi import MPI


def broadcast_object(value: Any = None, root: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Return root's object on every rank.

    Collective: `comm`.

    Args:
        value: anything that pickles; not looked at except on root.
        root: the rank of `comm` whose object is taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Cost: the MPI library's Bcast of the pickle, and of its size.
    """
    group = group_of(comm)
    with group.recorded("broadcast_object", None):
        return group.comm.bcast(value, root)


def gather_objects(value: Any, root: int = 0, comm: MPI.Comm | None = None) -> list[Any] | None:
    """Return every rank's object in a list on root, None elsewhere.

    Collective: `comm`.

    Args:
        value: anything that pickles.
        root: the rank of `comm` that receives.
        comm: as `broadcast_object`.

    Cost: root receives all pickles.
    """
    group = group_of(comm)
    with group.recorded("gather_objects", None):
        return group.comm.gather(value, root)


def all_gather_objects(value: Any, comm: MPI.Comm | None = None) -> list[Any]:
    """Return every rank's object, in the order of the ranks, on every rank.

    Collective: `comm`.

    Args:
        value: anything that pickles.
        comm: as `broadcast_object`.

    Cost: every rank receives all pickles.
    """
    group = group_of(comm)
    with group.recorded("all_gather_objects", None):
        return group.comm.allgather(value)


def scatter_objects(values: Sequence[Any] | None = None, root: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Return this rank's object of those that root gives.

    Collective: `comm`.

    Args:
        values: on root, an object that pickles for each rank; not looked at elsewhere.
        root: the rank of `comm` whose objects are taken.
        comm: as `broadcast_object`.

    Raises:
        CollectiveError: when root gives another number of objects; on every rank.
    """
    group = group_of(comm)
    with group.recorded("scatter_objects", None):
        given = list(values or ()) if group.rank == root else []
        group.agree(_refusal("scatter_objects", len(given), group.size) if group.rank == root else None)
        return group.comm.scatter(given if group.rank == root else None, root)


def alltoall_objects(values: Sequence[Any], comm: MPI.Comm | None = None) -> list[Any]:
    """Send an object to each rank, and return what came from each.

    Collective: `comm`.

    Args:
        values: an object that pickles for each rank.
        comm: as `broadcast_object`.

    Raises:
        CollectiveError: when a rank gives another number of objects; on every rank.
    """
    group = group_of(comm)
    with group.recorded("alltoall_objects", None):
        group.agree(_refusal("alltoall_objects", len(values), group.size))
        return group.comm.alltoall(list(values))


def _refusal(call: str, n_given: int, n_ranks: int) -> CollectiveError | None:
    if n_given == n_ranks:
        return None
    return CollectiveError(f"{call}: expected an object for each of {n_ranks} ranks, got {n_given}; give one for each.")
