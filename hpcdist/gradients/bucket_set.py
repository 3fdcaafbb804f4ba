"""Buckets in memory: small gradients side by side in flat buffers, large ones where torch made them."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.gradients.comm_hook import GradBucket, HookedSum
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.buckets import BucketShape, Entry, plan_buckets


class BucketSet:
    """The buckets of one plan, and which of them the running backward has started to sum.

    Collective at the first call for several hosts: the reducer's group.

    Args:
        records: the parameters that need a slot, in the order of the model.
        n_counts: float32 numbers that are summed along, in the last bucket.
        reducer: sums the buckets.
        hook: called with each bucket of gradients at the end of the backward, and sums it instead; None: the reducer
            does, as it does with the counts.

    Attributes:
        counts_bucket: number of the bucket with the counts, the last one.
        is_counted_first: whether the counts are alone in it, and summed before the others.
        is_started: whether a backward has started buckets and not finished them.
    """

    def __init__(
        self,
        records: Sequence[tuple[ParameterRecord, nn.Parameter]],
        n_counts: int,
        reducer: Reducer,
        hook: Callable[[GradBucket], Any] | None = None,
    ) -> None:
        device = reducer.device
        entries = [Entry(n_counts, "float32"), *(_entry(parameter, device) for _, parameter in records)]
        limits = reducer.begin_buckets(sum(entry.nbytes for entry in entries))
        # where nothing is summed while backward runs, the counts alone come first: they tell what sums are divided by
        self.is_counted_first = not reducer.route.is_overlapped
        if hook is not None or self.is_counted_first:
            limits = replace(limits, last_bytes=1)
        plan = plan_buckets(entries, limits)
        self._reducer, self._hook = reducer, hook
        # where the counts are alone in their bucket, the host reads them before anything else is summed
        devices = [device] * len(plan.buckets)
        if self.is_counted_first and not reducer.route.is_on_device:
            devices[plan.slots[0].bucket] = torch.device("cpu")
        self._flat = [
            _new_buffer(shape, bucket_device) for shape, bucket_device in zip(plan.buckets, devices, strict=True)
        ]
        self._members: list[list[ParameterRecord]] = [[] for _ in plan.buckets]
        for (record, parameter), slot in zip(records, plan.slots[1:], strict=True):
            flat = self._flat[slot.bucket]
            record.assign_slot(slot.bucket, None if flat is None else flat[slot.offset :][: slot.n_elements], parameter)
            self._members[slot.bucket].append(record)
        counts = plan.slots[0]
        flat = self._flat[counts.bucket]
        assert flat is not None, "counts are never direct"
        self._counts = flat[counts.offset :][:n_counts]
        self._counts_array = self._counts.numpy() if self._counts.device.type == "cpu" else None
        self.counts_bucket = counts.bucket
        self._arrays = [None if flat is None else _array(flat) for flat in self._flat]
        self._sizes = [len(members) + (bucket == counts.bucket) for bucket, members in enumerate(self._members)]
        self._handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Expect a new backward."""
        self._handles = []
        self._n_started = 0
        self.is_started = False
        self._missing = self._sizes.copy()

    def count_arrival(self, record: ParameterRecord) -> None:
        """Count a gradient that is in its slot; start the buckets that are complete, in their order.

        A hook's collectives would come between others of the backward, elsewhere on each rank: it waits for the end.
        """
        if self._hook is not None:
            return
        self._missing[record.bucket] -= 1
        while self._n_started < len(self._missing) and self._missing[self._n_started] == 0:
            self._start()

    def finish(self, counts: list[float], divisor_of: Callable[[list[float]], float | None]) -> list[float]:
        """Start what has not been started, wait for all sums and divide them; return the sums of `counts`.

        Collective: the reducer's group. Every record without a gradient must stand in.

        Args:
            counts: of this replica.
            divisor_of: returns what sums are divided by, if by anything, for the sums of the counts.
        """
        if self.is_counted_first:
            totals = self.sum_counts(counts)
            divisor = divisor_of(totals)
            while self._n_started < self.counts_bucket:
                self._start(divisor)
            self.reset()
            return totals
        self.set_counts(counts)
        while self._n_started < len(self._missing):
            self._start()
        totals = self.wait(self._handles)
        self.divide(divisor_of(totals))
        return totals

    @property
    def has_hook(self) -> bool:
        """Whether a program's own hook sums the gradients."""
        return self._hook is not None

    def sum_counts(self, counts: list[float]) -> list[float]:
        """Return the sums of `counts` alone, before the gradients are summed. Collective: the reducer's group."""
        self.set_counts(counts)
        array = self.begin(self.counts_bucket)
        handle = self._reducer.start(array, self.counts_bucket, is_exact=True)
        if handle is not None:
            handle.wait()
        totals: list[float] = self._counts.tolist()
        return totals

    def sum_by_hook(self, touched: Container[ParameterRecord], divisor: float | None) -> None:
        """Let the hook sum all gradients; return when they are summed and divided. Collective: the reducer's group.

        Args:
            touched: the records of which any replica has a gradient.
            divisor: what sums are divided by; None: nothing.
        """
        assert self._hook is not None, "it has one"
        sums = []
        for bucket in range(self.counts_bucket):
            records = [record for record in self._members[bucket] if record in touched]
            given = GradBucket(bucket, self.tensor(bucket), records, bucket == self.counts_bucket - 1, divisor or 1.0)
            sums.append(HookedSum(self._hook(given), given, self._reducer.group))
        for one in sums:
            one.wait()
        self.divide(divisor)
        self.reset()

    def divide(self, divisor: float | None) -> None:
        """Divide all sums, in one go for each bucket."""
        if divisor is not None:
            for bucket in range(self.n_buckets):
                self.tensor(bucket).div_(divisor)

    def _start(self, divisor: float | None = None) -> None:
        """Start to sum the next bucket. A sum with counts must not be rounded."""
        bucket = self._n_started
        self._n_started += 1
        has_counts = bucket == self.counts_bucket
        self._handles.append(self._reducer.start(self.begin(bucket), bucket, is_exact=has_counts, divisor=divisor))

    def begin(self, bucket: int) -> Any:
        """Return what an algorithm sums now: a numpy array of host memory, or a device tensor."""
        self.is_started = True
        array = self._arrays[bucket]
        return _array(self.tensor(bucket)) if array is None else array

    def wait(self, handles: Sequence[Any]) -> list[float]:
        """Wait for the sums of all buckets; return those of the counts, and expect a new backward."""
        for handle in handles:
            if handle is not None:
                handle.wait()
        self.reset()
        totals: list[float] = self._counts.tolist()
        return totals

    @property
    def n_buckets(self) -> int:
        """Buckets of the plan."""
        return len(self._flat)

    def is_direct(self, bucket: int) -> bool:
        """Return whether a bucket is summed where torch made its only gradient."""
        return self._flat[bucket] is None

    def tensor(self, bucket: int) -> Tensor:
        """Return what is summed in a bucket: its flat buffer, or the memory of its only gradient."""
        flat = self._flat[bucket]
        if flat is not None:
            return flat
        part = self._members[bucket][0].part
        assert part is not None, "a direct gradient is taken before its bucket starts"
        return part

    def set_counts(self, counts: list[float]) -> None:
        """Write the numbers that are summed along."""
        if self._counts_array is None:
            self._counts.copy_(torch.tensor(counts))
        else:
            self._counts_array[:] = counts


def _entry(parameter: Tensor, device: torch.device) -> Entry:
    dtype = SUM_DTYPES[dtype_name(parameter)]
    is_direct = parameter.device.type == device.type and dtype == dtype_name(parameter)
    return Entry(parameter.numel(), dtype, is_direct)


def _new_buffer(shape: BucketShape, device: torch.device) -> Tensor | None:
    """Return the flat buffer of a bucket, or None for one that is summed where torch made its only gradient."""
    if shape.is_direct:
        return None
    return torch.zeros(shape.n_elements, dtype=getattr(torch, shape.dtype), device=device)


def _array(tensor: Tensor) -> Any:
    """Return what an algorithm takes: a numpy array of host memory, a device tensor as it is."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
