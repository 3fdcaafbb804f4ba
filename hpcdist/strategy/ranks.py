"""Who this rank is among those of its strategy, and how they meet: what programs for Horovod and DDP ask first."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpcdist.collectives.barriers import first_rank_first, meet, meet_or_name_absent
from hpcdist.collectives.group import Group


class Ranks:
    """What every strategy knows of its ranks: those of chief and workers together, or an evaluator's own.

    Attributes:
        group: the ranks; None for a strategy of one process.
    """

    group: Group | None = None

    @property
    def rank(self) -> int:
        """This process among the strategy's, from 0."""
        return self.group.rank if self.group else 0

    @property
    def size(self) -> int:
        """The strategy's processes. Replicas may be more: `num_replicas_in_sync`."""
        return self.group.size if self.group else 1

    @property
    def local_rank(self) -> int:
        """This process among the strategy's on this host, from 0."""
        return self.group.node_comm.rank if self.group else 0

    @property
    def local_size(self) -> int:
        """The strategy's processes on this host."""
        return self.group.node_comm.size if self.group else 1

    @property
    def host(self) -> int:
        """This host among the strategy's, from 0."""
        return self.group.host if self.group else 0

    @property
    def n_hosts(self) -> int:
        """The strategy's hosts."""
        return len(self.group.placement.hosts) if self.group else 1

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when all ranks have called it. Collective: all ranks.

        Args:
            timeout_s: longest wait, after which the error names the ranks that have not come; default: the watchdog
                ends the job at the limit of a collective.

        Raises:
            CollectiveTimeoutError: see timeout_s; on each rank that has come.
        """
        if self.group is None:
            return
        if timeout_s is None:
            meet(self.group)
        else:
            meet_or_name_absent(self.group, timeout_s)

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return root's Python object on every rank; see `hpcdist.broadcast_object`. Collective: all ranks."""
        if self.group is None:
            return value
        with self.group.recorded("broadcast_object", None):
            return self.group.comm.bcast(value, root)

    def rank_zero_first(
        self, *, per_host: bool = False, timeout_s: float = 3600.0
    ) -> AbstractContextManager[None]:
        """Let rank 0 go through a block before the others; see `hpcdist.rank_zero_first`. Collective: all ranks."""
        if self.group is None:
            return nullcontext()
        return first_rank_first(self.group, per_host, timeout_s)
