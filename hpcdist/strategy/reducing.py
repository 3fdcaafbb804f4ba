"""`reduce` and `gather` of a strategy, outside and inside its replicas; with one replica in this process."""

from typing import Any

from hpcdist.errors import UsageError
from hpcdist.gradients.turns import Turns
from hpcdist.strategy import context
from hpcdist.strategy.local_reduce import Axis, check_axis, copy_of, gather_rows, reduce_rows
from hpcdist.strategy.reduce_op import ReduceOp
from hpcdist.strategy.replica_context import ReplicaContext
from hpcdist.strategy.values import DistributedValues, PerReplica, local_values

_alone = Turns(range(1), [])


class Reducing:
    """What makes one value out of those of all replicas. Strategies with several replicas say how sums are made."""

    @property
    def _own_replicas(self) -> range:
        """The replicas of this process."""
        return range(1)

    @property
    def _turns(self) -> Turns:
        return _alone

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Return `value` reduced over all replicas and, first, over `axis` inside each.

        Collective: all ranks. Same dtype required on every replica: yes; same shape: yes, but for reduced axes.

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length weigh by their length.
            value: PerReplica, or, with one replica in this process, its value: torch tensor, numpy array or number.
                With several, a plain value is every one's; its SUM with axis None is refused, as in tf.distribute.
            axis: None (over replicas only), an int, or a tuple or list of ints; negative ones count from the end.

        Returns:
            The same kind of value, on the host, equal on every rank.

        Raises:
            ValueError: for an axis out of range, values of different shape or an unknown op.
            TypeError: for an axis of another type. RuntimeError: inside `run`.
        """
        self._require_cross_replica("reduce", "return the value from run and reduce it")
        op = ReduceOp.parse(reduce_op)
        check_axis(axis)
        n_local = len(self._own_replicas)
        is_plain = not isinstance(value, DistributedValues) and not hasattr(value, "local_copies")
        if n_local > 1 and is_plain and (op is ReduceOp.MEAN or axis is not None):
            value = PerReplica([value] * n_local)  # as tf.distribute: a plain value is every replica's
        return reduce_rows(op, self._local_values("reduce", value), axis, self._sum_over_replicas)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas joined along `axis`, in the order of replicas, on every rank.

        Collective: all ranks. Same dtype and dimensions required on every replica: yes, but for `axis`.

        Args:
            value: PerReplica, or, with one replica in this process, its value: torch tensor or numpy array.
            axis: negative ones count from the end.

        Raises:
            ValueError: for numbers, an axis out of range, or shapes that do not fit.
            RuntimeError: inside `run`, where ReplicaContext.all_gather is meant.
        """
        self._require_cross_replica("gather", "use get_replica_context().all_gather there")
        return gather_rows(self._local_values("gather", value), axis, self._gather_over_ranks)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas as a tuple; of a plain value, itself alone."""
        return local_values(value)

    def _local_values(self, call: str, value: Any) -> list[Any]:
        values, n_local = local_values(value), len(self._own_replicas)
        if len(values) != n_local:
            raise UsageError(
                f"{call}: expected a PerReplica value of this rank's {n_local} replicas, got {len(values)} "
                f"({type(value).__name__}); pass what strategy.run returned."
            )
        return list(values)

    def _require_cross_replica(self, call: str, advice: str) -> None:
        entry = context.current()
        if entry is not None and (entry.replica is not None or entry.updated is not None):
            found = "update context, inside extended.update" if entry.replica is None else "replica context, inside it"
            raise RuntimeError(f"{call}: expected cross-replica context, outside strategy.run, got {found}; {advice}.")

    def _sum_over_replicas(self, rows: list[Any]) -> Any:
        """Return the sum of flat host arrays, one of each local replica, over all replicas. May overwrite them."""
        return rows[0]

    def _gather_over_ranks(self, rows: Any, error: UsageError | None) -> tuple[Any, int]:
        """Return the (rows, ...) host arrays of all ranks joined, and where this rank's begins; or raise on all."""
        if error is not None:
            raise error
        return rows, 0

    def _reduce_in_replica(self, replica: ReplicaContext, op: ReduceOp, leaf: Any) -> Any:
        def combine(brought: list[Any]) -> list[Any]:
            reduced = reduce_rows(op, brought, None, self._sum_over_replicas)
            return [copy_of(reduced) for _ in brought]

        return self._turns.merge("an all_reduce", self._brought(leaf), combine)

    def _brought(self, leaf: Any) -> Any:
        """Return what a replica brings to a merge: a copy, as buffers hold another replica's values by then."""
        return copy_of(leaf) if len(self._own_replicas) > 1 else leaf

    def _gather_in_replica(self, replica: ReplicaContext, leaf: Any, axis: int) -> tuple[Any, int]:
        """Return what is joined, and where this replica's part begins."""

        def combine(brought: list[Any]) -> list[Any]:
            joined, starts = gather_rows(brought, axis, self._gather_over_ranks)
            return [(copy_of(joined), start) for start in starts]

        joined, start = self._turns.merge("an all_gather", self._brought(leaf), combine)
        return joined, start
