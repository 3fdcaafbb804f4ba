"""All-reduce by recursive halving and doubling."""

from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.rounds import run_schedule
from hpcdist.plan.schedules import plan_halving


def all_reduce(array: npt.NDArray[Any], group: Group, op: Op = SUM) -> None:
    """Replace `array` by its reduction over all ranks.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Args:
        array: C-contiguous, of numbers, on the host; overwritten.
        group: any size >= 1.
        op: the reduction, combined in the binary tree over the ranks.

    Cost: 2 log2 P rounds, and 2(P-1)/P * n elements sent on average; see `plan_halving`.

    Source: Rabenseifner, ICCS 2004, doi 10.1007/978-3-540-24685-5_1; nearest ranks first.
    """
    flat = array.reshape(-1)
    run_schedule(plan_halving(group.size, group.rank, flat.size), flat, group, op)
