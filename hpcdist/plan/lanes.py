"""Two levels: ranks of a host sum what they can, then each local rank carries its slice across hosts in its lane."""

from dataclasses import dataclass

from hpcdist.plan.placement import Placement
from hpcdist.plan.tree import plan_additions

Additions = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LanePlan:
    """How the rows of one host become one sum; a row is one rank's slice, or a partial sum of several.

    Attributes:
        local_additions: (into, row) over the host's ranks.
        kept: the ranks of the host whose rows then hold its partial sums; the first is rank 0 of the host.
        arriving: for each host how many rows it sends to the owner of a part.
        additions: (into, row) over all arriving rows, host by host; the sum is left in row `root`.
        root: see `additions`.
    """

    local_additions: Additions
    kept: tuple[int, ...]
    arriving: tuple[int, ...]
    additions: Additions
    root: int


def plan_lanes(placement: Placement, host: int, is_ordered: bool) -> LanePlan:
    """Return what one host's ranks do.

    Args:
        placement: which ranks share a host.
        host: the host.
        is_ordered: sum in the tree over the replicas, for which unaligned hosts send several partials; else each host
            sums all its rows in the tree over its own ranks, and hosts are summed in the tree over hosts.
    """
    if is_ordered:
        partials = [placement.partials(number) for number in range(len(placement.hosts))]
        groups = [range(start, stop) for start, stop in partials[host]]
        places = [[placement.hosts[host].index(replica) for replica in group] for group in groups]
    else:
        partials = [[(number, number + 1)] for number in range(len(placement.hosts))]
        places = [list(range(len(placement.hosts[host])))]
    arriving = [partial for rows in partials for partial in rows]
    return LanePlan(
        tuple(pair for group in places for pair in _tree(group)),
        tuple(group[0] for group in places),
        tuple(len(rows) for rows in partials),
        tuple(plan_additions(arriving)),
        min(range(len(arriving)), key=lambda row: arriving[row][0]),
    )


def _tree(places: list[int]) -> list[tuple[int, int]]:
    """Return the (into, row) pairs of the tree over consecutive replicas that are at these places."""
    pairs = plan_additions([(number, number + 1) for number in range(len(places))])
    return [(places[into], places[row]) for into, row in pairs]
