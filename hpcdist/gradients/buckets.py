"""Buckets in memory of this rank: small gradients side by side in flat memory, large gradients where torch made them.

Each bucket is summed by the strategy's route, or by a hook of the program.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.gradients.comm_hook import GradBucket, HookedSum
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.device_staging import ProducerStreams
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.slot import weigh
from hpcdist.plan.buckets import BucketShape, Entry, plan_buckets
from hpcdist.program import tensor_internals

#: Returns the divisor of sums, by the sums of the counts; None if they are not divided.
DivisorOf = Callable[[Sequence[float]], float | None]
CommHook = Callable[[GradBucket], Any]


@dataclass
class Part:
    """The part of a bucket that one gradient is copied to.

    Attributes:
        number: number of the slot among those in buckets.
        slot: the slot.
        view: the memory in the parameter's shape; None where the gradient stays where torch made it.
    """

    number: int
    slot: DenseSlot
    view: Tensor | None


class Bucket:
    """One bucket of a plan.

    Args:
        flat: memory of the bucket; None where the gradient stays where torch made it.

    Attributes:
        flat: memory of the bucket.
        parts: parts of the gradients in the bucket.
    """

    def __init__(self, flat: Tensor | None) -> None:
        self.flat = flat
        self.parts: list[Part] = []
        self._numbers: list[int] = []
        self._views: list[Tensor] = []
        # whether the memory has another dtype than a parameter: then gradients are checked before they are copied;
        # without it a converted parameter refuses its gradient when the sum is published
        self._has_converted = False

    def add(self, part: Part) -> None:
        """Add the part of one more gradient."""
        self.parts.append(part)
        self._numbers.append(part.number)
        if part.view is not None:
            self._views.append(part.view)
            if part.slot.dtype is not part.view.dtype:
                self._has_converted = True

    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take the gradients that this replica adds to the sum.

        Args:
            gradients: gradients of all slots in buckets; None for zeros.
            scale: weight of the replica.
        """
        if self.flat is None or self._has_converted:
            self.require_kinds(gradients)
        if self.flat is None:
            for part in self.parts:
                part.slot.take(gradients[part.number], scale)
            return
        values = [gradients[number] for number in self._numbers]
        views = self._views
        present_values = [value for value in values if value is not None]
        if len(present_values) < len(values):
            self.flat.zero_()
            views = [view for view, value in zip(views, values, strict=True) if value is not None]
        try:
            tensor_internals.copy_all(views, present_values)
        except RuntimeError:
            self.require_kinds(gradients)
            raise
        weigh(self.flat, scale)

    def require_kinds(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise GradientError for a gradient that its slot cannot take; on this rank only."""
        for part in self.parts:
            gradient = gradients[part.number]
            if gradient is not None:
                part.slot.require_kind(gradient)


class Buckets(ABC):
    """The buckets of one plan.

    Attributes:
        is_started: whether sums have begun that have not ended.
    """

    is_started: bool

    @abstractmethod
    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take the gradients that this replica adds to the sums; see `Bucket.fill`."""

    @abstractmethod
    def finish(
        self,
        counts: Sequence[float],
        divisor_of: DivisorOf,
    ) -> list[float]:
        """Sum all buckets over all replicas, and divide the sums; return the sums of `counts`.

        Collective over the reducer's group.

        Args:
            counts: counts of this replica.
            divisor_of: function that returns the divisor of the sums.
        """

    @abstractmethod
    def reset(self) -> None:
        """Expect a new backward."""


class PrivateBuckets(Buckets):
    """Buckets in memory of this rank.

    Collective over the reducer's group at the first call for several hosts.

    Args:
        slots: slots of the gradients, in the order of the model.
        n_counts: number of float32 numbers that are summed with the gradients, in the last bucket.
        reducer: sums the buckets.
        hook: function that is called with each bucket of gradients at the end of the backward, and sums it. None if the
            reducer sums them, as it sums the counts.

    Attributes:
        counts_bucket: number of the bucket with the counts, the last one.
        is_counted_first: whether the counts are alone in their bucket, which is summed before the other buckets: the
            divisor of sums depends on them. False where buckets are summed while backward runs.
    """

    def __init__(
        self,
        slots: Sequence[DenseSlot],
        n_counts: int,
        reducer: Reducer,
        hook: CommHook | None = None,
    ) -> None:
        device = reducer.device
        entries = [Entry(n_counts, "float32")]
        for slot in slots:
            entries.append(entry_of(slot, device))
        limits = reducer.begin_buckets(sum(entry.nbytes for entry in entries))
        self.is_counted_first = not reducer.route.is_overlapped
        if hook is not None or self.is_counted_first:
            limits = replace(limits, last_bytes=1)
        plan = plan_buckets(entries, limits)
        self._reducer = reducer
        self._hook = hook
        self.counts_bucket = plan.slots[0].bucket
        self._buckets: list[Bucket] = []
        self._streams: list[ProducerStreams] = []
        # where the counts are alone in their bucket, the host reads them before gradients are summed
        are_counts_read = self.is_counted_first and not reducer.route.is_on_device
        for number, shape in enumerate(plan.buckets):
            memory_device = device
            if are_counts_read and number == self.counts_bucket:
                memory_device = torch.device("cpu")
            self._streams.append(ProducerStreams(device))
            self._buckets.append(Bucket(_new_memory(shape, memory_device)))
        for number, (slot, place) in enumerate(zip(slots, plan.slots[1:], strict=True)):
            bucket = self._buckets[place.bucket]
            memory: Tensor | None = None
            if bucket.flat is not None:
                memory = bucket.flat[place.offset :][: place.n_elements]
            slot.assign(place.bucket, memory)
            bucket.add(Part(number, slot, slot.view))
        counts_memory = self._buckets[self.counts_bucket].flat
        assert counts_memory is not None, "counts are never direct"
        self._counts = counts_memory[plan.slots[0].offset :][:n_counts]
        self._handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Expect a new backward."""
        self._handles = []
        self._n_started = 0
        self._taken_slots: set[DenseSlot] = set()  # while backward runs
        self.is_started = False
        self._n_missing = [len(bucket.parts) for bucket in self._buckets]
        self._n_missing[self.counts_bucket] += 1

    def fill(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Take the gradients that this replica adds to the sums that have not begun; see `Bucket.fill`."""
        for bucket in self._buckets[self._n_started :]:
            if not self._taken_slots:
                bucket.fill(gradients, scale)
                continue
            bucket.require_kinds(gradients)
            for part in bucket.parts:
                if part.slot not in self._taken_slots:
                    part.slot.take(gradients[part.number], scale)

    def take_early(
        self,
        slot: DenseSlot,
        gradient: Tensor,
        scale: float,
    ) -> None:
        """Take a gradient while backward runs; start the buckets that are complete, in their order.

        A comm hook is called at the end of the backward. Earlier, its collectives would come between other collectives
        of the backward, at different places on each rank.
        """
        slot.take(gradient, scale)
        self._streams[slot.bucket].note()
        self._taken_slots.add(slot)
        self._n_missing[slot.bucket] -= 1
        while self._hook is None and self._n_missing[self._n_started] == 0:
            self._start()

    def finish(
        self,
        counts: Sequence[float],
        divisor_of: DivisorOf,
    ) -> list[float]:
        """Start the sums that have not been started, wait for all sums and divide them; see `Buckets.finish`."""
        if self._hook is not None:
            return self._finish_by_hook(self._hook, counts, divisor_of)
        if self.is_counted_first:
            totals = self._sum_counts(counts)
            divisor = divisor_of(totals)
            while self._n_started < self.counts_bucket:
                self._start(divisor)
            self.reset()
            return totals
        self.set_counts(counts)
        while self._n_started < len(self._buckets):
            self._start()
        totals = self.wait(self._handles)
        self.divide(divisor_of(totals))
        return totals

    def _sum_counts(self, counts: Sequence[float]) -> list[float]:
        """Return the sums of `counts` alone, before the gradients are summed."""
        self.set_counts(counts)
        array = self.begin(self.counts_bucket)
        handle = self._reducer.start(array, self.counts_bucket, is_exact=True)
        if handle is not None:
            handle.wait()
        totals: list[float] = self._counts.tolist()
        return totals

    def _finish_by_hook(
        self,
        hook: CommHook,
        counts: Sequence[float],
        divisor_of: DivisorOf,
    ) -> list[float]:
        """Let a hook sum all buckets of gradients, and divide the sums; return the sums of `counts`."""
        totals = self._sum_counts(counts)
        divisor = divisor_of(totals)
        sums: list[HookedSum] = []
        for number in range(self.counts_bucket):
            parts = self._buckets[number].parts
            slots = [part.slot for part in parts if totals[part.number]]
            is_last = number == self.counts_bucket - 1
            bucket = GradBucket(number, self.tensor(number), slots, is_last, divisor or 1.0)
            result = hook(bucket)
            sums.append(HookedSum(result, bucket, self._reducer.group))
        for hooked_sum in sums:
            hooked_sum.wait()
        self.divide(divisor)
        self.reset()
        return totals

    def divide(self, divisor: float | None) -> None:
        """Divide all sums, in one go for each bucket."""
        if divisor is not None:
            for number in range(self.n_buckets):
                self.tensor(number).div_(divisor)

    def _start(self, divisor: float | None = None) -> None:
        """Start to sum the next bucket. A sum with counts must not be rounded."""
        number = self._n_started
        self._n_started += 1
        has_counts = number == self.counts_bucket
        self._streams[number].order_sum()
        array = self.begin(number)
        handle = self._reducer.start(array, number, is_exact=has_counts, divisor=divisor)
        self._handles.append(handle)

    def begin(self, number: int) -> Any:
        """Return the memory of a bucket that is summed now: a numpy array of host memory, or a device tensor."""
        self.is_started = True
        return _array(self.tensor(number))

    def wait(self, handles: Sequence[Any]) -> list[float]:
        """Wait for the sums of all buckets; return the sums of the counts, and expect a new backward."""
        for handle in handles:
            if handle is not None:
                handle.wait()
        self.reset()
        totals: list[float] = self._counts.tolist()
        return totals

    @property
    def n_buckets(self) -> int:
        """Number of buckets of the plan."""
        return len(self._buckets)

    def is_direct(self, number: int) -> bool:
        """Return whether a bucket is summed where torch made its only gradient."""
        return self._buckets[number].flat is None

    def tensor(self, number: int) -> Tensor:
        """Return the memory that is summed in a bucket: its flat memory, or the memory of its only gradient."""
        bucket = self._buckets[number]
        flat = bucket.flat
        if flat is None:
            flat = bucket.parts[0].slot.flat
        assert flat is not None, "a direct gradient is taken before its bucket starts"
        return flat

    def set_counts(self, counts: Sequence[float]) -> None:
        """Write the numbers that are summed with the gradients."""
        self._counts.copy_(torch.tensor(counts))


def entry_of(slot: DenseSlot, device: torch.device) -> Entry:
    """Return the entry of a gradient in the plan of buckets on a device."""
    dtype = dtype_name(slot)
    sum_dtype = SUM_DTYPES[dtype]
    is_direct = slot.device.type == device.type and sum_dtype == dtype
    return Entry(slot.shape.numel(), sum_dtype, is_direct)


def _new_memory(shape: BucketShape, device: torch.device) -> Tensor | None:
    """Return the flat memory of a bucket; None for a bucket that is summed where torch made its only gradient."""
    if shape.is_direct:
        return None
    dtype = getattr(torch, shape.dtype)
    return torch.zeros(shape.n_elements, dtype=dtype, device=device)


def _array(tensor: Tensor) -> Any:
    """Return a tensor in the form that algorithms take: a numpy array of host memory, a device tensor unchanged."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    return tensor
