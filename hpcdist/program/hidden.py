"""Gradients hidden from an optimizer whose step another replica of the process or another rank makes."""

from collections.abc import Sequence

from torch import Tensor, nn

from hpcdist.errors import GradientError


def hide_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Remove the gradients of parameters, so that the optimizer has nothing to do; return the gradients."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def restore_gradients(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor | None],
) -> None:
    """Put hidden gradients back.

    Raises:
        GradientError: when the step has made gradients in a closure; on this rank only.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None:
            raise GradientError(
                "step: expected a step without a closure, as it is made once for all, got a gradient made in it; "
                "call backward before optimizer.step()."
            )
        parameter.grad = gradient
