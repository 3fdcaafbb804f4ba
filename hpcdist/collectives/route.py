"""Which algorithm sums a buffer: one pure function, so that all ranks choose alike without asking each other.

| asked for | where | algorithm |
|---|---|---|
| an algorithm by name, or one of the user's | anywhere | that one |
| AUTO, one call, a buffer in device memory | every rank has NCCL and a GPU for itself | NCCL |
| AUTO, one call, a buffer in device memory | elsewhere | as on the host, staged through pinned memory |
| AUTO, one call | host memory, one host | SHARED_MEMORY, unless MPI was measured to be clearly faster |
| AUTO, one call | host memory, several hosts | MPI below 64 KiB, else HIERARCHICAL, unless the other is much faster |
| AUTO, gradients of models on GPUs | every rank has NCCL and a GPU for itself, no order was asked for | NCCL |
| AUTO, other gradients | one host | SHARED_MEMORY: the bits do not depend on the size |
| AUTO, other gradients | several hosts | HIERARCHICAL |
| AUTO, in host memory | ranks of a host that cannot share memory | MPI |
| AUTO, SHARED_MEMORY, HIERARCHICAL: exact gradients | replicas that do not form one tree of ranks | by subtrees |
| HIERARCHICAL, sums, host memory | more than 16 hosts | the same, but halving in lanes (`slices.py`) |
| HIERARCHICAL, one call, in device memory | every host has as many ranks | NCCL in the host, MPI between hosts |
| HIERARCHICAL, gradients of models on GPUs | as AUTO takes NCCL, and every host has as many ranks | the same |
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.ops import SUM, Op
from hpcdist.collectives.options import AllReduceAlgorithm, CommunicationOptions
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.plan.placement import Placement
from hpcdist.plan.replicas import ReplicaPlan

#: Smaller calls do not cause a measurement, and go as the smallest measured size does.
SMALLEST_BYTES = 4096
#: From this size on sums over several hosts are expected to be the fastest in lanes: below it latencies count.
LANE_BYTES = 64 << 10
#: On more hosts than this each rank sends few long messages instead of one to every host: benchmarks/simulate.py.
DIRECT_HOSTS = 16
#: The other algorithm replaces the expected one where it is this much faster in three rounds of four.
MARGIN = 1.1
#: What NCCL can carry; names of its constants are in gpu/nccl.py.
NCCL_OPS = ("sum", "min", "max", "product")
NCCL_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
#: Algorithms that combine gradients in the binary tree over replicas wherever hosts hold aligned replicas.
_ORDERED = (Implementation.SHARED_MEMORY, Implementation.HIERARCHICAL)
_MAY_BE_ORDERED = (Implementation.AUTO, *_ORDERED)


@dataclass(frozen=True)
class GroupFacts:
    """What a choice depends on besides the buffer; equal on all ranks of a group.

    Attributes:
        placement: which ranks share a host.
        can_share_memory: whether the ranks of every host can share memory.
        has_nccl: whether every rank has NCCL and a GPU for itself; None where nobody has looked yet.
        table: (bytes, algorithm) rows, ascending, as measured: from that many bytes on the algorithm is the fastest.
            Smaller buffers go as the first row says. None before it was measured.
    """

    placement: Placement
    can_share_memory: bool
    has_nccl: bool | None = None
    table: tuple[tuple[int, Implementation], ...] | None = None


@dataclass(frozen=True)
class Route:
    """How a buffer is summed.

    Attributes:
        algorithm: a built-in algorithm, or the user's.
        is_on_device: whether the buffer stays in device memory. Otherwise a device buffer is staged through the host.
        is_ordered: whether values are combined in the binary tree over replicas, whatever the placement.
        by_subtrees: whether ranks contribute sums of subtrees of replicas instead of one value each.
        is_overlapped: whether gradients are summed in a background thread while backward runs.
        wire_dtype: half precision that elements travel in between hosts; None for their own dtype.
    """

    algorithm: Implementation | AllReduceAlgorithm
    is_on_device: bool = False
    is_ordered: bool = False
    by_subtrees: bool = False
    is_overlapped: bool = False
    wire_dtype: str | None = None

    @property
    def is_in_replica_order(self) -> bool:
        """Whether the sum has the bits of the binary tree over replicas."""
        return self.is_ordered or self.by_subtrees

    @property
    def name(self) -> str:
        """The algorithm's name, as checkpoints record it."""
        if isinstance(self.algorithm, Implementation):
            return self.algorithm.value
        return type(self.algorithm).__name__


