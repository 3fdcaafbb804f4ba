"""A group: ranks that reduce together, and everything that lasts between their collectives."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpcdist.background import BackgroundThread
from hpcdist.collectives.route import GroupFacts, auto_routes
from hpcdist.diagnostics.call_check import CallCheck
from hpcdist.diagnostics.journal import CallMarks, Entry, Journal, ReportingJournal, log_call
from hpcdist.diagnostics.neighbour import NeighbourWatch
from hpcdist.diagnostics.stacks import Peer, process_namespace
from hpcdist.diagnostics.summary import count_calls
from hpcdist.diagnostics.watchdog import FAILED, WARN_S, Watchdog
from hpcdist.errors import CollectiveError, ExitCode, HpcdistError, UsageError
from hpcdist.plan.placement import LanePlan, plan_lanes
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.hosts import Hosts
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.node_memory import CELLS, NodeBarrier
from hpcdist.runtime.node_window import NodeWindow
from hpcdist.runtime.process import call_on_failure, end_job, has_left, make_world
from hpcdist.runtime.time_spent import time_spent
from hpcdist.runtime.waiting import MAX_SLEEP_S, late, wait_until
from hpcdist.runtime.world import World

T = TypeVar("T")
#: Cell of a rank's cells on the board in which it counts its collectives; the barrier uses the first three cells.
JOURNAL_CELL = 4
#: Cell with the flags that the rank's watchdog sets for the watchdogs of other ranks.
FLAGS_CELL = 5
#: Cell with the code of the operation that the rank is in.
CODE_CELL = 6
#: Cells that hold, in turn, the marks of the rank's reductions; see `CallMarks`.
MARK_CELLS = (3, 7)
#: A wait of ours gives up this much later than the watchdog ends the job: the watchdog's report says more.
LATE_S = 30.0


class Group:
    """Communicators, shared memory and choices of one set of ranks, for one thread.

    Collective over `comm`.

    Args:
        comm: the ranks; cloned.
        world: bounds waits and agrees on errors.
        is_background: whether a background thread makes the calls: it sleeps while it waits.
        timeout_s: longest time for one collective; default: the world's. After it the job ends.
        watchdog: enforces the longest time; default: a new watchdog for this group.
        hosts: which ranks share a host; freed with the group. By default the group finds out.

    Attributes:
        comm: clone of the argument `comm`.
        node_comm: the ranks of this rank's host, as in `Hosts`.
        lane_comm: the ranks of this rank's lane, as in `Hosts`.
        placement: which ranks share a host.
        host: number of this rank's host.
        names: names of the ranks of this host in messages, by local rank.
        is_background: whether a background thread makes the calls.
        facts: facts that the choice of an algorithm depends on; equal on all ranks.
        auto_routes: routes that AUTO chooses for host arrays; see `auto_routes`.
        journal: the last collectives, which the watchdog looks at.
        marks: marks that compare the ranks' reductions by the MPI library on this host; None where the ranks share no
            memory.
        compares_calls: whether all ranks are compared before each collective, as HPCDIST_DEBUG=collectives asks.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        world: World,
        is_background: bool = False,
        timeout_s: float | None = None,
        watchdog: Watchdog | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.world = world
        world.wait(comm.Ibarrier())  # once all have arrived, making communicators blocks on nobody
        self.comm: MPI.Comm = comm.Dup()
        # sums that do not fit together are explained, not fatal
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self.comm.rank
        self.size = self.comm.size
        is_of_role = comm == world.role_comm and not is_background
        self._own_hosts = hosts
        if hosts is None and not is_of_role:
            self._own_hosts = Hosts(self.comm, world.wait)
        self._hosts = self._own_hosts or world.hosts
        self.node_comm = self._hosts.node_comm
        self.lane_comm = self._hosts.lane_comm
        self.placement = self._hosts.placement
        self.host = self._hosts.host
        self.names = [f"rank {rank}" for rank in self.placement.hosts[self.host]]
        self.is_background = is_background
        self._resources: dict[Any, Any] = {}
        self._frees: list[Callable[[], None]] = []
        self.timeout_s = timeout_s or world.timeout_s
        self._board, self._no_board = self._share_board()
        has_board = self._no_board is None
        can_share = bool(world.all_reduce_int(int(has_board), MPI.MIN, self.comm))
        self.set_facts(GroupFacts(self.placement, can_share))
        self._watch(watchdog, is_of_role)
        self.compares_calls = "collectives" in world.debug
        self._call_check: CallCheck | None = None
        if self.compares_calls:
            self._call_check = CallCheck(self.comm, world, self.timeout_s)

    def set_facts(self, facts: GroupFacts) -> None:
        """Choose algorithms by these facts from now on. All ranks set the same facts."""
        self.facts = facts
        self.auto_routes = auto_routes(facts)

    def keep(
        self,
        key: Any,
        make: Callable[[], T],
        free: Callable[[T], None] | None = None,
    ) -> T:
        """Return the object that `make` returned at the first call with this key; it lives as long as the group.

        Collective at the first call, if `make` is collective.
        """
        if key not in self._resources:
            new_resource = self._resources[key] = make()
            if free is not None:
                self._frees.append(lambda: free(new_resource))
        resource: T = self._resources[key]
        return resource

    def peek(self, key: Any) -> Any:
        """Return the object that is kept under a key; None if there is none."""
        return self._resources.get(key)

    def agree(self, error: HpcdistError | None, comm: MPI.Comm | None = None) -> None:
        """Raise the error of one rank on every rank of `comm`, by default all of the group; see `World.agree`."""
        self.world.agree(error, comm or self.comm)

    def free(self) -> None:
        """Free the communicators and the kept objects. Collective over all ranks of the group."""
        self.watchdog.stop()
        time_spent.leave(self.journal)
        if self._neighbour is not None:
            self._neighbour.stop()
        for free in reversed(self._frees):
            free()
        if self._call_check is not None:
            self._call_check.free()
        self._resources.clear()
        self._frees.clear()
        if self._own_hosts is not None:
            self._own_hosts.free()
        self.comm.Free()

    def _share_board(self) -> tuple[memoryview | None, CollectiveError | None]:
        """Return the cells that the ranks of this host share, or the reason why they cannot share memory."""
        if self.node_comm.size == 1:
            return None, None
        n_cells = self.node_comm.size * CELLS
        try:
            window = NodeWindow(self.node_comm, n_cells * 8, self.world)
        except CollectiveError as error:
            return None, error
        # a window is whole pages; only existing ranks have cells
        return window.pieces[0].cast("q")[:n_cells], None

    def _watch(self, watchdog: Watchdog | None, is_of_role: bool) -> None:
        """Let the watchdog watch this group's collectives, and the flags of the other ranks of the host.

        The group of the role also has each rank watch whether its neighbour lives.
        """
        identity = (str(self.world), os.getpid(), process_namespace())
        identities = self.node_comm.allgather(identity)
        peers = [Peer(name, pid) for name, pid, _ in identities]
        namespaces = {namespace for *_, namespace in identities}
        local_rank = self.node_comm.rank
        board: memoryview | None = None
        flags: memoryview | None = None
        codes: memoryview | None = None
        self.marks: CallMarks | None = None
        if self._board is not None:
            board = self._board[JOURNAL_CELL::CELLS]
            flags = self._board[FLAGS_CELL::CELLS]
            codes = self._board[CODE_CELL::CELLS]
            first_marks, second_marks = (self._board[cell::CELLS] for cell in MARK_CELLS)
            names = [peer.name for peer in peers]
            self.marks = CallMarks((first_marks, second_marks), local_rank, names)
        self.journal = (
            ReportingJournal(self._report_call, board, local_rank, codes)
            if self.world.debug & {"calls", "summary"}
            else Journal(board, local_rank, codes)
        )
        time_spent.watch(self.journal, self.is_background)
        warn_s = min(WARN_S, self.timeout_s / 2)
        end = functools.partial(end_job, "", ExitCode.INTERNAL)
        self.watchdog = watchdog or Watchdog(
            self.world.describe, end, warn_s, self.timeout_s, has_left
        )
        if self.size > 1:
            watched_peers: Sequence[Peer] = () if board is None else peers
            self.watchdog.watch(self.journal, watched_peers, flags)
        self._neighbour: NeighbourWatch | None = None
        if flags is not None and is_of_role and len(namespaces) == 1:
            call_on_failure(functools.partial(self._announce_failure, flags))
            self._neighbour = NeighbourWatch(peers, local_rank, flags, has_left, end)

    def _report_call(self, entry: Entry) -> None:
        """Log or count a collective that has ended, as HPCDIST_DEBUG says."""
        rank = self.world.describe()
        if "calls" in self.world.debug:
            log_call(rank, entry)
        if "summary" in self.world.debug:
            ended_s = entry.ended_s or entry.started_s
            length_s = ended_s - entry.started_s
            summary = count_calls(rank, self.world.is_chief)
            summary.add(entry.op, entry.dtype, entry.n_elements, length_s)

    def _announce_failure(self, flags: memoryview) -> None:
        if self._neighbour is not None and not self._neighbour.is_stopped:
            flags[self.node_comm.rank] |= FAILED

    @functools.cached_property
    def barrier(self) -> NodeBarrier:
        """The barrier among the ranks of this host.

        Raises:
            CollectiveFailed: when they cannot share memory; on each of them.
        """
        if self._no_board is not None:
            raise self._no_board
        board = self._board
        if board is None:
            board = memoryview(bytearray(CELLS * 8)).cast("q")
        return NodeBarrier(
            board,
            self.node_comm.rank,
            self.names,
            self.timeout_s + LATE_S,
            is_busy_waiting=not self.world.is_crowded,
            is_background=self.is_background,
        )

    def recorded(self, op: str, buffer: Any) -> Journal:
        """Record that a collective begins. Used as a context manager, it also records that the collective has ended.

        Collective over `comm` with HPCDIST_DEBUG=collectives, when all ranks are compared.

        Args:
            op: name of the collective, such as "all_reduce sum".
            buffer: array of the same shape and dtype on every rank; None where they may differ.

        Raises:
            DesyncError: with HPCDIST_DEBUG=collectives, when a rank is about to make a different call; on every rank.

        Cost: about half a microsecond.
        """
        if _is_forked:
            raise UsageError(
                f"{op}: expected the process of a rank, got process {os.getpid()}, which was forked from it and must "
                f"not use MPI; communicate in the rank."
            )
        if buffer is None:
            dtype = "any"
            n_elements = 0
        else:
            dtype = buffer.dtype
            n_elements = buffer.size if hasattr(buffer, "flags") else buffer.numel()
        journal = self.journal
        journal.enter(op, dtype, n_elements)
        if self._call_check is not None:
            with journal:
                self._call_check.check(op, str(dtype), n_elements)
            journal.enter(op, dtype, n_elements)
        return journal

    def require_same_call(self, call: str, details: str) -> None:
        """Raise CollectiveError on all ranks unless all make the same call. Collective over `comm`.

        Args:
            call: name of the call.
            details: description of what must be the same on all ranks.

        Cost: two all-reduces of 8 bytes.
        """
        if self.size == 1:
            return

        def error_for(root_details: str) -> CollectiveError:
            return CollectiveError(
                f"{call}: expected {root_details} as on rank 0, got {details}; make the same call on every rank."
            )

        self.world.require_same(details, self.comm, error_for)

    def wait(
        self,
        requests: Sequence[MPI.Request],
        max_sleep_s: float = MAX_SLEEP_S,
        buffers: Sequence[object] = (),
    ) -> None:
        """Wait for messages of this group, bounded. They take long enough to sleep meanwhile.

        Args:
            requests: messages and collectives.
            max_sleep_s: longest sleep between two looks at them.
            buffers: arrays of reductions and of Iallgatherv, which mpi4py's requests do not hold.

        Raises:
            CollectiveTimeoutError: on this rank.
        """
        limit_s = self.timeout_s + LATE_S
        is_in_time = wait_until(
            lambda: MPI.Request.Testall(requests), limit_s, yields=0, max_sleep_s=max_sleep_s
        )
        if not is_in_time:
            for request in requests:
                self.world.keep_pending(request, *buffers)
            raise late("all_reduce", self.timeout_s, f"{len(requests)} messages", self.world)

    def lane_plan(self, is_ordered: bool) -> LanePlan:
        """Return the plan of the ranks of this host for a sum over hosts."""
        key = ("lanes", is_ordered)
        return self.keep(key, lambda: plan_lanes(self.placement, self.host, is_ordered))


