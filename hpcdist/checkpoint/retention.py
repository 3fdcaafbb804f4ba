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
        max_to_keep: number of the newest to keep; at least 1.
        keep_every_n_hours: of the older ones, keep the first, and then each that is this much later than the last kept
            one.
        keep_best: a metric passed to `save`: the checkpoint with its best value is kept.
        best_mode: "min" or "max": which value is best. In a tie the older one is kept.

    Raises:
        UsageError: for invalid values.
    """

    max_to_keep: int = 3
    keep_every_n_hours: float | None = None
    keep_best: str | None = None
    best_mode: str = "min"

    def __post_init__(self) -> None:
        if self.max_to_keep < 1:
            raise UsageError(
                f"CheckpointManager: expected max_to_keep of at least 1, got {self.max_to_keep}; keep one or more."
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

    def kept(self, saved: Sequence[SaveFacts]) -> list[SaveFacts]:
        """Return the checkpoints to keep, in order, of `saved`, which is ordered from the oldest."""
        chosen = [*saved[-self.max_to_keep :], *self._by_time(saved), self.best(saved)]
        return [facts for facts in saved if any(facts is one for one in chosen)]

    def _by_time(self, saved: Sequence[SaveFacts]) -> list[SaveFacts]:
        kept: list[SaveFacts] = []
        if self.keep_every_n_hours is not None:
            for facts in saved:
                if not kept or facts.time_s - kept[-1].time_s >= self.keep_every_n_hours * _HOUR_S:
                    kept.append(facts)
        return kept

    def best(self, saved: Sequence[SaveFacts]) -> SaveFacts | None:
        """Return the checkpoint with the best value of `keep_best`; None if no one has a value."""
        name, sign = self.keep_best or "", 1 if self.best_mode == "min" else -1
        valued = [facts for facts in saved if not math.isnan(facts.metrics.get(name, math.nan))]
        return min(valued, key=lambda facts: sign * facts.metrics[name], default=None)
