"""The ring: reduce-scatter, then all-gather, each rank talking to its two neighbours only."""

from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.schedule import Message, Schedule, make_round


def plan_ring(size: int, rank: int, n_elements: int) -> Schedule:
    """Return the schedule of one rank: 2(P-1) rounds, in which it sends all chunks but one, twice.

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

    rounds = range(size - 1)
    return tuple(
        [make_round(to(rank - k), of(rank - k - 1), is_sum=True) for k in rounds]
        + [make_round(to(rank + 1 - k), of(rank - k), is_sum=False) for k in rounds]
    )
