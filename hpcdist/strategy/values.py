"""Values that differ, or are held, per replica; and nests of them."""

from collections.abc import Callable, Sequence
from typing import Any

from hpcdist.errors import UsageError


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


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest of tuples, lists and dicts with function(leaf) in place of every leaf.

    Parts of dicts are visited in the order of their sorted keys, as in TensorFlow: replicas may build them in any.
    """
    if isinstance(nest, dict):
        parts_of = {key: map_leaves(function, nest[key]) for key in _sorted_keys(nest)}
        return type(nest)((key, parts_of[key]) for key in nest)
    if isinstance(nest, (tuple, list)):
        parts = [map_leaves(function, part) for part in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return function(nest)


def leaves_of(nest: Any) -> list[Any]:
    """Return the leaves of a nest, depth first; see `map_leaves` for their order."""
    found: list[Any] = []
    map_leaves(found.append, nest)
    return found


def form_of(nest: Any) -> str:
    """Return a nest's keys and lengths as text, with * for leaves: equal for nests whose leaves belong together."""
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{key!r}: {form_of(nest[key])}" for key in _sorted_keys(nest)) + "}"
    return f"[{', '.join(map(form_of, nest))}]" if isinstance(nest, (tuple, list)) else "*"


def _sorted_keys(nest: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(nest)
    except TypeError:  # such as numbers beside texts
        return sorted(nest, key=repr)


def select(place: int, nest: Any) -> Any:
    """Return a nest with the value of one local replica in place of every DistributedValues."""
    return map_leaves(lambda leaf: leaf.values[place] if isinstance(leaf, DistributedValues) else leaf, nest)


def local_values(value: Any) -> tuple[Any, ...]:
    """Return the values of the local replicas, also of a variable; of anything else, itself."""
    if hasattr(value, "local_copies"):
        return tuple(value.local_copies)
    return value.values if isinstance(value, DistributedValues) else (value,)


def regroup(nests: Sequence[Any], is_single_kept: bool = False) -> Any:
    """Return one nest with PerReplica leaves, made of one nest for each local replica.

    A leaf that is the same object on all of them is left as it is, unless it is a number.

    Args:
        nests: all of one structure.
        is_single_kept: whether a single replica's values are wrapped too.

    Raises:
        UsageError: when the structures differ.
    """
    first = nests[0]
    if isinstance(first, dict):
        _check_alike(nests, [_sorted_keys(nest) if isinstance(nest, dict) else None for nest in nests])
        return type(first)((key, regroup([nest[key] for nest in nests], is_single_kept)) for key in first)
    if isinstance(first, (tuple, list)):
        _check_alike(nests, [len(nest) if isinstance(nest, type(first)) else None for nest in nests])
        parts = [regroup(parts, is_single_kept) for parts in zip(*nests, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    _check_alike(nests, [isinstance(nest, (dict, tuple, list)) for nest in nests])
    is_number = isinstance(first, (int, float, complex))  # equal ones may be one object, and are values all the same
    is_kept_single = is_single_kept and first is not None
    if all(nest is first for nest in nests) and not (is_kept_single if len(nests) == 1 else is_number):
        return first
    return PerReplica(nests)


def _check_alike(nests: Sequence[Any], shapes: Sequence[Any]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        kinds = ", ".join(type(nest).__name__ for nest in nests)
        raise UsageError(
            f"run: expected the same structure from every replica, got {kinds} of {shapes}; return the same nest of "
            f"tuples, lists and dicts on all replicas."
        )
