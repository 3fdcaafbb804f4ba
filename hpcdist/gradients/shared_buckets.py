"""Buckets in memory that the ranks of a host share, where a rank reads the gradients of all ranks.

Gradients are copied there once, right from autograd. Small gradients lie side by side; a large one stays where torch
made it, and travels through memory smaller than the cache. A bucket is summed whole, for each rank, or by shares: each
rank adds and keeps its own share, half of an all-reduce; see `zero_redundancy.py`.
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
from hpcdist.runtime.node_window import NodeWindow

Array = npt.NDArray[Any]
#: One array of each rank of the host, by local rank.
Rows = list[Array]
_ALIGNMENT_BYTES = 64


@dataclass
class _Memory:
    """The memory of one bucket in one of the two sets.

    Attributes:
        rows: memory of the bucket on each rank of the host; empty for a gradient that stays where torch made it.
        bucket: the bucket of this rank, with the gradients in it.
    """

    rows: Rows
    bucket: Bucket


class SharedBuckets(Buckets):
    """Buckets in shared memory; all are summed at the end of a backward.

    Two sets of memory are used in turn. A rank writes a set again two sums later. In between lies the barrier of
    another sum, which the other ranks enter only after they have read the set.

    Collective over the reducer's group.

    Args:
        slots: slots of the gradients, in the order of the model.
        n_counts: number of float32 numbers that are summed with the gradients, whole, on all ranks.
        reducer: reducer of the group, whose ranks hold one replica each.
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
        entries = [Entry(n_counts, "float32")]
        for slot in slots:
            entries.append(entry_of(slot, device))
        self._plan = plan_buckets(entries, limits)
        self._sets = self._make_sets(slots)
        self._written = 0
        self.is_started = False

    def _make_sets(self, slots: Sequence[DenseSlot]) -> list[list[_Memory]]:
        """Return both sets of memory, with the gradients' parts. Collective over the ranks of the host."""
        set_bytes = sum(map(_padded_bytes, self._plan.buckets))
        window = NodeWindow(self._group.node_comm, 2 * set_bytes, self._group.world)
        first_set = self._make_set(slots, window.pieces, 0)
        second_set = self._make_set(slots, window.pieces, set_bytes)
        return [first_set, second_set]

    def _make_set(
        self,
        slots: Sequence[DenseSlot],
        pieces: Sequence[memoryview],
        start: int,
    ) -> list[_Memory]:
        """Return the memory of all buckets, side by side from a byte on, with the gradients' parts."""
        memories: list[_Memory] = []
        for shape in self._plan.buckets:
            rows = _cut_rows(pieces, start, shape)
            flat = torch.from_numpy(rows[self._rank]) if rows else None
            memories.append(_Memory(rows, Bucket(flat)))
            start += _padded_bytes(shape)
        for number, (slot, place) in enumerate(zip(slots, self._plan.slots[1:], strict=True)):
            bucket = memories[place.bucket].bucket
            view: Tensor | None = None
            if bucket.flat is not None:
                view = slot.shaped(_cut(bucket.flat, place))
            bucket.add(Part(number, slot, view))
        return memories

    @property
    def _summed(self) -> int:
        """Number of the set that was summed last."""
        return 1 - self._written

    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take the gradients that this replica adds to the sums; see `Bucket.fill`."""
        for memory in self._sets[self._written]:
            memory.bucket.fill(gradients, scale)

    def reset(self) -> None:
        """Expect a new backward."""
        self.is_started = False

    def finish(
        self,
        counts: Sequence[float],
        divisor_of: DivisorOf,
    ) -> list[float]:
        """Sum all buckets over the ranks of the host, or shares over all hosts; see `Buckets.finish`."""
        self.is_started = True
        memories = self._sets[self._written]
        self._written = 1 - self._written
        place = self._plan.slots[0]
        start = place.offset
        stop = start + self._n_counts
        count_rows = [row[start:stop] for row in memories[place.bucket].rows]
        local_counts = count_rows[self._rank]
        local_counts[:] = counts
        with self._group.recorded("gradients", self._recorded):
            require_same(local_counts, SUM, self._group)
            totals = self._sum_counts(count_rows)
            divisor = divisor_of(totals)
            for number, memory in enumerate(memories):
                self._sum(number, memory, divisor)
            self._end_sums()
        self.is_started = False
        return totals

    def _sum_counts(self, rows: Rows) -> list[float]:
        """Return the sums of the counts of all ranks."""
        totals = sum(rows[1:], rows[0].copy())
        if len(self._group.placement.hosts) > 1:
            totals = rows[self._rank].copy()
            library.all_reduce(totals, self._group)
        numbers: list[float] = totals.tolist()
        return numbers

    @property
    @abstractmethod
    def _recorded(self) -> Array | None:
        """An array of the dtype and length that the journal records for a sum."""

    @abstractmethod
    def _sum(
        self,
        number: int,
        memory: _Memory,
        divisor: float | None,
    ) -> None:
        """Sum a bucket and divide its sum. Collective over the ranks of the host."""

    def _end_sums(self) -> None:
        """End all sums of a backward. Collective over the ranks of the host."""


class WholeSums(SharedBuckets):
    """Sums on one host that each rank has whole, in private memory. Arguments are those of `SharedBuckets`.

    Each of two ranks adds everything, with one barrier. Of more ranks each adds a part, and copies the other parts.
    """

    def __init__(
        self,
        slots: Sequence[DenseSlot],
        n_counts: int,
        reducer: Reducer,
    ) -> None:
        total_bytes = sum(entry_of(slot, reducer.device).nbytes for slot in slots)
        limits = reducer.begin_buckets(total_bytes)
        # the counts alone in their bucket
        super().__init__(slots, n_counts, reducer, replace(limits, last_bytes=1))
        self._route = reducer.route
        self._additions = plan_row_additions(self._group.size)
        counts_bucket = self._plan.slots[0].bucket
        self._totals: list[Array] = []
        for number, shape in enumerate(self._plan.buckets):
            has_total = not shape.is_direct and number != counts_bucket
            n_elements = shape.n_elements if has_total else 0
            self._totals.append(np.zeros(n_elements, shape.dtype))
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

    def _sum(
        self,
        number: int,
        memory: _Memory,
        divisor: float | None,
    ) -> None:
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
    """Sums of which each rank has its share, in the slots; between hosts they are made in lanes.

    Args:
        slots: slots of the gradients, in the order of the model.
        n_counts: number of float32 numbers that are summed with the gradients, whole, on all ranks.
        reducer: reducer of the group, whose ranks hold one replica each.
    """

    def __init__(
        self,
        slots: Sequence[ShardedSlot],
        n_counts: int,
        reducer: Reducer,
    ) -> None:
        dense_slots = [slot.whole for slot in slots]
        limits = Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        super().__init__(dense_slots, n_counts, reducer, limits)
        self._slots = slots
        self._sums: SliceSums = self._group.keep("slices", lambda: SliceSums(self._group))
        bucket_numbers = range(len(self._plan.buckets))
        for number in bucket_numbers:
            self._share_bucket(number)
        #: For both sets and each bucket, the regions that this rank owns.
        self._parts: list[list[list[Rows]]] = []
        for set_number in (0, 1):
            parts = [self._owned_rows(set_number, number) for number in bucket_numbers]
            self._parts.append(parts)

    @property
    def _recorded(self) -> None:
        return None

    def _share_bucket(self, number: int) -> None:
        """Cut a bucket into shares, and give its slots their parts."""
        places = self._plan.slots[1:]
        members = [index for index, place in enumerate(places) if place.bucket == number]
        members.sort(key=lambda index: places[index].offset)
        # slots of earlier plans keep their ranges
        new_members = [index for index in members if not self._slots[index].ranges]
        sizes = [places[index].n_elements for index in new_members]
        shares = plan_shards(sizes, self._sums.n_owners)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for tensor_number, index in enumerate(new_members):
            ranges[index] = [share.get(tensor_number, (0, 0)) for share in shares]
        for index in members:
            slot = self._slots[index]
            parts: list[Tensor] = []
            for memories in self._sets:
                flat = memories[number].bucket.flat
                if flat is not None:
                    parts.append(_cut(flat, places[index]))
            slot_ranges = ranges.get(index, slot.ranges)
            slot.assign(number, parts, slot_ranges, self._rank)

    def _owned_rows(self, set_number: int, number: int) -> list[Rows]:
        """Return, for each region of a bucket that this rank owns, the region in every rank's row."""
        memory = self._sets[set_number][number]
        rows = memory.rows
        dtype = np.dtype(self._plan.buckets[number].dtype)
        padding = _ALIGNMENT_BYTES // dtype.itemsize
        places = self._plan.slots[1:]
        parts = sorted(memory.bucket.parts, key=lambda part: places[part.number].offset)
        regions: list[tuple[int, int]] = []
        for part in parts:
            start, stop = self._slots[part.number].owned_range
            offset = places[part.number].offset
            if rows and start < stop:
                regions = _joined(regions, offset + start, offset + stop, padding)
        owned_rows: list[Rows] = []
        for start, stop in regions:
            owned_rows.append([row[start:stop] for row in rows])
        return owned_rows

    def _sum(
        self,
        number: int,
        memory: _Memory,
        divisor: float | None,
    ) -> None:
        for rows in self._parts[self._summed][number]:
            self._sums.sum_rows(rows)
            local_row = rows[self._rank]
            self._sums.sum_over_hosts(local_row)
            if divisor is not None:
                divide(local_row, divisor)
        if memory.rows:
            return
        part = memory.bucket.parts[0]
        slot = self._slots[part.number]
        flat = part.slot.flat
        assert flat is not None, "a direct gradient is taken before it is summed"
        self._sums.reduce(flat.numpy(), slot.ranges)
        owned_share = slot.owned_part(flat).numpy()
        self._sums.sum_over_hosts(owned_share)
        if divisor is not None:
            divide(owned_share, divisor)

    def _end_sums(self) -> None:
        for slot in self._slots:
            slot.turn(self._summed)


