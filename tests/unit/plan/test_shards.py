"""Which rank owns which elements of a bucket."""

import random

import pytest

from hpcdist.plan.shards import BLOCK_ELEMENTS, plan_shards


@pytest.mark.parametrize("seed", range(200))
def test_shares_cover_all_elements_once_in_order(seed):
    draws = random.Random(seed)
    sizes = []
    for _ in range(draws.randrange(9)):
        sizes.append(draws.choice([1, 10, 1023, 1024, 1025, 5000, draws.randrange(1, 10**6)]))
    n_owners = draws.randrange(1, 9)
    shares = plan_shards(sizes, n_owners)
    assert len(shares) == n_owners
    pieces = []
    for share in shares:
        pieces += [(tensor, *owned_range) for tensor, owned_range in share.items()]
    expected = iter(pieces)
    for tensor, size in enumerate(sizes):
        at = 0
        while at < size:
            piece_tensor, start, stop = next(expected)
            assert (piece_tensor, start) == (tensor, at)
            assert start % BLOCK_ELEMENTS == 0
            assert start < stop
            at = stop
    assert next(expected, None) is None


@pytest.mark.parametrize("seed", range(50))
def test_shares_are_as_equal_as_blocks_allow(seed):
    draws = random.Random(seed)
    sizes = [draws.randrange(1, 10**6) for _ in range(draws.randrange(1, 9))]
    n_owners = draws.randrange(1, 9)
    counts = []
    for share in plan_shards(sizes, n_owners):
        counts.append(sum(stop - start for start, stop in share.values()))
    assert max(abs(count - sum(sizes) / n_owners) for count in counts) <= BLOCK_ELEMENTS
