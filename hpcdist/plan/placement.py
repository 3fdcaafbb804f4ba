"""Which ranks share a host, and the plans that follow: lanes between hosts, subtrees of hosts, rows that hosts send.

A lane is one rank of each host. The ranks of a host sum what they can in shared memory; each then carries its slice
across hosts in its lane.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcdist.plan.replicas import (
    Addition,
    Subtree,
    is_subtree,
    plan_additions,
    plan_row_additions,
    plan_subtrees,
)

Additions = tuple[Addition, ...]


@dataclass(frozen=True)
class Placement:
    """Ranks of a communicator by host.

    Attributes:
        hosts: ranks of each host, ascending; hosts are in the order of their lowest ranks.
    """

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @cached_property
    def n_lanes(self) -> int:
        """Number of ranks of each host that carry a slice across hosts: the number of ranks of the smallest host."""
        return min(map(len, self.hosts))

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of ranks, so that every rank has a lane."""
        return self.n_lanes * len(self.hosts) == self.size

    def host_of(self, rank: int) -> int:
        """Return the number of the host that a rank is on."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    def subtrees(self, host: int) -> list[Subtree]:
        """Return the subtrees of replicas that a host can sum by itself; one rank holds one replica."""
        return plan_subtrees(self.hosts[host], self.size)

    @cached_property
    def is_aligned(self) -> bool:
        """Whether every host's replicas are one subtree, so that the ordered sum sends no more than an unordered one.

        >>> Placement(((0, 1), (2, 3), (4, 5))).is_aligned, Placement(((0, 1, 2), (3, 4, 5))).is_aligned
        (True, False)
        """
        for ranks in self.hosts:
            start, stop = _span(ranks)
            is_block = stop - start == len(ranks)
            if not is_block or not is_subtree(start, stop, self.size):
                return False
        return True


def plan_placement(lowest: Sequence[int]) -> Placement:
    """Return the placement of ranks, given for each rank the lowest rank on its host."""
    ranks_of_hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(lowest):
        ranks_of_hosts.setdefault(host, []).append(rank)
    hosts: list[tuple[int, ...]] = []
    for _, ranks in sorted(ranks_of_hosts.items()):
        hosts.append(tuple(ranks))
    return Placement(tuple(hosts))


@dataclass(frozen=True)
class LanePlan:
    """How the rows of one host become one sum; a row is one rank's slice, or a partial sum of several.

    Attributes:
        local_additions: (into, row) pairs over the host's ranks.
        retained_rows: ranks of the host whose rows then hold its partial sums; the first is rank 0 of the host.
        arriving: number of rows that each host sends to the owner of a part.
        additions: (into, row) pairs over all arriving rows, host by host.
        root: arriving row that holds the sum after these additions.
    """

    local_additions: Additions
    retained_rows: tuple[int, ...]
    arriving: tuple[int, ...]
    additions: Additions
    root: int


def plan_lanes(
    placement: Placement,
    host: int,
    is_ordered: bool,
) -> LanePlan:
    """Return the plan of one host's ranks.

    Args:
        placement: which ranks share a host.
        host: the host.
        is_ordered: whether to sum in the tree over the replicas, for which unaligned hosts send several subtrees. If
            not, each host sums all its rows in the tree over its ranks, and hosts are summed in the tree over hosts.
    """
    ranks = placement.hosts[host]
    if is_ordered:
        subtrees = _subtrees_of_hosts(placement)
        groups = [_positions(ranks, subtree) for subtree in subtrees[host]]
    else:
        n_hosts = len(placement.hosts)
        subtrees = [[(number, number + 1)] for number in range(n_hosts)]
        groups = [list(range(len(ranks)))]
    local_additions: list[Addition] = []
    retained_rows: list[int] = []
    for group in groups:
        local_additions += _tree(group)
        retained_rows.append(group[0])
    arriving = list(itertools.chain.from_iterable(subtrees))
    starts = [start for start, _ in arriving]
    return LanePlan(
        local_additions=tuple(local_additions),
        retained_rows=tuple(retained_rows),
        arriving=tuple(map(len, subtrees)),
        additions=tuple(plan_additions(arriving)),
        root=starts.index(min(starts)),
    )


def _subtrees_of_hosts(placement: Placement) -> list[list[Subtree]]:
    """Return the subtrees that each host can sum by itself."""
    if placement.is_aligned:
        return [[_span(ranks)] for ranks in placement.hosts]
    numbers = range(len(placement.hosts))
    return list(map(placement.subtrees, numbers))


def _span(ranks: Sequence[int]) -> Subtree:
    """Return the subtree from the first to the last of ascending ranks."""
    start = ranks[0]
    stop = ranks[-1] + 1
    return start, stop


def _positions(ranks: Sequence[int], subtree: Subtree) -> list[int]:
    """Return the positions of a subtree's replicas among the ranks of their host."""
    start, stop = subtree
    return [ranks.index(replica) for replica in range(start, stop)]


def _tree(positions: list[int]) -> list[Addition]:
    """Return the (into, row) pairs of the tree over consecutive replicas at these positions on their host."""
    pairs = plan_row_additions(len(positions))
    return [(positions[into], positions[row]) for into, row in pairs]
