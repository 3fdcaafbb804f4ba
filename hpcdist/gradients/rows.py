"""How many rows a replica's gradient stands for: those of the part of the global batch that it was handed."""

from hpcdist.errors import GradientError


class HandedRows:
    """Rows of the parts handed out by distributed datasets since the last backward.

    A backward after which nothing new was handed out, such as a GAN's second one, stands for the same rows as the last.
    """

    def __init__(self) -> None:
        self._new: dict[int, set[int]] = {}
        self._last: tuple[int, int] | None = None

    def hand(self, source: int, n_rows: int | None) -> None:
        """Take note of a part.

        Args:
            source: a number that tells datasets apart.
            n_rows: of the part; None when the dataset's pass is over, and its parts with it.
        """
        if n_rows is not None:
            self._new.setdefault(source, set()).add(n_rows)
            return
        self._new.pop(source, None)
        if self._last is not None and self._last[0] == source:
            self._last = None

    def weight(self, is_mean: bool) -> float:
        """Return the rows that the backward that begins now stands for; 1 when no dataset of ours was used.

        Args:
            is_mean: whether gradients are weighed by it, so that it must be known for certain.

        Raises:
            GradientError: when parts of different length were handed out since the last backward; on this rank only.
        """
        sizes = {n_rows for parts in self._new.values() for n_rows in parts}
        if len(sizes) > 1 and is_mean:
            raise GradientError(
                f"backward: expected one part of a global batch since the last backward with ReduceOp.MEAN, got parts "
                f"of {sorted(sizes)} rows; use each part before the next, or compute_average_loss with ReduceOp.SUM."
            )
        if self._new:
            source = next(iter(self._new))
            self._last = source, max(sizes)
            self._new.clear()
        return 1.0 if self._last is None else float(self._last[1])
