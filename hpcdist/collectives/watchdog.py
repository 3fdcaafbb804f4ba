"""A thread that sees when a collective takes too long: it warns, then reports where everybody is, then ends the job.

It makes no MPI call of its own and takes no lock that a hanging thread could hold.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcdist.collectives.journal import Entry, Journal
from hpcdist.collectives.stacks import Peer, answer_signal, own_stacks, stacks_of, state_of

#: A collective that takes this long is told; one that takes this long ends the job.
WARN_S, LIMIT_S = 60.0, 600.0
#: Between the report of this rank and the end of the job, so that the reports of other nodes get out too.
GRACE_S = 2.0
#: Ranks of a node report this long after each other, so that their reports do not mix; at most `MAX_STAGGER_S`.
STAGGER_S, MAX_STAGGER_S = 0.05, 1.0
#: A process that is still alive so long after it gave up is killed: its report cannot be written, or `end` hangs.
KILL_S = 20.0
#: Looks per `warn_s`, and the longest time between two looks.
LOOKS, MAX_INTERVAL_S = 5, 1.0


@dataclass
class _Watched:
    """A journal, the ranks of its board, and since when it has been in the same collective or out of any."""

    journal: "weakref.ref[Journal]"
    peers: Sequence[Peer]
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
    """

    def __init__(
        self,
        describe: Callable[[], str],
        end: Callable[[], None],
        warn_s: float = WARN_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._describe = describe
        self._end = end
        self._warn_s, self._limit_s = warn_s, limit_s
        self._interval_s = min(MAX_INTERVAL_S, warn_s / LOOKS, limit_s / LOOKS)
        self._watched: list[_Watched] = []
        self._awake_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    def watch(self, journal: Journal, peers: Sequence[Peer] = ()) -> None:
        """Watch a journal for as long as it lives. Not collective.

        Args:
            journal: held weakly.
            peers: the ranks of its board, by place, this one included; none if nothing is known of them.
        """
        answer_signal()
        self._watched = [*self._watched, _Watched(weakref.ref(journal), peers)]
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """End the thread, as when this rank has finished and only waits for others to leave. Not collective."""
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
        behind = [watched.peers[place] for place in journal.behind() if place < len(watched.peers)]
        advice = f"; the job ends when it has taken {self._limit_s:g} s"
        if behind:
            names = ", ".join(peer.name for peer in behind)
            missing = (
                f"not entered by {names} of this node{advice}; see what that does: py-spy dump --pid {behind[0].pid}"
            )
        elif watched.peers:
            missing = f"entered by every rank of this node{advice}; look for a rank of another node that says nothing"
        else:
            missing = f"of other ranks nothing is known{advice}; look for a rank that took another path or stopped"
        return f"collective {entry.number}, {entry}, has taken {_age_s(entry):.3g} s, {missing}."

    def _look_at_idle(self, watched: _Watched, journal: Journal) -> None:
        """Report a rank that nobody on its node can complain about, when others may be about to end the job for it.

        It left its last collective before any rank entered the one that hangs: its time is up first. One per node.
        """
        is_first = journal.place == 0 and max(journal.board.tolist()) == journal.n_entered > 0
        lasted_s = min(self._awake_s - other.since_s for other in self._watched)  # of all that this process does
        if lasted_s >= self._limit_s and is_first and not watched.is_warned:
            watched.is_warned = True
            what = f"no collective for {self._limit_s:g} s; if others wait for this rank, here is where it is"
            self._report(journal, what)

    def _give_up(self, watched: _Watched, journal: Journal, entry: Entry) -> None:
        """Report, then end the job; a process that is still there after that kills itself."""
        killer = threading.Timer(KILL_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        behind = journal.behind()  # asking a rank may wake it up
        time.sleep(min(STAGGER_S * journal.place, MAX_STAGGER_S))
        what = f"collective {entry.number}, {entry}, has taken {_age_s(entry):.3g} s, the limit; ending the job"
        self._report(journal, what)
        self._report_peers(watched.peers, journal.place, behind)
        time.sleep(GRACE_S)
        self._stopped.set()
        self._end()

    def _report(self, journal: Journal, what: str) -> None:
        _write(
            f"hpcdist: {self._describe()}: {what}\nlast collectives:\n{journal.describe()}\n"
            f"process {os.getpid()}:\n{own_stacks()}\n"
        )

    def _report_peers(self, peers: Sequence[Peer], own_place: int, behind: list[int]) -> None:
        """Report the ranks of this node that cannot speak for themselves: those behind, and those that are stopped."""
        for place, peer in enumerate(peers):
            if place == own_place or not (place in behind or state_of(peer)):
                continue
            stacks = stacks_of(peer)
            if stacks is not None:
                _write(f"hpcdist: {stacks}\n")


def _age_s(entry: Entry) -> float:
    return time.monotonic() - entry.started_s


def _write(text: str) -> None:
    """Write to standard error in as few pieces as it takes; sys.stderr may be locked by a thread that hangs."""
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # nobody reads it: the job ends all the same
        while data:
            data = data[os.write(2, data) :]
