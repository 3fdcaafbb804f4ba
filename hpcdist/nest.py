"""Nests: tuples, lists and dicts, one inside another, of leaves that are opaque here.

Counter, torch.Size and torch's PackedSequence are leaves: each is one value.

The children of a dict are visited in the order of their sorted keys, as in TensorFlow, as replicas may build a dict in
any order.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: A leaf, or a tuple, list or dict of nests.
Nest = Any
#: Tuples that are leaves, by name: torch is not imported here.
_LEAVES_OF_TORCH = ("torch.Size", "torch.nn.utils.rnn.PackedSequence")


def map_nest(function: Callable[..., Any], nest: Nest, *more_nests: Nest) -> Nest:
    """Return the nest with function(leaf, ...) in place of every leaf; further nests have the same form.

    Types are kept, named tuples and the key order of dicts included.

    Raises:
        ValueError, KeyError: when another nest has fewer or more children.
    """
    if not is_nest(nest):
        return function(nest, *more_nests)
    if isinstance(nest, dict):
        children = [
            map_nest(function, nest[key], *(further_nest[key] for further_nest in more_nests))
            for key in sorted_keys(nest)
        ]
    else:
        children = [map_nest(function, *column) for column in zip(nest, *more_nests, strict=True)]
    return with_children(nest, children)


def is_nest(value: Any) -> bool:
    """Return whether a value has children, as a tuple, list or dict; else it is a leaf."""
    if type(value) in (tuple, list, dict):
        return True
    if not isinstance(value, (tuple, list, dict)) or isinstance(value, Counter):
        return False
    return f"{type(value).__module__}.{type(value).__name__}" not in _LEAVES_OF_TORCH


def leaves(nest: Nest) -> list[Any]:
    """Return the leaves of a nest, depth first."""
    collected: list[Any] = []
    map_nest(collected.append, nest)
    return collected


def with_leaves(nest: Nest, values: Iterable[Any]) -> Nest:
    """Return the nest with values in place of its leaves; there is one value for each leaf."""
    remaining_values = iter(values)
    return map_nest(lambda _: next(remaining_values), nest)


def form_of(nest: Nest) -> str:
    """Return a nest's keys and lengths as text, with * for leaves: equal for nests whose leaves belong together."""
    if not is_nest(nest):
        return "*"
    if isinstance(nest, dict):
        entries = [f"{key!r}: {form_of(nest[key])}" for key in sorted_keys(nest)]
        return "{" + ", ".join(entries) + "}"
    return f"[{', '.join(map(form_of, nest))}]"


def children_of(nest: Nest) -> list[Nest]:
    """Return the children of a tuple, list or dict, in the order in which they are visited."""
    if isinstance(nest, dict):
        return [nest[key] for key in sorted_keys(nest)]
    return list(nest)


def sorted_keys(nest: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in the order in which its children are visited."""
    try:
        return sorted(nest)
    except TypeError:  # such as numbers beside texts
        return sorted(nest, key=repr)


def with_children(nest: Nest, children: Sequence[Nest]) -> Nest:
    """Return a tuple, list or dict like `nest` with other children, given in the order in which they are visited."""
    if isinstance(nest, dict):
        # a copy keeps the type, the order of the keys and the attributes of a subclass
        mapping = copy.copy(nest)
        for key, child in zip(sorted_keys(nest), children, strict=True):
            mapping[key] = child
        return mapping
    if hasattr(nest, "_fields"):
        return type(nest)(*children)
    return type(nest)(children)
