"""The public collectives on buffers: all-reduce, reduce-scatter, broadcast and gathers.

Each takes any communicator and any contiguous numpy, torch or cupy array.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import algorithms, library
from hpcdist.collectives.buffers import host_array, is_host_array
from hpcdist.collectives.gpu.cupy_door import is_device_buffer
from hpcdist.collectives.gpu.nccl_setup import find_nccl
from hpcdist.collectives.group import Group, Handle, group_of, thread_of
from hpcdist.collectives.ops import MEAN, Op, parse_op
from hpcdist.collectives.options import AllReduceAlgorithm, CommunicationOptions
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import choose_route
from hpcdist.dtypes import dtype_name
from hpcdist.errors import CollectiveError
from hpcdist.plan.blocks import block_bounds
from hpcdist.runtime.mpi import MPI

#: Options that name a built-in algorithm and nothing else, by member and by name. Made once, as checking takes time.
_BUILT_IN = {
    key: CommunicationOptions(implementation=member) for member in Implementation for key in (member, member.name)
}
_IN_PLACE = MPI.IN_PLACE


def all_reduce(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
) -> None:
    """Replace `buffer` by its reduction over all ranks.

    Collective: `comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten. float16 and bfloat16 are reduced in
            float32. Device arrays go by NCCL where every rank has it and it has the dtype, else through the host.
        op: "sum", "mean", "min", "max" or "product", in any case, or a ReduceOp.
        implementation: a `CommunicationImplementation`, its name, or an `AllReduceAlgorithm`; default AUTO, the fastest
            as measured at the first call of 4 KiB or more, in less than a second.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Raises:
        CollectiveError: for an unknown op, a mean of integers, or a buffer that cannot be reduced; on this rank only,
            before anything is sent. When ranks of a host differ in op, dtype or count and the sum goes through shared
            memory; on each of them. HPCDIST_DEBUG=collectives compares all calls.
        ConfigurationError: for an unknown implementation, or one that these ranks cannot use; on every rank.

    Cost: see the algorithms; one staged copy each way for half precision and device arrays.
    """
    group, reduction = group_of(comm), parse_op(op)
    if (
        implementation is None
        and is_host_array(buffer)
        and buffer.nbytes < group.library_bytes
        and not group.compares_calls
    ):
        _reduce_small(buffer, reduction, group)
    else:
        reduce_buffer(buffer, reduction, _options_of(implementation), group)


def all_reduce_async(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
) -> Handle:
    """Start to replace `buffer` by its reduction over all ranks, in a background thread, and return at once.

    Collective: `comm`. All ranks start the same reductions in the same order.

    Args:
        buffer: as `all_reduce`; do not read or write it before `wait` has returned.
        op: as `all_reduce`.
        implementation: as `all_reduce`.
        comm: as `all_reduce`.

    Returns:
        A handle: `wait(timeout_s=None)` returns when the result is ready and raises what went wrong; `is_done`.

    Raises:
        CollectiveError, ConfigurationError: for an unknown op or implementation; on every rank alike.

    Cost: as `all_reduce`, in a thread that sleeps while it waits.
    """
    reduction, options = parse_op(op), _options_of(implementation)
    thread = thread_of(group_of(comm))
    return thread.submit(lambda: reduce_buffer(buffer, reduction, options, thread.group))


def _options_of(implementation: Implementation | AllReduceAlgorithm | str | None) -> CommunicationOptions:
    if implementation is None:
        return _BUILT_IN[Implementation.AUTO]
    if isinstance(implementation, (Implementation, str)) and implementation in _BUILT_IN:
        return _BUILT_IN[implementation]
    return CommunicationOptions(implementation=implementation)


def _reduce_small(array: Any, op: Op, group: Group) -> None:
    """Reduce a host array that AUTO leaves to the library: `reduce_buffer` in a third of the time."""
    if op is MEAN:
        _require_floats(array)
    journal = group.journal
    journal.enter(op.title, array.dtype, array.size)
    try:
        group.comm.Allreduce(_IN_PLACE, array, op.mpi_op)
    except MPI.Exception as error:
        raise library.mismatch(error, array, op) from error
    finally:
        journal.leave()
    if op is MEAN:
        np.divide(array, group.size, out=array)


def reduce_buffer(buffer: Any, op: Op, options: CommunicationOptions, group: Group) -> None:
    """Do what `all_reduce` does, in a given group. Collective: `group.comm`."""
    asked, is_in_device_memory = options.implementation, is_device_buffer(buffer)
    if is_in_device_memory or asked is Implementation.NCCL:
        if asked in (Implementation.AUTO, Implementation.HIERARCHICAL):
            find_nccl(group)
        route = choose_route(group.facts, options, op, 0, dtype_name(buffer))
        if route.is_on_device:
            with group.recorded(op.title, buffer):
                algorithms.run(route, buffer, group, op)
            return
    if is_host_array(buffer):  # the common case, without a context manager for each call
        _reduce_array(buffer, op, options, group)
        return
    with host_array(buffer) as array:
        _reduce_array(array, op, options, group)


def _reduce_array(array: npt.NDArray[Any], op: Op, options: CommunicationOptions, group: Group) -> None:
    if op is MEAN:
        _require_floats(array)
    with group.recorded(op.title, array):  # measuring is collective too: a rank that is missing is seen
        if options.implementation is Implementation.AUTO:
            route = algorithms.fastest_route(group, array.nbytes)
        else:
            route = choose_route(group.facts, options, op, array.nbytes)
        algorithms.run(route, array, group, op)
    if op is MEAN:
        np.divide(array, group.size, out=array)


def _require_floats(array: Any) -> None:
    if array.dtype.kind not in "fc":
        raise CollectiveError(f"all_reduce: expected floats for a mean, got {array.dtype}; convert or use a sum.")


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
    with group.recorded("broadcast", buffer), host_array(buffer, is_moved=True) as array:
        library.broadcast(array, group.comm, root)


def all_gather(array: Any, comm: MPI.Comm | None = None) -> Any:
    """Return all ranks' arrays, joined along the first dimension in the order of the ranks.

    Collective: `comm`. Blocking. Same dtype and dimensions required on every rank, but for the first: yes.

    Args:
        array: (n_rows, ...) numbers or bools, a numpy array or a torch tensor; n_rows may differ, and may be 0.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.

    Returns:
        (sum of n_rows, ...) of the same dtype, on every rank: an array, or a tensor on the device of the one given.

    Raises:
        CollectiveError: when ranks differ in dtype or in another dimension, or give a number; on every rank.

    Cost: every rank receives all other ranks' bytes.
    """
    group = group_of(comm)
    if not hasattr(array, "new_empty"):
        return gather_rows(np.asarray(array), group)
    given = array.detach().contiguous()
    with host_array(given, is_moved=True) as own:
        joined = gather_rows(own, group)
    result = given.new_empty(joined.shape)
    with host_array(result, is_moved=True) as target:
        target[...] = joined
    return result


def gather_rows(array: npt.NDArray[Any], group: Group) -> npt.NDArray[Any]:
    """Do what `all_gather` does, in a given group. Collective: `group.comm`."""
    with group.recorded("all_gather", None):
        rows = _rows_of(array, group)
        joined = np.empty((int(rows.sum()), *array.shape[1:]), array.dtype)
        n_elements = math.prod(array.shape[1:])
        counts = [n_rows * n_elements for n_rows in rows.tolist()]
        library.all_gather(np.ascontiguousarray(array).reshape(-1), counts, joined.reshape(-1), group)
    return joined


def _rows_of(array: npt.NDArray[Any], group: Group) -> npt.NDArray[np.int64]:
    """Return every rank's number of rows, once all ranks know that their arrays fit together."""
    own = f"{array.dtype} of shape (*, {', '.join(map(str, array.shape[1:]))})" if array.ndim else "a single number"
    error = None if array.ndim else CollectiveError("all_gather: expected rows, got a single number; pass value[None].")
    group.agree(error)
    group.world.require_same(
        own,
        group.comm,
        lambda roots: CollectiveError(
            f"all_gather: expected {roots} as on rank 0, got {own}; pass arrays that fit together."
        ),
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
