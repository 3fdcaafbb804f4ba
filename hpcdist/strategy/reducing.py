"""`reduce` and `gather` of a strategy, outside and inside its replicas; with one replica in this process."""

from collections.abc import Sequence
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.gradients.replicas.scheduler import ReplicaScheduler
from hpcdist.strategy import context
from hpcdist.strategy.local_reduce import Axis, beside, check_axis, copy_of, gather_rows, reduce_rows
from hpcdist.strategy.packed_reduce import reduce_packed
from hpcdist.strategy.reduce_op import ReduceOp
from hpcdist.strategy.values import DistributedValues, local_values

_alone = ReplicaScheduler(range(1), [])


class Reducing:
    """What makes one value out of those of all replicas. Strategies with several replicas say how sums are made."""

    @property
    def own_replicas(self) -> range:
        """The replicas of this process."""
        return range(1)

    @property
    def _scheduler(self) -> ReplicaScheduler:
        return _alone

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Return `value` reduced over all replicas and, first, over `axis` inside each.

        Collective: all ranks. Same dtype required on every replica: yes; same shape: yes, but for reduced axes.

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length weigh by their length.
            value: PerReplica, or, with one replica in this process, its value: torch tensor, numpy array or number.
                With several, a plain value is every one's; its SUM with axis None is refused, as in tf.distribute.
                With axis None also a sparse COO tensor, whose entries are joined.
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
        if axis is None:
            return self._reduce_all(op, [value])[0]
        return reduce_rows(op, self._values_of("reduce", value, is_everyones=True), axis, self._sum_over_replicas)

    def _reduce_all(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Return values, each reduced over all replicas; see `reduce`."""
        if not values:
            return []
        own = [self._values_of("reduce", value, is_everyones=op is ReduceOp.MEAN) for value in values]
        by_replica = [list(nest) for nest in zip(*own, strict=True)]
        return reduce_packed(op, by_replica, self._sum_over_replicas, self._gather_over_ranks)

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
        return gather_rows(self._values_of("gather", value), axis, self._gather_over_ranks)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas as a tuple; of a plain value, itself alone."""
        return local_values(value)

    def _values_of(self, call: str, value: Any, is_everyones: bool = False) -> list[Any]:
        """Return the values of this process's replicas.

        Args:
            call: for messages.
            value: DistributedValues, a variable, or a plain value.
            is_everyones: whether a plain value is every replica's, as in tf.distribute.
        """
        values, n_local = local_values(value), len(self.own_replicas)
        is_plain = not isinstance(value, DistributedValues) and not hasattr(value, "local_copies")
        if is_plain and is_everyones:
            return [value] * n_local
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

    def _reduce_in_replica(self, op: ReduceOp, leaves: Sequence[Any], form: str = "") -> list[Any]:
        """Return the leaves of a nest, each reduced over all replicas, where they were.

        Args:
            op: SUM or MEAN.
            leaves: of the nest.
            form: of the nest; see `form_of`.
        """

        def combine(brought: list[Any]) -> list[Any]:
            values, forms = [own for own, _ in brought], [form for _, form in brought]
            reduced = reduce_packed(op, values, self._sum_over_replicas, self._gather_over_ranks, forms)
            return [[copy_of(one) for one in reduced] for _ in brought]

        found = self._scheduler.merge("an all_reduce", ([self._brought(leaf) for leaf in leaves], form), combine)
        return [beside(leaf, one) for leaf, one in zip(leaves, found, strict=True)]

    def _brought(self, leaf: Any) -> Any:
        """Return what a replica brings to a merge: a copy, as buffers hold another replica's values by then."""
        return copy_of(leaf) if len(self.own_replicas) > 1 else leaf

    def _gather_in_replica(self, leaf: Any, axis: int) -> tuple[Any, int]:
        """Return what is joined, and where this replica's part begins."""

        def combine(brought: list[Any]) -> list[Any]:
            joined, starts = gather_rows(brought, axis, self._gather_over_ranks)
            return [(copy_of(joined), start) for start in starts]

        joined, start = self._scheduler.merge("an all_gather", self._brought(leaf), combine)
        return beside(leaf, joined), start
