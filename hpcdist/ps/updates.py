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


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether a class updates each element by this element alone: one of torch's, or one that says so itself."""
    return kind in ELEMENTWISE or bool(getattr(kind, "is_elementwise", False))


def check_optimizer(kind: type[Optimizer], is_split: bool) -> None:
    """Raise UsageError for an optimizer that cannot run on servers, or not on a part of a variable.

    Args:
        kind: its class.
        is_split: whether it updates a variable that is in several shards.
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
        optimizer: torch's, of parameters that are each the values of a shard or a chunk; of a whole shard where the
            optimizer does not work element by element.
        parameters: all of its groups.
    """

    optimizer: Optimizer
    parameters: list[Parts]
    _settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: type[Optimizer],
        defaults: dict[str, Any],
        groups: Iterable[tuple[dict[str, Any], list[Parts]]],
    ) -> "Updater":
        """Return one of a class, given its defaults, and the settings and parameters of its groups."""
        all_groups = list(groups)
        optimizer = kind.__new__(kind)
        chosen = [
            {**settings, "params": [parameter for parameter, _ in parts]}
            for settings, parts in all_groups
        ]
        optimizer.__setstate__(
            {"defaults": defaults, "state": collections.defaultdict(dict), "param_groups": chosen}
        )
        return cls(optimizer, [part for _, parts in all_groups for part in parts])

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """The place among the parameters of the one that a shard or chunk belongs to."""
        return {
            number: place for place, (_, chunks) in enumerate(self.parameters) for number in chunks
        }

    def note_settings(self, worker: int, groups: Iterable[dict[str, Any]]) -> None:
        """Note the settings of the groups that a worker steps with from now on: as JSON has them, without tuples."""
        self._settings[worker] = [
            {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in group.items()
            }
            for group in groups
        ]

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter, by the number of the first shard or chunk in it."""
        return {
            chunks[0]: dict(self.optimizer.state[parameter])
            for parameter, chunks in self.parameters
        }

    def set_states(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Set states; those of chunks are joined where the optimizer has their shard as a whole."""
        for parameter, chunks in self.parameters:
            chunk_states = [states[chunk] for chunk in chunks if chunk in states]
            if chunk_states:
                self.optimizer.state[parameter] = (
                    chunk_states[0] if len(chunk_states) == 1 else _join(chunk_states)
                )

    def step(self, totals: Mapping[int, Tensor | None], worker: int) -> dict[int, Tensor | None]:
        """Make a step on gradients of some shards or chunks.

        Args:
            totals: the gradients.
            worker: whose settings hold.

        Returns:
            The rows that have changed of each; None: all.
        """
        for group, settings in zip(
            self.optimizer.param_groups, self._settings.get(worker, []), strict=False
        ):
            group.update(settings)
        stepped_parameters = [
            self.parameters[place]
            for place in sorted(
                {self._places[number] for number in totals if number in self._places}
            )
        ]
        changed: dict[int, Tensor | None] = {}
        try:
            for parameter, chunks in stepped_parameters:
                parts = [total for chunk in chunks if (total := totals[chunk]) is not None]
                parameter.grad = parts[0] if len(chunks) == 1 else torch.cat(parts)
                is_of_rows = parameter.grad.is_sparse and self._changes_rows_alone
                changed |= {
                    chunk: parts[0]._indices()[0] if is_of_rows else None for chunk in chunks
                }
            self.optimizer.step()
        finally:
            for parameter, _ in stepped_parameters:
                parameter.grad = None
        return changed

    @property
    def _changes_rows_alone(self) -> bool:
        settings = _CHANGES_ROWS_ALONE.get(type(self.optimizer))
        groups = self.optimizer.param_groups
        return settings is not None and not any(
            group.get(name) for name in settings for group in groups
        )


def sum_of(pushed: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """Return the sum of gradients in the order of the workers, in the tree that an all-reduce adds in.

    None where nobody has one. One of a dtype of 16 bits is added in float32.
    """
    gradients = [gradient for gradient in pushed if gradient is not None]
    if len(gradients) < 2 or len(pushed) < 2:
        return (
            gradients[0].coalesce()
            if gradients and gradients[0].is_sparse
            else gradients[0]
            if gradients
            else None
        )
    if all(gradient.is_sparse for gradient in gradients):
        indices = torch.cat([gradient._indices() for gradient in gradients], 1)
        values = torch.cat([gradient._values() for gradient in gradients])
        return torch.sparse_coo_tensor(
            indices, values, like.shape, check_invariants=False
        ).coalesce()
    wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    rows = [
        torch.zeros_like(like, dtype=wide)
        if gradient is None
        else (gradient.to_dense() if gradient.is_sparse else gradient).to(wide)
        for gradient in pushed
    ]
    for into, row in plan_row_additions(len(rows)):
        rows[into] = rows[into] + rows[row]
    return rows[0].to(like.dtype)


def _join(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a whole shard, given those of its chunks: what is not of rows, the first one alone has."""

    def joined(name: str) -> Any:
        values = [state[name] for state in states if name in state]
        return torch.cat(values) if len(values) == len(states) else values[0]

    return {name: joined(name) for name in states[0]}
