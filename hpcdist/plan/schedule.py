"""Schedules as data: which elements one rank sends to whom, and what it does with those it receives."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of the buffer, to or from a peer rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives before it goes on.

    Attributes:
        sends: messages to other ranks, of the buffer as it is when the round begins.
        receives: messages from other ranks.
        is_sum: whether received elements are added to the buffer's; else they replace them.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    is_sum: bool = False


Schedule = tuple[Round, ...]


def make_round(sends: Iterable[Message], receives: Iterable[Message], is_sum: bool) -> Round:
    """Return a round without its empty messages."""
    return Round(_full(sends), _full(receives), is_sum)


def _full(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.start < message.stop)


def n_elements_sent(schedule: Schedule) -> int:
    """Return the elements that a rank sends in a schedule."""
    return sum(message.stop - message.start for one in schedule for message in one.sends)
