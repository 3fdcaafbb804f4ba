"""What holds the parameters of a strategy in place of each rank: one copy of a host, or parameter servers."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn
from torch.optim.optimizer import Optimizer


class Storage(Protocol):
    """Holds parameters once for several ranks, and has a part in each step of an optimizer.

    Attributes:
        is_summed: whether gradients are summed over all replicas before a step, on the ranks themselves.
        needs_sum: whether they are summed at all, so that losses must be scaled for it.
    """

    is_summed: bool
    needs_sum: bool

    def adopt(self, named: Sequence[tuple[str, nn.Parameter]], sparse: Iterable[nn.Parameter]) -> None:
        """Hold parameters, equal on all ranks, from now on. Collective where there are new ones."""

    def begin_step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Begin an optimizer's step; gradients are hidden where another one makes it."""

    def end_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """End an optimizer's step."""
