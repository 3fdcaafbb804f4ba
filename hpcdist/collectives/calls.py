"""The public all-reduces: of one buffer, of several as one, and in the background.

Each takes any communicator and any contiguous numpy, torch or cupy array.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import algorithms
from hpcdist.collectives.buffers import host_array, shared_array
from hpcdist.collectives.gpu.cupy_door import behind_producers, in_float32, is_device_buffer
from hpcdist.collectives.gpu.nccl_setup import find_nccl
from hpcdist.collectives.group import Group, group_of, thread_of
from hpcdist.collectives.ops import MEAN, Op, parse_op
from hpcdist.collectives.options import AllReduceAlgorithm, CommunicationOptions
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import choose_route
from hpcdist.dtypes import dtype_name
from hpcdist.errors import CollectiveError
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI


def _options_by_member_and_name() -> dict[Implementation | str, CommunicationOptions]:
    options: dict[Implementation | str, CommunicationOptions] = {}
    for member in Implementation:
        member_options = CommunicationOptions(implementation=member)
        options[member] = member_options
        options[member.name] = member_options
    return options


#: Options that name a built-in algorithm and nothing else, by member and by name. Made once, as checking takes time.
_BUILT_IN = _options_by_member_and_name()


def all_reduce(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Replace `buffer` by its reduction over all ranks.

    Collective over `comm`. Blocking. Same shape and dtype required on every rank: yes.

    >>> values = torch.full((2,), float(strategy.rank))
    >>> hpcdist.all_reduce(values, "max")
    >>> int(values[0]) == strategy.size - 1
    True

    Args:
        buffer: numpy, torch or cupy array, any shape, contiguous; overwritten. float16 and bfloat16 are reduced in
            float32. Device arrays are reduced by NCCL where every rank has NCCL and NCCL has the dtype, else through
            the host.
        op: "sum", "mean", "min", "max" or "product", in any case, or a ReduceOp.
        implementation: a `CommunicationImplementation`, its name, or an `AllReduceAlgorithm`; default AUTO, the fastest
            as measured at the first call of 4 KiB or more, in less than a second: shared memory inside a host, unless
            the MPI library is clearly faster.
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.
        prescale: factor of each rank's values; floats only, half precision in float32.
        postscale: factor of the result, before it is rounded to half precision.

    Raises:
        CollectiveError: for an unknown op, a mean or a scale of integers, or a buffer that cannot be reduced; on this
            rank only, before anything is sent.
        DesyncError: when ranks of a host differ in op, dtype or count; on each of them if the sum is made through
            shared memory. By the MPI library at least on a rank whose neighbour differs; the other ranks may have a
            wrong result: do not catch it. HPCDIST_DEBUG=collectives compares all calls.
        ConfigurationError: for an unknown implementation, or one that these ranks cannot use; on every rank.

    Cost: see the algorithms; one staged copy each way for half precision and device arrays.
    """
    group = group_of(comm)
    reduction = parse_op(op)
    if prescale != 1 or postscale != 1:
        _reduce_scaled(buffer, reduction, _options_of(implementation), group, prescale, postscale)
    elif (
        implementation is None
        and (array := shared_array(buffer)) is not None
        and not group.compares_calls
    ):
        _reduce_by_auto(array, reduction, group)
    else:
        reduce_buffer(buffer, reduction, _options_of(implementation), group)


