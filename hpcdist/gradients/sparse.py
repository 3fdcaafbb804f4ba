"""Gradients with few rows, as of an embedding with sparse=True: every rank gets the rows of all replicas and adds them.

They have no part in a bucket. After the buckets all ranks know, by the counts that travel with them, which parameters
have gradients, and gather the rows of these gradients. Where a parameter is used densely too, as by tied weights,
autograd makes dense gradients, and these are summed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.errors import GradientError
from hpcdist.gradients.local_sums import sum_rows
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.slot import Slot
from hpcdist.plan.replicas import plan_row_additions
from hpcdist.program.tensors import plus

Bytes = npt.NDArray[np.uint8]
_INDEX_BYTES = 8


class SparseSlot(Slot):
    """One parameter of a layer with sparse=True.

    Attributes:
        contribution: gradient that this replica adds to the sum: sparse, or dense where autograd made a dense gradient,
            on the host, in `sum_dtype`. None if it adds none.
        total: the sum over all replicas, sparse or dense, on the host, in `sum_dtype`.
        sum_dtype: dtype in which gradients are added.
    """

    is_in_bucket = False

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        self.sum_dtype: torch.dtype = getattr(torch, SUM_DTYPES[dtype_name(parameter)])
        self.contribution: Tensor | None = None
        self.total: Tensor | None = None

    def require_kind(self, gradient: Tensor) -> None:
        """Raise GradientError unless the slot can take a gradient; on this rank only."""
        if gradient.is_sparse and gradient.sparse_dim() != 1:
            raise GradientError(
                f"backward: expected a sparse gradient of rows, as of an embedding, for {self.name!r}, got one with "
                f"{gradient.sparse_dim()} sparse dimensions; build the layer with sparse=False."
            )
        self.require_unconverted(gradient)

    def take(self, gradient: Tensor | None, scale: float) -> None:
        """Take the gradient that this replica adds to the sum, and its weight; None if it adds none."""
        self.contribution = None
        if gradient is not None:
            self.require_kind(gradient)
            host_gradient = gradient.detach().to("cpu", self.sum_dtype)
            self.contribution = self._weighted(host_gradient, scale)

    def _weighted(self, gradient: Tensor, scale: float) -> Tensor:
        if scale == 1:
            return gradient
        if scale:
            return gradient * scale
        # not multiplied by 0: there may be a NaN
        if gradient.is_sparse:
            return self.empty()
        return torch.zeros_like(gradient)

    def publish(
        self,
        parameter: nn.Parameter,
        earlier: Tensor | None,
        is_copied: bool,
    ) -> None:
        """Make `parameter.grad` the sum over all replicas; see `Slot.publish`."""
        assert self.total is not None, "sum_sparse sets it"
        result = self.total.to(parameter.device, parameter.dtype)
        if earlier is not None:
            result = plus(result, earlier)
        self.contribution = self.total = None
        self.leave(parameter, result)

    def note_published(self, gradient: Tensor) -> None:
        """Remember a gradient that was published, weakly. A sparse gradient has no memory in one piece."""
        self._published_weakly = TensorWeakRef(gradient)

    def is_left(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the tensor that was published last."""
        return self._is_last(gradient)

    def empty(self) -> Tensor:
        """Return a sparse gradient without rows."""
        no_numbers = torch.empty(0, dtype=torch.int64)
        no_rows = torch.empty(0, *self.shape[1:], dtype=self.sum_dtype)
        return self.of_rows(no_numbers, no_rows)

    def of_rows(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Return the sparse gradient with these rows, in ascending order, each row once."""
        return torch.sparse_coo_tensor(
            numbers[None], rows, self.shape, is_coalesced=True, check_invariants=False
        )


def sum_sparse(
    slots: Sequence[SparseSlot],
    contributions: Sequence[Sequence[Tensor | None]],
    n_dense: Sequence[float],
    reducer: Reducer,
) -> None:
    """Set the total of every slot to the sum over all replicas, in the tree over the replicas.

    A row has the bits that it would have in a dense sum in that order.

    Collective over all ranks. Blocking.

    Args:
        slots: slots that have a gradient on some replica, the same on every rank.
        contributions: for each local replica, its gradient for each slot.
        n_dense: number of replicas that contribute a dense gradient, for each slot; equal on every rank.
        reducer: gathers rows from the ranks.

    Cost: every rank receives the rows of all other ranks, in one message each, after a message of 8 bytes for each slot
        and replica. A dense gradient costs one more all-reduce.
    """
    sparse_numbers: list[int] = []
    for number, slot in enumerate(slots):
        if n_dense[number]:
            gradients_of_slot = [gradients[number] for gradients in contributions]
            slot.total = _sum_dense(slot, gradients_of_slot, reducer)
        else:
            sparse_numbers.append(number)
    if not sparse_numbers:
        return
    sparse_slots = [slots[number] for number in sparse_numbers]
    gradients_of_replicas: list[list[Tensor | None]] = []
    for gradients in contributions:
        gradients_of_replicas.append([gradients[number] for number in sparse_numbers])
    rows_of_slots = _gather(sparse_slots, gradients_of_replicas, reducer)
    for slot, rows in zip(sparse_slots, rows_of_slots, strict=True):
        slot.total = _add_in_tree(rows)


def _sum_dense(
    slot: SparseSlot,
    gradients: Sequence[Tensor | None],
    reducer: Reducer,
) -> Tensor:
    """Return the sum over all replicas of gradients, some of which are dense. Collective over all ranks."""
    rows: list[npt.NDArray[Any]] = []
    for gradient in gradients:
        dense_gradient = _dense(slot, gradient)
        rows.append(dense_gradient.reshape(-1).numpy())
    total = sum_rows(reducer, rows, "gradients of sparse layers")
    return torch.from_numpy(total).view(slot.shape)


def _dense(slot: SparseSlot, gradient: Tensor | None) -> Tensor:
    """Return a replica's gradient as a dense tensor that may be overwritten."""
    if gradient is None:
        return torch.zeros(slot.shape, dtype=slot.sum_dtype)
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient.clone(memory_format=torch.contiguous_format)


def _add_in_tree(gradients: list[Tensor]) -> Tensor:
    """Return the sum of coalesced tensors, one of each replica."""
    for into, row in plan_row_additions(len(gradients)):
        subtree_sum = gradients[into] + gradients[row]
        gradients[into] = subtree_sum.coalesce()
    return gradients[0]


# -- rows of all ranks ------------------------------------------------------------------------------------------------


def _gather(
    slots: Sequence[SparseSlot],
    contributions: Sequence[Sequence[Tensor | None]],
    reducer: Reducer,
) -> list[list[Tensor]]:
    """Return for each slot the coalesced contributions of all replicas. Collective over all ranks."""
    coalesced: list[Tensor] = []
    for gradients in contributions:
        for slot, gradient in zip(slots, gradients, strict=True):
            if gradient is None:
                gradient = slot.empty()
            coalesced.append(gradient.coalesce())
    n_slots = len(slots)
    replicas = reducer.replicas
    n_replicas = [len(replicas.of_rank(rank)) for rank in range(reducer.group.size)]
    local_row_counts = np.array([gradient._nnz() for gradient in coalesced], np.int64)
    n_counts = [n * n_slots for n in n_replicas]
    row_counts = reducer.gather(local_row_counts, n_counts, "rows of sparse gradients")
    counts_of_replicas = row_counts.reshape(-1, n_slots)
    sizes_of_rows = list(map(row_bytes, slots))
    bytes_of_replicas = (counts_of_replicas @ sizes_of_rows).tolist()
    bytes_of_ranks: list[int] = []
    start = 0
    for n in n_replicas:
        bytes_of_ranks.append(sum(bytes_of_replicas[start : start + n]))
        start += n
    packed = np.concatenate(list(map(_pack, coalesced)))
    joined = reducer.gather(packed, bytes_of_ranks, "sparse gradients")
    by_replica = list(_unpack(slots, counts_of_replicas, joined))
    return [list(gradients) for gradients in zip(*by_replica, strict=True)]


def row_bytes(slot: SparseSlot) -> int:
    """Return the bytes of a row with its number."""
    return _INDEX_BYTES + slot.shape[1:].numel() * slot.sum_dtype.itemsize


def _pack(gradient: Tensor) -> Bytes:
    """Return the bytes of the numbers of rows, then of the rows."""
    numbers = gradient.indices().numpy()
    rows = gradient.values().contiguous().numpy()
    number_bytes = numbers.reshape(-1).view(np.uint8)
    value_bytes = rows.reshape(-1).view(np.uint8)
    return np.concatenate([number_bytes, value_bytes])


def _unpack(
    slots: Sequence[SparseSlot],
    n_rows: npt.NDArray[np.int64],
    joined: Bytes,
) -> Iterator[list[Tensor]]:
    """Yield the gradients of each replica, one for each slot, from the bytes that the replicas have packed."""
    memory = torch.from_numpy(joined)
    start = 0
    for row_counts in n_rows.tolist():
        gradients: list[Tensor] = []
        for slot, n in zip(slots, row_counts, strict=True):
            middle = start + n * _INDEX_BYTES
            stop = start + n * row_bytes(slot)
            # copied: views of another dtype must begin at a multiple of its size
            numbers = memory[start:middle].clone().view(torch.int64)
            values = memory[middle:stop].clone().view(slot.sum_dtype)
            rows = values.view(n, *slot.shape[1:])
            gradients.append(slot.of_rows(numbers, rows))
            start = stop
        yield gradients
