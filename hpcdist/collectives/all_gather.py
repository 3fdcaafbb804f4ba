"""`hpcdist.all_gather` and `hpcdist.gather_objects`: what every rank has, side by side."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import mpi
from hpcdist.collectives.group import Group, group_of
from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI


def all_gather(array: npt.NDArray[Any], comm: MPI.Comm | None = None) -> npt.NDArray[Any]:
    """Return all ranks' arrays, joined along the first dimension in the order of the ranks.

    Collective: `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    Args:
        array: (n_rows, ...) numbers; n_rows may differ, and may be 0.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (sum of n_rows, ...) of the same dtype, on every rank.

    Raises:
        CollectiveError: when ranks differ in dtype or in another dimension, or give a number; on every rank.

    Cost: every rank receives all other ranks' bytes; a broadcast for each rank.
    """
    return gather_rows(np.asarray(array), group_of(comm))


def gather_rows(array: npt.NDArray[Any], group: Group) -> npt.NDArray[Any]:
    """Do what `all_gather` does, in a given group. Collective: `group.comm`."""
    with group.recorded("all_gather", None):
        rows = _rows_of(array, group)
        ends = np.cumsum(rows)
        joined = np.empty((int(ends[-1]), *array.shape[1:]), array.dtype)
        for rank, (stop, n_rows) in enumerate(zip(ends.tolist(), rows.tolist(), strict=True)):
            part = joined[stop - n_rows : stop]
            if rank == group.rank:
                part[...] = array
            mpi.broadcast(part, group.comm, rank)
    return joined


def _rows_of(array: npt.NDArray[Any], group: Group) -> npt.NDArray[np.int64]:
    """Return every rank's number of rows, once all ranks know that their arrays fit together."""
    own = f"{array.dtype} of shape (*, {', '.join(map(str, array.shape[1:]))})" if array.ndim else "a single number"
    error = None if array.ndim else CollectiveError("all_gather: expected rows, got a single number; pass value[None].")
    group.agree(error)
    if not group.world.all_equal(own, group.comm):
        roots = group.world.broadcast_text(own, 0, group.comm)
        group.agree(
            None
            if own == roots
            else CollectiveError(
                f"all_gather: expected {roots} as on rank 0, got {own}; pass arrays that fit together."
            )
        )
    rows = np.empty(group.size, np.int64)
    group.wait([group.comm.Iallgather(np.array([len(array)], np.int64), rows)])
    return rows


def gather_objects(value: Any, root: int = 0, comm: MPI.Comm | None = None) -> list[Any] | None:
    """Return every rank's object in a list on root, None elsewhere.

    Collective: `comm`. Blocking.

    Args:
        value: anything that pickles; pickles travel inside the job only.
        root: the rank of `comm` that receives.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Cost: root receives all pickles. Meant for small reports, not per step.
    """
    group = group_of(comm)
    with group.recorded("gather_objects", None):
        return group.comm.gather(value, root)
