"""Checkpoint and CheckpointManager: training objects to one file and back, collectively."""

import json
import logging
import operator
import os
import platform
import time
from importlib.metadata import version
from typing import Any

import numpy as np

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.tree import NamedArray, decode, encode
from hpcdist.collectives import mpi
from hpcdist.collectives.group import group_of
from hpcdist.errors import CheckpointError, DataError, UsageError
from hpcdist.gradients.numerics import describe_numerics
from hpcdist.gradients.tensors import from_array, to_array
from hpcdist.mpi import library_name
from hpcdist.world import World, make_world

logger = logging.getLogger("hpcdist")

#: Facts that the bits of further training depend on; a restore under others warns.
_BITS_DEPEND_ON = ("ranks", "hosts", "threads", "instruction_set", "torch", "mpi", "all_reduce", "wire", "replicas")
#: They do not depend on these where the number of replicas was given.
_OF_PLACEMENT = ("ranks", "hosts", "mpi")


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


class CheckpointManager:
    """Saves and restores a Checkpoint in one folder: written by the chief, restored on all ranks.

    Collective: chief and workers.

    Args:
        checkpoint: what is saved.
        directory: the folder; made if need be. Only the chief needs to see it.
        max_to_keep: older checkpoints are removed after a newer one is committed.

    Raises:
        CheckpointError: when the folder cannot be written; on every rank alike.
    """

    def __init__(self, checkpoint: Checkpoint, directory: str | os.PathLike[str], max_to_keep: int = 3) -> None:
        if max_to_keep < 1:
            raise UsageError(
                f"CheckpointManager: expected max_to_keep of at least 1, got {max_to_keep}; keep one or more."
            )
        self.checkpoint = checkpoint
        self._folder = CheckpointFolder(directory)
        self._max_to_keep = max_to_keep
        self._world = checkpoint.world
        self._comm = self._world.role_comm
        self._is_writer = self._world.is_chief
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._folder.create()

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return str(self._folder.path)

    def save(self, step: int) -> str:
        """Commit the state after `step` optimizer steps and return the file's path on every rank.

        Collective: chief and workers. Blocking until the file is durable. Other ranks wait for the chief.

        Raises:
            CheckpointError: when it cannot be written, on every rank alike; earlier checkpoints are untouched.
        """
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"save: expected a step of at least 0, got {step}; count optimizer steps.")
        name, gathered = "", self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._is_writer:
                state, arrays = self.checkpoint.collect(gathered)
                name = self._folder.commit(step, state, arrays, self._written()).name
                self._folder.prune(self._max_to_keep)
        self.checkpoint.step = step
        return self._path(name)

    def _path(self, name: str) -> str:
        """Return the path of the chief's file on every rank."""
        return str(self._folder.path / self._world.broadcast_text(name, 0, self._comm))

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None when there is none.

        Collective: chief and workers. The chief reads and broadcasts: others do not touch the folder.

        Raises:
            CheckpointError: when no checkpoint verifies, or it is of another model or a newer format; on every rank
            alike.
        """
        found: tuple[Manifest, Any, list[NamedArray]] | None = None
        with self._world.agreed(self._comm):
            if self._comm.rank == 0:
                found = self._folder.read_latest()
        step = int(self._world.broadcast_text(str(found[0].step if found else -1), 0, self._comm))
        if step < 0:
            return None
        state, arrays = self._broadcast(found)
        path = self._path(found[0].file if found else "")
        with self._world.agreed(self._comm):
            self.checkpoint.apply(state, arrays, os.path.basename(path))
            if self._is_writer:
                self._folder.set_aside_after(step)
        if found and self._is_writer:
            _warn_of_changes(found[0].written, self._written())
        self.checkpoint.step = step
        return path

    def _broadcast(self, found: tuple[Manifest, Any, list[NamedArray]] | None) -> tuple[Any, list[NamedArray]]:
        rows = [[a.name, a.dtype, a.values.dtype.str, a.values.shape] for a in found[2]] if found else []
        text = json.dumps([found[1], rows]) if found else ""
        state, rows = json.loads(self._world.broadcast_text(text, 0, self._comm))
        group, arrays = group_of(self._comm), []
        for number, (name, dtype, stored, shape) in enumerate(rows):
            values = np.ascontiguousarray(found[2][number].values) if found else np.empty(shape, np.dtype(stored))
            with group.recorded("broadcast", values):
                mpi.broadcast(values, group.comm)
            arrays.append(NamedArray(name, dtype, values.reshape(shape)))
        return state, arrays

    def _written(self) -> dict[str, Any]:
        return {
            **{package: version(package) for package in ("hpcdist", "numpy", "h5py", "mpi4py")},
            **describe_numerics(),
            **self.checkpoint.describe_sums(),
            "python": platform.python_version(),
            "mpi": library_name(),
            "ranks": self._comm.size,
            "hosts": self._world.n_hosts,
            "host": platform.node(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def _state_of(item: Any) -> Any:
    return item if isinstance(item, np.ndarray) else item.state_dict()


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


def _warn_of_changes(written: dict[str, Any], now: dict[str, Any]) -> None:
    is_counted = now.get("replicas") is not None and written.get("replicas") == now["replicas"]
    telling = [key for key in _BITS_DEPEND_ON if not (is_counted and key in _OF_PLACEMENT)]
    known = [key for key in telling if key in written and key in now]  # an older file may not tell
    changes = [f"{key} {written[key]} -> {now[key]}" for key in known if written[key] != now[key]]
    if changes:
        logger.warning("restore: bits may differ from an unbroken run, as these changed: %s", ", ".join(changes))
