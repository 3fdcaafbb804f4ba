"""Row counts: the number of rows of the global batch by which a replica's gradient is weighted."""

from hpcdist.errors import GradientError


class RowCounts:
    """Rows of the parts that distributed datasets have yielded to a replica since its last backward.

    A backward before which nothing new was yielded, such as a GAN's second one, has the weight of the last.
    """

    def __init__(self) -> None:
        self._new: dict[int, set[int]] = {}
        self._last: tuple[int, int] | None = None

    def record(self, source: int, n_rows: int | None) -> None:
        """Record a part.

        Args:
            source: a number that names the dataset.
            n_rows: of the part; None at the end of the dataset's pass, which discards its parts.
        """
        if n_rows is not None:
            self._new.setdefault(source, set()).add(n_rows)
            return
        self._new.pop(source, None)
        if self._last is not None and self._last[0] == source:
            self._last = None

    def weight(self, is_mean: bool) -> float:
        """Return the weight of the backward that begins now, in rows; 1 when no distributed dataset is used.

        Args:
            is_mean: whether gradients are weighted by it, so that it must be known for certain.

        Raises:
            GradientError: when parts of different length were yielded since the last backward; on this rank only.
        """
        if not self._new:
            return 1.0 if self._last is None else float(self._last[1])
        sizes = {n_rows for parts in self._new.values() for n_rows in parts}
        if len(sizes) > 1 and is_mean:
            raise GradientError(
                f"backward: expected one part of a global batch since the last backward with ReduceOp.MEAN, got parts "
                f"of {sorted(sizes)} rows; use each part before the next, or compute_average_loss with ReduceOp.SUM."
            )
        self._last = next(iter(self._new)), max(sizes)
        self._new.clear()
        return float(self._last[1])
