"""Metrics of the torchmetrics package over all ranks: each rank updates one metric, a result is computed from all."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.objects import all_gather_objects
from hpcdist.errors import CheckpointMismatch, DesyncError, UsageError
from hpcdist.strategy import context
from hpcdist.strategy.base import get_strategy

#: States of one rank, for the metric and each metric in it: number of updates, and values by name.
_States = list[tuple[int, dict[str, Any]]]
_numbers = itertools.count()


class TorchMetric:
    """A torchmetrics metric over all ranks, whose states are combined as its author declared with `add_state`.

    The replicas of a rank update the same metric; nothing is sent before `result`. Sums of counts are exact; sums of
    floats are added in the order of ranks, so that another number of ranks may round them in another way.

    >>> with strategy.scope():
    ...     f1 = hpcdist.metrics.TorchMetric(torchmetrics.classification.MulticlassF1Score(num_classes=3))
    >>> f1.update_state(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    >>> float(f1.result())  # over all ranks; collective
    1.0

    Args:
        metric: metric of this rank; values that it has seen already count. A `MetricCollection` is given metric by
            metric.
        name: name of the metric, for messages; default: the name of the class.

    Raises:
        UsageError: for an object that is no torchmetrics.Metric.
    """

    #: All ranks must call `state_dict` together; `CheckpointManager.save` lets them.
    is_state_collective = True
    #: The states of several processes can be added up, by `add_seen`.
    adds_up = True

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
    ) -> None:
        self.name = name or type(metric).__name__
        if not _is_metric(metric):
            raise UsageError(
                f"TorchMetric: expected a torchmetrics.Metric, got {metric!r}; pass the metrics of a collection one by "
                f"one."
            )
        self._metric = metric
        self._number = next(_numbers)
        self._strategy = get_strategy()

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Call the metric's `update` with rows of this replica. Not collective."""
        self._metric.update(*args, **kwargs)

    def result(self) -> Any:
        """Return the result that the metric computes from the states of all ranks.

        Collective over the ranks of the role, outside `run`.

        Raises:
            UsageError: inside `run`, whose replicas share the metric. DesyncError: when ranks read different metrics;
                on all ranks.

        Cost: every rank receives the states of all ranks: states that keep all predictions are as large as these.
        """
        entry = context.current()
        if entry is not None and entry.replica is not None:
            raise UsageError(
                f"result: expected a call outside of strategy.run for {self.name!r}, which the replicas of a rank "
                f"share, got one inside; read it after run."
            )
        combined = copy.deepcopy(self._metric)
        all_states = self._all_states("result")
        states = _combined(combined, all_states)
        _set_states(combined, states)
        combined.sync_on_compute = False  # it holds all states already
        return combined.compute()

    def reset_state(self) -> None:
        """Forget all values of this rank; all ranks call it."""
        self._metric.reset()

    def take_seen(self) -> _States | None:
        """Return the states of this process, and forget them; None where it has seen nothing."""
        seen = _states_of(self._metric)
        self._metric.reset()
        if not _has_updates(seen):
            return None
        return seen

    def add_seen(self, seen: _States) -> None:
        """Add the states of another process."""
        states = _states_of(self._metric)
        if _has_updates(states):
            seen = _combined(self._metric, [states, seen])
        _set_states(self._metric, seen)

    def local_state(self) -> _States:
        """Return the states of this rank. Not collective."""
        return _states_of(self._metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. Collective over the ranks of the role."""
        ranks: list[list[list[Any]]] = []
        for states in self._all_states("state_dict"):
            rank_states = list(map(list, states))
            ranks.append(rank_states)
        return {"ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, also if another number of ranks has saved it. Not collective.

        Raises:
            CheckpointMismatch: when fewer ranks than at the save share states that only the metric's own `compute` can
                combine.
        """
        rank = self._strategy.rank
        n_ranks = self._strategy.size
        saved_ranks = state["ranks"]
        local_states: list[_States] = []
        for saved_states in saved_ranks[rank::n_ranks]:
            states = [(int(count), dict(values)) for count, values in saved_states]
            local_states.append(states)
        self._metric.reset()
        if len(local_states) == 1:
            _set_states(self._metric, local_states[0])
        elif local_states:
            self._require_sums(len(saved_ranks), n_ranks)
            combined = _combined(self._metric, local_states)
            _set_states(self._metric, combined)

    def _require_sums(self, n_saved: int, n_ranks: int) -> None:
        """Raise CheckpointMismatch if there are states that only the metric's own `compute` can combine."""
        from torchmetrics.utilities import data

        known_reductions = (
            data.dim_zero_sum,
            data.dim_zero_cat,
            data.dim_zero_max,
            data.dim_zero_min,
        )
        for part in _metrics_of(self._metric):
            for name, reduce in part._reductions.items():
                is_list = isinstance(part._defaults[name], list)
                if reduce not in known_reductions and not is_list:
                    raise CheckpointMismatch(
                        f"restore: expected {n_saved} ranks or more, as at the save, for state {name!r} of the metric "
                        f"{self.name!r}, which is no sum, maximum or list, got {n_ranks}; resume on as many."
                    )

    def _all_states(self, method: str) -> list[_States]:
        """Return the states of all ranks, which must all call the same method of the same metric."""
        local_states = _states_of(self._metric)
        group = self._strategy.group
        if group is None:
            return [local_states]
        call = f"{method} of metric {self._number} {self.name!r}"
        gathered = all_gather_objects((call, local_states), group.comm)
        calls, states = zip(*gathered, strict=True)
        different_calls = sorted(set(calls))
        if len(different_calls) > 1:
            raise DesyncError(
                f"{method}: expected the same call on all ranks, got {', '.join(different_calls)}; read metrics in "
                f"the same order on every rank."
            )
        return list(states)


def _is_metric(value: Any) -> bool:
    import torchmetrics

    return isinstance(value, torchmetrics.Metric)


def _metrics_of(metric: Any) -> list[Any]:
    """Return a metric and the metrics in it, as a wrapper such as `ClasswiseWrapper` has one."""
    return [part for part in metric.modules() if _is_metric(part)]


def _has_updates(states: _States) -> bool:
    """Return whether any metric of these states was updated."""
    return any(count for count, _ in states)


def _states_of(metric: Any) -> _States:
    """Return the states of a metric and of the metrics in it, on the host."""

    def on_host(value: Any) -> Any:
        if isinstance(value, list):
            return [tensor.detach().cpu() for tensor in value]
        return value.detach().cpu().clone()

    states: _States = []
    for part in _metrics_of(metric):
        values: dict[str, Any] = {}
        for name in part._defaults:
            value = getattr(part, name)
            values[name] = on_host(value)
        states.append((part.update_count, values))
    return states


def _set_states(metric: Any, states: _States) -> None:
    """Set the states of a metric and of the metrics in it."""

    def on_device(value: Any, device: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return [torch.as_tensor(entry).to(device) for entry in value]

    parts = _metrics_of(metric)
    for part, state in zip(parts, states, strict=True):
        count, values = state
        for name, value in values.items():
            moved = on_device(value, part.device)
            setattr(part, name, moved)
        part._update_count = count
        part._computed = None


def _combined(metric: Any, all_states: Sequence[_States]) -> _States:
    """Return the states of all ranks as the states of one, by the reductions of the metric."""
    merged_states: _States = []
    parts = _metrics_of(metric)
    states_by_part = zip(*all_states, strict=True)
    for part, of_ranks in zip(parts, states_by_part, strict=True):
        n_updates = sum(count for count, _ in of_ranks)
        merged_values: dict[str, Any] = {}
        for name, reduce in part._reductions.items():
            rank_values = [values[name] for _, values in of_ranks]
            merged_values[name] = _reduced(reduce, rank_values)
        merged_states.append((n_updates, merged_values))
    return merged_states


def _reduced(reduce: Callable[[Any], Any] | None, rank_values: list[Any]) -> Any:
    """Return the values of a state on all ranks as one value."""
    if isinstance(rank_values[0], list):
        return list(itertools.chain.from_iterable(rank_values))  # `compute` concatenates it
    tensors = [torch.as_tensor(rank_value) for rank_value in rank_values]
    stacked = torch.stack(tensors)
    if reduce is None:
        return stacked
    return reduce(stacked)