class CommunicationThread:
    """A background thread with a separate group, so that its collectives never meet collectives of the main thread.

    Collective over `group.comm`, as it makes the separate group.

    Args:
        group: group of the ranks that take part.

    Attributes:
        group: group of the thread, with the same ranks.
    """

    def __init__(self, group: Group) -> None:
        # making a communicator blocks: nobody may be missing then
        group.wait([group.comm.Ibarrier()])
        hosts = Hosts(group.comm, group.world.wait, group.node_comm.Dup())
        self.group = Group(group.comm, group.world, True, group.timeout_s, group.watchdog, hosts)
        self._thread = BackgroundThread("hpcdist-communication")

    def submit(self, call: Callable[[], Any]) -> Handle:
        """Make `call` after all earlier ones, and return at once. All ranks submit in the same order."""
        return Handle(self._thread.submit(call))

    def free(self) -> None:
        """End the thread when it has made all calls, and free its group. Collective over the ranks of the group."""
        self._thread.stop(self.group.world.timeout_s)
        self.group.free()


def thread_of(group: Group) -> CommunicationThread:
    """Return the communication thread of a group, made at the first call.

    Collective over `group.comm` at the first call.
    """
    return group.keep("thread", lambda: CommunicationThread(group), CommunicationThread.free)


def group_of(
    comm: MPI.Comm | None = None,
    timeout_s: float | None = None,
    world: World | None = None,
) -> Group:
    """Return the group of a communicator, made at the first call and freed with the communicator.

    There is one group per time limit.

    Collective over `comm` at the first call, default all ranks of this rank's role.

    Args:
        comm: the ranks.
        timeout_s: longest time for one collective; default: the world's.
        world: world of `comm`; default: the process's world.
    """
    global _group_of_role
    if comm is not None or timeout_s is not None or world is not None:
        return _find_group(comm, timeout_s, world)
    if _group_of_role is None:
        _group_of_role = _find_group(None, None, None)
    return _group_of_role


