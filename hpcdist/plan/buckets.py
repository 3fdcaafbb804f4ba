"""Bucket plans: which tensor lives where in which flat buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

#: Slots start at multiples of this, so that every slot starts on a cache line whatever its neighbours' sizes are.
ALIGNMENT_BYTES = 64
_ITEM_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Slot:
    """Place of one tensor: elements [offset, offset + n_elements) of a bucket."""

    bucket: int
    offset: int
    n_elements: int


@dataclass(frozen=True)
class BucketPlan:
    """Sizes of all buckets and the slot of every tensor.

    Attributes:
        buckets: (dtype, n_elements) of each bucket, in the order in which they are reduced.
        slots: one for each tensor, in the order of the tensors.
    """

    buckets: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]


def plan_buckets(tensors: Sequence[tuple[int, str]], bucket_bytes: int) -> BucketPlan:
    """Return a plan that fills buckets of at most `bucket_bytes` from the last tensor to the first.

    Gradients appear in reverse order of use, so the first bucket is the first to be complete. A bucket holds one dtype;
    a tensor larger than `bucket_bytes` has a bucket of its own.

    Args:
        tensors: (n_elements, dtype) of each tensor; dtype float32 or float64.
        bucket_bytes: size above which a new bucket is begun.
    """
    buckets: list[tuple[str, int]] = []
    open_buckets: dict[str, int] = {}
    slots: list[Slot] = []
    for n_elements, dtype in reversed(tensors):
        padded = _padded(n_elements, dtype)
        bucket = open_buckets.get(dtype)
        if bucket is None or (buckets[bucket][1] + padded) * _ITEM_BYTES[dtype] > bucket_bytes:
            bucket = open_buckets[dtype] = len(buckets)
            buckets.append((dtype, 0))
        offset = buckets[bucket][1]
        buckets[bucket] = (dtype, offset + padded)
        slots.append(Slot(bucket, offset, n_elements))
    return BucketPlan(tuple(buckets), tuple(reversed(slots)))


def _padded(n_elements: int, dtype: str) -> int:
    unit = ALIGNMENT_BYTES // _ITEM_BYTES[dtype]
    return -(-n_elements // unit) * unit
