"""A thread that sees when a collective takes too long: it warns, then reports where everybody is, then ends the job.

It makes no MPI call of its own and takes no lock that a hanging thread could hold. The watchdogs of a node tell each
other by flags in shared memory: who has left its program, and that the job is about to end, so that all report.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpcdist.collectives.journal import Entry, Journal
from hpcdist.collectives.stacks import Peer, answer_signal, own_stacks, stacks_of, state_of

#: A collective that takes this long is told; one that takes this long ends the job.
WARN_S, LIMIT_S = 60.0, 600.0
#: Between the report of this rank and the end of the job, so that the reports of other nodes get out too.
GRACE_S = 2.0
#: Ranks of a node report this long after each other, so that their reports do not mix; at most `MAX_STAGGER_S`.
STAGGER_S, MAX_STAGGER_S = 0.05, 1.0
#: Time for writing a report, when the watchdog of another rank of the node is to do it at its next look.
REPORT_S = 0.5
#: A process that is still alive so long after it gave up is killed: its report cannot be written, or `end` hangs.
KILL_S = 20.0
#: Looks per `warn_s`, and the longest time between two looks.
LOOKS, MAX_INTERVAL_S = 5, 1.0
#: Flags of a rank: it has left its program and waits for others to leave; it is ending the job; it has reported.
LEFT, ENDING, REPORTED = 1, 2, 4


def _own_flags() -> memoryview:
    return memoryview(array("q", [0]))


@dataclass
class _Watched:
    """A journal, the ranks of its board, and since when it has been in the same collective or out of any."""

    journal: "weakref.ref[Journal]"
    peers: Sequence[Peer]
    flags: memoryview = field(default_factory=_own_flags)
    state: tuple[int, bool] = (0, False)
    since_s: float = 0.0
    is_warned: bool = False


class Watchdog:
    """Watches the journals of this process. One thread, started at the first `watch`.

    Times are of this process being awake: a job that was stopped and goes on is not late.

    Args:
        describe: returns who this rank is, such as "rank 3 (worker 3) at step 5".
        end: ends the job; called once, from the watchdog's thread.
        warn_s: a collective that takes this long is told on standard error, once.
        limit_s: one that takes this long ends the job.
        has_left: returns whether this rank has left its program and waits for others to leave.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        end: Callable[[], None],
        warn_s: float = WARN_S,
        limit_s: float = LIMIT_S,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self._describe = describe
        self._end = end
        self._has_left = has_left
        self._has_reported = False
        self._warn_s, self._limit_s = warn_s, limit_s
        self._interval_s = min(MAX_INTERVAL_S, warn_s / LOOKS, limit_s / LOOKS)
        self._watched: list[_Watched] = []
        self._awake_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    def watch(self, journal: Journal, peers: Sequence[Peer] = (), flags: memoryview | None = None) -> None:
        """Watch a journal for as long as it lives. Not collective.

        Args:
            journal: held weakly.
            peers: the ranks of its board, by place, this one included; none if nothing is known of them.
            flags: one int64 per rank of its board, shared by them and zero at first; each rank's watchdog writes its
                own. Default: none is shared.
        """
        answer_signal()
        watched = _Watched(weakref.ref(journal), peers, _own_flags() if flags is None else flags)
        self._watched = [*self._watched, watched]
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Not collective."""
        self._stopped.set()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now = time.monotonic()
            self._awake_s += min(now - looked_s, 3 * self._interval_s)
            looked_s = now
            self._watched = [watched for watched in self._watched if watched.journal() is not None]
            for watched in self._watched:
                self._look(watched)

    def _look(self, watched: _Watched) -> None:
        journal = watched.journal()
        if journal is None:
            return
        if self._has_left():
            watched.flags[journal.place] |= LEFT
        if not self._has_reported and any(flags & ENDING for flags in watched.flags.tolist()):
            where = self._whereabouts(watched, journal)
            self._report(watched, journal, f"{where}; another rank of this node is ending the job")
        entry = journal.current
        state = (entry.number, True) if entry else (journal.n_entered, False)
        if state != watched.state:
            watched.state, watched.since_s, watched.is_warned = state, self._awake_s, False
        lasted_s = self._awake_s - watched.since_s
        if entry is None:
            self._look_at_idle(watched, journal)
        elif lasted_s >= self._limit_s:
            self._give_up(watched, journal, entry)
        elif lasted_s >= self._warn_s and not watched.is_warned:
            watched.is_warned = True
            _write(f"hpcdist: {self._describe()}: {self._warning(watched, journal, entry)}\n")

    def _warning(self, watched: _Watched, journal: Journal, entry: Entry) -> str:
        behind = journal.behind()
        return (
            f"{_progress(entry)}, {_missing(watched, behind)}; the job ends when it has taken {self._limit_s:g} s; "
            f"{_advice(watched, behind)}."
        )

    def _whereabouts(self, watched: _Watched, journal: Journal) -> str:
        """Return what this rank does, as far as its journal tells."""
        entry = journal.current
        if entry is not None:
            return _progress(entry)
        if self._has_left():
            return f"has left its program after {journal.n_entered} collectives, and waits for others to leave"
        return f"in no collective for {self._awake_s - watched.since_s:.3g} s, after {journal.n_entered} of them"

    def _look_at_idle(self, watched: _Watched, journal: Journal) -> None:
        """Report a rank that nobody on its node can complain about, when others may be about to end the job for it.

        It left its last collective before any rank entered the one that hangs: its time is up first. One per node, and
        none where a rank has left its program after as many collectives: then nobody waits for another.
        """
        is_first = journal.place == 0 and max(journal.board.tolist()) == journal.n_entered > 0
        is_last = any(flags & LEFT for flags in watched.flags.tolist())
        lasted_s = min(self._awake_s - other.since_s for other in self._watched)  # of all that this process does
        if lasted_s >= self._limit_s and is_first and not is_last and not watched.is_warned:
            watched.is_warned = True
            what = f"no collective for {self._limit_s:g} s, no fault unless others wait for this rank; it is here"
            _write(self._report_of(journal, what))

    def _give_up(self, watched: _Watched, journal: Journal, entry: Entry) -> None:
        """Report, and have the others of this node report, then end the job.

        A process that is still there after that kills itself.
        """
        killer = threading.Timer(KILL_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        missing = _missing(watched, journal.behind())  # now: asking a rank may wake it up
        watched.flags[journal.place] |= ENDING
        if not self._has_reported:
            self._report(watched, journal, f"{_progress(entry)}, the limit; ending the job; {missing}")
        self._report_silent(watched, journal)
        time.sleep(GRACE_S)
        self._stopped.set()
        self._end()

    def _report(self, watched: _Watched, journal: Journal, what: str) -> None:
        """Report this rank, once, as the job is about to end."""
        self._has_reported = True
        time.sleep(min(STAGGER_S * journal.place, MAX_STAGGER_S))
        _write(self._report_of(journal, what))
        watched.flags[journal.place] |= REPORTED

    def _report_of(self, journal: Journal, what: str) -> str:
        others = [watched.journal() for watched in self._watched]
        of_others = "".join(
            f"last collectives of another thread:\n{other.describe()}\n"
            for other in others
            if other is not None and other is not journal and other.n_entered
        )
        return (
            f"hpcdist: {self._describe()}: {what}\nlast collectives:\n{journal.describe()}\n{of_others}"
            f"process {os.getpid()}:\n{own_stacks()}\n"
        )

    def _report_silent(self, watched: _Watched, journal: Journal) -> None:
        """Wait for the reports of this node's other ranks, and report those that cannot speak for themselves."""
        deadline = time.monotonic() + self._interval_s + MAX_STAGGER_S + REPORT_S
        others = [place for place in range(len(watched.peers)) if place != journal.place]
        while True:
            silent = [place for place in others if not watched.flags[place] & REPORTED]
            if time.monotonic() > deadline or all(state_of(watched.peers[place]) for place in silent):
                break
            time.sleep(REPORT_S / 10)
        for place in silent:
            stacks = stacks_of(watched.peers[place])
            if stacks is not None:
                _write(f"hpcdist: {stacks}\nIt has entered {journal.board[place]} collectives.\n")


