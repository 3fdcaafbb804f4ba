"""The public collectives that move rows from rank to rank: broadcast, gather, scatter, all-to-all, reduce-scatter.

Each takes any communicator and numpy arrays, torch tensors or cupy arrays, and returns what it was given, on the same
device. No gradient flows through them, so a tensor that is computed of others with gradients is refused: through
`hpcdist.all_gather` and `ReplicaContext.all_gather` they flow.
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


def broadcast(buffer: Any, root: int = 0, comm: MPI.Comm | None = None) -> None:
    """Replace `buffer` by root's.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten except on root.
        root: the rank of `comm` whose values are taken.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for ranks that differ in shape, dtype or root; on every rank. For a buffer that is not
            contiguous or not of numbers; on this rank only, before anything is sent.

    Cost: as the MPI library's Bcast, in pieces of 1 GiB, and an all-reduce of 24 bytes.
    """
    _broadcast(buffer, root, group_of(comm))


def broadcast_async(buffer: Any, root: int = 0, comm: MPI.Comm | None = None) -> Handle:
    """Start a `broadcast` in a background thread, and return at once; see `all_reduce_async`. Collective: `comm`."""
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([buffer], lambda: _broadcast(buffer, root, thread.group)))


def _broadcast(buffer: Any, root: int, group: Group) -> None:
    with group.recorded("broadcast", buffer), host_array(buffer, is_moved=True) as array:
        group.require_same_call("broadcast", f"{array.dtype} of shape {tuple(buffer.shape)} from root {root}")
        library.broadcast(array, group.comm, root)


def all_gather(array: Any, comm: MPI.Comm | None = None) -> Any:
    """Return all ranks' arrays, joined along the first dimension in the order of the ranks.

    Collective: `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    Args:
        array: (n_rows, ...) numbers or bools; n_rows may differ, and may be 0.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (sum of n_rows, ...) of the same kind and dtype, on every rank.

    Raises:
        CollectiveError: when ranks differ in dtype or in another dimension, or give a number; on every rank.

    Cost: every rank receives all other ranks' bytes; half precision travels as float32.
    """
    return _all_gather(array, group_of(comm))


def all_gather_async(array: Any, comm: MPI.Comm | None = None) -> Handle:
    """Start an `all_gather` in a background thread; `wait` of the handle returns its result. Collective: `comm`."""
    error = _refusal_of_graph("all_gather_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([array], lambda: _all_gather(array, thread.group, error)))


def _all_gather(array: Any, group: Group, error: CollectiveError | None = None) -> Any:
    return from_host(gather_rows(to_host(array, "all_gather"), group, error), array)


def gather_rows(array: Array, group: Group, error: CollectiveError | None = None) -> Array:
    """Do what `all_gather` does with a host array, in a given group; raise on all ranks if one has an error.

    Collective: `group.comm`.
    """
    with group.recorded("all_gather", None):
        _require_rows_that_fit("all_gather", array, group, error)
        rows = np.empty(group.size, np.int64)
        group.wait([group.comm.Iallgather(np.array([len(array)], np.int64), rows)])
        joined = np.empty((int(rows.sum()), *array.shape[1:]), array.dtype)
        n_elements = math.prod(array.shape[1:])
        counts = [n_rows * n_elements for n_rows in rows.tolist()]
        library.all_gather(np.ascontiguousarray(array).reshape(-1), counts, joined.reshape(-1), group)
    return joined


def _require_rows_that_fit(call: str, array: Array, group: Group, error: CollectiveError | None = None) -> None:
    """Raise CollectiveError on all ranks unless all have rows of one shape and dtype. Collective: `group.comm`."""
    own = f"{array.dtype} of shape (*, {', '.join(map(str, array.shape[1:]))})" if array.ndim else "a single number"
    if not array.ndim:
        error = CollectiveError(f"{call}: expected rows, got a single number; pass value[None].")
    group.agree(error)
    group.require_same_call(call, own)


def scatter(array: Any, root: int = 0, comm: MPI.Comm | None = None) -> Any:
    """Return this rank's rows of root's array.

    Collective: `comm`. Blocking.

    Args:
        array: (n_rows, ...) numbers or bools on root; not looked at elsewhere.
        root: the rank of `comm` whose rows are divided.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (own rows, ...) of the kind and dtype of root's array; a tensor of root's is in host memory elsewhere. Rows are
        divided in order, the first ranks getting one more where they do not divide evenly.

    Raises:
        CollectiveError: when root gives no rows, or ranks name other roots; on every rank.

    Cost: the MPI library's Scatterv, and a message for kind, dtype and shape.
    """
    return _scatter(array, root, group_of(comm), _refusal_of_graph("scatter", array))


def scatter_async(array: Any, root: int = 0, comm: MPI.Comm | None = None) -> Handle:
    """Start a `scatter` in a background thread; `wait` of the handle returns its result. Collective: `comm`."""
    error = _refusal_of_graph("scatter_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([array], lambda: _scatter(array, root, thread.group, error)))


def _scatter(array: Any, root: int, group: Group, error: CollectiveError | None) -> Any:
    is_root = group.rank == root
    with group.recorded("scatter", None):
        given = None
        if is_root and error is None:
            try:
                given = to_host(array, "scatter")
            except CollectiveError as caught:
                error = caught
        if given is not None and not given.ndim:
            error = CollectiveError(f"scatter: expected rows on root, got {type(array).__name__}; pass an array.")
        group.agree(error)
        group.require_same_call("scatter", f"root {root}")
        kind = None if given is None else (_example_of(array), given[:0], len(given))
        example, no_rows, n_rows = group.comm.bcast(kind, root)
        counts = _even_counts(n_rows, group)
        own = np.empty((counts[group.rank], *no_rows.shape[1:]), no_rows.dtype)
        with _RowType(own) as row:
            sent = None if given is None else [given, counts, row]
            group.comm.Scatterv(sent, [own, len(own), row], root)
    return from_host(own, array if is_root else example)


def alltoall(array: Any, counts: Sequence[int] | None = None, comm: MPI.Comm | None = None) -> tuple[Any, list[int]]:
    """Send some of this rank's rows to each rank; return the rows that came, in the order of the ranks they are from.

    Collective: `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    Args:
        array: (n_rows, ...) numbers or bools: the rows for rank 0 first.
        counts: how many rows each rank gets; default: as even as possible, the first ranks getting one more.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (sum of what came, ...) of the same kind and dtype, and how many rows came from each rank.

    Raises:
        CollectiveError: when counts do not add up to the rows, or ranks differ in dtype or another dimension; on every
            rank.

    Cost: the MPI library's Alltoall of a number and Alltoallv; half precision travels as float32.
    """
    return _alltoall(array, counts, group_of(comm), _refusal_of_graph("alltoall", array))


def alltoall_async(array: Any, counts: Sequence[int] | None = None, comm: MPI.Comm | None = None) -> Handle:
    """Start an `alltoall` in a background thread; `wait` of the handle returns its result. Collective: `comm`."""
    error = _refusal_of_graph("alltoall_async", array)
    thread = thread_of(group_of(comm))
    return thread.submit(behind_producers([array], lambda: _alltoall(array, counts, thread.group, error)))


def _alltoall(
    array: Any, counts: Sequence[int] | None, group: Group, error: CollectiveError | None
) -> tuple[Any, list[int]]:
    given = to_host(array, "alltoall")
    sent = _even_counts(len(given) if given.ndim else 0, group) if counts is None else [int(n) for n in counts]
    if given.ndim and (len(sent) != group.size or min(sent) < 0 or sum(sent) != len(given)):
        error = CollectiveError(
            f"alltoall: expected counts of {group.size} ranks that add up to {len(given)} rows, got {sent}; give how "
            f"many rows each rank gets."
        )
    with group.recorded("alltoall", None):
        _require_rows_that_fit("alltoall", given, group, error)
        received: list[int] = group.comm.alltoall(sent)
        came = np.empty((sum(received), *given.shape[1:]), given.dtype)
        with _RowType(came) as row:
            group.comm.Alltoallv([given, sent, row], [came, received, row])
    return from_host(came, array), received


def _refusal_of_graph(call: str, array: Any) -> CollectiveError | None:
    """Return the error for a tensor that a backward would reach, where gradients are recorded; None for others.

    This layer does not import torch: what is computed of such a tensor has a graph, too.
    """
    if getattr(array, "grad_fn", None) is None or not array.reshape(-1)[:0].clone().requires_grad:
        return None
    return CollectiveError(
        f"{call}: expected values without a graph, as no gradient flows through it, got a tensor of "
        f"{type(array.grad_fn).__name__}; pass value.detach(), or use hpcdist.all_gather, which has gradients."
    )


class _RowType:
    """MPI's type of one row, so that rows are counted: counts of 32 bits are enough then. A context manager."""

    def __init__(self, rows: Array) -> None:
        row_bytes = rows.itemsize * math.prod(rows.shape[1:])
        self._type: MPI.Datatype = MPI.BYTE.Create_contiguous(row_bytes).Commit()

    def __enter__(self) -> MPI.Datatype:
        return self._type

    def __exit__(self, *_: object) -> None:
        self._type.Free()


