"""The replica context: facts about the replica for code inside `strategy.run`, and the collectives of replicas."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.nest import form_of, leaves, map_nest, with_leaves
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy, get_strategy, pass_through
from hpcdist.strategy.reduce import gather_in_replica, is_sparse, reduce_in_replica


@dataclass(frozen=True)
class ReplicaContext:
    """One replica of a strategy, as `tf.distribute.ReplicaContext`; `get_replica_context()` returns it inside `run`.

    Attributes:
        strategy: the strategy that the replica belongs to.
        replica: the replica, in one call of `run`.
    """

    strategy: Strategy
    replica: context.Replica

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica among all replicas of the job."""
        return self.replica.number

    @property
    def local_index(self) -> int:
        """Index of this replica among the replicas of this process."""
        return self.replica.local_index

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of the job."""
        return self.strategy.num_replicas_in_sync

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call merge_fn(strategy, *args, **kwargs) once, outside the local replicas; return this replica's part.

        All replicas must make this call, in the same order of calls. Collective if `merge_fn` is.

        Every replica has its own gradients and buffers; `merge_fn` finds those of this process's last replica. If it
        changes a gradient or buffer (`optimizer.zero_grad()`, clipping), all replicas of this process get the change;
        the gradients and buffers that it leaves alone keep each replica's values. Where `num_replicas` was given, its
        random numbers are those of code outside `run`, and it may not change buffers that replicas have changed on
        their own, such as BatchNorm's between forward and backward. An error in it is raised in every replica.

        Args:
            merge_fn: function that gets the arguments of all local replicas as PerReplica values.
            args: arguments, as for `run`.
            kwargs: arguments by name, as for `run`.

        Raises:
            UsageError: for a change of buffers that replicas have changed on their own; on every rank.
        """
        self._require("merge_call")
        return self.strategy._merge_call(merge_fn, args, kwargs or {})

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Return a nest of tensors or arrays, each reduced over all replicas.

        Collective over all replicas, in the same order of calls. Same shapes, dtypes and nest required on every
        replica: yes; the keys of a dict in any order. The gradient of a dense tensor's reduction is the reduction of
        the gradient, and so on for gradients of gradients (torch.autograd.grad with create_graph=True). All replicas
        must reach these alike; a replica whose loss is linear in the result does not reach them. The reduction of a
        sparse tensor has no gradient.

        Args:
            reduce_op: SUM or MEAN.
            value: nest of tensors, arrays or numbers; not overwritten. A sparse COO tensor, such as the gradient of an
                embedding with sparse=True, becomes one with the entries of all replicas, not coalesced.
            options: accepted for compatibility.

        Raises:
            UsageError: when the nest, or shape, dtype or kind of a value differs among replicas; on every replica. For
                the SUM of gradients that backward has summed.

        Cost: one all-reduce for each dtype in the nest, and two gathers for each sparse tensor.
        """
        self._require("all_reduce")
        op = ReduceOp.parse(reduce_op)
        nest_leaves = leaves(value)
        tensors = [leaf for leaf in nest_leaves if isinstance(leaf, Tensor)]
        if op is ReduceOp.SUM and any(self.strategy.sums.are_summed_gradients(tensors)):
            raise UsageError(
                "all_reduce: expected values of this replica, got a gradient that backward has summed over the "
                "replicas already; use it as it is, or take gradients with torch.autograd.grad."
            )
        reduced = reduce_leaves(self.strategy, op, nest_leaves, form_of(value))
        self.strategy.sums.note_sums(
            [reduced_leaf for reduced_leaf in reduced if isinstance(reduced_leaf, Tensor)]
        )
        return with_leaves(value, reduced)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return a nest of tensors or arrays, each joined along `axis` over all replicas, in their order.

        Collective over all replicas, in the same order of calls. Shapes may differ along `axis` only.

        Args:
            value: nest of tensors or arrays with at least one dimension.
            axis: dimension along which they are joined; a negative number counts from the end.
            options: accepted for compatibility.

        Raises:
            ValueError: for numbers, or shapes that do not fit; on every replica.
        """
        self._require("all_gather")
        return map_nest(lambda leaf: self._gather_leaf(leaf, axis), value)

    def _gather_leaf(self, leaf: Any, axis: int) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            return _AllGather.apply(leaf, axis, self.strategy)  # type: ignore[no-untyped-call]
        return gather_in_replica(self.strategy.replicas, leaf, axis)[0]

    def _require(self, call: str) -> None:
        """Raise RuntimeError when this context is not the caller's."""
        entry = context.current()
        if entry is None or entry.replica is not self.replica:
            raise RuntimeError(
                f"{call}: expected a call inside strategy.run, by the replica that the context belongs to, got one "
                f"elsewhere; ask get_replica_context() inside the function that is run."
            )


