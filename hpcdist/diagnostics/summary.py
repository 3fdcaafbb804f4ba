"""The cost of this rank's collectives: calls, bytes and seconds of each, with HPCDIST_DEBUG=summary."""

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

    def add(
        self,
        op: str,
        dtype: object,
        n_elements: int,
        seconds: float,
    ) -> None:
        """Count one collective that has ended; waiting for other ranks is part of its time."""
        name = str(dtype).removeprefix("torch.")
        with self._lock:
            total = self._of.setdefault((op, name), _Total())
            total.calls += 1
            total.nbytes += n_elements * _item_bytes(name)
            total.seconds += seconds

    def table(self) -> str:
        """Return one line for each operation, the longest first."""
        elapsed_s = time.monotonic() - self._started_s
        with self._lock:
            rows = sorted(self._of.items(), key=lambda row: -row[1].seconds)
        spent_s = sum(total.seconds for _, total in rows)
        lines = [_row("collective", "calls", "MB", "seconds", "MB/s")]
        for (op, dtype), total in rows:
            name = f"{op} {dtype}"[:43]
            megabytes = total.nbytes / 1e6
            rate = "-"
            if total.nbytes and total.seconds:
                rate = f"{megabytes / total.seconds:.0f}"
            row = _row(
                name=name,
                calls=str(total.calls),
                megabytes=f"{megabytes:.3f}",
                seconds=f"{total.seconds:.3f}",
                rate=rate,
            )
            lines.append(row)
        lines.append(f"{spent_s:.3f} s of {elapsed_s:.3f} s in collectives")
        return "\n".join(lines)


def _row(
    name: str,
    calls: str,
    megabytes: str,
    seconds: str,
    rate: str,
) -> str:
    """Return a row of the table."""
    return f"{name:44}{calls:>9}{megabytes:>12}{seconds:>10}{rate:>9}"


#: Totals of all groups of this process: the program asks for one table.
_totals: CallTotals | None = None


def count_calls(rank: str, is_printed: bool) -> CallTotals:
    """Return the totals of this process, made at the first call.

    Args:
        rank: name of the rank in reports.
        is_printed: whether the table is written to standard error at the end of the program.
    """
    global _totals
    if _totals is None:
        _totals = CallTotals()
        if is_printed:
            atexit.register(_print_table, rank, _totals)
    return _totals


def _print_table(rank: str, totals: CallTotals) -> None:
    """Write the totals of a rank to standard error."""
    sys.stderr.write(f"hpcdist: {rank}:\n{totals.table()}\n")


def communication_summary() -> str:
    """Return a table of this rank's collectives so far: calls, megabytes, seconds and rate of each. Not collective.

    Seconds include waiting for ranks that came later. Collectives in the background, such as sums of gradients between
    hosts, overlap with further ones. Rank 0 writes its table to standard error at the end of the program.

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
    """Return the bytes of an element. 0 if they are not known."""
    if dtype == "bfloat16":
        return 2
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # "any": it may differ by rank
        return 0
