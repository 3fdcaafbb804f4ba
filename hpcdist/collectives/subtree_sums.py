"""All-reduce where ranks hold sums of subtrees of replicas, not one value each, added in the order of the tree."""

import numpy as np

from hpcdist.collectives.group import Group
from hpcdist.collectives.staging import Array, add_rows
from hpcdist.plan.blocks import block_bounds
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.runtime.waiting import SLEEP_S

#: Bytes of one row that travel at a time.
CHUNK_BYTES = 1 << 20


def all_reduce(rows: list[Array], result: Array, group: Group, plan: ReplicaPlan) -> None:
    """Put the sum of all ranks' rows into `result`, added in the tree over replicas.

    Collective: `group.comm`. Blocking. Same shape and dtype required on every rank: yes; the numbers of rows differ.

    It sleeps while it waits, as it may run beside a backward pass that needs the core.

    Args:
        rows: this rank's sums, one for each of its `plan.subtrees`, flat; unchanged.
        result: flat, of their size and dtype; overwritten; may be one of the rows.
        group: the ranks.
        plan: who holds which replicas.

    Cost: with k rows here, (k + 1)(P-1)/P * n elements sent, P the ranks: (k + 1) / 2 times a plain all-reduce. A chunk
        of all ranks' rows in memory.
    """
    n_chunk = max(1, CHUNK_BYTES // result.itemsize)
    for start in range(0, result.size, n_chunk):
        _reduce_chunk([row[start : start + n_chunk] for row in rows], result[start : start + n_chunk], group, plan)


def _reduce_chunk(rows: list[Array], result: Array, group: Group, plan: ReplicaPlan) -> None:
    bounds = [block_bounds(result.size, group.size, rank) for rank in range(group.size)]
    sizes = [stop - start for start, stop in bounds]
    start, stop = bounds[group.rank]
    sent = np.concatenate([row[slice(*of_rank)] for of_rank in bounds for row in rows])
    n_rows = [len(subtrees) for subtrees in plan.subtrees]
    received = np.empty(sum(n_rows) * (stop - start), result.dtype)
    parts = [received, [n * (stop - start) for n in n_rows]]
    group.wait([group.comm.Ialltoallv([sent, [len(rows) * size for size in sizes]], parts)], SLEEP_S)
    table = received.reshape(sum(n_rows), stop - start)
    add_rows(list(table), plan.additions, np.add)
    group.wait([group.comm.Iallgatherv(table[0], [result, sizes])], SLEEP_S)
