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
_N_HEADER = 9


class Kind(enum.IntEnum):
    """What a message is about."""

    #: To a server: variables and their first values; an optimizer; a step's gradients; a pull alone; the state of an
    #: optimizer, or other values for it; statistics; the end of a worker.
    ADOPT, OPTIMIZER, STEP, PULL, STATE, ASSIGN, STATISTICS, LEAVE = range(1, 9)
    #: To a worker: it is done; values of shards; an error, as text.
    DONE, VALUES, ERROR = range(9, 12)
    #: From a coordinator to a worker, and back: a closure; what became of it.
    CLOSURE, RESULT = range(12, 14)


@dataclass(frozen=True)
class Message:
    """One request or answer.

    Attributes:
        kind: of the message.
        worker: number of the worker that asks, or is answered.
        incarnation: of that worker: it begins to count anew when it is started anew.
        sequence: number of the request, from 1; its answer has the same.
        clock: steps that the worker has pushed, this one included.
        request: what the worker, or the server, asks of all workers; see `Request`.
        numbers: (n,) int64. text: any. payload: (n,) bytes.
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
            path: of the shared memory that the payload is at the beginning of; empty: it comes in pieces.
        """
        text = self.text.encode()
        head = [self.kind, self.worker, self.incarnation, self.sequence, self.clock, self.request]
        header = np.array([*head, len(self.numbers), len(self.payload), len(text)], np.int64)
        return np.frombuffer(
            header.tobytes() + self.numbers.tobytes() + text + path.encode(), np.uint8
        )

    @classmethod
    def of_envelope(
        cls, envelope: Bytes, memory_for: Callable[[int, str], Bytes] | None = None
    ) -> "Message":
        """Return the message of an envelope.

        Args:
            envelope: as `envelope` returns it.
            memory_for: returns the payload's memory, given its bytes and the path in the envelope; default: new one.
        """
        header = envelope[: 8 * _N_HEADER].view(np.int64)
        kind, worker, incarnation, sequence, clock, request, n_numbers, n_payload, n_text = map(
            int, header
        )
        stop = 8 * (_N_HEADER + n_numbers)
        path = envelope[stop + n_text :].tobytes().decode()
        payload = (
            np.empty(n_payload, np.uint8) if memory_for is None else memory_for(n_payload, path)
        )
        return cls(
            Kind(kind),
            worker,
            incarnation,
            sequence,
            clock,
            request,
            envelope[8 * _N_HEADER : stop].view(np.int64),
            envelope[stop : stop + n_text].tobytes().decode(),
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
