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
#: Operations that carry no values of the program.
_CARRY_NOTHING = ("barrier", "save")


#: The number of each operation that this process has entered, by any group: ranks see each other's numbers only.
_codes: dict[str, int] = {}


def _code_of(op: str) -> int:
    """Return the number of an operation, which is the same in every process, and not 0."""
    code = _codes[op] = zlib.crc32(op.encode()) + 1
    return code


#: The fields of an `Entry` without its end: a tuple is made faster.
_Started = tuple[int, str, object, int, float]


class Entry(NamedTuple):
    """One collective. Times are of time.monotonic, in seconds; `ended_s` is None while the collective runs."""

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
        board: one int64 per rank of the node, shared by the ranks and zero at first; a slice with a step will do. Each
            rank writes the number of collectives that it has entered. Default: a private board.
        local_rank: index of this rank's element of `board`.
        codes: like `board`; each rank writes a number for the operation that it is in, 0 outside of any.

    Attributes:
        board: board of the node, or the private board.
        local_rank: index of this rank's element of `board`.
        n_entered: number of collectives entered so far; the number of the current one.
        spent_s: seconds in the collectives that have ended.

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
        self,
        board: memoryview | None = None,
        local_rank: int = 0,
        codes: memoryview | None = None,
    ) -> None:
        if board is None:
            board = memoryview(array("q", [0]))
            local_rank = 0
        if codes is None:
            codes = memoryview(array("q", [0] * (local_rank + 1)))
        self.board = board
        self.local_rank = local_rank
        self._codes = codes
        self.n_entered = 0
        self.spent_s = 0.0
        self._now = time.monotonic
        self._open: _Started | None = None
        self._ended: deque[tuple[_Started, float | None]] = deque(maxlen=N_KEPT)

    def enter(
        self,
        op: str,
        dtype: object,
        n_elements: int,
    ) -> None:
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
        if open_fields is None:
            return None
        return Entry(*open_fields)

    @property
    def entries(self) -> list[Entry]:
        """The last 64 collectives, oldest first; the last one may be running."""
        entries = [Entry(*started, ended_s) for started, ended_s in self._ended.copy()]
        current = self.current
        if current is not None:
            has_ended_since = entries and entries[-1].number >= current.number
            if not has_ended_since:
                entries.append(current)
        return entries[-N_KEPT:]

    def has_carried(self, n_elements: int, since: int) -> bool:
        """Return whether the collectives after number `since` may have carried this number of elements together.

        A collective of unknown size may, unless it is a barrier or a save. So may more collectives than are kept.
        """
        if self.n_entered - since > N_KEPT:
            return True
        n_carried = 0
        for entry in self.entries:
            if entry.number <= since or entry.op in _CARRY_NOTHING:
                continue
            if entry.dtype == "any":
                return True
            n_carried += entry.n_elements
        return n_carried >= n_elements

    def behind(self) -> list[int]:
        """Return the local ranks that have entered fewer collectives than this rank."""
        ranks = []
        for local_rank, n_entered in enumerate(self.board.tolist()):
            if n_entered < self.n_entered:
                ranks.append(local_rank)
        return ranks

    def apart(self) -> dict[int, str]:
        """Return the local ranks that are in a different operation at the number of this rank's current collective.

        Each rank comes with its operation: "another call" if this rank has never made it. Read without a lock: ask
        twice.
        """
        local_code = self._codes[self.local_rank]
        if not local_code:
            return {}
        numbers = self.board.tolist()
        codes = self._codes.tolist()
        # a copy, as the program's thread may meet an operation for the first time
        names = {code: op for op, code in list(_codes.items())}
        operations = {}
        for rank, (number, code) in enumerate(zip(numbers, codes, strict=False)):
            if number == self.n_entered and code not in (0, local_code):
                operations[rank] = names.get(code, "another call")
        return operations

    def describe(self) -> str:
        """Return one line for each of the last 64 collectives, such as `41  all_reduce float32 x 1024  0.3 ms`."""
        current = self.current
        lines = []
        for entry in self.entries:
            length = _length(entry, current)
            lines.append(f"{entry.number:6}  {entry}  {length}")
        return "\n".join(lines)


