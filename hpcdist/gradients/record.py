"""One parameter's gradient: what `parameter.grad` holds between two backwards, and what a backward does with it.

Between backwards `parameter.grad` is nothing, this replica's own (accumulated under no_sync), or a sum over all
replicas. A synchronized backward stashes what it finds there, lets autograd write the new gradient, copies that into
the parameter's slot of a bucket, and publishes the slot as `parameter.grad` once the bucket is summed:

    nothing | local | summed  --stash-->  pending  --take or stand_in-->  in the bucket  --publish-->  summed
"""

import enum
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.errors import GradientError
from hpcdist.gradients.tensors import has_values, is_dense, is_only_holder, plus


class Holds(enum.Enum):
    """What `parameter.grad` holds between two backwards."""

    NOTHING = "nothing of ours"
    LOCAL = "this replica's own gradients"
    SUMMED = "a sum over all replicas"


@dataclass
class Pending:
    """What one synchronized backward has found and written for one parameter.

    Attributes:
        stashed: what it found in `parameter.grad`.
        earlier: the sum of an earlier backward among that, to be added to this one's sum.
        has_zeros: whether that is a gradient of zeros, which counts as one: an optimizer may decay what it belongs to.
        view: the summed memory in the parameter's shape.
        is_touched: whether this replica contributes a gradient.
    """

    stashed: Tensor | None = None
    earlier: Tensor | None = None
    has_zeros: bool = False
    view: Tensor | None = None
    is_touched: bool = False


