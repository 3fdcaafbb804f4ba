"""Values of the replicas of this process, and nests of them."""

import copy
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.nest import is_nest, leaves, map_nest, sorted_keys, with_children


class DistributedValues:
    """One value for each replica of this process, in the order of replicas; as `tf.distribute.DistributedValues`.

    Attributes:
        values: tuple with one value for each local replica.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        texts = ", ".join(map(repr, self.values))
        return f"{type(self).__name__}({texts})"


class PerReplica(DistributedValues):
    """Values that differ between replicas, such as parts of a batch and results of `strategy.run`."""


class Mirrored(DistributedValues):
    """Values that are equal on all replicas."""


def select(local_index: int, nest: Any) -> Any:
    """Return a nest with the value of one local replica in place of every DistributedValues, in dataclasses too."""

    def chosen(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            return leaf.values[local_index]
        if not _is_distributed(leaf, set()):
            return leaf
        changed = copy.copy(leaf)  # not made anew, which would run its __post_init__ again
        for field in fields(leaf):
            object.__setattr__(changed, field.name, select(local_index, getattr(leaf, field.name)))
        return changed

    return map_nest(chosen, nest)


def _is_distributed(leaf: Any, seen: set[int]) -> bool:
    """Return whether a leaf is DistributedValues, or a dataclass that holds some.

    Args:
        leaf: leaf of a nest.
        seen: ids of the dataclasses that were looked into.
    """
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return isinstance(leaf, DistributedValues)
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    for field in fields(leaf):
        value = getattr(leaf, field.name, None)
        if any(_is_distributed(child, seen) for child in leaves(value)):
            return True
    return False


def local_values(value: Any) -> tuple[Any, ...]:
    """Return the values or a variable's copies of the local replicas; anything else becomes a tuple of one."""
    if hasattr(value, "local_copies"):
        return tuple(value.local_copies)
    if isinstance(value, DistributedValues):
        return value.values
    return (value,)


def regroup(
    nests: Sequence[Any],
    is_single_kept: bool = False,
    has_no_plain: bool = False,
    keeps_objects: bool = True,
) -> Any:
    """Return one nest with PerReplica leaves, made of one nest for each local replica.

    A leaf that is the same object in all nests is left as it is, unless it is a number.

    Args:
        nests: nests of one structure.
        is_single_kept: whether a single replica's values are wrapped too.
        keeps_objects: whether a single replica's objects other than numbers, arrays and tensors are wrapped too. False
            for arguments: a model that is passed on is the same object for all replicas.
        has_no_plain: whether all leaves are wrapped.

    Raises:
        UsageError: when the structures differ.
    """
    first = nests[0]
    options = (is_single_kept, has_no_plain, keeps_objects)
    if is_nest(first) and isinstance(first, dict):
        keys = [sorted_keys(nest) if isinstance(nest, dict) else None for nest in nests]
        _check_alike(nests, keys)
        children: list[Any] = []
        for key in sorted_keys(first):
            column = [nest[key] for nest in nests]
            children.append(regroup(column, *options))
        return with_children(first, children)
    if is_nest(first):
        lengths = [len(nest) if isinstance(nest, type(first)) else None for nest in nests]
        _check_alike(nests, lengths)
        columns = zip(*nests, strict=True)
        return with_children(first, [regroup(column, *options) for column in columns])
    _check_alike(nests, [is_nest(nest) for nest in nests])
    # equal numbers may be one object, but are per-replica values
    is_number = isinstance(first, (int, float, complex))
    is_array = hasattr(first, "shape") and not hasattr(first, "local_copies")
    is_kept_single = (
        is_single_kept and first is not None and (keeps_objects or is_number or is_array)
    )
    is_wrapped = has_no_plain or (is_kept_single if len(nests) == 1 else is_number)
    if all(nest is first for nest in nests) and not is_wrapped:
        return first
    return PerReplica(nests)


def _check_alike(nests: Sequence[Any], shapes: Sequence[Any]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        kinds = ", ".join(type(nest).__name__ for nest in nests)
        raise UsageError(
            f"run: expected the same structure from every replica, got {kinds} of {shapes}; return the same nest of "
            f"tuples, lists and dicts on all replicas."
        )
