"""Float buffers, such as BatchNorm's statistics: averaged over the replicas that changed them.

Running statistics are linear in the batch statistics, so averaging them after each step gives what averaging the batch
statistics of all replicas would give. A buffer that nobody changed is not sent and keeps its bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.errors import GradientError
from hpcdist.gradients.model_plan import BufferPlace
from hpcdist.gradients.reducer import Reducer
from hpcdist.gradients.tensors import SUM_DTYPES, dtype_name


class BufferRecord:
    """One buffer, and a copy of it by which one sees that its module has written it since it was averaged last.

    Version counters do not tell: normalisation kernels, and writes through `.data`, do not count. A buffer whose module
    is gone counts as unchanged.

    Cost: one read of the buffer per synchronized backward, and its size in memory.
    """

    def __init__(self, place: BufferPlace, tensor: Tensor) -> None:
        self._place = place
        self.shape = tensor.shape
        self.sum_dtype = SUM_DTYPES[dtype_name(tensor)]
        self._kept = tensor.clone()

    @property
    def is_changed(self) -> bool:
        """Whether the buffer differs from what it was when it was averaged last."""
        tensor = self._place.tensor
        return tensor is not None and not torch.equal(tensor, self._kept)

    def contribution(self, takes_part: bool) -> Tensor:
        """Return what this replica adds to the sum: a flat host tensor, zero when it does not take part.

        Raises:
            GradientError: when the module has given the buffer another shape; on this rank only.
        """
        dtype, tensor = getattr(torch, self.sum_dtype), self._place.tensor
        if not takes_part or tensor is None:
            return torch.zeros(self.shape.numel(), dtype=dtype)
        if tensor.shape != self.shape:
            raise GradientError(
                f"backward: expected buffer {self._place.name!r} of shape {tuple(self.shape)} as at the first step, "
                f"got {tuple(tensor.shape)}; keep its shape."
            )
        return tensor.reshape(-1).to("cpu", dtype)

    def publish(self, mean: Tensor) -> None:
        """Write the mean over the replicas into the module, unseen by autograd, which may have saved the buffer."""
        tensor = self._place.tensor
        if tensor is not None:
            tensor.data.copy_(mean.view(self.shape))
            self._kept = tensor.clone()


def average_buffers(
    records: Sequence[BufferRecord], takes_part: Sequence[bool], counts: Sequence[float], reducer: Reducer
) -> None:
    """Replace every buffer that some replica changed by its mean over the replicas that did.

    Collective where a count is not zero: all replicas. Blocking.

    Args:
        records: the same on every rank.
        takes_part: whether this replica changed each buffer.
        counts: how many replicas changed it; equal on every rank.
        reducer: sums over the replicas.

    Cost: one all-reduce of the changed buffers for each dtype among them.
    """
    changed = [one for one in zip(records, takes_part, counts, strict=True) if one[2]]
    for dtype in sorted({record.sum_dtype for record, _, _ in changed}):
        group = [one for one in changed if one[0].sum_dtype == dtype]
        flat = torch.cat([record.contribution(is_mine) for record, is_mine, _ in group])
        reducer.reduce(flat.numpy())
        for (record, _, count), total in zip(
            group, torch.split(flat, [one[0].shape.numel() for one in group]), strict=True
        ):
            record.publish(total / count)
