"""Parts of batches, the sources that hand them out, and how far the parts of each source were used.

A part is open until a backward has used it, and complete once an optimizer has stepped after that backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Keeper of a source whose position nothing can keep.
NOTHING = -1
#: Largest number of parts that a source keeps for a backward to use.
_MAX_UNUSED = 10_000


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's rows of one global batch.

    Attributes:
        source: source that handed it out.
        number: number of the part among the parts of its source, from 1.
        rows: rows of each local replica; None where nobody has planned them.
        total_rows: rows of all replicas together; None where each rank knows its own number alone.
        is_everywhere: whether every replica of the job is known to have rows in this batch.
        key: names the batch; equal on all ranks that got parts of the same batch. None where ranks do not know which
            parts belong together.
        position: position of the source after this part, which a checkpoint stores once the part is complete.
        is_for_training: whether gradients were recorded when it was handed out.
        likely_rows: rows of this rank's part where nobody has planned them, to notice ranks that differ. None if
            unknown.
    """

    source: "PartSource"
    number: int
    rows: tuple[int, ...] | None
    total_rows: int | None
    is_everywhere: bool
    key: int | None
    position: Any
    is_for_training: bool
    likely_rows: int | None = None


class PartSource:
    """A source that hands out parts, such as a distributed dataset.

    Args:
        number: number of the source in the order in which sources were made, which is the same on all ranks.
        owner: number of the strategy whose gradients are made of its parts. None for parts that any gradients may use.
        keeper: id of the object that must be in the Checkpoint for the position to be kept. None if the distributed
            dataset itself decides.

    Attributes:
        number, owner, keeper: values of the arguments.
        has_pass: whether a pass is in progress.
        is_trusted: whether the caller that draws, such as `fit`, does so between iterations only, and uses all parts.
        n_handed_out: number of parts so far.
        n_complete: number of the newest part that was trained on; 0 before the first.
        position: position after that part.
        now: current position, whichever parts were used.
        is_rewound: whether a checkpoint stores `rewound_to` in place of any other position.
        is_ambiguous: whether it is unknown which of its parts the last backwards have used.
        has_peeks: whether passes were begun without any use of their parts, such as to look at the first batch.
        is_abandoned: whether nobody can draw from it any more.
        is_doubtful: whether a backward may have used an open part, or the complete one a second time, as a GAN does.
        draws_without_gradients: whether parts were trained on that were drawn while gradients were not recorded.
        has_incomplete: whether a backward has used a part, and no step has completed it.
    """

    def __init__(self, number: int, owner: int | None, keeper: int | None) -> None:
        self.number = number
        self.owner = owner
        self.keeper = keeper
        self._n_settled = 0
        self._settled_position: Any = None
        self.has_pass = False
        self.is_trusted = False
        self.n_handed_out = 0
        self._n_before = 0
        self.n_complete = 0
        self.position: Any = None
        self.now: Any = None
        self.is_rewound = False
        self.rewound_to: Any = None
        self.has_peeks = False
        self.is_abandoned = False
        self._abandoned_at: int | None = None
        self.is_ambiguous = False
        self.is_doubtful = False
        self.has_incomplete = False
        self.draws_without_gradients = False
        self._unused: list[Part] = []
        self._steps_at_draw: dict[int, int] = {}
        self._seen: set[int] = set()

    def drop_evaluated(self) -> None:
        """Expect no step of the parts of a pass that has ended, if all went into forwards that no backward has reached.

        So it is in a validation with gradients. The parts of a source that was trained on may be trained on later.
        """
        open_numbers = {part.number for part in self.open_parts}
        if not self.is_trained and open_numbers <= self._seen:
            self.drop_open()

    def see(self, part: Part) -> None:
        """Note that a part went into a forward that a backward may reach."""
        self._seen.add(part.number)

    @property
    def is_trained(self) -> bool:
        """Whether a part has been trained on."""
        return self.n_complete > 0

    @property
    def is_settled(self) -> bool:
        """Whether the newest part that was handed out is complete, or there is none."""
        return self.n_complete == self.n_handed_out

    @property
    def open_parts(self) -> list[Part]:
        """The parts that no backward has used yet, the oldest first.

        Parts that were drawn without gradients are among them while their pass goes on: it may be an evaluation.
        """
        if self.has_pass:
            return list(self._unused)
        return [part for part in self._unused if part.is_for_training]

    @property
    def waiting_parts(self) -> list[Part]:
        """The open parts that a step is expected of."""
        return [
            part for part in self._unused if part.is_for_training or self.draws_without_gradients
        ]

    def steps_at_draw(self, part: Part) -> int:
        """Return how many steps were made before a part was drawn."""
        return self._steps_at_draw.get(part.number, 0)

    def add(self, part: Part, n_steps: int) -> None:
        """Record a part that is handed out. `n_steps`: optimizer steps made so far."""
        self.n_handed_out = part.number
        self._unused.append(part)
        self._steps_at_draw[part.number] = n_steps
        if len(self._unused) > _MAX_UNUSED:
            self._drop(self._unused[0])

    def _drop(self, newest_part: Part) -> None:
        """Forget a part and all older ones."""
        while self._unused and self._unused[0].number <= newest_part.number:
            part = self._unused.pop(0)
            self._steps_at_draw.pop(part.number, None)

    def use(self, part: Part) -> None:
        """Note that a backward has used a part. Older parts that no backward has used were skipped."""
        self._drop(part)
        self._seen = set()
        self.has_incomplete = True

    def complete(self, part: Part) -> None:
        """Count a part as trained on."""
        if part.number > self.n_complete:
            self.n_complete = part.number
            self.position = part.position
            self.draws_without_gradients = not part.is_for_training
        self.has_incomplete = False
        self.is_ambiguous = False
        self.is_doubtful = False

    def move(self, position: Any) -> None:
        """Note where the source is now."""
        self.now = position
        self.is_rewound = False

    def settle(self) -> None:
        """Remember the position if all parts so far are complete, as the next ones may never be used."""
        if self.is_settled:
            self._n_settled = self.n_handed_out
            self._settled_position = self.now

    def saved_position(self, is_training: bool) -> Any:
        """Return the position after the part that was used last.

        Args:
            is_training: whether backwards use the parts; elsewhere drawing a part uses it.
        """
        if self.is_rewound:
            return self.rewound_to
        waits_for_step = bool(self.waiting_parts) or self.has_incomplete
        is_by_training = self.is_trained or (is_training and waits_for_step)
        if self.is_trusted or not is_by_training or self.is_settled:
            return self.now
        if self.n_complete > self._n_settled:
            return self.position
        return self._settled_position

    def lose_position(self) -> None:
        """Note that nothing keeps the position of this source."""
        self.keeper = NOTHING

    def rewind(self, position: Any) -> None:
        """Let a checkpoint store an earlier position."""
        self.is_rewound = True
        self.rewound_to = position

    def note_peek(self) -> None:
        """Note that a pass was left without any use of its parts."""
        self.has_peeks = True

    def begin_anew(self) -> None:
        """Expect no step of parts handed out so far, and count no pass as left unused: another program begins."""
        self.drop_open()
        self.has_peeks = False
        self._n_before = self.n_handed_out

    @property
    def is_active(self) -> bool:
        """Whether the current program has drawn from it; sources of an earlier one may vanish on one rank first."""
        return self.n_handed_out > self._n_before

    def trust(self) -> None:
        """Take every draw from now on for one between two iterations, by a caller that restores its own position."""
        self.is_trusted = True

    def begin_pass(self) -> None:
        """Note that a pass is in progress."""
        self.has_pass = True

    def end_pass(self) -> None:
        """Note that no pass is in progress."""
        self.has_pass = False
        if self._unused and not self._unused[0].is_for_training:
            self._unused = [part for part in self._unused if part.is_for_training]

    def abandon(self) -> None:
        """Note that nobody can draw any more; the parts that are open may still be used."""
        self.is_abandoned = True

    def steps_abandoned(self, n_steps: int) -> int:
        """Return the number of steps since nobody can draw any more, given the number of all steps so far."""
        if not self.is_abandoned:
            return 0
        if self._abandoned_at is None:
            self._abandoned_at = n_steps
        return n_steps - self._abandoned_at

    def forget(self) -> None:
        """Begin again: no part that was handed out so far counts any more."""
        self.drop_open()
        self.n_complete = self.n_handed_out

    def drop_open(self) -> None:
        """Expect no step on the parts handed out so far."""
        self._unused = []
        self._steps_at_draw = {}
        self._seen = set()
        self.has_incomplete = False
        self.is_ambiguous = False
        self.is_doubtful = False


class Uses:
    """The parts that one backward is known to use.

    Attributes:
        parts: parts whose tensors went into a forward that the backward reached.
        is_unknown: whether it reached a forward of tensors that no source had handed out.
        likely_rows: length of the first tensor of a forward of unknown tensors; None where it has no tensor.
        n_steps_at_begin: number of optimizer steps made before the backward.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_unknown = False
        self.likely_rows: int | None = None
        self.n_steps_at_begin = 0

    def begin(self, n_steps: int) -> None:
        """Forget what the last backward has used; `n_steps` optimizer steps were made so far."""
        self.n_steps_at_begin = n_steps
        self.parts = []
        self.is_unknown = False
        self.likely_rows = None

    def add(self, parts: Iterable[Part], likely_rows: int | None = None) -> None:
        """Add the parts of a forward that the backward has reached; without any, its parts are unknown."""
        reached = list(parts)
        if not reached:
            self.likely_rows = likely_rows
        self.is_unknown = self.is_unknown or not reached
        self.parts += [part for part in reached if part not in self.parts]
