"""The reference: plain torch in one process, which sees whole global batches. It knows nothing of hpcdist."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_fuzz.models import Rows, make_rows
from torch_fuzz.program import Program
from torch_fuzz.training import Training


class Plain:
    """The backend of one process.

    Args:
        program: whose data and losses.
        order: row numbers of each batch, where the program shuffles; else they follow from the data.
        is_reversed: take the rows of each batch backward, which changes nothing but rounding.
    """

    def __init__(
        self, program: Program, order: Sequence[Sequence[int]] | None = None, is_reversed: bool = False
    ) -> None:
        self._program = program
        self._order = order
        self._is_reversed = is_reversed

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        return step(*args)

    def merge(self, change: Callable[[], Any]) -> None:
        change()

    def _numbers(self) -> Iterator[list[int]]:
        if self._order is not None:
            yield from map(list, self._order)
            return
        data = self._program.data
        epoch = [list(range(data.n_rows))[start : start + data.batch] for start in range(0, data.n_rows, data.batch)]
        if data.drops_remainder:
            epoch = [batch for batch in epoch if len(batch) == data.batch]
        yield from itertools.cycle(epoch)

    def batches(self, rows: Rows) -> Iterator[tuple[Any, int]]:
        for numbers in self._numbers():
            row_order = numbers[::-1] if self._is_reversed else numbers
            yield {key: column[row_order] for key, column in rows.items()}, len(numbers)

    def scale(self, losses: Tensor, weights: Tensor | None, divisor: int) -> Tensor:
        weighted = losses if weights is None else losses * weights
        if self._program.combine in ("mean", "unsaid"):
            return weighted.mean()
        return weighted.sum() / divisor

    def regularize(self, loss: Tensor) -> Tensor:
        return loss

    def total(self, value: Any) -> float:
        return float(value)

    def total_inside(self, value: Tensor) -> Tensor:
        return value

    def sums(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def make_optimizer(self, optimizer_class: Any, groups: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = optimizer_class(groups, **options)
        return optimizer

    def clip_norm(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float) -> None:
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_value(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], limit: float) -> None:
        nn.utils.clip_grad_value_(parameters, limit)

    def apply(self, optimizer: torch.optim.Optimizer, pairs: list[Any], is_method: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for gradient, parameter in pairs:
            parameter.grad = gradient
        optimizer.step()

    def synchronize_statistics(self, model: nn.Module) -> nn.Module:
        return model

    def save_and_restore(self, objects: dict[str, Any], disturb: Callable[[], None]) -> None:
        """Load copies of the states: torch itself converts some of an optimizer's numbers then."""
        for item in objects.values():
            item.load_state_dict(copy.deepcopy(item.state_dict()))


def run_plain(
    program: Program,
    order: Sequence[Sequence[int]] | None = None,
    is_reversed: bool = False,
    nudge: float = 0.0,
) -> dict[str, Any]:
    """Return what the program leaves; `nudge` is how much larger its features are, relative to them."""
    torch.manual_seed(program.seed)
    rows = make_rows(program.data.n_rows, program.seed, getattr(torch, program.dtype))
    rows["x"] = rows["x"] * (1 + nudge)
    training = Training(program, Plain(program, order, is_reversed))
    training.run(rows)
    return training.state()
