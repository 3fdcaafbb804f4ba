"""Random numbers that depend on the row alone: reading, mapping and joining a row draws the same ones wherever it runs.

Torch, numpy and Python have generators that belong to the whole process. Before a row is read, they are seeded by a
digest of the seed of the data, the epoch and the row. So numbers are the same on any ranks, in any workers, with or
without prefetching, and after a restart. Seeding costs 6 us, so it begins once something has drawn.

Worker processes import this file: nothing here may start MPI.
"""

import contextlib
import functools
import inspect
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Sampler

from hpcdist.nest import is_nest
from hpcdist.runtime.library_numbers import LIBRARIES

#: How deep the attributes of objects are looked at for generators.
_MAX_DEPTH = 8
#: Items of lists, tuples and dicts that are looked at, and objects altogether.
_MAX_ITEMS = 64
_MAX_OBJECTS = 10_000
#: Types of objects that hold no generator, or one that something else seeds.
_HOLD_NOTHING = (
    str,
    bytes,
    int,
    float,
    np.ndarray,
    torch.Tensor,
    type,
    types.ModuleType,
    DataLoader,
    Sampler,
)
#: How often generators are looked for: before and after the first rows.
_MAX_LOOKS = 3
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class DrawsBesideLoopError(Exception):
    """Something may have drawn random numbers of the process in a thread beside the program's loop."""


class _Thread(threading.local):
    """State of the thread that reads.

    Attributes:
        is_beside_loop: whether it runs beside the program's loop, which draws from the same random numbers.
    """

    is_beside_loop = False


#: One for the process, as each thread has a state in it.
_thread = _Thread()


def run_beside_loop() -> None:
    """Note that the calling thread runs beside the program's loop, from now on."""
    _thread.is_beside_loop = True


