"""torch tensors to host arrays and back, and facts about their memory."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcdist.dtypes import dtype_name
from hpcdist.program import tensor_internals

Array = npt.NDArray[Any]


def to_array(tensor: Tensor) -> tuple[Array, str]:
    """Return a tensor's values on the host and the name of its dtype; bfloat16 becomes its bits in uint16.

    The array shares memory with a contiguous host tensor.
    """
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.uint16).numpy(), "bfloat16"
    return host.numpy(), dtype_name(host)


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether a tensor of this dtype can be an array: numpy has neither fp8 nor complex32."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except (TypeError, RuntimeError):
        return dtype is torch.bfloat16
    return True


def from_array(array: Array, dtype: str) -> Tensor:
    """Return a host tensor with the values of `array`, in its memory if it is contiguous; the inverse of `to_array`."""
    array = np.asarray(array)  # sums of arrays without dimensions are numpy's scalars
    if not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    if dtype == "bfloat16":
        return tensor.view(torch.bfloat16)
    return tensor


def layout(tensor: Tensor) -> str:
    """Return shape, strides and dtype as text, equal for tensors whose gradients can be summed element by element."""
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    return f"{shape} {strides} {dtype_name(tensor)}"


def have_same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two tensors hold the same bits, NaNs too, in the same dtype and shape; or both are None."""
    if first is None or second is None or first is second:
        return first is second
    if first.is_sparse and second.is_sparse:
        if first.shape != second.shape:
            return False
        if not have_same_bits(first._indices(), second._indices()):
            return False
        return have_same_bits(first._values(), second._values())
    if not is_alike(first, second):
        return False
    return torch.equal(_bits(first), _bits(second))


def is_alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and layout."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.layout is second.layout
    )


def differ_in_bits(first: Tensor, second: Tensor) -> Tensor:
    """Return whether two dense tensors that are alike differ in a bit, as a 0-d bool tensor on their device."""
    return torch.ne(_bits(first), _bits(second)).any()


def has_values(gradient: Tensor) -> bool:
    """Return whether any element of a dense or sparse tensor is not zero."""
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.any())


def plus(total: Tensor, summand: Tensor) -> Tensor:
    """Return the sum of two tensors, each dense or sparse; in the first one's memory unless it becomes dense."""
    if total.is_sparse and not summand.is_sparse:
        return summand + total
    return total.add_(summand)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a dense tensor, flat, as whole numbers."""
    integer_dtypes = {2: torch.int16, 4: torch.int32}
    integer_dtype = integer_dtypes.get(tensor.element_size(), torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(integer_dtype)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a flat view of the memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, in any order of dimensions."""
    expected_stride = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dimensions):
        if size > 1:
            if stride != expected_stride:
                return False
            expected_stride *= size
    return True


def is_only_holder(tensor: Tensor) -> bool:
    """Return whether no other tensor shares this one's memory, so that it may be overwritten unseen.

    Two holders are counted: the tensor, and the storage object that is asked.
    """
    return tensor_internals.n_holders(tensor) == 2


def describe_numerics() -> dict[str, str | int]:
    """Return the facts of this machine, besides the program, that determine the bits of results."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
