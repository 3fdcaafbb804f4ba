"""`hpcdist.reduce_scatter`: every rank gets its rows of the reduction."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.group import group_of
from hpcdist.collectives.ops import MEAN, parse_op
from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI
from hpcdist.plan.blocks import block_bounds


def reduce_scatter(array: npt.NDArray[Any], op: Any = "sum", comm: MPI.Comm | None = None) -> npt.NDArray[Any]:
    """Return this rank's rows of the reduction of all ranks' arrays.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: (n_rows, ...) of a dtype that MPI knows; not changed.
        op: as `hpcdist.all_reduce`.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (own rows, ...): rows are divided over the ranks in order, the first ones getting one more where they do not
        divide evenly.

    Raises:
        CollectiveError: for an unknown op, a mean of integers or a single number; on this rank only.

    Cost: the MPI library's Reduce_scatter: at best (P-1)/P * n elements sent per rank.
    """
    reduction, group = parse_op(op), group_of(comm)
    if not np.ndim(array) or (reduction is MEAN and array.dtype.kind not in "fc"):
        raise CollectiveError(
            f"reduce_scatter: expected rows, and floats for a mean, got {np.shape(array)} {array.dtype}; pass an array "
            f"with rows, or use a sum."
        )
    with group.recorded("reduce_scatter", array):
        bounds = [block_bounds(len(array), group.size, rank) for rank in range(group.size)]
        row_elements = int(np.prod(array.shape[1:], dtype=np.int64))
        start, stop = bounds[group.rank]
        own = np.empty((stop - start, *array.shape[1:]), array.dtype)
        counts = [(stop - start) * row_elements for start, stop in bounds]
        group.comm.Reduce_scatter(np.ascontiguousarray(array), own, counts, reduction.mpi_op)
    if reduction is MEAN:
        np.divide(own, group.size, out=own)
    return own
