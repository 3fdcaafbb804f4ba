"""Buckets of which each rank of a host sums its own share only; see `gradients/zero_redundancy.py`.

Small gradients lie side by side in memory that the ranks of a host share, where the owner of a share reads those of all
ranks. A large one stays where torch made it, and goes through memory smaller than the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcdist.collectives import library
from hpcdist.collectives.ops import divide
from hpcdist.collectives.slices import SliceSums
from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import DIRECT_BYTES, LOCAL_BUCKET_BYTES, Reducer
from hpcdist.gradients.sharded_gradient import ShardedRecord
from hpcdist.plan.buckets import BucketPlan, Entry, Limits, plan_buckets
from hpcdist.plan.shards import plan_shards
from hpcdist.runtime.node_memory import NodeWindow

_ALIGNMENT = 64


class ShardedBuckets:
    """The buckets of one plan; all are summed at the end of a backward.

    Two sets of slots are used in turn. A rank writes a slot again two sums later; between lies the barrier of another
    sum, which the others enter only after they have read the slot.

    Collective: the reducer's group.

    Args:
        records: the parameters, in the order of the model, and the records of their gradients.
        n_counts: float32 numbers that are summed along, whole, on all ranks.
        reducer: whose ranks hold one replica each.

    Attributes:
        is_started: whether sums have begun that have not ended.
    """

    def __init__(self, records: Sequence[tuple[ShardedRecord, nn.Parameter]], n_counts: int, reducer: Reducer) -> None:
        self._group = reducer.group
        self._sums: SliceSums = self._group.keep("slices", lambda: SliceSums(self._group))
        entries = [Entry(one.numel(), SUM_DTYPES[dtype_name(one)], _is_direct(one)) for _, one in records]
        plan = plan_buckets([Entry(n_counts, "float32"), *entries], Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES))
        self._flats = self._make_flats(plan)
        self._n_counts, self._counts_slot = n_counts, plan.slots[0]
        self._rows: list[list[list[Any]]] = [[], []]  # of each set: of each bucket, own share in every rank's row
        self._records = [record for record, _ in records]
        self._direct: list[ShardedRecord] = []
        for number in range(len(plan.buckets)):
            self._share_bucket(number, plan, records)
        self._number = 0
        self.is_started = False

    def _make_flats(self, plan: BucketPlan) -> list[list[list[Any]]]:
        """Return the arrays of each set, bucket and local rank, in shared memory; none for a direct bucket."""
        sizes = [
            0 if one.is_direct else -(-one.n_elements * np.dtype(one.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
            for one in plan.buckets
        ]
        pieces = NodeWindow(self._group.node_comm, 2 * sum(sizes), self._group.world).pieces
        flats: list[list[list[Any]]] = [[], []]
        for which, start in ((0, 0), (1, sum(sizes))):
            for bucket, nbytes in zip(plan.buckets, sizes, strict=True):
                parts = [] if bucket.is_direct else [piece[start : start + nbytes] for piece in pieces]
                flats[which].append([np.frombuffer(part, bucket.dtype)[: bucket.n_elements] for part in parts])
                start += nbytes
        return flats

    def _share_bucket(self, number: int, plan: BucketPlan, records: Sequence[tuple[ShardedRecord, Any]]) -> None:
        """Cut a bucket into shares, and give its records their slots."""
        slots, owner = plan.slots[1:], self._sums.local_rank
        members = sorted((slots[index].offset, index) for index in range(len(slots)) if slots[index].bucket == number)
        new = [index for _, index in members if not records[index][0].bounds]  # others keep what they own
        shares = plan_shards([slots[index].n_elements for index in new], self._sums.n_owners)
        bounds = {index: [share.get(at, (0, 0)) for share in shares] for at, index in enumerate(new)}
        regions: list[tuple[int, int]] = []
        for offset, index in members:
            record, parameter = records[index]
            flats = [] if plan.buckets[number].is_direct else [flat[number][owner] for flat in self._flats]
            views = [torch.from_numpy(flat[offset : offset + slots[index].n_elements]) for flat in flats]
            record.assign_share(number, views, bounds.get(index, record.bounds), owner, parameter)
            if not flats:
                self._direct.append(record)
            elif record.own[0] < record.own[1]:
                padding = _ALIGNMENT // np.dtype(plan.buckets[number].dtype).itemsize
                regions = _joined(regions, offset + record.own[0], offset + record.own[1], padding)
        for which in (0, 1):
            for start, stop in regions:
                self._rows[which].append([flat[start:stop] for flat in self._flats[which][number]])

    def reset(self) -> None:
        """Expect a new backward."""
        self.is_started = False

    def count_arrival(self, record: ParameterRecord) -> None:
        """Do nothing: all sums are made at the end."""

    def finish(self, counts: list[float], divisor_of: Callable[[list[float]], float | None]) -> list[float]:
        """Leave this rank's shares of all sums, divided, in its slots, and return the sums of `counts`.

        Collective: the reducer's group. Every record without a gradient must stand in. Arguments are those of
        `BucketSet.finish`.
        """
        self.is_started = True
        which = self._number % 2
        self._number += 1
        with self._group.recorded("shares of gradients", None):
            start, flats = self._counts_slot.offset, self._flats[which][self._counts_slot.bucket]
            rows = [flat[start : start + self._n_counts] for flat in flats]
            rows[self._sums.local_rank][:] = counts
            self._group.barrier.wait()
            for shares in self._rows[which]:
                self._sums.sum_rows(shares)
                self._sums.sum_over_hosts(shares[self._sums.local_rank])
            for record in self._direct:
                assert record.part is not None, "take and stand_in set it"
                self._sums.reduce(record.part.numpy(), record.bounds)
                self._sums.sum_over_hosts(record.own_of(record.part).numpy())
            totals = sum(rows[1:], rows[0].copy())
            if len(self._group.placement.hosts) > 1:
                totals = rows[self._sums.local_rank].copy()
                library.all_reduce(totals, self._group)
        for record in self._records:
            record.turn()
        self.is_started = False
        found: list[float] = totals.tolist()
        self._divide(which, divisor_of(found))
        return found

    def _divide(self, which: int, divisor: float | None) -> None:
        """Divide this rank's shares in one of the two sets of slots."""
        if divisor is None:
            return
        for shares in self._rows[which]:
            divide(shares[self._sums.local_rank], divisor)
        for record in self._direct:
            assert record.part is not None, "it was summed"
            divide(record.own_of(record.part).numpy(), divisor)


def _joined(regions: list[tuple[int, int]], start: int, stop: int, padding: int) -> list[tuple[int, int]]:
    """Return regions with one more, joined to the last one if only padding, of fewer elements, lies between."""
    if regions and start - regions[-1][1] < padding:
        return [*regions[:-1], (regions[-1][0], stop)]
    return [*regions, (start, stop)]


def _is_direct(parameter: nn.Parameter) -> bool:
    return SUM_DTYPES[dtype_name(parameter)] == dtype_name(parameter)
