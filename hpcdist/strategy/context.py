"""Which strategy the calling code is in: the stack that scope() and run() push to."""

import contextvars
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.strategy.base import Strategy


@dataclass(frozen=True)
class Entry:
    """One scope() or run() that the caller is inside of."""

    strategy: "Strategy"
    is_replica: bool


_entries: contextvars.ContextVar[tuple[Entry, ...]] = contextvars.ContextVar("hpcdist_entries", default=())
#: Strategies with several replicas that are alive; a loss helper outside any scope asks which one is meant.
_alive: "weakref.WeakSet[Strategy]" = weakref.WeakSet()


def current() -> Entry | None:
    """Return the innermost scope() or run(), or None outside all."""
    entries = _entries.get()
    return entries[-1] if entries else None


@contextmanager
def entered(strategy: "Strategy", is_replica: bool) -> Iterator[None]:
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
    token = _entries.set((*_entries.get(), Entry(strategy, is_replica)))
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
