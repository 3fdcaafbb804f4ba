"""Moves messages between ranks: envelopes by MPI, two-sided; payloads in shared memory inside a node, else in pieces.

Inside a node MPI moves some 10 KiB of a message at each look at it: 1 MiB took 1 ms so, and a copy takes 0.1 to 0.4.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hpcdist.errors import CollectiveError
from hpcdist.ps.layout import Packer
from hpcdist.ps.messages import Bytes, Message
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import OwnMemory, map_memory
from hpcdist.runtime.waiting import YIELDS, wait_until

#: Tags of the messages of MPI.
_ENVELOPE = 7501
_PIECE = 7502


class _Outbox:
    """Shared memory that one rank writes payloads for another one into."""

    def __init__(self) -> None:
        self._own_memory: OwnMemory | None = None
        self._n_made = 0
        self._memory: Bytes = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> Bytes:
        """Return memory of `nbytes` bytes, which replaces the memory returned before."""
        self._own_memory = OwnMemory(nbytes)
        self._n_made += 1
        self._memory = np.frombuffer(self._own_memory.memory, np.uint8)
        return self._memory

    def path_of(self, payload: Bytes) -> str:
        """Return the path of the memory, its number, and where a payload begins in it; empty for one elsewhere.

        The number distinguishes the memory from earlier memory, as the system may give the same path again.
        """
        if self._own_memory is None or not len(payload):
            return ""
        offset = payload.ctypes.data - self._memory.ctypes.data
        if not 0 <= offset < len(self._memory):
            return ""
        return f"{self._own_memory.path}#{self._n_made}@{offset}"


class Mailbox:
    """Sends messages to other ranks of a communicator, and receives their messages.

    Not collective. For one thread.

    Args:
        comm: communicator whose messages nobody else receives.
        neighbours: ranks that this rank can share memory with.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        neighbours: Collection[int] = (),
    ) -> None:
        self._comm = comm
        self._sending: list[tuple[list[MPI.Request], Message, Bytes]] = []
        self._coming: list[tuple[int, list[MPI.Request], Message]] = []
        self._outboxes = {rank: _Outbox() for rank in neighbours}
        self._mapped: dict[int, tuple[str, Bytes]] = {}

    def packer(self, rank: int) -> Packer:
        """Return the packer of payloads for another rank: into the memory that both share, where they share memory."""
        outbox = self._outboxes.get(rank)
        if outbox is None:
            return Packer()
        return Packer(outbox.allocate)

    def send(self, rank: int, message: Message) -> None:
        """Start to send a message. Its payload must not change until it has left; to a neighbour, until it replies."""
        path = ""
        if rank in self._outboxes:
            path = self._outboxes[rank].path_of(message.payload)
        envelope = message.envelope(path)
        requests = [self._comm.Isend(envelope, rank, _ENVELOPE)]
        if not path:
            for piece in message.pieces():
                requests.append(self._comm.Isend(piece, rank, _PIECE))
        self._sending.append((requests, message, envelope))

    @property
    def is_sent(self) -> bool:
        """Whether everything that was sent has left its memory."""
        self._sending = [
            transfer for transfer in self._sending if not MPI.Request.Testall(transfer[0])
        ]
        return not self._sending

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages that are complete, each with its sender; messages of one sender in its order.

        Does not wait. The payload of a neighbour's message is in the neighbour's memory.
        """
        status = MPI.Status()
        while self._comm.Iprobe(tag=_ENVELOPE, status=status):
            n_bytes = status.Get_count(MPI.BYTE)
            envelope = np.empty(n_bytes, np.uint8)
            self._comm.Recv(envelope, status.Get_source(), _ENVELOPE)
            self._begin(status.Get_source(), envelope)
        coming = self._coming
        self._coming = []
        done = []
        late: set[int] = set()  # senders whose earlier message is not complete
        for rank, requests, message in coming:
            if rank not in late and MPI.Request.Testall(requests):
                done.append((rank, message))
            else:
                late.add(rank)
                self._coming.append((rank, requests, message))
        return done

    def _begin(self, rank: int, envelope: Bytes) -> None:
        """Start to receive the message of an envelope."""
        is_here = False

        def memory_for(n_payload: int, path: str) -> Bytes:
            nonlocal is_here
            if not path:
                return np.empty(n_payload, np.uint8)
            is_here = True
            name, _, offset = path.partition("@")
            start = int(offset)
            return self._map(rank, name)[start : start + n_payload]

        message = Message.of_envelope(envelope, memory_for)
        requests: list[MPI.Request] = []
        if not is_here:
            for piece in message.pieces():
                requests.append(self._comm.Irecv(piece, rank, _PIECE))
        self._coming.append((rank, requests, message))

    def _map(self, rank: int, path: str) -> Bytes:
        """Return another rank's memory, mapped at its first use."""
        mapping = self._mapped.get(rank)
        if mapping is None or mapping[0] != path:
            memory = map_memory(path.partition("#")[0])
            mapping = (path, np.frombuffer(memory, np.uint8))
            self._mapped[rank] = mapping
        return mapping[1]

    def exchange(
        self,
        requests: Sequence[tuple[int, Message]],
        timeout_s: float,
    ) -> Iterator[tuple[int, Message]]:
        """Send requests, and yield answers as they come, each with the number of its request; fewer when some are late.

        Args:
            requests: messages, each with the rank that it is for; requests to one rank have different sequence numbers.
            timeout_s: longest wait for an answer.
        """
        awaited: dict[tuple[int, int], int] = {}
        for number, (rank, message) in enumerate(requests):
            self.send(rank, message)
            awaited[rank, message.sequence] = number
        received: list[tuple[int, Message]] = []

        def has_some() -> bool:
            received.extend(self.receive())
            return bool(received) or (not awaited and self.is_sent)

        yields = YIELDS
        while awaited or not self.is_sent:
            if not wait_until(has_some, timeout_s, yields):
                return
            yields = 0  # parts come one after another: the server may need the core
            for rank, message in received:
                request_number = awaited.pop((rank, message.sequence), None)
                if request_number is not None:  # else it answers a request that was given up
                    yield request_number, message
            received.clear()


def find_neighbours(comm: MPI.Comm) -> list[int]:
    """Return the other ranks of this node, if each rank can map the memory of all; otherwise no ranks.

    Collective over `comm`, of which no rank may be missing; blocking.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    probe_path = ""
    can_map = True
    try:
        probe = OwnMemory(8)  # lives until this function returns, so that all ranks can map it
        probe.memory.cast("q")[0] = comm.rank + 1
        probe_path = probe.path
    except CollectiveError:
        can_map = False
    paths = node.allgather((comm.rank, probe_path))
    try:
        for rank, path in paths:
            number = map_memory(path).cast("q")[0]
            can_map = can_map and number == rank + 1
    except CollectiveError:
        can_map = False
    can_share = node.allreduce(int(can_map), MPI.MIN)
    node.Free()
    if not can_share:
        return []
    return [rank for rank, _ in paths if rank != comm.rank]
