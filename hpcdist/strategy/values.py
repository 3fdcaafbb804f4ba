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
        values: a tuple, one for each local replica.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.values))})"


class PerReplica(DistributedValues):
    """Values that differ between replicas, such as parts of a batch and what `strategy.run` returns."""


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
    """Return whether a leaf is DistributedValues, or a dataclass that holds some; `seen`: dataclasses it is inside."""
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return isinstance(leaf, DistributedValues)
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    field_values = [getattr(leaf, field.name, None) for field in fields(leaf)]
    return any(_is_distributed(child, seen) for value in field_values for child in leaves(value))


def local_values(value: Any) -> tuple[Any, ...]:
    """Return the values of the local replicas, including those of a variable; of anything else, itself."""
    if hasattr(value, "local_copies"):
        return tuple(value.local_copies)
    return value.values if isinstance(value, DistributedValues) else (value,)


def regroup(
    nests: Sequence[Any],
    is_single_kept: bool = False,
    has_no_plain: bool = False,
    keeps_objects: bool = True,
) -> Any:
    """Return one nest with PerReplica leaves, made of one nest for each local replica.

    A leaf that is the same object on all of them is left as it is, unless it is a number.

    Args:
        nests: all of one structure.
        is_single_kept: whether a single replica's values are wrapped too.
        keeps_objects: whether that holds for other objects than numbers, arrays and tensors, too: a model that is
            passed on is the same one for all replicas.
        has_no_plain: whether all leaves are wrapped.

    Raises:
        UsageError: when the structures differ.
    """
    first = nests[0]
    options = (is_single_kept, has_no_plain, keeps_objects)
    if is_nest(first) and isinstance(first, dict):
        _check_alike(
            nests, [sorted_keys(nest) if isinstance(nest, dict) else None for nest in nests]
        )
        columns = [[nest[key] for nest in nests] for key in sorted_keys(first)]
        return with_children(first, [regroup(column, *options) for column in columns])
    if is_nest(first):
        _check_alike(
            nests, [len(nest) if isinstance(nest, type(first)) else None for nest in nests]
        )
        columns = [list(column) for column in zip(*nests, strict=True)]
        return with_children(first, [regroup(column, *options) for column in columns])
    _check_alike(nests, [is_nest(nest) for nest in nests])
    # equal ones may be one object, but are per-replica values
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
