"""Which rank holds which replicas, and the one order in which replicas are summed, whatever the placement.

The order is a binary tree over the replica ids. Over N replicas it joins [i, i+d) and [i+d, i+2d) for d = 1, 2, 4, ...
and i a multiple of 2d; at the right end subtrees are shorter. A subtree is named by its (start, stop). A rank keeps the
sums of the subtrees that its own replicas make up, and sends nothing smaller.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcdist.plan.blocks import Bounds, block_bounds

#: The replicas of a subtree.
Subtree = Bounds
#: (into, row): adds a row to another row.
Addition = tuple[int, int]


def plan_subtrees(replicas: Iterable[int], n_replicas: int) -> list[Subtree]:
    """Return the fewest subtrees that cover a set of replicas exactly: the sums that their holder can make alone.

    >>> plan_subtrees([3, 4, 5], 8)
    [(3, 4), (4, 6)]
    >>> plan_subtrees([4, 5, 6], 7)
    [(4, 7)]
    """
    parts: dict[int, int] = {}
    for replica in replicas:
        parts[replica] = replica + 1
    # no larger subtree consists of these replicas
    largest = min(n_replicas, 2 * len(parts))
    for distance in _distances(largest):
        for start in list(parts):
            if start % (2 * distance) != 0:
                continue
            middle = min(start + distance, n_replicas)
            stop = min(start + 2 * distance, n_replicas)
            has_left = parts.get(start) == middle
            has_right = parts.get(middle) == stop
            if middle < stop and has_left and has_right:
                parts[start] = parts.pop(middle)
    return sorted(parts.items())


def is_subtree(
    start: int,
    stop: int,
    n_replicas: int,
) -> bool:
    """Return whether consecutive replicas are one subtree.

    >>> is_subtree(4, 6, 8), is_subtree(3, 5, 8), is_subtree(4, 7, 7)
    (True, False, True)
    """
    distance = 1 << (stop - start - 1).bit_length()
    if start % distance != 0:
        return False
    return stop == start + distance or stop == n_replicas


def plan_additions(subtrees: Sequence[Subtree]) -> list[Addition]:
    """Return (into, row) pairs: adding rows in this order leaves the sum of all replicas in the row of replica 0.

    Args:
        subtrees: subtree of each row; together they cover [0, N) once, in any order.

    >>> plan_additions([(0, 1), (1, 2), (2, 4)])
    [(0, 1), (0, 2)]
    """
    rows: dict[int, int] = {}
    n_replicas = 0
    for row, (start, stop) in enumerate(subtrees):
        rows[start] = row
        n_replicas = max(n_replicas, stop)
    additions: list[Addition] = []
    for distance in _distances(n_replicas):
        for start in range(0, n_replicas, 2 * distance):
            middle = start + distance
            if start in rows and middle in rows:
                additions.append((rows[start], rows.pop(middle)))
    return additions


def _distances(n_replicas: int) -> list[int]:
    """Return the powers of two below a number of replicas."""
    n_levels = (n_replicas - 1).bit_length()
    return [1 << level for level in range(n_levels)]


def plan_row_additions(n_rows: int) -> list[Addition]:
    """Return the (into, row) pairs of the tree over consecutive rows; the sum is left in row 0."""
    if n_rows == 0:
        return []
    return plan_additions([(row, row + 1) for row in range(n_rows)])


@dataclass(frozen=True)
class ReplicaPlan:
    """Replicas given to ranks in blocks, in the order of their ids.

    Attributes:
        n_replicas: number of replicas of the job.
        n_ranks: number of ranks that hold them; at most `n_replicas`.
    """

    n_replicas: int
    n_ranks: int

    def of_rank(self, rank: int) -> range:
        """Return the replicas of a rank.

        >>> [list(ReplicaPlan(8, 3).of_rank(rank)) for rank in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
        """
        start, stop = block_bounds(self.n_replicas, self.n_ranks, rank)
        return range(start, stop)

    @cached_property
    def subtrees(self) -> tuple[tuple[Subtree, ...], ...]:
        """The subtrees that each rank sums by itself."""
        subtrees: list[tuple[Subtree, ...]] = []
        for rank in range(self.n_ranks):
            replicas = self.of_rank(rank)
            subtrees.append(tuple(plan_subtrees(replicas, self.n_replicas)))
        return tuple(subtrees)

    @cached_property
    def additions(self) -> tuple[Addition, ...]:
        """(into, row) pairs over the subtrees of all ranks, rank by rank; the sum is left in row 0."""
        all_subtrees = list(itertools.chain.from_iterable(self.subtrees))
        return tuple(plan_additions(all_subtrees))

    @cached_property
    def is_one_tree_of_ranks(self) -> bool:
        """Whether every rank has one subtree, and subtrees are combined as ranks are: an ordered all-reduce is enough.

        >>> [ReplicaPlan(8, 4).is_one_tree_of_ranks, ReplicaPlan(8, 3).is_one_tree_of_ranks]
        [True, False]
        """
        if set(map(len, self.subtrees)) != {1}:
            return False
        return self.additions == tuple(plan_row_additions(self.n_ranks))


def is_joint(
    left_subtree: Subtree,
    right: Subtree,
    n_replicas: int,
) -> bool:
    """Return whether two neighbouring subtrees are the two halves of one.

    >>> is_joint((0, 2), (2, 4), 8), is_joint((2, 4), (4, 6), 8), is_joint((4, 6), (6, 7), 7)
    (True, False, True)
    """
    start, middle = left_subtree
    right_start, stop = right
    size = 2 * (middle - start)
    if right_start != middle or start % size != 0:
        return False
    return stop == min(start + size, n_replicas)
