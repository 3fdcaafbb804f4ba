"""Buckets in memory that the ranks of a host share, where a rank reads the gradients of all ranks.

Gradients are copied there once, right from autograd. Small ones lie side by side; a large one stays where torch made
it, and goes through memory smaller than the cache. A bucket is summed whole, for each rank, or by shares: each rank
adds and keeps its own, half of an all-reduce; see `zero_redundancy.py`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.collectives import algorithms, library
from hpcdist.collectives.ops import SUM, divide
from hpcdist.collectives.shared_memory import require_same
from hpcdist.collectives.slices import SliceSums
from hpcdist.collectives.staging import add_rows_into
from hpcdist.gradients.buckets import Bucket, Buckets, DivisorOf, Part, entry_of
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.reducer import DIRECT_BYTES, LOCAL_BUCKET_BYTES, Reducer
from hpcdist.gradients.sharded import ShardedSlot
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.buckets import BucketShape, Entry, Limits, Slot, plan_buckets
from hpcdist.plan.replicas import plan_row_additions
from hpcdist.plan.shards import plan_shards
from hpcdist.runtime.node_memory import NodeWindow

Array = npt.NDArray[Any]
_ALIGNMENT_BYTES = 64


@dataclass
class _Memory:
    """The memory of one bucket in one of the two sets.

    Attributes:
        rows: that of each rank of the host; empty for a gradient that stays where torch made it.
        bucket: this rank's, with the gradients in it.
    """

    rows: list[Array]
    bucket: Bucket


class SharedBuckets(Buckets):
    """Buckets in shared memory; all are summed at the end of a backward.

    Two sets of memory are used in turn. A rank writes a set again two sums later; between lies the barrier of another
    sum, which the others enter only after they have read the set.

    Collective over the reducer's group.

    Args:
        slots: the gradients, in the order of the model.
        n_counts: float32 numbers that are summed along, whole, on all ranks.
        reducer: the group, whose ranks hold one replica each.
        limits: sizes of buckets.

    Attributes:
        is_started: whether sums have begun that have not ended.
    """

    def __init__(
        self,
        slots: Sequence[DenseSlot],
        n_counts: int,
        reducer: Reducer,
        limits: Limits,
    ) -> None:
        self._group = reducer.group
        self._rank = self._group.node_comm.rank
        self._n_counts = n_counts
        device = torch.device("cpu")
        entries = [Entry(n_counts, "float32"), *(entry_of(slot, device) for slot in slots)]
        self._plan = plan_buckets(entries, limits)
        self._sets = self._make_sets(slots)
        self._written = 0
        self.is_started = False

    def _make_sets(self, slots: Sequence[DenseSlot]) -> list[list[_Memory]]:
        """Return both sets of memory, with the gradients' parts."""
        sizes = [_padded_bytes(shape) for shape in self._plan.buckets]
        window = NodeWindow(self._group.node_comm, 2 * sum(sizes), self._group.world)
        sets: list[list[_Memory]] = []
        for start in (0, sum(sizes)):
            memories: list[_Memory] = []
            for shape, nbytes in zip(self._plan.buckets, sizes, strict=True):
                rows = _cut_rows(window.pieces, start, shape)
                memories.append(
                    _Memory(rows, Bucket(torch.from_numpy(rows[self._rank]) if rows else None))
                )
                start += nbytes
            for number, (slot, place) in enumerate(zip(slots, self._plan.slots[1:], strict=True)):
                bucket = memories[place.bucket].bucket
                view = None if bucket.flat is None else slot.shaped(_cut(bucket.flat, place))
                bucket.add(Part(number, slot, view))
            sets.append(memories)
        return sets

    @property
    def _summed(self) -> int:
        """Number of the set that was summed last."""
        return 1 - self._written

    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take what this replica adds to the sums; see `Bucket.fill`."""
        for memory in self._sets[self._written]:
            memory.bucket.fill(gradients, scale)

    def reset(self) -> None:
        """Expect a new backward."""
        self.is_started = False

    def finish(self, counts: Sequence[float], divisor_of: DivisorOf) -> list[float]:
        """Sum all buckets, by the ranks of the host or, shares, of all hosts; see `Buckets.finish`."""
        self.is_started = True
        memories = self._sets[self._written]
        self._written = 1 - self._written
        place = self._plan.slots[0]
        rows = [
            row[place.offset : place.offset + self._n_counts] for row in memories[place.bucket].rows
        ]
        rows[self._rank][:] = counts
        with self._group.recorded("gradients", self._recorded):
            require_same(rows[self._rank], SUM, self._group)
            totals = self._sum_counts(rows)
            divisor = divisor_of(totals)
            for number, memory in enumerate(memories):
                self._sum(number, memory, divisor)
            self._end_sums()
        self.is_started = False
        return totals

    def _sum_counts(self, rows: list[Array]) -> list[float]:
        totals = sum(rows[1:], rows[0].copy())
        if len(self._group.placement.hosts) > 1:
            totals = rows[self._rank].copy()
            library.all_reduce(totals, self._group)
        numbers: list[float] = totals.tolist()
        return numbers

    @property
    @abstractmethod
    def _recorded(self) -> Array | None:
        """What the journal says of a sum: an array of the dtype and length of what is summed."""

    @abstractmethod
    def _sum(self, number: int, memory: _Memory, divisor: float | None) -> None:
        """Sum a bucket and divide its sum. Collective over the ranks of the host."""

    def _end_sums(self) -> None:
        """End all sums of a backward. Collective over the ranks of the host."""


class WholeSums(SharedBuckets):
    """Sums on one host that each rank has whole, in memory of its own. Arguments are those of `SharedBuckets`.

    Two ranks add everything themselves: one barrier. More add a part each, and copy those of the others.
    """

    def __init__(self, slots: Sequence[DenseSlot], n_counts: int, reducer: Reducer) -> None:
        limits = reducer.begin_buckets(sum(entry_of(slot, reducer.device).nbytes for slot in slots))
        # the counts alone in their bucket
        super().__init__(slots, n_counts, reducer, replace(limits, last_bytes=1))
        self._route = reducer.route
        self._additions = plan_row_additions(self._group.size)
        self._totals = [np.zeros(shape.n_elements, shape.dtype) for shape in self._plan.buckets]
        for number, shape in enumerate(self._plan.buckets):
            if shape.is_direct or number == self._plan.slots[0].bucket:
                self._totals[number] = np.zeros(0, shape.dtype)
        for slot, place in zip(slots, self._plan.slots[1:], strict=True):
            memory = self._sets[0][place.bucket].bucket.flat
            if memory is None:
                slot.assign(place.bucket, None)
            else:
                total = torch.from_numpy(self._totals[place.bucket])
                slot.assign(place.bucket, _cut(memory, place), _cut(total, place))
        self._largest = max(self._totals, key=len)

    @property
    def _recorded(self) -> Array:
        return self._largest

    def _sum(self, number: int, memory: _Memory, divisor: float | None) -> None:
        rows = memory.rows
        total = self._totals[number]
        if not rows:
            flat = memory.bucket.parts[0].slot.flat
            assert flat is not None, "a direct gradient is taken before it is summed"
            algorithms.run(self._route, flat.numpy(), self._group, SUM, divisor=divisor)
        elif len(rows) == 2 and total.size:
            add_rows_into(total, rows, self._additions, divisor)
        elif total.size:
            start, stop = block_bounds(total.size, len(rows), self._rank)
            part = [row[start:stop] for row in rows]
            add_rows_into(part[0], part, self._additions, divisor)

    def _end_sums(self) -> None:
        if self._group.size == 2:
            return
        self._group.barrier.wait()
        for total, memory in zip(self._totals, self._sets[self._summed], strict=True):
            if total.size:
                total[:] = memory.rows[0]


class ShareSums(SharedBuckets):
    """Sums of which each rank has its share, in the slots; between hosts in lanes.

    Args:
        slots: the gradients, in the order of the model.
        n_counts: float32 numbers that are summed along, whole, on all ranks.
        reducer: the group, whose ranks hold one replica each.
    """

    def __init__(self, slots: Sequence[ShardedSlot], n_counts: int, reducer: Reducer) -> None:
        dense = [slot.whole for slot in slots]
        limits = Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        super().__init__(dense, n_counts, reducer, limits)
        self._slots = slots
        self._sums: SliceSums = self._group.keep("slices", lambda: SliceSums(self._group))
        self._parts: list[list[list[list[Array]]]] = []
        for number in range(len(self._plan.buckets)):
            self._share_bucket(number)
        for which in (0, 1):
            self._parts.append(
                [self._owned_rows(which, number) for number in range(len(self._plan.buckets))]
            )

    @property
    def _recorded(self) -> None:
        return None

    def _share_bucket(self, number: int) -> None:
        """Cut a bucket into shares, and give its slots their parts."""
        places = self._plan.slots[1:]
        members = [index for index in range(len(places)) if places[index].bucket == number]
        members.sort(key=lambda index: places[index].offset)
        # others keep what they own
        new = [index for index in members if not self._slots[index].ranges]
        shares = plan_shards([places[index].n_elements for index in new], self._sums.n_owners)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for tensor_number, index in enumerate(new):
            ranges[index] = [share.get(tensor_number, (0, 0)) for share in shares]
        for index in members:
            slot = self._slots[index]
            flats = [memories[number].bucket.flat for memories in self._sets]
            parts = [_cut(flat, places[index]) for flat in flats if flat is not None]
            slot.assign(number, parts, ranges.get(index, slot.ranges), self._rank)

    def _owned_rows(self, which: int, number: int) -> list[list[Array]]:
        """Return, for each region of a bucket that this rank owns, the region in every rank's row."""
        rows = self._sets[which][number].rows
        padding = _ALIGNMENT_BYTES // np.dtype(self._plan.buckets[number].dtype).itemsize
        places = self._plan.slots[1:]
        regions: list[tuple[int, int]] = []
        for part in sorted(
            self._sets[which][number].bucket.parts, key=lambda part: places[part.number].offset
        ):
            start, stop = self._slots[part.number].owned_range
            offset = places[part.number].offset
            if rows and start < stop:
                regions = _joined(regions, offset + start, offset + stop, padding)
        owned: list[list[Array]] = []
        for start, stop in regions:
            owned.append([row[start:stop] for row in rows])
        return owned

    def _sum(self, number: int, memory: _Memory, divisor: float | None) -> None:
        for rows in self._parts[self._summed][number]:
            self._sums.sum_rows(rows)
            self._sums.sum_over_hosts(rows[self._rank])
            if divisor is not None:
                divide(rows[self._rank], divisor)
        if memory.rows:
            return
        part = memory.bucket.parts[0]
        slot = self._slots[part.number]
        flat = part.slot.flat
        assert flat is not None, "a direct gradient is taken before it is summed"
        self._sums.reduce(flat.numpy(), slot.ranges)
        owned = slot.owned_part(flat).numpy()
        self._sums.sum_over_hosts(owned)
        if divisor is not None:
            divide(owned, divisor)

    def _end_sums(self) -> None:
        for slot in self._slots:
            slot.turn(self._summed)


def _padded_bytes(shape: BucketShape) -> int:
    """Return the bytes of a bucket in shared memory; 0 for a gradient that stays where torch made it."""
    if shape.is_direct:
        return 0
    return (
        -(-shape.n_elements * np.dtype(shape.dtype).itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    )


def _cut_rows(pieces: Sequence[memoryview], start: int, shape: BucketShape) -> list[Array]:
    """Return the memory of a bucket in the piece of each rank; nothing for a gradient that stays where it is."""
    if shape.is_direct:
        return []
    stop = start + _padded_bytes(shape)
    return [np.frombuffer(piece[start:stop], shape.dtype)[: shape.n_elements] for piece in pieces]


def _cut(flat: Tensor, place: Slot) -> Tensor:
    return flat[place.offset : place.offset + place.n_elements]


def _joined(
    regions: list[tuple[int, int]],
    start: int,
    stop: int,
    padding: int,
) -> list[tuple[int, int]]:
    """Return regions with one more, joined to the last one if only padding, of fewer elements, lies between."""
    if regions and start - regions[-1][1] < padding:
        return [*regions[:-1], (regions[-1][0], stop)]
    return [*regions, (start, stop)]