def choose_route(
    facts: GroupFacts,
    options: CommunicationOptions,
    op: Op,
    nbytes: int,
    device_dtype: str | None = None,
    replicas: ReplicaPlan | None = None,
) -> Route:
    """Return how a buffer is summed. Pure.

    Args:
        facts: facts of the group.
        options: choices of the user.
        op: the reduction.
        nbytes: bytes of the buffer.
        device_dtype: name of the dtype of a buffer in device memory, for gradients of any dtype; None for a buffer in
            host memory, of any dtype.
        replicas: for gradients, which rank holds which replicas; None for a plain call, whose order is free.
    """
    requested = Implementation.parse(options.implementation)
    if not isinstance(requested, Implementation):
        has_several_hosts = len(facts.placement.hosts) > 1
        return Route(requested, is_overlapped=replicas is not None and has_several_hosts)
    if replicas is not None:
        return _route_of_gradients(facts, options, requested, replicas, device_dtype is not None)
    if requested is Implementation.NCCL:
        return Route(requested, is_on_device=True)
    may_be_nccl = facts.has_nccl and requested in (Implementation.AUTO, Implementation.HIERARCHICAL)
    if may_be_nccl and device_dtype in NCCL_DTYPES and op.name in NCCL_OPS:
        is_by_lanes = (
            requested is Implementation.HIERARCHICAL
            and op.name == "sum"
            and facts.placement.is_even
        )
        device_algorithm = Implementation.HIERARCHICAL if is_by_lanes else Implementation.NCCL
        return Route(device_algorithm, is_on_device=True)
    chosen = _fastest(facts, nbytes) if requested is Implementation.AUTO else requested
    is_ordered = chosen in _ORDERED and facts.placement.is_aligned
    return Route(chosen, is_ordered=is_ordered)


def auto_routes(facts: GroupFacts) -> list[tuple[float, Route]]:
    """Return what AUTO chooses for one call in host memory. Pure.

    Returns:
        (end_bytes, route) rows, ascending: a buffer is summed by the first row that ends beyond its bytes.
    """
    options = CommunicationOptions()
    starts = {0, LANE_BYTES}
    for least_bytes, _ in facts.table or ():
        starts.add(least_bytes)
    end_bytes = float("inf")
    rows: list[tuple[float, Route]] = []
    for start_bytes in sorted(starts, reverse=True):
        route = choose_route(facts, options, SUM, start_bytes)
        if not rows or rows[0][1] != route:
            rows.insert(0, (end_bytes, route))
        end_bytes = start_bytes
    return rows


def _route_of_gradients(
    facts: GroupFacts,
    options: CommunicationOptions,
    requested: Implementation,
    replicas: ReplicaPlan,
    is_on_gpu: bool,
) -> Route:
    """Return the route of every bucket: sums in the order of replicas have the same bits for any bucket size.

    NCCL chooses its own order, so AUTO and HIERARCHICAL take it only where no order was asked for. A fixed number of
    replicas asks for one.
    """
    chosen = requested
    n_hosts = len(facts.placement.hosts)
    is_free = options.is_ordered is not True and options.wire_dtype is None
    may_be_nccl = is_on_gpu and bool(facts.has_nccl) and is_free
    if requested is Implementation.HIERARCHICAL and may_be_nccl and facts.placement.is_even:
        return Route(requested, is_on_device=True, is_overlapped=True)
    if requested is Implementation.AUTO and may_be_nccl:
        requested = chosen = Implementation.NCCL
    elif requested is Implementation.AUTO:
        local = Implementation.SHARED_MEMORY if n_hosts == 1 else Implementation.HIERARCHICAL
        chosen = local if facts.can_share_memory else Implementation.MPI
    is_ordered = chosen in _ORDERED and facts.placement.is_aligned
    if chosen is Implementation.HIERARCHICAL and options.is_ordered is not None:
        is_ordered = options.is_ordered
    is_exact = options.wire_dtype is None and options.is_ordered is not False
    may_be_by_subtrees = requested in _MAY_BE_ORDERED and is_exact
    has_wire = chosen is Implementation.HIERARCHICAL and n_hosts > 1
    return Route(
        chosen,
        is_on_device=chosen is Implementation.NCCL,
        is_ordered=is_ordered,
        by_subtrees=may_be_by_subtrees and not replicas.is_one_tree_of_ranks,
        is_overlapped=n_hosts > 1 or chosen is Implementation.NCCL,
        wire_dtype=options.wire_dtype if has_wire else None,
    )


def goes_by_halving(placement: Placement) -> bool:
    """Return whether sums between hosts go by recursive halving, without chunks. Pure.

    Halving sums in the order of the tree over hosts. This is the order of the tree over ranks where hosts are aligned
    and have the same number of ranks.
    """
    has_right_order = placement.is_even or not placement.is_aligned
    return len(placement.hosts) > DIRECT_HOSTS and has_right_order


def candidates(placement: Placement, nbytes: int) -> tuple[Implementation, Implementation]:
    """Return (the algorithm that is expected to be the fastest, the other one) for a host buffer. Pure.

    Inside a host our algorithm moves the fewest bytes, without messages. Between hosts MPI has the fewest latencies,
    and our algorithm moves the fewest bytes.
    """
    if len(placement.hosts) == 1:
        return Implementation.SHARED_MEMORY, Implementation.MPI
    if nbytes < LANE_BYTES:
        return Implementation.MPI, Implementation.HIERARCHICAL
    return Implementation.HIERARCHICAL, Implementation.MPI


def is_clearly_faster(times: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> bool:
    """Return whether an algorithm is to be taken instead of the expected one, by times of the same rounds. Pure."""
    return bool(np.quantile(expected / times, 0.25) > MARGIN)


def _fastest(facts: GroupFacts, nbytes: int) -> Implementation:
    """Return the algorithm that is the fastest for a host buffer of this size, as measured, else as expected."""
    if not facts.can_share_memory or facts.placement.size == 1:
        return Implementation.MPI
    if facts.table is None:
        return candidates(facts.placement, nbytes)[0]
    _, fastest = facts.table[0]
    for least_bytes, algorithm in facts.table:
        if nbytes >= least_bytes:
            fastest = algorithm
    return fastest
