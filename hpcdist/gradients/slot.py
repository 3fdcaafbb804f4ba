"""The base of the slots of all gradients: the states of `parameter.grad`, and the gradient published there.

Between two backwards `parameter.grad` is empty, local (accumulated under no_sync) or summed. `backward.py` empties it
before a synchronized backward, and autograd writes this replica's gradient. The slot takes the gradient, is summed, and
publishes the sum. There are three kinds: `dense.py`, `sparse.py` and `sharded.py`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.errors import GradientError
from hpcdist.program import tensor_internals
from hpcdist.program.tensors import has_values, is_dense


class Slot(ABC):
    """One trained parameter, and the sum of its gradient.

    The parameter is held weakly: its hook keeps the strategy alive, but the strategy does not keep the model alive. A
    parameter that is gone takes part in every sum as one without a gradient.

    Args:
        name: name of the parameter.
        parameter: the parameter, with the shape, dtype and device that it keeps.

    Attributes:
        name: name of the parameter.
        reference: a weak reference to the parameter.
        device: device of the parameter.
        dtype: dtype of the parameter.
        shape: shape of the parameter.
        stride: strides of the parameter; None if it does not fill a block of memory.
        held_gradient: gradient that is published after every sum to which no earlier sum is added; None where each sum
            is published in another tensor.
        published: gradient that was published last, where the slot keeps its memory; None elsewhere.
        address: address of the memory of `published`.
    """

    #: Whether the gradient is a part of a bucket, from its plan on.
    is_in_bucket = True

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.reference = tensor_internals.weak_reference(parameter)
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        self.stride: tuple[int, ...] | None = None
        if is_dense(parameter):
            self.stride = parameter.stride()
        self.held_gradient: Tensor | None = None
        self.published: Tensor | None = None
        self.address = 0
        self._published_weakly: TensorWeakRef | None = None
        self._weak_address = 0
        self._local: TensorWeakRef | None = None

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, or None when its model is gone."""
        return self.reference()

    @abstractmethod
    def publish(
        self,
        parameter: nn.Parameter,
        earlier: Tensor | None,
        is_copied: bool,
    ) -> None:
        """Make `parameter.grad` the sum over all replicas, at least one of which had a gradient.

        Args:
            parameter: parameter of the slot.
            earlier: sum of an earlier backward, which is added; None without one.
            is_copied: whether another replica may use the slot before all replicas have seen the sum.
        """

    def keep_earlier(self, earlier: Tensor) -> Tensor:
        """Return the sum of an earlier backward in memory that the next sum does not overwrite."""
        return earlier

    def has_zeros(self, stashed: Tensor) -> bool:
        """Return whether a gradient from before the backward is zero everywhere."""
        return not has_values(stashed)

    def require_kind(self, gradient: Tensor) -> None:
        """Raise GradientError unless the slot can take a gradient; on this rank only."""
        if gradient.is_sparse:
            raise GradientError(
                f"backward: expected a dense gradient, got a sparse one for {self.name!r}; give the module that holds "
                f"it the attribute sparse = True, as nn.Embedding(sparse=True) has, or make the gradient dense."
            )
        self.require_unconverted(gradient)

    def require_unconverted(self, gradient: Tensor) -> None:
        """Raise GradientError for a parameter that was moved or converted; on this rank only."""
        if gradient.dtype is not self.dtype or gradient.device != self.device:
            raise GradientError(
                f"backward: expected {self.name!r} on {self.device} as {self.dtype}, as at the first step, got "
                f"{gradient.device} {gradient.dtype}; move and convert the model before its first use."
            )

    def require_published(self, gradient: Tensor) -> None:
        """Raise GradientError for a gradient from before the backward that was set by hand; on this rank only."""
        if not self._is_last(gradient):
            raise GradientError(
                f"backward: expected the gradient of {self.name!r} as an earlier backward left it, got one set by "
                f"hand; call zero_grad() first, or change the gradient in place."
            )

    def leave(
        self,
        parameter: nn.Parameter | None,
        gradient: Tensor | None,
    ) -> None:
        """Leave a sum over all replicas, or nothing, in `parameter.grad`. The parameter may be gone."""
        if parameter is not None and parameter.grad is not gradient:
            parameter.grad = gradient
        self.published = self._published_weakly = self._local = None
        if gradient is not None:
            self.note_published(gradient)

    def note_published(self, gradient: Tensor) -> None:
        """Remember a gradient that was published, weakly, so that zero_grad() frees it."""
        self._published_weakly = TensorWeakRef(gradient)
        self._weak_address = gradient.data_ptr()

    def note_local(self, gradient: Tensor) -> TensorWeakRef:
        """Remember that `parameter.grad` is now a gradient of this replica only; return a weak reference to it."""
        self.published = self._published_weakly = None
        self._local = TensorWeakRef(gradient)
        return self._local

    @property
    def has_local(self) -> bool:
        """Whether `parameter.grad` is a gradient of this replica only, accumulated under no_sync."""
        parameter = self.reference()
        if parameter is None or parameter.grad is None or self._local is None:
            return False
        return self._local() is parameter.grad

    @property
    def holds_sum(self) -> bool:
        """Whether a sum was published, and `parameter.grad` has not become local since."""
        return self.published is not None or self._published_weakly is not None

    def _is_last(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the tensor that was published last."""
        if self.published is not None:
            return gradient is self.published
        return self._published_weakly is not None and gradient is self._published_weakly()

    def is_left(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the tensor that was published last, with unmoved memory."""
        address = self._weak_address if self.published is None else self.address
        return self._is_last(gradient) and address == gradient.data_ptr()

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view of a flat tensor with the shape, and if it was dense the strides, of the parameter."""
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


def weigh(flat: Tensor, scale: float) -> None:
    """Multiply the gradients that a replica adds to a sum by its weight."""
    if scale == 0:
        flat.zero_()  # not multiplied: there may be a NaN
    elif scale != 1:
        torch.mul(flat, scale, out=flat)