class CallMarks:
    """The reductions of each rank of a node, in memory that the ranks share, so that calls that do not fit are found.

    A mark is the number of the reduction, a digest of op and dtype, and a digest of the size. Marks with different
    numbers are not compared: a rank may be ahead. Two cells are used in turn, so that a rank that is ahead by a
    reduction does not overwrite a mark that another rank still compares. At the end a rank compares its mark with the
    next rank's only: if any two of the node differ, so do two neighbours, and one of these raises.

    Args:
        boards: two boards of one int64 per rank of the node, shared by the ranks and zero at first.
        local_rank: index of this rank's element of each board.
        names: names of the ranks of the node, for messages.
    """

    __slots__ = ("_boards", "_codes", "_local_rank", "_names", "_next", "_number", "_previous")

    def __init__(
        self,
        boards: tuple[memoryview, memoryview],
        local_rank: int,
        names: Sequence[str],
    ) -> None:
        self._boards = boards
        self._local_rank = local_rank
        self._names = names
        self._next = (local_rank + 1) % len(names)
        self._previous = (local_rank - 1) % len(names)
        self._codes: dict[tuple[str, str, int], int] = {}
        self._number = 0

    def begin(
        self,
        op: str,
        kind: str,
        itemsize: int,
        nbytes: int,
    ) -> int:
        """Mark a reduction that begins; return its mark. Ranks begin the same reductions in the same order.

        Args:
            op: name of the reduction.
            kind: kind of the dtype, as numpy calls it: 'f' for floats.
            itemsize: bytes of an element.
            nbytes: bytes of the array.
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
        """Return the call that a neighbour is already in, if it has the same number and another size.

        The MPI library may then wait for ever, or end the process.
        """
        for rank in (self._next, self._previous):
            neighbour_mark = self._boards[mark >> 32 & 1][rank]
            if neighbour_mark >> 32 == mark >> 32 and (neighbour_mark ^ mark) & 0xFFFF:
                return self._describe(neighbour_mark, rank, mark)
        return None

    def other_call(self, mark: int) -> str | None:
        """Return the call of the next rank at the same number, if it differs, once a reduction has ended."""
        neighbour_mark = self._boards[mark >> 32 & 1][self._next]
        if neighbour_mark != mark and neighbour_mark >> 32 == mark >> 32:
            return self._describe(neighbour_mark, self._next, mark)
        return None

    def _describe(
        self,
        neighbour_mark: int,
        rank: int,
        mark: int,
    ) -> str:
        """Return the call that a neighbour has marked, as a text."""
        call = "another operation"
        for (op, kind, itemsize), code in self._codes.items():
            if code == neighbour_mark & 0xFFFF0000:
                call = f"{op} {np.dtype(f'{kind}{itemsize}')}"
        if (neighbour_mark ^ mark) & 0xFFFF:
            call += " of another size"
        return f"{call} on {self._names[rank]}"


def _length(entry: Entry, current: Entry | None) -> str:
    """Return how long a collective took, or why that is not known, as a text."""
    if entry.ended_s is not None:
        length_ms = 1000 * (entry.ended_s - entry.started_s)
        return f"{length_ms:.1f} ms"
    if current is None or entry.number != current.number:
        return "ended by an error"
    elapsed_s = time.monotonic() - entry.started_s
    return f"running for {elapsed_s:.1f} s"


class ReportingJournal(Journal):
    """A journal that also reports each collective when it has ended.

    Args:
        report: function that is called with the entry, in the thread of the collective.
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
    ended_s = entry.ended_s or entry.started_s
    length_ms = 1000 * (ended_s - entry.started_s)
    line = f"hpcdist: {rank}: {entry.number}  {entry}  {length_ms:.3f} ms\n"
    os.write(2, line.encode())
