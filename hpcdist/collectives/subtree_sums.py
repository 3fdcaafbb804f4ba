"""All-reduce where ranks hold sums of subtrees of replicas, not one value each, added in the order of the tree."""

import numpy as np

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import divide
from hpcdist.collectives.staging import Array, add_rows
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.runtime.waiting import SLEEP_S

#: Bytes of one row that travel at a time.
CHUNK_BYTES = 1 << 20


def all_reduce(
    rows: list[Array], result: Array, group: Group, plan: ReplicaPlan, divisor: float | None = None
) -> None:
    """Put the sum of all ranks' rows into `result`, added in the tree over replicas.

    Collective: `group.comm`. Blocking. Same shape and dtype required on every rank: yes; the numbers of rows differ.

    It sleeps while it waits, as it may run beside a backward pass that needs the core.

    Args:
        rows: this rank's sums, one for each of its `plan.subtrees`, flat; unchanged.
        result: flat, of their size and dtype; overwritten; may be one of the rows.
        group: the ranks.
        plan: who holds which replicas.
        divisor: what the sum is divided by, each rank its block; equal on all.

    Cost: with k rows here, (k + 1)(P-1)/P * n elements sent, P the ranks: (k + 1) / 2 times a plain all-reduce. A chunk
        of all ranks' rows in memory.
    """
    n_rows = [len(subtrees) for subtrees in plan.subtrees]
    n_chunk = max(1, CHUNK_BYTES // result.itemsize)
    for start in range(0, result.size, n_chunk):
        chunk = result[start : start + n_chunk]
        blocks = [block_bounds(chunk.size, group.size, rank) for rank in range(group.size)]
        sizes = [block_stop - block_start for block_start, block_stop in blocks]
        # each rank adds up the block that it owns of every rank's rows, and gives its sum to all
        sent = np.concatenate(
            [row[start : start + n_chunk][slice(*block)] for block in blocks for row in rows]
        )
        received = np.empty((sum(n_rows), sizes[group.rank]), chunk.dtype)
        parts = [received, [n * sizes[group.rank] for n in n_rows]]
        group.wait(
            [group.comm.Ialltoallv([sent, [len(rows) * size for size in sizes]], parts)], SLEEP_S
        )
        add_rows(list(received), plan.additions, np.add)
        if divisor is not None:
            divide(received[0], divisor)
        group.wait([group.comm.Iallgatherv(received[0], [chunk, sizes])], SLEEP_S)