def _find_group(
    comm: MPI.Comm | None,
    timeout_s: float | None,
    world: World | None,
) -> Group:
    if comm is None:
        comm = (world or make_world()).role_comm
    key = _key_of_groups()
    groups: Any = comm.Get_attr(key)
    if groups is None:
        groups = {}
        comm.Set_attr(key, groups)
    if timeout_s not in groups:
        groups[timeout_s] = Group(comm, world or make_world(), timeout_s=timeout_s)
    group: Group = groups[timeout_s]
    return group


def _free_groups(
    comm: MPI.Comm,
    key: int,
    groups: dict[float | None, Group],
) -> None:
    global _group_of_role
    if _group_of_role in groups.values():
        _group_of_role = None
    for group in groups.values():
        group.free()


#: The group that most calls ask for, found faster here than on the communicator.
_group_of_role: Group | None = None
#: Whether this process was forked from a rank, and must not communicate.
_is_forked = False


@functools.lru_cache(maxsize=1)
def _key_of_groups() -> int:
    """Return the key of a communicator's groups, by MPI's own way to attach data. Made once MPI has started."""
    return MPI.Comm.Create_keyval(delete_fn=_free_groups, nopython=False)


def _note_fork() -> None:
    global _group_of_role, _is_forked
    _group_of_role = None
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)
