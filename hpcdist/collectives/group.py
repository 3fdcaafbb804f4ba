"""A group: ranks that reduce together, and everything that lasts between their collectives."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from hpcdist.collectives.waiting import CELLS, SPINS, Backoff, NodeBarrier, wait_all
from hpcdist.collectives.window import NodeWindow
from hpcdist.errors import HpcdistError
from hpcdist.mpi import MPI
from hpcdist.plan.lanes import LanePlan, plan_lanes
from hpcdist.plan.placement import plan_placement
from hpcdist.world import World, make_world

T = TypeVar("T")


class Group:
    """Communicators, shared memory and choices of one set of ranks, for one thread.

    Collective: `comm`.

    Args:
        comm: the ranks; cloned.
        world: bounds waits and agrees on errors.
        is_background: whether a thread of its own runs the collectives: it sleeps while it waits.

    Attributes:
        comm: clone of `comm`. node_comm: its ranks on this host. lane_comm: those with this rank's place on their
            hosts; None on a host that has more ranks than the smallest one.
        placement: which ranks share a host.
        host: number of this rank's host.
    """

    def __init__(self, comm: MPI.Comm, world: World, is_background: bool = False) -> None:
        self.world = world
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

    def agree(self, error: HpcdistError | None, comm: MPI.Comm | None = None) -> None:
        """Raise on every rank of `comm`, default all of the group, what failed on one; see `World.agree`."""
        self.world.agree(error, comm or self.comm)

    def free(self) -> None:
        """Free the communicators and what was kept. Collective: all ranks of the group."""
        for free in reversed(self._frees):
            free()
        self._kept.clear()
        self._frees.clear()
        for comm in (self.lane_comm, self.node_comm, self.comm):
            if comm is not None:
                comm.Free()

    @property
    def barrier(self) -> NodeBarrier:
        """The barrier among the ranks of this host. Collective at first use: `node_comm`."""
        return self.keep("barrier", self._make_barrier)

    def _make_barrier(self) -> NodeBarrier:
        window = NodeWindow(self.node_comm, self.node_comm.size * CELLS * 8, self.world)
        return NodeBarrier(window.pieces[0].cast("q"), self.node_comm.rank, self.node_comm.size, self.backoff)

    def backoff(self, explain: Callable[[], str]) -> Backoff:
        """Return what to call while waiting for what `explain` says."""
        spins = 0 if self.is_crowded else SPINS
        return Backoff(self.world.timeout_s, lambda: self._late(explain()), self._is_background, spins)

    def wait(self, requests: Sequence[MPI.Request]) -> None:
        """Wait for messages of this group, bounded.

        Raises:
            CollectiveTimeoutError: on this rank.
        """
        wait_all(requests, self.backoff(lambda: f"{len(requests)} messages"))

    def _late(self, what: str) -> str:
        return (
            f"all_reduce: expected every rank within {self.world.timeout_s:g} s, got no answer from {what} on "
            f"{self.world}; look for a rank that took another path or stopped (HPCDIST_TIMEOUT_S sets the limit)."
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


def group_of(comm: MPI.Comm | None = None) -> Group:
    """Return the group of a communicator, made at the first call and freed with the communicator.

    Collective at the first call: `comm`, default all ranks of this rank's role.
    """
    world = make_world()
    comm = world.role_comm if comm is None else comm
    group: Any = comm.Get_attr(_GROUP)
    if group is None:
        group = Group(comm, world)
        comm.Set_attr(_GROUP, group)
    return cast(Group, group)


def _free_group(comm: MPI.Comm, key: int, group: Group) -> None:
    if not MPI.Is_finalized():
        group.free()


#: MPI's own place for what belongs to a communicator.
_GROUP = MPI.Comm.Create_keyval(delete_fn=_free_group, nopython=False)
