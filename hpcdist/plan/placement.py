"""Which ranks share a host, and what follows from it: lanes between hosts, subtrees of hosts, who sends what.

A lane is one rank of each host. The ranks of a host sum what they can in shared memory; each then carries its slice
across hosts in its lane.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpcdist.plan.replicas import Subtree, is_subtree, plan_additions, plan_subtrees

Additions = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placement:
    """Ranks of a communicator by host.

    Attributes:
        hosts: the ranks of each host, ascending; hosts in the order of their lowest rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def size(self) -> int:
        """All ranks."""
        return sum(len(ranks) for ranks in self.hosts)

    @cached_property
    def n_lanes(self) -> int:
        """Ranks of each host that carry a slice across hosts: as many as the smallest host has."""
        return min(len(ranks) for ranks in self.hosts)

    @property
    def is_even(self) -> bool:
        """Whether every host has as many ranks, so that every rank has a lane."""
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
        blocks = [(ranks[0], ranks[-1] + 1, len(ranks)) for ranks in self.hosts]
        return all(
            stop - start == n and is_subtree(start, stop, self.size) for start, stop, n in blocks
        )


def plan_placement(lowest: Sequence[int]) -> Placement:
    """Return the placement of ranks, given for each rank the lowest rank on its host."""
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(lowest):
        hosts.setdefault(host, []).append(rank)
    return Placement(tuple(tuple(hosts[host]) for host in sorted(hosts)))


@dataclass(frozen=True)
class LanePlan:
    """How the rows of one host become one sum; a row is one rank's slice, or a partial sum of several.

    Attributes:
        local_additions: (into, row) over the host's ranks.
        retained_rows: the ranks of the host whose rows then hold its partial sums; the first is rank 0 of the host.
        arriving: for each host how many rows it sends to the owner of a part.
        additions: (into, row) over all arriving rows, host by host; the sum is left in row `root`.
        root: see `additions`.
    """

    local_additions: Additions
    retained_rows: tuple[int, ...]
    arriving: tuple[int, ...]
    additions: Additions
    root: int


def plan_lanes(placement: Placement, host: int, is_ordered: bool) -> LanePlan:
    """Return what one host's ranks do.

    Args:
        placement: which ranks share a host.
        host: the host.
        is_ordered: sum in the tree over the replicas, for which unaligned hosts send several subtrees; else each host
            sums all its rows in the tree over its own ranks, and hosts are summed in the tree over hosts.
    """
    if is_ordered:
        subtrees = _subtrees_of_hosts(placement)
        groups = [range(start, stop) for start, stop in subtrees[host]]
        positions = [
            [placement.hosts[host].index(replica) for replica in group] for group in groups
        ]
    else:
        subtrees = [[(number, number + 1)] for number in range(len(placement.hosts))]
        positions = [list(range(len(placement.hosts[host])))]
    arriving = [subtree for rows in subtrees for subtree in rows]
    return LanePlan(
        tuple(pair for group in positions for pair in _tree(group)),
        tuple(group[0] for group in positions),
        tuple(len(rows) for rows in subtrees),
        tuple(plan_additions(arriving)),
        min(range(len(arriving)), key=lambda row: arriving[row][0]),
    )


def _subtrees_of_hosts(placement: Placement) -> list[list[Subtree]]:
    if placement.is_aligned:
        return [[(ranks[0], ranks[-1] + 1)] for ranks in placement.hosts]
    return [placement.subtrees(number) for number in range(len(placement.hosts))]


def _tree(positions: list[int]) -> list[tuple[int, int]]:
    """Return the (into, row) pairs of the tree over consecutive replicas at these positions on their host."""
    pairs = plan_additions([(number, number + 1) for number in range(len(positions))])
    return [(positions[into], positions[row]) for into, row in pairs]
