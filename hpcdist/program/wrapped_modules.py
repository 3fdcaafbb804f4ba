"""States of modules by the names that they have without wrappers: compiled, DDP and DataParallel."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

#: What the wrapper of torch.compile, whose class takes seconds to import, calls the module in it.
_COMPILED = "_orig_mod"


def plain_state(module: Any) -> dict[str, Any]:
    """Return the state of a module, by names without wrappers' prefixes. The tensors are the module's own."""
    prefixes = _prefixes_of(module)
    return {_plain(name, prefixes): value for name, value in module.state_dict().items()}


def plain_parameter_names(module: Any) -> set[str]:
    """Return the names of a module's parameters without wrappers' prefixes."""
    prefixes = _prefixes_of(module)
    return {_plain(name, prefixes) for name, _ in module.named_parameters()}


def load_plain_state(module: Any, state: Mapping[str, Any]) -> None:
    """Load a state that `plain_state` returned, of this module or of one with other wrappers.

    Raises:
        RuntimeError: of torch, for a state of another module.
    """
    prefixes = _prefixes_of(module)
    names = {_plain(name, prefixes): name for name in module.state_dict()}
    module.load_state_dict({names.get(name, name): value for name, value in state.items()})


def without_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Return names without wrappers' prefixes, by the names in a file of somebody else's, whose modules nobody knows.

    "_orig_mod." is left out wherever it is, "module." where all names begin with it.
    """
    plain_names = {name: name.replace(f"{_COMPILED}.", "") for name in names}
    if all(name.startswith("module.") for name in plain_names.values()):
        plain_names = {name: plain.removeprefix("module.") for name, plain in plain_names.items()}
    return plain_names


def _prefixes_of(module: Any) -> list[str]:
    """Return the prefixes of names that wrappers have added, the innermost first; none for what is no module."""
    prefixes: list[str] = []
    if not isinstance(module, nn.Module):
        return prefixes
    for path, child in module.named_modules(remove_duplicate=False):
        outer = f"{path}." if path else ""
        if _COMPILED in child._modules:
            prefixes.append(f"{outer}{_COMPILED}.")
        elif isinstance(child, (DistributedDataParallel, DataParallel)):
            prefixes.append(f"{outer}module.")
    return sorted(prefixes, key=len, reverse=True)


def _plain(name: str, prefixes: list[str]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            outer, dot, _ = prefix.removesuffix(".").rpartition(".")
            name = outer + dot + name.removeprefix(prefix)
    return name