def _padded_bytes(shape: BucketShape) -> int:
    """Return the bytes of a bucket in shared memory; 0 for a gradient that stays where torch made it."""
    if shape.is_direct:
        return 0
    nbytes = shape.n_elements * np.dtype(shape.dtype).itemsize
    n_lines = -(-nbytes // _ALIGNMENT_BYTES)
    return n_lines * _ALIGNMENT_BYTES


def _cut_rows(
    pieces: Sequence[memoryview],
    start: int,
    shape: BucketShape,
) -> Rows:
    """Return the memory of a bucket in the piece of each rank; none for a gradient that stays where torch made it."""
    if shape.is_direct:
        return []
    stop = start + _padded_bytes(shape)
    return [np.frombuffer(piece[start:stop], shape.dtype)[: shape.n_elements] for piece in pieces]


def _cut(flat: Tensor, place: Slot) -> Tensor:
    stop = place.offset + place.n_elements
    return flat[place.offset : stop]


def _joined(
    regions: list[tuple[int, int]],
    start: int,
    stop: int,
    padding: int,
) -> list[tuple[int, int]]:
    """Return regions and one more, which is joined to the last one if less than `padding` elements lie in between."""
    if not regions:
        return [(start, stop)]
    *earlier_regions, (last_start, last_stop) = regions
    if start - last_stop < padding:
        return [*earlier_regions, (last_start, stop)]
    return [*regions, (start, stop)]
