"""What this rank's collectives have cost: calls, bytes and seconds of each, with HPCDIST_DEBUG=summary."""

import atexit
import sys
import time
from dataclasses import dataclass

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.forks import make_lock


@dataclass
class _Total:
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class CallTotals:
    """Calls, bytes and seconds of the collectives of all threads of this rank, by operation and dtype."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._started_s = time.monotonic()
        self._of: dict[tuple[str, str], _Total] = {}

    def add(self, op: str, dtype: object, n_elements: int, seconds: float) -> None:
        """Count one collective that has ended; waiting for other ranks is part of its time."""
        name = str(dtype).removeprefix("torch.")
        with self._lock:
            total = self._of.setdefault((op, name), _Total())
            total.calls += 1
            total.nbytes += n_elements * _item_bytes(name)
            total.seconds += seconds

    def table(self) -> str:
        """Return one line for each operation, the one that took longest first."""
        elapsed_s = time.monotonic() - self._started_s
        with self._lock:
            rows = sorted(self._of.items(), key=lambda row: -row[1].seconds)
        spent_s = sum(total.seconds for _, total in rows)
        lines = [f"{'collective':44}{'calls':>9}{'MB':>12}{'seconds':>10}{'MB/s':>9}"]
        for (op, dtype), total in rows:
            rate = (
                f"{total.nbytes / 1e6 / total.seconds:.0f}"
                if total.nbytes and total.seconds
                else "-"
            )
            lines.append(
                f"{f'{op} {dtype}'[:43]:44}{total.calls:>9}{total.nbytes / 1e6:>12.3f}{total.seconds:>10.3f}{rate:>9}"
            )
        return "\n".join([*lines, f"{spent_s:.3f} s of {elapsed_s:.3f} s in collectives"])


_totals: CallTotals | None = None


def count_calls(rank: str, is_printed: bool) -> CallTotals:
    """Return the totals of this process, made at the first call.

    Args:
        rank: as reports call it.
        is_printed: whether the table is written to standard error at the end of the program.
    """
    global _totals
    if _totals is None:
        _totals = CallTotals()
        if is_printed:
            atexit.register(
                lambda totals: sys.stderr.write(f"hpcdist: {rank}:\n{totals.table()}\n"), _totals
            )
    return _totals


def communication_summary() -> str:
    """Return a table of this rank's collectives so far: calls, megabytes, seconds and rate of each. Not collective.

    Seconds include waiting for ranks that came later. Those in the background, as sums of gradients between hosts are,
    overlap with others. Rank 0 writes its table to standard error at the end of the program.

    Raises:
        UsageError: without HPCDIST_DEBUG=summary, or before the first strategy or collective.

    Cost: with HPCDIST_DEBUG=summary about a microsecond for each collective.
    """
    if _totals is None:
        raise UsageError(
            "communication_summary: expected HPCDIST_DEBUG=summary and a strategy, got no counts; set it on all ranks."
        )
    return _totals.table()


def _item_bytes(dtype: str) -> int:
    if dtype == "bfloat16":
        return 2
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # "any": it may differ by rank
        return 0
