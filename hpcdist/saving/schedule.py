"""When to save, copy and compare: by steps, by time, or by the rate of failures."""

import math
from dataclasses import dataclass, fields

from hpcdist.errors import UsageError


@dataclass(frozen=True)
class SaveSchedule:
    """What a handler does periodically during training. None disables an action.

    >>> schedule = hpcdist.SaveSchedule(every_s=600, compare_every_steps=1000)
    >>> handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, "runs/a/checkpoints", schedule=schedule)

    Attributes:
        every_steps: save every N steps.
        every_s: save every N seconds, by the chief's clock.
        mtbf_s: mean seconds between failures of this job. It saves every sqrt(2 * cost of a save * mtbf_s) seconds,
            which minimizes the time lost, where the cost is the measured time for which a save blocks training.
        in_memory_every_steps: copy to the memory of every node every N steps; see `fast_directory` of
            CheckpointManager.
        compare_every_steps: every N steps check that all ranks hold equal models, with their buffers, and optimizers.
            Each save compares parameters and optimizers without this; see `CheckpointManager`. Optimizers of
            CentralStorageStrategy are excluded, as only the chief has their state.

    Raises:
        UsageError: if a value is not above 0.

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
                raise UsageError(
                    f"SaveSchedule: expected {field.name} above 0, got {value}; leave it out for never."
                )

    def interval_s(self, cost_s: float | None) -> float | None:
        """Return the longest time between two saves; None for no limit.

        Args:
            cost_s: measured time for which a save blocks training. None if unknown: a save is then due, to measure it.
        """
        if self.mtbf_s is None:
            return self.every_s
        by_failures_s = math.sqrt(2 * (cost_s or 0.0) * self.mtbf_s)
        if self.every_s is None:
            return by_failures_s
        return min(self.every_s, by_failures_s)


def is_crossed(every: int | None, step: int, last: int) -> bool:
    """Return whether a multiple of `every` lies after step `last`, and not after `step`."""
    return every is not None and step // every > last // every
