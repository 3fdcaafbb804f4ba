"""Variables that know their strategy: equal on all replicas, or one copy for each that is aggregated when read."""

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.strategy import context
from hpcdist.strategy.base import get_strategy, has_strategy
from hpcdist.strategy.reduce import all_tensors, first_tensor, mean_tensors, sum_tensors
from hpcdist.strategy.values import DistributedValues
from hpcdist.tf_compat.variable_operators import Readable


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are combined, as in tf.VariableSynchronization; AUTO is ON_WRITE."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How values of several replicas are combined, as in tf.VariableAggregation."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


_Member = TypeVar("_Member", bound=enum.Enum)


def parse_member(kind: type[_Member], choice: Any) -> _Member:
    """Return the member of an enumeration for itself or its name in any case.

    Raises:
        UsageError: for anything else.
    """
    name = str(choice).upper()
    if isinstance(choice, kind):
        name = str(choice.value).upper()
    if name not in kind.__members__:
        names = ", ".join(kind.__members__)
        raise UsageError(
            f"Variable: expected a {kind.__name__} of {names}, got {choice!r}; pass one of them."
        )
    return kind[name]


def resolve_synchronization(choice: Any) -> VariableSynchronization:
    """Return the member that `choice` names, and ON_WRITE for AUTO."""
    synchronization = parse_member(VariableSynchronization, choice)
    if synchronization is VariableSynchronization.AUTO:
        return VariableSynchronization.ON_WRITE
    return synchronization


def resolve_trainable(synchronization: VariableSynchronization, trainable: bool | None) -> bool:
    """Return whether a variable is trainable: by default unless its copies differ.

    Raises:
        UsageError: for a trainable ON_READ variable.
    """
    is_on_read = synchronization is VariableSynchronization.ON_READ
    if is_on_read and trainable:
        raise UsageError(
            "Variable: expected trainable=False with synchronization=ON_READ, whose copies differ between replicas, "
            "got trainable=True; use ON_WRITE for what is trained."
        )
    if trainable is None:
        return not is_on_read
    return bool(trainable)


_AGGREGATE = {
    VariableAggregation.SUM: sum_tensors,
    VariableAggregation.MEAN: mean_tensors,
    VariableAggregation.ONLY_FIRST_REPLICA: first_tensor,
}
_SCATTERS_OF = (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA)


