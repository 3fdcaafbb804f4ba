"""The work of a worker process of a distributed DataLoader: it reads and joins items, and notes which one it reads.

Worker processes import this file: nothing here may start MPI.
"""

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpcdist.child_processes import obey_only
from hpcdist.data.first_rows import FirstRows
from hpcdist.data.parts_without_rows import part_without_rows
from hpcdist.data.prefetch import pinned_leaf
from hpcdist.data.row_numbers import RowNumbers, RowSeeds, own_random_numbers
from hpcdist.errors import DataError
from hpcdist.nest import Nest, map_nest


@dataclass(frozen=True)
class EmptyPart:
    """A part of no items, or why there is none."""

    part: Nest
    refusal: str | None = None

    @classmethod
    def made_of(cls, join: Callable[[list[Any]], Nest], item: Any) -> "EmptyPart":
        """Return the part of no items, in the form that `join` gives to one item."""
        try:
            return cls(part_without_rows(join, item))
        except DataError as error:
            return cls(None, str(error))
        except Exception as error:  # noqa: BLE001  the program joins other numbers of items, and may never need this
            return cls(
                None,
                f"DataLoader: expected a collate_fn that joins one item, as a batch leaves replicas without rows, got "
                f"{type(error).__name__}: {error}; use drop_last=True.",
            )

    def part_or_error(self) -> Nest:
        """Return a copy of the part, as the parts that a loop has drawn are identified by their memory.

        Raises:
            DataError: where there is no such part.
        """
        if self.refusal is not None:
            raise DataError(self.refusal)
        return map_nest(_copied, self.part)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf


@dataclass(frozen=True)
class Joined:
    """A part of a batch, as a worker sends it.

    Attributes:
        part: part of a batch.
        n_rows: number of rows of the part; 0 where they are not counted.
        empty_part: part of no items, with the first part.
        first_rows: rows that the worker has drawn first, with the first parts of a stream.
    """

    part: Nest
    n_rows: int = 0
    empty_part: EmptyPart | None = None
    first_rows: FirstRows | None = None

    def pin_memory(self) -> "Joined":
        """Return this with pinned copies of tensors; torch calls it in the thread that pins."""
        return replace(self, part=map_nest(pinned_leaf, self.part))


@dataclass(frozen=True)
class ItemRequest:
    """Items that make a part of a batch.

    Attributes:
        keys: keys of the items in their dataset: numbers, or other objects.
        seeds: seeds of the random numbers that are drawn for the items. None leaves the numbers as they come.
    """

    keys: list[Any]
    seeds: RowSeeds | None = None

    def row_seeds(self) -> Callable[[int], int] | None:
        """Return a function that returns the seed of an item by its index; None where numbers are not seeded."""
        seeds = self.seeds
        if seeds is None:
            return None
        return lambda index: seeds.of_row(index, self.keys[index])

    def seed_of_all(self, stage: int) -> Callable[[], int] | None:
        """Return a function that returns the seed of a stage of work on all items at once."""
        if self.seeds is None:
            return None
        return functools.partial(self.seeds.of_all, self.keys[0], stage)


#: Stages of `RowSeeds`: the work that is done on all items at once.
_READING = 0
_JOINING = 1


@dataclass(frozen=True)
class ReadItems:
    """Items that were read, and the request for them."""

    request: ItemRequest
    items: list[Any]


def join_items(
    join: Callable[[list[Any]], Nest],
    read: ReadItems,
    numbers: RowNumbers,
) -> Nest:
    """Return items joined, with random numbers that are seeded for them.

    Args:
        join: function that joins a list of items into a part.
        read: items, and the request for them.
        numbers: caller of the functions that may draw random numbers.
    """
    return numbers.call(read.request.seed_of_all(_JOINING), join, read.items)


class JoinInWorker:
    """Joins items in a worker process.

    Args:
        join: function that joins a list of items into a part.
        numbers: caller of the functions that may draw random numbers.
    """

    def __init__(self, join: Callable[[list[Any]], Nest], numbers: RowNumbers) -> None:
        self._join = join
        self._numbers = numbers
        self._is_first = True

    def __call__(self, read: ReadItems) -> Joined:
        """Return the items joined."""
        part = join_items(self._join, read, self._numbers)
        if not self._is_first:
            return Joined(part)
        self._is_first = False
        with own_random_numbers():
            return Joined(part, empty_part=EmptyPart.made_of(self._join, read.items[0]))


