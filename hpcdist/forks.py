"""Locks that are free in a process that is forked from this one, such as a worker of a DataLoader.

A thread that holds a lock at a fork does not exist in the child, where nobody would release it.
"""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def make_lock() -> Any:
    """Return a `threading.Lock` that a forked child finds free."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def make_rlock() -> Any:
    """Return a `threading.RLock` that a forked child finds free."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def make_condition() -> threading.Condition:
    """Return a `threading.Condition` whose lock a forked child finds free."""
    return threading.Condition(make_rlock())


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
