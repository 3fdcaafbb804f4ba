"""Keeps the random numbers of Python and numpy in the program's loop the same in a run that was restarted.

They are seeded where the loop gets a part of a batch and after each optimizer step. The seed is made of the library's
seed before the first use of a model, and of the place in training: equal on all ranks, unless the program seeds each
rank differently. A library that the program seeds later keeps its sequence, whose state is saved. As long as a library
is not drawn from, it is left alone.
"""

from typing import Any

import xxhash

from hpcdist.runtime.library_numbers import LIBRARIES, Library, Mark

#: State of a library's generator, or of its key, as checkpoints store it.
State = dict[str, Any]


def _digest_of(seed: int, name: str) -> int:
    """Return the seed of 63 bits for a name."""
    text = f"{seed} {name}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


class _LibraryKey:
    """Seeds one library.

    Args:
        library: library of random numbers.
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
        self._restored_state: State | None = None
        self._restored_origin: int | None = None
        self._states: dict[int | str, State] = {}
        self._run_mark: Mark = ()
        self._run_state: State | None = None

    def start(self, seed: int) -> None:
        """Take the program's last seed as the origin of all numbers; without one, a digest of torch's seed.

        A restore has set the origin already. If the program has seeded the library since then, it had done so before
        the start in the saved run, too.
        """
        self._begin_training()
        if self._origin is None and self._n_seeds:
            self._origin = self._library.origin
        elif self._origin is None:
            self._origin = _digest_of(seed, self._library.name)

    def _begin_training(self) -> None:
        """Count seeds from here on as seeds that the program sets later."""
        if not self._is_started:
            self._is_started = True
            self._n_seeds = self._library.n_seeds

    def seed(self, place: str) -> None:
        """Seed the library for a place in training, once the loop has drawn numbers."""
        if self._origin is None or self._is_programs_sequence():
            return
        if self._mark is not None and not self._has_drawn:
            if self._library.mark() == self._mark:
                return  # nothing was drawn
            self._has_drawn = True
        name = place if self._has_drawn else "before the first numbers"
        place_seed = _digest_of(self._origin, name)
        self._library.seed(place_seed)
        self._mark = self._library.mark()
        if self._run_state is not None:  # a step of replicas in a run: all continue from here
            self.begin_run()

    def begin_batch(self, place: str) -> None:
        """Seed the library for a batch that is handed out; the program's own sequence continues where it was saved.

        Numbers drawn between a restore and the first batch were drawn by the program's setup.
        """
        if self._is_restored:
            self._is_restored = False
            self._mark = None
            is_seeded_anew = self._library.n_seeds != self._n_seeds
            is_other = is_seeded_anew and self._library.origin != self._restored_origin
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

    def state(self) -> State:
        """Return the state of this rank for a checkpoint."""
        sequence: State | None = None
        program_seed: int | None = None
        if self._origin is not None and self._is_programs_sequence():
            sequence = self._library.state()
            sequence["words"] = sequence["words"].tolist()
            program_seed = self._library.origin
        has_drawn = self._has_drawn
        if not has_drawn and self._mark is not None:
            has_drawn = self._library.mark() != self._mark
        return {
            "origin": self._origin,
            "has_drawn": has_drawn,
            "sequence": sequence,
            "seeded": program_seed,
        }

    def restore(self, state: State, place: str) -> None:
        """Resume from the state in a checkpoint."""
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

    # -- replicas of one process, which draw the same numbers -------------------------------------------------------

    def begin_run(self) -> None:
        """Let every replica of a run begin with the next numbers. Cost: 30 us."""
        self._run_mark = self._library.mark()
        self._run_state = self._library.state()
        self._states = {}

    def suspend(self, replica: int | str) -> None:
        """Save how far a replica has drawn."""
        if self._run_state is not None and self._library.mark() != self._run_mark:
            self._states[replica] = self._library.state()

    def resume(self, replica: int | str) -> None:
        """Continue a replica's sequence; from the beginning of the run, where it has not drawn."""
        if self._run_state is None:
            return
        if replica in self._states or self._library.mark() != self._run_mark:
            state = self._states.get(replica, self._run_state)
            self._library.set_state(state)

    def end_run(self) -> None:
        """Let the code outside the run continue where the last replica has ended."""
        self._run_state = None


class LibraryKeys:
    """Seeds Python's and numpy's random numbers; see the module."""

    def __init__(self) -> None:
        self._keys = [_LibraryKey(library) for library in LIBRARIES]

    def start(self, seed: int) -> None:
        """Take the program's last seeds as the origins of all numbers; without one, a digest of torch's seed."""
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

    def state(self) -> list[State]:
        """Return the states of this rank for a checkpoint."""
        return [key.state() for key in self._keys]

    def restore(self, states: list[State], place: str) -> None:
        """Resume from the states in a checkpoint."""
        for key, state in zip(self._keys, states, strict=True):
            key.restore(state, place)
