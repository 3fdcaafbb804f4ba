"""States as a checkpoint has them: checked against the objects of the program, and loaded into these.

A digest is no signature, so a state may be any JSON.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcdist.checkpoint.layout import stored_dtype
from hpcdist.checkpoint.read import StoredArray
from hpcdist.checkpoint.tree import Array, NamedArray, decode, is_list_of_pairs
from hpcdist.dtypes import dtype_name
from hpcdist.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, DataError
from hpcdist.program.tensors import from_array, to_array
from hpcdist.program.wrapped_modules import load_plain_state, plain_state
from hpcdist.saving.items import PLAIN, is_array, is_module, is_optimizer, is_tensor, plain_kind


def parts_of(state: Any, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the nodes and kinds of the objects in a state, which may be any JSON: a digest is not a signature."""
    parts = state if isinstance(state, dict) else {}
    nodes = parts.get("objects")
    kinds = parts.get("kinds")
    if not isinstance(nodes, dict) or not isinstance(kinds, dict) or nodes.keys() != kinds.keys():
        raise damaged("objects, each with its kind,", state, source)
    return nodes, kinds


def memory_in_objects(
    objects: dict[str, Any], nodes: dict[str, Any]
) -> dict[int, tuple[str, Array]]:
    """Return dtype and memory of modules' tensors and of arrays, by the numbers of the arrays that belong there.

    Args:
        objects: objects by name.
        nodes: states of the objects, which may be any JSON.
    """
    memory_by_number: dict[int, tuple[str, Array] | None] = {}
    for name, item in objects.items():
        node = nodes[name]
        if is_array(item):
            kind = "tensor" if is_tensor(item) else "array"
            memory_by_number[_number_in(node, kind)] = _memory_of(item)
        elif is_module(item) and isinstance(node, dict):
            pairs = node.get("dict")
            if pairs is not None and is_list_of_pairs(pairs):
                state = plain_state(item)
                for key, part in pairs:
                    memory_by_number[_number_in(part, "tensor")] = _memory_of(state.get(key))
    return {number: memory for number, memory in memory_by_number.items() if memory is not None}


def _number_in(node: Any, kind: str) -> int:
    """Return the number of the array that a node refers to; -1 if it refers to none."""
    if not isinstance(node, dict):
        return -1
    number = node.get(kind)
    if type(number) is int:
        return number
    return -1


def _memory_of(value: Any) -> tuple[str, Array] | None:
    """Return the name of the dtype and the memory, as it is stored, of an array or host tensor in one piece."""
    if isinstance(value, np.ndarray) and value.dtype.isnative:
        array = value
        dtype = value.dtype.name
    elif is_tensor(value) and value.device.type == "cpu" and value.is_contiguous():
        array, dtype = to_array(value)
    else:
        return None
    if not (array.flags.c_contiguous and array.flags.writeable):
        return None
    if dtype == "bool":
        array = array.view(np.uint8)
    return dtype, array


def destination_of(stored_array: StoredArray, memory: tuple[str, Array] | None) -> Array:
    """Return where the values of a stored array go: the memory of an object if they fit there, or new memory.

    Args:
        stored_array: array in the file.
        memory: dtype and memory of the object's tensor or array; None if it has none that can be filled.
    """
    if memory is not None:
        dtype, values = memory
        if dtype == stored_array.dtype and values.shape == stored_array.shape:
            return values
    return np.empty(stored_array.shape, stored_dtype(stored_array.dtype))


def named_array(stored_array: StoredArray, values: Array) -> NamedArray:
    """Return values with the name and dtype of a stored array; bools, which are stored as bytes, as bools."""
    if stored_array.dtype == "bool":
        values = values.view(np.bool_)
    return NamedArray(stored_array.name, stored_array.dtype, values)


def decoded(name: str, node: Any, arrays: list[NamedArray], source: str) -> Any:
    """Return the state that a node describes.

    Raises:
        CheckpointDamaged: if the node describes none.
    """
    try:
        return decode(node, from_array, arrays)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{error} ({name!r} in {source})") from None


