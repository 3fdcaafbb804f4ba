"""Rank, host and number of ranks of a strategy, and barriers among them, as programs for Horovod and DDP ask for."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpcdist.collectives.barriers import first_rank_first, meet, meet_or_name_absent
from hpcdist.collectives.group import Group


class Ranks:
    """Facts that every strategy knows about its ranks: all chief and worker ranks together, or one evaluator's.

    Attributes:
        group: group of the ranks; None for a strategy of one process.
    """

    group: Group | None = None

    @property
    def rank(self) -> int:
        """Number of this process among the strategy's processes, from 0."""
        return self.group.rank if self.group else 0

    @property
    def size(self) -> int:
        """Number of the strategy's processes. There may be more replicas: `num_replicas_in_sync`."""
        return self.group.size if self.group else 1

    @property
    def local_rank(self) -> int:
        """Number of this process among the strategy's processes on this host, from 0."""
        return self.group.node_comm.rank if self.group else 0

    @property
    def local_size(self) -> int:
        """Number of the strategy's processes on this host."""
        return self.group.node_comm.size if self.group else 1

    @property
    def host(self) -> int:
        """Number of this host among the strategy's hosts, from 0."""
        return self.group.host if self.group else 0

    @property
    def n_hosts(self) -> int:
        """Number of the strategy's hosts."""
        return len(self.group.placement.hosts) if self.group else 1

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when all ranks have called it. Collective over the ranks of the role.

        Args:
            timeout_s: longest wait, after which the error names the ranks that have not come; default: the watchdog
                ends the job at the limit of a collective.

        Raises:
            CollectiveTimeoutError: when a rank has not come after timeout_s; on each rank that has come.
        """
        if self.group is None:
            return
        if timeout_s is None:
            meet(self.group)
        else:
            meet_or_name_absent(self.group, timeout_s)

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return root's Python object on every rank; see `hpcdist.broadcast_object`.

        Collective over the ranks of the role.
        """
        if self.group is None:
            return value
        with self.group.recorded("broadcast_object", None):
            return self.group.comm.bcast(value, root)

    def rank_zero_first(
        self,
        *,
        per_host: bool = False,
        timeout_s: float = 3600.0,
    ) -> AbstractContextManager[None]:
        """Let rank 0 go through a block before the other ranks; see `hpcdist.rank_zero_first`.

        Collective over the ranks of the role.
        """
        if self.group is None:
            return nullcontext()
        return first_rank_first(self.group, per_host, timeout_s)
