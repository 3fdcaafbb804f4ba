"""`reduce` and `gather` on one rank: the axis inside a replica; sums, element counts and rows over all of them."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.gradients.tensors import from_array
from hpcdist.strategy.reduce_op import ReduceOp

Axis = int | tuple[int, ...] | list[int] | None
Array = npt.NDArray[Any]
SumRows = Callable[[list[Array]], Array]
Gather = Callable[[Array, UsageError | None], tuple[Array, int]]
_HALF = ("float16", "bfloat16")


def check_axis(axis: Axis) -> None:
    """Raise TypeError unless `axis` is None, an int, or a tuple or list of ints."""
    for one in axis if isinstance(axis, (tuple, list)) else (axis,):
        if one is not None and (isinstance(one, bool) or not hasattr(one, "__index__")):
            raise TypeError(f"reduce: expected axis as None, an int or ints, got {axis!r}; pass axis=None or axis=0.")


def reduce_rows(op: ReduceOp, values: list[Any], axis: Axis, sum_rows: SumRows) -> Any:
    """Return a dense value reduced over `axis` and over all replicas; see `Strategy.reduce`.

    Args:
        op: SUM or MEAN.
        values: of this rank's replicas: torch tensors, numpy arrays or numbers.
        axis: checked by `check_axis`.
        sum_rows: returns the sum over all replicas of flat host arrays, one of each local replica.
    """
    arrays = [as_array(value) for value in values]
    axes = [_axes(axis, array.ndim) for array in arrays]
    totals = [_total(array, own) for array, own in zip(arrays, axes, strict=True)]
    check_alike([[describe(*pair)] for pair in zip(values, (one.shape for one in totals), strict=True)], sum_rows)
    total = sum_rows([one.reshape(-1) for one in totals]).reshape(totals[0].shape)
    n_elements = 1.0
    if op is ReduceOp.MEAN:
        counts = [
            np.array([math.prod(array.shape[one] for one in own)], np.float64)
            for array, own in zip(arrays, axes, strict=True)
        ]
        n_elements = sum_rows(counts)[0] or 1.0
    return like(values[0], divided(op, total, n_elements))


def divided(op: ReduceOp, total: Array, n_elements: float) -> Array:
    """Return what a sum of so many elements becomes: itself, or the mean, of the same dtype if it is of floats."""
    if op is ReduceOp.SUM:
        return total
    mean: Array = total / np.float64(n_elements)
    return mean.astype(total.dtype) if total.dtype.kind in "fc" else mean


def _total(array: Array, axes: tuple[int, ...]) -> Array:
    return np.array(array.sum(axis=axes, dtype=array.dtype) if axes else array, order="C")


def gather_rows(values: list[Any], axis: int, gather: Gather) -> tuple[Any, list[int]]:
    """Return all replicas' values joined along `axis`, and where each local one begins; see `Strategy.gather`.

    Args:
        values: of this rank's replicas: torch tensors or numpy arrays.
        axis: negative ones count from the end.
        gather: returns the (rows, ...) arrays of all ranks joined, and where this rank's begins; raises on all ranks
            the error that one of them gives it.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"gather: expected axis as an int, got {axis!r}; pass axis=0.")
    rows, error = [], None
    try:
        rows = _rows_along(values, axis)
    except UsageError as caught:
        error = caught
    joined, start = gather(np.concatenate(rows) if rows else np.empty(0), error)
    starts = np.cumsum([start, *(len(row) for row in rows[:-1])]).tolist()
    place = operator.index(axis) % joined.ndim
    return like(values[0], np.ascontiguousarray(np.moveaxis(joined, 0, place))), starts


def _rows_along(values: list[Any], axis: int) -> list[Array]:
    """Return the values as arrays with `axis` first.

    Raises:
        UsageError: when they are numbers, or do not fit together; on this rank only.
    """
    arrays = [as_array(value) for value in values]
    if any(array.ndim == 0 for array in arrays):
        raise UsageError("gather: expected values with at least one dimension, got a number; pass value[None].")
    rows = [np.ascontiguousarray(np.moveaxis(array, _axes(axis, array.ndim)[0], 0)) for array in arrays]
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        raise UsageError(
            f"gather: expected values that differ along axis {axis} only, got {[array.shape for array in arrays]}; "
            f"pass the axis that differs."
        )
    return rows


def as_array(value: Any) -> Array:
    """Return a tensor, array or number as an array on the host, in the dtype that it is summed in."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return np.asarray((host.float() if str(host.dtype).removeprefix("torch.") in _HALF else host).numpy())
    is_nest = isinstance(value, (list, tuple, dict))
    array = np.asarray(None if is_nest else value)
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"reduce: expected a tensor, an array or a number, got {type(value).__name__}; reduce one value at a time."
        )
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def describe(value: Any, shape: Iterable[int]) -> str:
    """Return the shape of what is summed, and the dtype and kind of what was given for it, as text."""
    if isinstance(value, Tensor):
        return f"{tuple(shape)} {str(value.dtype).removeprefix('torch.')}"
    kind = "number" if isinstance(value, (int, float, complex)) else "array"
    return f"{tuple(shape)} {np.asarray(value).dtype} {kind}"


def _axes(axis: Axis, n_dims: int) -> tuple[int, ...]:
    given = () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for one in map(operator.index, given):
        if not -n_dims <= one < n_dims:
            raise UsageError(
                f"reduce: expected an axis from {-n_dims} to {n_dims - 1}, got {one}; the value has {n_dims} "
                "dimensions."
            )
    places = sorted(operator.index(one) % n_dims for one in given)
    if len(set(places)) < len(places):
        raise UsageError(f"reduce: expected each axis once, got {axis}; name every dimension once.")
    return tuple(places)


def check_alike(values: list[list[str]], sum_rows: SumRows) -> float:
    """Return the number of all replicas, or raise on every rank when what they bring is not alike.

    Sums of x and x*x over n replicas tell whether all x are equal. x is a digest of 20 bits, so that the sums are exact
    for thousands of replicas.

    Args:
        values: shape, dtype and kind of each value of each local replica, and what else must be alike.
        sum_rows: see `reduce_rows`.
    """
    marks = [float(xxhash.xxh3_64_intdigest("; ".join(own).encode()) % (1 << 20)) for own in values]
    sums = sum_rows([np.array([1.0, mark, mark * mark]) for mark in marks])
    if sums[0] * sums[2] != sums[1] * sums[1]:
        found = ", ".join("; ".join(own) for own in values)
        raise UsageError(
            f"reduce: expected values of the same shape and dtype on every replica, got {found} here and others "
            f"elsewhere; pass the axis that differs, and the same nest of tensors, arrays or numbers everywhere."
        )
    return float(sums[0])


def like(value: Any, total: Array) -> Any:
    """Return a sum on the host as the kind of what was summed: tensor, array or number."""
    if isinstance(value, Tensor):
        result = from_array(total, str(total.dtype))
        return result.to(value.dtype) if value.dtype.is_floating_point else result
    return total.item() if isinstance(value, (int, float, complex)) else total


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor or array, so that a replica may write into what all of them were given."""
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def beside(leaf: Any, value: Any) -> Any:
    """Return a tensor on the device of the one that it was made from; anything else as it is."""
    return value.to(leaf.device) if isinstance(value, Tensor) else value
