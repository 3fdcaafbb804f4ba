"""The part of a batch that a tensor belongs to, by the memory that it shares with the tensors that were handed out.

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

from hpcdist.program import tensor_internals
from hpcdist.program.tensor_internals import StorageName
from hpcdist.runtime.parts import Part

#: Number of known tensors and arrays from which on freed ones are removed.
_MAX_KNOWN = 64
#: Number of parts of one memory, such as windows of a recording, that are known at a time.
_MAX_RANGES = 64
#: Number of tensors of a batch that are looked at, and their greatest depth in the batch.
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
        name: name of the storage. As long as the name is held, no other storage has its number.
    """

    def __init__(self, name: StorageName) -> None:
        self.name = name
        self._parts: list[tuple[range, Part]] = []

    def add(self, addresses: range, part: Part) -> None:
        """Note that a part lies at these addresses, in place of a part that lay there before."""
        entries = [entry for entry in self._parts if entry[0] != addresses]
        newest_entries = entries[-_MAX_RANGES:]
        newest_entries.append((addresses, part))
        self._parts = newest_entries

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
    """Knows the memory of parts for as long as the memory is in use."""

    def __init__(self) -> None:
        self._of_tensors: dict[int, _TensorMemory] = {}
        self._of_arrays: list[_ArrayMemory] = []
        self._limit = _MAX_KNOWN

    def add(self, part: Part, nests: Any) -> None:
        """Remember the memory of a part.

        Args:
            part: part that is handed out.
            nests: tensors and arrays of the part, of all local replicas.
        """
        if len(self._of_tensors) + len(self._of_arrays) > self._limit:
            self._forget_freed()
            n_known = len(self._of_tensors) + len(self._of_arrays)
            self._limit = max(_MAX_KNOWN, 2 * n_known)
        for leaf in leaves_of(nests):
            if isinstance(leaf, np.ndarray):
                addresses = _addresses(leaf.ctypes.data, leaf.nbytes)
                memory = _ArrayMemory(weakref.ref(leaf), addresses, part)
                self._of_arrays.append(memory)
            elif has_memory(leaf):
                self._add_tensor(leaf, part)

    def _add_tensor(self, tensor: Tensor, part: Part) -> None:
        number = tensor_internals.storage_number(tensor)
        if number not in self._of_tensors:
            self._of_tensors[number] = _TensorMemory(StorageName(tensor))
        addresses = _addresses(tensor.data_ptr(), _nbytes(tensor))
        self._of_tensors[number].add(addresses, part)

    def _forget_freed(self) -> None:
        for number, memory in list(self._of_tensors.items()):
            if memory.name.is_freed:
                del self._of_tensors[number]
        self._of_arrays = [memory for memory in self._of_arrays if memory.array() is not None]

    def parts_of(self, inputs: Any) -> list[Part]:
        """Return the parts whose memory the tensors among `inputs` share, each part once."""
        parts: list[Part] = []
        if not self._of_tensors and not self._of_arrays:
            return parts
        for leaf in leaves_of(inputs):
            if isinstance(leaf, Tensor) and has_memory(leaf):
                part = self._part_of(leaf)
                if part is not None and part not in parts:
                    parts.append(part)
        return parts

    def _part_of(self, tensor: Tensor) -> Part | None:
        address: int = tensor.data_ptr()
        number = tensor_internals.storage_number(tensor)
        memory = self._of_tensors.get(number)
        if memory is None:
            return self._part_of_array(address)
        if tensor.numel() == 0:
            return memory.newest_part()
        return memory.part_at(address)

    def _part_of_array(self, address: int) -> Part | None:
        """Return the part of the array at an address, which a tensor of torch.from_numpy shares."""
        for memory in reversed(self._of_arrays):
            if address in memory.addresses and memory.array() is not None:
                return memory.part
        return None


def _addresses(start: int, nbytes: int) -> range:
    return range(start, start + max(nbytes, 1))


def _nbytes(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    last_offset = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last_offset += (size - 1) * stride
    return (last_offset + 1) * tensor.element_size()


def has_memory(leaf: Any) -> bool:
    """Return whether an object is a tensor in one piece of memory, and not a sparse, nested or fake tensor."""
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
        children: list[Any] | None = None
        if depth != _MAX_DEPTH and not isinstance(node, (Tensor, np.ndarray)):
            children = _children_of(node)
        if children is None:
            leaves.append(node)
        else:
            waiting += [(child, depth + 1) for child in reversed(children)]
    return leaves


def _children_of(node: Any) -> list[Any] | None:
    """Return the items of a container, or the attributes of an object; None for a leaf."""
    if isinstance(node, dict):
        return list(node.values())
    if isinstance(node, (list, tuple)):
        return list(itertools.islice(node, _MAX_LEAVES))
    attributes = getattr(node, "__dict__", None)
    if not attributes or callable(node):
        return None
    return list(attributes.values())


def length_of(nest: Any) -> int | None:
    """Return the length of the first tensor of a nest; None where there is none."""
    for leaf in leaves_of(nest):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    return None
