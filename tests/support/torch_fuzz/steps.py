"""The steps of a program: how gradients are made, changed and used."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, smooth_l1_loss

from torch_fuzz.mistakes import MISTAKES
from torch_fuzz.models import Rows
from torch_fuzz.training import Step, nothing


def micro_step(step: Step, rows: Rows) -> Tensor:
    """Take one global batch of a step; with the last one, let the optimizer step. Return the sum of losses."""
    phase = step.phase
    backend = step.training.backend
    if phase.mistake:
        return MISTAKES[phase.mistake](step, rows)
    if step.is_first:
        zero_gradients(step)
    defers = phase.gradient == "no_sync" and not step.is_last
    with backend.no_sync() if defers else nothing():
        value = GRADIENTS[phase.gradient](step, rows)
    if step.is_last and phase.gradient not in MAKES_STEP:
        finish(step)
    return value


def zero_gradients(step: Step) -> None:
    """Zero gradients as the phase says: the optimizer's, or all where others would be mixed with local ones."""
    kind = step.phase.zero_grad
    is_mixing = step.phase.gradient in ("no_sync", "no_sync chunks")
    for optimizer in step.training.optimizers if is_mixing else [step.optimizer]:
        if kind != "never":
            optimizer.zero_grad(set_to_none=kind == "none")


def finish(step: Step) -> None:
    """Change the gradients, and let the optimizer step."""
    scaler = step.training.scaler
    if not step.phase.uses_scaler:
        clip(step)
        step.optimizer.step()
        return
    scaler.unscale_(step.optimizer)
    clip(step)
    scaler.step(step.optimizer)
    scaler.update()


def clip(step: Step) -> None:
    """Change the gradients in place."""
    kind = step.phase.clip
    backend = step.training.backend
    optimizer = step.optimizer
    parameters = step.parameters
    if kind == "norm":
        backend.clip_norm(optimizer, parameters, 0.05)
    elif kind == "merged norm":
        backend.merge(lambda: backend.clip_norm(optimizer, parameters, 0.05))
    elif kind == "value":
        backend.clip_value(optimizer, parameters, 0.01)
    elif kind == "scale":
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


# -- losses ----------------------------------------------------------------------------------------------------------


def row_losses(step: Step, rows: Rows) -> Tensor:
    """Return one loss for each row."""
    phase = step.phase
    training = step.training
    if phase.has_penalty:
        rows = {**rows, "x": rows["x"].detach().requires_grad_()}
    out = training.model(rows, phase.heads, step.number)
    if training.critic is not None and phase.trains_critic:
        losses = _critics_losses(step, out, rows)
    else:
        losses = _losses_of(phase.loss, out, rows)
    if phase.has_penalty:
        (slope,) = torch.autograd.grad(out.sum(), rows["x"], create_graph=True)
        losses = losses + 0.1 * slope.square().sum(1)
    return losses


def _critics_losses(step: Step, out: Tensor, rows: Rows) -> Tensor:
    critic = step.training.critic
    if step.is_critics:
        return (critic(out.detach()) - critic(rows["y"]))[:, 0].tanh() + critic(rows["y"])[:, 0].square()
    return -critic(out)[:, 0].tanh() + 0.1 * mse_loss(out, rows["y"], reduction="none").sum(1)


def _losses_of(kind: str, out: Tensor, rows: Rows) -> Tensor:
    if kind == "cross_entropy":
        return cross_entropy(out, rows["label"], reduction="none")
    loss = mse_loss if kind == "mse" else smooth_l1_loss
    return loss(out, rows["y"], reduction="none").sum(1)


def scaled(step: Step, losses: Tensor, rows: Rows) -> Tensor:
    """Return the loss of a step: scaled, regularized, and scaled up for small gradients."""
    phase = step.phase
    backend = step.training.backend
    loss = backend.scale(losses, rows["weight"] if phase.has_weights else None, step.n_rows)
    if phase.has_regularizer:
        loss = loss + backend.regularize(0.01 * sum(p.square().sum() for p in step.model.parameters()))
    if phase.uses_scaler:
        return step.training.scaler.scale(loss)
    return loss


# -- gradients -------------------------------------------------------------------------------------------------------


def by_backward(step: Step, rows: Rows) -> Tensor:
    losses = row_losses(step, rows)
    scaled(step, losses, rows).backward()
    return losses.detach().sum()


def by_two_backwards(step: Step, rows: Rows) -> Tensor:
    """Go backward twice through one graph."""
    losses = row_losses(step, rows)
    loss = scaled(step, losses, rows)
    loss.backward(retain_graph=True)
    loss.backward()
    return losses.detach().sum()


