"""Optimizers that make the steps of Keras 3, where torch's optimizers of the same name make different steps.

They are subclasses of torch's, with torch's settings and names of state. Most differ by where epsilon is added, which
decides how far small gradients move a parameter.

Source: keras/src/optimizers (Keras 3).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.program import tensor_internals, torch_hooks

Closure = Callable[[], Any]


class _StepCounts:
    """The number of steps that an optimizer has made of each parameter.

    A counter on the host is read. A counter on a GPU is read only where its value is not known, as it is waited for.
    """

    def __init__(self) -> None:
        # id of the parameter -> torch's counter, and its value
        self._step_counts: dict[int, tuple[Tensor, int]] = {}

    def next_number(self, parameter: nn.Parameter, state: dict[str, Any]) -> int:
        """Return the number of the current step, from 1. Call it once for each step of a parameter."""
        counter = state.get("step")
        if counter is None:
            return 1
        if not counter.is_cuda:
            return int(counter) + 1
        cached_count = self._step_counts.get(id(parameter))
        n_made = (
            cached_count[1]
            if cached_count is not None and cached_count[0] is counter
            else int(counter)
        )
        self._step_counts[id(parameter)] = (counter, n_made + 1)
        return n_made + 1

    def forget(self) -> None:
        """Read all counters at the next step: this step may not count, such as if a GradScaler finds an overflow."""
        self._step_counts = {}


def _groups_by_step(
    optimizer: Optimizer, counts: _StepCounts
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield groups of parameters that have a gradient and are at the same step, and the number of this step."""
    for group in optimizer.param_groups:
        by_number: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                number = counts.next_number(parameter, optimizer.state[parameter])
                by_number.setdefault(number, []).append(parameter)
        for number, parameters in by_number.items():
            yield {**group, "params": parameters}, number


def _loss_of(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class _Counting(Optimizer):
    """An optimizer that knows the number of the step it makes."""

    #: On parameter servers: an element of a parameter changes by this element's gradient alone.
    is_elementwise = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._counts = _StepCounts()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._counts = _StepCounts()


class _ScalesEpsilon(_Counting):
    """Makes torch's step with the epsilon that gives Keras' step.

    Keras divides by sqrt(v) + epsilon and corrects the bias of both moments outside; torch corrects the bias of v
    first.
    """

    _torch_kind: type[Optimizer]

    def step(self, closure: Closure | None = None) -> Any:
        """Make a step; return what the closure returns."""
        loss = _loss_of(closure)
        if getattr(self, "found_inf", None) is not None:
            self._counts.forget()
        groups = self.param_groups
        try:
            for group, number in _groups_by_step(self, self._counts):
                _, beta2 = group["betas"]
                group["eps"] /= (1 - beta2**number) ** 0.5
                self.param_groups = [group]
                torch_hooks.bare_step(self._torch_kind)(self)
        finally:
            self.param_groups = groups
        return loss


class Adam(_ScalesEpsilon, torch.optim.Adam):
    """Adam with epsilon added to the root of the second moment before its bias is corrected.

    Args: see `torch.optim.Adam`.
    """

    _torch_kind = torch.optim.Adam


class AdamW(_ScalesEpsilon, torch.optim.AdamW):
    """`Adam` with weight decay apart from the gradients.

    Args: see `torch.optim.AdamW`.
    """

    _torch_kind = torch.optim.AdamW


class RMSprop(torch.optim.RMSprop):
    """RMSprop with epsilon under the root.

    Args: lr, alpha and eps of `torch.optim.RMSprop`; neither momentum nor centered.
    """

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Make a step; return what the closure returns."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = _gradients_of(parameters, "RMSprop")
            squares = _states_of(self, parameters, ["square_avg"])["square_avg"]
            if parameters:
                tensor_internals.move_mean_squares(squares, gradients, group["alpha"])
                divisors = tensor_internals.roots_of(squares, group["eps"])
                tensor_internals.subtract_quotients(parameters, gradients, divisors, group["lr"])
        return loss


class Adamax(_Counting, torch.optim.Adamax):
    """Adamax with epsilon added to the largest gradient when it divides, not before it is compared.

    Args: lr, betas and eps of `torch.optim.Adamax`.
    """

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Make a step; return what the closure returns."""
        loss = _loss_of(closure)
        for group, number in _groups_by_step(self, self._counts):
            parameters = group["params"]
            beta1, beta2 = group["betas"]
            gradients = _gradients_of(parameters, "Adamax")
            states = _states_of(self, parameters, ["exp_avg", "exp_inf"])
            tensor_internals.move_means(states["exp_avg"], gradients, beta1)
            divisors = tensor_internals.move_maxima(
                states["exp_inf"], gradients, beta2, group["eps"]
            )
            rate = group["lr"] / (1 - beta1**number)
            tensor_internals.subtract_quotients(parameters, states["exp_avg"], divisors, rate)
        return loss


def _gradients_of(parameters: list[nn.Parameter], name: str) -> list[Tensor]:
    gradients: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "those without one were left out"
        if gradient.is_sparse:
            raise RuntimeError(f"{name} does not support sparse gradients")  # torch's words
        gradients.append(gradient)
    return gradients


def _states_of(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    names: list[str],
) -> dict[str, list[Tensor]]:
    """Return the state of parameters by name, zeros before the first step; count the current step."""
    states: dict[str, list[Tensor]] = {name: [] for name in names}
    for parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        for name in names:
            states[name].append(state[name])
    return states
