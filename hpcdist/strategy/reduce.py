"""Reduce and gather values of all replicas: as host arrays, over the replicas, and back to the kind of the input.

Everything goes through two operations of `Replicas`, `add` and `append_rows`, on flat host arrays.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from hpcdist.collectives.ops import ReduceOp
from hpcdist.dtypes import HALF, SUM_DTYPES, dtype_name
from hpcdist.errors import UsageError
from hpcdist.program.tensors import from_array
from hpcdist.strategy.replicas import Replicas

Axis = int | tuple[int, ...] | list[int] | None
Array = npt.NDArray[Any]


# -- values on the host -----------------------------------------------------------------------------------------------


def to_host(value: Any) -> Array:
    """Return a tensor, array or number as an array on the host; half precision, unknown to MPI, as float32."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        if dtype_name(host) in HALF:
            host = host.float()
        return np.asarray(host.numpy())
    is_nest = isinstance(value, (list, tuple, dict))
    on_host = value.get() if hasattr(value, "__cuda_array_interface__") else value
    array = np.asarray(None if is_nest else on_host)
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"reduce: expected a tensor, an array or a number, got {type(value).__name__}; reduce one value at a time."
        )
    return array


def to_sum(value: Any) -> Array:
    """Return a tensor, array or number as an array on the host in the dtype that it is summed in: bools are counted."""
    array = to_host(value)
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    return array


def from_host(value: Any, result: Array) -> Any:
    """Return a host array as the same kind of object as `value`: a tensor (on the host), an array or a number."""
    if isinstance(value, Tensor):
        tensor = from_array(result, str(result.dtype))
        return tensor.to(value.dtype) if value.dtype.is_floating_point else tensor
    if isinstance(value, (int, float, complex)):
        return result.item()
    return result


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor or array, so that a replica may write into a value that all of them got."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse COO tensor, such as the gradient of an embedding with sparse=True."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _divide(op: ReduceOp, total: Array, n_elements: float) -> Array:
    """Return a sum as it is, or the mean over n_elements, of the same dtype if it is of floats."""
    if op is ReduceOp.SUM:
        return total
    mean: Array = total / np.float64(n_elements)
    return mean.astype(total.dtype) if total.dtype.kind in "fc" else mean


def _describe(value: Any, shape: Iterable[int]) -> str:
    """Return shape, dtype and kind of a value as text, which must be the same on all replicas."""
    if is_sparse(value):
        return (
            f"sparse {tuple(shape)} {dtype_name(value)} with {value.sparse_dim()} sparse dimensions"
        )
    if isinstance(value, Tensor):
        return f"{tuple(shape)} {dtype_name(value)}"
    kind = "number" if isinstance(value, (int, float, complex)) else "array"
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    return f"{tuple(shape)} {np.dtype(dtype)} {kind}"


def _require_alike(
    replicas: Replicas,
    call: str,
    described: Sequence[Sequence[str]],
    error: UsageError | None = None,
) -> float:
    """Return the number of all replicas, or raise on every rank when their calls or values do not fit together.

    Every exchange of values begins with this message, which always has the same size: ranks that make different calls
    are found before their values are mixed. Two equal calls with different values of one shape and dtype pass.

    Sums of x and x*x over n replicas show whether all x are equal. x is a digest of 20 bits, so that the sums are exact
    for thousands of replicas.

    Args:
        replicas: replicas of the strategy.
        call: name of the call, and what must be the same about it on all replicas.
        described: texts that describe the values, one list for each local replica.
        error: why this rank cannot take part; this rank raises it after the message, and the other ranks raise too.
    """
    if error is not None:
        described = [["no value"] for _ in replicas.local]
    texts: list[str] = []
    rows: list[Array] = []
    for replica_descriptions in described:
        text = "; ".join([call, *replica_descriptions])
        digest = float(xxhash.xxh3_64_intdigest(text.encode()) % (1 << 20))
        texts.append(text)
        rows.append(np.array([1.0, digest, digest * digest]))
    n, total, squares = replicas.add(rows)
    if error is not None:
        raise error
    if n * squares != total * total:
        raise UsageError(
            f"{call.split()[0]}: expected values of the same shape and dtype on every replica, in the same call, got "
            f"{', '.join(dict.fromkeys(texts))} here and others elsewhere; let all ranks make the same calls in the "
            f"same order, pass the axis that differs, and the same nest of tensors, arrays or numbers everywhere."
        )
    return float(n)


