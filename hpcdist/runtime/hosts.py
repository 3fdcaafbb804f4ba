"""The hosts of a communicator's ranks, and the communicators that follow from them."""

from collections.abc import Callable

import numpy as np

from hpcdist.plan.placement import plan_placement
from hpcdist.runtime.mpi import MPI


class Hosts:
    """The hosts of one communicator, found by MPI's split by shared memory.

    Collective over `comm`.

    Args:
        comm: communicator of the ranks; not kept.
        wait: function of a non-blocking collective and its arrays that waits, bounded; see `World.wait`.
        node_comm: communicator of the ranks of `comm` that share a host, in their order; it belongs to this object from
            then on. Default: ranks that can share memory. Tests and simulations divide ranks in other ways.

    Attributes:
        node_comm: communicator of the ranks of this rank's host.
        lane_comm: communicator of the ranks that have this rank's local rank, one on each host; None on a rank whose
            local rank some host does not have.
        placement: says which ranks share a host.
        host: number of this rank's host.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        wait: Callable[..., None],
        node_comm: MPI.Comm | None = None,
    ) -> None:
        self.node_comm: MPI.Comm = node_comm or comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        comm_rank = np.array([comm.rank], np.int64)
        lowest = np.empty(1, np.int64)
        request = self.node_comm.Iallreduce(comm_rank, lowest, MPI.MIN)
        wait(request, comm_rank, lowest)
        all_lowest = np.empty(comm.size, np.int64)
        wait(comm.Iallgather(lowest, all_lowest))
        self.placement = plan_placement(all_lowest.tolist())
        self.host = self.placement.host_of(comm.rank)
        local_rank = self.node_comm.rank
        color = local_rank if local_rank < self.placement.n_lanes else MPI.UNDEFINED
        lane = comm.Split(color, self.host)
        self.lane_comm: MPI.Comm | None = None if lane == MPI.COMM_NULL else lane

    def free(self) -> None:
        """Free the communicators. Collective over all ranks of the communicator."""
        for comm in (self.lane_comm, self.node_comm):
            if comm is not None:
                comm.Free()
