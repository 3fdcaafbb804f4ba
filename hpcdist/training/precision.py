"""Mixed precision by the names of Keras: forward passes in half precision, and a loss scale for float16."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.errors import NotFiniteError, UsageError

#: Policy -> the dtype in which layers that gain by it compute. None for the dtype of their parameters.
POLICIES = {"float32": None, "mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}
#: The first scale, and the steps without overflow after which it doubles, as keras.optimizers.LossScaleOptimizer.
_FIRST_SCALE = 2.0**15
_GROWTH_STEPS = 2000


def dtype_of(policy: str) -> torch.dtype | None:
    """Return the dtype of a policy by name.

    Raises:
        UsageError: for an unknown name.
    """
    if policy not in POLICIES:
        raise UsageError(
            f"compile: expected dtype_policy of {', '.join(POLICIES)}, got {policy!r}; leave it out for float32."
        )
    return POLICIES[policy]


class LossScale:
    """Multiplies losses, so that small gradients do not vanish in float16; half as large after each overflow.

    All ranks agree on it without a message: they look at the sums of gradients over all replicas, which have the same
    bits everywhere.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.

    Attributes:
        scale: factor of the losses of the next step.
    """

    def __init__(self) -> None:
        self.scale = _FIRST_SCALE
        self._n_good = 0
        self._has_overflow = self._is_removed = False

    def remove_from(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Divide summed gradients by the scale; return whether they are finite, so that the optimizer may step.

        Called by each replica of a rank, whose gradients are equal.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            sums = torch.stack([gradient.abs().sum(dtype=torch.float64) for gradient in gradients])
        else:
            sums = torch.zeros(1)
        self._has_overflow = not bool(torch.isfinite(sums).all())
        self._is_removed = True
        for gradient in gradients:
            gradient.mul_(1 / self.scale)
        return not self._has_overflow

    def update(self) -> None:
        """Choose the scale of the next step, once for all replicas of the rank; nothing while gradients accumulate.

        Raises:
            NotFiniteError: when gradients are not finite without any scale; on all ranks.
        """
        if not self._is_removed:
            return
        self._is_removed = False
        if self._has_overflow and self.scale <= 1:
            raise NotFiniteError(
                "fit: expected finite gradients, got infinite or NaN ones with a loss scale of 1: it is no overflow of "
                "float16; look at the data, or take a smaller learning rate."
            )
        if self._has_overflow:
            self._n_good = 0
            self.scale /= 2
            return
        self._n_good += 1
        if self._n_good == _GROWTH_STEPS:
            self.scale = self.scale * 2
            self._n_good = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps since its last change. Equal on all ranks."""
        return {"scale": self.scale, "n_good": self._n_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier run."""
        self.scale = state["scale"]
        self._n_good = state["n_good"]


def as_float32(value: Any) -> Any:
    """Return an output in float32 where it is in half precision, for losses and metrics."""
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