class ParameterRecord:
    """One trained parameter, its slot in a bucket, and the state of its gradient.

    The parameter is held weakly: its hooks keep the engine alive, not the engine the model. A parameter that is gone
    takes part in every sum as one without a gradient.

    Attributes:
        reference: a weak reference to the parameter.
        holds: what `parameter.grad` holds.
        pending: what the running backward has found and written.
        bucket: number of the bucket that it is summed in.
        part: what is summed: flat. The slot, or the gradient's own memory where there is no slot.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.reference = weakref.ref(parameter)
        self.holds = Holds.NOTHING
        self.pending = Pending()
        self.bucket = -1
        self.part: Tensor | None = None
        self._local: TensorWeakRef | None = None  # what was accumulated under no_sync
        # the tensor that was published last, and where its memory is if that was summed
        self._published: Tensor | TensorWeakRef | None = None
        self._address: int | None = None

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, or None when its model is gone."""
        return self.reference()

    @property
    def part_in_shape(self) -> Tensor:
        """A view of `part` in the parameter's shape; there from `take` or `stand_in` on."""
        assert self.part is not None, "take and stand_in set it"
        return self._shaped(self.part)

    def assign_slot(self, bucket: int, slot: Tensor | None, parameter: nn.Parameter) -> None:
        """Take a new slot: a flat tensor of as many elements, or None to be summed where torch made it."""
        self.bucket = bucket
        self._slot = self.part = slot
        self._device, self._dtype = parameter.device, parameter.dtype
        self._n_elements, self._shape = parameter.numel(), parameter.shape
        self._stride = parameter.stride() if is_dense(parameter) else None
        self._slot_address = None if slot is None else slot.data_ptr()
        self._is_view = slot is None or (parameter.device, parameter.dtype) == (slot.device, slot.dtype)

    # -- what a backward finds --------------------------------------------------------------------------------------

    def stash(self, parameter: nn.Parameter) -> None:
        """Move what `parameter.grad` holds out of the way of a synchronized backward."""
        if self.pending.stashed is None and (grad := parameter.grad) is not None:
            self.pending.stashed, parameter.grad = grad, None

    def unstash(self) -> None:
        """Undo `stash`: the backward wrote no gradient, as torch.autograd.grad does not."""
        stashed, self.pending.stashed = self.pending.stashed, None
        parameter = self.reference()
        if stashed is not None and parameter is not None:
            parameter.grad = stashed

    def _sort_stashed(self) -> Tensor | None:
        """Return stashed local gradients, which are summed with this backward's; keep an earlier sum to be added later.

        The slot is about to be overwritten, and the stashed tensor may be a view of it: it is copied then.

        Raises:
            GradientError: when the gradient was set by hand; on this rank only.
        """
        pending, stashed = self.pending, self.pending.stashed
        pending.stashed = None
        if stashed is None:
            return None
        is_local = self._is_local(stashed)
        if not is_local and not has_values(stashed):
            pending.has_zeros = True
            return None
        kept = stashed.clone() if self._slot is not None and self._is_view else stashed
        if is_local:
            return kept
        self.require_published(stashed)
        pending.earlier = kept
        return None

    def _is_local(self, gradient: Tensor) -> bool:
        return self._local is not None and self._local() is gradient

    @property
    def has_local(self) -> bool:
        """Whether `parameter.grad` is what this replica has accumulated under no_sync."""
        parameter, found = self.reference(), self.pending.stashed
        if found is None and parameter is not None:
            found = parameter.grad
        return found is not None and self._is_local(found)

    def require_published(self, gradient: Tensor) -> None:
        """Raise GradientError for a gradient that is neither zero nor what was published; on this rank only."""
        if gradient is not self.published and has_values(gradient):
            raise GradientError(
                f"backward: expected the gradient of {self.name!r} as an earlier backward left it, got one set by "
                f"hand; call zero_grad() first, or change the gradient in place."
            )

    # -- what it writes ---------------------------------------------------------------------------------------------

    def accumulate_locally(self, parameter: nn.Parameter, weight: float) -> None:
        """Add what a backward under no_sync, or of a local step, has written to what `stash` found.

        Args:
            parameter: the record's.
            weight: that the new gradient is multiplied by.

        Raises:
            GradientError: when that was a sum over replicas; on this rank only.
        """
        stashed, self.pending.stashed = self.pending.stashed, None
        if weight != 1 and parameter.grad is not None:
            # not in place: autograd may have given a view of one tensor to several leaves; zero rows may have made NaN
            parameter.grad = parameter.grad * weight if weight else torch.zeros_like(parameter.grad)
        if stashed is not None:
            if not self._is_local(stashed) and has_values(stashed):
                raise self._summed_refusal()
            assert parameter.grad is not None, "autograd writes the gradient before it calls this"
            is_in_slot = self._slot is not None and stashed.data_ptr() == self._slot_address
            parameter.grad = stashed + parameter.grad if is_in_slot else plus(stashed, parameter.grad)
        self.holds = Holds.LOCAL
        self._local = None if parameter.grad is None else TensorWeakRef(parameter.grad)

    def _summed_refusal(self) -> GradientError:
        """Return the error of local gradients that would be added to a sum."""
        return GradientError(
            f"no_sync: expected zeroed or local gradients, got one summed over the replicas in {self.name!r}; call "
            f"zero_grad() before accumulating."
        )

    def take(self, parameter: nn.Parameter, weight: float) -> None:
        """Take the gradient that a synchronized backward has just written: copy it into the slot, if there is one.

        Args:
            parameter: the record's.
            weight: of this replica in the sum.

        Raises:
            GradientError: when it is sparse, or the parameter was moved or converted; on this rank only.
        """
        gradient, slot = parameter.grad, self._slot
        assert gradient is not None, "autograd writes the gradient before it calls this"
        if gradient.is_sparse or gradient.dtype is not self._dtype or gradient.device != self._device:
            raise self._refusal(gradient)
        local = None if self.pending.stashed is None else self._sort_stashed()
        if slot is None:
            self.part = self._flat_of(gradient)
            view = self._shaped(self.part)
        else:
            view = slot.as_strided(self._shape, self._stride) if self._stride else slot.view(self._shape)
            if local is None and self._is_view and weight not in (0, 1):
                torch.mul(gradient, weight, out=view)  # in one pass
                weight = 1
            else:
                view.copy_(gradient)
        if local is not None or weight != 1:
            self._weigh(local, weight)
        if self._is_view:
            parameter.grad = view
        self.pending.view, self.pending.is_touched = view, True

    def _refusal(self, gradient: Tensor) -> GradientError:
        if gradient.is_sparse:
            return GradientError(
                f"backward: expected a dense gradient, got a sparse one for {self.name!r}; give the module that holds "
                f"it the attribute sparse = True, as nn.Embedding(sparse=True) has, or make the gradient dense."
            )
        return GradientError(
            f"backward: expected {self.name!r} on {self._device} as {self._dtype}, as at the first step, got "
            f"{gradient.device} {gradient.dtype}; move and convert the model before its first use."
        )

    def stand_in(self, weight: float) -> None:
        """Make `part` what a replica without a gradient adds: zeros, or what it accumulated under no_sync before."""
        parameter = self.reference()
        if parameter is not None:
            self.stash(parameter)
        local = self._sort_stashed()
        if self._slot is None:
            self.part = torch.zeros(self._n_elements, dtype=self._dtype, device=self._device)
        else:
            self._slot.zero_()
        self.pending.is_touched = local is not None or self.pending.has_zeros
        self._weigh(local, weight)

    def _weigh(self, local: Tensor | None, weight: float) -> None:
        """Add local gradients to `part`, and multiply it by this replica's weight."""
        assert self.part is not None, "take and stand_in set it"
        if weight == 0:
            self.part.zero_()  # not multiplied: there may be a NaN
            return
        if local is not None:
            self._shaped(self.part).add_(local)
        if weight != 1:
            self.part.mul_(weight)

    def _shaped(self, flat: Tensor) -> Tensor:
        """Return a new view of a flat tensor with the shape, and if it was dense the strides, of the parameter."""
        if self._stride is None:
            return flat.view(self._shape)
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())

    def _flat_of(self, gradient: Tensor) -> Tensor:
        """Return a gradient's memory as a flat tensor in the parameter's order.

        It is copied if it is laid out otherwise, or shared: autograd may give views of one tensor, or a tensor of the
        user's, to several leaves.
        """
        if self._stride is None:
            return gradient.clone(memory_format=torch.contiguous_format).view(-1)
        if gradient.stride() != self._stride or not is_only_holder(gradient):
            copied = gradient.new_empty(self._n_elements)
            self._shaped(copied).copy_(gradient)
            return copied
        return gradient.as_strided((self._n_elements,), (1,), gradient.storage_offset())

    # -- what it leaves ---------------------------------------------------------------------------------------------

    def publish(self, n_touched: float) -> None:
        """Make `parameter.grad` what was summed over all replicas, plus what earlier backwards left.

        Args:
            n_touched: replicas that had a gradient; with none, `parameter.grad` stays the sum that it was.
        """
        parameter, pending = self.reference(), self.pending
        result = pending.earlier
        if n_touched and parameter is not None:
            assert self.part is not None, "take and stand_in set it"
            view = self._shaped(self.part) if pending.view is None else pending.view
            result = view if self._is_view else torch.empty_like(parameter).copy_(view)
            if pending.earlier is not None:
                result.add_(pending.earlier)
        self.leave(result)

    def drop(self) -> None:
        """Forget a failed backward and the gradients it stashed, as they cannot be told apart from earlier sums."""
        if self.pending != Pending():
            self.leave(None)

    def restart(self, pending: Pending) -> None:
        """Forget what this backward has taken, and continue with what is pending."""
        self.part, self.pending = self._slot, pending

    def leave(self, result: Tensor | None) -> None:
        """Leave `result` in `parameter.grad`, as a sum over all replicas, and expect a new backward."""
        parameter = self.reference()
        if parameter is not None and parameter.grad is not result:
            parameter.grad = result
        if result is None:
            self._published = self._address = None
        else:
            # a large gradient is held weakly, so that zero_grad() frees it
            self._published = result if self._slot is not None else TensorWeakRef(result)
            address = None if self.part is None else self.part.data_ptr()
            self._address = address if address is not None and address == result.data_ptr() else None
        self.part = self._slot  # a gradient that was summed in its own memory belongs to the parameter again
        self.pending, self._local = Pending(), None
        self.holds = Holds.NOTHING if result is None else Holds.SUMMED

    @property
    def published(self) -> Tensor | None:
        """The tensor that was published last, if it is still there."""
        return self._published() if isinstance(self._published, TensorWeakRef) else self._published

    def is_published(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the tensor that was published last, with its memory where it was."""
        published = self._published
        if isinstance(published, TensorWeakRef):
            published = published()
        return gradient is published and (self._address is None or self._address == gradient.data_ptr())
