"""The journal: the last 64 collectives of a thread, for reports about a rank that waits for ever."""

import os
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

#: Collectives that are kept.
N_KEPT = 64
#: Operations that carry no values of the program's.
_CARRY_NOTHING = ("barrier", "save")


#: The number of each operation that this process has entered.
_codes: dict[str, int] = {}


def _code_of(op: str) -> int:
    """Return a number of an operation that is the same in every process, and not 0."""
    code = _codes[op] = zlib.crc32(op.encode()) + 1
    return code


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

    Not collective. As a context manager it records at the end of the block that the collective has ended. Plain tuples
    and one deque, as every collective passes through it; readers get `Entry`.

    Args:
        board: one int64 per rank of the node, shared by them and zero at first; a slice with a step will do. Each rank
            writes how many collectives it has entered. Default: none is shared.
        local_rank: this rank's element of `board`.
        codes: like `board`; each rank writes a number for the operation that it is in, 0 outside of any.

    Attributes:
        board, local_rank: as given; without a board, one of its own.
        n_entered: collectives entered so far; the number of the current one.
        spent_s: seconds in those that have ended.

    Cost: `enter` and `leave` together 0.4-0.5 microseconds of one 2.x GHz core.
    """

    __slots__ = (
        "__weakref__",
        "_codes",
        "_ended",
        "_now",
        "_open",
        "board",
        "local_rank",
        "n_entered",
        "spent_s",
    )

    def __init__(
        self, board: memoryview | None = None, local_rank: int = 0, codes: memoryview | None = None
    ) -> None:
        self.board = memoryview(array("q", [0])) if board is None else board
        self.local_rank = 0 if board is None else local_rank
        self._codes = (
            memoryview(array("q", [0] * (self.local_rank + 1))) if codes is None else codes
        )
        self.n_entered = 0
        self.spent_s = 0.0
        self._now = time.monotonic
        self._open: tuple[int, str, object, int, float] | None = None
        self._ended: deque[tuple[tuple[int, str, object, int, float], float | None]] = deque(
            maxlen=N_KEPT
        )

    def enter(self, op: str, dtype: object, n_elements: int) -> None:
        """Record that a collective begins. One that raised stays without an end."""
        if self._open is not None:
            self._ended.append((self._open, None))
        self.board[self.local_rank] = self.n_entered = number = self.n_entered + 1
        self._codes[self.local_rank] = _codes.get(op) or _code_of(op)
        self._open = (number, op, dtype, n_elements, self._now())

    def leave(self) -> None:
        """Record that the current collective has ended."""
        if self._open is not None:
            now = self._now()
            self._ended.append((self._open, now))
            self.spent_s += now - self._open[4]
            self._open = None
            self._codes[self.local_rank] = 0

    def __enter__(self) -> None:
        """Do nothing: the collective has begun."""

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def current(self) -> Entry | None:
        """The collective that this thread is in."""
        open_fields = self._open
        return Entry(*open_fields) if open_fields else None

    @property
    def entries(self) -> list[Entry]:
        """The last 64 collectives, oldest first; the last one may be running."""
        ended = [Entry(*start_fields, ended_s) for start_fields, ended_s in self._ended.copy()]
        current = self.current
        is_new = current is not None and (not ended or ended[-1].number < current.number)
        return [*ended, *([current] if current and is_new else [])][-N_KEPT:]

    def has_carried(self, n_elements: int, since: int) -> bool:
        """Return whether the collectives after number `since` may have carried as many elements together.

        One of unknown size may, unless it is a barrier or a save. So may more of them than are kept.
        """
        if self.n_entered - since > N_KEPT:
            return True
        new = [
            entry
            for entry in self.entries
            if entry.number > since and entry.op not in _CARRY_NOTHING
        ]
        return (
            any(entry.dtype == "any" for entry in new)
            or sum(entry.n_elements for entry in new) >= n_elements
        )

    def behind(self) -> list[int]:
        """Return the local ranks that have entered fewer collectives than this one."""
        return [
            local_rank
            for local_rank, n_entered in enumerate(self.board.tolist())
            if n_entered < self.n_entered
        ]

    def apart(self) -> dict[int, str]:
        """Return which local ranks are in another operation where this one is in its own, with that operation.

        The operation is "another call" where this rank has never made it. Read without a lock: ask twice.
        """
        local_code = self._codes[self.local_rank]
        ranks = zip(self.board.tolist(), self._codes.tolist(), strict=False)
        differing_codes = {
            rank: code
            for rank, (n, code) in enumerate(ranks)
            if n == self.n_entered and code not in (0, local_code)
        }
        names = {code: op for op, code in _codes.items()}
        return (
            {rank: names.get(code, "another call") for rank, code in differing_codes.items()}
            if local_code
            else {}
        )

    def describe(self) -> str:
        """Return one line for each of the last 64 collectives, such as `41  all_reduce float32 x 1024  0.3 ms`."""
        current = self.current
        return "\n".join(
            f"{entry.number:6}  {entry}  {_length(entry, current)}" for entry in self.entries
        )


class CallMarks:
    """What each rank of a node reduces, in memory that they share, so that calls that do not fit together are found.

    A mark is the number of the reduction, a digest of op and dtype, and one of the size. Marks of other numbers say
    nothing: a rank may be ahead. Two cells are used in turn, so that a rank that is ahead by a reduction does not
    overwrite what another still compares. At the end a rank compares itself with the next one only: if any two of the
    node differ, so do two neighbours, and one of these raises.

    Args:
        boards: two, of one int64 per rank of the node, shared by them and zero at first.
        local_rank: this rank's element of each.
        names: of the ranks of the node, for messages.
    """

    __slots__ = ("_boards", "_codes", "_local_rank", "_names", "_next", "_number", "_previous")

    def __init__(
        self, boards: tuple[memoryview, memoryview], local_rank: int, names: Sequence[str]
    ) -> None:
        self._boards = boards
        self._local_rank = local_rank
        self._names = names
        self._next = (local_rank + 1) % len(names)
        self._previous = (local_rank - 1) % len(names)
        self._codes: dict[tuple[str, str, int], int] = {}
        self._number = 0

    def begin(self, op: str, kind: str, itemsize: int, nbytes: int) -> int:
        """Mark a reduction that begins; return its mark. Ranks begin the same reductions in the same order.

        Args:
            op: the reduction.
            kind: of the dtype, as numpy calls it: 'f' for floats.
            itemsize: of the dtype.
            nbytes: of the array.
        """
        code = self._codes.get((op, kind, itemsize))
        if code is None:
            digest = zlib.crc32(f"{op} {kind}{itemsize}".encode())
            code = self._codes[op, kind, itemsize] = (digest & 0xFFFF) << 16
        self._number = number = self._number + 1 & 0x7FFFFFFF
        mark = number << 32 | code | (nbytes ^ nbytes >> 16) & 0xFFFF
        self._boards[number & 1][self._local_rank] = mark
        return mark

    def other_size(self, mark: int) -> str | None:
        """Return what a neighbour is already in, if it has the same number and another size.

        The MPI library may then wait for ever, or end the process.
        """
        for rank in (self._next, self._previous):
            neighbour_mark = self._boards[mark >> 32 & 1][rank]
            if neighbour_mark >> 32 == mark >> 32 and (neighbour_mark ^ mark) & 0xFFFF:
                return self._describe(neighbour_mark, rank, mark)
        return None

    def other_call(self, mark: int) -> str | None:
        """Return what the next rank did at the same number, if it was something else, once a reduction has ended."""
        neighbour_mark = self._boards[mark >> 32 & 1][self._next]
        is_other = neighbour_mark != mark and neighbour_mark >> 32 == mark >> 32
        return self._describe(neighbour_mark, self._next, mark) if is_other else None

    def _describe(self, neighbour_mark: int, rank: int, mark: int) -> str:
        names = {
            code: f"{op} {np.dtype(f'{kind}{size}')}"
            for (op, kind, size), code in self._codes.items()
        }
        size = " of another size" if (neighbour_mark ^ mark) & 0xFFFF else ""
        return f"{names.get(neighbour_mark & 0xFFFF0000, 'another operation')}{size} on {self._names[rank]}"


def _length(entry: Entry, current: Entry | None) -> str:
    if entry.ended_s is not None:
        return f"{1000 * (entry.ended_s - entry.started_s):.1f} ms"
    if current is None or entry.number != current.number:
        return "ended by an error"
    return f"running for {time.monotonic() - entry.started_s:.1f} s"


class ReportingJournal(Journal):
    """A journal that also reports each collective when it has ended.

    Args:
        report: called with the entry, in the thread of the collective.
        board, local_rank, codes: as for `Journal`.
    """

    __slots__ = ("_report",)

    def __init__(
        self,
        report: Callable[[Entry], None],
        board: memoryview | None = None,
        local_rank: int = 0,
        codes: memoryview | None = None,
    ) -> None:
        super().__init__(board, local_rank, codes)
        self._report = report

    def leave(self) -> None:
        """Record that the current collective has ended, and report it."""
        entry = self.current
        super().leave()
        if entry is not None:
            self._report(entry._replace(ended_s=self._now()))


def log_call(rank: str, entry: Entry) -> None:
    """Write a collective that has ended to standard error, in one piece: all ranks write there."""
    length_ms = 1000 * ((entry.ended_s or entry.started_s) - entry.started_s)
    os.write(2, f"hpcdist: {rank}: {entry.number}  {entry}  {length_ms:.3f} ms\n".encode())