# -- reduce -----------------------------------------------------------------------------------------------------------


def check_axis(axis: Axis) -> None:
    """Raise TypeError unless `axis` is None, an int, or a tuple or list of ints."""
    for single_axis in _listed_axes(axis):
        if single_axis is None:
            continue
        if isinstance(single_axis, bool) or not hasattr(single_axis, "__index__"):
            raise TypeError(
                f"reduce: expected axis as None, an int or ints, got {axis!r}; pass axis=None or axis=0."
            )


def _listed_axes(axis: Axis) -> tuple[int, ...]:
    """Return the axes that the caller named: none for None."""
    if axis is None:
        return ()
    if isinstance(axis, (tuple, list)):
        return tuple(axis)
    return (axis,)


def reduce_values(
    replicas: Replicas,
    op: ReduceOp,
    values: list[list[Any]],
    structures: Sequence[str] = (),
    error: UsageError | None = None,
) -> list[Any]:
    """Return values, each reduced over all replicas, on the host: one sum for each dtype.

    A value has the bits that a sum of it alone has, where sums are in the order of replicas. The sum of sparse tensors
    has the entries of all replicas, in their order and not yet coalesced: nothing becomes dense.

    Collective over the ranks of the role.

    Args:
        replicas: replicas of the strategy.
        op: SUM or MEAN.
        values: a list for each local replica: torch tensors, dense or sparse COO, numpy arrays or numbers.
        structures: text for each local replica, the form of the nest whose leaves its values are; default: lists.
        error: why this rank has no values; the other ranks raise too then.

    Raises:
        UsageError: when the structures, or shape, dtype, layout or kind of a value differ; on every rank.

    Cost: a sum of three numbers, and one for each dtype of the dense values; two gathers for each sparse tensor.
    """
    parts: list[list[Any]] = []
    described: list[list[str]] = []
    try:
        parts = [_parts_of(replica_values) for replica_values in values]
        for replica_values, replica_parts in zip(values, parts, strict=True):
            described.append(_describe_all(replica_values, replica_parts))
    except UsageError as caught:
        error = caught
    for replica_descriptions, structure in zip(described, structures, strict=False):
        replica_descriptions.append(structure)
    n_replicas = _require_alike(replicas, f"reduce {op.name}", described, error)
    sparse_indices: list[int] = []
    indices_of_dtype: dict[Any, list[int]] = {}
    for index, part in enumerate(parts[0]):
        if is_sparse(part):
            sparse_indices.append(index)
        else:
            indices_of_dtype.setdefault(part.dtype, []).append(index)
    reduced: list[Any] = [None] * len(parts[0])
    for index in sparse_indices:
        tensors = [replica_parts[index] for replica_parts in parts]
        reduced[index] = _join_sparse(replicas, op, tensors, n_replicas)
    for indices in indices_of_dtype.values():
        packs: list[list[Array]] = []
        for replica_parts in parts:
            packs.append([replica_parts[index] for index in indices])
        totals = _sum_packed(replicas, packs)
        for index, total in zip(indices, totals, strict=True):
            reduced[index] = from_host(values[0][index], _divide(op, total, n_replicas))
    return reduced


def _parts_of(values: list[Any]) -> list[Any]:
    """Return values as they are summed: sparse tensors as they are, all else as host arrays."""
    return [value if is_sparse(value) else to_sum(value) for value in values]


def _describe_all(values: list[Any], parts: list[Any]) -> list[str]:
    """Return shape, dtype and kind of each value as text; the shapes are taken from `parts`."""
    return [_describe(value, part.shape) for value, part in zip(values, parts, strict=True)]


