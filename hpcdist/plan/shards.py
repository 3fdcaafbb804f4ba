"""Which rank of a host owns which elements of a bucket: contiguous shares, cut inside tensors where that balances."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

#: Shares begin at multiples of this in a tensor. So an optimizer's vector instructions treat each element as they would
#: in the whole tensor, whose last few elements alone are left to scalar code; and norms are sums of the same blocks.
BLOCK_ELEMENTS = 1024


def plan_shards(sizes: Sequence[int], n_owners: int) -> list[dict[int, tuple[int, int]]]:
    """Return each owner's share of some tensors: tensor -> (start, stop), where it is not empty.

    Args:
        sizes: elements of the tensors, in the order in which they lie in a bucket.
        n_owners: how many shares.

    >>> plan_shards([3000, 500, 2000], 2)
    [{0: (0, 3000)}, {1: (0, 500), 2: (0, 2000)}]
    >>> plan_shards([5000], 2)
    [{0: (0, 2048)}, {0: (2048, 5000)}]
    """
    if not sizes:
        return [{} for _ in range(n_owners)]
    starts = [0, *accumulate(sizes)]
    cuts = [_cut(starts, number * starts[-1] / n_owners) for number in range(n_owners)]
    shares: list[dict[int, tuple[int, int]]] = []
    for first, last in pairwise([*cuts, starts[-1]]):
        bounds = [
            (max(first, start) - start, min(last, stop) - start) for start, stop in pairwise(starts)
        ]
        shares.append(
            {
                tensor: owned_range
                for tensor, owned_range in enumerate(bounds)
                if owned_range[0] < owned_range[1]
            }
        )
    return shares


def _cut(starts: Sequence[int], ideal: float) -> int:
    """Return the allowed place nearest to the ideal one; of two the earlier."""
    tensor = max(0, min(bisect_right(starts, ideal) - 1, len(starts) - 2))
    start = starts[tensor]
    stop = starts[tensor + 1]
    before = start + int(ideal - start) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    after = min(before + BLOCK_ELEMENTS, stop)
    return before if ideal - before <= after - ideal else after
