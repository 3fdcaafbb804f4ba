"""Any buffer as a host array: numpy arrays and torch host tensors in place, other buffers through a staged copy.

`host_array` is for buffers that are overwritten; `to_host` and `from_host` for results of another shape.

Array libraries are recognised by the attributes of their arrays; none is imported here.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.gpu.cupy_door import is_device_buffer, load_cupy
from hpcdist.dtypes import HALF, dtype_name
from hpcdist.errors import CollectiveError

Array = npt.NDArray[Any]
#: Dtypes of numbers but for half precision, which MPI has no type for.
_NUMBERS = frozenset(np.typecodes["AllInteger"] + np.typecodes["AllFloat"]) - {"e"}


def shared_array(buffer: Any) -> Array | None:
    """Return a numpy array in the memory of a buffer on the host, which algorithms can use in place.

    Return None for a buffer that has to be staged, or refused: see `host_array`. Costs 0.1 microseconds for numpy, 1
    for torch.
    """
    if type(buffer) is np.ndarray:
        if buffer.flags.carray and buffer.dtype.char in _NUMBERS:
            return buffer
        return None
    if not hasattr(buffer, "new_tensor") or not buffer.is_cpu or not _has_numbers(buffer.dtype):
        return None
    if buffer.is_sparse or not buffer.is_contiguous():
        return None
    array: Array = buffer.detach().numpy()
    return array


@functools.cache
def _has_numbers(torch_dtype: object) -> bool:
    name = str(torch_dtype).removeprefix("torch.")
    return hasattr(np, name) and np.dtype(name).char in _NUMBERS


@contextmanager
def host_array(buffer: Any, is_moved: bool = False) -> Iterator[Array]:
    """Yield `buffer` as a C-contiguous host array; values written to it are in `buffer` when the block ends.

    Args:
        buffer: numpy array, torch tensor or cupy array of integers, floats or complex numbers.
        is_moved: whether values are moved, not reduced, so that they may be bools, too.

    Raises:
        CollectiveError: for a buffer that is not contiguous, read-only, sparse, or of another kind; on this rank only.
    """
    shared = shared_array(buffer)
    if shared is not None:
        yield shared
        return
    kinds = "iufcb" if is_moved else "iufc"
    _check(buffer, kinds)
    if isinstance(buffer, np.ndarray):
        yield from _staged_numpy(buffer)
    elif hasattr(buffer, "new_tensor"):
        yield from _torch_array(buffer)
    else:
        host = buffer.get()
        _require_numbers(host, host.dtype.kind in kinds)
        yield host
        buffer.set(host)


def _check(buffer: Any, kinds: str) -> None:
    """Raise CollectiveError for a buffer that cannot be a host array of these kinds of dtypes."""
    if isinstance(buffer, np.ndarray):
        contiguous = buffer.flags.c_contiguous
        writeable = buffer.flags.writeable
        _require_numbers(buffer, buffer.dtype.kind in kinds)
    elif hasattr(buffer, "new_tensor"):
        if buffer.is_sparse:
            raise CollectiveError(
                "all_reduce: expected a dense tensor, got a sparse one; call to_dense() first."
            )
        contiguous = buffer.is_contiguous()
        writeable = True
        _require_numbers(buffer, dtype_name(buffer) != "bool" or "b" in kinds)
    elif hasattr(buffer, "__cuda_array_interface__"):
        contiguous = buffer.flags.c_contiguous
        writeable = True
    else:
        raise CollectiveError(
            f"all_reduce: expected a numpy, torch or cupy array, got {type(buffer).__name__}; wrap it in numpy.array."
        )
    if not contiguous or not writeable:
        description = "a read-only one" if contiguous else "one that is not contiguous"
        raise CollectiveError(
            f"all_reduce: expected a writable contiguous array, got {description}; pass a copy."
        )


def _require_numbers(buffer: Any, has_numbers: bool) -> None:
    if not has_numbers:
        raise CollectiveError(
            f"all_reduce: expected numbers, got dtype {buffer.dtype}; convert it first."
        )


def _staged_numpy(buffer: Array) -> Iterator[Array]:
    if buffer.dtype.name not in HALF:
        yield buffer
        return
    staged = buffer.astype(np.float32)
    yield staged
    buffer[...] = staged


def _torch_array(tensor: Any) -> Iterator[Array]:
    tensor = tensor.detach()
    is_half = dtype_name(tensor) in HALF  # MPI has no type for it: it is summed in float32
    if tensor.device.type == "cpu" and not is_half:  # such as bools, which are moved
        yield tensor.numpy()
        return
    staged = tensor.cpu()
    if is_half:
        staged = staged.float()  # on the host, so that halves are copied
    yield staged.numpy()
    tensor.copy_(staged.to(tensor.dtype))


def to_host(array_like: Any, call: str) -> Array:
    """Return a C-contiguous host array with the values of a numpy, torch or cupy array, or an object like one.

    Half precision, which MPI has no type for, becomes float32. The array may share the memory of `array_like`.

    Raises:
        CollectiveError: for a sparse tensor, or an object without numbers or bools; on this rank only.
    """
    if hasattr(array_like, "new_tensor"):
        if array_like.is_sparse:
            raise CollectiveError(
                f"{call}: expected a dense tensor, got a sparse one; call to_dense() first."
            )
        tensor = array_like.detach().contiguous()
        if dtype_name(tensor) in HALF:
            tensor = tensor.float()
        host: Array = tensor.cpu().numpy()
    else:
        try:
            if hasattr(array_like, "__cuda_array_interface__"):
                array_like = array_like.get()
            host = np.asarray(array_like)
        except (ValueError, TypeError) as error:
            raise CollectiveError(
                f"{call}: expected numbers or bools, got {error}; pass an array."
            ) from error
        if host.dtype.name in HALF:
            host = host.astype(np.float32)
    if host.dtype.kind not in "iufcb":
        raise CollectiveError(
            f"{call}: expected numbers or bools, got dtype {host.dtype}; convert them first."
        )
    if not host.ndim:  # numpy would return an array of one dimension
        return host
    return np.ascontiguousarray(host)


def from_host(array: Array, like: Any) -> Any:
    """Return a host array's values as an array of the kind, dtype and device of `like`."""
    if hasattr(like, "new_tensor"):
        return like.detach().new_tensor(array)
    if is_device_buffer(like):
        return load_cupy().asarray(array, like.dtype)
    return array.astype(getattr(like, "dtype", array.dtype), copy=False)
