import itertools
import math

import pytest

from hpcdist.plan.buckets import ALIGNMENT_BYTES, BucketShape, Entry, Limits, best_bucket_bytes, plan_buckets

NEVER = 1 << 60


@pytest.mark.feature("collectives.gradient-buckets")
@pytest.mark.parametrize("last_bytes", [0, 100, 100_000])
@pytest.mark.parametrize("direct_bytes", [NEVER, 64])
def test_every_tensor_has_a_slot_of_its_own(last_bytes, direct_bytes):
    entries = []
    for n_elements in (0, 1, 15, 16, 17, 1000):
        entries += [Entry(n_elements, "float32", True), Entry(n_elements, "float64", False)]
    plan = plan_buckets(entries, Limits(2048, direct_bytes, last_bytes))
    occupied_places = set()
    for entry, slot in zip(entries, plan.slots, strict=True):
        bucket = plan.buckets[slot.bucket]
        assert slot.n_elements == entry.n_elements
        assert bucket.dtype == entry.dtype
        assert bucket.is_direct == (entry.is_direct and entry.nbytes >= direct_bytes)
        assert slot.offset + entry.n_elements <= bucket.n_elements
        assert slot.offset * int(entry.dtype[-2:]) // 8 % ALIGNMENT_BYTES == 0
        spots = {(slot.bucket, place) for place in range(slot.offset, slot.offset + entry.n_elements)}
        assert not spots & occupied_places
        occupied_places |= spots
    assert {slot.bucket for slot in plan.slots} == set(range(len(plan.buckets)))


@pytest.mark.feature("collectives.gradient-buckets", "semantics.transport-of-gradients")
def test_buckets_start_with_the_last_tensor_and_respect_their_size():
    plan = plan_buckets([Entry(256, "float32")] * 5, Limits(2048, NEVER))
    assert [slot.bucket for slot in plan.slots] == [2, 1, 1, 0, 0]
    assert all(bucket.n_elements * 4 <= 2048 for bucket in plan.buckets)
    assert plan_buckets([Entry(10_000, "float32")], Limits(64, NEVER)).buckets == (BucketShape("float32", 10_000),)
    assert plan_buckets([], Limits(64, NEVER)).buckets == ()


def test_large_tensors_that_may_be_summed_where_they_lie_are_alone():
    entries = [Entry(10, "float32"), Entry(1000, "float32", True), Entry(1000, "float32"), Entry(10, "float32", True)]
    plan = plan_buckets(entries, Limits(NEVER, 4000))
    assert [slot.bucket for slot in plan.slots] == [0, 1, 0, 0]
    assert [bucket.is_direct for bucket in plan.buckets] == [False, True]


@pytest.mark.parametrize(
    ("last_bytes", "buckets"), [(0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (2048, [1, 1, 0, 0]), (9999, [0] * 4)]
)
def test_the_first_tensors_are_kept_apart_as_they_are_ready_last(last_bytes, buckets):
    plan = plan_buckets([Entry(256, "float32")] * 4, Limits(NEVER, NEVER, last_bytes))
    assert [slot.bucket for slot in plan.slots] == buckets


@pytest.mark.parametrize("total_bytes", [1e5, 1e7, 1e9])
@pytest.mark.parametrize(("latency_s", "per_byte_s"), list(itertools.product([1e-5, 1e-3], [1e-10, 1e-8])))
def test_bucket_size_is_the_best_of_all_numbers_of_buckets(total_bytes, latency_s, per_byte_s):
    def cost(n_buckets):
        return n_buckets * latency_s + total_bytes * per_byte_s / n_buckets

    n_buckets = math.ceil(total_bytes / best_bucket_bytes(int(total_bytes), latency_s, per_byte_s))
    assert cost(n_buckets) <= 1.2 * min(map(cost, range(1, 2000)))
