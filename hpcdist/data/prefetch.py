"""Stages that overlap reading with computing: a thread that reads ahead, and copies to a device one item ahead."""

import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from hpcdist.nest import Nest, map_nest

#: Batches of a pass: the cursor after each, and its parts.
Items = Generator[tuple[Any, list[Nest]], None, None]
_POLL_S = 0.1
_JOIN_S = 5.0


def read_ahead(items: Items, n_ahead: int) -> Items:
    """Yield items that a thread reads, at most `n_ahead` of them before they are asked for.

    The thread pins host tensors. It ends with this generator, at most one item later; an error in it is raised where
    its item is asked for.
    """
    entries: queue.Queue[Any] = queue.Queue(n_ahead)
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(items, entries, stop), name="hpcdist-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = _get(entries, thread)
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join(_JOIN_S)


def _get(entries: Any, thread: threading.Thread) -> Any:
    while True:
        try:
            return entries.get(timeout=_POLL_S)
        except queue.Empty:
            # the last entry may have come between the wait and this check
            if not thread.is_alive() and entries.empty():
                return None, RuntimeError("prefetch: expected a running thread, got one that has ended; start again.")


def _read(items: Items, entries: Any, stop: threading.Event) -> None:
    last: tuple[Any, BaseException] = (None, StopIteration())
    try:
        for cursor, parts in items:
            if not _put(entries, ((cursor, [pinned(part) for part in parts]), None), stop):
                return
    except BaseException as error:  # noqa: BLE001 - it is raised where the item is asked for
        last = None, error
    finally:
        items.close()
    _put(entries, last, stop)


def _put(entries: Any, entry: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            entries.put(entry, timeout=_POLL_S)
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
    return map_nest(pinned_leaf, nest)


def pinned_leaf(leaf: Any) -> Any:
    """Return a pinned copy of a tensor or a packed sequence on the host; anything else as it is."""
    is_on_host = isinstance(leaf, (torch.Tensor, PackedSequence)) and not leaf.is_cuda
    return leaf.pin_memory() if is_on_host else leaf


def moved_ahead(items: Items, device: torch.device) -> Items:
    """Yield items with their parts on a device; the copy of an item starts before the item before it is used."""
    with closing(items):
        current = None
        for cursor, parts in items:
            following = cursor, [on_device(part, device) for part in parts]
            if current is not None:
                yield current
            current = following
        if current is not None:
            yield current


def on_device(nest: Nest, device: torch.device) -> Nest:
    """Return the nest with tensors on a device in place of tensors and arrays; text stays an array.

    Copies to a GPU go through pinned memory, and this call does not wait for them.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):  # its lengths stay on the host
            return leaf.to(device)  # type: ignore[arg-type]  # torch declares half of what it takes
        host = _as_tensor(leaf)
        if host is None:
            return leaf
        if device.type == "cuda" and host.device.type == "cpu" and not host.is_pinned():
            host = host.pin_memory()
        return host.to(device, non_blocking=True)

    return map_nest(move, nest)


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    """Return a tensor, or an array as a tensor on the host; None for a dtype that torch does not have."""
    if not isinstance(leaf, np.ndarray):
        return leaf if isinstance(leaf, torch.Tensor) else None
    try:
        return torch.as_tensor(leaf, device="cpu")
    except TypeError:
        return None
