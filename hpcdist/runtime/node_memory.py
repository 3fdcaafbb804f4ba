"""Memory that the processes of a node share, and a barrier in it. Bytes only: no torch, no MPI.

The memory has no name, so that nothing is left behind, however the job ends.
"""

import mmap
import os
import platform
import weakref
from collections.abc import Sequence

from hpcdist.errors import CollectiveFailed
from hpcdist.forks import make_lock
from hpcdist.runtime.waiting import YIELDS, late, wait_until

#: Number of int64 cells of one rank on a board: a whole cache line, so that ranks do not slow each other's writes.
CELLS = 8
#: Number of looks at another rank's cell before the core is yielded, about 20 microseconds. With more ranks than cores
#: the core is yielded at once.
SPINS = 600
_IS_ORDERED_BY_HARDWARE = platform.machine() in ("x86_64", "AMD64")


def whole_pages(nbytes: int) -> int:
    """Return a number of bytes, at least one, rounded up to whole pages."""
    return -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def create_memory(nbytes: int) -> int:
    """Return a file descriptor of memory without a name, whose pages are not allocated yet.

    Raises:
        CollectiveFailed: when it is forbidden; on this rank only.
    """
    fd = -1
    try:
        fd = os.memfd_create("hpcdist")
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise _refused(error) from error
    return fd


def path_of(fd: int) -> str:
    """Return the path by which other processes open memory of this one, while it keeps the file descriptor."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def map_pieces(fd: int, n_pieces: int, nbytes: int, piece_index: int) -> list[memoryview]:
    """Allocate the pages of this rank's piece, and return all pieces; `nbytes` each, whole pages.

    Raises:
        CollectiveFailed: when there is too little memory; on this rank only.
    """
    try:
        os.posix_fallocate(fd, piece_index * nbytes, nbytes)
        memory = memoryview(mmap.mmap(fd, n_pieces * nbytes))
    except OSError as error:
        raise _refused(error) from error
    return [memory[start : start + nbytes] for start in range(0, n_pieces * nbytes, nbytes)]


def open_memory(path: str) -> int:
    """Open another rank's memory, and return the file descriptor.

    Raises:
        CollectiveFailed: when its process id is another process here, as across container boundaries; on this rank
            only.
    """
    try:
        if not os.readlink(path).startswith("/memfd:hpcdist"):
            raise FileNotFoundError(f"{path} is not the memory of a rank")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError) -> CollectiveFailed:
    return CollectiveFailed(
        f"shared memory: expected memory that the ranks of a node can share, got {error}; raise the memory limit "
        f"of the job, or let sums go by MPI."
    )


class OwnMemory:
    """Memory of one process that others of its node can map, as it has no name: by `path`, while the process lives.

    Not collective.

    Args:
        nbytes: size of the memory, rounded up to whole pages.

    Attributes:
        memory: the bytes, zero at first. path: argument of `map_memory` in other processes.

    Raises:
        CollectiveFailed: when the node has too little memory, or forbids sharing it; on this rank only.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = whole_pages(nbytes)
        fd = create_memory(nbytes)
        weakref.finalize(self, os.close, fd)
        (self.memory,) = map_pieces(fd, 1, nbytes, 0)
        self.path = path_of(fd)


def map_memory(path: str) -> memoryview:
    """Return the memory of another process of this node; see `OwnMemory`.

    Raises:
        CollectiveFailed: when it cannot be reached, as across container boundaries; on this rank only.
    """
    fd = open_memory(path)
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
    except OSError as error:
        raise _refused(error) from error
    finally:
        os.close(fd)


class NodeBarrier:
    """A barrier among the ranks of a node, on a board that they share; about a microsecond when all have arrived.

    Args:
        board: int64 cells, `CELLS` for each rank, zero at first.
        local_rank: number of this rank on the node.
        names: names of the ranks of the node in messages, by local rank.
        timeout_s: longest wait.
        is_busy_waiting: whether it may spin and yield while it waits; a background thread and a rank of a crowded node
            may not spin.
        is_background: whether it sleeps from the start; see `wait_until`.
    """

    def __init__(
        self,
        board: memoryview,
        local_rank: int,
        names: Sequence[str],
        timeout_s: float,
        is_busy_waiting: bool = True,
        is_background: bool = False,
    ) -> None:
        self._board = board
        self._own_offset = local_rank * CELLS
        self._cells = [peer * CELLS for peer in range(len(names)) if peer != local_rank]
        self._names = names
        self._timeout_s = timeout_s
        self._spins = range(SPINS if is_busy_waiting and not is_background else 0)
        self._yields = 0 if is_background else YIELDS
        self._sequence = 0

    def wait(self, mark: int = 0) -> list[int] | None:
        """Return when every rank of the node has called this as often as this one.

        Collective over the ranks of the node.

        Args:
            mark: number of 63 bits, which is compared. Two cells are used in turn: a rank may be one barrier ahead of a
                rank that still reads, never two.

        Returns:
            None when all ranks gave the same mark, else every rank's mark, by local rank.

        Raises:
            CollectiveTimeoutError: when a rank does not come; on the ranks that came.
        """
        self._sequence = sequence = self._sequence + 1
        board = self._board
        local_offset = self._own_offset
        cell = 1 + (sequence & 1)
        board[local_offset + cell] = mark
        if not _IS_ORDERED_BY_HARDWARE:
            fence()
        board[local_offset] = sequence
        for peer_offset in self._cells:
            if board[peer_offset] < sequence:
                self._wait_for(peer_offset, sequence)
        if not _IS_ORDERED_BY_HARDWARE:
            fence()
        for peer_offset in self._cells:
            if board[peer_offset + cell] != mark:
                return [board[local_rank * CELLS + cell] for local_rank in range(len(self._names))]
        return None

    def _wait_for(self, cell: int, sequence: int) -> None:
        board = self._board
        for _ in self._spins:
            if board[cell] >= sequence:
                return
        if not wait_until(lambda: board[cell] >= sequence, self._timeout_s, self._yields):
            missing: list[str] = []
            for peer_offset in self._cells:
                if board[peer_offset] < sequence:
                    missing.append(self._names[peer_offset // CELLS])
            rank_name = self._names[self._own_offset // CELLS]
            raise late("barrier", self._timeout_s, ", ".join(missing), rank_name)


#: Locks that exclude nothing: one pair is enough for all threads.
_locks = make_lock(), make_lock()


def fence() -> None:
    """Keep writes before this and reads after it in order; x86 does so by itself for one writer per cell.

    Elsewhere taking and releasing two locks is the fence that Python has.
    """
    if not _IS_ORDERED_BY_HARDWARE:
        for lock in _locks:
            with lock:
                pass
