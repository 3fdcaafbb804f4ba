"""A group: ranks that reduce together, and everything that lasts between their collectives."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcdist.collectives.fingerprint import Fingerprints
from hpcdist.collectives.journal import Journal
from hpcdist.collectives.stacks import Peer
from hpcdist.collectives.waiting import CELLS, MAX_SLEEP_S, SPINS, Backoff, NodeBarrier, wait_all
from hpcdist.collectives.watchdog import WARN_S, Watchdog
from hpcdist.collectives.window import NodeWindow
from hpcdist.errors import CollectiveError, ExitCode, HpcdistError
from hpcdist.mpi import MPI
from hpcdist.plan.lanes import LanePlan, plan_lanes
from hpcdist.plan.placement import plan_placement
from hpcdist.process import end_job, has_left, make_world
from hpcdist.world import World

T = TypeVar("T")
#: Cell of a rank's cells on the board in which it counts its collectives; the barrier uses the first three.
JOURNAL_CELL = 4
#: The next one holds what its watchdog tells those of other ranks.
FLAGS_CELL = 5
#: A wait of ours gives up this much later than the watchdog ends the job, which has more to say.
LATE_S = 30.0


class Group:
    """Communicators, shared memory and choices of one set of ranks, for one thread.

    Collective: `comm`.

    Args:
        comm: the ranks; cloned.
        world: bounds waits and agrees on errors.
        is_background: whether a thread of its own runs the collectives: it sleeps while it waits.
        timeout_s: longest time for one collective; default: the world's. When it is over the job ends.
        watchdog: sees to that; default: one of the group's own.

    Attributes:
        comm: clone of `comm`. node_comm: its ranks on this host. lane_comm: those with this rank's place on their
            hosts; None on a host that has more ranks than the smallest one.
        placement: which ranks share a host.
        host: number of this rank's host.
        is_crowded: whether this host has more ranks than cores.
        can_share_memory: whether the ranks of every host can share memory.
        journal: the last collectives, which the watchdog looks at.
        library_bytes: arrays of fewer bytes are summed by the MPI library when AUTO may choose; see selection.py.
        is_checked: whether all ranks are compared before each collective, as HPCDIST_DEBUG=collectives asks.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        world: World,
        is_background: bool = False,
        timeout_s: float | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.world = world
        world.wait(comm.Ibarrier())  # all are there: what makes communicators waits for nobody then
        self.comm: MPI.Comm = comm.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node_comm = self._split_node()
        lowest = world.all_reduce_int(self.rank, MPI.MIN, self.node_comm)
        all_lowest = np.empty(self.size, np.int64)
        world.wait(self.comm.Iallgather(np.array([lowest], np.int64), all_lowest))
        self.placement = plan_placement(all_lowest.tolist())
        self.host = self.placement.host_of(self.rank)
        color = self.node_comm.rank if self.node_comm.rank < self.placement.n_lanes else MPI.UNDEFINED
        lane = self.comm.Split(color, self.host)
        self.lane_comm: MPI.Comm | None = None if lane == MPI.COMM_NULL else lane
        self.is_crowded = _is_crowded(self.node_comm, world)
        self._is_background = is_background
        self._kept: dict[Any, Any] = {}
        self._frees: list[Callable[[], None]] = []
        self.timeout_s = timeout_s or world.timeout_s
        self._board, self._no_board = self._share_board()
        self.can_share_memory = bool(world.all_reduce_int(int(self._no_board is None), MPI.MIN, self.comm))
        self.library_bytes = 0
        self._watch(watchdog)
        self.is_checked = "collectives" in world.debug
        self._fingerprints = Fingerprints(self.comm, world, self.timeout_s) if self.is_checked else None

    def _split_node(self) -> MPI.Comm:
        """Return the ranks of this host. Tests make hosts up here."""
        return self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)

    def keep(self, key: Any, make: Callable[[], T], free: Callable[[T], None] | None = None) -> T:
        """Return what `make` made at the first call with this key; it lives as long as the group.

        Collective at the first call, if `make` is.
        """
        if key not in self._kept:
            made = self._kept[key] = make()
            if free is not None:
                self._frees.append(lambda: free(made))
        kept: T = self._kept[key]
        return kept

    def kept(self, key: Any) -> Any:
        """Return what is kept under a key, None if nothing is."""
        return self._kept.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Keep a value that needs no freeing, instead of what is kept."""
        self._kept[key] = value

    def agree(self, error: HpcdistError | None, comm: MPI.Comm | None = None) -> None:
        """Raise on every rank of `comm`, default all of the group, what failed on one; see `World.agree`."""
        self.world.agree(error, comm or self.comm)

    def free(self) -> None:
        """Free the communicators and what was kept. Collective: all ranks of the group."""
        self.watchdog.stop()
        for free in reversed(self._frees):
            free()
        if self._fingerprints is not None:
            self._fingerprints.free()
        self._kept.clear()
        self._frees.clear()
        for comm in (self.lane_comm, self.node_comm, self.comm):
            if comm is not None:
                comm.Free()

    def _share_board(self) -> tuple[memoryview | None, CollectiveError | None]:
        """Return cells that the ranks of this host share, or why they cannot share memory."""
        if self.node_comm.size == 1:
            return None, None
        n_cells = self.node_comm.size * CELLS
        try:
            window = NodeWindow(self.node_comm, n_cells * 8, self.world)
        except CollectiveError as error:
            return None, error
        return window.pieces[0].cast("q")[:n_cells], None  # a window is whole pages: no cells of ranks there are not

    def _watch(self, watchdog: Watchdog | None) -> None:
        """Let the watchdog look at this group's collectives, and at what other ranks of the host say of theirs."""
        peers = [Peer(*one) for one in self.node_comm.allgather((str(self.world), os.getpid()))]
        board = None if self._board is None else self._board[JOURNAL_CELL::CELLS]
        flags = None if self._board is None else self._board[FLAGS_CELL::CELLS]
        self.journal = Journal(board, self.node_comm.rank)
        warn_s = min(WARN_S, self.timeout_s / 2)
        self.watchdog = watchdog or Watchdog(
            self.world.describe, functools.partial(end_job, "", ExitCode.INTERNAL), warn_s, self.timeout_s, has_left
        )
        if self.size > 1:
            self.watchdog.watch(self.journal, () if board is None else peers, flags)

    @property
    def barrier(self) -> NodeBarrier:
        """The barrier among the ranks of this host.

        Raises:
            CollectiveError: when they cannot share memory; on each of them.
        """
        if self._no_board is not None:
            raise self._no_board
        return self.keep("barrier", self._make_barrier)

    def _make_barrier(self) -> NodeBarrier:
        board = memoryview(bytearray(CELLS * 8)).cast("q") if self._board is None else self._board
        spins = 0 if self.is_crowded or self._is_background else SPINS
        return NodeBarrier(board, self.node_comm.rank, self.node_comm.size, self.backoff, spins)

    def recorded(self, op: str, buffer: Any) -> Journal:
        """Note that a collective begins; use as a context manager, whose end notes that it has ended.

        Collective with HPCDIST_DEBUG=collectives, when all ranks are compared: `comm`.

        Args:
            op: such as "all_reduce sum".
            buffer: the same shape and dtype on every rank; None where they may differ.

        Raises:
            DesyncError: with HPCDIST_DEBUG=collectives, when a rank is about to do something else; on every rank.

        Cost: about half a microsecond.
        """
        if buffer is None:
            dtype, n_elements = "any", 0
        else:
            dtype, n_elements = buffer.dtype, buffer.size if hasattr(buffer, "flags") else buffer.numel()
        journal = self.journal
        journal.enter(op, dtype, n_elements)
        if self._fingerprints is not None:
            with journal:
                self._fingerprints.check(op, str(dtype), n_elements)
            journal.enter(op, dtype, n_elements)
        return journal

    def backoff(self, explain: Callable[[], str]) -> Backoff:
        """Return what to call while waiting for what `explain` says."""
        return Backoff(self.timeout_s + LATE_S, lambda: self._late(explain()), self._is_background)

    def wait(self, requests: Sequence[MPI.Request], max_sleep_s: float = MAX_SLEEP_S) -> None:
        """Wait for messages of this group, bounded: they take long enough to sleep meanwhile.

        Args:
            requests: the messages.
            max_sleep_s: longest sleep.

        Raises:
            CollectiveTimeoutError: on this rank.
        """
        if not MPI.Request.Testall(requests):
            late = functools.partial(self._late, f"{len(requests)} messages")
            wait_all(requests, Backoff(self.timeout_s + LATE_S, late, is_patient=True, max_sleep_s=max_sleep_s))

    def _late(self, what: str) -> str:
        return (
            f"all_reduce: expected every rank within {self.timeout_s:g} s, got no answer from {what} on "
            f"{self.world}; look for a rank that took another path or stopped (HPCDIST_TIMEOUT_S or timeout_seconds "
            f"sets the limit)."
        )

    def lane_plan(self, is_ordered: bool) -> LanePlan:
        """Return what the ranks of this host do in a sum over hosts."""
        return self.keep(("lanes", is_ordered), lambda: plan_lanes(self.placement, self.host, is_ordered))

    def describe(self, place: int) -> str:
        """Return the rank at a place of this host."""
        return f"rank {self.placement.hosts[self.host][place]}"