class OnlyReplica(ReplicaContext):
    """The replica of code outside all strategies, whose calls enter the pass-through strategy first."""

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return merge_fn(strategy, *args, **kwargs)."""
        return self._inside(lambda replica: replica.merge_call(merge_fn, args, kwargs))

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Return a copy of the values of a nest."""
        return self._inside(lambda replica: replica.all_reduce(reduce_op, value, options))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return a copy of the values of a nest."""
        return self._inside(lambda replica: replica.all_gather(value, axis, options))

    def _inside(self, call: Callable[[ReplicaContext], Any]) -> Any:
        if context.current() is not None:
            self._require("ReplicaContext")

        def run() -> Any:
            replica = get_replica_context()
            assert replica is not None, "inside run"
            return call(replica)

        return self.strategy.run(run)


#: The replica of code outside all strategies: one object, as nothing enters or leaves it.
_only_replica = OnlyReplica(pass_through, context.Replica(0, 0))


def get_replica_context() -> ReplicaContext | None:
    """Return the caller's replica: the only one outside all strategies; None in a scope or a merge_call."""
    entry = context.current()
    if entry is None:
        return _only_replica
    if entry.replica is None:
        return None
    return ReplicaContext(get_strategy(), entry.replica)


def reduce_leaves(
    strategy: Strategy,
    op: ReduceOp,
    leaves: list[Any],
    form: str = "",
) -> Sequence[Any]:
    """Return the leaves of a nest, each reduced over all replicas, with gradients.

    Collective over all replicas. Called inside a replica.

    Args:
        strategy: strategy of the replicas.
        op: SUM or MEAN.
        leaves: the leaves of this replica's nest.
        form: form of the nest, as text.
    """
    if torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    ):
        inputs = [leaf.detach() if is_sparse(leaf) else leaf for leaf in leaves]
        return _AllReduce.apply(op, strategy, form, *inputs)  # type: ignore[no-untyped-call, no-any-return]
    return reduce_in_replica(strategy.replicas, op, leaves, form)


# Both functions hold the strategy weakly: torch never frees the graph of a backward that has raised, if what it holds
# leads to the graph.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        strategy: Strategy,
        form: str,
        *leaves: Any,
    ) -> tuple[Any, ...]:
        ctx.op = op
        ctx.strategy = weakref.ref(strategy)
        reduced = reduce_in_replica(strategy.replicas, op, leaves, form)
        ctx.is_needed = ctx.needs_input_grad[3:]
        fixed: list[Tensor] = []
        for reduced_leaf, is_needed in zip(reduced, ctx.is_needed, strict=True):
            if not is_needed and isinstance(reduced_leaf, Tensor):
                fixed.append(reduced_leaf)
        ctx.mark_non_differentiable(*fixed)
        return tuple(reduced)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        needed = [
            gradient
            for gradient, is_needed in zip(gradients, ctx.is_needed, strict=True)
            if is_needed
        ]
        # the reduction has its own graph, if this backward makes one
        reduced = iter(_reduce_backward(ctx, ctx.op, needed))
        of_leaves: list[Any] = []
        for is_needed in ctx.is_needed:
            of_leaves.append(next(reduced) if is_needed else None)
        return None, None, None, *of_leaves


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, axis: int, strategy: Strategy) -> Tensor:
        joined: Tensor
        joined, start = gather_in_replica(strategy.replicas, leaf, axis)
        ctx.strategy = weakref.ref(strategy)
        ctx.axis = axis
        ctx.start = start
        ctx.n_rows = leaf.shape[axis]
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None]:
        (total,) = _reduce_backward(ctx, ReduceOp.SUM, [gradient])
        return total.narrow(ctx.axis, ctx.start, ctx.n_rows), None, None


def _reduce_backward(ctx: Any, op: ReduceOp, gradients: list[Any]) -> Sequence[Any]:
    strategy = ctx.strategy()
    if strategy is None:
        raise UsageError(
            "backward: expected the strategy whose all_reduce it goes through, got none; keep it."
        )
    strategy.sums.note_crossing()
    return reduce_leaves(strategy, op, gradients)
