"""What tells functions and data from others, in this process and later ones: a digest of all that can be looked at."""

import copyreg
import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

from hpcdist.errors import DataError

_NUMPY_KINDS = "biufcSUmMV"
_HEAP_TYPE = 1 << 9  # of __flags__: made by a class statement, or as if it were
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_WRAPPERS: dict[type, str] = {
    property: "fget",
    staticmethod: "__func__",
    classmethod: "__func__",
    functools.cached_property: "func",
}


def digest_of(value: Any) -> str:
    """Return a digest that is the same in every process, and another one for another value.

    Noticed: every byte, shape and dtype of arrays and tensors; numbers and text; of functions the bytecode, constants
    and names, inner functions too, defaults, what they close over, and the globals that they use, functions and
    classes among them; of classes their name, bases, functions and attributes; of other objects their class and what
    they would be pickled as. Sets have no order, dicts have one.

    Not noticed: what comes from outside (files that are read, the environment, the time), modules imported inside
    functions, what is looked up by getattr, C code, what an object leaves out of its pickle, and, in the standard
    library and in installed packages, the globals of functions and the bodies of classes: after such a change files
    of rows are to be removed by hand.

    Another version of Python, an edited docstring, state that moves on (such as a counter that a function adds to) and
    random numbers without a seed give another digest, though the rows may be the same.

    Raises:
        DataError: for what cannot be looked at, such as open files, locks, running generators, sparse tensors.
    """
    try:
        return _Digests().of(value).hex()
    except RecursionError:
        raise _refusal(value, "it is nested too deeply") from None


class _Digests:
    """Digests of values, each made once: of parts, of the parts' parts, and so on."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, bytes]] = {}  # values too: a number belongs to one while that is there
        self._doing: list[int] = []

    def of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (bool, float, complex, str, type(None), type(Ellipsis), type(NotImplemented)):
            return _hash(kind.__name__, repr(value).encode())
        if kind is int:
            return _hash("int", b"%x" % value)
        if kind is bytes:
            return _hash("bytes", value)
        number = id(value)
        if number in self._doing:
            return _hash("again", b"%d" % self._doing.index(number))
        if number not in self._done:
            self._doing.append(number)
            self._done[number] = value, self._of_parts(value)
            self._doing.pop()
        return self._done[number][1]

    def _of_parts(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (tuple, list):
            return _hash(kind.__name__, *map(self.of, value))
        if kind is dict:
            return _hash("dict", *(self.of(part) for item in value.items() for part in item))
        if kind in (set, frozenset):
            return _hash(kind.__name__, *sorted(map(self.of, value)))
        if kind in (np.ndarray, np.memmap):
            return self._of_array(value)
        if isinstance(value, torch.Tensor):
            return _of_tensor(value)
        if kind is CodeType:
            return self._joined("code", *_parts_of_code(value))
        if kind is FunctionType:
            held = [[] if cell == CellType() else [cell.cell_contents] for cell in value.__closure__ or ()]
            made_with = [held, value.__defaults__, value.__kwdefaults__, vars(value)]
            return self._joined("function", value.__code__, made_with, list(_globals_of(value)))
        if kind is ModuleType:
            return self._joined("module", value.__name__)
        if kind in _WRAPPERS:
            return self._joined(kind.__name__, getattr(value, _WRAPPERS[kind]))
        return self._of_class(value) if isinstance(value, type) else self._of_object(value)

    def _joined(self, kind: str, *parts: Any) -> bytes:
        return _hash(kind, *map(self.of, parts))

    def _of_array(self, array: Any) -> bytes:
        what = [repr(array.dtype), array.shape]
        if array.dtype == object:
            return self._joined("objects", what, array.ravel().tolist())
        if array.dtype.kind not in _NUMPY_KINDS or array.dtype.hasobject:
            raise _refusal(array, f"its dtype is {array.dtype}")
        return _hash("array", self.of(what), _bytes_of(array))

    def _of_class(self, value: type) -> bytes:
        is_library = _is_library(value.__module__) and _found(value.__module__, value.__qualname__) is value
        if is_library or not value.__flags__ & _HEAP_TYPE:
            return self._joined("class", value.__module__, value.__qualname__)
        parts = {name: part for name, part in vars(value).items() if _is_written(name, part)}
        return self._joined("class", value.__qualname__, value.__bases__, parts)

    def _of_object(self, value: Any) -> bytes:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:  # noqa: BLE001 - objects may raise anything where they are not to be pickled
            raise _refusal(value, f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        if not isinstance(parts, str):
            maker, made_with, *more = parts
            state, items, pairs, setter = (more + [None] * 4)[:4]
            return self._joined("object", maker, made_with, state, list(items or ()), list(pairs or ()), setter)
        for module in (getattr(value, "__module__", None), type(value).__module__):
            if module is not None and _found(module, parts) is value:
                return self._joined("name", module, parts, getattr(value, "__wrapped__", None))
        raise _refusal(value, f"it is not {parts!r} of a module")


def _hash(kind: str, *parts: Any) -> bytes:
    """Return a digest of bytes-like parts, which tells where one ends and the next one starts."""
    digest = xxhash.xxh3_128(f"{kind} {len(parts)}".encode())
    for part in parts:
        digest.update(b" %d " % len(part))
        digest.update(part)
    return digest.digest()


def _refusal(value: Any, reason: str) -> DataError:
    return DataError(
        f"cache: expected functions and data that can be told from others in later processes, got a "
        f"{type(value).__qualname__} ({reason}); leave the filename out, and rows are kept in memory."
    )


def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array, copied only where they do not lie one after another."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""


def _of_tensor(tensor: Any) -> bytes:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refusal(tensor, "a class of tensors of its own")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _refusal(tensor, f"{tensor.layout} of {tensor.dtype} on {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    what = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return _hash("tensor", what, _bytes_of(plain.view(torch.uint8).numpy()))


def _parts_of_code(code: CodeType) -> tuple[Any, ...]:
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return arguments, names, code.co_code, getattr(code, "co_exceptiontable", b""), code.co_consts


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values of globals that a function uses, and of what it uses of modules that are not libraries."""
    if _is_library(function.__globals__.get("__name__", "")):
        return
    used, names = _names_in(function.__code__)
    spaces = [{name: function.__globals__[name] for name in sorted(used) if name in function.__globals__}]
    seen = set()
    for space in spaces:
        yield from space.items()
        for value in space.values():
            if isinstance(value, ModuleType) and not _is_library(value.__name__) and value.__name__ not in seen:
                seen.add(value.__name__)
                spaces.append({name: vars(value)[name] for name in sorted(names) if name in vars(value)})


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Return names of globals, and of attributes and the rest, in code and the functions inside it."""
    lines = list(dis.get_instructions(code))
    found = {line.argval for line in lines if line.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _names_in(inner)
            found, names = found | more[0], names | more[1]
    return found, names


def _is_written(name: str, part: Any) -> bool:
    """Return whether a part of a class comes from what was written, not from how classes are made."""
    is_special = name.startswith("__") and name.endswith("__") and not callable(part) and type(part) not in _WRAPPERS
    return not is_special and name != "_abc_impl" and type(part) not in (GetSetDescriptorType, MemberDescriptorType)


def _is_library(name: str) -> bool:
    """Return whether a module is of the standard library or an installed package, such as this one."""
    if name.partition(".")[0] == "hpcdist":
        return True
    path = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.builtin_module_names if path is None else path.startswith(_LIBRARIES)


def _found(module: str, name: str) -> Any:
    """Return what a module has under a name with dots, if anything."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
