"""A gradient of which this rank holds its own share of the sum, in `parameter.grad`.

torch's code for gradients cannot know that: a norm of them would be that of the share. So what is there is a tensor
without memory, of the parameter's shape and dtype, that answers every operation with an error, but for those that mean
the same for each share: to zero it, and the check and unscaling of a GradScaler.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.collectives import library
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import OPS
from hpcdist.errors import GradientError
from hpcdist.gradients.record import ParameterRecord

_ZERO = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


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
    def __new__(cls, parameter: nn.Parameter, share: Tensor, name: str, group: Group) -> "ShardedGradient":
        """Return the gradient of a parameter by its name."""
        made: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.share, made.is_zero, made._name, made._group = share, False, name, group
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient(of {self._name!r}, {self.share.numel()} of {self.numel()} elements on this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Zero it or unscale it; raise GradientError for all else."""
        first = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        gradients = [one for one in first if isinstance(one, cls)]
        if func in _ZERO:
            for one in first:
                if isinstance(one, cls):
                    one.is_zero = True
                (one.share if isinstance(one, cls) else one).zero_()
            return args[0] if func is torch.ops.aten.zero_.default else None
        if func is _UNSCALE and len(gradients) == len(first):
            return _unscale(gradients, *args[1:])
        found = gradients or [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        raise found[0].refusal(func.__name__) if found else _refusal("a parameter", func.__name__, "")

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


def _unscale(gradients: list[ShardedGradient], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale shares, and let all ranks know whether any has found infinity or NaN. Collective: the group."""
    torch._amp_foreach_non_finite_check_and_unscale_([one.share for one in gradients], found_inf, inverse_scale)
    group = gradients[0]._group
    found = np.array([float(found_inf)], np.float32)
    with group.recorded("found_inf", found):
        library.all_reduce(found, group, OPS["max"])
    found_inf.fill_(float(found[0]))


class _Slot(NamedTuple):
    """Where a gradient is summed, made once: views and gradients take longer to make than small ones to be summed.

    Attributes:
        flat: the memory. view: in the parameter's shape. share: this rank's part of it.
        gradient: what `parameter.grad` becomes.
    """

    flat: Tensor
    view: Tensor
    share: Tensor
    gradient: ShardedGradient


class ShardedRecord(ParameterRecord):
    """One parameter whose gradient is summed by shares.

    Args:
        name: of the parameter.
        parameter: see `ParameterRecord`.
        group: whose ranks own the shares.

    Attributes:
        own: (start, stop) of this rank's share in the parameter's memory. bounds: of each owner's; empty before the
            first plan, and the same in later ones.
    """

    def __init__(self, name: str, parameter: nn.Parameter, group: Group) -> None:
        super().__init__(name, parameter)
        self._group = group
        self._slots: list[_Slot] = []
        self._summed: _Slot | None = None
        self.own = (0, 0)
        self.bounds: list[tuple[int, int]] = []

    def assign_share(
        self, bucket: int, slots: list[Tensor], bounds: list[tuple[int, int]], owner: int, parameter: nn.Parameter
    ) -> None:
        """Take two new slots, used in turn, or none, and the shares of all owners; this rank may be none of them."""
        self.assign_slot(bucket, slots[0] if slots else None, parameter)
        self.bounds, self.own = bounds, bounds[owner] if owner < len(bounds) else (0, 0)
        self._slots, self._summed = [], None
        for flat in slots:
            share = self.own_of(flat)
            self._slots.append(_Slot(flat, self._shaped(flat), share, self._new_gradient(parameter, share)))

    def _new_gradient(self, parameter: nn.Parameter, share: Tensor) -> ShardedGradient:
        return ShardedGradient(parameter, share, self.name, self._group)

    def own_of(self, flat: Tensor) -> Tensor:
        """Return this rank's share of a flat tensor of the parameter's elements."""
        return flat[self.own[0] : self.own[1]]

    def _sort_stashed(self) -> Tensor | None:
        stashed = self.pending.stashed
        if not isinstance(stashed, ShardedGradient):
            return super()._sort_stashed()
        self.pending.stashed = None
        if stashed.is_zero:
            self.pending.has_zeros = True
        elif stashed is not self.published:
            raise stashed.refusal("an assignment to another parameter")
        else:
            self.pending.earlier = stashed
        return None

    def accumulate_locally(self, parameter: nn.Parameter, weight: float) -> None:
        """Add what a backward under no_sync has written to what `stash` found; see `ParameterRecord`."""
        stashed = self.pending.stashed
        if isinstance(stashed, ShardedGradient):
            if not stashed.is_zero:
                raise self._summed_refusal()
            self.pending.stashed = None
        super().accumulate_locally(parameter, weight)

    def take(self, parameter: nn.Parameter, weight: float) -> None:
        """Copy the gradient that a backward has just written into the slot; see `ParameterRecord`."""
        gradient = parameter.grad
        is_plain = gradient is not None and self._slots and self._is_view and self.pending.stashed is None
        if not is_plain or gradient is None or gradient.is_sparse or gradient.dtype is not self._dtype or not weight:
            super().take(parameter, weight)
            return
        slot = self._slots[0]
        if weight == 1:
            slot.view.copy_(gradient)
        else:
            torch.mul(gradient, weight, out=slot.view)
        parameter.grad = slot.gradient
        self.pending.is_touched = True

    def publish(self, n_touched: float) -> None:
        """Make `parameter.grad` this rank's share of the sum, plus what earlier backwards left of it."""
        parameter, earlier = self.reference(), self.pending.earlier
        result = earlier
        if n_touched and parameter is not None:
            earlier_share = earlier.share if isinstance(earlier, ShardedGradient) else None
            result = self._gradient_of(parameter)  # which may be the earlier one, with another share
            if earlier_share is not None:
                result.share.add_(earlier_share)
        elif isinstance(earlier, ShardedGradient):
            earlier.share = earlier.share.clone()  # the backward after the next one writes where it was
        self.leave(result)

    def turn(self) -> None:
        """Note that the slot is summed, and use the other one from now on. Once for each sum, on all ranks."""
        if self._slots:
            self._summed = self._slots[0]
            self._slots.reverse()
            self._slot = self.part = self._slots[0].flat
            self._slot_address = self._slot.data_ptr()

    def _gradient_of(self, parameter: nn.Parameter) -> ShardedGradient:
        """Return what `parameter.grad` becomes, with this rank's share of what was summed."""
        slot = self._summed
        if slot is None:
            assert self.part is not None, "take and stand_in set it"
            return self._new_gradient(parameter, self.own_of(self.part).clone())  # so that the rest is freed
        slot.gradient.share = slot.share if self._is_view else slot.share.to(self._dtype)
        slot.gradient.is_zero = False
        return slot.gradient