def _is_crowded(node_comm: MPI.Comm, world: World) -> bool:
    """Return whether this host has more ranks than cores."""
    cores = os.sched_getaffinity(0)
    sets = node_comm.allgather(frozenset(cores))
    return any(sum(1 for other in sets if other & own) > len(own) for own in sets)


def group_of(comm: MPI.Comm | None = None, timeout_s: float | None = None, world: World | None = None) -> Group:
    """Return the group of a communicator, made at the first call and freed with the communicator.

    Groups with other time limits are others.

    Collective at the first call: `comm`, default all ranks of this rank's role.

    Args:
        comm: the ranks.
        timeout_s: longest time for one collective; default: the world's.
        world: that of `comm`; default: the process's.
    """
    global _group_of_role
    if comm is not None or timeout_s is not None or world is not None:
        return _find_group(comm, timeout_s, world or make_world())
    if _group_of_role is None:
        _group_of_role = _find_group(None, None, make_world())
    return _group_of_role


def _find_group(comm: MPI.Comm | None, timeout_s: float | None, world: World) -> Group:
    comm = world.role_comm if comm is None else comm
    groups: Any = comm.Get_attr(_GROUPS)
    if groups is None:
        groups = {}
        comm.Set_attr(_GROUPS, groups)
    if timeout_s not in groups:
        groups[timeout_s] = Group(comm, world, timeout_s=timeout_s)
    group: Group = groups[timeout_s]
    return group


def _free_groups(comm: MPI.Comm, key: int, groups: dict[float | None, Group]) -> None:
    global _group_of_role
    if _group_of_role in groups.values():
        _group_of_role = None
    for group in groups.values():
        group.free()


#: What is asked for most, and found in less time here than on the communicator.
_group_of_role: Group | None = None
#: MPI's own place for what belongs to a communicator.
_GROUPS = MPI.Comm.Create_keyval(delete_fn=_free_groups, nopython=False)
