"""State of a program's own loop: which parts of batches are still to be trained on, and whether an iteration is over.

A distributed dataset hands out parts of global batches; a backward uses them; an optimizer step completes them. Between
two iterations the complete parts count as used and the others do not, however far ahead the loop draws: there a job may
save and stop. Where it cannot be known which parts were used, the state is ambiguous, and nothing is saved until it is
clear again.

Nothing here communicates. Ranks that make the same calls reach the same conclusions.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpcdist.forks import make_lock
from hpcdist.runtime.parts import Part, PartSource, Uses

#: The program's own loaders have numbers from here on, so that the numbers of datasets are the same on all ranks.
_FIRST_LOADER = 1_000_000
#: Number of steps of a loop that draws its parts one by one, after which forwards are not watched any more.
_MAX_QUIET_STEPS = 100


def _owned_by(owner: int, parts: Iterable[Part]) -> list[Part]:
    """Return the parts that an owner's gradients, or any gradients, may be made of."""
    return [part for part in parts if part.source.owner in (None, owner)]


def _sources_of(parts: Iterable[Part]) -> list[PartSource]:
    """Return the sources of parts, without repetition."""
    return list(dict.fromkeys(part.source for part in parts))


def _without_sources(sources: Sequence[PartSource], parts: Iterable[Part]) -> list[Part]:
    """Return the parts of other sources."""
    return [part for part in parts if part.source not in sources]


