"""What becomes of one parameter's gradient between two backwards.

`parameter.grad` is at any time nothing, local (accumulated under no_sync) or summed over all replicas. A record knows
which, and keeps what a synchronized backward found there apart from what it adds.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hpcdist.errors import GradientError
from hpcdist.gradients.tensors import is_dense, is_only_holder


class ParameterRecord:
    """One trained parameter, its place in a bucket, and the state of its gradient.

    The parameter is held weakly: its hooks keep the engine alive, not the engine the model. A parameter that is gone
    takes part in every sum as one without a gradient.

    Attributes:
        is_touched: the running backward produced a gradient, or one was accumulated under no_sync.
        is_local: `parameter.grad` holds this replica's own sum.
        bucket: number of the bucket that it is summed in.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self._parameter = weakref.ref(parameter)
        self.is_touched = False
        self.is_local = False
        self.bucket = -1
        self._view: Tensor | None = None  # `part` in the parameter's shape, while a backward runs
        self._address: int | None = None  # of the result, where it is the memory that was summed
        self._found: Tensor | None = None  # what the running backward found in parameter.grad
        self._earlier: Tensor | None = None  # a sum of an earlier backward, to be added to this one's sum
        self._idle: Tensor | None = None  # zeros that stay where they are if no replica has a gradient
        self._published: Callable[[], Tensor | None] | None = None
        self._lent: list[TensorWeakRef] = []  # copies that other replicas of this process have

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, or None when its model is gone."""
        return self._parameter()

    def place(self, bucket: int, slot: Tensor | None, parameter: nn.Parameter) -> None:
        """Take a new place: a slot, a flat host tensor of as many elements; None to be summed where torch made it."""
        self.bucket = bucket
        self._slot = slot
        self._planned = parameter.device, parameter.dtype
        self._n_elements = parameter.numel()
        self._shape = parameter.shape
        self._stride = parameter.stride() if is_dense(parameter) else None
        self._slot_address = None if slot is None else slot.data_ptr()
        self._is_view = slot is None or (parameter.device, parameter.dtype) == (slot.device, slot.dtype)
        self._part: Tensor | None = slot

    @property
    def part(self) -> Tensor:
        """What is summed for this parameter: flat, on the host."""
        assert self._part is not None, "complete() comes before the sum"
        return self._part

    @property
    def _result(self) -> Tensor | None:
        """What was published last, if it is still there."""
        return None if self._published is None else self._published()

    def is_trustworthy(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter.grad` is what was published last, and where it was."""
        grad = parameter.grad
        return grad is not None and grad is self._result and self._address in (None, grad.data_ptr())

    def _is_in_slot(self, grad: Tensor | None) -> bool:
        return grad is not None and self._slot is not None and grad.data_ptr() == self._slot_address

    def _shaped(self, flat: Tensor) -> Tensor:
        """Return a new view of a flat tensor with the shape, and if it was dense the strides, of the parameter."""
        if self._stride is None:
            return flat.view(self._shape)
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())

    def _flat_of(self, gradient: Tensor) -> Tensor:
        """Return a gradient's memory as a flat tensor in the parameter's order.

        It is copied if it is laid out otherwise, or shared: autograd hands out views of one tensor to several leaves,
        and users' own tensors.
        """
        if self._stride is None:
            return gradient.clone(memory_format=torch.contiguous_format).view(-1)
        if gradient.stride() != self._stride or not is_only_holder(gradient):
            copied = gradient.new_empty(self._n_elements)
            self._shaped(copied).copy_(gradient)
            return copied
        return gradient.as_strided((self._n_elements,), (1,), gradient.storage_offset())

    def set_aside(self, parameter: nn.Parameter) -> None:
        """Move what `parameter.grad` holds out of the way of a synchronized backward."""
        if self._found is None and (grad := parameter.grad) is not None:
            self._found, parameter.grad = grad, None

    def bring(self, parameter: nn.Parameter, gradient: Tensor | None, earlier: Tensor | None) -> None:
        """Make as if a backward had just written `gradient`: one of several replicas' did, some time ago.

        Args:
            parameter: the record's.
            gradient: what was written; None for nothing.
            earlier: a sum of an earlier backward, to be added to this one's sum.
        """
        parameter.grad, self._found = gradient, None
        if earlier is not None and bool(earlier.any()):
            self._earlier = earlier
        else:
            self._idle = earlier

    def forget(self) -> None:
        """Forget a backward whose gradient was pushed: the sum will be the last replica's."""
        parameter = self.parameter
        if parameter is not None:
            parameter.grad = None
        self._part = self._slot
        self._found = self._earlier = self._idle = self._view = None
        self.is_touched = False

    def put_back(self) -> None:
        """Undo `set_aside`: the backward wrote no gradient, as torch.autograd.grad does not."""
        parameter = self.parameter
        if self._found is not None and parameter is not None:
            parameter.grad = self._found
        self._found = None

    def _sort_found(self) -> Tensor | None:
        """Return local gradients to be summed with this backward's; keep an earlier sum to be added afterwards.

        A slot is about to be overwritten, and what was found may live there: it is copied.

        Raises:
            GradientError: when the gradient was put there by hand; on this rank only.
        """
        found, self._found = self._found, None
        if found is None:
            return None
        if not self.is_local and not bool(found.any()):
            self._idle = found if found is self._result else None
            return None
        kept = found.clone() if self._slot is not None and self._is_view else found
        if self.is_local:
            return kept
        self._require_summed(found)
        self._earlier = kept
        return None

    def _require_summed(self, found: Tensor) -> None:
        if found is not self._result and all(found is not lent() for lent in self._lent):
            raise GradientError(
                f"backward: expected the gradient of {self.name!r} as an earlier backward left it, got one set by "
                f"hand; call zero_grad() first, or change the gradient in place."
            )

    def require_summed(self, found: Tensor) -> None:
        """Raise GradientError for a gradient, not zero, that is neither a sum nor a copy lent; on this rank only."""
        if bool(found.any()):
            self._require_summed(found)

    def lend(self, gradient: Tensor) -> Tensor:
        """Return a copy of a gradient for another replica of this process, which may change it in place."""
        copied = gradient.detach().clone()
        self._lent = [lent for lent in self._lent if lent() is not None]
        self._lent.append(TensorWeakRef(copied))
        return copied

    def accumulate_locally(self, parameter: nn.Parameter) -> None:
        """Take note that a backward under no_sync has added to `parameter.grad`; `set_aside` was called before it.

        Raises:
            GradientError: when it was a sum over replicas that was added to; on this rank only.
        """
        found, self._found = self._found, None
        if found is None:
            self.is_local = True
            return
        if not self.is_local and bool(found.any()):
            raise GradientError(
                f"no_sync: expected zeroed or local gradients, got one summed over the replicas in {self.name!r}; "
                f"call zero_grad() before accumulating."
            )
        assert parameter.grad is not None, "autograd writes the gradient before it calls this"
        parameter.grad = found.add_(parameter.grad) if not self._is_in_slot(found) else found + parameter.grad
        self.is_local = True

    def take(self, parameter: nn.Parameter, weight: float) -> None:
        """Take the gradient that a synchronized backward has just written: copy it into the slot, if there is one.

        Args:
            parameter: the record's.
            weight: of this replica in the sum.

        Raises:
            GradientError: when it is sparse, or the parameter was moved or converted; on this rank only.
        """
        gradient = parameter.grad
        assert gradient is not None, "autograd writes the gradient before it calls this"
        self._check(gradient)
        local = self._sort_found()
        if self._slot is None:
            self._part = self._flat_of(gradient)
            self._view = self._shaped(self._part)
            self._weigh(local, weight)
        else:
            self._view = self._shaped(self._slot)
            if local is None and weight not in (0, 1) and self._is_view:
                torch.mul(gradient, weight, out=self._view)
            else:
                self._view.copy_(gradient)
                self._weigh(local, weight)
        if self._is_view:
            parameter.grad = self._view
        self.is_touched = True

    def _check(self, gradient: Tensor) -> None:
        if (gradient.device, gradient.dtype) != self._planned:
            raise GradientError(
                f"backward: expected {self.name!r} on {self._planned[0]} as {self._planned[1]}, as at the first step, "
                f"got {gradient.device} {gradient.dtype}; move and convert the model before its first use."
            )
        if gradient.is_sparse:
            raise GradientError(
                f"backward: expected a dense gradient, got a sparse one for {self.name!r}; build the layer with "
                f"sparse=False."
            )

    def stand_in(self, weight: float) -> None:
        """Make `part` what a backward without a gradient adds: zeros, or what was accumulated under no_sync before."""
        parameter = self.parameter
        if parameter is not None:
            self.set_aside(parameter)
        local = self._sort_found()
        if self._slot is None:
            self._part = torch.zeros(self._n_elements, dtype=self._planned[1], device=self._planned[0])
        else:
            self._slot.zero_()
        self.is_touched = local is not None
        self._weigh(local, weight)

    def _weigh(self, local: Tensor | None, weight: float) -> None:
        """Add what was accumulated under no_sync to `part`, and multiply it by this replica's weight."""
        if weight == 0:
            self.part.zero_()  # not multiplied: there may be a NaN
            return
        if local is not None:
            self._shaped(self.part).add_(local)
        if weight != 1:
            self.part.mul_(weight)

    def publish(self, n_touched: float) -> None:
        """Make `parameter.grad` what was summed over all replicas, plus what earlier backwards left.

        Args:
            n_touched: replicas that had a gradient; with none, `parameter.grad` stays as it was.
        """
        parameter = self.parameter
        result = self._earlier if self._earlier is not None else self._idle
        if n_touched and parameter is not None:
            view = self._shaped(self.part) if self._view is None else self._view
            result = view if self._is_view else torch.empty_like(parameter).copy_(view)
            if self._earlier is not None:
                result.add_(self._earlier)
        self._end(result)

    def keep_apart(self) -> None:
        """Move the published sum out of the slot, which another replica may use again before all have seen the sum."""
        parameter, result = self.parameter, self._result
        if self._slot is None or parameter is None or result is None or parameter.grad is not result:
            return
        copied = result.clone()
        parameter.grad, self._published, self._address = copied, self._reference(copied), None

    def drop(self) -> None:
        """Forget a backward that ended in an error, and what it found: nobody can tell its parts from earlier sums."""
        if self.is_touched or self._found is not None or self._earlier is not None:
            self._end(None)
        self._found = None

    def _end(self, result: Tensor | None) -> None:
        parameter = self.parameter
        if parameter is not None and parameter.grad is not result:
            parameter.grad = result
        self._published = None if result is None else self._reference(result)
        address = None if result is None else result.data_ptr()
        is_summed = self._part is not None and address == self._part.data_ptr()
        self._address = address if is_summed else None
        self._part = self._slot  # a gradient that was summed where it lies belongs to the parameter again
        self._earlier = self._idle = self._view = None
        self.is_touched = self.is_local = False

    def _reference(self, result: Tensor) -> Callable[[], Tensor | None]:
        """Return what answers with the result: a large gradient is held weakly, so that zero_grad() frees it."""
        return TensorWeakRef(result) if self._slot is None else lambda: result
