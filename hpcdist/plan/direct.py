"""Direct exchange: everyone sends everyone its part, sums its own, and sends the sum to everyone."""

from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.schedule import Message, Schedule, make_round


def plan_direct(size: int, rank: int, n_elements: int) -> Schedule:
    """Return the schedule of one rank: two rounds of P-1 messages, 2(P-1)/P * n elements in all.

    As many bytes as a ring in the fewest rounds, and for any P the owner of a part has all its addends at hand, so they
    are summed in the binary tree over the ranks. Meant for tens of ranks: the number of messages grows with P.
    """
    others = [peer for peer in range(size) if peer != rank]
    own = block_bounds(n_elements, size, rank)
    parts = [Message(peer, *block_bounds(n_elements, size, peer)) for peer in others]
    owns = [Message(peer, *own) for peer in others]
    return make_round(parts, owns, is_sum=True), make_round(owns, parts, is_sum=False)
