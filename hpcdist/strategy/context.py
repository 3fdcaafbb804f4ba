"""The current strategy and replica: a stack that scope() and run() push to."""

import atexit
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Replica:
    """One replica of a process in one call of `run`, which makes a new object for each.

    Attributes:
        number: number of the replica among all replicas of the job.
        local_index: index of the replica among the replicas of this process.
    """

    number: int
    local_index: int


@dataclass(frozen=True)
class Entry:
    """One scope(), run(), merge_call() or extended.update() around the caller.

    Attributes:
        strategy: the strategy that is current in the block. Only its identity and its class's name matter here.
        replica: the replica that the caller is in; None outside run, and in a merge_call.
        updated: in extended.update, index of the copy that is updated among this process's copies; None elsewhere.
    """

    strategy: object
    replica: Replica | None
    updated: int | None = None


#: The blocks around the caller. A context variable, as each replica runs in a separate thread.
_entries: contextvars.ContextVar[tuple[Entry, ...]] = contextvars.ContextVar(
    "hpcdist_entries", default=()
)
#: The scope that all code is in. It counts in every thread, which a context variable would not; see
#: `experimental_set_strategy`.
_everywhere: Entry | None = None
#: Ends what `_everywhere` has begun. Kept apart from it, as it is closed at exit, too.
_watching = ExitStack()
# now, while modules are there: Python itself would leave the scope after it has cleared them
atexit.register(_watching.close)


def current() -> Entry | None:
    """Return the innermost scope() or run(), else the scope that all code is in, else None."""
    entries = _entries.get()
    return entries[-1] if entries else _everywhere


def is_inside() -> bool:
    """Return whether the caller is inside a scope() or run(), other than the scope that all code is in."""
    return bool(_entries.get())


def enter_everywhere(strategy: object | None, watching: AbstractContextManager[None]) -> None:
    """Leave the scope that all code is in, and enter the scope of another strategy, unless it is None."""
    global _everywhere
    _watching.close()
    _everywhere = None if strategy is None else Entry(strategy, None)
    _watching.enter_context(watching)


def updated_copy() -> int | None:
    """Return the index of the copy of a variable that extended.update is updating; None outside of it."""
    entry = current()
    return None if entry is None else entry.updated


@contextmanager
def entered(
    strategy: object,
    replica: Replica | None = None,
    updated: int | None = None,
) -> Iterator[None]:
    """Make `strategy` the current one in the block.

    Raises:
        RuntimeError: inside another strategy's scope or run.
    """
    inside = current()
    if inside is not None and inside.strategy is not strategy:
        raise RuntimeError(
            f"strategy: expected one strategy at a time, not a mix of different ones, got {type(strategy).__name__} "
            f"inside the scope of another {type(inside.strategy).__name__}; leave that scope first."
        )
    token = _entries.set((*_entries.get(), Entry(strategy, replica, updated)))
    try:
        yield
    finally:
        _entries.reset(token)
