"""Memory that the ranks of a node set up together, by MPI."""

import os

from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import create_memory, map_pieces, open_memory, path_of, whole_pages
from hpcdist.runtime.world import World


class NodeWindow:
    """One piece of memory for each rank of a node, mapped by all of them, zero at first.

    Collective over `node_comm`. Each rank allocates the pages of its piece, so that they lie in its NUMA domain, and so
    that missing memory is an error here and not a bus error later.

    Args:
        node_comm: communicator of ranks that can share memory.
        nbytes: size of each rank's piece; rounded up to whole pages.
        world: agrees on errors.

    Attributes:
        pieces: memory of each rank, by local rank.

    Raises:
        CollectiveFailed: when the node has too little memory, or forbids sharing it; on every rank of the node.
    """

    def __init__(self, node_comm: MPI.Comm, nbytes: int, world: World) -> None:
        nbytes = whole_pages(nbytes)
        fd = -1
        with world.agreed(node_comm):
            if node_comm.rank == 0:
                fd = create_memory(node_comm.size * nbytes)
        path = world.broadcast_text(path_of(fd), 0, node_comm)
        try:
            with world.agreed(node_comm):
                if fd < 0:
                    fd = open_memory(path)
                self.pieces = map_pieces(fd, node_comm.size, nbytes, node_comm.rank)
        finally:
            if fd >= 0:
                os.close(fd)
