"""What this thread's collectives are and were: the last 64, for reports about a rank that waits for ever."""

import time
from array import array
from collections import deque
from typing import NamedTuple

#: Collectives that are remembered.
N_REMEMBERED = 64


class Entry(NamedTuple):
    """One collective. Times are of time.monotonic, in seconds; `ended_s` is None for one that has not ended."""

    number: int
    op: str
    dtype: object
    n_elements: int
    started_s: float
    ended_s: float | None = None

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} x {self.n_elements}"


class Journal:
    """The last collectives of one thread of one group. Written by that thread, read by any.

    Not collective. As a context manager it notes at the end of the block that the collective entered last has ended.
    Plain tuples and one deque, as it is on the way of every collective; readers get `Entry`.

    Args:
        board: one int64 per rank of the node, shared by them and zero at first; a slice with a step will do. Each rank
            writes how many collectives it has entered. Default: none is shared.
        place: this rank's element of `board`.

    Attributes:
        board, place: as given; without a board, one of its own.
        n_entered: collectives entered so far; the number of the current one.

    Cost: `enter` and `leave` together 0.4-0.5 microseconds of one 2.x GHz core.
    """

    __slots__ = ("__weakref__", "_ended", "_now", "_open", "board", "n_entered", "place")

    def __init__(self, board: memoryview | None = None, place: int = 0) -> None:
        self.board = memoryview(array("q", [0])) if board is None else board
        self.place = 0 if board is None else place
        self.n_entered = 0
        self._now = time.monotonic
        self._open: tuple[int, str, object, int, float] | None = None
        self._ended: deque[tuple[tuple[int, str, object, int, float], float | None]] = deque(maxlen=N_REMEMBERED)

    def enter(self, op: str, dtype: object, n_elements: int) -> None:
        """Note that a collective begins. One that was entered and never left, as it raised, stays without an end."""
        if self._open is not None:
            self._ended.append((self._open, None))
        self.board[self.place] = self.n_entered = number = self.n_entered + 1
        self._open = (number, op, dtype, n_elements, self._now())

    def leave(self) -> None:
        """Note that the collective entered last has ended."""
        if self._open is not None:
            self._ended.append((self._open, self._now()))
            self._open = None

    def __enter__(self) -> None:
        """Do nothing: the collective has begun."""

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def current(self) -> Entry | None:
        """The collective that this thread is in."""
        begun = self._open
        return Entry(*begun) if begun else None

    @property
    def entries(self) -> list[Entry]:
        """The last 64 collectives, oldest first; the last one may be under way."""
        ended = [Entry(*begun, ended_s) for begun, ended_s in self._ended.copy()]
        current = self.current
        is_new = current is not None and (not ended or ended[-1].number < current.number)
        return [*ended, *([current] if current and is_new else [])][-N_REMEMBERED:]

    def behind(self) -> list[int]:
        """Return the places of the ranks of this node that have entered fewer collectives than this one."""
        return [place for place, n_entered in enumerate(self.board.tolist()) if n_entered < self.n_entered]

    def describe(self) -> str:
        """Return one line for each of the last 64 collectives, such as `41  all_reduce float32 x 1024  0.3 ms`."""
        current = self.current
        return "\n".join(f"{entry.number:6}  {entry}  {_length(entry, current)}" for entry in self.entries)


def _length(entry: Entry, current: Entry | None) -> str:
    if entry.ended_s is not None:
        return f"{1000 * (entry.ended_s - entry.started_s):.1f} ms"
    if current is None or entry.number != current.number:
        return "left by an error"
    return f"under way for {time.monotonic() - entry.started_s:.1f} s"
