"""The replicas of a strategy: which of them are in this process, and how their values are combined over all ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.collectives.moves import gather_rows
from hpcdist.errors import UsageError
from hpcdist.gradients.local_sums import sum_rows
from hpcdist.gradients.reducer import Reducer
from hpcdist.program.tensors import from_array, to_array
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.strategy.values import regroup

Array = npt.NDArray[Any]


class Replicas(Protocol):
    """The replicas of a strategy.

    Attributes:
        is_fixed: whether the number of replicas was given, so that a process may hold several.
        local: numbers of the replicas of this process.
        n_replicas: number of replicas on all ranks together.
        scheduler: runs the replicas of this process.
    """

    is_fixed: bool
    local: range
    n_replicas: int
    scheduler: ReplicaScheduler

    def regroup(self, results: Sequence[Any]) -> Any:
        """Return the results of the local replicas as one nest, with PerReplica values where there are several."""

    def add(self, rows: list[Array]) -> Array:
        """Return the sum of flat host arrays, one of each local replica, over all replicas. May overwrite them."""

    def append_rows(self, rows: Array, error: UsageError | None) -> tuple[Array, int]:
        """Return the joined (rows, ...) host arrays of all ranks, and where this rank's begins; or raise on all."""

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the chief's value, which has the same shape and dtype on every rank."""


class OneReplica:
    """`Replicas` of a strategy that has one, in this process."""

    is_fixed = False
    local = range(1)
    n_replicas = 1

    def __init__(self) -> None:
        self.scheduler = ReplicaScheduler(self.local, [])

    def regroup(self, results: Sequence[Any]) -> Any:
        """Return the replica's result."""
        return regroup(results)

    def add(self, rows: list[Array]) -> Array:
        """Return the replica's array."""
        return rows[0]

    def append_rows(self, rows: Array, error: UsageError | None) -> tuple[Array, int]:
        """Return the replica's rows, which begin at 0; or raise."""
        if error is not None:
            raise error
        return rows, 0

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the replica's value."""
        return value


class RankReplicas:
    """Replicas on all ranks of a group, one or several on each; see `Replicas`.

    Collective over the group: `add`, `append_rows` and `broadcast`.

    Args:
        group: group of the ranks.
        reducer: knows which replicas each rank has, and adds their values in one order.
        scheduler: runs the replicas of this rank.
        is_fixed: whether the number of replicas was given.
    """

    def __init__(
        self,
        group: Group,
        reducer: Reducer,
        scheduler: ReplicaScheduler,
        is_fixed: bool,
    ) -> None:
        self.is_fixed = is_fixed
        self.local = reducer.own_replicas
        self.n_replicas = reducer.replicas.n_replicas
        self.scheduler = scheduler
        self._group = group
        self._reducer = reducer

    def regroup(self, results: Sequence[Any]) -> Any:
        """Return the results of the local replicas; if numbers are fixed, even one replica's are PerReplica values."""
        return regroup(results, is_single_kept=self.is_fixed)

    def add(self, rows: list[Array]) -> Array:
        """Return the sum of flat host arrays, in the order of replicas if their number was given."""
        if self.is_fixed:
            total: Array = sum_rows(self._reducer, rows, "reduce")
            return total
        with self._group.recorded("reduce", rows[0]):
            library.all_reduce(rows[0], self._group)
        return rows[0]

    def append_rows(self, rows: Array, error: UsageError | None) -> tuple[Array, int]:
        """Return the joined rows of all ranks, and where this rank's begin."""
        group = self._group
        group.world.agree(error, group.comm)
        counts = gather_rows(np.array([len(rows)]), group)
        return gather_rows(rows, group), int(counts[: group.rank].sum())

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the chief's value."""
        array, dtype = to_array(value.clone())
        with self._group.recorded("broadcast", array):
            library.broadcast(array, self._group.comm)
        return from_array(array, dtype)
