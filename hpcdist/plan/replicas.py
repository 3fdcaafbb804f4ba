"""Which rank holds which replicas, and which partial sums it keeps of them: the tree over replicas, cut among ranks."""

from dataclasses import dataclass
from functools import cached_property

from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.tree import Partial, plan_additions, plan_partials, plan_row_additions


@dataclass(frozen=True)
class ReplicaPlan:
    """Replicas dealt to ranks in blocks, in the order of their numbers.

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
    def partials(self) -> tuple[tuple[Partial, ...], ...]:
        """The subtrees that each rank sums by itself."""
        return tuple(tuple(plan_partials(self.of_rank(rank), self.n_replicas)) for rank in range(self.n_ranks))

    @cached_property
    def additions(self) -> tuple[tuple[int, int], ...]:
        """(into, row) pairs over the partials of all ranks, rank by rank; the sum is left in row 0."""
        return tuple(plan_additions([partial for of_rank in self.partials for partial in of_rank]))

    @cached_property
    def is_plain(self) -> bool:
        """Whether every rank has one partial, and these are combined as ranks are: a plain ordered all-reduce will do.

        >>> ReplicaPlan(8, 4).is_plain, ReplicaPlan(8, 3).is_plain, ReplicaPlan(6, 3).is_plain
        (True, False, True)
        """
        has_one_each = all(len(of_rank) == 1 for of_rank in self.partials)
        return has_one_each and self.additions == tuple(plan_row_additions(self.n_ranks))


def is_joint(left: Partial, right: Partial, n_replicas: int) -> bool:
    """Return whether two neighbouring subtrees are the two halves of one.

    >>> is_joint((0, 2), (2, 4), 8), is_joint((2, 4), (4, 6), 8), is_joint((4, 6), (6, 7), 7)
    (True, False, True)
    """
    distance = left[1] - left[0]
    return left[1] == right[0] and left[0] % (2 * distance) == 0 and right[1] == min(left[0] + 2 * distance, n_replicas)
