"""The only door to cloudpickle: functions and objects that travel between the ranks of a job, and nowhere else.

Objects that were defined in the program itself go by value. Objects that the receiver already has may go by a name.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from hpcdist.ps.messages import Bytes


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes a pickle; see `dumps`."""

    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._name_of = name_of

    def persistent_id(self, obj: Any) -> Any:
        return self._name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Send plain tensors of the host as arrays: quicker than torch, and of a view its own elements alone."""
        if type(obj) is Tensor and not obj.requires_grad and _is_array(obj):
            return torch.from_numpy, (np.array(obj.numpy()),)
        return super().reducer_override(obj)


#: The dtypes that numpy has.
_ARRAYS = frozenset(
    (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
)


def _is_array(tensor: Tensor) -> bool:
    """Return whether numpy can view a tensor as an array."""
    is_on_host = tensor.device.type == "cpu"
    return is_on_host and tensor.layout is torch.strided and tensor.dtype in _ARRAYS


class _Unpickler(pickle.Unpickler):
    """Reads a pickle; see `loads`."""

    def __init__(self, file: io.BytesIO, find: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._find = find

    def persistent_load(self, pid: Any) -> Any:
        return self._find(pid)


def _nameless(value: Any) -> None:
    """Return no name: every object goes by value."""
    return None


def dumps(value: Any, name_of: Callable[[Any], Any] = _nameless) -> Bytes:
    """Return an object as bytes.

    Args:
        value: object to send.
        name_of: function that returns the name that travels in place of an object, or None to send it by value.
    """
    file = io.BytesIO()
    _Pickler(file, name_of).dump(value)
    return np.frombuffer(file.getbuffer(), np.uint8)


def loads(payload: Bytes, find: Callable[[Any], Any] = _nameless) -> Any:
    """Return the object of another rank of this job.

    Args:
        payload: bytes that `dumps` returned.
        find: function that returns the object of a name.
    """
    return _Unpickler(io.BytesIO(payload.tobytes()), find).load()
