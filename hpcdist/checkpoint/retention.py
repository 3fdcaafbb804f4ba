"""Which checkpoints to keep when a newer one is committed. A pure function of the manifests, so restarts agree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.checkpoint.manifest import Manifest
from hpcdist.errors import UsageError

_HOUR_S = 3600.0


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

    def kept(self, saved: Sequence[Manifest]) -> list[Manifest]:
        """Return the checkpoints to keep, in order, of `saved`, which is ordered from the oldest."""
        chosen = [*saved[-self.max_to_keep :], *self._by_time(saved), *self._best(saved)]
        return [manifest for manifest in saved if any(manifest is one for one in chosen)]

    def _by_time(self, saved: Sequence[Manifest]) -> list[Manifest]:
        kept: list[Manifest] = []
        if self.keep_every_n_hours is not None:
            for manifest in saved:
                if not kept or manifest.time_s - kept[-1].time_s >= self.keep_every_n_hours * _HOUR_S:
                    kept.append(manifest)
        return kept

    def _best(self, saved: Sequence[Manifest]) -> list[Manifest]:
        valued = [manifest for manifest in saved if self._is_valued(manifest)]
        sign = 1 if self.best_mode == "min" else -1
        return [min(valued, key=lambda manifest: sign * manifest.metrics[self.keep_best or ""])] if valued else []

    def _is_valued(self, manifest: Manifest) -> bool:
        return self.keep_best in manifest.metrics and not math.isnan(manifest.metrics[self.keep_best or ""])
