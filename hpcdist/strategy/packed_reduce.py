"""Several values reduced over all replicas at once: one sum for each dtype; sparse tensors are joined."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.gradients.tensors import from_array
from hpcdist.strategy.local_reduce import Array, Gather, SumRows, as_array, check_alike, describe, divided, like
from hpcdist.strategy.reduce_op import ReduceOp


def reduce_packed(
    op: ReduceOp,
    values: list[list[Any]],
    sum_rows: SumRows,
    gather: Gather,
    forms: Sequence[str] = (),
) -> list[Any]:
    """Return values, each reduced over all replicas, on the host.

    A sum of dense values has the bits that a sum of each alone has, where sums are in the order of replicas. The sum of
    sparse tensors has the entries of all replicas, in their order and not yet coalesced: nothing becomes dense.

    Args:
        op: SUM or MEAN.
        values: the lists of this rank's replicas: torch tensors, dense or sparse COO, numpy arrays or numbers.
        sum_rows: returns the sum over all replicas of flat host arrays, one of each local replica.
        gather: returns the (rows, ...) arrays of all ranks joined, in their order.
        forms: of the nest that each replica's values are the leaves of; default: lists.

    Raises:
        UsageError: when the forms, or shape, dtype, layout or kind of a value differ among replicas; on every rank.

    Cost: a sum of three numbers, and one for each dtype of the dense values; two gathers for each sparse tensor.
    """
    parts: list[list[Any]] = [[one if is_sparse(one) else as_array(one) for one in own] for own in values]
    described = [list(map(_describe, *pair)) for pair in zip(values, parts, strict=True)]
    for own, form in zip(described, forms, strict=False):
        own.append(form)
    n_replicas = check_alike(described, sum_rows)
    reduced: dict[int, Any] = {}
    for places in _packs(parts[0]):
        totals = _sum_pack([[own[place] for place in places] for own in parts], sum_rows)
        for place, total in zip(places, totals, strict=True):
            reduced[place] = like(values[0][place], divided(op, total, n_replicas))
    for place in range(len(parts[0])):
        if place not in reduced:
            reduced[place] = _joined(op, [own[place] for own in parts], n_replicas, gather)
    return [reduced[place] for place in range(len(parts[0]))]


def is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse COO tensor, such as the gradient of an embedding with sparse=True."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _describe(value: Any, part: Array | Tensor) -> str:
    if isinstance(part, Tensor):
        return f"sparse {describe(value, part.shape)} with {part.sparse_dim()} sparse dimensions"
    return describe(value, part.shape)


def _packs(parts: list[Any]) -> list[list[int]]:
    """Return the places of the dense values of each dtype, in the order in which they come."""
    packs: dict[Any, list[int]] = {}
    for place, part in enumerate(parts):
        if not is_sparse(part):
            packs.setdefault(part.dtype, []).append(place)
    return list(packs.values())


def _sum_pack(packs: list[list[Array]], sum_rows: SumRows) -> list[Array]:
    """Return the sum over all replicas of each array of a pack."""
    total = sum_rows([np.concatenate([array.reshape(-1) for array in own]) for own in packs])
    ends = np.cumsum([array.size for array in packs[0]])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(total, ends), packs[0], strict=True)]


def _joined(op: ReduceOp, tensors: list[Tensor], n_replicas: float, gather: Gather) -> Tensor:
    """Return a sparse tensor with the entries of all replicas, divided by their number for the mean."""
    first = tensors[0].detach()
    indices = gather(np.concatenate([as_array(one.detach()._indices().T) for one in tensors]), None)[0]
    entries = gather(np.concatenate([as_array(one.detach()._values()) for one in tensors]), None)[0]
    values = like(first._values(), divided(op, entries, n_replicas))
    return torch.sparse_coo_tensor(from_array(indices.T, "int64"), values, first.shape, check_invariants=False)
