"""Any buffer as a host array: numpy in place, torch on the host in place, the rest by a staged copy.

Libraries are recognised by what their arrays can do; none is imported here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import CollectiveError

Array = npt.NDArray[Any]
#: Half precision has no MPI type: it is summed in float32.
_STAGED_AS_FLOAT32 = ("float16", "bfloat16")


def is_plain(buffer: Any) -> bool:
    """Return whether a buffer is a numpy array that algorithms take as it is. Cheap: small ones take microseconds."""
    if type(buffer) is not np.ndarray:
        return False
    dtype, flags = buffer.dtype, buffer.flags
    return flags.c_contiguous and flags.writeable and dtype.kind in "iufc" and dtype.char != "e"


@contextmanager
def host_array(buffer: Any) -> Iterator[Array]:
    """Yield `buffer` as a C-contiguous host array; what is written to it is in `buffer` when the block ends.

    Args:
        buffer: numpy array, torch tensor or cupy array of integers, floats or complex numbers.

    Raises:
        CollectiveError: for a buffer that is not contiguous, read-only, sparse, or of another kind; on this rank only.
    """
    _check(buffer)
    if isinstance(buffer, np.ndarray):
        yield from _staged_numpy(buffer)
    elif hasattr(buffer, "new_tensor"):
        yield from _torch_array(buffer)
    else:
        host = buffer.get()
        _require_numbers(host, host.dtype.kind in "iufc")
        yield host
        buffer.set(host)


def _check(buffer: Any) -> None:
    if isinstance(buffer, np.ndarray):
        contiguous, writeable = buffer.flags.c_contiguous, buffer.flags.writeable
        _require_numbers(buffer, buffer.dtype.kind in "iufc")
    elif hasattr(buffer, "new_tensor"):
        if buffer.is_sparse:
            raise CollectiveError("all_reduce: expected a dense tensor, got a sparse one; call to_dense() first.")
        contiguous, writeable = buffer.is_contiguous(), True
        _require_numbers(buffer, str(buffer.dtype) != "torch.bool")
    elif hasattr(buffer, "__cuda_array_interface__"):
        contiguous, writeable = buffer.flags.c_contiguous, True
    else:
        raise CollectiveError(
            f"all_reduce: expected a numpy, torch or cupy array, got {type(buffer).__name__}; wrap it in numpy.array."
        )
    if not contiguous or not writeable:
        what = "a read-only one" if contiguous else "one that is not contiguous"
        raise CollectiveError(f"all_reduce: expected a writable contiguous array, got {what}; pass a copy.")


def _require_numbers(buffer: Any, has_numbers: bool) -> None:
    if not has_numbers:
        raise CollectiveError(f"all_reduce: expected numbers, got dtype {buffer.dtype}; convert it first.")


def _staged_numpy(buffer: Array) -> Iterator[Array]:
    if buffer.dtype.name not in _STAGED_AS_FLOAT32:
        yield buffer
        return
    staged = buffer.astype(np.float32)
    yield staged
    buffer[...] = staged


def _torch_array(tensor: Any) -> Iterator[Array]:
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and str(tensor.dtype).removeprefix("torch.") not in _STAGED_AS_FLOAT32:
        yield tensor.numpy()
        return
    is_half = str(tensor.dtype).removeprefix("torch.") in _STAGED_AS_FLOAT32
    staged = (tensor.float() if is_half else tensor).cpu().numpy()
    yield staged
    tensor.copy_(tensor.new_tensor(staged))
