"""Stages that overlap reading with computing: a thread that reads ahead, and copies to a device one item ahead."""

import logging
import queue
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from hpcdist.data.row_numbers import DrawsBesideLoopError, RowNumbers, run_beside_loop
from hpcdist.nest import Nest, map_nest

#: Batches of a pass: the cursor after each, and its parts.
Items = Generator[tuple[Any, list[Nest]], None, None]
_POLL_S = 0.1
_JOIN_S = 5.0
#: How often random numbers may have been drawn beside the thread, before all batches are read without it.
_MAX_ALARMS = 8
logger = logging.getLogger("hpcdist")


class Reading(Protocol):
    """A reader of batches from any position on."""

    #: Caller of the program's functions, which may draw random numbers.
    numbers: RowNumbers

    def read_from(self, cursor: Any) -> Items:
        """Yield (cursor after it, parts) of every batch from a position on."""


def read_ahead(reading: Reading, cursor: Any, n_ahead: int) -> Items:
    """Yield batches that a thread reads, at most `n_ahead` of them before they are asked for.

    The thread pins host tensors. It ends with this generator, at most one batch later; an error in it is raised where
    its batch is asked for.

    Functions that draw random numbers of the process never run in the thread: the loop draws from the same numbers. So
    the first batch is read here, and if something draws then, all batches are. The thread ends where numbers change
    beside it, and that batch is read here again; where this happens often, as the loop itself draws, all later batches
    are read here, too.

    Args:
        reading: reader of batches.
        cursor: cursor from which to read.
        n_ahead: number of batches.
    """
    while True:
        items = reading.read_from(cursor)
        with closing(items):
            first = next(items, None)
            if first is None:
                return
            if reading.numbers.is_drawing or reading.numbers.n_alarms >= _MAX_ALARMS:
                yield first
                yield from items
                return
            try:
                for item in read_in_thread(items, n_ahead, [first]):
                    cursor = item[0]
                    yield item
            except DrawsBesideLoopError:
                _note_alarm(reading.numbers)
                continue
            return


def _note_alarm(numbers: RowNumbers) -> None:
    numbers.note_alarm()
    if numbers.n_alarms == _MAX_ALARMS:
        logger.info(
            "prefetch: the loop draws random numbers itself, so its rows are read in it; use workers instead."
        )


def read_in_thread(items: Items, n_ahead: int, first_items: Sequence[Any] = ()) -> Items:
    """Yield items that a thread takes.

    Args:
        items: items to take.
        n_ahead: largest number of items that are taken before they are asked for.
        first_items: items that were taken before, and come first.

    Raises:
        DrawsBesideLoopError: where numbers were drawn, by the items or the loop.
    """
    entries: queue.Queue[Any] = queue.Queue(n_ahead)
    stop = threading.Event()
    arguments = items, entries, stop
    thread = threading.Thread(target=_read, args=arguments, name="hpcdist-prefetch", daemon=True)
    thread.start()
    try:
        yield from first_items
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
    """Return the next (item, error) of a thread."""
    while True:
        try:
            return entries.get(timeout=_POLL_S)
        except queue.Empty:
            # the last entry may have come between the wait and this check
            if not thread.is_alive() and entries.empty():
                return None, RuntimeError(
                    "prefetch: expected a running thread, got one that has ended; start again."
                )


def _read(items: Items, entries: Any, stop: threading.Event) -> None:
    run_beside_loop()
    last: tuple[Any, BaseException] = (None, StopIteration())
    try:
        for cursor, parts in items:
            if not _put(entries, ((cursor, [pinned(part) for part in parts]), None), stop):
                return
    except BaseException as error:  # noqa: BLE001 - it is raised where the item is asked for
        last = (None, error)
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

    Elsewhere pinning would start CUDA, which takes memory on a GPU that the program does not use.
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
            following = (cursor, [on_device(part, device) for part in parts])
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
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, np.ndarray):
        return None
    try:
        return torch.as_tensor(leaf, device="cpu")
    except TypeError:
        return None
