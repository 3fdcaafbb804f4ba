"""Converts nested state to JSON and named arrays, and back with its types. Refuses anything else: no pickle."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import CheckpointDamaged, CheckpointError

Array = npt.NDArray[Any]
#: Deepest nesting of a state. A fixed limit: Python's recursion limit depends on the depth of the caller.
MAX_DEPTH = 100
#: The same in levels of JSON: at most three per nesting level, and some around them.
_MAX_LEVELS = 3 * MAX_DEPTH + 8
#: Types of values that JSON holds as they are.
_PLAIN = (type(None), bool, int, float, str)
#: Makes a container of its parts.
_Make = Callable[[list[Any]], Any]
#: Containers of keys and values, and of values, by their names in a node.
_MAPPINGS: dict[str, _Make] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),  # a Counter of pairs would count them
}
_SEQUENCES: dict[str, _Make] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
#: What a defaultdict may make for a new key.
_FACTORIES = {
    "None": None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
}
_SCALAR_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
#: Types of numpy's single numbers, by name.
_SCALARS = {name: np.dtype(name).type for name in _SCALAR_NAMES}
#: Makes (array, dtype name) of a tensor.
_ToArray = Callable[[Any], tuple[Array, str]]
#: Makes a tensor of an array and a dtype name.
_FromArray = Callable[[Array, str], Any]


@dataclass(frozen=True)
class NamedArray:
    """One array of a checkpoint.

    Attributes:
        name: path of the array in the state, such as "optimizer/state/0/exp_avg".
        dtype: name of the array's dtype; "bfloat16" where `values` are its bits in uint16.
        values: C-contiguous array of any shape.
    """

    name: str
    dtype: str
    values: Array


def encode(
    value: Any,
    name: str,
    to_array: _ToArray,
    arrays: list[NamedArray],
) -> Any:
    """Return `value` as JSON, its arrays moved to `arrays`.

    Args:
        value: nest of numbers, text, None, numpy's arrays and numbers, and tensors, in dict, list, tuple, set,
            frozenset, and the dicts and deque of `collections`. Keys are text or whole numbers. torch.Size, a tuple
            that also counts elements, counts as a tuple.
        name: name of the value, for messages and for the arrays in it.
        to_array: function that returns (array, dtype name) of a tensor, that is, a leaf with new_tensor().
        arrays: list to which arrays are appended.

    Raises:
        CheckpointError: for a value of another type, also of a class derived from these, as its type would be lost;
            for nesting deeper than `MAX_DEPTH`.
    """
    return _Encoder(to_array, arrays).node_of(value, name, 0)


class _Encoder:
    """Makes nodes, and collects arrays.

    Args:
        to_array: function that returns (array, dtype name) of a tensor.
        arrays: list to which arrays are appended.
    """

    def __init__(self, to_array: _ToArray, arrays: list[NamedArray]) -> None:
        self._to_array = to_array
        self._arrays = arrays

    def node_of(self, value: Any, name: str, depth: int) -> Any:
        """Return the node of a value."""
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"save: expected nesting of at most {MAX_DEPTH} levels, got more in {name[:60]!r}; flatten it."
            )
        if type(value) in _PLAIN:
            return value
        kind = _name_of_type(value)
        if kind in _MAPPINGS:
            return {kind: self._pairs(value, name, depth)}
        if kind == "defaultdict":
            factory_pair = ["", _factory_name(value, name)]
            pairs = self._pairs(value, name, depth)
            return {kind: [factory_pair, *pairs]}
        if kind in ("set", "frozenset"):
            in_order = sorted(value, key=repr)  # the same order on all ranks
            return {kind: self._parts(in_order, name, depth)}
        if kind in _SEQUENCES:
            return {kind: self._parts(value, name, depth)}
        if kind == "deque":
            parts = self._parts(value, name, depth)
            return {kind: [value.maxlen, *parts]}
        return self._leaf(value, name)

    def _pairs(
        self,
        mapping: dict[Any, Any],
        name: str,
        depth: int,
    ) -> list[Any]:
        """Return [key, node] of each part of a mapping."""
        pairs: list[Any] = []
        for key, part in mapping.items():
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"save: expected keys as text or whole numbers, got {key!r} in {name!r}; rename it."
                )
            part_name = f"{name}/{key}"
            node = self.node_of(part, part_name, depth + 1)
            pairs.append([key, node])
        return pairs

    def _parts(
        self,
        values: Iterable[Any],
        name: str,
        depth: int,
    ) -> list[Any]:
        """Return the node of each part of a sequence."""
        nodes: list[Any] = []
        for number, part in enumerate(values):
            part_name = f"{name}/{number}"
            node = self.node_of(part, part_name, depth + 1)
            nodes.append(node)
        return nodes

    def _leaf(self, value: Any, name: str) -> Any:
        if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
            number = _json_of(value.item())
            return {"scalar": [value.dtype.name, number]}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            # a dtype's name omits the byte order
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            named = NamedArray(name, native.dtype.name, native)
            return {"array": self._number_of(named)}
        if hasattr(value, "new_tensor"):
            array, dtype = self._to_array(value)
            named = NamedArray(name, dtype, array)
            return {"tensor": self._number_of(named)}
        raise CheckpointError(
            f"save: expected numbers, text, arrays, and dicts, lists, tuples and sets of them, got "
            f"{type(value).__name__} in {name!r}; save one of these in its place, or leave it out of state_dict()."
        )

    def _number_of(self, array: NamedArray) -> int:
        """Append an array; return its number."""
        self._arrays.append(array)
        return len(self._arrays) - 1


def _name_of_type(value: Any) -> str:
    """Return the name of a container's type; "" for a class of somebody else, even if it is derived from one."""
    kind = type(value)
    if kind.__module__ in ("builtins", "collections"):
        return kind.__name__
    if kind.__module__ == "torch" and kind.__name__ == "Size":
        return "tuple"
    return ""