def by_terms(step: Step, rows: Rows) -> Tensor:
    """Go backward for one loss after the other, each with a forward of its own."""
    first = row_losses(step, rows)
    second = row_losses(step, rows).square() * 0.1
    scaled(step, first, rows).backward()
    scaled(step, second, rows).backward()
    return first.detach().sum()


def by_many_roots(step: Step, rows: Rows) -> Tensor:
    losses = row_losses(step, rows)
    roots = [scaled(step, losses, rows), scaled(step, losses.square() * 0.1, rows)]
    torch.autograd.backward(roots)
    return losses.detach().sum()


def by_some_inputs(step: Step, rows: Rows) -> Tensor:
    """Let the gradient reach every other parameter only, then all."""
    losses = row_losses(step, rows)
    used = [p for p in step.parameters if p.numel()][:: 2 - step.number % 2]
    loss = scaled(step, losses, rows)
    loss.backward(inputs=used, retain_graph=True)
    loss.backward()
    return losses.detach().sum()


def by_features(step: Step, rows: Rows) -> Tensor:
    """Go backward to the output first, then from there."""
    model = step.training.model
    out = model(rows, step.phase.heads, step.number)
    cut = out.detach().requires_grad_()
    losses = _losses_of(step.phase.loss, cut, rows)
    scaled(step, losses, rows).backward()
    out.backward(cut.grad)
    return losses.detach().sum()


def by_chunks(step: Step, rows: Rows) -> Tensor:
    """Go backward for halves of this replica's part; under no_sync but for the last."""
    total = rows["x"].new_zeros(())
    for index in range(2):
        half = {key: column[index::2] for key, column in rows.items()}
        defers = step.phase.gradient == "no_sync chunks" and index == 0
        with step.training.backend.no_sync() if defers else nothing():
            total = total + by_backward(step, half)
    return total


def by_closure(step: Step, rows: Rows) -> Tensor:
    """Let the optimizer call the closure, which returns a loss that is equal on all replicas."""
    values: list[Tensor] = []

    def closure() -> Tensor:
        step.optimizer.zero_grad(set_to_none=step.phase.zero_grad != "zeros")
        losses = row_losses(step, rows)
        scaled(step, losses, rows).backward()
        clip(step)
        values.append(losses.detach().sum())
        return step.training.backend.total_inside(values[-1])

    step.optimizer.step(closure)
    return values[0]


def _own_gradients(step: Step, rows: Rows) -> tuple[list[Tensor | None], Tensor]:
    losses = row_losses(step, rows)
    loss = scaled(step, losses, rows)
    return list(torch.autograd.grad(loss, step.parameters, allow_unused=True)), losses.detach().sum()


def by_applied_gradients(step: Step, rows: Rows) -> Tensor:
    """Let hpcdist sum gradients of autograd.grad."""
    gradients, value = _own_gradients(step, rows)
    pairs = list(zip(gradients, step.parameters, strict=True))
    step.training.backend.apply(step.optimizer, pairs, step.phase.gradient == "optimizer's method")
    return value


def by_own_sums(step: Step, rows: Rows) -> Tensor:
    """Sum gradients of autograd.grad by all_reduce, and set them."""
    gradients, value = _own_gradients(step, rows)
    local_gradients = []
    for g, p in zip(gradients, step.parameters, strict=True):
        if g is None:
            local_gradients.append(torch.zeros_like(p))
        else:
            local_gradients.append(g)
    for parameter, total in zip(step.parameters, step.training.backend.sums(local_gradients), strict=True):
        parameter.grad = total
    return value


def by_applied_sums(step: Step, rows: Rows) -> Tensor:
    """Give apply_gradients what backward has summed."""
    value = by_backward(step, rows)
    clip(step)
    pairs = [(p.grad, p) for p in step.parameters]
    step.training.backend.apply(step.optimizer, pairs, step.number % 2 == 0)
    return value


#: Ways to gradients by name.
GRADIENTS: dict[str, Callable[[Step, Rows], Any]] = {
    "backward": by_backward,
    "no_sync": by_backward,
    "twice": by_two_backwards,
    "terms": by_terms,
    "roots": by_many_roots,
    "inputs": by_some_inputs,
    "features": by_features,
    "chunks": by_chunks,
    "no_sync chunks": by_chunks,
    "closure": by_closure,
    "strategy's method": by_applied_gradients,
    "optimizer's method": by_applied_gradients,
    "own sums": by_own_sums,
    "applied sums": by_applied_sums,
}
#: Those that let the optimizer step, too.
MAKES_STEP = {"closure", "strategy's method", "optimizer's method", "applied sums"}
