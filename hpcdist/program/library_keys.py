"""Keeps the random numbers of Python and numpy in the program's loop the same in a run that was restarted.

They are seeded where the loop gets a part of a batch and after each optimizer step, by what the library was seeded with
before the first use of a model, and the place in training: equal on all ranks, unless the program seeds each rank in
its own way. What the program seeds later keeps its sequence, whose state is saved. As long as a library is not drawn
from, it is left alone.
"""

from typing import Any

import xxhash

from hpcdist.runtime.library_numbers import LIBRARIES, Library, Mark


def _digest_of(seed: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1


class _LibraryKey:
    """Seeds one library.

    Args:
        library: whose numbers.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._origin: int | None = None
        self._is_started = False
        self._n_seeds = 0
        self._has_drawn = False
        self._has_program_seeded = False
        self._mark: Mark | None = None
        self._is_restored = False
        self._restored_state: dict[str, Any] | None = None
        self._restored_origin: int | None = None
        self._states: dict[int | str, dict[str, Any]] = {}
        self._run_mark: Mark = ()
        self._run_state: dict[str, Any] | None = None

    def start(self, seed: int) -> None:
        """Take what the program has seeded so far as the origin of all numbers; else the seed of torch's.

        A restore has set the origin already; what the program has seeded since then, it had seeded before the start in
        the run that was saved, too.
        """
        self._begin_training()
        if self._origin is None:
            self._origin = (
                self._library.origin if self._n_seeds else _digest_of(seed, self._library.name)
            )

    def _begin_training(self) -> None:
        """Count seeds from here on as those that the program sets later."""
        if not self._is_started:
            self._is_started = True
            self._n_seeds = self._library.n_seeds

    def seed(self, place: str) -> None:
        """Seed the library for a place in training; from the first numbers on that are drawn in the loop."""
        if self._origin is None or self._is_programs_sequence():
            return
        if self._mark is not None and not self._has_drawn:
            if self._library.mark() == self._mark:
                return
            self._has_drawn = True
        name = place if self._has_drawn else "before the first numbers"
        self._library.seed(_digest_of(self._origin, name))
        self._mark = self._library.mark()
        if self._run_state is not None:  # a step of replicas in a run: all continue from here
            self.begin_run()

    def begin_batch(self, place: str) -> None:
        """Seed the library for a batch that is handed out; a sequence of the program's goes on where it was saved.

        What was drawn between a restore and the first batch was drawn by the program's setup.
        """
        if self._is_restored:
            self._is_restored = False
            self._mark = None
            is_other = (
                self._library.n_seeds != self._n_seeds
                and self._library.origin != self._restored_origin
            )
            if self._restored_state is not None and not is_other:
                self._n_seeds = self._library.n_seeds
                self._library.set_state(self._restored_state)
            self._begin_training()
        self.seed(place)

    def _is_programs_sequence(self) -> bool:
        """Return whether the program has seeded the library after the start."""
        if self._library.n_seeds != self._n_seeds:
            self._n_seeds = self._library.n_seeds
            self._has_program_seeded = True
        return self._has_program_seeded

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of this rank."""
        is_programs = self._origin is not None and self._is_programs_sequence()
        sequence: dict[str, Any] | None = None
        if is_programs:
            sequence = self._library.state()
            sequence["words"] = sequence["words"].tolist()
        has_drawn = self._has_drawn or (
            self._mark is not None and self._library.mark() != self._mark
        )
        seeded = self._library.origin if is_programs else None
        return {
            "origin": self._origin,
            "has_drawn": has_drawn,
            "sequence": sequence,
            "seeded": seeded,
        }

    def restore(self, state: dict[str, Any], place: str) -> None:
        """Resume from what a checkpoint stores."""
        self._origin = state["origin"]
        self._has_drawn = state["has_drawn"]
        self._n_seeds = self._library.n_seeds
        self._mark = None
        self._has_program_seeded = state["sequence"] is not None
        self._is_restored = True
        self._restored_state = state["sequence"]
        self._restored_origin = state["seeded"]
        if self._restored_state is not None:
            self._library.set_state(self._restored_state)
        self.seed(place)

    # -- replicas of one process, each of which draws what the others draw ------------------------------------------

    def begin_run(self) -> None:
        """Let every replica of a run begin with the numbers that come now. Cost: 30 us."""
        self._run_mark = self._library.mark()
        self._run_state = self._library.state()
        self._states = {}

    def suspend(self, replica: int | str) -> None:
        """Save how far a replica has drawn."""
        if self._run_state is not None and self._library.mark() != self._run_mark:
            self._states[replica] = self._library.state()

    def resume(self, replica: int | str) -> None:
        """Continue a replica's sequence; from the beginning of the run, where it has not drawn."""
        if self._run_state is not None and (
            replica in self._states or self._library.mark() != self._run_mark
        ):
            self._library.set_state(self._states.get(replica, self._run_state))

    def end_run(self) -> None:
        """Let the code outside the run go on where the last replica has ended."""
        self._run_state = None


class LibraryKeys:
    """Seeds Python's and numpy's random numbers; see the module."""

    def __init__(self) -> None:
        self._keys = [_LibraryKey(library) for library in LIBRARIES]

    def start(self, seed: int) -> None:
        """Take what the program has seeded so far as the origin of all numbers; else the seed of torch's."""
        for key in self._keys:
            key.start(seed)

    def seed(self, place: str) -> None:
        """Seed the numbers for a place in training. Cost: 0.5 us; 5 us more once the loop has drawn."""
        for key in self._keys:
            key.seed(place)

    def begin_batch(self, place: str) -> None:
        """Seed the numbers for a batch that is handed out."""
        for key in self._keys:
            key.begin_batch(place)

    def begin_run(self) -> None:
        """Let every replica of a run begin with the same numbers."""
        for key in self._keys:
            key.begin_run()

    def suspend(self, replica: int | str) -> None:
        """Save how far a replica has drawn."""
        for key in self._keys:
            key.suspend(replica)

    def resume(self, replica: int | str) -> None:
        """Continue a replica's sequence."""
        for key in self._keys:
            key.resume(replica)

    def end_run(self) -> None:
        """Let the code outside the run draw again."""
        for key in self._keys:
            key.end_run()

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint stores of this rank."""
        return [key.state() for key in self._keys]

    def restore(self, states: list[dict[str, Any]], place: str) -> None:
        """Resume from what a checkpoint stores."""
        for key, state in zip(self._keys, states, strict=True):
            key.restore(state, place)
