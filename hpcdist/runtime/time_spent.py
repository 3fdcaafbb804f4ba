"""Time that this rank spends waiting: for batches, other ranks, saves. Always counted; read once per step."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
#: The name of the threads in which replicas of one process run.
REPLICA_THREAD = "hpcdist-replica"
_MAIN = threading.main_thread().ident
#: Number of waits that are remembered, for the steps of which each wait is recorded.
N_KEPT = 64


class Span(NamedTuple):
    """One wait or collective. Times are of time.monotonic, in seconds."""

    kind: str
    name: str
    began_s: float
    ended_s: float


class Recorded(Protocol):
    """A journal of collectives; see `diagnostics/journal.py`."""

    spent_s: float

    @property
    def entries(self) -> Sequence[Any]:
        """The last collectives."""


class TimeSpent:
    """The waits of one process.

    The waits of the main thread count, and the waits of replicas, which take turns: no step waits for another thread of
    the program. Collectives of background threads are kept apart. A wait or collective inside another wait counts as
    part of the outer one. Not collective.

    Attributes:
        input_s: seconds in which no batch was there. save_s: seconds in saves.
        rows: number of global rows of the batches so far, where it is known.
        stale: number of pushes of other workers that parameter servers had applied before this worker's push and after
            it had read the values, summed over its pushes.
    """

    def __init__(self) -> None:
        self.input_s = 0.0
        self.save_s = 0.0
        self._communication_s = 0.0
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=N_KEPT)
        self._foreground: list[Recorded] = []
        self._background: list[Recorded] = []
        self._is_waiting = False
        self.rows = 0
        self.stale = 0

    def watch(self, journal: Recorded, is_background: bool) -> None:
        """Count the collectives of a group, too, until `leave`."""
        if is_background:
            self._background.append(journal)
        else:
            self._foreground.append(journal)

    def leave(self, journal: Recorded) -> None:
        """Count no more collectives of a group, which is freed; keep the seconds that they took."""
        if journal in self._foreground:
            self._foreground.remove(journal)
            self._communication_s += journal.spent_s
        elif journal in self._background:
            self._background.remove(journal)

    def timed(self, kind: str, name: str) -> "Wait":
        """Return a context manager whose block is a wait: of kind "input", "communication" or "save"."""
        return Wait(self, kind, name)

    def begin(self) -> float | None:
        """Begin a wait; return `communication_s`, or None for a wait that does not count by itself."""
        if self._is_waiting or (
            threading.get_ident() != _MAIN and threading.current_thread().name != REPLICA_THREAD
        ):
            return None
        self._is_waiting = True
        return self.communication_s

    def end(
        self,
        kind: str,
        name: str,
        began_s: float,
        ended_s: float,
        communication_before_s: float,
    ) -> None:
        """Count a wait that has ended.

        Args:
            kind: "input", "communication" or "save".
            name: name of the wait.
            began_s: time at which it began, as in `Span`.
            ended_s: time at which it ended, as in `Span`.
            communication_before_s: result of `begin`.
        """
        self._is_waiting = False
        self._spans.append((kind, name, began_s, ended_s))
        self._communication_s -= self.communication_s - communication_before_s
        if kind == "input":
            self.input_s += ended_s - began_s
        elif kind == "save":
            self.save_s += ended_s - began_s
        else:
            self._communication_s += ended_s - began_s

    @property
    def communication_s(self) -> float:
        """Seconds in collectives, and in waits for them, outside of input and saves."""
        total = self._communication_s
        for journal in self._foreground:
            total += journal.spent_s
        return total

    def spans_since(self, since_s: float) -> tuple[list[Span], list[Span]]:
        """Return waits and collectives that began since a time, and those of background threads; the last 64 each."""
        foreground_spans: list[Span] = []
        for kind, name, began_s, ended_s in self._spans.copy():
            if began_s >= since_s:
                foreground_spans.append(Span(kind, name, began_s, ended_s))
        for journal in self._foreground:
            foreground_spans += _spans_of(journal, since_s)
        foreground_spans.sort(key=lambda span: span.began_s)
        background_spans: list[Span] = []
        for journal in self._background:
            background_spans += _spans_of(journal, since_s)
        return foreground_spans, background_spans


class Wait:
    """The block of `TimeSpent.timed`."""

    __slots__ = ("_before_s", "_began_s", "_kind", "_name", "_spent")

    def __init__(self, spent: TimeSpent, kind: str, name: str) -> None:
        self._spent = spent
        self._kind = kind
        self._name = name

    def __enter__(self) -> None:
        self._before_s = self._spent.begin()
        self._began_s = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if self._before_s is not None:
            self._spent.end(self._kind, self._name, self._began_s, time.monotonic(), self._before_s)


def _spans_of(journal: Recorded, since_s: float) -> list[Span]:
    """Return the collectives of a journal that have begun since a time, and have ended."""
    return [
        Span("communication", str(entry), entry.started_s, entry.ended_s)
        for entry in journal.entries
        if entry.started_s >= since_s and entry.ended_s is not None
    ]


#: The waits of this process, as a run reports one account for each rank.
time_spent = TimeSpent()


def counted(
    kind: str,
    name: str,
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Return a decorator for functions whose calls are waits of this process; see `TimeSpent.timed`."""

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def timed(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            with time_spent.timed(kind, name):
                return function(*args, **kwargs)

        return timed

    return decorate