class Progress:
    """The item that each worker of a loader reads, in memory that all processes see.

    Args:
        n_workers: number of workers.
        form: text that names an item, with {} for its number.
    """

    def __init__(self, n_workers: int, form: str) -> None:
        self._form = form
        self._keys = torch.full((n_workers,), -1, dtype=torch.int64)
        self._keys.share_memory_()  # type: ignore[no-untyped-call]

    def note(self, worker: int, key: Any) -> None:
        """Note that a worker begins to read an item; of keys that are no row numbers, nothing is known."""
        is_row_number = isinstance(key, Integral) and 0 <= int(key) < 1 << 63
        self._keys[worker] = int(key) if is_row_number else -1

    def describe(self, worker: int) -> str:
        """Return the name of the item that a worker has begun to read last."""
        key = int(self._keys[worker])
        if key < 0:
            return self._form.format("of unknown number")
        return self._form.format(key)


def _ignore(key: Any) -> None:
    """Do nothing."""


def read_items(
    items: Any,
    request: ItemRequest,
    numbers: RowNumbers,
    note: Callable[[Any], None] = _ignore,
) -> ReadItems:
    """Return items of a dataset as torch reads them, at once if the dataset can, with seeded random numbers.

    Args:
        items: dataset of the program.
        request: request for the items.
        numbers: caller of the functions that may draw random numbers.
        note: function that is called with the key of each item that is about to be read; with the first key of items
            that are read at once.
    """
    if hasattr(items, "__getitems__"):
        note(request.keys[0])
        seed = request.seed_of_all(_READING)
        values = numbers.call(seed, items.__getitems__, request.keys)
        return ReadItems(request, list(values))

    def read_item(key: Any) -> Any:
        note(key)
        return items[key]

    return ReadItems(request, numbers.call_for_rows(request.row_seeds(), read_item, request.keys))


class NotedItems:
    """Items of a dataset; workers note which one they read.

    Args:
        items: dataset of the program.
        numbers: caller of the functions that may draw random numbers.
        progress: memory in which workers note the items that they read.

    Attributes:
        items: dataset of the program.
    """

    def __init__(self, items: Any, numbers: RowNumbers, progress: Progress) -> None:
        self.items = items
        self._numbers = numbers
        self._progress = progress
        self._worker: int | None = None

    def __getitems__(self, request: ItemRequest) -> ReadItems:
        """Return the items of a request; torch calls it with what the batch sampler yields."""
        return read_items(self.items, request, self._numbers, self._note)

    def _note(self, key: Any) -> None:
        """Note that this worker begins to read an item."""
        if self._worker is None:
            info: Any = get_worker_info()
            self._worker = info.id
        self._progress.note(self._worker, key)


def show_own_items() -> None:
    """Let get_worker_info() return the program's dataset, as in a worker of the program's loader."""
    info: Any = get_worker_info()
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=info.id,
        num_workers=info.num_workers,
        seed=info.seed,
        dataset=info.dataset.items,
    )


def begin_worker(
    owner: int,
    init: Callable[[int], None] | None,
    worker_id: int,
) -> None:
    """Begin the work of a process.

    Args:
        owner: id of the rank's process, which alone ends this one.
        init: worker_init_fn of the program.
        worker_id: number of the worker.
    """
    obey_only(owner)
    show_own_items()
    call_init(init, worker_id)


def call_init(init: Callable[[int], None] | None, worker: int) -> None:
    """Call the program's worker_init_fn, if there is one.

    Raises:
        DataError: when it raises; its traceback is printed.
    """
    if init is None:
        return
    try:
        init(worker)
    except Exception as error:  # noqa: BLE001  the program raises what it likes
        traceback.print_exc()
        raise DataError(
            f"DataLoader: expected worker_init_fn to return in worker {worker}, got {type(error).__name__}: {error}; "
            f"look at its traceback above."
        ) from None


def collate(items: list[Any]) -> Nest:
    """Return items joined by torch's default_collate, with tuples for tuples."""
    return _formed_as(items[0], default_collate(items))


def _formed_as(item: Any, joined: Any) -> Any:
    """Return joined items with the dicts and tuples of an item in place of torch's dicts and lists."""
    if isinstance(item, dict):
        return {key: _formed_as(item[key], joined[key]) for key in item}
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
        parts = [_formed_as(*pair) for pair in zip(item, joined, strict=True)]
        return tuple(parts) if isinstance(item, tuple) else parts
    return joined


def collate_of(loader: "DataLoader[Any]") -> Callable[[list[Any]], Nest]:
    """Return the function that joins the items of a loader."""
    if loader.collate_fn is default_collate or loader.batch_sampler is None:
        return collate
    return loader.collate_fn
