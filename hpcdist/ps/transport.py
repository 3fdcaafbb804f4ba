"""Moves messages between ranks by MPI, two-sided: envelopes first, payloads behind them in pieces."""

from collections.abc import Mapping

import numpy as np

from hpcdist.ps.messages import Bytes, Message
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import wait_until

_ENVELOPE, _PIECE = 7501, 7502


class Mailbox:
    """Sends messages to other ranks of a communicator, and receives theirs. Each sender has one message in flight.

    Not collective. One thread.

    Args:
        comm: of which nobody else receives messages.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._sending: list[tuple[list[MPI.Request], Message, Bytes]] = []
        self._coming: dict[int, tuple[list[MPI.Request], Message]] = {}
        self._memory: dict[int, Bytes] = {}

    def send(self, rank: int, message: Message) -> None:
        """Start to send a message, whose payload must stay as it is until `is_sent`."""
        envelope = message.envelope()
        requests = [self._comm.Isend(envelope, rank, _ENVELOPE)]
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
            self._begin(status.Get_source(), status.Get_count(MPI.BYTE))
        done = [rank for rank, (requests, _) in self._coming.items() if MPI.Request.Testall(requests)]
        return [(rank, self._coming.pop(rank)[1]) for rank in done]

    def _begin(self, rank: int, nbytes: int) -> None:
        envelope = np.empty(nbytes, np.uint8)
        self._comm.Recv(envelope, rank, _ENVELOPE)
        message = Message.of_envelope(envelope, self._memory.get(rank))
        if len(message.payload) > len(self._memory.get(rank, ())):
            self._memory[rank] = message.payload
        self._coming[rank] = ([self._comm.Irecv(piece, rank, _PIECE) for piece in message.pieces()], message)

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
            answers.update(self.receive())
            return len(answers) == len(requests)

        if not wait_until(is_done, timeout_s):
            return None
        return answers if wait_until(lambda: self.is_sent, timeout_s) else None
