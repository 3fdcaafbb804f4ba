"""Which ranks share a host, and what follows from it: lanes, subtrees, bytes that leave a host."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.plan.tree import Partial, plan_partials


@dataclass(frozen=True)
class Placement:
    """Ranks of a communicator by host.

    Attributes:
        hosts: the ranks of each host, ascending; hosts in the order of their lowest rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """All ranks."""
        return sum(len(ranks) for ranks in self.hosts)

    @property
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

    def partials(self, host: int) -> list[Partial]:
        """Return the subtrees of replicas that a host can sum by itself; one rank holds one replica."""
        return plan_partials(self.hosts[host], self.size)

    @property
    def is_aligned(self) -> bool:
        """Whether every host's replicas are one subtree, so that the ordered sum sends no more than an unordered one.

        >>> Placement(((0, 1), (2, 3), (4, 5))).is_aligned, Placement(((0, 1, 2), (3, 4, 5))).is_aligned
        (True, False)
        """
        return all(len(self.partials(host)) == 1 for host in range(len(self.hosts)))


def plan_placement(lowest: Sequence[int]) -> Placement:
    """Return the placement of ranks, given for each rank the lowest rank on its host."""
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(lowest):
        hosts.setdefault(host, []).append(rank)
    return Placement(tuple(tuple(hosts[host]) for host in sorted(hosts)))