def _factory_name(value: "defaultdict[Any, Any]", name: str) -> str:
    """Return the name of what makes the values of new keys."""
    for factory_name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return factory_name
    known_names = ", ".join(_FACTORIES)
    raise CheckpointError(
        f"save: expected a defaultdict of {known_names}, got one of {value.default_factory!r} in {name!r}; save it as "
        f"a dict."
    )


def _json_of(number: Any) -> Any:
    """Return a number, a complex one as its two parts."""
    if isinstance(number, complex):
        return [number.real, number.imag]
    return number


def decode(
    node: Any,
    from_array: _FromArray,
    arrays: list[NamedArray],
) -> Any:
    """Return the value that `encode` turned into `node` and `arrays`; both may use the memory of `arrays`.

    Arrays may be filled later: nothing looks into them here.

    Raises:
        CheckpointDamaged: if `node` is not a result of `encode`.
    """
    return _Decoder(from_array, arrays).value_of(node)


class _Decoder:
    """Makes values of nodes, each array once: repeated references could multiply its copies beyond memory.

    Args:
        from_array: function that makes a tensor of an array and the name of its dtype.
        arrays: arrays that nodes refer to.
    """

    def __init__(self, from_array: _FromArray, arrays: list[NamedArray]) -> None:
        self._from_array = from_array
        self._arrays = arrays
        self._unused = set(range(len(arrays)))

    def value_of(self, node: Any) -> Any:
        """Return the value of a node."""
        if not isinstance(node, dict):
            return node
        if len(node) != 1:
            raise _damaged(node)
        ((kind, content),) = node.items()
        if kind in ("array", "tensor"):
            return self._array(kind, content)
        try:
            return self._container(kind, content)
        except (TypeError, ValueError, OverflowError, LookupError):
            raise _damaged(node) from None

    def _container(self, kind: str, content: Any) -> Any:
        """Return the value of a node's content, which may be any JSON; raise what Python raises for a wrong one."""
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](self._pairs(content))
        if kind == "defaultdict":
            (_, factory), *pairs = self._pairs(content)
            return defaultdict(_FACTORIES[factory], pairs)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self._parts(content))
        if kind == "deque":
            maxlen, *parts = self._parts(content)
            return deque(parts, maxlen)
        if kind != "scalar":
            raise TypeError
        dtype, number = content
        if isinstance(number, list):
            number = complex(*number)
        return _SCALARS[dtype](number)

    def _pairs(self, content: Any) -> list[Any]:
        if not is_list_of_pairs(content):
            raise TypeError
        pairs: list[Any] = []
        for key, part in content:
            pairs.append((key, self.value_of(part)))
        return pairs

    def _parts(self, content: Any) -> list[Any]:
        if not isinstance(content, list):
            raise TypeError
        return [self.value_of(part) for part in content]

    def _array(self, kind: str, content: Any) -> Any:
        if type(content) is not int or content not in self._unused:
            raise _damaged({kind: content})
        self._unused.remove(content)
        array = self._arrays[content]
        if kind == "array":
            return array.values
        try:
            return self._from_array(array.values, array.dtype)
        except (TypeError, ValueError) as error:
            raise CheckpointDamaged(
                f"restore: expected values that tensors hold, got {str(error)[:60]!r}; use another file."
            ) from None


def _damaged(node: Any) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"restore: expected a node of numbers, arrays and containers, got {str(node)[:60]!r}; use another file."
    )


def is_too_deep(json: Any) -> bool:
    """Return whether JSON has more levels than a state may have. Visits each node once; does not recurse."""
    level = [json]
    for _ in range(_MAX_LEVELS):
        next_level: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                next_level.extend(part.values())
            elif isinstance(part, list):
                next_level.extend(part)
        level = next_level
    return bool(level)


def is_list_of_pairs(content: Any) -> bool:
    """Return whether JSON is the content of a "dict" node."""
    return isinstance(content, list) and all(map(_is_pair, content))


def _is_pair(part: Any) -> bool:
    """Return whether JSON is a list of a text or whole number, and something else."""
    if not isinstance(part, list) or len(part) != 2:
        return False
    return isinstance(part[0], (str, int))
