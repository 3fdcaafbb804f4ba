"""Steps that do something wrong: hpcdist must refuse them, or leave what one process would."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from torch_fuzz.models import Rows
from torch_fuzz.training import Step


def _backward(step: Step, rows: Rows) -> Tensor:
    from torch_fuzz.steps import by_backward

    return by_backward(step, rows)


def _loss(step: Step, rows: Rows) -> tuple[Tensor, Tensor]:
    from torch_fuzz.steps import row_losses, scaled

    losses = row_losses(step, rows)
    return scaled(step, losses, rows), losses.detach().sum()


def replace_gradient(step: Step, rows: Rows) -> Tensor:
    """Replace gradients between backward and step."""
    step.optimizer.zero_grad()
    value = _backward(step, rows)
    for parameter in step.parameters[::2]:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    step.optimizer.step()
    return value


def replace_data(step: Step, rows: Rows) -> Tensor:
    """Replace the memory of gradients."""
    step.optimizer.zero_grad()
    value = _backward(step, rows)
    for parameter in step.parameters:
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5
    step.optimizer.step()
    return value


def gradient_before_backward(step: Step, rows: Rows) -> Tensor:
    """Set gradients that are no sums, and go backward."""
    step.optimizer.zero_grad()
    for parameter in step.parameters:
        parameter.grad = torch.full_like(parameter, 0.125)
    value = _backward(step, rows)
    step.optimizer.step()
    return value


def zeros_before_backward(step: Step, rows: Rows) -> Tensor:
    """Set gradients to new zeros instead of zero_grad."""
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    value = _backward(step, rows)
    step.optimizer.step()
    return value


def step_without_backward(step: Step, rows: Rows) -> Tensor:
    """Step twice for one backward, then once without any."""
    step.optimizer.zero_grad()
    value = _backward(step, rows)
    step.optimizer.step()
    step.optimizer.step()
    step.optimizer.zero_grad()
    step.optimizer.step()
    return value


def step_on_local_gradients(step: Step, rows: Rows) -> Tensor:
    step.optimizer.zero_grad()
    with step.training.backend.no_sync():
        value = _backward(step, rows)
        step.optimizer.step()
    return value


def closure_under_no_sync(step: Step, rows: Rows) -> Tensor:
    """Let the optimizer call a closure whose gradients nobody sums."""
    values = []

    def closure() -> Tensor:
        step.optimizer.zero_grad()
        values.append(_backward(step, rows))
        return values[-1]

    with step.training.backend.no_sync():
        step.optimizer.step(closure)
    return values[0]


def closure_of_own_gradients(step: Step, rows: Rows) -> Tensor:
    """Let the optimizer call a closure that sets gradients of this replica."""
    values = []

    def closure() -> Tensor:
        loss, value = _loss(step, rows)
        gradients = torch.autograd.grad(loss, step.parameters, allow_unused=True)
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient
        values.append(value)
        return value

    step.optimizer.step(closure)
    return values[0]


def own_gradients(step: Step, rows: Rows) -> Tensor:
    """Step on gradients of this replica."""
    loss, value = _loss(step, rows)
    gradients = torch.autograd.grad(loss, step.parameters, allow_unused=True)
    for parameter, gradient in zip(step.parameters, gradients, strict=True):
        parameter.grad = gradient
    step.optimizer.step()
    return value


def gradient_after_no_sync(step: Step, rows: Rows) -> Tensor:
    """Throw local gradients away, set others by hand, and go backward."""
    with step.training.backend.no_sync():
        _backward(step, rows)
    step.optimizer.zero_grad()
    for parameter in step.parameters:
        parameter.grad = torch.full_like(parameter, 0.125)
    value = _backward(step, rows)
    step.optimizer.step()
    step.optimizer.zero_grad()
    return value


def applied_after_no_sync(step: Step, rows: Rows) -> Tensor:
    """Step on own gradients while local ones are there, then accumulate on what that has left."""
    step.optimizer.zero_grad()
    with step.training.backend.no_sync():
        _backward(step, rows)
    loss, value = _loss(step, rows)
    gradients = torch.autograd.grad(loss, step.parameters, allow_unused=True)
    step.training.backend.apply(step.optimizer, list(zip(gradients, step.parameters, strict=True)), False)
    _backward(step, rows)
    step.optimizer.step()
    step.optimizer.zero_grad()
    return value


def accumulate_on_applied(step: Step, rows: Rows) -> Tensor:
    """Accumulate on what apply_gradients has left, zeroed in place."""
    loss, value = _loss(step, rows)
    gradients = torch.autograd.grad(loss, step.parameters, allow_unused=True)
    step.training.backend.apply(step.optimizer, list(zip(gradients, step.parameters, strict=True)), False)
    step.optimizer.zero_grad(set_to_none=False)
    _backward(step, rows)
    step.optimizer.step()
    return value


def graph_of_gradients(step: Step, rows: Rows) -> Tensor:
    step.optimizer.zero_grad()
    loss, value = _loss(step, rows)
    loss.backward(create_graph=True)
    step.optimizer.step()
    return value


def backward_through_freed_graph(step: Step, rows: Rows) -> Tensor:
    step.optimizer.zero_grad()
    loss, value = _loss(step, rows)
    loss.backward()
    loss.backward()
    step.optimizer.step()
    return value


def failed_backward(step: Step, rows: Rows) -> Tensor:
    """Catch an error of a backward, zero, and go on."""
    step.optimizer.zero_grad()
    loss, value = _loss(step, rows)
    handle = step.parameters[0].register_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):  # the program catches its own hook's error, and goes on
        loss.backward()
    handle.remove()
    step.optimizer.zero_grad()
    _backward(step, rows)
    step.optimizer.step()
    return value


def _fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def foreign_parameter(step: Step, rows: Rows) -> Tensor:
    """Let the loss reach a parameter made outside of the scope, which the optimizer steps too."""
    foreign = torch.nn.Parameter(torch.ones(1, dtype=step.training.dtype))
    step.training.kept.append(foreign)
    step.optimizer.add_param_group({"params": [foreign]})
    step.optimizer.zero_grad()
    loss, value = _loss(step, rows)
    (loss * foreign.sum()).backward()
    step.optimizer.step()
    return value


def write_in_step(step: Step, rows: Rows) -> Tensor:
    """Write to weights in the step, alike in all replicas."""
    step.optimizer.zero_grad()
    value = _backward(step, rows)
    step.optimizer.step()
    with torch.no_grad():
        for parameter in step.parameters:
            parameter.mul_(0.99)
    return value


def write_data_in_step(step: Step, rows: Rows) -> Tensor:
    """Write to weights past torch's counters."""
    step.optimizer.zero_grad()
    for parameter in step.parameters:
        parameter.data.mul_(0.99)
    value = _backward(step, rows)
    step.optimizer.step()
    return value


