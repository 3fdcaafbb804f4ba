"""Which part of a batch a tensor belongs to, by the memory that it shares with what was handed out.

A slice, a view, and `.to()` or `.float()` that change nothing share the memory. A copy, a cast or `torch.cat` does not.
"""

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hpcdist.program import torch_hooks
from hpcdist.program.torch_hooks import StorageName
from hpcdist.runtime.parts import Part

#: Number of known tensors and arrays from which on freed ones are removed.
_MAX_KNOWN = 64
#: Parts of one memory, such as windows of a recording, that are known at a time.
_MAX_RANGES = 64
#: Tensors of a batch that are looked at, and how deep they may lie in it.
_MAX_LEAVES = 64
_MAX_DEPTH = 4


@dataclass(frozen=True)
class _ArrayMemory:
    """The memory of an array of a part."""

    array: "weakref.ref[Any]"
    addresses: range
    part: Part


class _TensorMemory:
    """The memory of tensors that are views of one storage, and the parts that lie in it.

    Args:
        name: of the storage. As long as it is held, no other storage has its number.
    """

    def __init__(self, name: StorageName) -> None:
        self.name = name
        self._parts: list[tuple[range, Part]] = []

    def add(self, addresses: range, part: Part) -> None:
        """Note that a part lies at these addresses, in place of one that lay there before."""
        remaining_entries = [entry for entry in self._parts if entry[0] != addresses]
        self._parts = [*remaining_entries[-_MAX_RANGES:], (addresses, part)]

    def newest_part(self) -> Part:
        """Return the part that was noted last."""
        return self._parts[-1][1]

    def part_at(self, address: int) -> Part | None:
        """Return the newest part at an address."""
        for addresses, part in reversed(self._parts):
            if address in addresses:
                return part
        return None


class PartTensors:
    """Knows the memory of parts for as long as it is in use."""

    def __init__(self) -> None:
        self._of_tensors: dict[int, _TensorMemory] = {}
        self._of_arrays: list[_ArrayMemory] = []
        self._limit = _MAX_KNOWN

    def add(self, part: Part, nests: Any) -> None:
        """Remember the memory of a part.

        Args:
            part: what is handed out.
            nests: its tensors and arrays, of all local replicas.
        """
        if len(self._of_tensors) + len(self._of_arrays) > self._limit:
            self._forget_freed()
            self._limit = max(_MAX_KNOWN, 2 * (len(self._of_tensors) + len(self._of_arrays)))
        for leaf in leaves_of(nests):
            if isinstance(leaf, np.ndarray):
                addresses = _addresses(leaf.ctypes.data, leaf.nbytes)
                self._of_arrays.append(_ArrayMemory(weakref.ref(leaf), addresses, part))
            elif has_memory(leaf):
                self._add_tensor(leaf, part)

    def _add_tensor(self, tensor: Tensor, part: Part) -> None:
        number = torch_hooks.storage_number(tensor)
        if number not in self._of_tensors:
            self._of_tensors[number] = _TensorMemory(StorageName(tensor))
        self._of_tensors[number].add(_addresses(tensor.data_ptr(), _nbytes(tensor)), part)

    def _forget_freed(self) -> None:
        for number, memory in list(self._of_tensors.items()):
            if memory.name.is_freed:
                del self._of_tensors[number]
        self._of_arrays = [memory for memory in self._of_arrays if memory.array() is not None]

    def parts_of(self, inputs: Any) -> list[Part]:
        """Return the parts whose memory tensors among `inputs` have, each once."""
        parts: list[Part] = []
        if not self._of_tensors and not self._of_arrays:
            return parts
        for leaf in leaves_of(inputs):
            part = self._part_of(leaf) if isinstance(leaf, Tensor) and has_memory(leaf) else None
            if part is not None and part not in parts:
                parts.append(part)
        return parts

    def _part_of(self, tensor: Tensor) -> Part | None:
        address: int = tensor.data_ptr()
        memory = self._of_tensors.get(torch_hooks.storage_number(tensor))
        if memory is not None:
            return memory.newest_part() if tensor.numel() == 0 else memory.part_at(address)
        return self._part_of_array(address)

    def _part_of_array(self, address: int) -> Part | None:
        """Return the part of an array that a tensor shares memory with, as one that torch.from_numpy has made."""
        for memory in reversed(self._of_arrays):
            if address in memory.addresses and memory.array() is not None:
                return memory.part
        return None


def _addresses(start: int, nbytes: int) -> range:
    return range(start, start + max(nbytes, 1))


def _nbytes(tensor: Tensor) -> int:
    """Return how many bytes lie between the first element of a tensor and its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (steps + 1) * tensor.element_size()


def has_memory(leaf: Any) -> bool:
    """Return whether something is a tensor of one piece of memory: no sparse, nested or fake one."""
    if not isinstance(leaf, Tensor) or leaf.is_sparse or leaf.is_nested or leaf.is_meta:
        return False
    return leaf.layout is torch.strided and not isinstance(leaf, FakeTensor)


def leaves_of(nest: Any) -> list[Any]:
    """Return the leaves of a nest, also of objects such as graphs and packed sequences; not more than a few."""
    if isinstance(nest, Tensor):
        return [nest]
    leaves: list[Any] = []
    waiting = [(nest, 0)]
    while waiting and len(leaves) < _MAX_LEAVES:
        node, depth = waiting.pop()
        children = (
            None
            if depth == _MAX_DEPTH or isinstance(node, (Tensor, np.ndarray))
            else _children_of(node)
        )
        if children is None:
            leaves.append(node)
        else:
            waiting += [(child, depth + 1) for child in reversed(children)]
    return leaves


def _children_of(node: Any) -> list[Any] | None:
    if isinstance(node, dict):
        return list(node.values())
    if isinstance(node, (list, tuple)):
        return list(itertools.islice(node, _MAX_LEAVES))
    attributes = getattr(node, "__dict__", None)
    return list(attributes.values()) if attributes and not callable(node) else None


def length_of(nest: Any) -> int | None:
    """Return the length of the first tensor of a nest; None where there is none."""
    for leaf in leaves_of(nest):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    return None
