"""Nested state to JSON and named arrays, and back. No pickle: what is neither is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import CheckpointDamaged, CheckpointError

Array = npt.NDArray[Any]
#: Nests in nests that a checkpoint may have: Python's own limit depends on who calls.
MAX_DEPTH = 100
#: The same as levels of JSON, three for each nest, and some around them.
_MAX_LEVELS = 3 * MAX_DEPTH + 8


@dataclass(frozen=True)
class NamedArray:
    """One array of a checkpoint.

    Attributes:
        name: where it stood in the nest, such as "optimizer/state/0/exp_avg".
        dtype: the name of its dtype; "bfloat16" for its bits in uint16.
        values: C-contiguous, any shape.
    """

    name: str
    dtype: str
    values: Array


def encode(
    value: Any, name: str, to_array: Callable[[Any], tuple[Array, str]], arrays: list[NamedArray], depth: int = 0
) -> Any:
    """Return `value` as JSON, its arrays moved to `arrays`.

    Args:
        value: nest of dicts (keys text or whole numbers), lists, tuples, numbers, text, None and arrays.
        name: of the value, for messages and for the arrays in it.
        to_array: returns (array, dtype name) of a tensor, which is a leaf with new_tensor().
        arrays: the list that arrays are appended to.
        depth: of nests around the value.

    Raises:
        CheckpointError: for a value of another type, or nests deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"save: expected at most {MAX_DEPTH} nests in nests, got more in {name[:60]!r}; flatten it."
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
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # the name of a dtype does not tell the order
        return {"array": _append(NamedArray(name, array.dtype.name, array), arrays)}
    if hasattr(value, "new_tensor"):
        array, dtype = to_array(value)
        return {"tensor": _append(NamedArray(name, dtype, array), arrays)}
    raise CheckpointError(
        f"save: expected numbers, text, arrays and nests of them, got {type(value).__name__} in {name!r}; leave it out "
        f"of state_dict()."
    )


def _append(array: NamedArray, arrays: list[NamedArray]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _key(key: Any, name: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise CheckpointError(f"save: expected keys as text or whole numbers, got {key!r} in {name!r}; rename it.")
    return key


def decode(node: Any, from_array: Callable[[Array, str], Any], arrays: list[NamedArray]) -> Any:
    """Return the value that `encode` turned into `node` and `arrays`; `from_array` makes tensors of its own memory.

    Raises:
        CheckpointDamaged: when `node` is not what `encode` makes.
    """
    return _decode(node, from_array, arrays, set(range(len(arrays))))


def is_too_deep(json: Any) -> bool:
    """Return whether JSON has more levels than a state may have. Costs a look at each node; does not recur."""
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
        if kind == "dict" and _is_list_of_pairs(content):
            return {key: _decode(part, from_array, arrays, unused) for key, part in content}
        if kind in ("list", "tuple") and isinstance(content, list):
            parts = [_decode(part, from_array, arrays, unused) for part in content]
            return tuple(parts) if kind == "tuple" else parts
        if kind in ("array", "tensor") and type(content) is int and content in unused:
            unused.remove(content)  # a copy of it many times over could take more memory than there is
            array = arrays[content]
            return from_array(array.values, array.dtype) if kind == "tensor" else array.values.copy()
    raise CheckpointDamaged(
        f"restore: expected a dict, list, tuple or array node, got {str(node)[:60]!r}; use another file."
    )


def _is_list_of_pairs(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int)) for pair in content
    )
