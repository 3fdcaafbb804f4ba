"""All of an optimizer's work on the only rank of a job, which owns every parameter whole."""

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.program import torch_hooks
from hpcdist.storage.shares import (
    Groups,
    States,
    blocks_of,
    flat_gradient,
    norm_of_blocks,
    without_parameters,
)


class Undivided:
    """The whole work of an optimizer, in place of the `Shares` of several ranks.

    Args:
        groups: groups of the optimizer that the program made: parameters and options.
        inner: the plain optimizer of the same parameters.
    """

    def __init__(self, groups: Groups, inner: Optimizer) -> None:
        self._inner = inner
        self._parameters: list[nn.Parameter] = []
        for options in groups:
            self._parameters += options["params"]

    def step(self, groups: Groups) -> None:
        """Step all parameters, with the present options of the groups."""
        for options, inner_options in zip(groups, self._inner.param_groups, strict=True):
            inner_options.update(without_parameters(options))
        torch_hooks.bare_step(type(self._inner))(self._inner)

    def gradients(self) -> list[Tensor]:
        """Return all gradients, to be changed in place."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def norm(self, order: float) -> float:
        """Return the norm of all gradients."""
        shares: list[tuple[int, Tensor | None]] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                gradient = flat_gradient(parameter, gradient)
            shares.append((0, gradient))
        blocks = blocks_of(self._parameters, shares, order)
        return norm_of_blocks(blocks, order)

    def read(self) -> States:
        """Return the state by the numbers of the parameters."""
        states: States = {}
        for number, parameter in enumerate(self._parameters):
            state = self._inner.state.get(parameter)
            if state:
                states[number] = dict(state)
        return states

    def write(self, states: States) -> None:
        """Take the state by the numbers of the parameters."""
        state_dict = {**self._inner.state_dict(), "state": states}
        self._inner.load_state_dict(state_dict)
