"""`strategy.reduce` on one rank: the axis inside a replica, sums and element counts over all of them."""

import math
import operator
from collections.abc import Callable
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
_HALF = ("float16", "bfloat16")


def check_axis(axis: Axis) -> None:
    """Raise TypeError unless `axis` is None, an int, or a tuple or list of ints."""
    for one in axis if isinstance(axis, (tuple, list)) else (axis,):
        if one is not None and (isinstance(one, bool) or not hasattr(one, "__index__")):
            raise TypeError(f"reduce: expected axis as None, an int or ints, got {axis!r}; pass axis=None or axis=0.")


def reduce_rows(op: ReduceOp, value: Any, axis: Axis, all_reduce: Callable[[Array], None]) -> Any:
    """Return `value` reduced over `axis` and over all replicas; see `Strategy.reduce`.

    Args:
        op: SUM or MEAN.
        value: torch tensor, numpy array or number.
        axis: checked by `check_axis`.
        all_reduce: replaces a host array by its sum over the replicas.
    """
    array = _as_array(value)
    axes = _axes(axis, array.ndim)
    total = np.array(array.sum(axis=axes, dtype=array.dtype) if axes else array, order="C")
    _check_shapes(total, all_reduce)
    count = np.array([math.prod(array.shape[one] for one in axes)], np.float64)
    all_reduce(total.reshape(-1))
    if op is ReduceOp.MEAN:
        all_reduce(count)
        total = total / (count[0] or 1.0)
        total = total.astype(array.dtype) if array.dtype.kind in "fc" else total
    return _like(value, total)


def _as_array(value: Any) -> Array:
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return np.asarray((host.float() if str(host.dtype).removeprefix("torch.") in _HALF else host).numpy())
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"reduce: expected a tensor, an array or a number, got {type(value).__name__}; reduce one value at a time."
        )
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _axes(axis: Axis, n_dims: int) -> tuple[int, ...]:
    given = () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for one in map(operator.index, given):
        if not -n_dims <= one < n_dims:
            raise UsageError(
                f"reduce: expected an axis from {-n_dims} to {n_dims - 1}, got {one}; the value has {n_dims} "
                "dimensions."
            )
    return tuple(sorted({operator.index(one) % n_dims for one in given}))


def _check_shapes(total: Array, all_reduce: Callable[[Array], None]) -> None:
    """Raise on every rank when shapes differ: sums of x and x*x over n ranks tell whether all x are equal.

    x is a digest of 20 bits, so that the sums are exact for thousands of ranks.
    """
    mark = float(xxhash.xxh3_64_intdigest(f"{total.shape} {total.dtype}".encode()) % (1 << 20))
    sums = np.array([1.0, mark, mark * mark])
    all_reduce(sums)
    if sums[0] * sums[2] != sums[1] * sums[1]:
        raise UsageError(
            f"reduce: expected values of the same shape and dtype on every replica, got {total.shape} {total.dtype} "
            f"here and others elsewhere; pass the axis that differs."
        )


def _like(value: Any, total: Array) -> Any:
    if isinstance(value, Tensor):
        result = from_array(total, str(total.dtype))
        return result.to(value.dtype) if value.dtype.is_floating_point else result
    return total.item() if isinstance(value, (int, float, complex)) else total
