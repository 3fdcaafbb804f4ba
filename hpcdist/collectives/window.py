"""Memory shared by the ranks of a node, without a name: nothing is left behind, however the job ends."""

import mmap
import os
from typing import TYPE_CHECKING

from hpcdist.errors import CollectiveError
from hpcdist.mpi import MPI

if TYPE_CHECKING:
    from hpcdist.world import World


class NodeWindow:
    """One piece of memory per rank of a node, mapped by all of them, zero at first.

    Collective: `node_comm`. Each rank allocates the pages of its own piece, so that they lie in its NUMA domain, and so
    that missing memory is an error here and not a bus error later.

    Args:
        node_comm: ranks that can share memory.
        nbytes: of each rank's piece.
        world: agrees on errors.

    Attributes:
        pieces: each rank's memory, by place in the node.

    Raises:
        CollectiveError: when the node has too little memory, or forbids to share it; on every rank of the node.
    """

    def __init__(self, node_comm: MPI.Comm, nbytes: int, world: "World") -> None:
        self._nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = -1
        with world.agreed(node_comm):
            fd = self._create(node_comm.size) if node_comm.rank == 0 else -1
        path = world.broadcast_text(f"/proc/{os.getpid()}/fd/{fd}", 0, node_comm)
        try:
            with world.agreed(node_comm):
                fd = _open(path) if fd < 0 else fd
                self._map(fd, node_comm)
        finally:
            if fd >= 0:
                os.close(fd)

    def _create(self, n_pieces: int) -> int:
        try:
            fd = os.memfd_create("hpcdist")
            os.ftruncate(fd, n_pieces * self._nbytes)
        except OSError as error:
            raise _refused(error) from error
        return fd

    def _map(self, fd: int, node_comm: MPI.Comm) -> None:
        try:
            os.posix_fallocate(fd, node_comm.rank * self._nbytes, self._nbytes)
            memory = memoryview(mmap.mmap(fd, node_comm.size * self._nbytes))
        except OSError as error:
            raise _refused(error) from error
        starts = range(0, node_comm.size * self._nbytes, self._nbytes)
        self.pieces = [memory[start : start + self._nbytes] for start in starts]


def _open(path: str) -> int:
    """Open the first rank's memory, unless its process number is another one's here, as in containers of their own."""
    try:
        if not os.readlink(path).startswith("/memfd:hpcdist"):
            raise FileNotFoundError(f"{path} is not the memory of a rank")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError) -> CollectiveError:
    return CollectiveError(
        f"shared memory: expected memory that the ranks of a node can share, got {error}; raise the memory limit "
        f"of the job, or ask for implementation MPI."
    )
