"""Float buffers, such as BatchNorm's statistics: averaged over the replicas that changed them.

Running statistics are linear in the batch statistics, so averaging them after each step has the same result as
averaging the batch statistics of all replicas. A buffer that no replica changed is not sent and keeps its bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcdist.dtypes import SUM_DTYPES, dtype_name
from hpcdist.errors import GradientError
from hpcdist.gradients.local_sums import sum_rows
from hpcdist.gradients.reducer import Reducer
from hpcdist.program.model_plan import ModelBuffer
from hpcdist.program.tensors import differ_in_bits, have_same_bits, is_alike


class BufferRecord:
    """One buffer, and its copy, which shows whether the module has written the buffer since it was last averaged.

    Version counters cannot show this, as normalisation kernels and writes through `.data` do not count. A buffer whose
    module is gone is unchanged.

    Cost: one read of the buffer per synchronized backward, and its size in memory.
    """

    def __init__(self, buffer: ModelBuffer, tensor: Tensor) -> None:
        self.buffer = buffer
        self.shape = tensor.shape
        self.sum_dtype = SUM_DTYPES[dtype_name(tensor)]
        self._last_value = tensor.clone()

    def is_changed(self) -> bool | Tensor:
        """Return whether the buffer has changed since it was last averaged. On a GPU the answer is not waited for."""
        tensor = self.buffer.tensor
        if tensor is None:
            return False
        if tensor.device.type == "cpu" or not is_alike(tensor, self._last_value):
            return not have_same_bits(tensor, self._last_value)
        return differ_in_bits(tensor, self._last_value)

    def contribution(self, takes_part: bool) -> Tensor:
        """Return the values that this replica adds to the sum: a flat host tensor, zero when it does not take part.

        Raises:
            GradientError: when the module has given the buffer another shape; on this rank only.
        """
        dtype = getattr(torch, self.sum_dtype)
        tensor = self.buffer.tensor
        if not takes_part or tensor is None:
            n_elements = self.shape.numel()
            return torch.zeros(n_elements, dtype=dtype, device="cpu")
        if tensor.shape != self.shape:
            raise GradientError(
                f"backward: expected buffer {self.buffer.name!r} of shape {tuple(self.shape)} as at the first step, "
                f"got {tuple(tensor.shape)}; keep its shape."
            )
        return tensor.reshape(-1).to("cpu", dtype)

    def publish(self, mean: Tensor) -> None:
        """Write the mean over the replicas into the module, unseen by autograd, which may have saved the buffer."""
        tensor = self.buffer.tensor
        if tensor is not None:
            tensor.data.copy_(mean.view(self.shape))
            self._last_value = tensor.clone()


def find_changed(records: Sequence[BufferRecord]) -> list[bool]:
    """Return, for each buffer, whether it has changed since it was last averaged. Cost: one wait for a GPU."""
    answers: list[bool | Tensor] = []
    flags: list[Tensor] = []
    for record in records:
        answer = record.is_changed()
        answers.append(answer)
        if isinstance(answer, Tensor):
            flags.append(answer)
    values: Iterator[bool] = iter(())
    if flags:
        device = flags[0].device
        flags_on_device = [flag.to(device) for flag in flags]
        values = iter(torch.stack(flags_on_device).tolist())
    are_changed: list[bool] = []
    for answer in answers:
        are_changed.append(next(values) if isinstance(answer, Tensor) else answer)
    return are_changed


def gather_changed(
    records: Sequence[BufferRecord],
    takes_part: Sequence[bool],
) -> list[Tensor | None]:
    """Return this replica's copies of the buffers that it changed; copies, as another replica may run next."""
    contributions: list[Tensor | None] = []
    for record, is_changed in zip(records, takes_part, strict=True):
        contribution = record.contribution(takes_part=True).clone() if is_changed else None
        contributions.append(contribution)
    return contributions


def average_buffers(
    records: Sequence[BufferRecord],
    contributions: Sequence[Sequence[Tensor | None]],
    counts: Sequence[float],
    reducer: Reducer,
) -> None:
    """Replace every buffer that some replica changed by its mean over the replicas that changed it.

    Collective over all ranks where a count is not zero. Blocking.

    Args:
        records: the buffers, the same on every rank.
        contributions: for each local replica, the result of `gather_changed`.
        counts: number of replicas that changed each buffer; equal on every rank.
        reducer: sums over the replicas.

    Cost: one all-reduce of the changed buffers for each dtype among them.
    """
    numbers_by_dtype: dict[str, list[int]] = {}
    for number, count in enumerate(counts):
        if count:
            dtype = records[number].sum_dtype
            numbers_by_dtype.setdefault(dtype, []).append(number)
    for dtype in sorted(numbers_by_dtype):
        numbers = numbers_by_dtype[dtype]
        rows = [_flat(records, numbers, contribution).numpy() for contribution in contributions]
        total = torch.from_numpy(sum_rows(reducer, rows, "buffers"))
        sizes = [records[number].shape.numel() for number in numbers]
        for number, part in zip(numbers, torch.split(total, sizes), strict=True):
            mean = part / counts[number]
            records[number].publish(mean)


def _flat(
    records: Sequence[BufferRecord],
    numbers: Sequence[int],
    contribution: Sequence[Tensor | None],
) -> Tensor:
    """Return a replica's values of some buffers, joined; zeros for buffers that it has not changed."""
    parts: list[Tensor] = []
    for number in numbers:
        values = contribution[number]
        if values is None:
            values = records[number].contribution(takes_part=False)
        parts.append(values)
    return torch.cat(parts)
