"""`strategy.extended`: for libraries that do a strategy's work themselves, such as optimizers and metrics."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.nest import leaves
from hpcdist.strategy import context
from hpcdist.strategy.cross_replica_context import CrossReplicaContext
from hpcdist.strategy.devices import parse_device
from hpcdist.strategy.values import DistributedValues, local_values, regroup, select


class StrategyExtended:
    """What tf.distribute.StrategyExtended offers. Variables are torch tensors, such as parameters, or hpcdist.Variable.

    Args:
        strategy: the strategy that this belongs to.
    """

    def __init__(self, strategy: CrossReplicaContext) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that this process computes on, as torch calls it."""
        return (str(self._strategy.device),)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device that this process's variables are on, as torch calls it."""
        return (str(self._strategy._parameter_device),)

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return self._strategy.is_chief

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Return fn(var, *args, **kwargs), called for each copy of a variable in this process, without gradients.

        A copy that several replicas share is updated once. Every rank updates its own copies, so `args` must be equal
        on all ranks, as results of `reduce_to` are. Under CentralStorageStrategy the chief alone calls `fn`, and the
        other ranks wait and return None; for a parameter of a ZeroRedundancyOptimizer one rank of each host calls it.

        Collective over the ranks of the host for a copy that they share.

        Args:
            var: a tensor, an hpcdist.Variable, or DistributedValues with one value for each copy.
            fn: function that may write into its first argument; a Variable reads and writes the copy then.
            args: arguments; DistributedValues among them become the value for the copy.
            kwargs: arguments by name, treated in the same way.
            group: whether results come as a PerReplica value; else as a tuple.

        Raises:
            RuntimeError: inside `run` (leave it by merge_call), and inside another update.
            UsageError: when `args` differ between replicas that share a copy.
        """
        self._require("update")
        kwargs = kwargs or {}
        copies = local_values(var)
        # for each copy, the index of the first copy that is the same
        firsts: list[int] = []
        for copy in copies:
            same = (index for index, candidate in enumerate(copies) if _is_same(candidate, copy))
            firsts.append(next(same))
        _require_equal_arguments(firsts, (args, kwargs))
        unique_firsts = sorted(set(firsts))
        calls: list[Callable[[], Any]] = []
        for first in unique_firsts:
            target = var if _is_variable(var) else copies[first]
            calls.append(functools.partial(self._update_copy, first, target, fn, args, kwargs))
        results = dict(zip(unique_firsts, self._strategy.sums.update(var, calls), strict=True))
        of_replicas = [results[first] for first in firsts]
        return regroup(of_replicas) if group else tuple(of_replicas)

    def _update_copy(
        self,
        local_index: int,
        copy: Any,
        fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        with context.entered(self._strategy, updated=local_index), torch.no_grad():
            return fn(copy, *select(local_index, args), **select(local_index, kwargs))

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Return `value` reduced over all replicas, a tensor on the device of `destinations`.

        Collective over the ranks of the role. Same shape and dtype required on every replica: yes.

        Args:
            reduce_op: SUM or MEAN.
            value: value to reduce, as for `reduce`.
            destinations: a device's name, a variable (its device is meant), or None for the host.
            options: accepted for compatibility.

        Raises:
            RuntimeError: inside `run`, where ReplicaContext.all_reduce is meant.
        """
        self._require("reduce_to")
        return _moved(self._strategy.reduce(reduce_op, value, axis=None), destinations)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Return `reduce_to` of each (value, destinations) as a list. Collective over the ranks of the role.

        Cost: one all-reduce for each dtype.
        """
        self._require("batch_reduce_to")
        values = [value for value, _ in value_destination_pairs]
        reduced = self._strategy.reduce_all(ReduceOp.parse(reduce_op), values)
        moved: list[Any] = []
        for reduced_value, (_, to) in zip(reduced, value_destination_pairs, strict=True):
            moved.append(_moved(reduced_value, to))
        return moved

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return the chief's tensor on every rank, on the device of `destinations`.

        Collective over the ranks of the role. Same shape and dtype required on every rank: yes.

        Args:
            tensor: torch tensor or number; not overwritten.
            destinations: device, as for `reduce_to`.

        Raises:
            RuntimeError: inside `run`.
        """
        self._require("broadcast_to")
        values = self._strategy.replicas.broadcast(torch.as_tensor(tensor))
        return _moved(values if isinstance(tensor, Tensor) else values.item(), destinations)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Make tensors and modules of the block on the device of a variable of this strategy's scope.

        Raises:
            UsageError: for a variable made elsewhere.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise UsageError(
                f"colocate_vars_with: expected a variable made in this {type(self._strategy).__name__}'s scope, got "
                f"another {type(colocate_with_variable).__name__}; pass a parameter of a module built in scope()."
            )
        with local_values(colocate_with_variable)[0].device:
            yield

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a tensor is a parameter or buffer of a module made in this strategy's scope, or a Variable."""
        if _is_variable(v):
            return v.strategy is self._strategy
        return all(self._strategy.owns(copy) for copy in local_values(v))

    def _require(self, call: str) -> None:
        self._strategy.require_cross_replica(
            call, "use get_replica_context().merge_call() to leave it"
        )


def _is_variable(value: Any) -> bool:
    """Return whether a value is an hpcdist.Variable, which is in a higher layer."""
    return hasattr(value, "local_copies")


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two copies are the same object, or tensors of the same memory."""
    if first is second:
        return True
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    are_dense = (
        first.layout == second.layout == torch.strided
        and first.device == second.device
        and first.numel() > 0
    )
    if not are_dense or first.shape != second.shape:
        return False
    address = first.data_ptr()
    return address != 0 and address == second.data_ptr()


def _require_equal_arguments(firsts: list[int], arguments: Any) -> None:
    """Raise UsageError when replicas that share a copy have different arguments for its one update.

    Args:
        firsts: for each local replica, the index of the first replica that has the same copy.
        arguments: args and kwargs of the update.
    """
    for leaf in leaves(arguments):
        if not isinstance(leaf, DistributedValues):
            continue
        for local_index, replica_value in enumerate(leaf.values):
            first = firsts[local_index] if len(firsts) > 1 else 0
            first_value = leaf.values[first]
            if replica_value is not first_value and not _are_equal(replica_value, first_value):
                raise UsageError(
                    f"extended.update: expected equal arguments for replicas that share a variable's copy, got "
                    f"{_short(first_value)} and {_short(replica_value)}; reduce them first."
                )


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.allclose(
            first, second.to(first), rtol=0, atol=0, equal_nan=True
        )
    return bool(np.all(np.equal(first, second)))


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:60]


def _moved(value: Any, destinations: Any) -> Any:
    """Return a tensor on the device that `destinations` names or is on; anything else as it is."""
    if destinations is None or not isinstance(value, Tensor):
        return value
    if isinstance(destinations, DistributedValues) or _is_variable(destinations):
        destinations = local_values(destinations)[0]
    if isinstance(destinations, Tensor):
        return value.to(destinations.device)
    return value.to(parse_device(destinations))
