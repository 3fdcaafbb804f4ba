"""The options of `Model.compile`: how a model steps, beside its optimizer, losses and metrics."""

from dataclasses import dataclass

import torch

from hpcdist.errors import UsageError
from hpcdist.training.precision import dtype_of


@dataclass(frozen=True)
class CompileOptions:
    """The options of `Model.compile`, under its names.

    Raises:
        UsageError: for a value out of range, or an unknown policy.
    """

    jit_compile: bool = False
    steps_per_execution: int = 1
    global_clipnorm: float | None = None
    gradient_accumulation_steps: int = 1
    dtype_policy: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps_per_execution", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"compile: expected {name} of at least 1, got {value!r}; leave it out for 1."
                )
        norm = self.global_clipnorm
        if norm is not None and not norm > 0:
            raise UsageError(
                f"compile: expected global_clipnorm above 0, got {norm!r}; leave it out."
            )
        dtype_of(self.dtype_policy)

    @property
    def half(self) -> torch.dtype | None:
        """The dtype in which layers that gain by it compute. None for the dtype of their parameters."""
        return dtype_of(self.dtype_policy)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled, so that small gradients do not vanish in float16."""
        return self.half == torch.float16

    @property
    def changes_gradients(self) -> bool:
        """Whether a step does more than to call the optimizer."""
        return self.scales_losses or self.global_clipnorm is not None
