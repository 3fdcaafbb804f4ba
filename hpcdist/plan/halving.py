"""Recursive halving and doubling: log2 P rounds each way, nearest ranks first."""

from hpcdist.plan.schedule import Message, Round, Schedule, make_round


def plan_halving(size: int, rank: int, n_elements: int) -> Schedule:
    """Return the schedule of one rank.

    With P a power of two it has 2 log2 P rounds, in which the rank sends 2(P-1)/P * n elements; ranks at distance 1
    exchange first, so every element is summed in the binary tree over the ranks. Otherwise the first 2(P-2^k) ranks
    fold to half of them before, at the price of n elements each way.

    Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, doi 10.1007/978-3-540-24685-5_1;
    ours begins at distance 1 instead of P/2.
    """
    power = 1 << (size.bit_length() - 1)
    n_folded = size - power
    if rank < 2 * n_folded and rank % 2:
        keeper = rank - 1
        give = make_round([Message(keeper, 0, n_elements)], [], is_sum=False)
        take = make_round([], [Message(keeper, 0, n_elements)], is_sum=False)
        return give, take
    place = rank // 2 if rank < 2 * n_folded else rank - n_folded
    rounds = _exchanges(power, place, n_elements, n_folded)
    if rank < 2 * n_folded:
        folded = rank + 1
        first = make_round([], [Message(folded, 0, n_elements)], is_sum=True)
        last = make_round([Message(folded, 0, n_elements)], [], is_sum=False)
        rounds = [first, *rounds, last]
    return tuple(rounds)


def _exchanges(power: int, place: int, n_elements: int, n_folded: int) -> list[Round]:
    """Return halving and doubling among the ranks that are left; `place` counts those."""
    halving, doubling = [], []
    start, stop, distance = 0, n_elements, 1
    while distance < power:
        other = place ^ distance
        peer = 2 * other if other < n_folded else other + n_folded
        middle = (start + stop) // 2
        kept, given = ((start, middle), (middle, stop)) if place < other else ((middle, stop), (start, middle))
        halving.append(make_round([Message(peer, *given)], [Message(peer, *kept)], is_sum=True))
        doubling.append(make_round([Message(peer, *kept)], [Message(peer, *given)], is_sum=False))
        (start, stop), distance = kept, 2 * distance
    return halving + doubling[::-1]
