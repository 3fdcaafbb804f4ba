"""Reading ahead in a thread, pinned copies, and copies to the GPU."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import torch

from hpcdist.nest import Nest, map_nest

Item = TypeVar("Item")
_LOOK_S = 0.1
_JOIN_S = 5.0


def read_ahead(items: Iterator[Item], n_ahead: int) -> Generator[Item, None, None]:
    """Yield the items of an iterator that a thread runs, at most `n_ahead` of them before they are asked for.

    The thread ends with this generator, at most one item later; its error is raised at the place of the item.
    """
    handed: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(n_ahead)
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(items, handed, stop), name="hpcdist-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = _get(handed, thread)
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join(_JOIN_S)


def _get(handed: Any, thread: threading.Thread) -> Any:
    while True:
        try:
            return handed.get(timeout=_LOOK_S)
        except queue.Empty:
            # the last entry may have come between the wait and this look
            if not thread.is_alive() and handed.empty():
                return None, RuntimeError("prefetch: expected a running thread, got one that was ended; start again.")


def _read(items: Iterator[Any], handed: Any, stop: threading.Event) -> None:
    entry: tuple[Any, BaseException | None] = (None, StopIteration())
    try:
        for item in items:
            if not _put(handed, (pinned(item), None), stop):
                return
    except BaseException as error:  # noqa: BLE001 - it is raised where the item is asked for
        entry = None, error
    finally:
        getattr(items, "close", lambda: None)()
    _put(handed, entry, stop)


def _put(handed: Any, entry: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            handed.put(entry, timeout=_LOOK_S)
        except queue.Full:
            continue
        return True
    return False


def pinned(nest: Nest) -> Nest:
    """Return the nest with pinned copies of host tensors, if torch uses a GPU already.

    Where it does not, pinning would start CUDA, which takes memory on a GPU that nobody asked for.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return nest
    return map_nest(lambda one: one.pin_memory() if isinstance(one, torch.Tensor) and not one.is_cuda else one, nest)


def fetched(nest: Nest) -> Nest:
    """Return the nest with tensors copied to the current GPU; without a GPU, the nest."""
    if not torch.cuda.is_available():
        return nest
    return map_nest(
        lambda one: one.to("cuda", non_blocking=True) if isinstance(one, torch.Tensor) else one,
        nest,
    )
