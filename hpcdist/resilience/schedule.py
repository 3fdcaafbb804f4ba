"""When to save, to copy and to compare: by steps, by the clock, or by what a failure costs."""

import math
from dataclasses import dataclass, fields

from hpcdist.errors import UsageError


@dataclass(frozen=True)
class SaveSchedule:
    """What a handler does by itself while a job trains. Nothing is done where nothing is given.

    Attributes:
        every_steps: save whenever so many steps were made.
        every_s: save when the last one was so many seconds ago, by the chief's clock.
        mtbf_s: mean seconds between two failures of this job: it saves as often as loses least time in all, which is
            every sqrt(2 * cost of a save * mtbf_s) seconds, the cost being what saves have been measured to hold up.
        in_memory_every_steps: copy to the memory of every node so often; see `fast_directory` of CheckpointManager.
        compare_every_steps: check so often, and before each save, that all ranks hold equal models and optimizers.
            Optimizers of CentralStorageStrategy are left out: the chief alone has their state.

    Raises:
        UsageError: for values that are not above 0.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """

    every_steps: int | None = None
    every_s: float | None = None
    mtbf_s: float | None = None
    in_memory_every_steps: int | None = None
    compare_every_steps: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(f"SaveSchedule: expected {field.name} above 0, got {value}; leave it out for never.")

    def interval_s(self, cost_s: float | None) -> float | None:
        """Return the longest time between two saves; None for any.

        Args:
            cost_s: what a save holds up; None while that is not known, and one save is made to learn it.
        """
        by_failures = None if self.mtbf_s is None else math.sqrt(2 * (cost_s or 0.0) * self.mtbf_s)
        return min((s for s in (self.every_s, by_failures) if s is not None), default=None)


def is_crossed(every: int | None, step: int, last: int) -> bool:
    """Return whether a multiple of `every` lies after step `last`, and not after `step`."""
    return every is not None and step // every > last // every
