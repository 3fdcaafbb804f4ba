"""The loop of a ps rank: receive, let the state machine answer, send; until all workers have left."""

import functools
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hpcdist.child_processes import STOP_SIGNALS
from hpcdist.errors import CollectiveTimeoutError
from hpcdist.ps.messages import Message
from hpcdist.ps.server import Server
from hpcdist.ps.transport import Mailbox
from hpcdist.runtime.process import end_of_training
from hpcdist.runtime.waiting import YIELDS, wait_until
from hpcdist.runtime.world import World

#: Longest sleep of a server that has nothing to do, in seconds: a push may have to wait for so long.
_MAX_SLEEP_S = 5e-5
#: Times that it yields its core before it sleeps, where the node has more ranks than cores.
CROWDED_YIELDS = 200
#: How long it looks for messages before it looks at everything else.
_LOOK_S = 0.2


class StopSignals:
    """Notes signals that ask a job to stop, in place of their effect on a process: the workers must save first.

    A context manager; at its end signals have the effect that they had before.

    Attributes:
        last: name of the last signal; empty before.
    """

    def __init__(self) -> None:
        self.last = ""
        self._before: list[Any] = []

    def __enter__(self) -> "StopSignals":
        self._before = [signal.signal(number, self._note) for number in STOP_SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(STOP_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
        if end_of_training() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it to the slower ranks

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.last = signal.Signals(number).name


class Drain:
    """How long a rank that serves still waits for messages once the chief's program has ended: some are on their way.

    Args:
        timeout_s: HPCDIST_TIMEOUT_S; it waits a tenth of that, at most ten seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = min(10.0, timeout_s / 10)
        self._clock = clock
        self._since_s: float | None = None

    def is_over(self, code: int | None) -> bool:
        """Return whether to leave.

        Args:
            code: exit code that the chief has announced; None until then.
        """
        if code is not None and self._since_s is None:
            self._since_s = self._clock()
        return self._since_s is not None and self._clock() - self._since_s > self._limit_s


def serve(
    world: World,
    mailbox: Mailbox,
    server: Server,
    workers: list[int],
) -> int:
    """Serve until all workers have left; return the code to exit with, which is the chief's.

    Not collective. In the main thread.

    Args:
        world: world of this rank.
        mailbox: mailbox of all ranks.
        server: server of this rank's shards.
        workers: rank of each worker.

    Raises:
        CollectiveTimeoutError: when the workers have left, and the chief does not announce its exit code.
    """
    with StopSignals() as signals:
        waiting_since = time.monotonic()
        yields = CROWDED_YIELDS if world.is_crowded else YIELDS
        while not server.is_done:
            received: list[tuple[int, Message]] = []
            wait_until(
                functools.partial(_receive, mailbox, received),
                _LOOK_S,
                yields,
                _MAX_SLEEP_S,
            )
            if signals.last:
                name = signals.last
                signals.last = ""
                server.note_signal(name)
            for _, message in received:
                _send(mailbox, workers, server.handle(message))
            if received or not server.has_parked:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > world.timeout_s:
                _send(mailbox, workers, server.late(world.timeout_s))
            _ = mailbox.is_sent  # forgets messages that have left
        return wait_for_end(world, mailbox, server.exit_code)


def wait_for_end(world: World, mailbox: Mailbox, code: int) -> int:
    """Wait until all messages have been sent and the chief has ended its program; return the code to exit with.

    Args:
        world: world of this rank.
        mailbox: mailbox of all ranks.
        code: code to exit with, without waiting for the chief. -1 waits for the chief, and takes its exit code.

    Raises:
        CollectiveTimeoutError: when the chief does not announce its exit code.
    """
    has_code = code >= 0
    is_over = wait_until(
        lambda: mailbox.is_sent and (has_code or end_of_training() is not None),
        world.timeout_s,
        0,
        0.01,
    )
    if not is_over:
        raise CollectiveTimeoutError(
            f"server: expected the chief to leave within {world.timeout_s:g} s of the last worker, got no sign of it "
            f"on {world}; look for what keeps it."
        )
    if has_code:
        return code
    return end_of_training() or 0


def _receive(mailbox: Mailbox, received: list[tuple[int, Message]]) -> bool:
    """Append the messages that have come to `received`; return whether there are any."""
    received += mailbox.receive()
    return bool(received)


def _send(mailbox: Mailbox, workers: list[int], answers: list[Message]) -> None:
    """Send each answer to its worker."""
    for message in answers:
        mailbox.send(workers[message.worker], message)
