"""Steps on gradients that the program has computed itself, as by torch.autograd.grad, summed over all replicas."""

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import UsageError
from hpcdist.nest import form_of
from hpcdist.program import owners
from hpcdist.program.tensors import has_values
from hpcdist.strategy.cross_replica_context import CrossReplicaContext
from hpcdist.strategy.reduce import reduce_in_replica

#: Pairs of a gradient, or None where the loss does not depend on the parameter, and the parameter.
GradientsAndParameters = Iterable[tuple[Tensor | None, Tensor]]


def apply_gradients(
    strategy: CrossReplicaContext,
    optimizer: Optimizer,
    pairs: GradientsAndParameters,
) -> None:
    """Step on sums of gradients; see `Strategy.apply_gradients`.

    Collective over all replicas. Called inside a replica.
    """
    gradients, parameters = _split(optimizer, list(pairs))
    present_gradients = [gradient for gradient in gradients if gradient is not None]
    are_noted = strategy.sums.are_noted(present_gradients)
    are_summed = strategy.sums.are_summed_gradients(present_gradients)
    are_sums = [
        is_noted or is_summed for is_noted, is_summed in zip(are_noted, are_summed, strict=True)
    ]
    if not present_gradients or not all(are_sums):
        if any(are_sums):
            raise UsageError(
                "apply_gradients: expected gradients that are all summed or all of this replica, got some that "
                "backward or all_reduce has summed; pass p.grad of every parameter, or none."
            )
        _require_unsummed(strategy, parameters)
        gradients = _sums(strategy, gradients, parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for gradient, parameter in zip(gradients, parameters, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _split(
    optimizer: Optimizer,
    pairs: list[tuple[Tensor | None, Tensor]],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the gradients and the parameters of pairs; raise UsageError where they do not fit."""
    parameter_ids: set[int] = set()
    for group in optimizer.param_groups:
        parameter_ids.update(map(id, group["params"]))
    gradients: list[Tensor | None] = []
    parameters: list[Tensor] = []
    for gradient, parameter in pairs:
        if id(parameter) not in parameter_ids:
            raise UsageError(
                f"apply_gradients: expected (gradient, parameter) pairs of the optimizer's parameters, got a "
                f"{type(parameter).__name__} that is none of them; pass zip(gradients, model.parameters())."
            )
        if gradient is not None and gradient.shape != parameter.shape:
            raise UsageError(
                f"apply_gradients: expected a gradient of shape {tuple(parameter.shape)}, as its parameter, got "
                f"{tuple(gradient.shape)}; pass zip(gradients, parameters) in the same order."
            )
        gradients.append(gradient)
        parameters.append(parameter)
    return gradients, parameters


def _require_unsummed(strategy: CrossReplicaContext, parameters: list[Tensor]) -> None:
    """Raise where a backward has left sums in parameters, as the caller's gradients may be made of these sums."""
    leftover_gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    are_sums = strategy.sums.are_summed_gradients(leftover_gradients)
    for is_sum, gradient in zip(are_sums, leftover_gradients, strict=True):
        if is_sum and has_values(gradient):
            raise UsageError(
                "apply_gradients: expected gradients of this replica, got others than those that backward has summed "
                "and left in p.grad; pass p.grad itself, changed in place if need be, or call zero_grad() before."
            )


def _sums(
    strategy: CrossReplicaContext,
    gradients: list[Tensor | None],
    parameters: list[Tensor],
) -> list[Tensor | None]:
    """Return the sums over all replicas; None where no replica has a gradient."""
    is_mean = strategy.sums.is_mean
    if is_mean is not False and strategy.num_replicas_in_sync > 1:
        op_text = "MEAN, which weighs them by rows that only backward knows" if is_mean else "none"
        raise UsageError(
            f"apply_gradients: expected a strategy that sums gradients, got gradient_op {op_text}; scale the loss by "
            f"hpcdist.compute_average_loss, or divide it by the global batch and make the strategy with ReduceOp.SUM."
        )
    rows: list[Tensor] = []
    has_gradient: list[float] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            rows.append(torch.zeros_like(parameter))
        else:
            rows.append(gradient.detach())
        has_gradient.append(float(gradient is not None))
    rows.append(torch.tensor(has_gradient))
    reduced = reduce_in_replica(strategy.replicas, ReduceOp.SUM, rows, form_of(rows))
    strategy.sums.note_sums(reduced)
    *totals, counts = reduced
    return [total if count else None for total, count in zip(totals, counts.tolist(), strict=True)]


class AppliesGradients(owners.Owner, Protocol):
    """A strategy, as an optimizer's method `apply_gradients` needs it."""

    def apply_gradients(
        self,
        optimizer: Optimizer,
        grads_and_params: GradientsAndParameters,
    ) -> None:
        """Sum gradients over all replicas, and step."""


def offer(strategy: AppliesGradients, optimizer: Optimizer) -> None:
    """Give an optimizer of the scope the method `apply_gradients`, as in TensorFlow, unless it has one of this name.

    torch copies and pickles an optimizer without the method.
    """
    if not hasattr(optimizer, "apply_gradients"):
        optimizer.apply_gradients = _Method(strategy, optimizer)  # type: ignore[attr-defined]


class _Method:
    """`optimizer.apply_gradients(grads_and_params)`.

    A strategy with several replicas lives as long as its models, not as long as an optimizer: helpers outside of scopes
    look for strategies that are alive. So it is referred to weakly.
    """

    _strategy: Callable[[], AppliesGradients | None]

    def __init__(self, strategy: AppliesGradients, optimizer: Optimizer) -> None:
        if any(strategy is owner for owner in owners.alive()):
            self._strategy = weakref.ref(strategy)
        else:
            self._strategy = lambda: strategy
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, grads_and_params: GradientsAndParameters) -> None:
        strategy = self._strategy()
        optimizer = self._optimizer()
        if strategy is None or optimizer is None:
            raise UsageError(
                "apply_gradients: expected the optimizer, and a model made in the strategy's scope, alive, got one "
                "that is gone; keep them in variables."
            )
        strategy.apply_gradients(optimizer, grads_and_params)
