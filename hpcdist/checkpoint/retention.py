"""Which checkpoints to keep when a newer one is committed: a pure function of their indices, so restarts agree."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import UsageError

_HOUR_S = 3600.0


@dataclass(frozen=True)
class SaveFacts:
    """Facts of a checkpoint that decide: its step, the time of the save in seconds since 1970, and its metrics."""

    step: int
    time_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Attributes:
        max_to_keep: number of the newest checkpoints to keep, at least 1. None keeps all.
        keep_every_n_hours: hours between older checkpoints to keep: the first one, and then each that is at least this
            much later than the last kept one.
        keep_best: name of a metric passed to `save`: the checkpoints with its best values are kept.
        best_mode: "min" or "max": which value is best. In a tie the older checkpoint is kept.
        n_best: number of the best checkpoints to keep.
        keep_every_n_steps: steps between older checkpoints to keep, chosen as by keep_every_n_hours.

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
        """Return the checkpoints to keep of `saved`; both are ordered from the oldest to the newest."""
        newest = saved
        if self.max_to_keep is not None:
            newest = saved[-self.max_to_keep :]
        by_time = _apart(saved, lambda facts: facts.time_s / _HOUR_S, self.keep_every_n_hours)
        by_step = _apart(saved, lambda facts: facts.step, self.keep_every_n_steps)
        best = self._by_value(saved)[: self.n_best]
        chosen = [*newest, *by_time, *by_step, *best]
        chosen_ids = set(map(id, chosen))
        return [facts for facts in saved if id(facts) in chosen_ids]

    def best(self, saved: Sequence[SaveFacts]) -> SaveFacts | None:
        """Return the checkpoint with the best value of `keep_best`; None if no checkpoint has a value."""
        return next(iter(self._by_value(saved)), None)

    def _by_value(self, saved: Sequence[SaveFacts]) -> list[SaveFacts]:
        """Return the checkpoints that have a value of `keep_best`, the best first, in a tie the older one."""
        name = self.keep_best or ""
        sign = 1 if self.best_mode == "min" else -1
        valued: list[SaveFacts] = []
        for facts in saved:
            value = facts.metrics.get(name, math.nan)
            if not math.isnan(value):
                valued.append(facts)
        return sorted(valued, key=lambda facts: sign * facts.metrics[name])


def _apart(
    saved: Sequence[SaveFacts],
    position_of: Callable[[SaveFacts], float],
    distance: float | None,
) -> list[SaveFacts]:
    """Return checkpoints that lie apart: the first, and each at least a distance after the last chosen one.

    Args:
        saved: checkpoints, ordered from the oldest.
        position_of: function that returns the hour or the step of a checkpoint.
        distance: least distance between two positions. None chooses no checkpoint.
    """
    chosen: list[SaveFacts] = []
    if distance is None:
        return chosen
    last_position: float | None = None
    for facts in saved:
        position = position_of(facts)
        if last_position is None or position - last_position >= distance:
            chosen.append(facts)
            last_position = position
    return chosen
