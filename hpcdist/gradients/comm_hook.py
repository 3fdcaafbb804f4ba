"""Comm hooks: functions of the program that sum the gradients of a bucket, in the form of torch DDP's hooks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpcdist.collectives.group import Group
from hpcdist.errors import GradientError
from hpcdist.gradients.dense import DenseSlot
from hpcdist.runtime.waiting import late, wait_until


class GradBucket:
    """A bucket of gradients of this rank, as torch.distributed.GradBucket. Valid until the hook's result is ready.

    Args:
        index: number of the bucket, counted in the order in which buckets are summed.
        tensor: (n_elements,) the gradients side by side, on the host, or on the GPU of the models. Of several gradients
            each starts at a multiple of 64 bytes, with zeros in between, whose sum is not used.
        slots: slots of the parameters that the backward has reached on any rank, in the order of their gradients. Other
            parameters have zeros in the buffer, whose sum is not used.
        is_last: whether this is the last bucket.
        divisor: number that the sum will be divided by.
    """

    def __init__(
        self,
        index: int,
        tensor: Tensor,
        slots: Sequence[DenseSlot],
        is_last: bool,
        divisor: float,
    ) -> None:
        self._index = index
        self._tensor = tensor
        self._slots = slots
        self._is_last = is_last
        self._divisor = divisor

    def index(self) -> int:
        """Return the bucket's number. It has the same parameters at every step, until the model is planned anew."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor, which may be overwritten."""
        return self._tensor

    def gradients(self) -> list[Tensor]:
        """Return a view of the buffer for each parameter that the backward has reached on any rank, in its shape."""
        return [slot.summed() for slot in self._slots if slot.parameter is not None]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        parameters: list[Tensor] = []
        for slot in self._slots:
            parameter = slot.parameter
            if parameter is not None:
                parameters.append(parameter)
        return parameters

    def divisor(self) -> float:
        """Return the divisor of the sum: with ReduceOp.MEAN the rows of all ranks in this backward, otherwise 1.

        A hook that keeps values for a later step must divide them by the divisor of this step, and multiply them by the
        divisor of the later step.
        """
        return self._divisor

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Copy `tensor`, which has the buffer's number of elements, to the buffer."""
        self._tensor.copy_(tensor.reshape(-1))


#: hook(state, bucket) returns the sum of `bucket.buffer()` over all ranks, or a future of it.
CommHook = Callable[[Any, GradBucket], Any]


class HookedSum:
    """The sum of a bucket that a hook has started: `wait` writes it to the bucket.

    Args:
        result: value that the hook returned.
        bucket: argument of the hook.
        group: the ranks.
    """

    def __init__(
        self,
        result: Any,
        bucket: GradBucket,
        group: Group,
    ) -> None:
        self._result = result
        self._bucket = bucket
        self._group = group

    def wait(self) -> None:
        """Wait until the sum is in the bucket.

        Raises:
            CollectiveTimeoutError: when a future takes longer than the strategy's limit.
            GradientError: when the hook's result is no such sum; on this rank only.
        """
        result = self._result
        flat = self._bucket.buffer()
        if hasattr(result, "wait"):
            self._wait_for(result)
            result = result.wait()
        if result is None:  # of a collective that overwrites its buffer
            return
        # futures of torch's collectives have a list of one tensor
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor) or result.numel() != flat.numel():
            form = type(result).__name__
            if isinstance(result, Tensor):
                form = f"{tuple(result.shape)}"
            raise GradientError(
                f"comm hook: expected a sum of {flat.numel()} elements, as the bucket has, or a future of it, got "
                f"{form}; return a tensor, an hpcdist handle or a torch.futures.Future."
            )
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result.detach().reshape(-1))

    def _wait_for(self, result: Any) -> None:
        """Wait for a future of torch, whose own wait is not bounded. Waits of hpcdist's handles are bounded."""
        is_done = getattr(result, "done", None)
        if is_done is None:
            return
        with self._group.recorded("comm hook", None):
            if not wait_until(is_done, self._group.timeout_s):
                raise late("comm hook", self._group.timeout_s, "its future", self._group.world)


def name_of_hook(hook: CommHook) -> str:
    """Return the name of a hook in checkpoints, which must be the same on all ranks."""
    if hasattr(hook, "__qualname__"):
        return f"{hook.__module__}.{hook.__qualname__}"
    return repr(type(hook))
