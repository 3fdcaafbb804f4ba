"""Notice at once that a rank of this node is gone without a word: killed, crashed, or ended by os._exit.

Each rank waits for the end of the next rank, by a file descriptor of its process (pidfd_open(2)), in a thread that
costs nothing until then. The launcher usually ends the remaining ranks within milliseconds. Its messages may not say
which rank was the first, and it may not notice a rank that left with code 0.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from hpcdist.diagnostics.stacks import Peer
from hpcdist.diagnostics.watchdog import ENDING, FAILED, LEFT, NOTICED, write

#: Time that the launcher has to end the job, before it is ended from here.
PATIENCE_S = 10.0


class NeighbourWatch:
    """Watches the process of the next rank of this node. Not collective.

    Args:
        peers: ranks of this node, all in one process namespace, by local rank.
        local_rank: local rank of this process.
        flags: flags of each rank of the node; see `Watchdog.watch`.
        has_left: function that returns whether this rank has left its program; then further ranks may end too.
        end: function that ends the job.

    Attributes:
        is_stopped: whether the flags may no longer be used.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        local_rank: int,
        flags: memoryview,
        has_left: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        self._neighbour = (local_rank + 1) % len(peers)
        self._peer = peers[self._neighbour]
        self._local_rank = local_rank
        self._flags = flags
        self._has_left = has_left
        self._end = end
        self.is_stopped = False
        if self._neighbour != local_rank:
            # it is gone already, or Linux is older than 5.3
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(self._peer.pid)
                thread = threading.Thread(
                    target=self._wait,
                    args=(descriptor,),
                    name="hpcdist-neighbour",
                    daemon=True,
                )
                thread.start()

    def stop(self) -> None:
        """Use the flags no more: their memory is about to be freed."""
        self.is_stopped = True

    def _wait(self, descriptor: int) -> None:
        poll = select.poll()  # unlike select, it takes any number of open files
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        if self.is_stopped or self._has_left() or self._flags[self._neighbour] & LEFT:
            return
        is_job_ending = any(flags & (ENDING | FAILED | NOTICED) for flags in self._flags.tolist())
        if is_job_ending:
            time.sleep(PATIENCE_S / 10)
            self._end()
            return
        self._flags[self._local_rank] |= NOTICED
        now_s = time.time()
        seconds = time.strftime("%H:%M:%S", time.localtime(now_s))
        milliseconds = int(now_s % 1 * 1000)
        clock = f"{seconds}.{milliseconds:03d}"
        host = socket.gethostname()
        write(
            f"hpcdist: {self._peer.name}, process {self._peer.pid} on {host}, has ended without notice "
            f"at {clock}: killed (if for memory, the kernel's log says so), crashed, or ended by os._exit\n"
        )
        time.sleep(PATIENCE_S)
        self._end()