def with_loaded(state: dict[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state with loaded values where both have a name; other loaded values are dropped."""
    merged = dict(state)
    for name in state:
        if name in loaded:
            merged[name] = loaded[name]
    return merged


def check_shape(name: str, item: Any, loaded: Any, source: str) -> None:
    """Raise CheckpointDamaged unless `loaded` has the structure of a module's or an optimizer's state."""
    if is_optimizer(item):
        # wrappers have states of another structure
        if _is_optimizer_state(item.state_dict()) and not _is_optimizer_state(loaded):
            raise damaged(
                f"groups of parameters and a dict for each parameter of {name!r}", loaded, source
            )
    elif is_module(item) and not isinstance(loaded, Mapping):
        raise damaged(f"a dict of arrays for {name!r}", loaded, source)


def _is_optimizer_state(loaded: Any) -> bool:
    """Return whether a value has the structure of the state of a torch optimizer."""
    if not isinstance(loaded, Mapping):
        return False
    groups = loaded.get("param_groups")
    states = loaded.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        return False
    for group in groups:
        if not isinstance(group, Mapping) or not _is_list_of_names(group.get("params")):
            return False
    states_of_parameters = []
    for key, state in states.items():
        if isinstance(key, int):
            states_of_parameters.append(state)
    return all(isinstance(state, Mapping) for state in states_of_parameters)


def _is_list_of_names(value: Any) -> bool:
    """Return whether a value names parameters as optimizers do: by number, in some by text."""
    if not isinstance(value, list):
        return False
    return all(type(name) in (int, str) for name in value)


def check_layout(name: str, item: Any, loaded: Any, source: str) -> None:
    """Raise CheckpointMismatch unless `loaded` has the object's arrays or, for an optimizer, its parameter groups."""
    if is_optimizer(item):
        state = item.state_dict()
        # a wrapper's state: only the wrapper can find the groups
        if not _is_optimizer_state(state):
            return
        current = _group_sizes(state)
        stored = _group_sizes(loaded)
    elif is_array(item):
        current = _layouts({name: item})
        stored = _layouts({name: loaded})
    elif isinstance(item, PLAIN):
        current = {name: plain_kind(item)}
        stored = {name: plain_kind(loaded)}
    elif is_module(item):
        current = _layouts(plain_state(item))
        stored = _layouts(loaded)
    else:
        return
    hint = ""
    prefix = _prefix_between(current, stored)
    if prefix:
        hint = f"there all names begin with {prefix!r}; "
    for key in [*current, *stored]:
        current_array = current.get(key, "absent")
        stored_array = stored.get(key, "absent")
        if current_array != stored_array:
            raise CheckpointMismatch(
                f"restore: expected {name!r} with {len(current)} arrays, {key!r} {current_array}, got {len(stored)}, "
                f"{key!r} {stored_array} in {source}; {hint}build the same model, or start with a new run folder."
            )


def _prefix_between(current: Mapping[str, str], stored: Mapping[str, str]) -> str:
    """Return the prefix that all stored names have before the current ones; "" if names differ otherwise."""
    if len(current) != len(stored) or not current:
        return ""
    first_stored_name = str(next(iter(stored)))  # a damaged file may have numbers
    prefix = first_stored_name.removesuffix(next(iter(current)))
    names_with_prefix = [prefix + name for name in current]
    if list(stored) != names_with_prefix:
        return ""
    return prefix


def _layouts(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{tuple(value.shape)} {dtype_name(value)}"
        for key, value in state.items()
        if hasattr(value, "shape")
    }


def _group_sizes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"group {number}": f"{len(group['params'])} parameters"
        for number, group in enumerate(state["param_groups"])
    }


def load_into(name: str, item: Any, loaded: Any, source: str) -> None:
    """Load a state into an object.

    Raises:
        CheckpointMismatch: if the object refuses it.
    """
    try:
        if isinstance(item, np.ndarray):
            item[...] = loaded
        elif is_tensor(item):
            item.detach().copy_(loaded)
        elif is_module(item):
            load_plain_state(item, loaded)
        else:
            item.load_state_dict(loaded)
    except CheckpointError:
        raise
    except DataError as error:
        raise CheckpointMismatch(str(error)) from None
    except (
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        text = " ".join(str(error).split())
        raise CheckpointMismatch(
            f"restore: expected {source} to fit {name!r}, got {type(error).__name__} ({text}); build the same objects, "
            f"or start with a new run folder."
        ) from None


def damaged(expected: str, actual: Any, source: str) -> CheckpointDamaged:
    """Return the error of a state that no checkpoint of hpcdist has."""
    return CheckpointDamaged(
        f"restore: expected {expected} in {source}, got {str(actual)[:60]!r}; use another."
    )