def seed_random_numbers(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch on the host.

    Args:
        seed: seed of at most 63 bits.
    """
    for library in LIBRARIES:
        library.seed(seed)
    torch.default_generator.manual_seed(seed)


class RandomState:
    """The states of the random numbers that belong to the whole process: torch's on the host, numpy's, Python's."""

    def __init__(self) -> None:
        self._of_torch = torch.default_generator.get_state()
        self._of_libraries = [library.state() for library in LIBRARIES]
        self._marks = [library.mark() for library in LIBRARIES]

    def restore(self) -> None:
        """Set the random numbers to these states."""
        torch.default_generator.set_state(self._of_torch)
        for library, state in zip(LIBRARIES, self._of_libraries, strict=True):
            library.set_state(state)

    def renew(self) -> None:
        """Take the states again. Cost: 1 us, and 80 us if numpy's or Python's numbers were drawn or seeded since."""
        self._of_torch = torch.default_generator.get_state()
        for number, library in enumerate(LIBRARIES):
            if library.mark() != self._marks[number]:
                self._of_libraries[number] = library.state()
                self._marks[number] = library.mark()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Leave the random numbers of the process after the block as they were before. Cost: 80 us."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def own_random_numbers(seed: int = 0) -> Iterator[None]:
    """Seed the libraries' random numbers in the block, and restore them.

    Raises:
        DrawsBesideLoopError: in a thread beside the loop, which draws from the same numbers.
    """
    if _thread.is_beside_loop:
        raise DrawsBesideLoopError
    with apart():
        seed_random_numbers(seed)
        yield


def mark() -> tuple[Any, ...]:
    """Return a value that differs once random numbers of the process were drawn. Cost: 2 us."""
    return (
        *(library.mark() for library in LIBRARIES),
        torch.default_generator.get_state().numpy().tobytes(),
    )


def seed_of(seed: int, *names: Any) -> int:
    """Return a seed of 63 bits that is derived from another one."""
    return xxhash.xxh3_64_intdigest(f"{seed} {names}".encode()) >> 1


class _ProgramSeeds:
    """Seeds that follow from the program's seeds. Each call returns another one."""

    def __init__(self) -> None:
        self._origin: tuple[list[int], list[int]] = ([], [])
        self._n_taken = 0

    def take(self) -> int:
        """Return the next seed."""
        origin = [torch.initial_seed()]
        origin += [library.origin for library in LIBRARIES if library.n_seeds]
        # the program may have set the same seed once more
        n_seeds = [library.n_seeds for library in LIBRARIES]
        if (origin, n_seeds) != self._origin:
            self._origin = (origin, n_seeds)
            self._n_taken = 0
        self._n_taken += 1
        return seed_of(self._n_taken, *origin)


#: One for the process, as the program seeds the generators of the process.
_program_seeds = _ProgramSeeds()


def program_seed() -> int:
    """Return a seed of 63 bits where the program passes none; a random one if it has set no seed at all."""
    return _program_seeds.take()


@dataclass(frozen=True)
class RowSeeds:
    """Seeds of the rows that are read at once.

    Attributes:
        seed: seed of the data, equal on all ranks.
        epoch: number of the epoch, or another number that tells apart two times at which a row is read.
        first: position of the first row, where a row may come twice. None where seeds depend on the numbers of rows.
    """

    seed: int
    epoch: int
    first: int | None = None

    def of_row(self, index: int, row: Any, stage: int = 0) -> int:
        """Return the seed of a row.

        Args:
            index: index of the row among the rows that are read at once.
            row: number of the row in the data.
            stage: number of the function, where several are called one after another.
        """
        name = row if self.first is None else self.first + index
        return seed_of(self.seed, self.epoch, name, stage)

    def of_all(self, first_row: Any, stage: int = 0) -> int:
        """Return the seed of work on all rows at once.

        Args:
            first_row: number of the first row in the data.
            stage: number of the function, where several are called one after another.
        """
        name = first_row if self.first is None else self.first
        return seed_of(self.seed, self.epoch, name, "all", stage)

    def branch(self, name: Any) -> "RowSeeds":
        """Return other seeds, for another source of the same rows."""
        return replace(self, seed=seed_of(self.seed, name))


class RowNumbers:
    """Calls functions that may draw random numbers.

    Args:
        roots: datasets and functions that may hold generators, which are then seeded, too.

    Attributes:
        is_drawing: whether something has drawn, so that numbers are seeded.
        n_alarms: number of times that something may have drawn beside the loop.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self._generators = generators_in(self._roots)
        self._n_looks = 1
        self._state: RandomState | None = None
        self._has_touched = False
        self.is_drawing = bool(self._generators)
        self.n_alarms = 0

    def note_alarm(self) -> None:
        """Note that something may have drawn beside the loop."""
        self.n_alarms += 1

    def call(
        self,
        seed: Callable[[], int] | None,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Return the result of a function, with seeded random numbers; the first function that draws is called twice.

        Args:
            seed: function that returns the seed of the numbers. None leaves the numbers as they come.
            function: function that reads, maps or joins rows.
            arguments: arguments of the function.

        Raises:
            DrawsBesideLoopError: if numbers were drawn beside the loop, by the function or the loop.
        """
        if not self.is_drawing:
            result = self.call_once(None, function, *arguments)
            if not self.is_drawing or seed is None:
                return result
        return self.call_once(seed, function, *arguments)

    def call_for_rows(
        self,
        seed: Callable[[int], int] | None,
        function: Callable[[Any], Any],
        rows: Sequence[Any],
    ) -> list[Any]:
        """Return the result of a function for each row, with random numbers that are seeded for the row.

        Args:
            seed: function that returns the seed of the numbers of a row, by its index. None leaves the numbers as they
                come.
            function: function that reads or maps a row; where it draws for the first time, it is called again for all
                rows.
            rows: arguments of the function, one for each row.

        Raises:
            DrawsBesideLoopError: if numbers were drawn beside the loop, by the function or the loop.
        """
        if not self.is_drawing:
            results = self.call_once(None, _map_all, function, rows)
            if not self.is_drawing or seed is None:
                return list(results)
        results = []
        for index, row in enumerate(rows):
            if seed is not None:
                self.seed(seed(index))
            results.append(function(row))
        return results

    def call_once(
        self,
        seed: Callable[[], int] | None,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Return the result of a function, with seeded random numbers once some function has drawn.

        Raises:
            DrawsBesideLoopError: if numbers were drawn beside the loop, by the function or the loop.
        """
        if self.is_drawing:
            if seed is not None:
                self.seed(seed())
            return function(*arguments)
        before = mark()
        result = function(*arguments)
        has_drawn = mark() != before
        has_generators = self._has_new_generators()
        if has_drawn and _thread.is_beside_loop:
            raise DrawsBesideLoopError  # it may have been the loop that has drawn
        if has_drawn or has_generators:
            self._has_touched = True
            self.is_drawing = True
            if _thread.is_beside_loop:
                raise DrawsBesideLoopError
        return result

    def _has_new_generators(self) -> bool:
        """Look once more for generators after the first call: a dataset may make them when it reads its first row."""
        if self._n_looks == _MAX_LOOKS:
            return False
        self._n_looks += 1
        self._generators = generators_in(self._roots)
        return bool(self._generators)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the process, and all generators that were found."""
        self._has_touched = True
        seed_random_numbers(seed)
        for number, generator in enumerate(self._generators, 1):
            seed_generator(generator, seed_of(seed, number))

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Leave the random numbers of the process as they were before the block, if something draws in it."""
        if _thread.is_beside_loop:  # nothing draws there
            yield
            return
        if self._state is None:
            self._state = RandomState()
        self._state.renew()
        self._has_touched = False
        try:
            yield
        finally:
            if self._has_touched:
                self._state.restore()


def _map_all(function: Callable[[Any], Any], rows: Sequence[Any]) -> list[Any]:
    return [function(row) for row in rows]


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of torch, numpy or Python.

    Args:
        generator: generator of any of the libraries.
        seed: seed of at most 63 bits.
    """
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def generators_in(roots: Iterable[Any]) -> list[Any]:
    """Return the generators that datasets and functions hold, each once, in an order that is the same on all ranks.

    Looked at are attributes, the items of lists, tuples and dicts, closures, defaults, and the variables of modules
    that functions and methods of the program name.
    """
    generators: list[Any] = []
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if id(item) in seen or len(seen) > _MAX_OBJECTS:
                continue
            seen.add(id(item))
            if isinstance(item, GENERATORS):
                generators.append(item)
            else:
                inner += _held_by(item)
        level = inner
    process_wide = [torch.default_generator, np.random.mtrand._rand, random._inst]
    process_wide_ids = set(map(id, process_wide))
    return [item for item in generators if id(item) not in process_wide_ids]


def _held_by(item: Any) -> Sequence[Any]:
    """Return the objects that an object holds directly."""
    if isinstance(item, _HOLD_NOTHING):
        return ()
    if is_nest(item):
        values = item.values() if isinstance(item, dict) else item
        return list(values)[:_MAX_ITEMS]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.FunctionType):
        return _held_by_function(item)
    return [*getattr(item, "__dict__", {}).values(), *_methods_of(type(item))]


def _held_by_function(function: types.FunctionType) -> list[Any]:
    """Return the objects that a function of the program reaches by its closure, its defaults and its module's names."""
    reachable = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    reachable += list(function.__defaults__ or ())
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if _is_of_program(value):
            reachable.append(value)
    return reachable


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _is_of_program(value: Any) -> bool:
    """Return whether a global value is a generator, a nest, or a function or object of the program or its libraries.

    Objects of hpcdist and torch, such as a strategy or a model, do not count: they hold much, and no generator of a
    row.
    """
    if isinstance(value, GENERATORS) or is_nest(value):
        return True
    if isinstance(value, type):
        return False
    module = getattr(value, "__module__", None) or ""
    return _package_of(module) not in ("", "builtins", "torch", "numpy", "hpcdist")


def _methods_of(kind: type) -> list[Any]:
    """Return the functions by which a class of the program reads and transforms rows."""
    methods: list[Any] = []
    for ancestor in inspect.getmro(kind):
        package = _package_of(ancestor.__module__)
        if package in ("torch", "numpy", "builtins", "hpcdist", "typing"):
            continue
        for value in vars(ancestor).values():
            if isinstance(value, types.FunctionType):
                methods.append(value)
    return methods


def _package_of(module: str) -> str:
    package, _, _ = module.partition(".")
    return package
