"""The value of `parameter.grad` where a rank holds only its share of a summed gradient.

torch's code for gradients cannot know this: it would calculate the norm of the share. So `parameter.grad` is a tensor
without memory, of the parameter's shape and dtype, whose operations raise an error. The exceptions mean the same for
each share: to zero the gradient, and the check and unscaling of a GradScaler.
"""

from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import OPS
from hpcdist.errors import GradientError
from hpcdist.program import tensor_internals


class ShardedGradient(Tensor):
    """The value of `parameter.grad` after a sum by shares.

    Attributes:
        share: flat tensor of this rank's elements of the sum; only the optimizer may read and change it.
        is_zero: whether `zero_` was called since the sum.
    """

    share: Tensor
    is_zero: bool
    _name: str
    _group: Group

    @staticmethod
    def __new__(
        cls,
        parameter: Tensor,
        share: Tensor,
        name: str,
        group: Group,
    ) -> "ShardedGradient":
        """Return the gradient of a parameter, whose name errors show."""
        gradient: ShardedGradient = tensor_internals.make_memoryless(cls, parameter)
        gradient.share = share
        gradient.is_zero = False
        gradient._name = name
        gradient._group = group
        return gradient

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        n_local = self.share.numel()
        return (
            f"ShardedGradient(of {self._name!r}, {n_local} of {self.numel()} elements on this rank)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Zero or unscale the gradient; raise GradientError for all other operations."""
        is_list = bool(args) and isinstance(args[0], (list, tuple))
        operands = args[0] if is_list else args[:1]
        gradients = [operand for operand in operands if isinstance(operand, cls)]
        if func in tensor_internals.ZEROING:
            for operand in operands:
                _zero(operand)
            return None if is_list else args[0]
        if func is tensor_internals.UNSCALING and len(gradients) == len(operands):
            return _unscale(gradients, *args[1:])
        if not gradients:
            values = (*args, *(kwargs or {}).values())
            gradients = [value for value in values if isinstance(value, cls)]
        if not gradients:
            raise _refusal("a parameter", func.__name__, "")
        raise gradients[0].refusal(func.__name__)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Raise GradientError: there is no memory to share."""
        raise self.refusal("__dlpack__")

    def refusal(self, call: str) -> GradientError:
        """Return the error of an operation that needs all elements."""
        rank = self._group.world.describe()
        return _refusal(repr(self._name), call, f" on {rank}")


def _refusal(name: str, call: str, where: str) -> GradientError:
    return GradientError(
        f"gradient: expected nobody to use the gradient of {name}, of which each rank holds its share of the sum only, "
        f"got {call}{where}; call clip_grad_norm_ or clip_grad_value_ of the ZeroRedundancyOptimizer, or train with a "
        f"plain optimizer."
    )


def _zero(gradient: Tensor) -> None:
    """Zero a whole gradient, or this rank's share of one."""
    if isinstance(gradient, ShardedGradient):
        gradient.is_zero = True
        gradient = gradient.share
    gradient.zero_()


def _unscale(
    gradients: list[ShardedGradient],
    found_inf: Tensor,
    inverse_scale: Tensor,
) -> None:
    """Unscale shares, and let all ranks know whether any has found infinity or NaN. Collective over the group."""
    shares = [gradient.share for gradient in gradients]
    tensor_internals.unscale(shares, found_inf, inverse_scale)
    group = gradients[0]._group
    is_infinite = np.array([float(found_inf)], np.float32)
    with group.recorded("found_inf", is_infinite):
        library.all_reduce(is_infinite, group, OPS["max"])
    found_inf.fill_(float(is_infinite[0]))
