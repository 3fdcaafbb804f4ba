"""The random numbers of Python and numpy that belong to the whole process: are they drawn, and who has seeded them.

Both libraries draw by a Mersenne Twister of 624 words. Its position and its first word change with every draw. They are
read from memory where that looks as expected: to ask a library for its whole state costs 7 us and 24 us, and a mark is
taken for every part of a batch.
"""

import ctypes
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

_N_WORDS = 624
#: What tells that numbers were drawn between two looks.
Mark = tuple[int, ...]


class Library(ABC):
    """The random numbers of one library.

    Args:
        name: of the library.

    Attributes:
        name: as given.
        n_seeds: how often the program has seeded it, as far as it was seen.
        origin: what the program's last seed, or else chance, has made of it: a digest, of 63 bits.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.n_seeds = 0
        self.origin = self.digest()
        self._words = self._words_in_memory()

    @abstractmethod
    def seed(self, key: int) -> None:
        """Seed it, unseen as a seed of the program.

        Args:
            key: of at most 63 bits.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return words, an (624,) uint32 array, position, and the normal number that was drawn ahead, or None."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""

    @abstractmethod
    def _candidate(self) -> tuple[Any, int, int]:
        """Return uint32 values in memory, where among them the position should be, and where the first word."""

    def mark(self) -> Mark:
        """Return what differs once numbers were drawn. Cost: 0.1 us."""
        if self._words is None:
            state = self.state()
            return state["position"], int(state["words"][0])
        values, position, first = self._words
        return values[position], values[first]

    def digest(self) -> int:
        """Return a digest of the state, of 63 bits."""
        state = self.state()
        text = f"{state['position']} {state['gauss']} ".encode()
        return xxhash.xxh3_64_intdigest(text + state["words"].tobytes()) >> 1

    def note_seed(self) -> None:
        """Note that the program has seeded it."""
        self.n_seeds += 1
        self.origin = self.digest()

    def share(self, origin: int) -> None:
        """Seed what the program has not seeded as other ranks do, by what chance has made of the chief's."""
        self.seed(origin)
        self.origin = origin

    def _words_in_memory(self) -> tuple[Any, int, int] | None:
        """Return where position and first word are; None where memory does not look as expected."""
        before = self.state()
        try:
            values, position, first = self._candidate()
            is_expected = True
            for key in (1, 2, 3):
                self.seed(key)
                self._draw()
                state = self.state()
                seen = (values[position], values[first])
                is_expected = is_expected and seen == (state["position"], int(state["words"][0]))
        finally:
            self.set_state(before)
        return (values, position, first) if is_expected else None

    @abstractmethod
    def _draw(self) -> None:
        """Draw a number."""


class _PythonNumbers(Library):
    """The functions of the module `random`."""

    def __init__(self) -> None:
        self._generator = random._inst
        self._seed_as_python = random.seed
        super().__init__("Python")

    def seed(self, key: int) -> None:
        self._seed_as_python(key)

    def state(self) -> dict[str, Any]:
        _, words, gauss = self._generator.getstate()
        return {"words": np.array(words[:_N_WORDS], np.uint32), "position": words[_N_WORDS], "gauss": gauss}

    def set_state(self, state: dict[str, Any]) -> None:
        words = tuple(np.asarray(state["words"]).tolist())
        self._generator.setstate((3, (*words, int(state["position"])), state["gauss"]))

    def _candidate(self) -> tuple[Any, int, int]:
        values = (ctypes.c_uint32 * 2).from_address(id(self._generator) + object.__basicsize__)
        return values, 0, 1

    def _draw(self) -> None:
        self._generator.random()


class _NumpyNumbers(Library):
    """The functions of the module `numpy.random`."""

    def __init__(self) -> None:
        self._generator = np.random.mtrand._rand
        self._bits = self._generator._bit_generator
        self._seed_as_numpy = np.random.seed
        was_seeded = getattr(self._bits, "_seed_seq", None) is None  # a seed of the program leaves no sequence
        super().__init__("numpy")
        self.n_seeds = int(was_seeded)

    def seed(self, key: int) -> None:
        self._seed_as_numpy((key ^ (key >> 32)) & 0xFFFFFFFF)

    def state(self) -> dict[str, Any]:
        _, words, position, has_gauss, gauss = self._generator.get_state()
        return {"words": words, "position": int(position), "gauss": gauss if has_gauss else None}

    def set_state(self, state: dict[str, Any]) -> None:
        gauss = state["gauss"]
        words = np.asarray(state["words"], np.uint32)
        self._generator.set_state(("MT19937", words, int(state["position"]), int(gauss is not None), gauss or 0.0))

    def _candidate(self) -> tuple[Any, int, int]:
        values = (ctypes.c_uint32 * (_N_WORDS + 1)).from_address(self._bits.ctypes.state_address)
        return values, _N_WORDS, 0

    def _draw(self) -> None:
        self._generator.random_sample()


def _noting(library: Library, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a library that seeds it, and is noted."""

    @functools.wraps(function)
    def seed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        library.note_seed()
        return result

    return seed


PYTHON: Library = _PythonNumbers()
NUMPY: Library = _NumpyNumbers()
LIBRARIES: Sequence[Library] = (PYTHON, NUMPY)

random.seed = _noting(PYTHON, random.seed)
random.setstate = _noting(PYTHON, random.setstate)
np.random.seed = _noting(NUMPY, np.random.seed)
np.random.set_state = _noting(NUMPY, np.random.set_state)
