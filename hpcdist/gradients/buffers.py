"""Float buffers, such as BatchNorm's statistics: averaged over the replicas that changed them.

Running statistics are linear in the batch statistics, so averaging them after each step gives what averaging the batch
statistics of all replicas would give. A buffer that nobody changed is not sent and keeps its bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdist.collectives import mpi
from hpcdist.errors import GradientError
from hpcdist.gradients.bucket_set import SUM_DTYPES
from hpcdist.gradients.model_plan import BufferPlace
from hpcdist.gradients.tensors import dtype_name
from hpcdist.mpi import MPI


class BufferRecord:
    """One buffer, and how to see that its module has written it since it was averaged last.

    A tensor's version counter tells, but for the normalisation layers: their kernels write without counting, so a copy
    is kept and compared. A buffer whose module is gone counts as unchanged.
    """

    def __init__(self, place: BufferPlace, tensor: Tensor) -> None:
        self._place = place
        self.shape = tensor.shape
        self.sum_dtype = SUM_DTYPES[dtype_name(tensor)]
        self.mark()

    def mark(self) -> None:
        """Take the buffer as it is now for unchanged."""
        self._tensor = self._place.tensor
        self._version = -1 if self._tensor is None else self._tensor._version
        self._kept = None
        if self._tensor is not None and self._place.is_normalisation:
            self._kept = self._tensor.clone()

    @property
    def is_changed(self) -> bool:
        """Whether the module has written the buffer since `mark`."""
        tensor = self._place.tensor
        if tensor is None:
            return False
        if tensor is not self._tensor or tensor._version != self._version:
            return True
        return self._kept is not None and not torch.equal(tensor, self._kept)

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
        """Write the mean over the replicas into the module."""
        tensor = self._place.tensor
        if tensor is not None:
            tensor.copy_(mean.view(self.shape))
        self.mark()


def average_buffers(
    records: Sequence[BufferRecord], takes_part: Sequence[bool], counts: Sequence[float], comm: MPI.Comm
) -> None:
    """Replace every buffer that some replica changed by its mean over the replicas that did.

    Collective where a count is not zero: `comm`. Blocking.

    Args:
        records: the same on every rank.
        takes_part: whether this replica changed each buffer.
        counts: how many replicas changed it; equal on every rank.
        comm: one replica per rank.

    Cost: one all-reduce of the changed buffers for each dtype among them.
    """
    changed = [one for one in zip(records, takes_part, counts, strict=True) if one[2]]
    for dtype in sorted({record.sum_dtype for record, _, _ in changed}):
        group = [one for one in changed if one[0].sum_dtype == dtype]
        flat = torch.cat([record.contribution(is_mine) for record, is_mine, _ in group])
        mpi.all_reduce(flat.numpy(), comm)
        for (record, _, count), total in zip(
            group, torch.split(flat, [one[0].shape.numel() for one in group]), strict=True
        ):
            record.publish(total / count)
