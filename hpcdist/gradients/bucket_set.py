"""Buckets in memory: small gradients side by side in flat buffers, large ones where torch made them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.collectives.thread import Handle
from hpcdist.gradients.partial_sums import PartialSums
from hpcdist.gradients.record import ParameterRecord
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.tensors import SUM_DTYPES, dtype_name
from hpcdist.plan.buckets import Entry, plan_buckets


class BucketSet:
    """The buckets of one plan, and how far the running backward has come with each.

    Collective at the first call for several hosts: the reducer's group.

    Args:
        records: what needs a place, in the order of the model, with their parameters.
        n_counts: float32 numbers that are summed along, in the last bucket.
        reducer: sums the buckets.
    """

    def __init__(
        self,
        records: Sequence[tuple[ParameterRecord, nn.Parameter]],
        n_counts: int,
        reducer: Reducer,
    ) -> None:
        entries = [Entry(n_counts, "float32"), *(_entry(parameter, reducer.is_on_device) for _, parameter in records)]
        plan = plan_buckets(entries, reducer.plan(sum(entry.nbytes for entry in entries)))
        self._reducer = reducer
        device = records[0][1].device if records and reducer.is_on_device else torch.device("cpu")
        self._flat = [
            None if shape.is_direct else torch.zeros(shape.n_elements, dtype=getattr(torch, shape.dtype), device=device)
            for shape in plan.buckets
        ]
        self._members: list[list[ParameterRecord]] = [[] for _ in plan.buckets]
        for (record, parameter), slot in zip(records, plan.slots[1:], strict=True):
            flat = self._flat[slot.bucket]
            record.place(slot.bucket, None if flat is None else flat[slot.offset :][: slot.n_elements], parameter)
            self._members[slot.bucket].append(record)
        counts = plan.slots[0]
        flat = self._flat[counts.bucket]
        assert flat is not None, "counts are never direct"
        self._counts = flat[counts.offset :][:n_counts]
        self._counts_array = self._counts.numpy() if self._counts.device.type == "cpu" else None
        self._counts_bucket = counts.bucket
        self._arrays = [None if flat is None else _array(flat) for flat in self._flat]
        self._partials = [PartialSums(reducer.replicas.n_replicas) for _ in plan.buckets]
        self._handles: list[Handle] = []
        self._sizes = [len(members) + (bucket == counts.bucket) for bucket, members in enumerate(self._members)]
        self.reset()

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has started buckets and not finished them."""
        return self._n_started > 0

    def reset(self) -> None:
        """Expect a new backward."""
        for sums in self._partials:
            sums.take()
        self._handles.clear()
        self._n_started = 0
        self._missing = self._sizes.copy()

    def arrived(self, record: ParameterRecord) -> None:
        """Take note that a record's gradient is there; start the buckets that are complete, in their order."""
        if self._reducer.is_overlapped:
            self._missing[record.bucket] -= 1
            while self._n_started < len(self._missing) and self._missing[self._n_started] == 0:
                self._start()

    def push(self, replica: int, counts: list[float]) -> None:
        """Add the gradients of one of several local replicas, which are in the records' places; not yet summed.

        All records that have no gradient must stand in.
        """
        self._set_counts(counts)
        for bucket, sums in enumerate(self._partials):
            flat = self._flat[bucket]
            sums.push(replica, self._part(bucket), is_ours=flat is None)

    def finish_pushed(self) -> list[float]:
        """Sum what all local replicas have pushed over all ranks; return the sums of the counts.

        Collective: the reducer's group. The sums are where the last replica's gradients were.
        """
        for bucket, sums in enumerate(self._partials):
            own, result = [_array(tensor) for tensor in sums.take()], _array(self._part(bucket))
            self._n_started += 1
            self._keep(self._reducer.start_partials(own, result, bucket, is_exact=bucket == self._counts_bucket))
        return self._wait()

    def _part(self, bucket: int) -> Tensor:
        flat = self._flat[bucket]
        return self._members[bucket][0].part if flat is None else flat

    def _set_counts(self, counts: list[float]) -> None:
        if self._counts_array is None:
            self._counts.copy_(torch.tensor(counts))
        else:
            self._counts_array[:] = counts

    def finish(self, counts: list[float]) -> list[float]:
        """Start what has not been started, wait for all sums, and return the sums of `counts`.

        Collective: the reducer's group. All records that have no gradient must stand in.
        """
        self._set_counts(counts)
        while self._n_started < len(self._missing):
            self._start()
        return self._wait()

    def _wait(self) -> list[float]:
        for handle in self._handles:
            handle.wait()
        self.reset()
        totals: list[float] = self._counts.tolist()
        return totals

    def divide(self, total: float) -> None:
        """Divide all sums, in one go for each bucket."""
        for bucket in range(len(self._flat)):
            self._part(bucket).div_(total)

    def _start(self) -> None:
        bucket = self._n_started
        array = self._arrays[bucket]
        if array is None:
            array = _array(self._members[bucket][0].part)
        self._n_started += 1
        # other ranks may hold several replicas: this one's is a subtree among theirs
        self._keep(self._reducer.start_partials([array], array, bucket, is_exact=bucket == self._counts_bucket))

    def _keep(self, handle: Handle | None) -> None:
        if handle is not None:
            self._handles.append(handle)


def _entry(parameter: Tensor, is_on_device: bool) -> Entry:
    dtype = SUM_DTYPES[dtype_name(parameter)]
    return Entry(
        parameter.numel(), dtype, (parameter.device.type != "cpu") == is_on_device and dtype == dtype_name(parameter)
    )


def _array(tensor: Tensor) -> Any:
    """Return what an algorithm takes: a numpy array of host memory, a device tensor as it is."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
