"""Sums over the replicas of this rank, as subtrees of the tree over all replicas; these are then summed over ranks."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.collectives import subtree_sums
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
        n_replicas: of the job.
    """

    def __init__(self, n_replicas: int) -> None:
        self._n_replicas = n_replicas
        self._subtrees: list[Subtree] = []
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, replica: int, tensor: Tensor, is_kept: bool) -> None:
        """Add a replica's tensor.

        Args:
            replica: its number, one more than the last one's.
            tensor: flat.
            is_kept: whether it may be kept and overwritten; else it is copied where it is to be kept.
        """
        subtree = (replica, replica + 1)
        if self._subtrees and is_joint(self._subtrees[-1], subtree, self._n_replicas):
            self._sums[-1].add_(tensor)
            self._subtrees[-1] = (self._subtrees[-1][0], subtree[1])
        else:
            self._subtrees.append(subtree)
            self._sums.append(tensor if is_kept else tensor.clone())
        while len(self._subtrees) > 1 and is_joint(
            self._subtrees[-2], self._subtrees[-1], self._n_replicas
        ):
            right = self._sums.pop()
            stop = self._subtrees.pop()[1]
            self._sums[-1].add_(right)
            self._subtrees[-1] = (self._subtrees[-1][0], stop)

    def take(self) -> list[Tensor]:
        """Return the sums, one for each subtree, and forget them."""
        sums = self._sums
        self._sums = []
        self._subtrees = []
        return sums


class LocalSums:
    """Sums of what this rank's replicas contribute to each bucket in one backward.

    Args:
        buckets: of the plan.
        reducer: sums over the ranks.
    """

    def __init__(self, buckets: PrivateBuckets, reducer: Reducer) -> None:
        self._buckets = buckets
        self._reducer = reducer
        self._sums = [SubtreeSums(reducer.replicas.n_replicas) for _ in range(buckets.n_buckets)]

    def add(self, replica: int, counts: list[float]) -> None:
        """Add the gradients of one replica, which are in the slots, and its counts.

        Every record without a gradient must stand in.
        """
        self._buckets.set_counts(counts)
        for bucket, sums in enumerate(self._sums):
            sums.add(replica, self._buckets.tensor(bucket), is_kept=self._buckets.is_direct(bucket))

    def drop(self) -> None:
        """Forget what replicas have added before an error stopped them."""
        for sums in self._sums:
            sums.take()

    def finish(self, divisor_of: DivisorOf) -> list[float]:
        """Sum over all ranks what all local replicas have added, and divide; return the sums of the counts.

        Collective over the reducer's group. The sums are in the slots then.
        """
        buckets = self._buckets
        if not buckets.is_counted_first:
            handles = [self._start(bucket) for bucket in range(buckets.n_buckets)]
            totals = buckets.wait(handles)
            buckets.divide(divisor_of(totals))
            return totals
        totals = buckets.wait([self._start(buckets.counts_bucket)])
        divisor = divisor_of(totals)
        buckets.wait([self._start(bucket, divisor) for bucket in range(buckets.counts_bucket)])
        return totals

    def _start(self, bucket: int, divisor: float | None = None) -> Handle | None:
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
        rows: of any dtype that numpy adds; overwritten.
        title: what reports call it.
    """
    first = reducer.own_replicas[0]
    sums: list[Array] = []
    for start, stop in reducer.own_subtrees:
        part = rows[start - first : stop - first]
        # a subtree of n replicas is the tree over n rows
        add_rows(part, plan_row_additions(len(part)), np.add)
        sums.append(part[0])
    if reducer.route.by_subtrees:
        reducer.call(
            lambda group: subtree_sums.all_reduce(sums, sums[0], group, reducer.replicas),
            sums[0],
            title,
        )
    else:
        _add_up(sums, sums[0])
        reducer.sum_array(sums[0], title)
    return sums[0]


def _start_by_subtrees(
    reducer: Reducer,
    sums: list[Array],
    result: Array,
    title: str,
    divisor: float | None,
) -> Handle | None:
    """Start to put the sum of all ranks' `sums`, one for each subtree, into `result`. Collective over the group."""
    replicas = reducer.replicas
    return reducer.submit(
        lambda group: subtree_sums.all_reduce(sums, result, group, replicas, divisor), result, title
    )


def _add_up(sums: list[Array], result: Array) -> None:
    """Put the sum of this rank's arrays into `result`, in their order."""
    for array in sums[1:]:
        combine(np.add, sums[0], array, sums[0])
    if result is not sums[0]:
        np.copyto(result, sums[0])