class Variable(Readable):
    """A tensor that belongs to the strategy it is made in, as `tf.Variable`; made outside all, a plain tensor.

    ON_WRITE: the same on all replicas. Values that replicas assign inside `run` are aggregated, and all copies are set
    at once; with NONE the assignment is refused, as copies would differ. ON_READ: every replica writes its own copy;
    outside `run` reading aggregates the copies. In expressions and torch functions a variable is read: `v * 2`,
    `v > x`, `v[0]` and `torch.exp(v)` are tensors.

    Collective over the ranks of the role, in a strategy's scope: all start with replica 0's value.

    Args:
        initial_value: torch tensor, numpy array, number, nested list of numbers, or a function that returns one.
        trainable: whether the variable is trained. True, given for floats, makes `parameter` of it, which optimizers
            take and whose gradients are summed; expressions of the variable are differentiable then. Whole numbers have
            no gradients; TensorFlow takes True for them, too. Default: True unless ON_READ, but without gradients:
            torch would record every use of a variable.
        synchronization: a member of VariableSynchronization, or its name.
        aggregation: a member of VariableAggregation, or its name.
        name: name of the variable, for messages.
        dtype: a torch or numpy dtype, or its name. Default: dtype of the value; for a Python float, torch's default.

    Attributes:
        trainable, synchronization, aggregation, name: values of the arguments, with defaults filled in.
        parameter: the torch parameter that holds the value, where trainable=True was given for floats; else None.
        strategy: strategy that it belongs to.

    Raises:
        UsageError: for a trainable variable that is ON_READ, NONE in a scope, whole numbers with MEAN, or a value that
            is no numbers.
        RuntimeError: inside `run`.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        self.name = name or "Variable"
        self.synchronization = resolve_synchronization(synchronization)
        self.aggregation = parse_member(VariableAggregation, aggregation)
        self.trainable = resolve_trainable(self.synchronization, trainable)
        self.strategy = get_strategy()
        self._is_unmanaged = not has_strategy()
        self._is_assigned = False
        self._is_on_read = (
            self.synchronization is VariableSynchronization.ON_READ and not self._is_unmanaged
        )
        self._check_creation()
        if callable(initial_value):
            initial_value = initial_value()
        value = as_tensor(initial_value, dtype)
        n_local = len(self.strategy.own_replicas)
        if not self._is_unmanaged:
            self._check_mean(value)
            self._number = self.strategy.number_variable()
            call = self._call("Variable")
            value = first_tensor(self.strategy.replicas, call, [value] * n_local)
        n_copies = n_local if self._is_on_read else 1
        with torch.inference_mode(False):  # so that it can be written outside that mode, too
            self._copies = [value.clone() for _ in range(n_copies)]
        self.parameter: torch.nn.Parameter | None = None
        if trainable and self.dtype.is_floating_point:
            self.parameter = self._make_parameter()

    def _make_parameter(self) -> torch.nn.Parameter:
        """Replace the only copy by a torch parameter, which belongs to the strategy, as it is made in its scope."""
        parameter = torch.nn.Parameter(self._copies[0])
        self._copies = [parameter]
        return parameter

    def _check_creation(self) -> None:
        if self._is_unmanaged:
            return
        self.strategy.require_cross_replica("Variable", "make it in strategy.scope(), before run")
        if self.synchronization is VariableSynchronization.NONE:
            raise UsageError(
                f"Variable: expected synchronization AUTO, ON_WRITE or ON_READ in a strategy's scope, got NONE for "
                f"{self.name!r}; make it outside the scope, or choose one of them."
            )

    def _check_mean(self, value: Tensor) -> None:
        is_whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if self.aggregation is VariableAggregation.MEAN and is_whole:
            raise UsageError(
                f"Variable: expected floats for the mean over replicas, got {value.dtype} for {self.name!r}; give it a "
                f"float dtype, or another aggregation."
            )

    # -- reading --------------------------------------------------------------------------------------------------

    def read_value(self) -> Tensor:
        """Return a copy of the value: inside `run` the replica's, elsewhere the value of all replicas.

        Collective over the ranks of the role outside `run` for an ON_READ variable, which is aggregated then.

        Raises:
            UsageError: outside `run`, for an ON_READ variable without aggregation.
            RuntimeError: in another strategy's scope or run.
        """
        replica = self._replica("read_value")
        updated = self._updated_copy()
        if updated is not None or not self._is_on_read:
            return self._copies[updated or 0].clone()
        if replica is not None:
            return self._copies[replica.local_index].clone()
        return self._aggregated("read_value", self._copies)

    def value(self) -> Tensor:
        """Return a copy of the value; see `read_value`."""
        return self.read_value()

    def __repr__(self) -> str:
        synchronization = self.synchronization.value
        aggregation = self.aggregation.value
        tensor = f"shape={tuple(self.shape)}, dtype={self.dtype}"
        return f"{type(self).__name__}({self.name!r}, {tensor}, {synchronization}, {aggregation})"

    @property
    def shape(self) -> torch.Size:
        """The shape of the value."""
        return self._copies[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self._copies[0].dtype

    @property
    def local_copies(self) -> tuple[Tensor, ...]:
        """The copy that each replica of this process reads; the same tensor for all unless ON_READ."""
        if self._is_on_read:
            return tuple(self._copies)
        n_local = 1 if self._is_unmanaged else len(self.strategy.own_replicas)
        return (self._copies[0],) * n_local

    # -- writing --------------------------------------------------------------------------------------------------

    def assign(self, value: Any) -> "Variable":
        """Set the value and return the variable.

        Collective over all replicas inside `run` unless ON_READ: their values are aggregated. Outside `run` all ranks
        give the same value; an ON_READ variable with SUM divides it among the copies, so that reading returns it.

        Raises:
            UsageError: inside `run` without aggregation unless ON_READ; for another shape, or a dtype that would lose
                digits. RuntimeError: in another strategy's scope or run.
        """
        return self._update("assign", value, lambda copy, new: new)

    def assign_add(self, value: Any) -> "Variable":
        """Add to the value and return the variable; as `assign`.

        Raises:
            UsageError: as `assign`, and outside `run` for an ON_READ variable with SUM where num_replicas was given: it
                is not clear which copy is meant. With one replica per rank by default it is the rank's copy.
        """
        return self._update("assign_add", value, torch.add)

    def assign_sub(self, value: Any) -> "Variable":
        """Subtract from the value and return the variable; as `assign_add`."""
        return self._update("assign_sub", value, torch.sub)

    def scatter_add(self, sparse_delta: Any) -> "Variable":
        """Add rows at indices, and return the variable; as `assign_add`.

        Args:
            sparse_delta: object with `indices` and `values`, or the pair (indices, values); indices may repeat.

        Raises:
            NotImplementedError: for an ON_READ variable.
        """
        return self._scatter("scatter_add", sparse_delta, 1)

    def scatter_sub(self, sparse_delta: Any) -> "Variable":
        """Subtract rows at indices, and return the variable; as `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta, -1)

    def scatter_update(self, sparse_delta: Any) -> "Variable":
        """Set rows at indices, and return the variable; as `scatter_add`.

        Raises:
            NotImplementedError: as `scatter_add`, and with SUM or MEAN: they do not define a row that only some
                replicas set.
        """
        return self._scatter("scatter_update", sparse_delta, None)

    def _scatter(
        self,
        method: str,
        delta: Any,
        sign: int | None,
    ) -> "Variable":
        """Add rows (sign 1), subtract them (-1) or set them (None)."""
        is_ambiguous = not self._is_unmanaged and self.aggregation not in _SCATTERS_OF
        if self._is_on_read or (sign is None and is_ambiguous):
            raise NotImplementedError(
                f"{method}: expected an ON_WRITE variable, with aggregation NONE or ONLY_FIRST_REPLICA for "
                f"scatter_update, got {self!r}; assign the whole value."
            )
        current = self._copies[0]
        indices, rows = indices_and_rows(method, delta, current)
        if sign is None:
            updated = current.index_copy(0, indices, rows)
            return self._update(method, updated, lambda copy, new: new)
        # summed over replicas before it is added, as indices and their number may differ between replicas
        zeros = torch.zeros_like(current)
        dense = zeros.index_add(0, indices, rows)
        if sign > 0:
            return self._update(method, dense, torch.add)
        return self._update(method, dense, torch.sub)

    def _update(
        self,
        method: str,
        value: Any,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> "Variable":
        self._is_assigned |= method in ("assign", "scatter_update")
        replica = self._replica(method)
        updated = self._updated_copy()
        new = self._fitting(method, value)
        if updated is not None:
            self._write(updated, apply, new)
        elif replica is None:
            self._update_across(method, new, apply)
        elif self._is_on_read:
            self._write(replica.local_index, apply, new)
        else:
            self._update_together(method, new, apply)
        return self

    def _update_across(
        self,
        method: str,
        new: Tensor,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Write all copies from outside `run`."""
        if self._is_on_read and self.aggregation is VariableAggregation.SUM:
            if method != "assign":
                self._write_own(method, apply, new)
                return
            parts = divide_among(new, self.strategy.n_replicas)
            for index, number in enumerate(self.strategy.own_replicas):
                self._write(index, apply, parts[number])
            return
        for index in range(len(self._copies)):
            self._write(index, apply, new)

    def _write_own(
        self,
        method: str,
        apply: Callable[[Tensor, Tensor], Tensor],
        new: Tensor,
    ) -> None:
        """Write the copy of this rank's replica: a loop without `run` is the replica's own code."""
        if self.strategy.replicas.is_fixed:
            raise UsageError(
                f"{method}: expected a call inside strategy.run for {self!r}, got one outside; call it there, "
                f"where it changes one replica's copy, or assign the total."
            )
        self._write(0, apply, new)

    def _update_together(
        self,
        method: str,
        new: Tensor,
        apply: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Write the value that replicas share, aggregated from the values of all of them."""
        self._check_aggregation(method)

        def combine(contributions: list[Any]) -> list[None]:
            new = self._aggregated(method, contributions)
            with self.strategy.sums.writing():
                self._write(0, apply, new)
            return [None] * len(contributions)

        call = f"{method} of {self.name!r}"
        self.strategy.scheduler.merge(call, new, combine)

    def _check_aggregation(self, method: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise UsageError(
                f"{method}: expected a variable with an aggregation, as replicas may assign different values inside "
                f"strategy.run, got {self!r}; make it with aggregation=VariableAggregation.MEAN (or SUM, "
                f"ONLY_FIRST_REPLICA), with synchronization=ON_READ for a copy per replica, or assign outside run."
            )

    def _aggregated(self, method: str, tensors: list[Tensor]) -> Tensor:
        """Return the tensors of all replicas aggregated, from one of each local replica.

        Collective over the ranks of the role.
        """
        if self.aggregation not in _AGGREGATE:
            raise UsageError(
                f"{method}: expected a call inside strategy.run, or a variable with an aggregation, got {self!r} "
                f"outside; make it with aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA."
            )
        aggregate = _AGGREGATE[self.aggregation]
        return aggregate(self.strategy.replicas, self._call(method), tensors)

    def _call(self, method: str) -> str:
        """Return the text of a call, which must be the same on all ranks: a method of the same variable."""
        return f"{method} of variable {self._number} {self.name!r}"

    @torch.no_grad()
    def _write(
        self,
        index: int,
        apply: Callable[[Tensor, Tensor], Tensor],
        new: Tensor,
    ) -> None:
        copy = self._copies[index]
        copy.copy_(apply(copy, new))

    def _fitting(self, method: str, value: Any) -> Tensor:
        """Return a value as a tensor of this variable's shape, dtype and device."""
        if isinstance(value, DistributedValues):
            raise UsageError(
                f"{method}: expected one value for all replicas outside strategy.run, got {value!r}; assign inside "
                f"run, or reduce it first."
            )
        first_copy = self._copies[0]
        is_number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
        dtype = None
        if is_number and can_hold(self.dtype, value):
            dtype = self.dtype
        tensor = as_tensor(value, dtype)
        if tensor.shape != self.shape or not torch.can_cast(tensor.dtype, self.dtype):
            expected_shape = tuple(self.shape)
            shape = tuple(tensor.shape)
            raise UsageError(
                f"{method}: expected a value of shape {expected_shape} and dtype {self.dtype} for {self.name!r}, "
                f"got {shape} and {tensor.dtype}; reshape or cast it."
            )
        return tensor.detach().to(first_copy.device, first_copy.dtype)

    def _replica(self, method: str) -> context.Replica | None:
        """Return the caller's replica; None outside `run`, and for a variable made outside all strategies."""
        entry = context.current()
        if self._is_unmanaged or entry is None:
            return None
        if entry.strategy is not self.strategy:
            raise RuntimeError(
                f"{method}: expected {self.name!r} in the strategy that it was made in, got it in another "
                f"{type(entry.strategy).__name__}: mixing them is not possible; make it in the scope it is used in."
            )
        return entry.replica

    def _updated_copy(self) -> int | None:
        """Return the index of the copy that `extended.update` updates; None outside of it."""
        if self._is_unmanaged:
            return None
        local_index = context.updated_copy()
        if local_index is None:
            return None
        return min(local_index, len(self._copies) - 1)

    # -- a coordinator's closures -----------------------------------------------------------------------------------

    @property
    def adds_up(self) -> bool:
        """Whether the copies are summed when they are read, so that additions to each of them can be added up."""
        return self._is_on_read and self.aggregation is VariableAggregation.SUM

    def take_assigned(self) -> bool:
        """Return whether the value was set since the last call, and not only added to."""
        was_assigned = self._is_assigned
        self._is_assigned = False
        return was_assigned

    @torch.no_grad()
    def take_seen(self) -> Tensor | None:
        """Return the sum of this process's additions since the last call, or None for 0; set its copy to zero."""
        seen = self._copies[0].clone()
        self._copies[0].zero_()
        if not bool(seen.any()):
            return None
        return seen

    @torch.no_grad()
    def add_seen(self, seen: Tensor) -> None:
        """Add the additions of another process."""
        self._copies[0].add_(seen)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def is_state_collective(self) -> bool:
        """Whether all ranks must call `state_dict` together; `CheckpointManager.save` lets them."""
        return self._is_on_read

    def local_state(self) -> dict[str, Any]:
        """Return the copies of this rank's replicas. Not collective."""
        return {"copies": list(self._copies)}

    def state_dict(self) -> dict[str, Any]:
        """Return the value, or, for an ON_READ variable, all replicas' copies.

        Collective over the ranks of the role for an ON_READ variable.
        """
        if self._is_on_read:
            call = self._call("state_dict")
            copies = all_tensors(self.strategy.replicas, call, self._copies)
            return {"copies": copies}
        return {"value": self._copies[0].detach().clone()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all copies as they were saved. Not collective: the same state on every rank.

        If another number of replicas, or a variable of another kind, has saved it, the total, mean or first copy is
        kept.

        Raises:
            UsageError: for another shape or dtype, or copies of another number of replicas without aggregation.
        """
        has_copies = "copies" in state
        rows = state["copies"] if has_copies else state["value"][None]
        n_replicas = 1
        local_numbers = range(1)
        if self._is_on_read:
            n_replicas = self.strategy.n_replicas
            local_numbers = self.strategy.own_replicas
        if len(rows) != n_replicas or has_copies != self._is_on_read:
            self._check_deal(len(rows), n_replicas)
            rows = deal(rows, n_replicas, self.aggregation.value)
        fitting = [self._fitting("load_state_dict", row) for row in rows]
        for index, number in enumerate(local_numbers):
            self._copies[index].copy_(fitting[number])

    def _check_deal(self, n_saved: int, n_replicas: int) -> None:
        if self.aggregation is VariableAggregation.NONE and n_saved > 1:
            raise UsageError(
                f"load_state_dict: expected copies of {n_replicas} replicas for {self!r}, got {n_saved}; restart with "
                f"num_replicas={n_saved}."
            )


def as_tensor(
    value: Any,
    dtype: Any = None,
) -> Tensor:
    """Return a value as a tensor that needs no gradient; a variable is read.

    Args:
        value: torch tensor, numpy array, number, nested list of numbers, or variable.
        dtype: a torch or numpy dtype, or its name; default: dtype of the value.
    """
    if hasattr(value, "read_value"):
        value = value.read_value()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, np.dtype(dtype).name)
    try:
        return torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"Variable: expected a tensor, an array or numbers, got {type(value).__name__}; convert it."
        ) from None


def can_hold(dtype: torch.dtype, number: complex) -> bool:
    """Return whether a Python number can become this dtype without losing its kind."""
    return torch.can_cast(torch.as_tensor(number).dtype, dtype)


def indices_and_rows(
    method: str,
    delta: Any,
    whole: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (indices,) int64 and (indices, ...) rows for a scatter into `whole`, of its dtype and on its device.

    Args:
        method: name of the caller, for messages.
        delta: object with `indices` and `values`, or the pair.
        whole: (rows, ...) tensor.
    """
    if isinstance(delta, (tuple, list)) and len(delta) == 2:
        indices = as_tensor(delta[0])
        rows = as_tensor(delta[1])
    elif hasattr(delta, "indices") and hasattr(delta, "values"):
        indices = as_tensor(delta.indices)
        rows = as_tensor(delta.values)
    else:
        raise UsageError(
            f"{method}: expected indices and values, got {type(delta).__name__}; pass the pair (indices, values)."
        )
    row_shape = whole.shape[1:]
    if indices.dim() != 1 or rows.shape != indices.shape + row_shape:
        raise UsageError(
            f"{method}: expected one index and one row of {tuple(row_shape)} each, got indices of "
            f"{tuple(indices.shape)} and rows of {tuple(rows.shape)}; give them alike."
        )
    indices = indices.to(whole.device, torch.int64)
    rows = rows.to(whole.device, whole.dtype)
    return indices, rows


def divide_among(total: Tensor, n_parts: int) -> list[Tensor]:
    """Return the part of a total that each replica holds: equal parts; for integers the first ones hold the remainder.

    >>> [int(part) for part in divide_among(torch.tensor(7), 3)]
    [3, 2, 2]
    """
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return [total / n_parts] * n_parts
    part = torch.div(total, n_parts, rounding_mode="floor")
    remainder = total - part * n_parts
    parts: list[Tensor] = []
    for number in range(n_parts):
        one_more = (number < remainder).to(total.dtype)
        parts.append(part + one_more)
    return parts


def deal(
    rows: Tensor,
    n_replicas: int,
    aggregation: str,
) -> list[Tensor]:
    """Return one row for each replica, which aggregate to the same as the given rows.

    >>> [float(row) for row in deal(torch.tensor([1.0, 2.0]), 3, "SUM")]
    [3.0, 0.0, 0.0]
    """
    if aggregation == "SUM":  # not divided: thirds would not add up to the bit
        total = rows.sum(0, dtype=rows.dtype)
        zeros = torch.zeros_like(rows[0])
        return [total] + [zeros] * (n_replicas - 1)
    if aggregation == "MEAN" and rows.dtype.is_floating_point:
        return [rows.mean(0)] * n_replicas
    return [rows[0]] * n_replicas
