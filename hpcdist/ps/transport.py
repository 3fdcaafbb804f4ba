"""Moves messages between ranks: envelopes by MPI, two-sided; payloads in shared memory inside a node, else in pieces.

Inside a node MPI moves some 10 KiB of a message at each look at it: 1 MiB took 1 ms so, and a copy takes 0.1 to 0.4.
"""

import collections
from collections.abc import Collection, Mapping

import numpy as np

from hpcdist.errors import CollectiveError
from hpcdist.ps.layout import Packer
from hpcdist.ps.messages import Bytes, Message
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import OwnMemory, map_memory
from hpcdist.runtime.waiting import wait_until

_ENVELOPE, _PIECE = 7501, 7502


class _Outbox:
    """Shared memory that one rank writes payloads for another one into."""

    def __init__(self) -> None:
        self._own: OwnMemory | None = None
        self._n_made = 0
        self._memory: Bytes = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> Bytes:
        """Return memory of `nbytes` bytes, which replaces the last one."""
        self._own, self._n_made = OwnMemory(nbytes), self._n_made + 1
        self._memory = np.frombuffer(self._own.memory, np.uint8)
        return self._memory

    def path_of(self, payload: Bytes) -> str:
        """Return the path of the memory and its number, if a payload is at its beginning; else nothing.

        The number tells it from an earlier one: the system gives a path anew.
        """
        is_here = len(payload) > 0 and payload.ctypes.data == self._memory.ctypes.data
        return f"{self._own.path}#{self._n_made}" if is_here and self._own is not None else ""


class Mailbox:
    """Sends messages to other ranks of a communicator, and receives theirs, those of a sender one after another.

    Not collective. One thread.

    Args:
        comm: of which nobody else receives messages.
        neighbours: the ranks that this one can share memory with.
    """

    def __init__(self, comm: MPI.Comm, neighbours: Collection[int] = ()) -> None:
        self._comm = comm
        self._sending: list[tuple[list[MPI.Request], Message, Bytes]] = []
        self._coming: dict[int, tuple[list[MPI.Request], Message]] = {}
        self._envelopes: collections.deque[tuple[int, Bytes]] = collections.deque()
        self._memory: dict[int, Bytes] = {}
        self._outboxes = {rank: _Outbox() for rank in neighbours}
        self._mapped: dict[int, tuple[str, Bytes]] = {}

    def packer(self, rank: int) -> Packer:
        """Return what packs payloads for another rank: where both share memory, right there."""
        outbox = self._outboxes.get(rank)
        return Packer() if outbox is None else Packer(outbox.allocate)

    def send(self, rank: int, message: Message) -> None:
        """Start to send a message, whose payload must stay as it is until the next message from that rank."""
        path = self._outboxes[rank].path_of(message.payload) if rank in self._outboxes else ""
        envelope = message.envelope(path)
        requests = [self._comm.Isend(envelope, rank, _ENVELOPE)]
        if not path:
            requests += [self._comm.Isend(piece, rank, _PIECE) for piece in message.pieces()]
        self._sending.append((requests, message, envelope))

    @property
    def is_sent(self) -> bool:
        """Whether everything that was sent has left its memory."""
        self._sending = [one for one in self._sending if not MPI.Request.Testall(one[0])]
        return not self._sending

    def receive(self) -> list[tuple[int, Message]]:
        """Return the messages that are complete, each with its sender. Their payloads hold until the sender's next one.

        Does not wait.
        """
        status = MPI.Status()
        while self._comm.Iprobe(tag=_ENVELOPE, status=status):
            envelope = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(envelope, status.Get_source(), _ENVELOPE)
            self._envelopes.append((status.Get_source(), envelope))
        for _ in range(len(self._envelopes)):
            rank, envelope = self._envelopes.popleft()
            if rank in self._coming:  # the memory for this rank's messages is in use
                self._envelopes.append((rank, envelope))
            else:
                self._begin(rank, envelope)
        done = [rank for rank, (requests, _) in self._coming.items() if MPI.Request.Testall(requests)]
        return [(rank, self._coming.pop(rank)[1]) for rank in done]

    def _begin(self, rank: int, envelope: Bytes) -> None:
        is_here = False

        def memory_for(n_payload: int, path: str) -> Bytes:
            nonlocal is_here
            is_here = bool(path)
            return (self._map(rank, path) if path else self._keep(rank, n_payload))[:n_payload]

        message = Message.of_envelope(envelope, memory_for)
        pieces = [] if is_here else message.pieces()
        self._coming[rank] = ([self._comm.Irecv(piece, rank, _PIECE) for piece in pieces], message)

    def _keep(self, rank: int, nbytes: int) -> Bytes:
        """Return this rank's own memory for payloads of another one."""
        if nbytes > len(self._memory.get(rank, ())):
            self._memory[rank] = np.empty(nbytes, np.uint8)
        return self._memory.get(rank, np.empty(0, np.uint8))

    def _map(self, rank: int, path: str) -> Bytes:
        """Return another rank's memory, mapped at its first use."""
        known = self._mapped.get(rank)
        if known is None or known[0] != path:
            known = self._mapped[rank] = (path, np.frombuffer(map_memory(path.partition("#")[0]), np.uint8))
        return known[1]

    def exchange(self, requests: Mapping[int, Message], timeout_s: float) -> dict[int, Message] | None:
        """Send requests and return the answers, by rank; None when some are late.

        Args:
            requests: by rank.
            timeout_s: longest wait for all answers.
        """
        for rank, message in requests.items():
            self.send(rank, message)
        answers: dict[int, Message] = {}

        def is_done() -> bool:
            for rank, message in self.receive():
                if rank in requests and message.sequence == requests[rank].sequence:  # else of a request given up
                    answers[rank] = message
            return len(answers) == len(requests)

        if not wait_until(is_done, timeout_s):
            return None
        return answers if wait_until(lambda: self.is_sent, timeout_s) else None


def find_neighbours(comm: MPI.Comm) -> list[int]:
    """Return the other ranks that this one can share memory with: those of its node, if each can map what all have.

    Collective: `comm`, of which nobody may be missing; blocking.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    probe, error = None, None
    try:
        probe = OwnMemory(8)
        probe.memory.cast("q")[0] = comm.rank + 1
    except CollectiveError as caught:
        error = caught
    paths = node.allgather((comm.rank, "" if probe is None else probe.path))
    try:
        is_right = all(map_memory(path).cast("q")[0] == rank + 1 for rank, path in paths)
    except CollectiveError as caught:
        is_right, error = False, caught
    can_share = node.allreduce(int(is_right and error is None), MPI.MIN)
    node.Free()
    return [rank for rank, _ in paths if rank != comm.rank] if can_share else []
