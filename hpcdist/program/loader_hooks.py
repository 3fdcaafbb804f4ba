"""Hooks around the DataLoaders of a program.

torch has no hook for loaders, so the methods that make an iterator and draw from it are wrapped.
"""

import threading
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter


class LoaderWatcher(Protocol):
    """Sees the DataLoaders that the main thread iterates over."""

    def before_pass(self, loader: "DataLoader[Any]") -> AbstractContextManager[None]:
        """See that a pass is about to begin; return a context in which its iterator is made."""

    def before_draw(self, loader: "DataLoader[Any]") -> None:
        """See that a batch is about to be drawn."""

    def after_draw(self, loader: "DataLoader[Any]", batch: Any) -> None:
        """See a batch that was drawn."""

    def after_pass(self, loader: "DataLoader[Any]") -> None:
        """See that there were no more batches."""


#: Watchers that see DataLoaders, held weakly.
_watchers: "list[weakref.ref[LoaderWatcher]]" = []
#: The loader of each iterator.
_loaders: "weakref.WeakKeyDictionary[_BaseDataLoaderIter, weakref.ref[DataLoader[Any]]]" = (
    weakref.WeakKeyDictionary()
)
#: Iterators of loaders whose class overrides `__iter__`, before the first batch of a pass.
_unseen: "weakref.WeakSet[_BaseDataLoaderIter]" = weakref.WeakSet()
_make_iterator = DataLoader.__iter__
_init_iterator = _BaseDataLoaderIter.__init__
_next_batch = _BaseDataLoaderIter.__next__


def around_loaders(watcher: LoaderWatcher) -> None:
    """Show the DataLoaders of the main thread to a watcher, which is held weakly.

    Loaders of a class with `is_shown = False`, which read for other loaders, are not shown.
    """
    _watchers.append(weakref.ref(watcher))
    DataLoader.__iter__ = _watched_iterator  # type: ignore[method-assign]
    _BaseDataLoaderIter.__init__ = _watched_init  # type: ignore[method-assign, assignment]
    _BaseDataLoaderIter.__next__ = _watched_next  # type: ignore[method-assign, assignment]


def _alive_watchers() -> list[LoaderWatcher]:
    watchers = [reference() for reference in _watchers]
    return [watcher for watcher in watchers if watcher is not None]


def _watched_iterator(loader: "DataLoader[Any]") -> _BaseDataLoaderIter:
    if not _is_shown() or not getattr(loader, "is_shown", True):
        return _make_iterator(loader)
    beginnings = [watcher.before_pass(loader) for watcher in _alive_watchers()]
    with ExitStack() as stack:
        for beginning in beginnings:
            stack.enter_context(beginning)
        iterator = _make_iterator(loader)
    _loaders[iterator] = weakref.ref(loader)
    _unseen.discard(iterator)  # a class that overrides __iter__ has called this one
    return iterator


def _watched_init(
    iterator: _BaseDataLoaderIter,
    loader: "DataLoader[Any]",
) -> None:
    _init_iterator(iterator, loader)
    if type(loader).__iter__ is not _watched_iterator:  # as torchdata's StatefulDataLoader
        _loaders[iterator] = weakref.ref(loader)
        _unseen.add(iterator)


def _is_shown() -> bool:
    """Return whether this is the main thread, and no worker process of a loader."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    return is_main_thread and get_worker_info() is None


def _watched_next(iterator: _BaseDataLoaderIter) -> Any:
    reference = _loaders.get(iterator)
    loader = None if reference is None else reference()
    if loader is None or not _is_shown():
        return _next_batch(iterator)
    watchers = _alive_watchers()
    if iterator in _unseen:
        _unseen.remove(iterator)
        for watcher in watchers:
            watcher.before_pass(loader)
    for watcher in watchers:
        watcher.before_draw(loader)
    try:
        batch = _next_batch(iterator)
    except StopIteration:
        for watcher in watchers:
            watcher.after_pass(loader)
        # the iterator may be used for another pass
        if type(loader).__iter__ is not _watched_iterator:
            _unseen.add(iterator)
        raise
    for watcher in watchers:
        watcher.after_draw(loader, batch)
    return batch