def _sum_packed(replicas: Replicas, packs: list[list[Array]]) -> list[Array]:
    """Return the sum over all replicas of each array of a pack; all have one dtype."""
    rows: list[Array] = []
    for pack in packs:
        flat_arrays = [array.reshape(-1) for array in pack]
        rows.append(np.concatenate(flat_arrays))
    flat_total = replicas.add(rows)
    totals: list[Array] = []
    start = 0
    for array in packs[0]:
        stop = start + array.size
        totals.append(flat_total[start:stop].reshape(array.shape))
        start = stop
    return totals


def _join_sparse(
    replicas: Replicas,
    op: ReduceOp,
    tensors: list[Tensor],
    n_replicas: float,
) -> Tensor:
    """Return a sparse tensor with the entries of all replicas, divided by the number of replicas for the mean."""
    first = tensors[0].detach()
    local_indices: list[Array] = []
    local_entries: list[Array] = []
    for tensor in tensors:
        local_indices.append(to_host(tensor.detach()._indices().T))
        local_entries.append(to_sum(tensor.detach()._values()))
    indices, _ = replicas.append_rows(np.concatenate(local_indices), None)
    entries, _ = replicas.append_rows(np.concatenate(local_entries), None)
    values = from_host(first._values(), _divide(op, entries, n_replicas))
    return torch.sparse_coo_tensor(
        from_array(indices.T, "int64"), values, first.shape, check_invariants=False
    )


def reduce_over_axis(
    replicas: Replicas,
    op: ReduceOp,
    values: list[Any],
    axis: Axis,
    error: UsageError | None = None,
) -> Any:
    """Return a dense value reduced over `axis` and over all replicas; see `Strategy.reduce`.

    Collective over the ranks of the role.

    Args:
        replicas: replicas of the strategy.
        op: SUM or MEAN.
        values: one value for each replica of this rank: a torch tensor, numpy array or number.
        axis: axes to reduce over, checked by `check_axis`.
        error: why this rank has no values; the other ranks raise too then.
    """
    partial_sums: list[_PartialSum] = []
    described: list[list[str]] = []
    try:
        arrays = [to_sum(value) for value in values]
        for value, array in zip(values, arrays, strict=True):
            partial_sum = _sum_over_axes(array, axis)
            partial_sums.append(partial_sum)
            shape = partial_sum.total.shape
            described.append([f"axes {partial_sum.axes}", _describe(value, shape)])
    except UsageError as caught:
        error = caught
    _require_alike(replicas, f"reduce {op.name}", described, error)
    flat_total = replicas.add([partial_sum.total.reshape(-1) for partial_sum in partial_sums])
    total = flat_total.reshape(partial_sums[0].total.shape)
    n_elements = 1.0
    if op is ReduceOp.MEAN:
        counts = [np.array([partial_sum.n_elements], np.float64) for partial_sum in partial_sums]
        n_elements = replicas.add(counts)[0] or 1.0
    return from_host(values[0], _divide(op, total, n_elements))


class _PartialSum(NamedTuple):
    """The sum of one replica's array over some of its axes.

    Attributes:
        axes: the axes, as ascending numbers from 0.
        total: the sum, C-contiguous; a copy of the array where no axes are summed over.
        n_elements: number of elements of the array that an element of the sum is made of.
    """

    axes: tuple[int, ...]
    total: Array
    n_elements: int


def _sum_over_axes(array: Array, axis: Axis) -> _PartialSum:
    """Return the sum of an array over `axis`, in its own dtype."""
    axes = _axes(axis, array.ndim)
    total = array.sum(axis=axes, dtype=array.dtype) if axes else array
    n_elements = math.prod(array.shape[dimension] for dimension in axes)
    return _PartialSum(axes, np.array(total, order="C"), n_elements)


def _axes(axis: Axis, n_dims: int) -> tuple[int, ...]:
    """Return axes as ascending numbers from 0."""
    requested_axes = _listed_axes(axis)
    for axis_index in map(operator.index, requested_axes):
        if not -n_dims <= axis_index < n_dims:
            raise UsageError(
                f"reduce: expected an axis from {-n_dims} to {n_dims - 1}, got {axis_index}; the value has {n_dims} "
                "dimensions."
            )
    axes = sorted(operator.index(requested_axis) % n_dims for requested_axis in requested_axes)
    if len(set(axes)) < len(axes):
        raise UsageError(f"reduce: expected each axis once, got {axis}; name every dimension once.")
    return tuple(axes)


