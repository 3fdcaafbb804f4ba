"""Meetings of all ranks: a barrier, one that names who is absent, and a block that one rank goes through first."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcdist.collectives.group import Group, group_of, thread_of
from hpcdist.errors import CollectiveFailed, CollectiveTimeoutError
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import late, wait_until

#: Tags of a monitored barrier's messages: a rank has come, rank 0 has come, who is absent.
_HERE = 7411
_ROOT_HERE = 7412
_ABSENT = 7413
#: Seconds that a verdict may take beyond the limit of the rank that gives it.
_LATE_S = 5.0
#: Longest sleep of a wait that may take minutes.
_MAX_SLEEP_S = 0.01


def barrier(comm: MPI.Comm | None = None) -> None:
    """Return when all ranks have called this function.

    Collective over `comm`. The watchdog ends the job when a rank does not come within its limit.

    Args:
        comm: the ranks that take part; default: all workers, or this rank's own role group on a ps or evaluator.
    """
    meet(group_of(comm))


def barrier_async(comm: MPI.Comm | None = None) -> Handle:
    """Start a `barrier` in a background thread; `wait` of the handle returns with it. Collective over `comm`."""
    thread = thread_of(group_of(comm))
    return thread.submit(lambda: meet(thread.group))


def meet(group: Group) -> None:
    """Do what `barrier` does, in a given group. Collective over `group.comm`."""
    with group.recorded("barrier", None):
        group.wait([group.comm.Ibarrier()])


def monitored_barrier(timeout_s: float = 30.0, comm: MPI.Comm | None = None) -> None:
    """Return when all ranks have called this function; name the absent ranks when the time is over.

    Collective over `comm`. The job continues: a caller that catches the error may end it in its own way.

    Args:
        timeout_s: longest wait for the other ranks.
        comm: as `barrier`.

    Raises:
        CollectiveTimeoutError: when ranks did not come, with their numbers; on each rank that came.

    Cost: three messages between rank 0 and each other rank.
    """
    meet_or_name_absent(group_of(comm), timeout_s)


def meet_or_name_absent(group: Group, timeout_s: float) -> None:
    """Do what `monitored_barrier` does, in a given group. Collective over `group.comm`."""
    meetings = group.keep("monitored barriers", _Meetings)
    meetings.number += 1
    absent = _absent(group, meetings, timeout_s)
    if absent:
        absent_ranks = ", ".join(map(str, absent))
        raise CollectiveTimeoutError(
            f"monitored_barrier: expected all {group.size} ranks within {timeout_s:g} s, got none of rank "
            f"{absent_ranks} on {group.world}; look for what keeps them, such as a read or a save that "
            f"the others do not make."
        )


@dataclass
class _Meetings:
    """The monitored barriers of a group.

    Attributes:
        number: number of barriers that this rank has come to: messages of an earlier one may arrive late.
        early: messages of later barriers, by (number, tag, source): a rank whose time is over may be ahead.
    """

    number: int = 0
    early: dict[tuple[int, int, int], Any] = field(default_factory=dict)


def _absent(group: Group, meetings: _Meetings, timeout_s: float) -> list[int]:
    """Return which ranks did not come, as rank 0 sees it; rank 0 alone if it did not come itself."""
    comm = group.comm
    number = meetings.number
    if group.rank > 0:
        absent = [0]
        sent = [comm.isend((number, None), 0, _HERE)]
        if _receive(group, {0}, _ROOT_HERE, meetings, timeout_s):
            verdicts = _receive(group, {0}, _ABSENT, meetings, timeout_s + _LATE_S)
            absent = verdicts.get(0, absent)
    else:
        other_ranks = set(range(1, group.size))
        sent = [comm.isend((number, None), rank, _ROOT_HERE) for rank in other_ranks]
        arrivals = _receive(group, other_ranks, _HERE, meetings, timeout_s)
        absent = sorted(other_ranks - set(arrivals))
        # a rank that comes later reads that it was absent
        sent += [comm.isend((number, absent), rank, _ABSENT) for rank in other_ranks]
    wait_until(lambda: all(request.Test() for request in sent), _LATE_S)
    for request in sent:
        if not request.Test():
            group.world.keep_pending(request)
    return absent


def _receive(
    group: Group,
    sources: set[int],
    tag: int,
    meetings: _Meetings,
    timeout_s: float,
) -> dict[int, Any]:
    """Return the values received for this barrier, by source, once all sources have sent or the time is over."""
    values: dict[int, Any] = {}
    for source in sources:
        key = (meetings.number, tag, source)
        if key in meetings.early:
            values[source] = meetings.early.pop(key)

    def look() -> bool:
        status = MPI.Status()
        while group.comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            sent_for, value = group.comm.recv(source=status.source, tag=tag)
            if sent_for == meetings.number:
                values[status.source] = value
            elif sent_for > meetings.number:
                meetings.early[sent_for, tag, status.source] = value
        return values.keys() >= sources

    wait_until(look, timeout_s, max_sleep_s=_MAX_SLEEP_S)
    return values


def rank_zero_first(
    comm: MPI.Comm | None = None,
    *,
    per_host: bool = False,
    timeout_s: float = 3600.0,
) -> AbstractContextManager[None]:
    """Let rank 0 go through the block before the other ranks, as to download a dataset or to build a cache.

    Collective over `comm`. No collective may be called in the block. The other ranks wait without the watchdog, whose
    limit is for single collectives; a rank that dies meanwhile ends the job as always.

    >>> with hpcdist.rank_zero_first():
    ...     pass  # download, or find what rank 0 has downloaded

    Args:
        comm: as `barrier`.
        per_host: whether the first rank of each host goes first, as for files on disks of the hosts.
        timeout_s: longest time for the first rank's block.

    Raises:
        CollectiveError: on the other ranks, when the block raised on the first rank.
        CollectiveTimeoutError: on the other ranks, when the block takes too long; on the first, when they do not come.

    Cost: one all-reduce of 8 bytes.
    """
    return first_rank_first(group_of(comm), per_host, timeout_s)


@contextmanager
def first_rank_first(
    group: Group,
    per_host: bool,
    timeout_s: float,
) -> Iterator[None]:
    """Do what `rank_zero_first` does, in a given group. Collective over `group.comm`."""
    ranks = group.node_comm if per_host else group.comm
    if ranks.rank == 0:
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            _share_whether_failed(has_failed, ranks, group, timeout_s)
        return
    if _share_whether_failed(False, ranks, group, timeout_s):
        raise CollectiveFailed(
            f"rank_zero_first: expected the block to end on the first rank, got an error there, on {group.world}; see "
            f"the first rank's message."
        )
    yield


def _share_whether_failed(
    has_failed: bool,
    ranks: MPI.Comm,
    group: Group,
    timeout_s: float,
) -> bool:
    """Return whether the first rank has failed, once it has sent this. Collective over `ranks`."""
    local_flag = np.array([has_failed], np.int64)
    global_flag = np.empty(1, np.int64)
    request = ranks.Iallreduce(local_flag, global_flag, MPI.MAX)
    if not wait_until(request.Test, timeout_s, max_sleep_s=_MAX_SLEEP_S):
        group.world.keep_pending(request, local_flag, global_flag)
        raise late("rank_zero_first", timeout_s, "some ranks", group.world)
    return bool(global_flag[0])
