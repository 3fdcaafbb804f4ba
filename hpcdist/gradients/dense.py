"""A dense gradient in memory of this rank: in a part of a flat bucket, or, if it is large, where torch made it."""

import torch
from torch import Tensor, nn

from hpcdist.gradients.slot import Slot, weigh
from hpcdist.program.tensors import is_only_holder


class DenseSlot(Slot):
    """One parameter with a dense gradient.

    Attributes:
        bucket: number of the bucket in which the gradient is summed.
        flat: memory that is summed: the part of the bucket, or, without a part, the memory of the gradient.
        view: the part of the bucket in the parameter's shape; None without a part.
        sum_view: memory of the sum in the parameter's shape. It is the memory of `view` where sums replace gradients.
        is_native: whether `parameter.grad` can be a view of the sum, as it has the parameter's device and dtype.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        self.bucket = -1
        self.flat: Tensor | None = None
        self.view: Tensor | None = None
        self.sum_view: Tensor | None = None
        self.is_native = True
        self._sums: Tensor | None = None

    def assign(
        self,
        bucket: int,
        memory: Tensor | None,
        sums: Tensor | None = None,
    ) -> None:
        """Take a part of a bucket in place of an earlier one.

        Args:
            bucket: number of the bucket.
            memory: flat memory of the part; None if the gradient is summed where torch made it.
            sums: flat memory of the sum; default: the part itself.
        """
        self.bucket = bucket
        self.flat = memory
        self.view = None
        self.sum_view = None
        self.is_native = True
        self.held_gradient = None
        if memory is not None:
            self.is_native = self.device == memory.device and self.dtype == memory.dtype
            self.view = self.shaped(memory)
            self._sums = memory if sums is None else sums
            self._make_sum_view(self._sums)

    def _make_sum_view(self, sums: Tensor) -> None:
        """Make a new view of the memory of the sum."""
        self.sum_view = self.shaped(sums)
        self.address = self.sum_view.data_ptr()
        if self.is_native:
            self.held_gradient = self.sum_view

    def take(self, gradient: Tensor | None, scale: float) -> None:
        """Take the gradient that this replica adds to the sum, and its weight; None for zeros."""
        if self.view is not None:
            if gradient is None:
                self.view.zero_()
            else:
                self.view.copy_(gradient)
        elif gradient is None:
            n_elements = self.shape.numel()
            self.flat = torch.zeros(n_elements, dtype=self.dtype, device=self.device)
        else:
            self.flat = self._flat_of(gradient)
        if gradient is not None and self.flat is not None:
            weigh(self.flat, scale)

    def _flat_of(self, gradient: Tensor) -> Tensor:
        """Return a gradient's memory as a flat tensor in the parameter's order.

        The memory is copied if it has another layout, or is shared: autograd may give views of one tensor, or a tensor
        of the user, to several leaves.
        """
        if self.stride is None:
            contiguous = gradient.clone(memory_format=torch.contiguous_format)
            return contiguous.view(-1)
        n_elements = self.shape.numel()
        if gradient.stride() != self.stride or not is_only_holder(gradient):
            copied = gradient.new_empty(n_elements)
            self.shaped(copied).copy_(gradient)
            return copied
        return gradient.as_strided((n_elements,), (1,), gradient.storage_offset())

    def keep_earlier(self, earlier: Tensor) -> Tensor:
        """Return the sum of an earlier backward in memory that the next sum does not overwrite."""
        if self.view is None or not self.is_native:
            return earlier
        return earlier.clone()

    def publish(
        self,
        parameter: nn.Parameter,
        earlier: Tensor | None,
        is_copied: bool,
    ) -> None:
        """Make `parameter.grad` the sum over all replicas; see `Slot.publish`."""
        result = self.summed()
        if not self.is_native:
            result = torch.empty_like(parameter).copy_(result)
        if earlier is not None:
            result.add_(earlier)
        if is_copied and self.view is not None and self.is_native:
            result = result.clone()
        self.leave(parameter, result)
        if self.view is None:
            # a gradient that was summed in its own memory belongs to the parameter again
            self.flat = None

    def summed(self) -> Tensor:
        """Return the sum, in the parameter's shape."""
        if self.sum_view is not None and self._sums is not None:
            if self.sum_view.data_ptr() != self.address:  # as Module.to leaves `parameter.grad`
                self._make_sum_view(self._sums)
            return self.sum_view
        assert self.flat is not None, "a gradient is taken before it is summed"
        return self.shaped(self.flat)

    def note_published(self, gradient: Tensor) -> None:
        """Remember a gradient that was published, not weakly if its memory belongs to the slot."""
        if gradient is self.sum_view:
            self.published = gradient
        else:
            super().note_published(gradient)