def unscaled_loss(step: Step, rows: Rows) -> Tensor:
    """Go backward for a loss that nobody scaled: a sum over rows, where gradients are not averaged."""
    from torch_fuzz.steps import row_losses

    step.optimizer.zero_grad()
    losses = row_losses(step, rows)
    if step.training.program.combine == "mean":
        loss = losses.mean()
    else:
        loss = losses.sum() / step.n_rows
    loss.backward()
    step.optimizer.step()
    return losses.detach().sum()


def step_in_backward(step: Step, rows: Rows) -> Tensor:
    """Step from a hook, as soon as a gradient is there."""
    step.optimizer.zero_grad()
    last = step.parameters[-1]
    handle = last.register_post_accumulate_grad_hook(lambda parameter: step.optimizer.step())
    try:
        return _backward(step, rows)
    finally:
        handle.remove()  # torch's hooks would keep the program alive


#: Mistakes by name.
MISTAKES: dict[str, Callable[[Step, Rows], Tensor]] = {
    "replaced gradient": replace_gradient,
    "replaced data": replace_data,
    "gradient before backward": gradient_before_backward,
    "zeros before backward": zeros_before_backward,
    "step without backward": step_without_backward,
    "step on local gradients": step_on_local_gradients,
    "closure under no_sync": closure_under_no_sync,
    "closure of own gradients": closure_of_own_gradients,
    "own gradients": own_gradients,
    "gradient after no_sync": gradient_after_no_sync,
    "applied after no_sync": applied_after_no_sync,
    "accumulation on applied": accumulate_on_applied,
    "graph of gradients": graph_of_gradients,
    "freed graph": backward_through_freed_graph,
    "failed backward": failed_backward,
    "foreign parameter": foreign_parameter,
    "write in step": write_in_step,
    "write data in step": write_data_in_step,
    "unscaled loss": unscaled_loss,
    "step in backward": step_in_backward,
}
