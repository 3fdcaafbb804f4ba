"""Row counts: the number of rows of the global batch by which a replica's gradient is weighted."""

import torch

from hpcdist.errors import GradientError


class RowCounts:
    """Rows of the parts that distributed datasets have yielded to a replica since its last backward.

    A backward before which nothing new was yielded, such as a GAN's second one, has the weight of the last; after the
    end of the pass it has the weight 1, as one that uses no dataset.

    Attributes:
        doubtful_rows: rows of a part that the running backward may use, as no backward had used it when its pass ended:
            the weight 1 is right if the part has as many rows on all replicas. None without such a part.
    """

    def __init__(self) -> None:
        self._new: dict[int, set[int]] = {}
        self._last: tuple[int, int] | None = None
        self._to_train: set[int] = set()  # of `_new`, what came while gradients were recorded: no evaluation
        self._over: set[int] = set()
        self.doubtful_rows: int | None = None

    def record(self, source: int, n_rows: int | None) -> None:
        """Record a part.

        Args:
            source: a number that names the dataset.
            n_rows: of the part; None at the end of the dataset's pass, which discards its parts.
        """
        if n_rows is not None:
            self._new.setdefault(source, set()).add(n_rows)
            if torch.is_grad_enabled():
                self._to_train.add(n_rows)
            return
        self._over |= self._new.pop(source, set()) & self._to_train
        if self._last is not None and self._last[0] == source:
            self._last = None

    def weight(self, is_mean: bool) -> float:
        """Return the weight of the backward that begins now, in rows; 1 when no distributed dataset is used.

        Args:
            is_mean: whether gradients are weighted by it, so that it must be known for certain.

        Raises:
            GradientError: when parts of different length were yielded since the last backward; on this rank only.
        """
        self.doubtful_rows = None
        if not self._new:
            if self._last is not None:
                return float(self._last[1])
            self._require_one_size(self._over, is_mean, " of a pass that is over")
            self.doubtful_rows = next(iter(self._over), None) if is_mean else None
            return 1.0
        sizes = {n_rows for parts in self._new.values() for n_rows in parts}
        self._require_one_size(sizes, is_mean, "")
        self._last = next(iter(self._new)), max(sizes)
        self._new.clear()
        self._to_train.clear()
        self._over.clear()
        return float(self._last[1])

    def _require_one_size(self, sizes: set[int], is_mean: bool, which: str) -> None:
        if len(sizes) > 1 and is_mean:
            raise GradientError(
                f"backward: expected one part of a global batch since the last backward with ReduceOp.MEAN, got parts "
                f"of {sorted(sizes)} rows{which}; use each part before the next, evaluate under torch.no_grad(), or "
                f"use drop_remainder=True, or compute_average_loss with ReduceOp.SUM."
            )
