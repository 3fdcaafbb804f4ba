"""The public collectives that move rows from rank to rank: broadcast, gather, scatter, all-to-all, reduce-scatter.

Each takes any communicator and numpy arrays, torch tensors or cupy arrays, and returns an array of the same kind on
the same device. No gradient flows through them, so a tensor that was computed from tensors with gradients is refused.
Gradients flow through `hpcdist.all_gather` and `ReplicaContext.all_gather`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import library
from hpcdist.collectives.buffers import from_host, host_array, to_host
from hpcdist.collectives.gpu.cupy_door import behind_producers
from hpcdist.collectives.group import Group, group_of, thread_of
from hpcdist.collectives.ops import MEAN, Op, parse_op
from hpcdist.errors import CollectiveError
from hpcdist.plan.blocks import block_bounds
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI

Array = npt.NDArray[Any]


def broadcast(
    buffer: Any,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> None:
    """Replace the values of `buffer` by those that root has.

    Collective over `comm`. Blocking. Same shape and dtype required on every rank: yes.

    >>> values = torch.full((2,), float(strategy.rank))
    >>> hpcdist.broadcast(values)
    >>> values
    tensor([0., 0.])

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten except on root.
        root: the rank of `comm` whose values are taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for ranks that differ in shape, dtype or root; on every rank. For a buffer that is not
            contiguous or not of numbers; on this rank only, before anything is sent.

    Cost: as the MPI library's Bcast, in pieces of 1 GiB, and two all-reduces of 8 bytes.
    """
    _broadcast(buffer, root, group_of(comm))


def broadcast_async(
    buffer: Any,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> Handle:
    """Start a `broadcast` in a background thread, and return at once; see `all_reduce_async`.

    Collective over `comm`.
    """
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([buffer], lambda: _broadcast(buffer, root, thread.group)))


def _broadcast(buffer: Any, root: int, group: Group) -> None:
    with group.recorded("broadcast", buffer), host_array(buffer, is_moved=True) as array:
        shape = tuple(buffer.shape)
        group.require_same_call("broadcast", f"{array.dtype} of shape {shape} from root {root}")
        library.broadcast(array, group.comm, root)


def all_gather(array: Any, comm: MPI.Comm | None = None) -> Any:
    """Do what `hpcdist.all_gather` does, without gradients. Collective over `comm`."""
    return _all_gather(array, group_of(comm))


def all_gather_async(array: Any, comm: MPI.Comm | None = None) -> Handle:
    """Start an `hpcdist.all_gather` in a background thread, without gradients; `wait` returns its result.

    Collective over `comm`.
    """
    error = _refusal_of_graph("all_gather_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([array], lambda: _all_gather(array, thread.group, error)))


def _all_gather(
    array: Any,
    group: Group,
    error: CollectiveError | None = None,
) -> Any:
    local_rows = to_host(array, "all_gather")
    joined_rows = gather_rows(local_rows, group, error)
    return from_host(joined_rows, array)


def gather_rows(
    array: Array,
    group: Group,
    error: CollectiveError | None = None,
) -> Array:
    """Return the rows of all ranks' host arrays, in the order of the ranks; raise on all ranks if one has an error.

    Collective over `group.comm`.
    """
    with group.recorded("all_gather", None):
        _require_rows_that_fit("all_gather", array, group, error)
        row_shape = array.shape[1:]
        row_counts = np.empty(group.size, np.int64)
        local_row_count = np.array([len(array)], np.int64)
        request = group.comm.Iallgather(local_row_count, row_counts)
        group.wait([request])
        n_rows = int(row_counts.sum())
        joined = np.empty((n_rows, *row_shape), array.dtype)
        element_counts: list[int] = (row_counts * math.prod(row_shape)).tolist()
        local_elements = np.ascontiguousarray(array).reshape(-1)
        library.all_gather(local_elements, element_counts, joined.reshape(-1), group)
    return joined


def _require_rows_that_fit(
    call: str,
    array: Array,
    group: Group,
    error: CollectiveError | None = None,
) -> None:
    """Raise CollectiveError on all ranks unless all have rows of one shape and dtype. Collective over `group.comm`."""
    if not array.ndim:
        error = CollectiveError(f"{call}: expected rows, got a single number; pass value[None].")
    group.agree(error)
    row_sizes = ", ".join(map(str, array.shape[1:]))
    group.require_same_call(call, f"{array.dtype} of shape (*, {row_sizes})")


def scatter(
    array: Any,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> Any:
    """Return this rank's rows of root's array.

    Collective over `comm`. Blocking.

    Args:
        array: (n_rows, ...) numbers or bools on root; ignored on the other ranks.
        root: the rank of `comm` whose rows are divided.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (n_local_rows, ...) of the kind and dtype of root's array. If root has a tensor, the other ranks get theirs in
        host memory. Rows are divided in order, the first ranks getting one more where they do not divide evenly.

    Raises:
        CollectiveError: when root gives no rows, or ranks name different roots; on every rank.

    Cost: the MPI library's Scatterv, and a message for kind, dtype and shape.
    """
    return _scatter(array, root, group_of(comm), _refusal_of_graph("scatter", array))


def scatter_async(
    array: Any,
    root: int = 0,
    comm: MPI.Comm | None = None,
) -> Handle:
    """Start a `scatter` in a background thread; `wait` of the handle returns its result. Collective over `comm`."""
    error = _refusal_of_graph("scatter_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(
        behind_producers([array], lambda: _scatter(array, root, thread.group, error))
    )


def _scatter(
    array: Any,
    root: int,
    group: Group,
    error: CollectiveError | None,
) -> Any:
    is_root = group.rank == root
    with group.recorded("scatter", None):
        rows = None
        if is_root and error is None:
            try:
                rows = to_host(array, "scatter")
            except CollectiveError as caught:
                error = caught
        if rows is not None and not rows.ndim:
            error = CollectiveError(
                f"scatter: expected rows on root, got {type(array).__name__}; pass an array."
            )
        group.agree(error)
        group.require_same_call("scatter", f"root {root}")
        form = None
        if rows is not None:
            form = (_example_of(array), rows[:0], len(rows))
        example, no_rows, n_rows = group.comm.bcast(form, root)
        row_shape = no_rows.shape[1:]
        counts = _even_counts(n_rows, group)
        local_rows = np.empty((counts[group.rank], *row_shape), no_rows.dtype)
        with _RowType(local_rows) as row_type:
            sent = None
            if rows is not None:
                sent = [rows, counts, row_type]
            received = [local_rows, len(local_rows), row_type]
            group.comm.Scatterv(sent, received, root)
    like = array if is_root else example
    return from_host(local_rows, like)


def alltoall(
    array: Any,
    counts: Sequence[int] | None = None,
    comm: MPI.Comm | None = None,
) -> tuple[Any, list[int]]:
    """Send some of this rank's rows to each rank; return the received rows, in the order of the ranks they are from.

    Collective over `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    Args:
        array: (n_rows, ...) numbers or bools: the rows for rank 0 first.
        counts: numbers of rows for each rank; default: as even as possible, the first ranks getting one more.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (n_received_rows, ...) of the same kind and dtype, and the number of rows received from each rank.

    Raises:
        CollectiveError: when counts do not add up to the rows, or ranks differ in dtype or in a dimension beyond the
            first; on every rank.

    Cost: the MPI library's Alltoall of a number and Alltoallv; half precision travels as float32.
    """
    return _alltoall(array, counts, group_of(comm), _refusal_of_graph("alltoall", array))


def alltoall_async(
    array: Any,
    counts: Sequence[int] | None = None,
    comm: MPI.Comm | None = None,
) -> Handle:
    """Start an `alltoall` in a background thread; `wait` of the handle returns its result. Collective over `comm`."""
    error = _refusal_of_graph("alltoall_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(
        behind_producers([array], lambda: _alltoall(array, counts, thread.group, error))
    )


def _alltoall(
    array: Any,
    counts: Sequence[int] | None,
    group: Group,
    error: CollectiveError | None,
) -> tuple[Any, list[int]]:
    rows = to_host(array, "alltoall")
    n_rows = len(rows) if rows.ndim else 0
    if counts is None:
        counts = _even_counts(n_rows, group)
    sent_counts = [int(count) for count in counts]
    has_fitting_counts = (
        len(sent_counts) == group.size and min(sent_counts) >= 0 and sum(sent_counts) == n_rows
    )
    if rows.ndim and not has_fitting_counts:
        error = CollectiveError(
            f"alltoall: expected counts of {group.size} ranks that add up to {n_rows} rows, got {sent_counts}; give "
            f"how many rows each rank gets."
        )
    with group.recorded("alltoall", None):
        _require_rows_that_fit("alltoall", rows, group, error)
        received_counts: list[int] = group.comm.alltoall(sent_counts)
        n_received = sum(received_counts)
        received_rows = np.empty((n_received, *rows.shape[1:]), rows.dtype)
        with _RowType(received_rows) as row_type:
            sent = [rows, sent_counts, row_type]
            received = [received_rows, received_counts, row_type]
            group.comm.Alltoallv(sent, received)
    return from_host(received_rows, array), received_counts


def _refusal_of_graph(call: str, array: Any) -> CollectiveError | None:
    """Return the error for a tensor that a backward would reach, where gradients are recorded; None for other arrays.

    This layer does not import torch. Gradients are recorded if a tensor computed from this one has a graph, too.
    """
    if getattr(array, "grad_fn", None) is None:
        return None
    computed_tensor = array.reshape(-1)[:0].clone()
    if not computed_tensor.requires_grad:
        return None
    function_name = type(array.grad_fn).__name__
    return CollectiveError(
        f"{call}: expected values without a graph, as no gradient flows through it, got a tensor of "
        f"{function_name}; pass value.detach(), or use hpcdist.all_gather, which has gradients."
    )


class _RowType:
    """A context manager for MPI's type of one row. With it counts are of rows, for which 32 bits are enough."""

    def __init__(self, rows: Array) -> None:
        row_bytes = rows.itemsize * math.prod(rows.shape[1:])
        self._type: MPI.Datatype = MPI.BYTE.Create_contiguous(row_bytes).Commit()

    def __enter__(self) -> MPI.Datatype:
        return self._type

    def __exit__(self, *_: object) -> None:
        self._type.Free()


def _even_counts(n_rows: int, group: Group) -> list[int]:
    """Return the number of rows of each rank, as even as possible."""
    bounds = [block_bounds(n_rows, group.size, rank) for rank in range(group.size)]
    return [stop - start for start, stop in bounds]


def _example_of(array: Any) -> Any:
    """Return an array without rows, of the same kind, which other ranks can unpickle."""
    if hasattr(array, "detach"):
        return array[:0].detach().cpu()
    return array[:0]


def reduce_scatter(
    array: Any,
    op: Any = "sum",
    comm: MPI.Comm | None = None,
) -> Any:
    """Return this rank's rows of the reduction of all ranks' arrays.

    Collective over `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: (n_rows, ...) numbers; not changed. float16 and bfloat16 are reduced in float32.
        op: as `hpcdist.all_reduce`.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (n_local_rows, ...) of the same kind and dtype, float64 for a mean of integers. Rows are divided over the ranks
        in order, the first ranks getting one more where they do not divide evenly.

    Raises:
        CollectiveError: for bools, a single number, or ranks that differ in shape, dtype or op; on every rank. For an
            unknown op, on this rank only.

    Cost: the MPI library's Reduce_scatter: at best (P-1)/P * n elements sent per rank.
    """
    reduction = parse_op(op)
    group = group_of(comm)
    error = _refusal_of_graph("reduce_scatter", array)
    return _reduce_scatter(array, reduction, group, error)


def reduce_scatter_async(
    array: Any,
    op: Any = "sum",
    comm: MPI.Comm | None = None,
) -> Handle:
    """Start a `reduce_scatter` in a background thread; `wait` of the handle returns its result.

    Collective over `comm`.
    """
    error = _refusal_of_graph("reduce_scatter_async", array)
    reduction = parse_op(op)
    thread = thread_of(group_of(comm))
    return thread.submit(
        behind_producers([array], lambda: _reduce_scatter(array, reduction, thread.group, error))
    )


def _reduce_scatter(
    array: Any,
    op: Op,
    group: Group,
    error: CollectiveError | None,
) -> Any:
    rows = to_host(array, "reduce_scatter")
    if error is None and (not rows.ndim or rows.dtype.kind not in "iufc"):
        error = CollectiveError(
            f"reduce_scatter: expected rows of numbers, got {rows.shape} {rows.dtype}; pass an array with rows."
        )
    with group.recorded("reduce_scatter", rows):
        group.agree(error)
        if op is MEAN and rows.dtype.kind in "iu":  # as numpy's mean
            rows = rows.astype(np.float64)
            array = _as_floats(array)
        group.require_same_call(
            "reduce_scatter", f"{op.name} of {rows.dtype} of shape {rows.shape}"
        )
        row_shape = rows.shape[1:]
        row_elements = math.prod(row_shape)
        counts = _even_counts(len(rows), group)
        local_rows = np.empty((counts[group.rank], *row_shape), rows.dtype)
        element_counts = [count * row_elements for count in counts]
        group.comm.Reduce_scatter(rows, local_rows, element_counts, library.mpi_op(op))
    if op is MEAN:
        np.divide(local_rows, group.size, out=local_rows)
    return from_host(local_rows, array)


def _as_floats(array: Any) -> Any:
    """Return an array of whole numbers as float64."""
    if hasattr(array, "new_tensor"):
        return array.double()
    return array.astype(np.float64)
