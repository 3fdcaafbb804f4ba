"""What a strategy offers in cross-replica context, outside of `run`: its parts, and the values of all replicas."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.nest import form_of, leaves, with_leaves
from hpcdist.replicas.scheduler import ReplicaScheduler
from hpcdist.strategy import context
from hpcdist.strategy.inputs import Inputs, OneInput
from hpcdist.strategy.ranks import Ranks
from hpcdist.strategy.reduce import Axis, check_axis, gather_values, reduce_over_axis, reduce_values
from hpcdist.strategy.replicas import OneReplica, Replicas
from hpcdist.strategy.sums import NoSums, Sums
from hpcdist.strategy.values import DistributedValues, local_values


@dataclass(frozen=True)
class Parts:
    """The parts that a strategy is made of. The default parts serve a single replica that nobody watches.

    Attributes:
        replicas: numbers of the replicas, and the operations that combine their values.
        sums: treatment of models and gradients.
        inputs: division of datasets.
        device: device of the tensors and modules that are made in scope and run. None if the caller's code decides.
    """

    replicas: Replicas = field(default_factory=OneReplica)
    sums: Sums = field(default_factory=NoSums)
    inputs: Inputs = field(default_factory=lambda: OneInput(takes_unbatched=True))
    device: torch.device | None = None


class CrossReplicaContext(Ranks):
    """The parts of a strategy, and the calls that combine values of all replicas outside of `run`.

    Args:
        parts: the parts that the strategy is made of; default: the parts of a single replica.

    Attributes:
        replicas, sums, inputs: the strategy's parts, for diagnosis.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        chosen = Parts() if parts is None else parts
        self.replicas = chosen.replicas
        self.sums = chosen.sums
        self.inputs = chosen.inputs
        self._placed = chosen.device
        self._is_pass_through = parts is None
        self._variable_numbers = itertools.count(1)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed: num_replicas, or by default one per chief or worker rank."""
        return self.replicas.n_replicas

    @property
    def n_replicas(self) -> int:
        """Number of replicas whose values `reduce`, variables and metrics combine, and that share a global batch."""
        return self.replicas.n_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process prints, logs and saves for the job."""
        return True

    @property
    def own_replicas(self) -> range:
        """Numbers of the replicas of this process."""
        return self.replicas.local

    @property
    def scheduler(self) -> ReplicaScheduler:
        """Runs the replicas of this process."""
        return self.replicas.scheduler

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter made in this scope, or a buffer of a module built in it."""
        return self.sums.owns(tensor)

    def number_variable(self) -> int:
        """Return the number of the next variable: variables are made in the same order on all ranks."""
        return next(self._variable_numbers)

    def _placing(self) -> AbstractContextManager[Any]:
        """Make tensors of the block on this replica's device; free where that is the default device."""
        device = self._placed_on
        if device is None or device == torch.get_default_device():
            return nullcontext()
        return device

    @property
    def _placed_on(self) -> torch.device | None:
        """The device of tensors and modules made in scope and run. None if the caller's code decides."""
        return self._placed

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return torch.get_default_device() if self._placed is None else self._placed

    @property
    def _parameter_device(self) -> torch.device:
        """The device that the variables are on."""
        return self.device

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Return `value` reduced over all replicas and, first, over `axis` inside each.

        Collective over the ranks of the role. Same dtype required on every replica: yes; same shape: yes, but for
        reduced axes.

        >>> total = strategy.reduce("sum", torch.tensor(1.0), axis=None)
        >>> int(total) == strategy.num_replicas_in_sync
        True

        Args:
            reduce_op: SUM or MEAN. MEAN over an axis divides the global sum by the global number of elements, so parts
                of different length are weighted by their length.
            value: PerReplica, or, with one replica in this process, its value: torch tensor, numpy array or number.
                With several replicas in this process, or where num_replicas above 1 was given, a plain value counts for
                each replica; its SUM with axis None is refused, as in tf.distribute. With axis None also a sparse COO
                tensor, whose entries are joined, and a nest of such values.
            axis: None (over replicas only), an int, or a tuple or list of ints; negative ones count from the end.

        Returns:
            The same kind of value, on the host, equal on every rank.

        Raises, on every rank alike:
            ValueError: for an axis out of range, values of different shape or an unknown op.
            TypeError: for an axis of another type. RuntimeError: inside `run`.
        """
        self.require_cross_replica("reduce", "return the value from run and reduce it")
        op = ReduceOp.parse(reduce_op)
        check_axis(axis)
        if axis is None:
            return with_leaves(value, self.reduce_all(op, leaves(value), form_of(value)))
        values, error = self._values_of("reduce", value, is_everyones=True)
        return reduce_over_axis(self.replicas, op, values, axis, error)

    def reduce_all(self, op: ReduceOp, values: Sequence[Any], form: str = "") -> list[Any]:
        """Return several values, each reduced over all replicas; one sum for each dtype.

        Collective over the ranks of the role.

        Args:
            op: SUM or MEAN.
            values: values to reduce, as for `reduce`.
            form: form of the nest whose leaves they are, as text.
        """
        if not values:
            return []
        local_by_value: list[list[Any]] = []
        error: UsageError | None = None
        for value in values:
            values_of_replicas, refusal = self._values_of(
                "reduce", value, is_everyones=op is ReduceOp.MEAN
            )
            local_by_value.append(values_of_replicas)
            error = error or refusal
        by_replica: list[list[Any]] = []
        if error is None:
            by_replica = [list(column) for column in zip(*local_by_value, strict=True)]
        return reduce_values(self.replicas, op, by_replica, [form] * len(by_replica), error)

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas joined along `axis`, in the order of replicas, on every rank.

        Collective over the ranks of the role. Same dtype and dimensions required on every replica: yes, but for `axis`.

        Args:
            value: PerReplica, or, with one replica in this process, its value: torch tensor or numpy array.
            axis: dimension along which the values are joined; a negative number counts from the end.

        Raises:
            ValueError: for numbers, an axis out of range, or shapes that do not fit.
            RuntimeError: inside `run`, where ReplicaContext.all_gather is meant.
        """
        self.require_cross_replica("gather", "use get_replica_context().all_gather there")
        values, error = self._values_of("gather", value)
        return gather_values(self.replicas, values, axis, error)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas as a tuple; a plain value becomes a tuple of one."""
        return local_values(value)

    def _values_of(
        self,
        call: str,
        value: Any,
        is_everyones: bool = False,
    ) -> tuple[list[Any], UsageError | None]:
        """Return the values of this process's replicas, or the error that says why there are none.

        Args:
            call: name of the caller, for messages.
            value: DistributedValues, a variable, or a plain value.
            is_everyones: whether a plain value counts for every replica, as in tf.distribute. Otherwise it is the
                value of the process's only replica, and refused where num_replicas above 1 was given.
        """
        values = local_values(value)
        n_local = len(self.own_replicas)
        is_plain = not isinstance(value, DistributedValues) and not hasattr(value, "local_copies")
        if is_plain and is_everyones:
            return [value] * n_local, None
        is_refused = is_plain and self.replicas.is_fixed and self.num_replicas_in_sync > 1
        if not is_refused and len(values) == n_local:
            return list(values), None
        return [], UsageError(
            f"{call}: expected a PerReplica value of this rank's {n_local} replicas, got {len(values)} "
            f"({type(value).__name__}); pass what strategy.run returned."
        )

    def require_cross_replica(self, call: str, advice: str) -> None:
        """Raise RuntimeError inside `run` and inside `extended.update`."""
        entry = context.current()
        if entry is None:
            return
        if entry.replica is not None:
            where = "replica context, inside it"
        elif entry.updated is not None:
            where = "update context, inside extended.update"
        else:
            return
        raise RuntimeError(
            f"{call}: expected cross-replica context, outside strategy.run, got {where}; {advice}."
        )
