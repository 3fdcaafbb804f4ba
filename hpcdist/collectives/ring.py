"""All-reduce in a ring of ranks."""

from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.rounds import run_schedule
from hpcdist.plan.schedules import plan_ring


def all_reduce(array: npt.NDArray[Any], group: Group, op: Op = SUM) -> None:
    """Replace `array` by its reduction over all ranks.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: C-contiguous, of numbers, on the host; overwritten.
        group: any size >= 1.
        op: the reduction. A chunk's sum starts at another rank for each chunk: same bits on all ranks, and in every
            run with as many ranks for arrays of the same length.

    Cost: 2(P-1) rounds; 2(P-1)/P * n elements sent per rank; scratch of n/P elements.

    Source: Patarasuk & Yuan, JPDC 2009, doi 10.1016/j.jpdc.2008.09.002; chunks are cut into segments.
    """
    flat = array.reshape(-1)
    run_schedule(plan_ring(group.size, group.rank, flat.size), flat, group, op)
