"""Schedules of messages: which elements one rank sends to whom in which round. The ring, and recursive halving.

A schedule is data, so that it can be tested for any number of ranks in one process; collectives/rounds.py runs it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcdist.plan.blocks import Bounds, block_bounds


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of the buffer, to or from a peer rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """Messages that one rank sends and receives before the next round begins.

    Attributes:
        sends: messages to other ranks, of the buffer as it is when the round begins.
        receives: messages from other ranks.
        is_sum: whether received elements are added to the elements of the buffer; else they replace them.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    is_sum: bool = False


#: The rounds of one rank, in their order. A ring's are made one by one: a job of 65,536 ranks has 131,070.
Schedule = Iterable[Round]


def make_round(
    sends: Iterable[Message],
    receives: Iterable[Message],
    is_sum: bool,
) -> Round:
    """Return a round without its empty messages."""
    return Round(_full(sends), _full(receives), is_sum)


def _full(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages that have elements."""
    return tuple(message for message in messages if message.start < message.stop)


def n_elements_sent(schedule: Schedule) -> int:
    """Return the elements that a rank sends in a schedule."""
    n_elements = 0
    for planned_round in schedule:
        for message in planned_round.sends:
            n_elements += message.stop - message.start
    return n_elements


def plan_ring(
    size: int,
    rank: int,
    n_elements: int,
) -> Iterator[Round]:
    """Yield the rounds of one rank: 2(P-1) rounds, in which it sends all chunks but one, twice.

    In round k of the reduce-scatter rank r passes on the running sum of chunk r-k; at its end rank r holds the sum of
    chunk r+1. Chunk c is summed in the order c, c+1, ...: it starts at another rank for each chunk, so the bits depend
    on the number of ranks.

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, doi 10.1016/j.jpdc.2008.09.002.
    """
    after = (rank + 1) % size
    before = (rank - 1) % size

    def to(chunk: int) -> list[Message]:
        start, stop = block_bounds(n_elements, size, chunk % size)
        return [Message(after, start, stop)]

    def of(chunk: int) -> list[Message]:
        start, stop = block_bounds(n_elements, size, chunk % size)
        return [Message(before, start, stop)]

    for k in range(size - 1):
        sends = to(rank - k)
        receives = of(rank - k - 1)
        yield make_round(sends, receives, is_sum=True)
    for k in range(size - 1):
        sends = to(rank - k + 1)
        receives = of(rank - k)
        yield make_round(sends, receives, is_sum=False)


def plan_halving(
    size: int,
    rank: int,
    n_elements: int,
) -> tuple[Round, ...]:
    """Return the schedule of one rank, in which every element is summed in the binary tree over the ranks.

    Two subtrees of ranks join in each round, subtrees at distance 1 first. The elements that one rank of each subtree
    has summed are divided between the two ranks by the numbers of ranks in their subtrees. With P a power of two these
    are halves, and a rank sends 2(P-1)/P * n elements, to one peer in each of 2 log2 P rounds. Else the ranks of the
    shorter subtree, at the right end, own more each and have more peers: with P = 2^k + 1 the last rank exchanges n
    elements with all other ranks.

    Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, doi 10.1007/978-3-540-24685-5_1;
        ours begins at distance 1 instead of P/2, and divides unequally instead of folding ranks before.
    """
    summing: list[Round] = []
    spreading: list[Round] = []
    owned = [(0, n_elements)]
    distance = 1
    while distance < size:
        start = rank // (2 * distance) * 2 * distance
        middle = start + distance
        stop = min(start + 2 * distance, size)
        if middle < stop:
            is_left = rank < middle
            other_subtree = (start, middle)
            if is_left:
                other_subtree = (middle, stop)
            retained_parts: list[Message] = []
            ceded_parts: list[Message] = []
            for peer, first, last in _shared_with(other_subtree, owned, n_elements):
                n_shared = last - first
                cut = first + n_shared * distance // (stop - start)
                left_part = Message(peer, first, cut)
                right_part = Message(peer, cut, last)
                if is_left:
                    retained_parts.append(left_part)
                    ceded_parts.append(right_part)
                else:
                    retained_parts.append(right_part)
                    ceded_parts.append(left_part)
            summing.append(make_round(ceded_parts, retained_parts, is_sum=True))
            spreading.append(make_round(retained_parts, ceded_parts, is_sum=False))
            owned = [(part.start, part.stop) for part in _full(retained_parts)]
        distance *= 2
    return (*summing, *reversed(spreading))


def _shared_with(
    subtree: Bounds,
    owned: Iterable[Bounds],
    n_elements: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, stop) for the parts of owned elements that one rank of a subtree has summed."""
    for start, stop in owned:
        first = start
        while first < stop:
            peer, _, peer_stop = _owner(subtree, first, n_elements)
            last = min(peer_stop, stop)
            yield peer, first, last
            first = last


def _owner(
    subtree: Bounds,
    element: int,
    n_elements: int,
) -> tuple[int, int, int]:
    """Return the rank that has summed an element over its subtree, and (start, stop) of the elements around it."""
    first, end = subtree
    size = end - first
    is_power_of_two = size & (size - 1) == 0
    if is_power_of_two:
        start = 0
        stop = n_elements
        distance = 1
        while distance < size:
            middle = (start + stop) // 2
            if element < middle:
                stop = middle
            else:
                start = middle
                first += distance
            distance *= 2
        return first, start, stop
    n_left = 1 << (size.bit_length() - 1)
    middle_rank = first + n_left
    left_rank, left_start, left_stop = _owner((first, middle_rank), element, n_elements)
    right_rank, right_start, right_stop = _owner((middle_rank, end), element, n_elements)
    start = max(left_start, right_start)
    stop = min(left_stop, right_stop)
    n_shared = stop - start
    cut = start + n_shared * n_left // size
    if element < cut:
        return left_rank, start, cut
    return right_rank, cut, stop
