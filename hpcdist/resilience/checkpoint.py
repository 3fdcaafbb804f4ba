"""Checkpoint: training objects to named arrays and back."""

from typing import Any

import numpy as np

from hpcdist.checkpoint.tree import NamedArray, decode, encode
from hpcdist.errors import CheckpointError, DataError, UsageError
from hpcdist.gradients.tensors import from_array, to_array
from hpcdist.world import World, make_world


class Checkpoint:
    """Named objects whose state is saved and restored together.

    Args:
        objects: each with state_dict() and load_state_dict(), such as modules, optimizers, schedulers, distributed
            datasets and the strategy (which holds seed and step of the random numbers); or numpy arrays, restored in
            place.

    Attributes:
        step: of the last save or restore; 0 before.

    Raises:
        UsageError: for an object of another kind.
    """

    def __init__(self, **objects: Any) -> None:
        for name, item in objects.items():
            if not isinstance(item, np.ndarray) and not (
                hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
            ):
                raise UsageError(
                    f"Checkpoint: expected objects with state_dict and load_state_dict, or numpy arrays, got "
                    f"{type(item).__name__} for {name!r}; wrap it or leave it out."
                )
        self._objects = objects
        self.step = 0

    @property
    def world(self) -> World:
        """The ranks that save and restore together: those of the strategy among the objects, else the process's own."""
        worlds = [item.world for item in self._objects.values() if isinstance(getattr(item, "world", None), World)]
        return worlds[0] if worlds else make_world()

    def describe_sums(self) -> dict[str, Any]:
        """Return how the strategy among the objects sums gradients; nothing without one."""
        describes = [getattr(item, "describe_sums", None) for item in self._objects.values()]
        return next((describe() for describe in describes if describe is not None), {})

    def gather(self) -> dict[str, Any]:
        """Return the states of objects that gather them from all ranks: variables of a copy per replica, and metrics.

        Collective where there are such objects: all ranks.
        """
        gathered = {name: item for name, item in self._objects.items() if getattr(item, "is_state_collective", False)}
        return {name: item.state_dict() for name, item in gathered.items()}

    def collect(self, gathered: dict[str, Any]) -> tuple[Any, list[NamedArray]]:
        """Return the state of all objects as JSON and named arrays. Not collective; nothing is copied yet.

        Args:
            gathered: as `gather` returned it.
        """
        arrays: list[NamedArray] = []
        states = {name: gathered[name] if name in gathered else _state_of(item) for name, item in self._objects.items()}
        nodes = {name: encode(state, name, to_array, arrays) for name, state in states.items()}
        return {"objects": nodes, "kinds": {name: _kind(item) for name, item in self._objects.items()}}, arrays

    def collect_equal(self) -> tuple[Any, list[NamedArray]]:
        """Return the state of models and optimizers, which all ranks hold alike. Not collective; nothing is copied."""
        arrays: list[NamedArray] = []
        equal = {name: item for name, item in self._objects.items() if _is_equal_everywhere(item)}
        return {name: encode(item.state_dict(), name, to_array, arrays) for name, item in equal.items()}, arrays

    def apply(self, state: Any, arrays: list[NamedArray], source: str) -> None:
        """Load a state into all objects.

        Args:
            state: as `collect` returned it.
            arrays: as `collect` returned them.
            source: name of the file, for messages.

        Raises:
            CheckpointError: when the objects, or the shapes in a module, are others; nothing is loaded then.
        """
        kinds = {name: _kind(item) for name, item in self._objects.items()}
        if state["kinds"] != kinds:
            raise CheckpointError(
                f"restore: expected objects {kinds}, got {state['kinds']} in {source}; make Checkpoint(...) with the "
                f"same objects, or start with a new run folder."
            )
        loaded = {name: decode(node, from_array, arrays) for name, node in state["objects"].items()}
        for name, item in self._objects.items():
            _check_layout(name, item, loaded[name], source)
        for name, item in self._objects.items():
            _load(name, item, loaded[name], source)


def _state_of(item: Any) -> Any:
    return item if isinstance(item, np.ndarray) else item.state_dict()


def _is_equal_everywhere(item: Any) -> bool:
    """Return whether an object is a module or an optimizer; others may be a rank's own, or the chief's."""
    return hasattr(item, "named_parameters") or hasattr(item, "param_groups")


def _kind(item: Any) -> str:
    """Return what an object is to a checkpoint: modules are told apart by their arrays, all else by its class."""
    return "module" if hasattr(item, "named_parameters") else type(item).__name__


def _check_layout(name: str, item: Any, loaded: Any, source: str) -> None:
    """Raise CheckpointError unless `loaded` has the arrays of a module or numpy array, or an optimizer's groups."""
    if hasattr(item, "param_groups"):
        own, theirs = _group_sizes(item.state_dict()), _group_sizes(loaded)
    elif isinstance(item, np.ndarray):
        own, theirs = _layouts({name: item}), _layouts({name: loaded})
    elif hasattr(item, "named_parameters"):
        own, theirs = _layouts(item.state_dict()), _layouts(loaded)
    else:
        return
    for key in [*own, *theirs]:
        if own.get(key) != theirs.get(key):
            raise CheckpointError(
                f"restore: expected {name!r} with {len(own)} arrays, {key!r} {own.get(key, 'absent')}, got "
                f"{len(theirs)}, {key!r} {theirs.get(key, 'absent')} in {source}; build the same model, or start with "
                "a new run folder."
            )


def _layouts(state: dict[str, Any]) -> dict[str, str]:
    return {
        key: f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for key, value in state.items()
        if hasattr(value, "shape")
    }


def _group_sizes(state: dict[str, Any]) -> dict[str, str]:
    return {
        f"group {number}": f"{len(group['params'])} parameters" for number, group in enumerate(state["param_groups"])
    }


def _load(name: str, item: Any, loaded: Any, source: str) -> None:
    try:
        if isinstance(item, np.ndarray):
            item[...] = loaded
        else:
            item.load_state_dict(loaded)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RuntimeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"restore: expected {source} to fit {name!r}, got {type(error).__name__} ({text}); build the same objects, "
            f"or start with a new run folder."
        ) from None
