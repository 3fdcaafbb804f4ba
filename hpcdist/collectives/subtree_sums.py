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
    rows: list[Array],
    result: Array,
    group: Group,
    plan: ReplicaPlan,
    divisor: float | None = None,
) -> None:
    """Put the sum of all ranks' rows into `result`, added in the tree over replicas.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes; numbers of rows differ.

    It sleeps while it waits, as it may run beside a backward pass that needs the core.

    Args:
        rows: this rank's sums, one for each of its `plan.subtrees`, flat; unchanged.
        result: flat array of the rows' size and dtype; overwritten; may be one of the rows.
        group: the ranks.
        plan: which rank holds which replicas.
        divisor: number that the sum is divided by, each rank its block; equal on all ranks.

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
        n_owned = sizes[group.rank]
        sent_parts: list[Array] = []
        for block_start, block_stop in blocks:
            for row in rows:
                sent_parts.append(row[start + block_start : start + block_stop])
        sent = np.concatenate(sent_parts)
        sent_counts = [len(rows) * size for size in sizes]
        received = np.empty((sum(n_rows), n_owned), chunk.dtype)
        received_counts = [n * n_owned for n in n_rows]
        request = group.comm.Ialltoallv([sent, sent_counts], [received, received_counts])
        group.wait([request], SLEEP_S)
        add_rows(list(received), plan.additions, np.add)
        block_sum = received[0]
        if divisor is not None:
            divide(block_sum, divisor)
        request = group.comm.Iallgatherv(block_sum, [chunk, sizes])
        group.wait([request], SLEEP_S, buffers=[block_sum, chunk])