def all_reduce_async(
    buffer: Any,
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle:
    """Start to replace `buffer` by its reduction over all ranks, in a background thread, and return at once.

    Collective over `comm`. All ranks start the same reductions in the same order.

    Args:
        buffer: as `all_reduce`; do not read or write it before `wait` has returned.
        op: as `all_reduce`.
        implementation: as `all_reduce`.
        comm: as `all_reduce`.
        prescale: as `all_reduce`.
        postscale: as `all_reduce`.

    Returns:
        A handle: `wait(timeout_s=None)` returns when the result is ready, or raises the error; `is_done`.

    Raises:
        CollectiveError, ConfigurationError: for an unknown op or implementation; on every rank alike.

    Cost: as `all_reduce`, in a thread that sleeps while it waits.
    """
    reduction = parse_op(op)
    options = _options_of(implementation)
    thread = thread_of(group_of(comm))
    return thread.submit(
        behind_producers(
            [buffer],
            lambda: _reduce_scaled(buffer, reduction, options, thread.group, prescale, postscale),
        )
    )


def grouped_all_reduce(
    buffers: Sequence[Any],
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Replace each of several buffers by its reduction over all ranks: one all-reduce for each dtype.

    Collective over `comm`. Blocking. Same number, shapes and dtypes required on every rank: yes. Nothing is sent unless
    all buffers can be reduced.

    Args:
        buffers: buffers as for `all_reduce`; overwritten. Buffers on a GPU are reduced one by one, in place.
        op: as `all_reduce`.
        implementation: as `all_reduce`.
        comm: as `all_reduce`.
        prescale: as `all_reduce`.
        postscale: as `all_reduce`.

    Raises:
        CollectiveError: for ranks that differ in op, number, shapes or dtypes; on every rank. Otherwise as
            `all_reduce`.
        ConfigurationError: as `all_reduce`.

    Cost: one more copy of the host buffers each way, and two all-reduces of 8 bytes.
    """
    reduction = parse_op(op)
    options = _options_of(implementation)
    _reduce_grouped(buffers, reduction, options, group_of(comm), prescale, postscale)


def grouped_all_reduce_async(
    buffers: Sequence[Any],
    op: Any = "sum",
    implementation: Implementation | AllReduceAlgorithm | str | None = None,
    comm: MPI.Comm | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle:
    """Start a `grouped_all_reduce` in a background thread, and return at once; see `all_reduce_async`.

    Collective over `comm`.
    """
    reduction = parse_op(op)
    options = _options_of(implementation)
    thread = thread_of(group_of(comm))
    return thread.submit(
        behind_producers(
            buffers,
            lambda: _reduce_grouped(buffers, reduction, options, thread.group, prescale, postscale),
        )
    )


def _reduce_grouped(
    buffers: Sequence[Any],
    reduction: Op,
    options: CommunicationOptions,
    group: Group,
    prescale: float,
    postscale: float,
) -> None:
    descriptions = [f"{dtype_name(buffer)} of shape {tuple(buffer.shape)}" for buffer in buffers]
    group.require_same_call("grouped_all_reduce", f"{reduction.name} of {', '.join(descriptions)}")
    on_device = [buffer for buffer in buffers if is_device_buffer(buffer)]
    with ExitStack() as stack:
        arrays: list[npt.NDArray[Any]] = []
        for buffer in buffers:
            if not is_device_buffer(buffer):
                arrays.append(stack.enter_context(host_array(buffer)))
        for dtype in sorted({array.dtype.str for array in arrays}):
            members = [array for array in arrays if array.dtype.str == dtype]
            packed = np.concatenate([array.reshape(-1) for array in members])
            _reduce_scaled(packed, reduction, options, group, prescale, postscale)
            start = 0
            for array in members:
                stop = start + array.size
                array[...] = packed[start:stop].reshape(array.shape)
                start = stop
        for buffer in on_device:
            _reduce_scaled(buffer, reduction, options, group, prescale, postscale)


def _options_of(
    implementation: Implementation | AllReduceAlgorithm | str | None,
) -> CommunicationOptions:
    if implementation is None:
        return _BUILT_IN[Implementation.AUTO]
    if isinstance(implementation, (Implementation, str)) and implementation in _BUILT_IN:
        return _BUILT_IN[implementation]
    return CommunicationOptions(implementation=implementation)


def _reduce_by_auto(array: npt.NDArray[Any], op: Op, group: Group) -> None:
    """Reduce a host array by AUTO, as `reduce_buffer` does, in less time."""
    divisor = _divisor_of(array, group) if op is MEAN else None
    journal = group.journal
    journal.enter(op.title, array.dtype, array.size)
    try:
        algorithms.reduce_by_auto(array, group, op, divisor)
    finally:
        journal.leave()


def _reduce_scaled(
    buffer: Any,
    op: Op,
    options: CommunicationOptions,
    group: Group,
    prescale: float,
    postscale: float,
) -> None:
    """Do what `reduce_buffer` does with values that are scaled before and after. Collective over `group.comm`."""
    if prescale == 1 and postscale == 1:
        reduce_buffer(buffer, op, options, group)
    elif is_device_buffer(buffer):
        _require_scalable(dtype_name(buffer))
        with in_float32(buffer) as wide:
            wide *= prescale
            reduce_buffer(wide, op, options, group)
            wide *= postscale
    else:
        with host_array(buffer) as array:
            _require_scalable(array.dtype.name)
            array *= prescale
            _reduce_array(array, op, options, group)
            array *= postscale


def _require_scalable(dtype: str) -> None:
    """Raise CollectiveError for a dtype that a scale would be rounded to; on this rank only."""
    if "float" not in dtype and "complex" not in dtype:
        raise CollectiveError(
            f"all_reduce: expected floats to be scaled, got {dtype}; convert them."
        )


def reduce_buffer(
    buffer: Any,
    op: Op,
    options: CommunicationOptions,
    group: Group,
) -> None:
    """Do what `all_reduce` does, in a given group. Collective over `group.comm`."""
    requested = options.implementation
    is_in_device_memory = is_device_buffer(buffer)
    if is_in_device_memory or requested is Implementation.NCCL:
        if requested in (Implementation.AUTO, Implementation.HIERARCHICAL):
            find_nccl(group)
        route = choose_route(group.facts, options, op, 0, dtype_name(buffer))
        if route.is_on_device:
            with group.recorded(op.title, buffer):
                algorithms.run(route, buffer, group, op)
            return
    # the common case, without a context manager for each call
    if (shared := shared_array(buffer)) is not None:
        _reduce_array(shared, op, options, group)
        return
    with host_array(buffer) as array:
        _reduce_array(array, op, options, group)


def _reduce_array(
    array: npt.NDArray[Any],
    op: Op,
    options: CommunicationOptions,
    group: Group,
) -> None:
    divisor = _divisor_of(array, group) if op is MEAN else None
    # measuring is collective too: a rank that is missing is seen
    with group.recorded(op.title, array):
        if options.implementation is Implementation.AUTO:
            algorithms.reduce_by_auto(array, group, op, divisor)
        else:
            route = choose_route(group.facts, options, op, array.nbytes)
            algorithms.run(route, array, group, op, divisor=divisor)


def _divisor_of(array: npt.NDArray[Any], group: Group) -> float:
    if array.dtype.kind not in "fc":
        raise CollectiveError(
            f"all_reduce: expected floats for a mean, got {array.dtype}; convert or use a sum."
        )
    return float(group.size)
