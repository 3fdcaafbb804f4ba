"""The random numbers of Python and numpy that belong to the whole process: are they drawn, and who has seeded them.

Both libraries draw by a Mersenne Twister of 624 words. Its position and its first word change with every draw. They are
read from memory where that looks as expected: to ask a library for its whole state costs about 25 us. A mark is taken
for every part of a batch, and the state for every run of a fixed number of replicas. The normal number that numpy has
drawn ahead is at no known address, so numpy is asked for it.
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
#: Numbers that differ between two looks if random numbers were drawn between them.
Mark = tuple[int, ...]


class Words:
    """Values of a generator in memory.

    Args:
        values: numbers of 32 bits.
        position: index of the generator's position among them.
        first: index of the first word among them.
    """

    def __init__(self, values: Any, position: int, first: int) -> None:
        self._values = values
        self._position = position
        self._first = first
        self._words = np.frombuffer(values, np.uint32)[first : first + _N_WORDS]

    def mark(self) -> Mark:
        """Return the position and the first word. Cost: 0.1 us."""
        values = self._values
        return values[self._position], values[self._first]

    def copy(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return a copy of all words, as an (624,) uint32 array."""
        words: np.ndarray[Any, np.dtype[np.uint32]] = self._words.copy()
        return words

    def are(self, words: np.ndarray[Any, np.dtype[np.uint32]]) -> bool:
        """Return whether all words are equal to an (624,) uint32 array. Cost: 0.5 us."""
        return self._words.tobytes() == words.tobytes()


class Library(ABC):
    """The random numbers of one library.

    Args:
        name: name of the library.

    Attributes:
        name: name of the library.
        n_seeds: number of times that the program has seeded it, as far as that was seen.
        origin: digest, of 63 bits, of the state after the program's last seed, or else of the state by chance.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.n_seeds = 0
        self._words: Words | None = None
        self.origin = self.digest()
        self._words = self._words_in_memory()

    @abstractmethod
    def seed(self, key: int) -> None:
        """Seed it, without counting that as a seed of the program.

        Args:
            key: number of at most 63 bits.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return words, an (624,) uint32 array, position, and the normal number that was drawn ahead, or None."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Draw the next numbers from a state."""

    @abstractmethod
    def _expected_words(self) -> Words:
        """Return the words at the address where they should be in memory."""

    @abstractmethod
    def _draw(self) -> None:
        """Draw a number."""

    def mark(self) -> Mark:
        """Return numbers that differ once random numbers were drawn."""
        if self._words is None:
            return self._mark_of_state()
        return self._words.mark()

    def _mark_of_state(self) -> Mark:
        """Return the mark, from the state that the library returns."""
        state = self.state()
        first = int(state["words"][0])
        return state["position"], first

    def digest(self) -> int:
        """Return a digest of the state, of 63 bits."""
        state = self.state()
        digest = xxhash.xxh3_64()
        digest.update(f"{state['position']} {state['gauss']}".encode())
        digest.update(state["words"].tobytes())
        return digest.intdigest() >> 1

    def note_seed(self) -> None:
        """Note that the program has seeded it."""
        self.n_seeds += 1
        self.origin = self.digest()

    def share(self, origin: int) -> None:
        """Seed a library that the program has not seeded as other ranks do, by the digest of the chief's state."""
        self.seed(origin)
        self.origin = origin

    def _words_in_memory(self) -> Words | None:
        """Return the words in memory; None where memory does not look as expected."""
        before = self.state()
        words = self._expected_words()
        is_expected = True
        for key in (1, 2, 3):
            self.seed(key)
            self._draw()
            if words.mark() != self._mark_of_state() or not words.are(self.state()["words"]):
                is_expected = False
        self.set_state(before)
        return words if is_expected else None


class _PythonNumbers(Library):
    """The functions of the module `random`."""

    def __init__(self) -> None:
        self._generator: Any = random._inst
        self._seed_as_python = random.seed
        super().__init__("Python")

    def seed(self, key: int) -> None:
        self._seed_as_python(key)

    def state(self) -> dict[str, Any]:
        if self._words is not None:
            position, _ = self._words.mark()
            return {
                "words": self._words.copy(),
                "position": position,
                "gauss": self._generator.gauss_next,
            }
        state = self._generator.getstate()
        numbers = state[1]
        words = np.array(numbers[:_N_WORDS], np.uint32)
        return {"words": words, "position": numbers[_N_WORDS], "gauss": state[2]}

    def set_state(self, state: dict[str, Any]) -> None:
        words = np.asarray(state["words"]).tolist()
        words.append(int(state["position"]))
        self._generator.setstate((3, tuple(words), state["gauss"]))

    def _expected_words(self) -> Words:
        address = id(self._generator) + object.__basicsize__
        values = (ctypes.c_uint32 * (_N_WORDS + 1)).from_address(address)
        return Words(values, position=0, first=1)

    def _draw(self) -> None:
        self._generator.random()


class _NumpyNumbers(Library):
    """The functions of the module `numpy.random`."""

    def __init__(self) -> None:
        self._generator = np.random.mtrand._rand
        self._bits = self._generator._bit_generator
        self._seed_as_numpy = np.random.seed
        # numpy's own first seed leaves a sequence, a seed of the program does not
        was_seeded = getattr(self._bits, "_seed_seq", None) is None
        super().__init__("numpy")
        self.n_seeds = int(was_seeded)

    def seed(self, key: int) -> None:
        high = key >> 32
        low = key & 0xFFFFFFFF
        self._seed_as_numpy(high ^ low)

    def state(self) -> dict[str, Any]:
        state: Any = self._generator.get_state()
        has_gauss = state[3]
        gauss = None
        if has_gauss:
            gauss = state[4]
        return {"words": state[1], "position": int(state[2]), "gauss": gauss}

    def set_state(self, state: dict[str, Any]) -> None:
        words = np.asarray(state["words"], np.uint32)
        position = int(state["position"])
        has_gauss = int(state["gauss"] is not None)
        gauss = state["gauss"] or 0.0
        self._generator.set_state(("MT19937", words, position, has_gauss, gauss))

    def _expected_words(self) -> Words:
        address = self._bits.ctypes.state_address
        values = (ctypes.c_uint32 * (_N_WORDS + 1)).from_address(address)
        return Words(values, position=_N_WORDS, first=0)

    def _draw(self) -> None:
        self._generator.random_sample()


def _noting(library: Library, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a library that seeds it, so that its calls are noted."""

    @functools.wraps(function)
    def seed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        library.note_seed()
        return result

    return seed


#: One for each library, as Python and numpy have one generator for the process.
PYTHON: Library = _PythonNumbers()
NUMPY: Library = _NumpyNumbers()
LIBRARIES: Sequence[Library] = (PYTHON, NUMPY)

random.seed = _noting(PYTHON, random.seed)
random.setstate = _noting(PYTHON, random.setstate)
np.random.seed = _noting(NUMPY, np.random.seed)
np.random.set_state = _noting(NUMPY, np.random.set_state)
