"""Which rank of a host owns which elements of a bucket: contiguous shares, cut inside tensors where that balances."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hpcdist.plan.blocks import Bounds

#: Shares begin at multiples of this in a tensor. So an optimizer's vector instructions treat each element as they would
#: in the whole tensor, whose last few elements alone are left to scalar code; and norms are sums of the same blocks.
BLOCK_ELEMENTS = 1024


def plan_shards(
    sizes: Sequence[int],
    n_owners: int,
) -> list[dict[int, Bounds]]:
    """Return each owner's share of some tensors: tensor -> (start, stop), where it is not empty.

    Args:
        sizes: number of elements of each tensor, in the order in which they lie in a bucket.
        n_owners: number of shares.

    >>> plan_shards([3000, 500, 2000], 2)
    [{0: (0, 3000)}, {1: (0, 500), 2: (0, 2000)}]
    >>> plan_shards([5000], 2)
    [{0: (0, 2048)}, {0: (2048, 5000)}]
    """
    if not sizes:
        return [{} for _ in range(n_owners)]
    starts = [0, *accumulate(sizes)]
    n_elements = starts[-1]
    cuts = [_cut(starts, number * n_elements / n_owners) for number in range(n_owners)]
    shares: list[dict[int, Bounds]] = []
    for first, last in pairwise([*cuts, n_elements]):
        share: dict[int, Bounds] = {}
        for tensor, (start, stop) in enumerate(pairwise(starts)):
            owned_start = max(first, start) - start
            owned_stop = min(last, stop) - start
            if owned_start < owned_stop:
                share[tensor] = (owned_start, owned_stop)
        shares.append(share)
    return shares


def _cut(starts: Sequence[int], ideal: float) -> int:
    """Return the allowed place nearest to the ideal place; the earlier one of two that are equally near."""
    last_tensor = len(starts) - 2
    tensor = bisect_right(starts, ideal) - 1
    tensor = max(0, min(tensor, last_tensor))
    start = starts[tensor]
    stop = starts[tensor + 1]
    n_blocks = int(ideal - start) // BLOCK_ELEMENTS
    before = start + n_blocks * BLOCK_ELEMENTS
    after = min(before + BLOCK_ELEMENTS, stop)
    if ideal - before <= after - ideal:
        return before
    return after
