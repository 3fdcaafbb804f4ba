"""How gradients update shards: torch's optimizers on the values of a server, and the sums that they step on."""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import UsageError
from hpcdist.plan.replicas import plan_row_additions

#: torch's optimizers whose update of an element depends on this element alone.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
)
#: Optimizers that change, for a gradient of rows, these rows alone, if they have none of these settings.
_CHANGES_ROWS_ALONE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SparseAdam: (),
    torch.optim.SGD: ("momentum", "weight_decay"),
    torch.optim.Adagrad: ("weight_decay", "lr_decay"),
}
#: A parameter of an optimizer, with the numbers of the shards or chunks that it consists of.
Parts = tuple[nn.Parameter, list[int]]
#: Settings of one group of an optimizer, such as its learning rate.
Settings = dict[str, Any]
#: The state that an optimizer has for one parameter.
State = dict[str, Any]


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether a class updates each element by this element alone: one of torch's, or one that says so itself."""
    return kind in ELEMENTWISE or bool(getattr(kind, "is_elementwise", False))


def check_optimizer(kind: type[Optimizer], is_split: bool) -> None:
    """Raise UsageError for an optimizer that cannot run on servers, or not on a part of a variable.

    Args:
        kind: class of the optimizer.
        is_split: whether the optimizer updates a variable that is in several shards.
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise UsageError(
            "step: expected an optimizer without a closure on parameter servers, got LBFGS; use another."
        )
    if is_split and not is_elementwise(kind):
        names = ", ".join(sorted(optimizer_class.__name__ for optimizer_class in ELEMENTWISE))
        raise UsageError(
            f"step: expected an optimizer that works element by element for a variable in several shards, one of "
            f"{names}, or a class with is_elementwise = True, got {kind.__name__}, which needs it whole; leave "
            f"variable_partitioner out."
        )


@dataclass
class Updater:
    """An optimizer of the job, as far as it is one server's.

    Attributes:
        optimizer: optimizer of torch. Each of its parameters is the values of a shard or a chunk; of a whole shard
            where the optimizer does not work element by element.
        parameters: parameters of all groups.
    """

    optimizer: Optimizer
    parameters: list[Parts]
    _settings: dict[int, list[Settings]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: type[Optimizer],
        defaults: Settings,
        groups: Iterable[tuple[Settings, list[Parts]]],
    ) -> "Updater":
        """Return the updater for a class of optimizers.

        Args:
            kind: class of the optimizer.
            defaults: its default settings.
            groups: settings and parameters of each group.
        """
        param_groups: list[Settings] = []
        all_parameters: list[Parts] = []
        for settings, parameters in groups:
            param_groups.append({**settings, "params": [parameter for parameter, _ in parameters]})
            all_parameters += parameters
        optimizer = kind.__new__(kind)
        optimizer.__setstate__(
            {
                "defaults": defaults,
                "state": collections.defaultdict(dict),
                "param_groups": param_groups,
            }
        )
        return cls(optimizer, all_parameters)

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """For each shard or chunk, the place of its parameter among the parameters."""
        places: dict[int, int] = {}
        for place, (_, chunks) in enumerate(self.parameters):
            places.update(dict.fromkeys(chunks, place))
        return places

    def note_settings(self, worker: int, groups: Iterable[Settings]) -> None:
        """Note the settings that a worker steps with from now on.

        Args:
            worker: number of the worker.
            groups: settings of each group, as JSON has them, without tuples.
        """
        self._settings[worker] = list(map(_with_tuples, groups))

    def states(self) -> dict[int, State]:
        """Return the state of each parameter, by the number of the first shard or chunk in it."""
        states: dict[int, State] = {}
        for parameter, chunks in self.parameters:
            states[chunks[0]] = dict(self.optimizer.state[parameter])
        return states

    def set_states(self, states: Mapping[int, State]) -> None:
        """Set states; the states of chunks are joined where the optimizer has their shard as a whole."""
        for parameter, chunks in self.parameters:
            chunk_states = [states[chunk] for chunk in chunks if chunk in states]
            if len(chunk_states) == 1:
                self.optimizer.state[parameter] = chunk_states[0]
            elif chunk_states:
                self.optimizer.state[parameter] = _join(chunk_states)

    def step(
        self,
        totals: Mapping[int, Tensor | None],
        worker: int,
    ) -> dict[int, Tensor | None]:
        """Make a step on gradients of some shards or chunks.

        Args:
            totals: gradients by the number of the shard or chunk.
            worker: number of the worker whose settings hold.

        Returns:
            The rows that have changed, by the number of the shard or chunk; None where all have changed.
        """
        settings_of_groups = self._settings.get(worker, [])
        for group, settings in zip(self.optimizer.param_groups, settings_of_groups, strict=False):
            group.update(settings)
        places = {self._places[number] for number in totals if number in self._places}
        stepped_parameters = [self.parameters[place] for place in sorted(places)]
        changed: dict[int, Tensor | None] = {}
        try:
            for parameter, chunks in stepped_parameters:
                parts: list[Tensor] = []
                for chunk in chunks:
                    total = totals[chunk]
                    if total is not None:
                        parts.append(total)
                if len(chunks) == 1:
                    parameter.grad = parts[0]
                else:
                    parameter.grad = torch.cat(parts)
                rows = None
                if parameter.grad.is_sparse and self._changes_rows_alone:
                    rows = parts[0]._indices()[0]
                changed.update(dict.fromkeys(chunks, rows))
            self.optimizer.step()
        finally:
            for parameter, _ in stepped_parameters:
                parameter.grad = None
        return changed

    @property
    def _changes_rows_alone(self) -> bool:
        """Whether the optimizer changes, for a gradient of rows, these rows alone."""
        names = _CHANGES_ROWS_ALONE.get(type(self.optimizer))
        if names is None:
            return False
        values: list[Any] = []
        for group in self.optimizer.param_groups:
            values += map(group.get, names)
        return not any(values)


def sum_of(pushed: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Return the sum of gradients in the order of the workers, in the tree that an all-reduce adds in.

    A worker without a gradient keeps its place in the tree. Gradients of a dtype of 16 bits are added in float32.

    Args:
        pushed: gradients of the workers, None where there is none; at least one is there.
        like: tensor of the shape and dtype of the sum.
    """
    gradients = [gradient for gradient in pushed if gradient is not None]
    if len(gradients) == 1:
        only_gradient = gradients[0]
        return only_gradient.coalesce() if only_gradient.is_sparse else only_gradient
    indices: list[Tensor] = []
    values: list[Tensor] = []
    for gradient in gradients:
        if gradient.is_sparse:
            indices.append(gradient._indices())
            values.append(gradient._values())
    if len(indices) == len(gradients):
        joined = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat(values),
            like.shape,
            check_invariants=False,
        )
        return joined.coalesce()
    sum_dtype = like.dtype
    if sum_dtype in (torch.float16, torch.bfloat16):
        sum_dtype = torch.float32
    rows: list[Tensor] = []
    for pushed_gradient in pushed:
        if pushed_gradient is None:
            rows.append(torch.zeros_like(like, dtype=sum_dtype))
        elif pushed_gradient.is_sparse:
            rows.append(pushed_gradient.to_dense().to(sum_dtype))
        else:
            rows.append(pushed_gradient.to(sum_dtype))
    for into, row in plan_row_additions(len(rows)):
        rows[into] = rows[into] + rows[row]
    return rows[0].to(like.dtype)


def _with_tuples(settings: Settings) -> Settings:
    """Return settings as an optimizer has them, given settings of JSON, which has lists in place of tuples."""
    restored: Settings = {}
    for name, value in settings.items():
        if isinstance(value, list):
            value = tuple(value)
        restored[name] = value
    return restored


def _join(states: Sequence[State]) -> State:
    """Return the state of a whole shard, given the states of its chunks.

    Values that are not of rows are in the first state alone.
    """
    joined: State = {}
    for name in states[0]:
        values = [state[name] for state in states if name in state]
        if len(values) == len(states):
            joined[name] = torch.cat(values)
        else:
            joined[name] = values[0]
    return joined