def _missing(watched: _Watched, behind: list[int]) -> str:
    """Return which ranks of this node have not entered the collective that this one is in."""
    if not watched.peers:
        return "of other ranks nothing is known"
    if not behind:
        return "entered by every rank of this node"
    left = {place: " (which has left its program)" for place in behind if watched.flags[place] & LEFT}
    names = ", ".join(watched.peers[place].name + left.get(place, "") for place in behind)
    return f"not entered by {names} of this node"


def _advice(watched: _Watched, behind: list[int]) -> str:
    """Return what to do about a collective that some ranks of this node, or none of them, have not entered."""
    if not watched.peers:
        return "look for a rank that took another path or stopped"
    if not behind:
        return "look for a rank of another node that says nothing"
    running = [watched.peers[place].pid for place in behind if not watched.flags[place] & LEFT]
    if not running:
        return "let every rank call the same collectives"
    return f"see what that does: py-spy dump --pid {running[0]}"


def _progress(entry: Entry) -> str:
    return f"collective {entry.number}, {entry}, has taken {time.monotonic() - entry.started_s:.3g} s"


def _write(text: str) -> None:
    """Write to standard error in as few pieces as it takes; sys.stderr may be locked by a thread that hangs."""
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # nobody reads it: the job ends all the same
        while data:
            data = data[os.write(2, data) :]
