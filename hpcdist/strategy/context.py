"""Which strategy the calling code is in: the stack that scope() and run() push to."""

import contextvars
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.strategy.base import Strategy
    from hpcdist.strategy.replica_context import ReplicaContext


@dataclass(frozen=True)
class Entry:
    """One scope(), run() or merge_call() that the caller is inside of.

    Attributes:
        strategy: whose.
        replica: the replica that the caller is in; None outside run, and in a merge_call.
    """

    strategy: "Strategy"
    replica: "ReplicaContext | None"


_entries: contextvars.ContextVar[tuple[Entry, ...]] = contextvars.ContextVar("hpcdist_entries", default=())
#: Strategies with several replicas that are alive; a loss helper outside any scope asks which one is meant.
_alive: "weakref.WeakSet[Strategy]" = weakref.WeakSet()


def current() -> Entry | None:
    """Return the innermost scope() or run(), or None outside all."""
    entries = _entries.get()
    return entries[-1] if entries else None


@contextmanager
def entered(strategy: "Strategy", replica: "ReplicaContext | None" = None) -> Iterator[None]:
    """Make `strategy` the current one in the block.

    Raises:
        RuntimeError: inside another strategy's scope or run.
    """
    inside = current()
    if inside is not None and inside.strategy is not strategy:
        raise RuntimeError(
            f"strategy: expected one strategy at a time, got {type(strategy).__name__} inside the scope of another "
            f"{type(inside.strategy).__name__}; leave that scope first."
        )
    token = _entries.set((*_entries.get(), Entry(strategy, replica)))
    try:
        yield
    finally:
        _entries.reset(token)


def register(strategy: "Strategy") -> None:
    """Remember a strategy with replicas of its own for as long as it lives."""
    _alive.add(strategy)


def alive() -> list["Strategy"]:
    """Return the registered strategies that are alive."""
    return list(_alive)
