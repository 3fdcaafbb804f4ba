"""The watchdog: a thread that warns of a collective that takes too long, reports where every rank is, and ends the job.

It makes no MPI call and takes no lock that a hanging thread could hold. The watchdogs of a node communicate by flags in
shared memory: which ranks have left their programs, and that the job is about to end, so that all of them report.
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

from hpcdist.diagnostics.journal import Entry, Journal
from hpcdist.diagnostics.stacks import Peer, answer_signal, own_stacks, stacks_of, state_of

#: A collective that takes WARN_S is logged; one that takes LIMIT_S ends the job.
WARN_S = 60.0
LIMIT_S = 600.0
#: Ranks of a node that have been in different calls for this long, at the same place of their programs, stay there.
APART_S = 3.0
#: Between the report of this rank and the end of the job, so that the reports of other nodes get out too.
GRACE_S = 2.0
#: Ranks of a node report this long after each other, so that their reports do not mix; at most `MAX_STAGGER_S`.
STAGGER_S = 0.05
MAX_STAGGER_S = 1.0
#: Time for writing a report, when the watchdog of another rank of the node does it at its next check.
REPORT_S = 0.5
#: A process that is still alive this long after it gave up is killed: its report cannot be written, or `end` hangs.
KILL_S = 20.0
#: Checks per `warn_s`, and the longest time between two checks.
CHECKS = 5
MAX_INTERVAL_S = 1.0
#: Flags of a rank: it has left its program and waits for further ranks to leave; it is ending the job, as a collective
#: takes too long; it has reported that; it is ending the job, as it has failed; it has noticed that a rank is gone.
LEFT = 1
ENDING = 2
REPORTED = 4
FAILED = 8
NOTICED = 16


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
    apart: dict[int, str] = field(default_factory=dict)


class Watchdog:
    """Watches the journals of this process. One thread, started at the first `watch`.

    Only time in which this process is awake counts: a job that was suspended and resumed is not late.

    Args:
        describe: function that returns the name of this rank, such as "rank 3 (worker 3) at step 5".
        end: function that ends the job; called once, from the watchdog's thread.
        warn_s: time after which a running collective is logged on standard error, once.
        limit_s: time after which a running collective ends the job.
        has_left: function that returns whether this rank has left its program and waits for further ranks to leave.
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
        self._warn_s = warn_s
        self._limit_s = limit_s
        shortest_s = min(warn_s, limit_s)
        self._interval_s = min(MAX_INTERVAL_S, shortest_s / CHECKS)
        self._watched: list[_Watched] = []
        self._awake_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name="hpcdist-watchdog",
            daemon=True,
        )

    def watch(
        self,
        journal: Journal,
        peers: Sequence[Peer] = (),
        flags: memoryview | None = None,
    ) -> None:
        """Watch a journal for as long as it lives. Not collective.

        Args:
            journal: journal to watch; held weakly.
            peers: ranks of its board, by local rank, this rank included; empty if nothing is known of them.
            flags: one int64 per rank of its board, shared by the ranks and zero at first; each rank's watchdog writes
                the flags of its rank. Default: private flags.
        """
        answer_signal()
        if flags is None:
            flags = _own_flags()
        watched = _Watched(weakref.ref(journal), peers, flags)
        self._watched = [*self._watched, watched]
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Not collective."""
        self._stopped.set()

    def _run(self) -> None:
        checked_s = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now = time.monotonic()
            self._awake_s += min(now - checked_s, 3 * self._interval_s)
            checked_s = now
            self._watched = [watched for watched in self._watched if watched.journal() is not None]
            for watched in self._watched:
                self._check(watched)

    def _check(self, watched: _Watched) -> None:
        journal = watched.journal()
        if journal is None:
            return
        if self._has_left():
            watched.flags[journal.local_rank] |= LEFT
        if not self._has_reported and any(flags & ENDING for flags in watched.flags.tolist()):
            where = self._whereabouts(watched, journal)
            self._report(watched, journal, f"{where}; another rank of this node is ending the job")
        entry = journal.current
        state = (journal.n_entered, False)
        if entry is not None:
            state = (entry.number, True)
        if state != watched.state:
            watched.state = state
            watched.since_s = self._awake_s
            watched.is_warned = False
        lasted_s = self._awake_s - watched.since_s
        if entry is None:
            self._check_idle(watched, journal)
        elif lasted_s >= self._limit_s:
            # before a rank is asked for its stacks, which may wake it up
            missing = _missing(watched, journal.behind())
            title = f"{_progress(entry)}, the limit; ending the job; {missing}"
            self._give_up(watched, journal, title)
        elif lasted_s >= APART_S and self._is_apart(watched, journal):
            title = f"{_progress(entry)}, while {_calls_apart(watched)}; ending the job"
            self._give_up(watched, journal, title)
        elif lasted_s >= self._warn_s and not watched.is_warned:
            watched.is_warned = True
            warning = self._warning(watched, journal, entry)
            write(f"hpcdist: {self._describe()}: {warning}\n")

    def _is_apart(self, watched: _Watched, journal: Journal) -> bool:
        """Return whether a rank of this node is in another call at the same place, now as at the last check."""
        before = watched.apart
        watched.apart = {}
        if watched.peers:
            watched.apart = journal.apart()
        return bool(watched.apart) and watched.apart == before

    def _warning(
        self,
        watched: _Watched,
        journal: Journal,
        entry: Entry,
    ) -> str:
        """Return a warning of a collective that takes long."""
        behind = journal.behind()
        missing = _missing(watched, behind)
        advice = _advice(watched, behind)
        end = f"the job ends when it has taken {self._limit_s:g} s"
        return f"{_progress(entry)}, {missing}; {end}; {advice}."

    def _whereabouts(self, watched: _Watched, journal: Journal) -> str:
        """Return what this rank is doing, as far as its journal shows."""
        entry = journal.current
        if entry is not None:
            return _progress(entry)
        n_entered = journal.n_entered
        if self._has_left():
            return (
                f"has left its program after {n_entered} collectives, and waits for others to leave"
            )
        idle_s = self._awake_s - watched.since_s
        return f"in no collective for {idle_s:.3g} s, after {n_entered} of them"

    def _check_idle(self, watched: _Watched, journal: Journal) -> None:
        """Report a rank that is in no collective, when ranks of further nodes may be about to end the job for that.

        It left its last collective before any rank entered the one that hangs, so its time is up first. One rank per
        node reports, and none where a rank has left its program after the same number of collectives: then nobody is
        waiting.
        """
        if watched.is_warned or journal.local_rank != 0:
            return
        has_left = any(flags & LEFT for flags in watched.flags.tolist())
        is_newest = max(journal.board.tolist()) == journal.n_entered > 0
        if has_left or not is_newest:
            return
        # the last change in any thread of this process
        changed_s = max(thread_journal.since_s for thread_journal in self._watched)
        if self._awake_s - changed_s >= self._limit_s:
            watched.is_warned = True
            title = f"in no collective for {self._limit_s:g} s, a problem only if others wait for this rank; its stacks"
            write(self._report_of(journal, title))

    def _give_up(
        self,
        watched: _Watched,
        journal: Journal,
        title: str,
    ) -> None:
        """Report what has happened, let the further ranks of this node report, then end the job.

        A process that is still alive after that kills itself.
        """
        killer = threading.Timer(KILL_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        watched.flags[journal.local_rank] |= ENDING
        if not self._has_reported:
            self._report(watched, journal, title)
        self._report_silent(watched, journal)
        time.sleep(GRACE_S)
        self._stopped.set()
        self._end()

    def _report(
        self,
        watched: _Watched,
        journal: Journal,
        title: str,
    ) -> None:
        """Report this rank, once, as the job is about to end."""
        self._has_reported = True
        stagger_s = STAGGER_S * journal.local_rank
        time.sleep(min(stagger_s, MAX_STAGGER_S))
        write(self._report_of(journal, title))
        watched.flags[journal.local_rank] |= REPORTED

    def _report_of(self, journal: Journal, title: str) -> str:
        """Return the last collectives of all threads, and the stacks of this process."""
        parts = [f"hpcdist: {self._describe()}: {title}"]
        parts.append(f"last collectives:\n{journal.describe()}")
        for watched in self._watched:
            thread_journal = watched.journal()
            if thread_journal is None or thread_journal is journal:
                continue
            if thread_journal.n_entered:
                parts.append(f"last collectives of another thread:\n{thread_journal.describe()}")
        parts.append(f"process {os.getpid()}:\n{own_stacks()}\n")
        return "\n".join(parts)

    def _report_silent(self, watched: _Watched, journal: Journal) -> None:
        """Wait for the reports of this node's further ranks, and report for the ranks that cannot."""
        deadline = time.monotonic() + self._interval_s + MAX_STAGGER_S + REPORT_S
        while True:
            silent = _silent_ranks(watched, journal.local_rank)
            if time.monotonic() > deadline:
                break
            if all(state_of(watched.peers[local_rank]) for local_rank in silent):
                break
            time.sleep(REPORT_S / 10)
        for local_rank in silent:
            stacks = stacks_of(watched.peers[local_rank])
            if stacks is not None:
                n_entered = journal.board[local_rank]
                write(f"hpcdist: {stacks}\nIt has entered {n_entered} collectives.\n")


