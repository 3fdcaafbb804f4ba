"""A gradient of whose sum this rank holds only a share; see `storage/zero_redundancy.py`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.collectives.group import Group
from hpcdist.gradients.dense import DenseSlot
from hpcdist.gradients.slot import Slot
from hpcdist.storage.sharded_gradient import ShardedGradient


class _ShardedPart(NamedTuple):
    """This rank's share of a part of a bucket, and the `parameter.grad` that is published when the share is summed."""

    share: Tensor
    gradient: ShardedGradient


class ShardedSlot(Slot):
    """One parameter whose gradient is summed by shares.

    The gradient is taken in the memory of a `DenseSlot`. Two parts of a bucket are used in turn. Each part has a
    gradient object that is made once, as making it takes longer than a small sum.

    Args:
        name: name of the parameter.
        parameter: the parameter.
        group: the ranks that own the shares.

    Attributes:
        whole: slot of the whole gradient that is summed.
        owned_range: (start, stop) of this rank's share in the parameter's memory.
        ranges: (start, stop) of each owner's share; empty before the first plan, and the same in later plans.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        group: Group,
    ) -> None:
        super().__init__(name, parameter)
        self._group = group
        self.whole = DenseSlot(name, parameter)
        self.owned_range = (0, 0)
        self.ranges: Sequence[tuple[int, int]] = ()
        self._parts: list[_ShardedPart] = []

    def assign(
        self,
        bucket: int,
        parts: Sequence[Tensor],
        ranges: Sequence[tuple[int, int]],
        owner: int,
    ) -> None:
        """Take two parts of a bucket, used in turn, or none, and the shares of all owners.

        Args:
            bucket: number of the bucket.
            parts: flat memory of both parts; empty if the gradient is summed where torch made it.
            ranges: (start, stop) of each owner's share.
            owner: number of this rank among the owners; a larger number for a rank that owns no share.
        """
        self.ranges = ranges
        self.owned_range = (0, 0)
        if owner < len(ranges):
            self.owned_range = ranges[owner]
        parameter = self.parameter
        assert parameter is not None, "plans hold the parameters"
        self._parts = []
        for part in parts:
            share = self.owned_part(part)
            gradient = self._new_gradient(parameter, share)
            self._parts.append(_ShardedPart(share, gradient))
        self.whole.assign(bucket, parts[0] if parts else None)

    @property
    def bucket(self) -> int:
        """Number of the bucket of the gradient."""
        return self.whole.bucket

    def _new_gradient(
        self,
        parameter: Tensor,
        share: Tensor,
    ) -> ShardedGradient:
        return ShardedGradient(parameter, share, self.name, self._group)

    def owned_part(self, flat: Tensor) -> Tensor:
        """Return this rank's share of a flat tensor of the parameter's elements."""
        start, stop = self.owned_range
        return flat[start:stop]

    def turn(self, number: int) -> None:
        """Publish the sum in one of the two parts of the bucket. Called once for each sum, on all ranks."""
        if not self._parts:
            return
        part = self._parts[number]
        gradient = part.gradient
        gradient.is_zero = False
        if self.whole.is_native:
            gradient.share = part.share
        else:
            gradient.share = part.share.to(self.dtype)
        self.held_gradient = gradient

    def has_zeros(self, stashed: Tensor) -> bool:
        """Return whether a gradient from before the backward is zero everywhere."""
        if isinstance(stashed, ShardedGradient):
            return stashed.is_zero
        return super().has_zeros(stashed)

    def require_published(self, gradient: Tensor) -> None:
        """Raise GradientError for a gradient from before the backward that was set by hand; on this rank only."""
        if isinstance(gradient, ShardedGradient) and not self._is_last(gradient):
            raise gradient.refusal("an assignment to another parameter")
        super().require_published(gradient)

    def keep_earlier(self, earlier: Tensor) -> Tensor:
        """Return this rank's share of the sum of an earlier backward, in separate memory."""
        if not isinstance(earlier, ShardedGradient):
            return earlier
        # a new gradient, as the next sum may be published in the earlier one
        share = earlier.share
        if self._parts:
            share = share.clone()
        return self._new_gradient(earlier, share)

    def publish(
        self,
        parameter: nn.Parameter,
        earlier: Tensor | None,
        is_copied: bool,
    ) -> None:
        """Make `parameter.grad` this rank's share of the sum; see `Slot.publish`. After `turn`."""
        gradient = self.held_gradient
        if not isinstance(gradient, ShardedGradient):
            assert self.whole.flat is not None, "a gradient is taken before it is summed"
            share = self.owned_part(self.whole.flat).clone()  # so that the other shares are freed
            self.whole.flat = None
            gradient = self._new_gradient(parameter, share)
        if isinstance(earlier, ShardedGradient):
            gradient.share.add_(earlier.share)
        self.leave(parameter, gradient)

    def note_published(self, gradient: Tensor) -> None:
        """Remember a gradient that was published, not weakly if it belongs to the slot."""
        if gradient is self.held_gradient:
            self.published = gradient
        else:
            self._published_weakly = TensorWeakRef(gradient)

    def is_left(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the tensor that was published last."""
        return self._is_last(gradient)
