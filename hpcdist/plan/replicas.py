"""Which rank holds which replicas, and the one order in which replicas are summed, whatever the placement.

The order is a binary tree over the replica ids. Over N replicas it joins [i, i+d) and [i+d, i+2d) for d = 1, 2, 4, ...
and i a multiple of 2d; at the right end subtrees are shorter. A subtree is named by its (start, stop). A rank keeps the
sums of the subtrees that its own replicas make up, and sends nothing smaller.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcdist.plan.blocks import block_bounds

Subtree = tuple[int, int]


def plan_subtrees(replicas: Iterable[int], n_replicas: int) -> list[Subtree]:
    """Return the fewest subtrees that cover a set of replicas exactly: what their holder can sum by itself.

    >>> plan_subtrees([3, 4, 5], 8)
    [(3, 4), (4, 6)]
    >>> plan_subtrees([4, 5, 6], 7)
    [(4, 7)]
    """
    parts = {replica: replica + 1 for replica in replicas}
    # a part of more than that is none of theirs
    for distance in _distances(min(n_replicas, 2 * len(parts))):
        for start in [start for start in parts if start % (2 * distance) == 0]:
            middle = min(start + distance, n_replicas)
            right = min(start + 2 * distance, n_replicas)
            if middle < right and parts.get(start) == middle and parts.get(middle) == right:
                parts[start] = parts.pop(middle)
    return sorted(parts.items())


def is_subtree(start: int, stop: int, n_replicas: int) -> bool:
    """Return whether consecutive replicas are one subtree.

    >>> is_subtree(4, 6, 8), is_subtree(3, 5, 8), is_subtree(4, 7, 7)
    (True, False, True)
    """
    distance = 1 << (stop - start - 1).bit_length()
    return start % distance == 0 and (stop - start == distance or stop == n_replicas)


def plan_additions(subtrees: Sequence[Subtree]) -> list[tuple[int, int]]:
    """Return (into, row) pairs: adding rows in this order leaves the sum of all replicas in the row of replica 0.

    Args:
        subtrees: of each row; together they cover [0, N) once, in any order.

    >>> plan_additions([(0, 1), (1, 2), (2, 4)])
    [(0, 1), (0, 2)]
    """
    rows = {start: row for row, (start, _) in enumerate(subtrees)}
    n_replicas = max(stop for _, stop in subtrees)
    additions = []
    for distance in _distances(n_replicas):
        for start in range(0, n_replicas, 2 * distance):
            if start in rows and start + distance in rows:
                additions.append((rows[start], rows.pop(start + distance)))
    return additions


def _distances(n_replicas: int) -> list[int]:
    return [1 << level for level in range((n_replicas - 1).bit_length())]


def plan_row_additions(n_rows: int) -> list[tuple[int, int]]:
    """Return the (into, row) pairs of the tree over consecutive rows; the sum is left in row 0."""
    return plan_additions([(row, row + 1) for row in range(n_rows)]) if n_rows else []


@dataclass(frozen=True)
class ReplicaPlan:
    """Replicas given to ranks in blocks, in the order of their ids.

    Attributes:
        n_replicas: of the job. n_ranks: that hold them; at most as many.
    """

    n_replicas: int
    n_ranks: int

    def of_rank(self, rank: int) -> range:
        """Return the replicas of a rank.

        >>> [list(ReplicaPlan(8, 3).of_rank(rank)) for rank in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
        """
        return range(*block_bounds(self.n_replicas, self.n_ranks, rank))

    @cached_property
    def subtrees(self) -> tuple[tuple[Subtree, ...], ...]:
        """The subtrees that each rank sums by itself."""
        return tuple(
            tuple(plan_subtrees(self.of_rank(rank), self.n_replicas))
            for rank in range(self.n_ranks)
        )

    @cached_property
    def additions(self) -> tuple[tuple[int, int], ...]:
        """(into, row) pairs over the subtrees of all ranks, rank by rank; the sum is left in row 0."""
        return tuple(plan_additions([subtree for of_rank in self.subtrees for subtree in of_rank]))

    @cached_property
    def is_one_tree_of_ranks(self) -> bool:
        """Whether every rank has one subtree, and these are combined as ranks are: an ordered all-reduce will do.

        >>> [ReplicaPlan(8, 4).is_one_tree_of_ranks, ReplicaPlan(8, 3).is_one_tree_of_ranks]
        [True, False]
        """
        has_one_each = all(len(of_rank) == 1 for of_rank in self.subtrees)
        return has_one_each and self.additions == tuple(plan_row_additions(self.n_ranks))


def is_joint(left_subtree: Subtree, right: Subtree, n_replicas: int) -> bool:
    """Return whether two neighbouring subtrees are the two halves of one.

    >>> is_joint((0, 2), (2, 4), 8), is_joint((2, 4), (4, 6), 8), is_joint((4, 6), (6, 7), 7)
    (True, False, True)
    """
    distance = left_subtree[1] - left_subtree[0]
    return (
        left_subtree[1] == right[0]
        and left_subtree[0] % (2 * distance) == 0
        and right[1] == min(left_subtree[0] + 2 * distance, n_replicas)
    )
