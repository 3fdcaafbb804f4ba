"""What `parameter.grad` is where a rank holds its share of a summed gradient only.

torch's code for gradients cannot know that: a norm of them would be that of the share. So what is there is a tensor
without memory, of the parameter's shape and dtype, that answers every operation with an error, but for those that mean
the same for each share: to zero it, and the check and unscaling of a GradScaler.
"""

from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import OPS
from hpcdist.errors import GradientError
from hpcdist.program import torch_hooks


class ShardedGradient(Tensor):
    """What `parameter.grad` is after a sum by shares.

    Attributes:
        share: flat, this rank's elements of the sum; to be read and changed by the optimizer alone.
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
        """Return the gradient of a parameter by its name."""
        gradient: ShardedGradient = torch_hooks.make_memoryless(cls, parameter)
        gradient.share = share
        gradient.is_zero = False
        gradient._name = name
        gradient._group = group
        return gradient

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient(of {self._name!r}, {self.share.numel()} of {self.numel()} elements on this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Zero it or unscale it; raise GradientError for all else."""
        first = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        gradients = [gradient for gradient in first if isinstance(gradient, cls)]
        if func in torch_hooks.ZEROING:
            for gradient in first:
                _zero(gradient)
            return None if isinstance(args[0], (list, tuple)) else args[0]
        if func is torch_hooks.UNSCALING and len(gradients) == len(first):
            return _unscale(gradients, *args[1:])
        if not gradients:
            gradients = [
                value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)
            ]
        if not gradients:
            raise _refusal("a parameter", func.__name__, "")
        raise gradients[0].refusal(func.__name__)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Raise GradientError: there is no memory to share."""
        raise self.refusal("__dlpack__")

    def refusal(self, call: str) -> GradientError:
        """Return the error of an operation that needs all elements."""
        return _refusal(repr(self._name), call, f" on {self._group.world.describe()}")


def _refusal(name: str, call: str, where: str) -> GradientError:
    return GradientError(
        f"gradient: expected nobody to use the gradient of {name}, of which each rank holds its share of the sum only, "
        f"got {call}{where}; call clip_grad_norm_ or clip_grad_value_ of the ZeroRedundancyOptimizer, or train with a "
        f"plain optimizer."
    )


def _zero(gradient: Tensor) -> None:
    if isinstance(gradient, ShardedGradient):
        gradient.is_zero = True
        gradient = gradient.share
    gradient.zero_()


def _unscale(gradients: list[ShardedGradient], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale shares, and let all ranks know whether any has found infinity or NaN. Collective over the group."""
    torch_hooks.unscale([gradient.share for gradient in gradients], found_inf, inverse_scale)
    group = gradients[0]._group
    is_infinite = np.array([float(found_inf)], np.float32)
    with group.recorded("found_inf", is_infinite):
        library.all_reduce(is_infinite, group, OPS["max"])
    found_inf.fill_(float(is_infinite[0]))
