"""States of modules by the names that they have without wrappers: compiled, DDP and DataParallel."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

#: Name of the module inside the wrapper of torch.compile, whose class takes seconds to import.
_COMPILED = "_orig_mod"


def plain_state(module: Any) -> dict[str, Any]:
    """Return the state of a module, by names without wrappers' prefixes. The module's tensors are not copied."""
    prefixes = _prefixes_of(module)
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        plain_name = _plain(name, prefixes)
        state[plain_name] = value
    return state


def plain_parameter_names(module: Any) -> set[str]:
    """Return the names of a module's parameters without wrappers' prefixes."""
    prefixes = _prefixes_of(module)
    return {_plain(name, prefixes) for name, _ in module.named_parameters()}


def load_plain_state(module: Any, state: Mapping[str, Any]) -> None:
    """Load a state that `plain_state` returned for this module, or for the same module with other wrappers.

    Raises:
        RuntimeError: of torch, for a state of another module.
    """
    prefixes = _prefixes_of(module)
    wrapped_names: dict[str, str] = {}
    for name in module.state_dict():
        plain_name = _plain(name, prefixes)
        wrapped_names[plain_name] = name
    wrapped_state: dict[str, Any] = {}
    for plain_name, value in state.items():
        name = wrapped_names.get(plain_name, plain_name)
        wrapped_state[name] = value
    module.load_state_dict(wrapped_state)


def without_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Return names without wrappers' prefixes, by the names in a foreign file, whose modules nobody knows.

    "_orig_mod." is left out wherever it is, "module." where all names begin with it.
    """
    compiled_prefix = f"{_COMPILED}."
    plain_names = {name: name.replace(compiled_prefix, "") for name in names}
    if all(plain_name.startswith("module.") for plain_name in plain_names.values()):
        return {name: plain.removeprefix("module.") for name, plain in plain_names.items()}
    return plain_names


def _prefixes_of(module: Any) -> list[str]:
    """Return the prefixes of names that wrappers have added, the innermost first; none for other objects."""
    prefixes: list[str] = []
    if not isinstance(module, nn.Module):
        return prefixes
    for path, child in module.named_modules(remove_duplicate=False):
        outer = f"{path}." if path else ""
        is_parallel = isinstance(child, (DistributedDataParallel, DataParallel))
        if _COMPILED in child._modules:
            prefixes.append(f"{outer}{_COMPILED}.")
        elif is_parallel:
            prefixes.append(f"{outer}module.")
    return sorted(prefixes, key=len, reverse=True)


def _plain(name: str, prefixes: list[str]) -> str:
    """Return a name without wrappers' prefixes."""
    for prefix in prefixes:
        if name.startswith(prefix):
            wrapper_path = prefix.removesuffix(".")
            outer, dot, _ = wrapper_path.rpartition(".")
            inner_name = name.removeprefix(prefix)
            name = outer + dot + inner_name
    return name