def reduce_in_replica(
    replicas: Replicas,
    op: ReduceOp,
    leaves: Sequence[Any],
    structure: str = "",
) -> list[Any]:
    """Return the leaves of a nest, each reduced over all replicas, on the devices where they were.

    Collective over all replicas. Called inside a replica.

    Args:
        replicas: replicas of the strategy.
        op: SUM or MEAN.
        leaves: the leaves of this replica's nest.
        structure: form of the nest, as text.
    """

    def combine(contributions: list[Any]) -> list[Any]:
        values: list[list[Any]] = []
        structures: list[str] = []
        for replica_leaves, replica_structure in contributions:
            values.append(replica_leaves)
            structures.append(replica_structure)
        reduced = reduce_values(replicas, op, values, structures)
        results: list[list[Any]] = []
        for _ in contributions:
            results.append([copy_of(reduced_leaf) for reduced_leaf in reduced])
        return results

    contributed = [_contributed(replicas, leaf) for leaf in leaves]
    reduced = replicas.scheduler.merge("an all_reduce", (contributed, structure), combine)
    return [_beside(leaf, reduced_leaf) for leaf, reduced_leaf in zip(leaves, reduced, strict=True)]


def _contributed(replicas: Replicas, leaf: Any) -> Any:
    """Return a replica's contribution: a copy where buffers will hold another replica's values when it is used."""
    if len(replicas.local) > 1:
        return copy_of(leaf)
    return leaf


def _beside(leaf: Any, value: Any) -> Any:
    """Return a tensor on the device of the leaf that it was made from, with its strides; anything else as it is.

    Fused optimizers walk through the memory of a gradient in the same order as through the memory of its parameter.
    """
    if not isinstance(value, Tensor):
        return value
    has_other_strides = (
        not is_sparse(value) and value.shape == leaf.shape and value.stride() != leaf.stride()
    )
    if has_other_strides:
        return torch.empty_like(leaf, dtype=value.dtype).copy_(value)
    return value.to(leaf.device)


# -- gather -----------------------------------------------------------------------------------------------------------


