"""Sums over the replicas of this rank, by subtrees of the tree over all replicas. They are then summed over ranks."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.collectives import subtree_sums
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import combine
from hpcdist.collectives.staging import add_rows
from hpcdist.gradients.buckets import DivisorOf, PrivateBuckets
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.replicas import Subtree, is_joint, plan_row_additions
from hpcdist.runtime.handle import Handle

Array = npt.NDArray[Any]


class SubtreeSums:
    """Flat tensors of one bucket, one from each local replica, in the order of replicas.

    At most one tensor of every subtree size is kept, so for k local replicas about log2(k) + 1.

    Args:
        n_replicas: number of replicas of the job.
    """

    def __init__(self, n_replicas: int) -> None:
        self._n_replicas = n_replicas
        self._subtrees: list[Subtree] = []
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, replica: int, tensor: Tensor, is_kept: bool) -> None:
        """Add a replica's tensor.

        Args:
            replica: number of the replica, one more than the number of the last one.
            tensor: flat tensor of the replica.
            is_kept: whether the tensor itself may be kept and overwritten; otherwise a copy is kept.
        """
        stop = replica + 1
        if self._subtrees and is_joint(self._subtrees[-1], (replica, stop), self._n_replicas):
            start, _ = self._subtrees[-1]
            self._sums[-1].add_(tensor)
            self._subtrees[-1] = (start, stop)
        else:
            self._subtrees.append((replica, stop))
            self._sums.append(tensor if is_kept else tensor.clone())
        while len(self._subtrees) > 1:
            first_half, second_half = self._subtrees[-2:]
            if not is_joint(first_half, second_half, self._n_replicas):
                break
            second_sum = self._sums.pop()
            self._subtrees.pop()
            self._sums[-1].add_(second_sum)
            self._subtrees[-1] = (first_half[0], second_half[1])

    def take(self) -> list[Tensor]:
        """Return the sums, one for each subtree, and forget them."""
        sums = self._sums
        self._sums = []
        self._subtrees = []
        return sums


class LocalSums:
    """Sums of the gradients that this rank's replicas contribute to each bucket in one backward.

    Args:
        buckets: buckets of the plan.
        reducer: sums over the ranks.
    """

    def __init__(self, buckets: PrivateBuckets, reducer: Reducer) -> None:
        self._buckets = buckets
        self._reducer = reducer
        n_replicas = reducer.replicas.n_replicas
        self._sums = [SubtreeSums(n_replicas) for _ in range(buckets.n_buckets)]

    def add(self, replica: int, counts: list[float]) -> None:
        """Add the gradients of one replica, which are in the slots, and its counts.

        Slots without a gradient must have zeros.
        """
        buckets = self._buckets
        buckets.set_counts(counts)
        for bucket, sums in enumerate(self._sums):
            sums.add(replica, buckets.tensor(bucket), is_kept=buckets.is_direct(bucket))

    def drop(self) -> None:
        """Forget the gradients that replicas have added before an error stopped them."""
        for sums in self._sums:
            sums.take()

    def finish(self, divisor_of: DivisorOf) -> list[float]:
        """Sum the local sums over all ranks, and divide the totals; return the sums of the counts.

        Collective over the reducer's group. Afterwards the totals are in the slots.
        """
        buckets = self._buckets
        if not buckets.is_counted_first:
            handles = [self._start(bucket) for bucket in range(buckets.n_buckets)]
            totals = buckets.wait(handles)
            buckets.divide(divisor_of(totals))
            return totals
        counts_handle = self._start(buckets.counts_bucket)
        totals = buckets.wait([counts_handle])
        divisor = divisor_of(totals)
        handles = [self._start(bucket, divisor) for bucket in range(buckets.counts_bucket)]
        buckets.wait(handles)
        return totals

    def _start(
        self,
        bucket: int,
        divisor: float | None = None,
    ) -> Handle | None:
        """Start to sum a bucket over all ranks; return a handle, or None where the sum is ready."""
        sums = [tensor.numpy() for tensor in self._sums[bucket].take()]
        result = self._buckets.begin(bucket)
        has_counts = bucket == self._buckets.counts_bucket
        if self._reducer.route.by_subtrees:
            return _start_by_subtrees(self._reducer, sums, result, "gradients", divisor)
        _add_up(sums, result)
        return self._reducer.start(result, bucket, has_counts, divisor=divisor)


def sum_rows(reducer: Reducer, rows: list[Array], title: str) -> Array:
    """Return the sum of one flat host array of each local replica over all replicas.

    Collective over the reducer's group. Blocking. In the order of replicas where gradients are.

    Args:
        reducer: sums over the ranks.
        rows: arrays of any dtype that numpy adds; overwritten.
        title: name of the sum in reports.
    """
    first_replica = reducer.own_replicas[0]
    sums: list[Array] = []
    for start, stop in reducer.own_subtrees:
        subtree_rows = rows[start - first_replica : stop - first_replica]
        # a subtree of n replicas is the tree over n rows
        additions = plan_row_additions(len(subtree_rows))
        add_rows(subtree_rows, additions, np.add)
        sums.append(subtree_rows[0])
    result = sums[0]
    if reducer.route.by_subtrees:

        def reduce(group: Group) -> None:
            subtree_sums.all_reduce(sums, result, group, reducer.replicas)

        reducer.call(reduce, result, title)
    else:
        _add_up(sums, result)
        reducer.sum_array(result, title)
    return result


def _start_by_subtrees(
    reducer: Reducer,
    sums: list[Array],
    result: Array,
    title: str,
    divisor: float | None,
) -> Handle | None:
    """Start to put the sum of all ranks' `sums`, one for each subtree, into `result`. Collective over the group."""
    replicas = reducer.replicas

    def reduce(group: Group) -> None:
        subtree_sums.all_reduce(sums, result, group, replicas, divisor)

    return reducer.submit(reduce, result, title)


def _add_up(sums: list[Array], result: Array) -> None:
    """Put the sum of this rank's arrays into `result`, in their order."""
    total = sums[0]
    for array in sums[1:]:
        combine(np.add, total, array, total)
    if result is not total:
        np.copyto(result, total)
