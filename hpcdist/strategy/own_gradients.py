"""Gradients that the program has computed itself, as by torch.autograd.grad: summed over all replicas, then stepped."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hpcdist.errors import UsageError
from hpcdist.strategy.replica_context import ReplicaContext

if TYPE_CHECKING:
    from hpcdist.strategy.base import Strategy

#: A gradient, or None where the loss does not depend on the parameter, and the parameter.
GradientsAndParameters = Iterable[tuple[Tensor | None, Tensor]]


def apply_gradients(replica: ReplicaContext, optimizer: Optimizer, pairs: GradientsAndParameters) -> None:
    """Step on sums of gradients; see `Strategy.apply_gradients`. Collective: all replicas. Called inside a replica."""
    gradients, parameters = _split(optimizer, list(pairs))
    strategy, own = replica.strategy, [gradient for gradient in gradients if gradient is not None]
    are_sums = [any(pair) for pair in zip(strategy._are_noted(own), strategy._are_summed_gradients(own), strict=True)]
    if not own or not all(are_sums):
        if any(are_sums):
            raise UsageError(
                "apply_gradients: expected gradients that are all summed or all of this replica, got some that "
                "backward or all_reduce has summed; pass p.grad of every parameter, or none."
            )
        gradients = _sums(replica, gradients, parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for gradient, parameter in zip(gradients, parameters, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _split(optimizer: Optimizer, pairs: list[tuple[Tensor | None, Tensor]]) -> tuple[list[Tensor | None], list[Tensor]]:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for gradient, parameter in pairs:
        if id(parameter) not in own:
            raise UsageError(
                f"apply_gradients: expected (gradient, parameter) pairs of the optimizer's parameters, got a "
                f"{type(parameter).__name__} that is none of them; pass zip(gradients, model.parameters())."
            )
        if gradient is not None and gradient.shape != parameter.shape:
            raise UsageError(
                f"apply_gradients: expected a gradient of shape {tuple(parameter.shape)}, as its parameter, got "
                f"{tuple(gradient.shape)}; pass zip(gradients, parameters) in the same order."
            )
    return [gradient for gradient, _ in pairs], [parameter for _, parameter in pairs]


def _sums(replica: ReplicaContext, gradients: list[Tensor | None], parameters: list[Tensor]) -> list[Tensor | None]:
    """Return the sums over all replicas; None where no replica has a gradient."""
    if replica.strategy._is_mean:
        raise UsageError(
            "apply_gradients: expected a strategy that sums gradients, got gradient_op MEAN, which weighs them by rows "
            "that only backward knows; make the strategy with ReduceOp.SUM and divide losses by the global batch."
        )
    rows = [
        torch.zeros_like(parameter) if gradient is None else gradient.detach()
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    has_gradient = torch.tensor([float(gradient is not None) for gradient in gradients])
    *sums, counts = replica.all_reduce("sum", [*rows, has_gradient])
    return [total if count else None for total, count in zip(sums, counts.tolist(), strict=True)]


def offer(strategy: "Strategy", optimizer: Optimizer) -> None:
    """Give an optimizer of the scope the method that optimizers of TensorFlow have, unless it has one of this name.

    torch copies and pickles an optimizer without it.
    """
    if not hasattr(optimizer, "apply_gradients"):
        optimizer.apply_gradients = _Method(strategy, optimizer)  # type: ignore[attr-defined]


class _Method:
    """`optimizer.apply_gradients(grads_and_params)`, without a cycle from the optimizer to itself."""

    def __init__(self, strategy: "Strategy", optimizer: Optimizer) -> None:
        self._strategy, self._optimizer = strategy, weakref.ref(optimizer)

    def __call__(self, grads_and_params: GradientsAndParameters) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("apply_gradients: expected its optimizer alive, got it gone; keep it in a variable.")
        self._strategy.apply_gradients(optimizer, grads_and_params)
