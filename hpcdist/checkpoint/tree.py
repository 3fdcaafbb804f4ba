"""Converts nested state to JSON and named arrays, and back. Refuses anything else: there is no pickle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import CheckpointDamaged, CheckpointError

Array = npt.NDArray[Any]
#: Deepest nesting of a state. A fixed limit: Python's recursion limit depends on the depth of the caller.
MAX_DEPTH = 100
#: The same in levels of JSON: three per nesting level, and some around them.
_MAX_LEVELS = 3 * MAX_DEPTH + 8


@dataclass(frozen=True)
class NamedArray:
    """One array of a checkpoint.

    Attributes:
        name: its path in the state, such as "optimizer/state/0/exp_avg".
        dtype: name of its dtype; "bfloat16" for its bits in uint16.
        values: a C-contiguous array of any shape.
    """

    name: str
    dtype: str
    values: Array


def encode(
    value: Any, name: str, to_array: Callable[[Any], tuple[Array, str]], arrays: list[NamedArray], depth: int = 0
) -> Any:
    """Return `value` as JSON, its arrays moved to `arrays`.

    Args:
        value: nested dicts (keys are text or integers), lists, tuples, numbers, text, None and arrays.
        name: name of the value, for messages and for the arrays in it.
        to_array: returns (array, dtype name) of a tensor, that is, a leaf with new_tensor().
        arrays: list to which arrays are appended.
        depth: nesting levels around the value.

    Raises:
        CheckpointError: for a value of another type, or nesting deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"save: expected nesting of at most {MAX_DEPTH} levels, got more in {name[:60]!r}; flatten it."
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        parts = value.items()
        return {"dict": [[_key(k, name), encode(v, f"{name}/{k}", to_array, arrays, depth + 1)] for k, v in parts]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(v, f"{name}/{i}", to_array, arrays, depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # a dtype's name omits the byte order
        return {"array": _append(NamedArray(name, array.dtype.name, array), arrays)}
    if hasattr(value, "new_tensor"):
        array, dtype = to_array(value)
        return {"tensor": _append(NamedArray(name, dtype, array), arrays)}
    raise CheckpointError(
        f"save: expected numbers, text, arrays, and dicts, lists and tuples of them, got {type(value).__name__} in "
        f"{name!r}; leave it out of state_dict()."
    )


def _append(array: NamedArray, arrays: list[NamedArray]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _key(key: Any, name: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise CheckpointError(f"save: expected keys as text or whole numbers, got {key!r} in {name!r}; rename it.")
    return key


def decode(node: Any, from_array: Callable[[Array, str], Any], arrays: list[NamedArray]) -> Any:
    """Return the value that `encode` turned into `node` and `arrays`; both may use the memory of `arrays`.

    Raises:
        CheckpointDamaged: if `node` is not a result of `encode`.
    """
    return _decode(node, from_array, arrays, set(range(len(arrays))))


def is_too_deep(json: Any) -> bool:
    """Return whether JSON has more levels than a state may have. Visits each node once; does not recurse."""
    level = [json]
    for _ in range(_MAX_LEVELS):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [part for nest in parts for part in nest]
    return bool(level)


def _decode(node: Any, from_array: Callable[[Array, str], Any], arrays: list[NamedArray], unused: set[int]) -> Any:
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((kind, content),) = node.items()
        if kind == "dict" and is_list_of_pairs(content):
            return {key: _decode(part, from_array, arrays, unused) for key, part in content}
        if kind in ("list", "tuple") and isinstance(content, list):
            parts = [_decode(part, from_array, arrays, unused) for part in content]
            return tuple(parts) if kind == "tuple" else parts
        if kind in ("array", "tensor") and type(content) is int and content in unused:
            unused.remove(content)  # repeated references could multiply its copies beyond memory
            array = arrays[content]
            return from_array(array.values, array.dtype) if kind == "tensor" else array.values
    raise CheckpointDamaged(
        f"restore: expected a dict, list, tuple or array node, got {str(node)[:60]!r}; use another file."
    )


def is_list_of_pairs(content: Any) -> bool:
    """Return whether JSON is the content of a "dict" node."""
    return isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int)) for pair in content
    )
