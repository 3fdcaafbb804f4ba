"""Waiting for the ranks of a node and for messages: spin briefly, then yield, then sleep.

With more ranks than cores, spinning keeps the rank that one waits for from running; sleeping at once costs a wake-up
of 50 microseconds and more. Hence the three stages, all bounded.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence

from hpcdist.errors import CollectiveTimeoutError
from hpcdist.mpi import MPI

#: Looks at a flag before the core is offered to others, about 20 microseconds. With more ranks than cores: none.
SPINS = 600
#: Offers of the core before sleeping begins.
YIELDS = 2000
#: First and longest sleep. At 1 Gbit/s half a millisecond is 64 KiB, which sockets hold.
SLEEP_S, MAX_SLEEP_S = 20e-6, 5e-4
#: A longer pause between two looks counts as this: the job was suspended.
AWAKE_S = 1.0
#: int64 cells of one rank on a board: a cache line of its own, so that ranks do not slow each other's writes.
CELLS = 8
_IS_ORDERED_BY_HARDWARE = platform.machine() in ("x86_64", "AMD64")


class Backoff:
    """One wait: call it each time that what is waited for is not there yet.

    Args:
        timeout_s: longest wait.
        explain: returns what was waited for, when it took too long.
        is_patient: sleep from the start, as a background thread does, which would otherwise keep the interpreter lock.
        max_sleep_s: longest sleep. Messages inside a host move on at each look only, some 10 KiB at a time.
    """

    def __init__(
        self,
        timeout_s: float,
        explain: Callable[[], str],
        is_patient: bool = False,
        max_sleep_s: float = MAX_SLEEP_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._explain = explain
        self._yields = 0 if is_patient else YIELDS
        self._sleep_s, self._max_sleep_s = SLEEP_S, max_sleep_s
        self._waited_s = 0.0
        self._last: float | None = None

    def __call__(self) -> None:
        """Let some time pass. Raises CollectiveTimeoutError when there is none left."""
        if self._yields > 0:
            self._yields -= 1
            os.sched_yield()
        else:
            self._sleep()

    def _sleep(self) -> None:
        now = time.monotonic()
        self._waited_s += 0.0 if self._last is None else min(now - self._last, AWAKE_S)
        self._last = now
        if self._waited_s > self._timeout_s:
            raise CollectiveTimeoutError(self._explain())
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, self._max_sleep_s)


class NodeBarrier:
    """A barrier among the ranks of a node, on a board that they share; about a microsecond when all are there.

    Args:
        board: int64 cells, `CELLS` for each rank, zero at first.
        place: this rank's place in the node.
        size: ranks in the node.
        make_backoff: returns what to call while waiting, given a function that explains the wait.
        spins: looks at a rank's cell before that is called.
    """

    def __init__(
        self, board: memoryview, place: int, size: int, make_backoff: Callable[[Callable[[], str]], Backoff], spins: int
    ) -> None:
        self._board = board
        self._own = place * CELLS
        self._cells = [peer * CELLS for peer in range(size) if peer != place]
        self._make_backoff = make_backoff
        self._spins = range(spins)
        self._sequence = 0

    def wait(self) -> None:
        """Return when every rank of the node has called this as often as this one. Collective: the node."""
        self._sequence = sequence = self._sequence + 1
        fence()
        board = self._board
        board[self._own] = sequence
        for cell in self._cells:
            if board[cell] < sequence:
                self._wait_for(cell, sequence)
        fence()

    def wait_with(self, mark: int) -> list[int] | None:
        """Wait, and compare a number of 63 bits: return None when all gave the same, else every rank's by place.

        Two cells are used in turn: a rank may be one barrier ahead of one that still reads, never two.
        """
        cell = 1 + (self._sequence & 1)
        self._board[self._own + cell] = mark
        self.wait()
        board = self._board
        if all(board[other + cell] == mark for other in self._cells):
            return None
        return [board[place * CELLS + cell] for place in range(len(self._cells) + 1)]

    def _wait_for(self, cell: int, sequence: int) -> None:
        board = self._board
        for _ in self._spins:
            if board[cell] >= sequence:
                return
        backoff = self._make_backoff(self._explain)
        while board[cell] < sequence:
            backoff()

    def _explain(self) -> str:
        missing = [cell // CELLS for cell in self._cells if self._board[cell] < self._sequence]
        return f"the ranks at places {', '.join(map(str, missing))} of this node"


_locks = threading.Lock(), threading.Lock()


def fence() -> None:
    """Keep writes before this and reads after it in order; x86 does so by itself for one writer per cell.

    Elsewhere taking and leaving two locks is the fence that Python has.
    """
    if not _IS_ORDERED_BY_HARDWARE:
        for lock in _locks:
            with lock:
                pass


def wait_all(requests: Sequence[MPI.Request], backoff: Backoff) -> None:
    """Wait for messages, at most as long as `backoff` allows."""
    while not MPI.Request.Testall(requests):
        backoff()
