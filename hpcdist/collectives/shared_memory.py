"""All-reduce inside one node through shared memory, by the ranks of a group; see `node_sums.py`."""

from typing import Any

import numpy.typing as npt

from hpcdist.collectives.group import Group
from hpcdist.collectives.node_sums import NodeSums, difference_of, stage_bytes
from hpcdist.collectives.ops import SUM, Op, divide
from hpcdist.collectives.staging import mark_of
from hpcdist.errors import ConfigurationError
from hpcdist.runtime.node_window import NodeWindow


def all_reduce(
    array: npt.NDArray[Any],
    group: Group,
    op: Op = SUM,
    divisor: float | None = None,
) -> None:
    """Replace `array` by its reduction over all ranks, which share one node.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes; compared.

    Args:
        array: C-contiguous, of numbers, on the host, private to the rank; overwritten.
        group: ranks on one host.
        op: the reduction. Ranks are combined in a binary tree over their numbers: same bits on all ranks and in every
            run.
        divisor: number that the result is divided by, while it is in the cache, each rank its slice; equal on all
            ranks.

    Raises:
        ConfigurationError: when the group is on several hosts; on every rank.
        DesyncError: when ranks differ in op, dtype or count; on every rank.
        CollectiveFailed: when memory cannot be shared; on every rank.

    Cost: two barriers per chunk, which takes 3 MiB on all ranks together; main memory sees 2n bytes per rank, with
        n = array.nbytes, the caches about 4n. No copy of the array is made.

    Source: the slices of Bayatpour et al., DPML (SC17, doi 10.1145/3126908.3126954); ours leaves the owner's slice
        where it is, and keeps the shared memory smaller than the cache.
    """
    if len(group.placement.hosts) > 1:
        raise ConfigurationError(
            f"all_reduce: expected all ranks on one host for SHARED_MEMORY, got {len(group.placement.hosts)} hosts; "
            f"ask for HIERARCHICAL or AUTO."
        )
    if group.size == 1:
        if divisor is not None:
            divide(array, divisor)
        return
    sums: NodeSums | None = group.peek(NodeSums)
    if sums is None:
        require_same(array, op, group)  # sharing memory blocks: nobody may be elsewhere
        sums = group.keep(NodeSums, lambda: _make_sums(group))
    sums.all_reduce(array, op, divisor)


def _make_sums(group: Group) -> NodeSums:
    """Return the sums of a group on one host. Collective over `group.comm`."""
    window = NodeWindow(group.node_comm, stage_bytes(group.size), group.world)
    return NodeSums(group.barrier, window.pieces, group.rank, group.names)


def require_same(array: npt.NDArray[Any], op: Op, group: Group) -> None:
    """Raise DesyncError on every rank of a host when they are not about to make the same call.

    Collective over the ranks of the host.
    """
    marks = group.barrier.wait(mark_of(array.size, array.dtype) | op.code)
    if marks is not None:
        error = difference_of(marks, group.names)
        error.is_agreed = len(group.placement.hosts) == 1
        raise error
