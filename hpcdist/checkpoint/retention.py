"""Which checkpoints to keep when a newer one is committed: a pure function of their indices, so restarts agree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import UsageError

_HOUR_S = 3600.0


@dataclass(frozen=True)
class SaveFacts:
    """What counts of a checkpoint: its step, the time of the save in seconds since 1970, and its metrics."""

    step: int
    time_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Attributes:
        max_to_keep: number of the newest to keep, at least 1; None: all.
        keep_every_n_hours: of the older ones, keep the first, and then each that is this much later than the last kept
            one.
        keep_best: a metric passed to `save`: the checkpoints with its best values are kept.
        best_mode: "min" or "max": which value is best. In a tie the older one is kept.
        n_best: how many of the best are kept.
        keep_every_n_steps: as keep_every_n_hours, by steps.

    Raises:
        UsageError: for invalid values.
    """

    max_to_keep: int | None = 3
    keep_every_n_hours: float | None = None
    keep_best: str | None = None
    best_mode: str = "min"
    n_best: int = 1
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "max_to_keep": self.max_to_keep,
            "n_best": self.n_best,
            "keep_every_n_steps": self.keep_every_n_steps,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise UsageError(
                    f"CheckpointManager: expected {name} of at least 1, got {count}; keep one or more."
                )
        if self.keep_every_n_hours is not None and not self.keep_every_n_hours > 0:
            raise UsageError(
                f"CheckpointManager: expected keep_every_n_hours above 0, got {self.keep_every_n_hours}; leave it out "
                f"to keep the newest only."
            )
        if self.best_mode not in ("min", "max"):
            raise UsageError(
                f"CheckpointManager: expected best_mode 'min' or 'max', got {self.best_mode!r}; give one of them."
            )

    def retained(self, saved: Sequence[SaveFacts]) -> list[SaveFacts]:
        """Return the checkpoints to keep, in order, of `saved`, which is ordered from the oldest."""
        newest = saved if self.max_to_keep is None else saved[-self.max_to_keep :]
        by_time = _apart(
            saved, [facts.time_s / _HOUR_S for facts in saved], self.keep_every_n_hours
        )
        by_step = _apart(saved, [facts.step for facts in saved], self.keep_every_n_steps)
        chosen = [*newest, *by_time, *by_step, *self._by_value(saved)[: self.n_best]]
        return [facts for facts in saved if any(facts is chosen_facts for chosen_facts in chosen)]

    def best(self, saved: Sequence[SaveFacts]) -> SaveFacts | None:
        """Return the checkpoint with the best value of `keep_best`; None if no one has a value."""
        return next(iter(self._by_value(saved)), None)

    def _by_value(self, saved: Sequence[SaveFacts]) -> list[SaveFacts]:
        """Return the checkpoints that have a value of `keep_best`, the best first, in a tie the older one."""
        name = self.keep_best or ""
        sign = 1 if self.best_mode == "min" else -1
        valued = [facts for facts in saved if not math.isnan(facts.metrics.get(name, math.nan))]
        return sorted(valued, key=lambda facts: sign * facts.metrics[name])


def _apart(
    saved: Sequence[SaveFacts], places: Sequence[float], distance: float | None
) -> list[SaveFacts]:
    """Return the first checkpoint, and each that is at least this far from the one chosen before it; None: none."""
    chosen: list[int] = []
    for number, place in enumerate(places):
        if distance is not None and (not chosen or place - places[chosen[-1]] >= distance):
            chosen.append(number)
    return [saved[number] for number in chosen]