class LoopState:
    """Follows one program's loop.

    Args:
        is_alone: whether there is no other rank.

    Attributes:
        is_drawing: whether a distributed dataset draws a batch now.
        needs_identity: whether a backward may mean more than one part, so that forwards are watched.
        is_shared_point: whether all ranks come to the last safe point (between two iterations), whatever one of them
            does alone.
        was_ambiguous: whether it was unknown, since the last safe point, which parts a backward has used.
        n_rejected: number of draws for training since the last safe point that were not between two iterations.
        n_parts: number of parts for training that were handed out since the last safe point.
        has_lost_position: whether the program trains on a loader whose position is not saved.
        has_drawn_ahead: whether another part of the same source waited for its backward when the last part came.
        n_backwards: number of backwards so far.
        n_steps: number of steps so far, of optimizers and of programs that change parameters by themselves. It is the
            one count of steps of the process; other numbers of steps are differences of it.
        n_reported: number of these that no optimizer has made.
    """

    def __init__(self, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self._counting = make_lock()  # the replicas of one process run in several threads
        self.needs_identity = False
        self.is_shared_point = True
        self.was_ambiguous = False
        self.n_rejected = 0
        self.n_parts = 0
        self.has_lost_position = False
        self.has_drawn_ahead = False
        self.n_backwards = 0
        self.n_steps = 0
        self.n_reported = 0
        self._sources: dict[int, PartSource] = {}
        self._n_datasets = 0
        self._n_loaders = 0
        self._watch_forwards: Callable[[bool], None] | None = None
        self._n_quiet_steps = 0
        self._is_watched_for_good = False
        self._training_owners: set[int | None] = set()
        self._saved: frozenset[int] = frozenset()
        self._optimizers: frozenset[int] = frozenset()
        self._n_steps_at_begin = 0
        self._n_backwards_at_begin = 0
        self._stepped: set[int] = set()
        self._ever_stepped: set[int] = set()
        self._n_steps_at_safe_point = 0
        self._n_backwards_at_step = 0
        self._is_watched_since_step = False
        self._has_forward = False
        self._has_drawn_since_step = False
        self.is_drawing = False
        self._pending: list[Part] = []
        self._last_used: list[Part] = []
        self._uses: dict[int, Uses] = {}
        self._positions_at_end: list[tuple[PartSource, Any]] = []
        self._n_steps_at_end = -1
        self._is_managed = False
        self._has_peeks = False
        self._has_entry = False
        self._is_entered = False
        self._entry_rows: list[int | None] = []
        self._entered_rows: list[int | None] | None = None
        self._shared_key: list[int] | None = None
        self._moduli: Sequence[int] = ()
        self._leader: PartSource | None = None
        self._n_draws_without_leader: dict[int, int] = {}

    # -- who takes part ---------------------------------------------------------------------------------------------

    def add_source(self, owner: int | None = None, keeper: int | None = None) -> PartSource:
        """Return a new source of parts; see `PartSource`."""
        self._drop_abandoned()
        if keeper is None:
            self._n_datasets += 1
            source = PartSource(self._n_datasets, owner, keeper)
        else:  # a loader of the program, which may differ between ranks
            self._n_loaders += 1
            source = PartSource(_FIRST_LOADER + self._n_loaders, owner, keeper)
        self._sources[source.number] = source
        # from the first parts on, until the loop has turned out to draw them one by one
        self._need_identity(True)
        if not self.has_begun:
            self._is_watched_since_step = True
        return source

    def expect_training(self, owner: int | None = None) -> None:
        """Expect that an owner's parts are used by backwards, as the program has made an optimizer for it."""
        self._training_owners.add(owner)

    def begin(self, optimizers: Iterable[Any] = (), saved: Iterable[Any] = ()) -> None:
        """Begin to look for points between iterations.

        Args:
            optimizers: optimizers, all of which every iteration is expected to step; without any, nothing is known of
                the program.
            saved: objects whose state is saved, such as samplers.
        """
        self._saved = frozenset(map(id, saved))
        self.has_lost_position = False
        self._optimizers = frozenset(map(id, optimizers))
        self._stepped = set()
        self._pending = []
        self._last_used = []
        self._positions_at_end = []
        self._n_steps_at_end = -1
        self._leader = None
        self._n_steps_at_begin = self.n_steps
        self._n_steps_at_safe_point = self.n_steps
        self._n_backwards_at_begin = self.n_backwards
        self._n_backwards_at_step = self.n_backwards
        self.n_rejected = 0
        self.n_parts = 0
        self._has_peeks = False
        for source in self._sources.values():
            source.begin_anew()
        self._has_forward = False
        self._need_identity(bool(self._sources))
        self._is_watched_since_step = self.needs_identity

    def end(self) -> None:
        """Look for no more points between iterations: expect nothing of the program any more."""
        self._optimizers = frozenset()
        self._saved = frozenset()

    @property
    def is_training(self) -> bool:
        """Whether the program steps optimizers, as far as it is known."""
        return self.n_steps > self._n_steps_at_begin or bool(self._optimizers)

    @property
    def has_begun(self) -> bool:
        """Whether there was a step or a backward since `begin`."""
        return (
            self.n_steps > self._n_steps_at_begin or self.n_backwards > self._n_backwards_at_begin
        )

    def is_training_with(self, source: PartSource) -> bool:
        """Return whether backwards use the parts of a source; elsewhere drawing a part uses it."""
        return bool(self._optimizers) or source.owner in self._training_owners

    def watch_forwards_with(self, watch: Callable[[bool], None]) -> None:
        """Call watch(True) once forwards must be watched, and watch(False) once they need not be any more."""
        self._watch_forwards = watch
        watch(self.needs_identity)

    def keep_watching(self) -> None:
        """Watch forwards from now on for good."""
        self._is_watched_for_good = True
        self._need_identity(True)

    def _need_identity(self, is_needed: bool) -> None:
        self._n_quiet_steps = 0
        is_needed = is_needed or self._is_watched_for_good
        if self.needs_identity is not is_needed:
            self.needs_identity = is_needed
            if self._watch_forwards is not None:
                self._watch_forwards(is_needed)

    # -- parts -------------------------------------------------------------------------------------------------------

    def hand_out(self, part: Part) -> None:
        """Record a part that its source hands out now."""
        self.has_drawn_ahead = bool(part.source.waiting_parts)
        if self._is_waiting:
            self._need_identity(True)
        part.source.add(part, self.n_steps)
        self._has_drawn_since_step = True
        if part.is_for_training or part.source.draws_without_gradients:
            self.n_parts += 1
            self._find_leader(part.source)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Ignore loaders in the block: they draw for the batch that is drawn there."""
        was_drawing = self.is_drawing
        self.is_drawing = True
        try:
            yield
        finally:
            self.is_drawing = was_drawing

    def _find_leader(self, source: PartSource) -> None:
        """Find the source whose draws begin iterations: the first one, until another one is drawn on without it."""
        if self._leader is None or self._leader is source:
            self._leader = source
            self._n_draws_without_leader = {}
            return
        n_draws = self._n_draws_without_leader.get(source.number, 0) + 1
        self._n_draws_without_leader[source.number] = n_draws
        if n_draws > 1 and not self._leader.has_pass:
            self._leader = source
            self._n_draws_without_leader = {}

    def open_parts(self) -> list[Part]:
        """Return the parts that may still be used, by source and age: sources are in the order of their numbers."""
        parts: list[Part] = []
        for source in self._sources.values():
            parts += source.open_parts
        return parts

    @property
    def _is_waiting(self) -> bool:
        """Whether a step is expected of a part that no backward has used yet."""
        return any(source.waiting_parts for source in self._sources.values())

    def forget_last_used(self, source: PartSource) -> None:
        """Do not count later backwards that use no part as uses of the last part: its pass is over."""
        if source in _sources_of(self._last_used):
            self._last_used = []

    # -- backwards and steps ------------------------------------------------------------------------------------------

    def uses(self) -> Uses:
        """Return the uses of the calling thread's backward; in a thread of autograd, of the main thread's backward."""
        thread = threading.get_ident()
        if thread not in self._uses and threading.current_thread() is threading.main_thread():
            self._uses[thread] = Uses()
        return self._uses.get(thread) or self._uses.setdefault(
            threading.main_thread().ident or 0, Uses()
        )

    def uses_of_thread(self) -> Uses:
        """Return the uses of backwards that this thread, such as a replica's, calls; not for threads of autograd."""
        return self._uses.setdefault(threading.get_ident(), Uses())

    def begin_backward(self) -> None:
        """Begin to record the parts that a backward of this thread uses."""
        self._shared_key = None
        self.uses_of_thread().begin(self.n_steps)

    def candidates(self, owner: int) -> list[Part]:
        """Return the parts that the running backward may use: the known parts, else all that are open.

        A backward before which no new part was handed out, such as a GAN's second one, uses the last one's parts.

        Args:
            owner: number of the strategy whose gradients the backward makes.
        """
        uses = self.uses()
        if uses.parts and not uses.is_unknown:
            named_parts = _owned_by(owner, uses.parts)
            if named_parts:
                return named_parts
        possible_parts = self.open_parts()
        if self._may_use_again(uses):
            possible_parts += self._last_used
        if uses.parts:
            known_sources = _sources_of(_owned_by(owner, uses.parts))
            possible_parts = uses.parts + _without_sources(known_sources, possible_parts)
        return _owned_by(owner, possible_parts) or _owned_by(owner, self._last_used)

    def _may_use_again(self, uses: Uses) -> bool:
        """Return whether an unknown forward may be for another optimizer, on a part that is complete."""
        return uses.is_unknown and len(self._optimizers) > 1

    def note_managed(self) -> None:
        """Note that the running backward makes gradients that a strategy sums, or accumulates to sum them later."""
        self._is_managed = True

    def end_backward(self, is_whole: bool = True) -> None:
        """Count a backward of this thread that has ended.

        With several ranks only backwards that a strategy takes part in count: others may run on one rank alone.

        Args:
            is_whole: whether it has come to its end.
        """
        with self._counting:
            self._end_backward(is_whole)

    def _end_backward(self, is_whole: bool) -> None:
        is_counted = self._is_alone or self._is_managed
        self._is_managed = False
        if not is_counted:
            return
        self.n_backwards += 1
        uses = self.uses()
        # another replica of this process has stepped on the sum of both backwards
        if uses.n_steps_at_begin < self.n_steps:
            self._n_backwards_at_step += 1
            return
        if self._is_alone:
            self._is_entered = self._is_entered or self._has_entry
            self._has_peeks = self.has_peeks
        if is_whole:
            self._note_used(uses)

    def note_other_step(self) -> None:
        """Note the step of any optimizer: a backward before it that has used no part was for that optimizer."""
        if not self._pending:
            self._n_backwards_at_step = self.n_backwards

    def _note_used(self, uses: Uses) -> None:
        """Record which parts were used; for a source with several open parts it must be known which."""
        used = list(uses.parts)
        if uses.is_unknown or not used:
            used += self._unnamed_parts(used, uses)
        for part in used:
            part.source.use(part)
        self._pending += used
        self._last_used = used or self._last_used

    def _unnamed_parts(self, named_parts: list[Part], uses: Uses) -> list[Part]:
        """Return which parts a backward has used, beside the named ones, as far as that can be known."""
        open_parts = self.open_parts()
        is_plain = len(open_parts) == 1 and not named_parts
        if is_plain and open_parts[0].source.steps_at_draw(open_parts[0]) == self.n_steps:
            return open_parts  # drawn since the last step, and nothing else is open
        unnamed_parts = self._shared_parts()
        known_sources = _sources_of(named_parts + unnamed_parts)
        for source in self._sources_in_use():
            if source not in known_sources:
                unnamed_parts += self._guess(source, uses)
        return unnamed_parts

    def _sources_in_use(self) -> list[PartSource]:
        """Return the sources with open parts whose pass goes on, if any: a validation may have left parts of others."""
        sources = _sources_of(self.open_parts())
        sources_in_pass = [source for source in sources if source.has_pass]
        return sources_in_pass or sources

    def _shared_parts(self) -> list[Part]:
        """Return the open part whose key another rank has reported, if it is the only one with the key."""
        matches: list[Part] = []
        for part in self.open_parts():
            if part.key is not None and self._remainders(part.key) == self._shared_key:
                matches.append(part)
        return matches if len(matches) == 1 else []

    def _remainders(self, key: int) -> list[int]:
        return [key % modulus for modulus in self._moduli]

    def _guess(self, source: PartSource, uses: Uses) -> list[Part]:
        """Return the parts of a source that an unknown backward has used; mark the source where that is not clear."""
        if len(source.open_parts) > 1:
            source.is_ambiguous = True
            self.was_ambiguous = True
            return []
        part = source.open_parts[0]
        is_drawn_ahead = source.steps_at_draw(part) < self.n_steps
        if is_drawn_ahead and self._may_use_again(uses) and source in _sources_of(self._last_used):
            source.is_doubtful = True
            return []
        return [part]

    def note_forward(self, parts: Iterable[Part] = ()) -> None:
        """Record that a watched forward has run, which may change the state that a step starts from.

        Args:
            parts: parts that it was given, if a backward may reach it.
        """
        self._has_forward = True
        for part in parts:
            part.source.see(part)

    def note_step(self, optimizer: Any = None) -> None:
        """Count a step: the parts that the backwards before it have used are complete."""
        with self._counting:
            self._note_step(optimizer)

    def note_reported_step(self) -> None:
        """Count a step of a program that changes parameters by itself, without an optimizer."""
        self.n_reported += 1
        self.note_step()

    def _note_step(self, optimizer: Any) -> None:
        self.n_steps += 1
        self._stepped.add(id(optimizer))
        self._ever_stepped.add(id(optimizer))
        has_backward = self.n_backwards > self._n_backwards_at_step
        # the program has made the gradients itself, as by torch.autograd.grad
        if not has_backward and self._has_drawn_since_step:
            self._note_used(Uses())
        for part in self._pending:
            part.source.complete(part)
        self._pending = []
        self._drop_abandoned()
        self._n_backwards_at_step = self.n_backwards
        self._n_quiet_steps += 1
        if self._n_quiet_steps > _MAX_QUIET_STEPS:
            self._need_identity(False)
        self._is_watched_since_step = self.needs_identity
        self._has_forward = False
        self._has_drawn_since_step = False
        self._entered_rows = self._entry_rows if self._is_entered else None
        self._has_entry = False
        self._is_entered = False

    def _drop_abandoned(self) -> None:
        """Forget sources that nobody can draw from, once no step was made of their parts for long."""
        for source in list(self._sources.values()):
            is_idle = source.steps_abandoned(self.n_steps) > _MAX_QUIET_STEPS
            if source.is_abandoned and (not source.open_parts or is_idle):
                del self._sources[source.number]

    # -- points between iterations ---------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether a step has completed all backwards, and it is known which parts they have used."""
        is_stepped = self.n_backwards == self._n_backwards_at_step
        return is_stepped and not self.is_ambiguous

    @property
    def is_between_iterations(self) -> bool:
        """Whether the next iteration has not begun, and every optimizer has stepped since the last safe point.

        With open parts that is known only if all forwards since the last step were watched, and there were none.
        """
        if not self.is_complete or self._is_doubtful:
            return False
        if self._is_waiting and (self._has_forward or not self._is_watched_since_step):
            return False
        has_stepped = self.n_steps_since_safe_point > 0
        has_one_optimizer = len(self._optimizers) < 2
        return has_one_optimizer or not has_stepped or self._optimizers <= self._stepped

    @property
    def is_ambiguous(self) -> bool:
        """Whether it is unknown which parts the last backwards have used."""
        return any(source.is_ambiguous for source in self._sources.values())

    @property
    def _is_doubtful(self) -> bool:
        return any(source.is_doubtful for source in self._sources.values())

    def is_following(self, source: PartSource) -> bool:
        """Return whether another source's draws begin the iterations."""
        return self._leader is not None and self._leader is not source

    @property
    def n_steps_since_safe_point(self) -> int:
        """Number of optimizer steps since the last safe point, at which requests were looked for."""
        return self.n_steps - self._n_steps_at_safe_point

    def is_safe_draw(
        self,
        source: PartSource,
        is_for_training: bool,
        is_last: bool = False,
    ) -> bool:
        """Return whether a program that asks `source` for its next part is between two iterations.

        In a program that trains, the draws of a validation are not: the code after it, such as a schedule's step, has
        not run yet. Nor is the end of a pass in a program that peeks: after a restart there, the peek would find no
        batch.
        """
        if source.is_trusted or not (self.is_training or self.is_training_with(source)):
            return True
        if source.keeper is not None and source.keeper not in self._saved:
            self.has_lost_position = self.has_lost_position or is_for_training
            return False
        is_leading = self._leader is None or self._leader is source
        is_first = not self.has_begun and (is_for_training or not source.waiting_parts)
        is_for_training = is_for_training or source.draws_without_gradients
        is_next = self.has_begun and is_for_training and source.is_trained
        is_safe = (is_first or is_next) and is_leading and self.is_between_iterations
        if is_safe and is_last and self._has_peeks:
            return False
        self.n_rejected += is_for_training and not is_safe
        return is_safe

    def is_safe_forward(self, parts: Iterable[Part]) -> bool:
        """Return whether a forward with gradients of these parts begins an iteration, on all ranks alike.

        It does if a forward like it began the last iteration on all ranks, with batches of the same size: a program may
        treat replicas with few rows, or without any, in another way. It does not where a draw was a safe point already.
        """
        if self._has_forward or not self._is_watched_since_step or not self.is_between_iterations:
            return False
        total_rows: list[int | None] = []
        for part in parts:
            if not self._is_next(part):
                return False
            total_rows.append(part.total_rows)
        self._has_entry = True
        self._entry_rows = total_rows
        return self._entered_rows == total_rows and self.n_steps_since_safe_point > 0

    def _is_next(self, part: Part) -> bool:
        """Return whether a part is of a trained source, unused by any backward, and with rows on all replicas."""
        source = part.source
        is_kept = source.keeper is None or source.keeper in self._saved
        return is_kept and source.is_trained and part.is_everywhere and part in source.open_parts

    @property
    def has_entry(self) -> bool:
        """Whether a forward that could begin an iteration was seen since the last step."""
        return self._has_entry

    @property
    def has_peeks(self) -> bool:
        """Whether this rank has begun passes without any use of their parts."""
        return any(source.has_peeks for source in self._sources.values())

    def share(
        self,
        is_entered: bool,
        has_peeks: bool,
        key: list[int] | None,
        moduli: Sequence[int],
    ) -> None:
        """Take the reports of all ranks, which came with the sum of the running backward.

        Args:
            is_entered: whether all ranks have seen a forward that could begin the iteration.
            has_peeks: whether any rank has begun passes without any use of their parts.
            key: remainders of the key of the batch that the backward uses; None where no rank knows it.
            moduli: moduli of the remainders.
        """
        self._is_entered = self._is_entered or is_entered
        self._has_peeks = self._has_peeks or has_peeks
        self._shared_key = key
        self._moduli = moduli

    def forget_idle_optimizers(self) -> bool:
        """Expect no more steps of optimizers that have made none; return whether there are any, as of a later phase.

        Called once it has turned out that not every iteration steps all of them.
        """
        idle_optimizers = self._optimizers - self._ever_stepped
        self._optimizers = self._optimizers & self._ever_stepped
        return bool(idle_optimizers)

    def note_safe_point(self, is_shared: bool = True) -> None:
        """Record that requests are looked for here.

        Args:
            is_shared: whether all ranks come here, whatever one of them does alone.
        """
        self.is_shared_point = is_shared
        self.was_ambiguous = False
        self.n_rejected = 0
        self.n_parts = 0
        self._n_steps_at_safe_point = self.n_steps
        self._stepped = set()
        self._n_steps_at_end = -1

    def describe_positions(self) -> str:
        """Return the positions of the distributed datasets, equal on all ranks; look-ahead is left out."""
        lines = []
        for source in self._sources.values():
            is_compared = source.owner is not None and source.is_trained and source.is_active
            if is_compared and not source.is_abandoned:
                position = source.saved_position(self.is_training_with(source))
                lines.append(f"{source.number}: {position}")
        return "; ".join(lines)

    # -- between passes ---------------------------------------------------------------------------------------------

    def note_end_of_pass(self) -> None:
        """Remember the positions of all sources: the program is between two iterations, and its pass is at its end."""
        self._positions_at_end = []
        for source in self._sources.values():
            self._positions_at_end.append((source, source.now))
        self._n_steps_at_end = self.n_steps

    @property
    def is_after_pass(self) -> bool:
        """Whether there was no training since the end of a pass, as in the validation of an epoch."""
        return (
            self.n_steps == self._n_steps_at_end and self.n_backwards == self._n_backwards_at_step
        )

    def rewind_to_end_of_pass(self) -> None:
        """Let a checkpoint store the positions at the end of the pass: the code after the pass will run again."""
        for source, position in self._positions_at_end:
            source.rewind(position)
