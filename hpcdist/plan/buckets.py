"""Bucket plans: which tensor lives where in which flat buffer, and how large buffers should be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Slots start at multiples of this, so that every slot starts on a cache line whatever its neighbours' sizes are.
ALIGNMENT_BYTES = 64
_ITEM_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Entry:
    """A tensor to be placed.

    Attributes:
        n_elements: number of elements of the tensor.
        dtype: name of the dtype in which the tensor is summed, "float32" or "float64".
        is_direct: whether the tensor is summed in its own memory, without a copy, if it is large.
    """

    n_elements: int
    dtype: str
    is_direct: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.n_elements * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    Attributes:
        bucket_bytes: size above which a new bucket is begun.
        direct_bytes: size from which a tensor with `is_direct` is summed in its own memory.
        last_bytes: size up to which the first tensors have separate buckets, so that little remains to be done when
            the last gradient has come. With 0 they have not.
    """

    bucket_bytes: int
    direct_bytes: int
    last_bytes: int = 0


@dataclass(frozen=True)
class Slot:
    """Place of one tensor: elements [offset, offset + n_elements) of a bucket."""

    bucket: int
    offset: int
    n_elements: int


@dataclass(frozen=True)
class BucketShape:
    """A bucket: a flat buffer, or one tensor where it lies (`is_direct`)."""

    dtype: str
    n_elements: int
    is_direct: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """All buckets and the slot of every tensor.

    Attributes:
        buckets: shapes of the buckets, in the order in which they are reduced.
        slots: slot of each tensor, in the order of the tensors.
    """

    buckets: tuple[BucketShape, ...]
    slots: tuple[Slot, ...]


def plan_buckets(entries: Sequence[Entry], limits: Limits) -> BucketPlan:
    """Return a plan that fills buckets from the last tensor to the first.

    Gradients appear in reverse order of use, so the first bucket is the first to be complete. A bucket holds one dtype.
    """
    n_last = _n_within(entries, limits.last_bytes)
    buckets: list[BucketShape] = []
    slots: list[Slot] = []
    for part in (entries[n_last:], entries[:n_last]):
        slots += _fill(list(reversed(part)), limits, buckets)
    return BucketPlan(tuple(buckets), tuple(reversed(slots)))


def _n_within(entries: Sequence[Entry], limit_bytes: int) -> int:
    """Return how many tensors at the start have separate buckets: all that fit, at least one; none without a limit."""
    if limit_bytes == 0:
        return 0
    total_bytes = 0
    number = 0
    for number, entry in enumerate(entries):
        total_bytes += entry.nbytes
        if total_bytes > limit_bytes:
            return max(1, number)
    return number + 1


def _fill(
    entries: Sequence[Entry],
    limits: Limits,
    buckets: list[BucketShape],
) -> list[Slot]:
    """Append buckets for these tensors, in their order; return their slots."""
    open_buckets: dict[str, int] = {}
    slots = []
    for entry in entries:
        if entry.is_direct and entry.nbytes >= limits.direct_bytes:
            slots.append(Slot(len(buckets), 0, entry.n_elements))
            buckets.append(BucketShape(entry.dtype, entry.n_elements, is_direct=True))
            continue
        padded = _padded(entry)
        item_bytes = _ITEM_BYTES[entry.dtype]
        bucket = open_buckets.get(entry.dtype)
        offset = 0
        if bucket is not None:
            offset = buckets[bucket].n_elements
        if bucket is None or (offset + padded) * item_bytes > limits.bucket_bytes:
            bucket = len(buckets)
            offset = 0
            open_buckets[entry.dtype] = bucket
            buckets.append(BucketShape(entry.dtype, 0))
        slots.append(Slot(bucket, offset, entry.n_elements))
        buckets[bucket] = BucketShape(entry.dtype, offset + padded)
    return slots


def _padded(entry: Entry) -> int:
    """Return the elements that a tensor takes in a bucket."""
    unit = ALIGNMENT_BYTES // _ITEM_BYTES[entry.dtype]
    return -(-entry.n_elements // unit) * unit


def best_bucket_bytes(
    total_bytes: int,
    latency_s: float,
    seconds_per_byte: float,
) -> int:
    """Return the bucket size that leaves the least communication after the last gradient.

    With k buckets, each call costs its latency a, and the transfer of one bucket remains when backward ends: in all
    k a + n b / k, which is least for k = sqrt(n b / a).

    >>> best_bucket_bytes(100_000_000, 1e-3, 8e-9)
    3571429
    """
    n_buckets = max(1, int(math.sqrt(total_bytes * seconds_per_byte / latency_s)))
    return -(-total_bytes // n_buckets)
