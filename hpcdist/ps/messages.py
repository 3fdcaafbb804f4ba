"""Messages between workers and parameter servers: numbers, a text and bytes, with a typed header.

A message travels as an envelope (header, numbers, text) and, behind it, its payload in pieces of at most 4 MiB. Inside
a node the payload is in memory that both ranks share, and the envelope names it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
#: Largest piece of a payload: several requests share a server without one of them filling its memory.
PIECE_BYTES = 4 << 20
#: Numbers in a header, of 8 bytes each.
_N_HEADER = 9


class Kind(enum.IntEnum):
    """The subject of a message."""

    #: To a server: variables and their first values; an optimizer; gradients of a step; a pull alone; a request for the
    #: state of an optimizer; new values and states; a request for statistics; the end of a worker.
    ADOPT, OPTIMIZER, STEP, PULL, STATE, ASSIGN, STATISTICS, LEAVE = range(1, 9)
    #: To a worker: the request is done; values of shards; an error, as text.
    DONE, VALUES, ERROR = range(9, 12)
    #: From a coordinator to a worker, and back: a closure; its outcome.
    CLOSURE, RESULT = range(12, 14)


@dataclass(frozen=True)
class Message:
    """One request or answer.

    Attributes:
        kind: kind of the message.
        worker: number of the worker that asks, or is answered.
        incarnation: number of the worker's process. A worker that is started anew begins to count its requests anew.
        sequence: number of the request, from 1; its answer has the same number.
        clock: number of steps that the worker has pushed, this step included.
        request: request of the worker, or the server, to all workers; see `Request`.
        numbers: (n,) int64 array.
        text: any text.
        payload: (n,) array of bytes.
    """

    kind: Kind
    worker: int
    incarnation: int = 0
    sequence: int = 0
    clock: int = 0
    request: int = 0
    numbers: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    text: str = ""
    payload: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    def envelope(self, path: str = "") -> Bytes:
        """Return all but the payload, as bytes.

        Args:
            path: path of the shared memory where the payload is, and its place there; empty if it comes in pieces.
        """
        text = self.text.encode()
        header = [
            self.kind,
            self.worker,
            self.incarnation,
            self.sequence,
            self.clock,
            self.request,
            len(self.numbers),
            len(self.payload),
            len(text),
        ]
        header_bytes = np.array(header, np.int64).tobytes()
        envelope = header_bytes + self.numbers.tobytes() + text + path.encode()
        return np.frombuffer(envelope, np.uint8)

    @classmethod
    def of_envelope(
        cls,
        envelope: Bytes,
        memory_for: Callable[[int, str], Bytes] | None = None,
    ) -> "Message":
        """Return the message of an envelope.

        Args:
            envelope: bytes that the method `envelope` returned.
            memory_for: function that returns the payload's memory, given its number of bytes and the path in the
                envelope; default: new memory.
        """
        numbers_start = 8 * _N_HEADER
        header = envelope[:numbers_start].view(np.int64).tolist()
        *head, n_numbers, n_payload, n_text = header
        kind, worker, incarnation, sequence, clock, request = head
        text_start = numbers_start + 8 * n_numbers
        path_start = text_start + n_text
        if memory_for is None:
            payload: Bytes = np.empty(n_payload, np.uint8)
        else:
            payload = memory_for(n_payload, envelope[path_start:].tobytes().decode())
        return cls(
            Kind(kind),
            worker,
            incarnation,
            sequence,
            clock,
            request,
            envelope[numbers_start:text_start].view(np.int64),
            envelope[text_start:path_start].tobytes().decode(),
            payload,
        )

    def pieces(self) -> list[Bytes]:
        """Return the payload in pieces."""
        return [
            self.payload[start : start + PIECE_BYTES]
            for start in range(0, len(self.payload), PIECE_BYTES)
        ]


def answer(to: Message, kind: Kind, **fields: Any) -> Message:
    """Return an answer to a request."""
    return Message(kind, to.worker, to.incarnation, to.sequence, to.clock, **fields)