def _even_counts(n_rows: int, group: Group) -> list[int]:
    bounds = [block_bounds(n_rows, group.size, rank) for rank in range(group.size)]
    return [stop - start for start, stop in bounds]


def _example_of(array: Any) -> Any:
    """Return an array of no rows of the same kind, which other ranks can unpickle."""
    return array[:0].detach().cpu() if hasattr(array, "detach") else array[:0]


def reduce_scatter(array: Any, op: Any = "sum", comm: MPI.Comm | None = None) -> Any:
    """Return this rank's rows of the reduction of all ranks' arrays.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: (n_rows, ...) numbers; not changed. float16 and bfloat16 are reduced in float32.
        op: as `hpcdist.all_reduce`.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (own rows, ...) of the same kind and dtype, float64 for a mean of integers: rows are divided over the ranks in
        order, the first ones getting one more where they do not divide evenly.

    Raises:
        CollectiveError: for bools, a single number, or ranks that differ in shape, dtype or op; on every rank. For an
            unknown op, on this rank only.

    Cost: the MPI library's Reduce_scatter: at best (P-1)/P * n elements sent per rank.
    """
    return _reduce_scatter(array, parse_op(op), group_of(comm), _refusal_of_graph("reduce_scatter", array))


def reduce_scatter_async(array: Any, op: Any = "sum", comm: MPI.Comm | None = None) -> Handle:
    """Start a `reduce_scatter` in a background thread; `wait` of the handle returns its result. Collective: `comm`."""
    error = _refusal_of_graph("reduce_scatter_async", array)
    reduction, thread = parse_op(op), thread_of(group_of(comm))
    return thread.submit(behind_producers([array], lambda: _reduce_scatter(array, reduction, thread.group, error)))


def _reduce_scatter(array: Any, op: Op, group: Group, error: CollectiveError | None) -> Any:
    given = to_host(array, "reduce_scatter")
    if error is None and (not given.ndim or given.dtype.kind not in "iufc"):
        error = CollectiveError(
            f"reduce_scatter: expected rows of numbers, got {given.shape} {given.dtype}; pass an array with rows."
        )
    with group.recorded("reduce_scatter", given):
        group.agree(error)
        if op is MEAN and given.dtype.kind in "iu":  # as numpy's mean
            given = given.astype(np.float64)
            array = _as_floats(array)
        group.require_same_call("reduce_scatter", f"{op.name} of {given.dtype} of shape {given.shape}")
        counts = _even_counts(len(given), group)
        own = np.empty((counts[group.rank], *given.shape[1:]), given.dtype)
        sizes = [count * math.prod(given.shape[1:]) for count in counts]
        group.comm.Reduce_scatter(given, own, sizes, library.mpi_op(op))
    if op is MEAN:
        np.divide(own, group.size, out=own)
    return from_host(own, array)


def _as_floats(array: Any) -> Any:
    """Return an array of whole numbers as float64."""
    return array.double() if hasattr(array, "new_tensor") else array.astype(np.float64)