def gather_values(
    replicas: Replicas,
    values: list[Any],
    axis: int,
    error: UsageError | None = None,
) -> tuple[Any, list[int]]:
    """Return all replicas' values joined along `axis`, and where each local one begins; see `Strategy.gather`.

    Collective over the ranks of the role.

    Args:
        replicas: replicas of the strategy.
        values: one value for each replica of this rank: a torch tensor or numpy array.
        axis: dimension along which the values are joined; a negative number counts from the end.
        error: why this rank has no values; the other ranks raise too then.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"gather: expected axis as an int, got {axis!r}; pass axis=0.")
    _require_alike(replicas, "gather", [[_axis_text(axis, value)] for value in values], error)
    rows: list[Array] = []
    try:
        rows = _rows_along(values, axis)
    except UsageError as caught:
        error = caught
    local_rows = np.concatenate(rows) if rows else np.empty(0)
    joined, start = replicas.append_rows(local_rows, error)
    starts: list[int] = []
    for replica_rows in rows:
        starts.append(start)
        start += len(replica_rows)
    in_place = np.ascontiguousarray(np.moveaxis(joined, 0, operator.index(axis) % joined.ndim))
    return from_host(values[0], in_place), starts


def _axis_text(axis: int, value: Any) -> str:
    """Return which axis of a value is meant, as text; "a number" for a value without dimensions."""
    n_dims = getattr(value, "ndim", 0)
    if not n_dims:
        return "a number"
    return f"axis {operator.index(axis) % n_dims} of {n_dims}"


def _rows_along(values: list[Any], axis: int) -> list[Array]:
    """Return the values as arrays with `axis` first.

    Raises:
        UsageError: when they are numbers, or do not fit together; on this rank only.
    """
    arrays = [to_host(value) for value in values]
    if any(array.ndim == 0 for array in arrays):
        raise UsageError(
            "gather: expected values with at least one dimension, got a number; pass value[None]."
        )
    rows = [
        np.ascontiguousarray(np.moveaxis(array, _axes(axis, array.ndim)[0], 0)) for array in arrays
    ]
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        raise UsageError(
            f"gather: expected values that differ along axis {axis} only, got {[array.shape for array in arrays]}; "
            f"pass the axis that differs."
        )
    return rows


def gather_in_replica(replicas: Replicas, leaf: Any, axis: int) -> tuple[Any, int]:
    """Return the values of all replicas joined along `axis`, and where this replica's part begins.

    Collective over all replicas. Called inside a replica.
    """

    def combine(contributions: list[Any]) -> list[Any]:
        joined, starts = gather_values(replicas, contributions, axis)
        return [(copy_of(joined), start) for start in starts]

    joined, start = replicas.scheduler.merge("an all_gather", _contributed(replicas, leaf), combine)
    return _beside(leaf, joined), start


# -- tensors that are alike by construction, such as copies of a variable ---------------------------------------------


def sum_tensors(replicas: Replicas, call: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one tensor of each local replica over all replicas, in the order that gradients are added in.

    Collective over the ranks of the role. Same call, shape and dtype required on every replica: yes.

    Args:
        replicas: replicas of the strategy.
        call: name of the call and of its object, such as "read_value of variable 3 'loss'".
        tensors: one tensor of each local replica, left unchanged; bool tensors are or-ed.

    Raises:
        UsageError: when calls, shapes or dtypes differ; on every rank.
    """
    _require_alike_tensors(replicas, f"{call} (sum)", tensors)
    first = tensors[0]
    rows: list[Array] = []
    for tensor in tensors:
        on_host = tensor.detach().cpu().to(_sum_dtype(tensor))
        rows.append(on_host.reshape(-1).clone().numpy())
    total = torch.from_numpy(np.asarray(replicas.add(rows)))
    return total.reshape(first.shape).to(first.device, first.dtype)


def mean_tensors(replicas: Replicas, call: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of one tensor of each local replica over all replicas; see `sum_tensors`."""
    wide = [tensor.detach().to(_sum_dtype(tensor)) for tensor in tensors]
    return (sum_tensors(replicas, call, wide) / replicas.n_replicas).to(tensors[0].dtype)


def first_tensor(replicas: Replicas, call: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor of replica 0, bit for bit, on every rank; see `sum_tensors`.

    Cost: a sum of bytes, to which all other replicas contribute zeros: strategies sum, but have no broadcast.
    """
    _require_alike_tensors(replicas, f"{call} (first)", tensors)
    rows = [np.zeros(tensor.numel() * tensor.element_size(), np.uint8) for tensor in tensors]
    if replicas.local[0] == 0:
        rows[0] = _bytes_of(tensors[0])
    return _from_bytes(replicas.add(rows), tensors[0])


def all_tensors(replicas: Replicas, call: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors of all replicas on the host, (replicas, ...), in their order and bits; see `sum_tensors`."""
    _require_alike_tensors(replicas, f"{call} (all)", tensors)
    rows = np.stack([_bytes_of(tensor) for tensor in tensors])
    joined, _ = replicas.append_rows(rows, None)
    first = tensors[0].cpu()
    return _from_bytes(joined, first.new_empty((len(joined), *first.shape)))


def _require_alike_tensors(replicas: Replicas, call: str, tensors: Sequence[Tensor]) -> None:
    _require_alike(replicas, call, [[_describe(tensor, tensor.shape)] for tensor in tensors])


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.dtype is torch.bool:
        return torch.int64
    name = dtype_name(tensor)
    return getattr(torch, SUM_DTYPES.get(name, name))  # type: ignore[no-any-return]


def _bytes_of(tensor: Tensor) -> Array:
    if tensor.numel() == 0:  # which torch does not view as bytes
        return np.zeros(0, np.uint8)
    return tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8).numpy()


def _from_bytes(flat: Array, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return like.clone()
    tensor = torch.from_numpy(np.array(flat).reshape(-1)).view(like.dtype)
    return tensor.reshape(like.shape).to(like.device)
