"""What a function of the program uses, so that one that cannot change is sent to workers once. Pure."""

import dis
import functools
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    ModuleType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def is_of_program(value: FunctionType | type) -> bool:
    """Return whether a function or class is the program's own, which workers cannot import."""
    return value.__module__ == "__main__" or "<locals>" in value.__qualname__


def is_constant(value: Any) -> bool:
    """Return whether a value is the same for ever, on the worker too: it cannot be changed, or is imported there."""
    if isinstance(value, (FunctionType, type)):
        return not is_of_program(value)
    return isinstance(value, _CONSTANTS) or (type(value) is tuple and all(map(is_constant, value)))


def used_by(function: FunctionType) -> list[Any] | None:
    """Return the values that a function uses beside its arguments; None where it keeps state of its own.

    Global names are taken as used also where only an attribute has that name.
    """
    names, writes = _names_and_writes(function.__code__, frozenset(function.__code__.co_freevars))
    if writes or function.__dict__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    return [*found, *cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=1024)
def _names_and_writes(code: CodeType, free: frozenset[str]) -> tuple[tuple[str, ...], bool]:
    """Return the global names in code, and whether it writes to globals or to free variables of the function."""
    names, writes = list(code.co_names), False
    for instruction in dis.get_instructions(code):
        writes |= instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        writes |= instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_writes = _names_and_writes(constant, free)
            names += inner_names
            writes |= inner_writes
    return tuple(dict.fromkeys(names)), writes