def _silent_ranks(watched: _Watched, reporting_rank: int) -> list[int]:
    """Return the local ranks that have not reported, without the rank that asks."""
    silent = []
    for local_rank in range(len(watched.peers)):
        has_reported = watched.flags[local_rank] & REPORTED
        if local_rank != reporting_rank and not has_reported:
            silent.append(local_rank)
    return silent


def _missing(watched: _Watched, behind: list[int]) -> str:
    """Return which ranks of this node have not entered the collective that this rank is in, as a text."""
    if not watched.peers:
        return "nothing is known of other ranks"
    if not behind:
        return "entered by every rank of this node"
    names = []
    for local_rank in behind:
        name = watched.peers[local_rank].name
        if watched.flags[local_rank] & LEFT:
            name += " (which has left its program)"
        names.append(name)
    return f"not entered by {', '.join(names)} of this node"


def _calls_apart(watched: _Watched) -> str:
    """Return which ranks of this node are in which different calls, and what to do about it."""
    calls = []
    for rank, op in watched.apart.items():
        calls.append(f"{watched.peers[rank].name} is in {op}")
    advice = (
        "let every rank make the same calls; save is one, so call it outside of any `if is_chief`"
    )
    return f"{', '.join(calls)}: {advice}"


def _advice(watched: _Watched, behind: list[int]) -> str:
    """Return what to do about a collective that hangs, as a text.

    Args:
        watched: journal of this rank.
        behind: local ranks that have not entered the collective.
    """
    if not watched.peers:
        return "look for a rank that took another path or stopped"
    if not behind:
        return "look for a rank of another node that reports nothing"
    for local_rank in behind:
        is_running = not watched.flags[local_rank] & LEFT
        if is_running:
            return f"look at that rank: py-spy dump --pid {watched.peers[local_rank].pid}"
    return "let every rank call the same collectives"


def _progress(entry: Entry) -> str:
    """Return how long a collective has taken so far, as a text."""
    elapsed_s = time.monotonic() - entry.started_s
    return f"collective {entry.number}, {entry}, has taken {elapsed_s:.3g} s"


def write(text: str) -> None:
    """Write to standard error in as few pieces as it takes; sys.stderr may be locked by a thread that hangs."""
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # nobody reads it: the job ends all the same
        while data:
            data = data[os.write(2, data) :]
