"""Which ranks of a communicator share a host, and the communicators that follow from it."""

from typing import TYPE_CHECKING

import numpy as np

from hpcdist.plan.placement import plan_placement
from hpcdist.runtime.mpi import MPI

if TYPE_CHECKING:
    from hpcdist.runtime.world import World


class Hosts:
    """The hosts of one communicator, found by MPI's split by shared memory.

    Collective: `comm`.

    Args:
        comm: the ranks; not kept.
        world: bounds waits.
        node_comm: ranks of `comm` that share a host, in their order; it belongs to this object from then on. Default:
            those that can share memory. Tests and simulations give others.

    Attributes:
        node_comm: the ranks of this rank's host.
        lane_comm: one rank of each host, those with this rank's local rank; None on a rank whose local rank some host
            does not have.
        placement: which ranks share a host.
        host: number of this rank's host.
    """

    def __init__(self, comm: MPI.Comm, world: "World", node_comm: MPI.Comm | None = None) -> None:
        self.node_comm: MPI.Comm = node_comm or comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        lowest = world.all_reduce_int(comm.rank, MPI.MIN, self.node_comm)
        all_lowest = np.empty(comm.size, np.int64)
        world.wait(comm.Iallgather(np.array([lowest], np.int64), all_lowest))
        self.placement = plan_placement(all_lowest.tolist())
        self.host = self.placement.host_of(comm.rank)
        color = (
            self.node_comm.rank if self.node_comm.rank < self.placement.n_lanes else MPI.UNDEFINED
        )
        lane = comm.Split(color, self.host)
        self.lane_comm: MPI.Comm | None = None if lane == MPI.COMM_NULL else lane

    def free(self) -> None:
        """Free the communicators. Collective: all ranks."""
        for comm in (self.lane_comm, self.node_comm):
            if comm is not None:
                comm.Free()
