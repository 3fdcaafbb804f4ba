"""Gradients with few rows, as of an embedding with sparse=True: every rank gets the rows of all replicas and adds them.

They have no slot in a bucket: after the buckets all ranks know, by the counts that travel with them, which parameters
have gradients, and gather the rows of these. Where a parameter is used densely too, as by tied weights, autograd makes
dense gradients, and these are summed.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.errors import GradientError
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.replicas.local_sums import sum_rows
from hpcdist.gradients.tensors import plus
from hpcdist.plan.replicas import plan_row_additions

Bytes = npt.NDArray[np.uint8]
_INDEX_BYTES = 8


class SparseRecord(ParameterRecord):
    """One parameter of a layer with sparse=True, and the state of its gradient.

    Attributes:
        contribution: what this replica adds to the sum: sparse, or dense where autograd made a dense gradient, on the
            host, in `sum_dtype`; None: nothing.
        total: the sum over all replicas, likewise.
        sum_dtype: in which gradients are added.
        shape: of the parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        self.assign_slot(-1, None, parameter)
        self.shape = parameter.shape
        self.sum_dtype: torch.dtype = getattr(torch, SUM_DTYPES[dtype_name(parameter)])
        self.contribution: Tensor | None = None
        self.total: Tensor | None = None

    def take(self, parameter: nn.Parameter, weight: float) -> None:
        """Take the gradient that a synchronized backward has just written, of this weight in the sum."""
        gradient = parameter.grad
        assert gradient is not None, "autograd writes the gradient before it calls this"
        if gradient.dtype is not self._dtype or gradient.device != self._device or self._has_other_rows(gradient):
            raise self._refusal(gradient)
        local = self._sort_stashed()
        self.contribution = self._weighed(gradient if local is None else plus(local, gradient), weight)
        self.pending.is_touched = True

    def stand_in(self, weight: float) -> None:
        """Contribute what this replica accumulated under no_sync before, or nothing."""
        parameter = self.reference()
        if parameter is not None:
            self.stash(parameter)
        local = self._sort_stashed()
        self.contribution = None if local is None else self._weighed(local, weight)
        self.pending.is_touched = local is not None or self.pending.has_zeros

    def publish(self, n_touched: float) -> None:
        """Make `parameter.grad` the sum over all replicas, plus what earlier backwards left; see the base class."""
        parameter, pending = self.reference(), self.pending
        result = pending.earlier
        if n_touched and parameter is not None:
            assert self.total is not None, "sum_sparse sets it"
            result = self.total.to(parameter.device, parameter.dtype)
            if pending.earlier is not None:
                result = plus(result, pending.earlier)
        self.contribution = self.total = None
        self.leave(result)

    def _has_other_rows(self, gradient: Tensor) -> bool:
        return gradient.is_sparse and gradient.sparse_dim() != 1

    def _refusal(self, gradient: Tensor) -> GradientError:
        if self._has_other_rows(gradient):
            return GradientError(
                f"backward: expected a sparse gradient of rows, as of an embedding, for {self.name!r}, got one with "
                f"{gradient.sparse_dim()} sparse dimensions; build the layer with sparse=False."
            )
        return super()._refusal(gradient)

    def _weighed(self, gradient: Tensor, weight: float) -> Tensor:
        host = gradient.detach().to("cpu", self.sum_dtype)
        if weight == 0:  # not multiplied: there may be a NaN
            return self.empty() if host.is_sparse else torch.zeros_like(host)
        return host if weight == 1 else host * weight

    def empty(self) -> Tensor:
        """Return a sparse gradient without rows."""
        return self.of_rows(torch.empty(0, dtype=torch.int64), torch.empty(0, *self.shape[1:], dtype=self.sum_dtype))

    def of_rows(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Return the sparse gradient with these rows, in ascending order and each there once."""
        return torch.sparse_coo_tensor(numbers[None], rows, self.shape, is_coalesced=True, check_invariants=False)


def sum_sparse(
    records: Sequence[SparseRecord],
    contributions: Sequence[Sequence[Tensor | None]],
    n_dense: Sequence[float],
    reducer: Reducer,
) -> None:
    """Set the total of every record to the sum over all replicas, in the tree over the replicas.

    A row has the bits that it would have in a dense sum in that order.

    Collective: all ranks. Blocking.

    Args:
        records: those that have a gradient on some replica, the same on every rank.
        contributions: of each local replica, one for each record.
        n_dense: how many replicas contribute a dense gradient to each record; equal on every rank.
        reducer: gathers from the ranks.

    Cost: every rank receives the rows of all others, in one message each, after one of 8 bytes for each record and
        replica; a dense gradient costs an all-reduce of its own.
    """
    is_sparse = [count == 0 for count in n_dense]
    rows = [[one for one, is_row in zip(own, is_sparse, strict=True) if is_row] for own in contributions]
    sparse = [record for record, is_row in zip(records, is_sparse, strict=True) if is_row]
    for number, record in enumerate(records):
        if not is_sparse[number]:
            record.total = _sum_dense(record, [own[number] for own in contributions], reducer)
    if sparse:
        for record, parts in zip(sparse, _gather(sparse, rows, reducer), strict=True):
            record.total = _add_in_tree(parts)


def _sum_dense(record: SparseRecord, parts: Sequence[Tensor | None], reducer: Reducer) -> Tensor:
    dense = [
        torch.zeros(record.shape, dtype=record.sum_dtype)
        if part is None
        else (part.to_dense() if part.is_sparse else part.clone(memory_format=torch.contiguous_format))
        for part in parts
    ]
    total = sum_rows(reducer, [one.reshape(-1).numpy() for one in dense], "gradients of sparse layers")
    return torch.from_numpy(total).view(record.shape)


def _add_in_tree(parts: list[Tensor]) -> Tensor:
    """Return the sum of coalesced tensors, one of each replica."""
    for into, other in plan_row_additions(len(parts)):
        parts[into] = (parts[into] + parts[other]).coalesce()
    return parts[0]


# -- rows of all ranks ------------------------------------------------------------------------------------------------


def _gather(
    records: Sequence[SparseRecord], contributions: Sequence[Sequence[Tensor | None]], reducer: Reducer
) -> list[list[Tensor]]:
    """Return for each record the coalesced contributions of all replicas. Collective: all ranks."""
    own = [
        (record.empty() if part is None else part).coalesce()
        for parts in contributions
        for record, part in zip(records, parts, strict=True)
    ]
    n_replicas = [len(reducer.replicas.of_rank(rank)) for rank in range(reducer.group.size)]
    n_own_rows = np.array([one._nnz() for one in own], np.int64)
    n_rows = reducer.gather(n_own_rows, [n * len(records) for n in n_replicas], "rows of sparse gradients")
    of_replicas = n_rows.reshape(-1, len(records))
    starts = np.cumsum([0, *n_replicas])
    sizes = (of_replicas @ [row_bytes(record) for record in records]).tolist()
    counts = [sum(sizes[start:stop]) for start, stop in pairwise(starts)]
    joined = reducer.gather(np.concatenate([_pack(one) for one in own]), counts, "sparse gradients")
    by_replica = list(_unpack(records, of_replicas, joined))
    return [list(parts) for parts in zip(*by_replica, strict=True)]


def row_bytes(record: SparseRecord) -> int:
    """Return the bytes of a row with its number."""
    return _INDEX_BYTES + record.shape[1:].numel() * record.sum_dtype.itemsize


def _pack(gradient: Tensor) -> Bytes:
    arrays: list[npt.NDArray[Any]] = [gradient.indices().numpy(), gradient.values().contiguous().numpy()]
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])


def _unpack(records: Sequence[SparseRecord], n_rows: npt.NDArray[np.int64], joined: Bytes) -> Iterator[list[Tensor]]:
    """Yield the gradients of each replica, one for each record, from what the replicas have packed."""
    memory, start = torch.from_numpy(joined), 0
    for of_replica in n_rows.tolist():
        parts = []
        for record, n in zip(records, of_replica, strict=True):
            stop = start + n * row_bytes(record)
            numbers, rows = memory[start : start + n * _INDEX_BYTES], memory[start + n * _INDEX_BYTES : stop]
            start = stop
            # copied: views of another dtype must begin at a multiple of its size
            values = rows.clone().view(record.sum_dtype).view(n, *record.shape[1:])
            parts.append(record.of_rows(numbers.clone().view(torch.int64), values))
        yield parts
