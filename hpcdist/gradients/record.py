"""What becomes of one parameter's gradient between two backwards.

`parameter.grad` is at any time nothing, local (accumulated under no_sync) or summed over all replicas. A record knows
which, and keeps what a synchronized backward found there apart from what it adds.
"""

import weakref

import torch
from torch import Tensor, nn

from hpcdist.errors import GradientError
from hpcdist.gradients.tensors import view_as


class ParameterRecord:
    """One trained parameter, its slot in a bucket, and the state of its gradient.

    The parameter is held weakly: its hooks keep the engine alive, not the engine the model. A parameter that is gone
    takes part in every sum as one without a gradient.

    Attributes:
        is_touched: the running backward produced a gradient, or one was accumulated under no_sync.
        is_local: `parameter.grad` holds this replica's own sum.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self._parameter = weakref.ref(parameter)
        self.is_touched = False
        self.is_local = False
        self._found: Tensor | None = None  # what the running backward found in parameter.grad
        self._earlier: Tensor | None = None  # a sum of an earlier backward, to be added to this one's sum
        self._result: Tensor | None = None  # what was published last

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, or None when its model is gone."""
        return self._parameter()

    def use_slot(self, slot: Tensor, parameter: nn.Parameter) -> None:
        """Take a new slot: a flat host tensor of the parameter's number of elements."""
        self._slot = slot
        self._view = view_as(slot, parameter)
        self._planned = parameter.device, parameter.dtype
        self._is_direct = parameter.device.type == "cpu" and parameter.dtype == slot.dtype

    def is_trustworthy(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter.grad` is what was published last."""
        return parameter.grad is self._result

    def set_aside(self, parameter: nn.Parameter) -> None:
        """Move what `parameter.grad` holds out of the way of a synchronized backward."""
        if self._found is None:
            self._found, parameter.grad = parameter.grad, None

    def put_back(self) -> None:
        """Undo `set_aside`: the backward wrote no gradient, as torch.autograd.grad does not."""
        parameter = self.parameter
        if self._found is not None and parameter is not None:
            parameter.grad = self._found
        self._found = None

    def _sort_found(self) -> Tensor | None:
        """Return local gradients to be summed with this backward's; keep an earlier sum to be added afterwards.

        The slot is about to be overwritten, and what was found may live there: it is copied.

        Raises:
            GradientError: when the gradient was put there by hand; on this rank only.
        """
        found, self._found = self._found, None
        if found is None or (not self.is_local and not bool(found.any())):
            return None
        kept = found.clone() if self._is_direct else found
        if self.is_local:
            return kept
        if found is not self._result:
            raise GradientError(
                f"backward: expected the gradient of {self.name!r} as an earlier backward left it, got one set by "
                f"hand; call zero_grad() first, or change the gradient in place."
            )
        self._earlier = kept
        return None

    def start_local(self) -> None:
        """Check, before a backward under no_sync adds to it, that `parameter.grad` is not a sum over replicas.

        Raises:
            GradientError: when it is; on this rank only.
        """
        found = None if self.parameter is None else self.parameter.grad
        if found is not None and not self.is_local and bool(found.any()):
            raise GradientError(
                f"no_sync: expected zeroed or local gradients, got one summed over the replicas in {self.name!r}; "
                f"call zero_grad() before accumulating."
            )
        self.is_local = True

    def take(self, parameter: nn.Parameter) -> None:
        """Copy the gradient that a synchronized backward has just written into the slot.

        Raises:
            GradientError: when it is sparse, or the parameter was moved or converted; on this rank only.
        """
        gradient = parameter.grad
        assert gradient is not None, "autograd writes the gradient before it calls this"
        if (parameter.device, parameter.dtype) != self._planned:
            raise GradientError(
                f"backward: expected {self.name!r} on {self._planned[0]} as {self._planned[1]}, as at the first step, "
                f"got {parameter.device} {parameter.dtype}; move and convert the model before its first use."
            )
        if gradient.is_sparse:
            raise GradientError(
                f"backward: expected a dense gradient, got a sparse one for {self.name!r}; build the layer with "
                f"sparse=False."
            )
        local = self._sort_found()
        self._view.copy_(gradient)
        self._add(local)
        if self._is_direct:
            parameter.grad = self._view

    def _add(self, local: Tensor | None) -> None:
        if local is not None:
            self._view.add_(local)
        self.is_touched = True

    def complete(self, weight: float | None) -> None:
        """Make the slot hold this replica's part of the sum: its gradient times `weight`, or zero."""
        if not self.is_touched:
            parameter = self.parameter
            if parameter is not None:
                self.set_aside(parameter)
            local = self._sort_found()
            self._slot.zero_()
            if local is not None:
                self._add(local)
        if weight == 0:
            self._slot.zero_()
        elif weight is not None and self.is_touched:
            self._slot.mul_(weight)

    def publish(self, n_touched: float, weight: float | None) -> None:
        """Make `parameter.grad` the sum over all replicas, plus what earlier backwards left.

        Args:
            n_touched: replicas that had a gradient; with none, `parameter.grad` stays as it was.
            weight: sum of all replicas' weights, to divide by.
        """
        result, parameter = self._earlier, self.parameter
        if n_touched and parameter is not None:
            if weight is not None:
                self._slot.div_(weight or 1.0)
            result = self._view if self._is_direct else torch.empty_like(parameter).copy_(self._view)
            if self._earlier is not None:
                result.add_(self._earlier)
        self._end(result)

    def drop(self) -> None:
        """Forget a backward that ended in an error: what it wrote is of no replica's sum."""
        self.put_back()
        if self.is_touched:
            self._end(self._earlier)
        self._earlier = None
        self.is_touched = self.is_local = False

    def _end(self, result: Tensor | None) -> None:
        if self.parameter is not None:
            self.parameter.grad = result
        self._result = result
        self._earlier = None
        self.is_touched = self.is_local = False
