"""Schedules of messages: which elements one rank sends to whom in which round. The ring, and recursive halving.

A schedule is data, so that it can be tested for any number of ranks in one process; collectives/rounds.py runs it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcdist.plan.blocks import block_bounds


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of the buffer, to or from a peer rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives before the next round begins.

    Attributes:
        sends: messages to other ranks, of the buffer as it is when the round begins.
        receives: messages from other ranks.
        is_sum: whether received elements are added to the buffer's; else they replace them.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    is_sum: bool = False


#: The rounds of one rank, in their order. A ring's are made one by one: a job of 65,536 ranks has 131,070.
Schedule = Iterable[Round]


def make_round(sends: Iterable[Message], receives: Iterable[Message], is_sum: bool) -> Round:
    """Return a round without its empty messages."""
    return Round(_full(sends), _full(receives), is_sum)


def _full(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.start < message.stop)


def n_elements_sent(schedule: Schedule) -> int:
    """Return the elements that a rank sends in a schedule."""
    return sum(message.stop - message.start for one in schedule for message in one.sends)


def plan_ring(size: int, rank: int, n_elements: int) -> Iterator[Round]:
    """Yield the rounds of one rank: 2(P-1) rounds, in which it sends all chunks but one, twice.

    In round k of the reduce-scatter rank r passes on the running sum of chunk r-k; at its end rank r holds the sum of
    chunk r+1. Chunk c is summed in the order c, c+1, ...: it starts at another rank for each chunk, so the bits depend
    on the number of ranks.

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, doi 10.1016/j.jpdc.2008.09.002.
    """
    after, before = (rank + 1) % size, (rank - 1) % size

    def to(chunk: int) -> list[Message]:
        return [Message(after, *block_bounds(n_elements, size, chunk % size))]

    def of(chunk: int) -> list[Message]:
        return [Message(before, *block_bounds(n_elements, size, chunk % size))]

    for k in range(size - 1):
        yield make_round(to(rank - k), of(rank - k - 1), is_sum=True)
    for k in range(size - 1):
        yield make_round(to(rank + 1 - k), of(rank - k), is_sum=False)


def plan_halving(size: int, rank: int, n_elements: int) -> tuple[Round, ...]:
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
    position = rank // 2 if rank < 2 * n_folded else rank - n_folded
    rounds = _exchanges(power, position, n_elements, n_folded)
    if rank < 2 * n_folded:
        folded = rank + 1
        first = make_round([], [Message(folded, 0, n_elements)], is_sum=True)
        last = make_round([Message(folded, 0, n_elements)], [], is_sum=False)
        rounds = [first, *rounds, last]
    return tuple(rounds)


def _exchanges(power: int, position: int, n_elements: int, n_folded: int) -> list[Round]:
    """Return halving and doubling among the ranks that are left; `position` counts those."""
    halving, doubling = [], []
    start, stop, distance = 0, n_elements, 1
    while distance < power:
        other = position ^ distance
        peer = 2 * other if other < n_folded else other + n_folded
        middle = (start + stop) // 2
        kept, given = ((start, middle), (middle, stop)) if position < other else ((middle, stop), (start, middle))
        halving.append(make_round([Message(peer, *given)], [Message(peer, *kept)], is_sum=True))
        doubling.append(make_round([Message(peer, *kept)], [Message(peer, *given)], is_sum=False))
        (start, stop), distance = kept, 2 * distance
    return halving + doubling[::-1]
