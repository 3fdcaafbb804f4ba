"""Checkpoint: converts training objects to named arrays and back."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out, stored_dtype
from hpcdist.checkpoint.read import Index, StoredArray, named_arrays
from hpcdist.checkpoint.tree import Array, NamedArray, decode, encode, is_list_of_pairs
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.torch_source import is_loader
from hpcdist.dtypes import dtype_name
from hpcdist.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    DataError,
    UsageError,
)
from hpcdist.program import owners
from hpcdist.program.owners import Stepper
from hpcdist.program.tensors import from_array, to_array
from hpcdist.program.wrapped_modules import load_plain_state, plain_parameter_names, plain_state
from hpcdist.run.metrics_file import MetricsFile
from hpcdist.run.provenance import describe
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World
from hpcdist.saving.generator_state import GeneratorState, is_generator
from hpcdist.saving.items import (
    has_collective_state,
    is_module,
    is_optimizer,
    is_stateful,
    is_strategy,
)
from hpcdist.saving.restore import Prepared, Restore
from hpcdist.saving.unsaved_state import UnsavedState

#: Types of numbers and texts.
_PLAIN = (bool, int, float, str)


class Checkpoint:
    """Named objects whose state is saved and restored together.

    The objects that drive an optimizer of the Checkpoint must be in it: schedulers, GradScalers, averages of weights.
    If one is missing, the handler refuses the program after its first step, a manager at its first save.

    Args:
        leave_out: schedulers, scalers and averages of weights that are to begin anew at a restart, or classes of them.
        objects: objects with state_dict() and load_state_dict(), such as modules, optimizers, schedulers, distributed
            datasets and the strategy (which holds the seed and step of the random numbers); numpy arrays and tensors,
            such as a parameter, which are restored in place; generators of numpy, Python and torch that the loop draws
            from, each rank's own; or numbers and texts: `checkpoint["epoch"]` is the value,
            which a restore replaces and `checkpoint["epoch"] = 3` changes, on all ranks alike.

    Attributes:
        step: step of the last save or restore; 0 before the first.
        chosen_path: path of the checkpoint that `restore` loaded, until a manager resumes from it; else None.
        unsaved_state: looks for objects that drive the optimizers and are not in the Checkpoint.

    Raises:
        UsageError: for any other object, and for a DataLoader that has a state.
    """

    def __init__(self, *, leave_out: Sequence[Any] = (), **objects: Any) -> None:
        for name, item in objects.items():
            if is_generator(item):
                objects[name] = GeneratorState(item)
        for name, item in objects.items():
            _require_state(name, item)
        self._objects = {name: _plain(item) for name, item in objects.items()}
        self.unsaved_state = UnsavedState(self.objects(), leave_out)
        self.step = 0
        self.chosen_path: str | None = None

    def __getitem__(self, name: str) -> Any:
        """Return the object, number or text that was given under a name."""
        item = self._objects[name]
        if isinstance(item, GeneratorState):
            return item.generator
        return item

    def __setitem__(self, name: str, value: float | str) -> None:
        """Change a number or text. Not collective; all ranks must do the same.

        Raises:
            UsageError: if there is none of this name, or it is of another kind.
        """
        current_value = self._objects.get(name)
        value = _plain(value)
        is_plain = isinstance(current_value, _PLAIN)
        if not is_plain or _plain_kind(value) != _plain_kind(current_value):
            names = []
            for key, item in self._objects.items():
                if isinstance(item, _PLAIN):
                    names.append(repr(key))
            expected = ", ".join(names) or "there is none"
            raise UsageError(
                f"Checkpoint: expected a number or text under the name of one ({expected}), got "
                f"{type(value).__name__} for {name!r}; give it its first value when you make the Checkpoint."
            )
        self._objects[name] = value

    @property
    def world(self) -> World:
        """The ranks that save and restore together: of the strategy among the objects, else of the default world."""
        for item in self._objects.values():
            world = getattr(item, "world", None)
            if isinstance(world, World):
                return world
        return make_world()

    def digest_beside_tensors(self) -> str:
        """Return a digest of the state that can change without a step: schedules, settings of optimizers, numbers.

        Modules, arrays, the strategy and sources of batches are left out. Not collective.
        """
        settings = {name: _settings_of(item) for name, item in self._objects.items()}
        nodes, arrays = _encode_all(settings)
        text = json.dumps(nodes, sort_keys=True, default=str)
        digest = xxhash.xxh3_64(text.encode())
        for array in arrays:
            values = np.ascontiguousarray(array.values)
            digest.update(values.view(np.uint8).data)
        return digest.hexdigest()

    def first_parameters(self) -> list[Any]:
        """Return the first parameter of each optimizer."""
        parameters = []
        for optimizer in self.optimizers():
            parameters += optimizer.param_groups[0]["params"][:1]
        return parameters

    def objects(self) -> list[Any]:
        """Return the objects, without their names."""
        return list(self._objects.values())

    def optimizers(self) -> list[Any]:
        """Return the optimizers among the objects."""
        return [
            item for item in self._objects.values() if is_optimizer(item) and hasattr(item, "step")
        ]

    def describe_sums(self) -> dict[str, Any]:
        """Return how the strategy among the objects sums gradients; empty without a strategy."""
        for item in self._objects.values():
            if is_strategy(item):
                sums: dict[str, Any] = item.describe_sums()
                return sums
        return {}

    def gather(self) -> dict[str, Any]:
        """Return the states that are gathered from all ranks: of variables with a copy per replica, and of metrics.

        Objects on parameter servers are brought to one state on all workers.

        Collective over all ranks if the checkpoint holds such objects.
        """
        self.refresh()
        gathered: dict[str, Any] = {}
        for name, item in self._objects.items():
            if has_collective_state(item):
                gathered[name] = item.state_dict()
        return gathered

    def refresh(self) -> None:
        """Bring objects on parameter servers to one state on all workers.

        Collective over the workers if there are such objects.
        """
        owners.collect(list(self._objects.values()))

    @property
    def is_on_servers(self) -> bool:
        """Whether parameter servers make the steps of an optimizer here; each worker then has its own buffers."""
        optimizers = [item for item in self._objects.values() if is_optimizer(item)]
        return any(owners.stepper_of(optimizer) is Stepper.SERVERS for optimizer in optimizers)

    def publish(self) -> None:
        """Send the loaded state to parameter servers.

        Collective over the workers if servers hold any of the objects.
        """
        owners.publish(list(self._objects.values()))

    def make_equal(self) -> None:
        """Make models that have not been used yet equal on all ranks: a save is a use.

        Collective over chief and workers if there are such models.
        """
        owners.prepare(list(self._objects.values()))

    def collect(self, gathered: dict[str, Any]) -> tuple[Any, list[NamedArray]]:
        """Return the state of all objects as JSON and named arrays, without copying. Not collective.

        Args:
            gathered: the result of `gather`.
        """
        states: dict[str, Any] = {}
        for name, item in self._objects.items():
            states[name] = gathered[name] if name in gathered else _state_of(item)
        nodes, arrays = _encode_all(states)
        return {"objects": nodes, "kinds": _kinds_of(self._objects)}, arrays

    def collect_equal(self) -> tuple[dict[str, Any], list[NamedArray]]:
        """Return the state of models and optimizers as nodes and arrays, without copying. Not collective."""
        states: dict[str, Any] = {}
        for name, item in self._objects.items():
            if _is_equal_everywhere(item):
                states[name] = _state_of(item)
        return _encode_all(states)

    def trained_parts(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nodes of trained parameters and of optimizers, which training keeps equal on all ranks.

        Buffers are left out: a forward without a backward, as in an evaluation, may change them differently on each
        rank. Frozen modules are left out too, and averages of weights, such as torch's AveragedModel, which the chief
        alone may keep.

        Args:
            nodes: nodes of the objects by name, as `collect` and `collect_equal` return them.
        """
        parts = {}
        for name, item in self._objects.items():
            if is_module(item):
                if _is_trained(item):
                    names = plain_parameter_names(item)
                    pairs = nodes[name]["dict"]
                    parts[name] = {"dict": [pair for pair in pairs if pair[0] in names]}
            elif _is_equal_everywhere(item):
                parts[name] = nodes[name]
        return parts

    def estimate_bytes(self, n_images: int) -> int:
        """Return how much host memory the first step and the saves will take, as far as it is known. Not collective.

        Args:
            n_images: copies of the whole state that saves keep. Of tensors on a device there is one more, on the host.
        """
        tensors = self._tensors()
        state_bytes = sum(map(_nbytes, tensors))
        # gradients, and the states that optimizers allocate in their first step
        later_bytes = 0
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad is None:
                later_bytes += _nbytes(tensor)
        for item in self._objects.values():
            if is_optimizer(item):
                optimizer_bytes = _optimizer_bytes(item)
                state_bytes += optimizer_bytes
                if not getattr(item, "state", None):
                    later_bytes += optimizer_bytes
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return n_images * state_bytes + later_bytes
        return (n_images + 1) * state_bytes

    def _tensors(self) -> list[Any]:
        """Return the tensors of modules, and those among the objects; each once, as modules may share some."""
        tensor_by_id: dict[int, Any] = {}
        for item in self._objects.values():
            tensors: list[Any] = []
            if is_module(item):
                tensors = [*item.parameters(), *item.buffers()]
            elif _is_tensor(item):
                tensors = [item]
            for tensor in tensors:
                tensor_by_id[id(tensor)] = tensor
        return list(tensor_by_id.values())

    def read(self, path: str | os.PathLike[str]) -> int:
        """Load the checkpoint file at `path`, of any run, into the objects; return its step.

        Writes nothing and begins no attempt: the folder may be read-only, or belong to a running job. A MetricsFile
        among the objects stays as it is.

        Collective over chief and workers. Rank 0 reads; the other ranks need no access to the file.

        Raises:
            CheckpointMissing: if there is no such file; on all ranks.
            CheckpointDamaged: if the file is not what was committed; on all ranks. The objects then hold a part of the
                state.
            CheckpointMismatch: if it holds other objects or another model, or has a newer format; on all ranks.
            CheckpointError: if it cannot be read; on all ranks.

        Cost: one read of the file, and a broadcast of its arrays; beside the state, two blocks of 4 MiB in memory.
        """
        # not if this raises: the objects then hold a mixture
        chosen = self.chosen_path
        self.chosen_path = None
        index = Restore(self.world, self).restore_file(Path(path))
        self.publish()
        self.chosen_path = chosen
        return index.step

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Load like `read`, and resume training from there: managers do not replace it by the newest checkpoint.

        Call it before the handler is created, which counts steps from there. A MetricsFile keeps the records up to
        this checkpoint.

        Collective over chief and workers. Raises the errors of `read`.
        """
        self.chosen_path = None  # until this one is loaded
        index = Restore(self.world, self).restore_file(Path(path))
        self.publish()
        for name, item in self._objects.items():
            if isinstance(item, MetricsFile):
                item.resume(decode(index.state["objects"][name], from_array, []))
        self.step = index.step
        self.chosen_path = str(Path(path).absolute())
        return index.step

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the state as one checkpoint file at `path`, in place of an existing file, for `read` and `restore`.

        A crash leaves the old file or the new one, and at most a hidden file beside it, `.NAME.tmp-...`, which the next
        write of this file removes. Use a CheckpointManager to save a run: it keeps several checkpoints, and writes in
        the background.

        Collective over chief and workers; the chief writes. An evaluator writes by itself.

        Raises:
            CheckpointError: if it cannot be written; on all ranks.

        Cost: one copy of the arrays on the rank that writes, and the time to write them.
        """
        path = Path(path).absolute()  # the program may change its folder, or this be a thread
        image = FileImage()
        self.make_equal()
        gathered = self.gather()
        with self.world.agreed(self.world.role_comm):
            if self.world.is_chief or self.world.task.type == "evaluator":
                written = describe(self.world, self.describe_sums())
                facts = {
                    "step": self.step,
                    "time_s": time.time(),
                    "metrics": {},
                    "written": written,
                }
                lay_out(image, facts, *self.collect(gathered))
                _write_image(image, path)

    def claim_files(self) -> None:
        """Give this attempt its own copy of each metrics file, out of reach of the attempts it replaced.

        Not collective: chief only.

        Raises:
            CheckpointError: if a file cannot be written.
        """
        for file in self.files():
            file.claim()

    def files(self) -> list[MetricsFile]:
        """Return the metrics files, whose records must be durable before a checkpoint that counts them."""
        return [item for item in self._objects.values() if isinstance(item, MetricsFile)]

    def prepare(self, index: Index, source: str) -> Prepared:
        """Return where the arrays of a checkpoint go: into the objects' own memory, or into new memory.

        Args:
            index: index of the checkpoint.
            source: file name of the checkpoint, for messages.

        Raises:
            CheckpointDamaged: if the state is not one that `collect` returns, even if its digest is right.
            CheckpointMismatch: if objects or shapes differ; nothing is loaded then.
        """
        kinds = _kinds_of(self._objects)
        nodes, stored_kinds = _parts_of(index.state, source)
        if stored_kinds != kinds:
            raise CheckpointMismatch(
                f"restore: expected objects {kinds}, got {str(stored_kinds)[:1000]} in {source}; make Checkpoint(...) "
                f"with the same objects, or start with a new run folder."
            )
        return self._prepare(index, nodes, source)

    def _prepare(
        self, index: Index, nodes: dict[str, Any], source: str, is_strict: bool = True
    ) -> Prepared:
        memory_by_number = _memory_in_objects(self._objects, nodes)
        arrays: list[Array] = []
        named: list[NamedArray] = []
        for number, stored_array in enumerate(index.arrays):
            values = _destination_of(stored_array, memory_by_number.get(number))
            arrays.append(values)
            named.append(_named_array(stored_array, values))
        loaded: dict[str, Any] = {}
        for name, node in nodes.items():
            loaded[name] = _decoded(name, node, named, source)
        for name, item in self._objects.items():
            may_lack_tensors = is_module(item) and not is_strict
            if may_lack_tensors and isinstance(loaded[name], Mapping):
                loaded[name] = _with_loaded(plain_state(item), loaded[name])
        for name, item in self._objects.items():
            _check_shape(name, item, loaded[name], source)
            _check_layout(name, item, loaded[name], source)
        return Prepared(arrays, loaded, source)

    def load(self, index: Index, prepared: Prepared, is_own_run: bool = True) -> None:
        """Load the state of a checkpoint into all objects, once its arrays are filled.

        Args:
            index: index of the checkpoint.
            prepared: result of `prepare` for this index.
            is_own_run: whether this run resumes from the checkpoint: only then are metrics files cut to its records.

        Raises:
            CheckpointDamaged: if an array holds values that its dtype does not have.
            CheckpointMismatch: if an object refuses its state.
        """
        try:
            named_arrays(index.arrays, prepared.arrays)
        except ValueError as error:
            raise _damaged("bools", error, prepared.source) from None
        for name, item in self._objects.items():
            if isinstance(item, _PLAIN):
                self._objects[name] = prepared.loaded[name]
            elif is_own_run or not isinstance(item, MetricsFile):
                _load(name, item, prepared.loaded[name], prepared.source)


class _Part:
    """Some of the objects that a checkpoint holds."""

    def __init__(self, objects: dict[str, Any], is_strict: bool) -> None:
        self._objects = objects
        self._is_strict = is_strict
        self._checkpoint = Checkpoint(**objects)

    def prepare(self, index: Index, source: str) -> Prepared:
        nodes, stored_kinds = _parts_of(index.state, source)
        kinds = _kinds_of(self._objects)
        wrong: dict[str, str] = {}
        for name, kind in kinds.items():
            if stored_kinds.get(name) != kind:
                wrong[name] = kind
        is_missing = all(name not in stored_kinds for name in wrong)
        if wrong and (self._is_strict or not is_missing):
            raise CheckpointMismatch(
                f"load_checkpoint: expected {wrong}, got {str(stored_kinds)[:1000]} in {source}; pass the objects by "
                f"the names that the checkpoint has, or strict=False to leave out what it lacks."
            )
        objects = {name: item for name, item in self._objects.items() if name not in wrong}
        self._checkpoint = Checkpoint(**objects)
        chosen_nodes = {name: node for name, node in nodes.items() if name in kinds}
        return self._checkpoint._prepare(index, chosen_nodes, source, self._is_strict)

    def load(self, index: Index, prepared: Prepared, is_own_run: bool) -> None:
        self._checkpoint.load(index, prepared, is_own_run)

    def value(self, name: str) -> Any:
        return self._checkpoint[name]


def load_checkpoint(path: str | os.PathLike[str], *, strict: bool = True, **objects: Any) -> int:
    """Load some objects of the checkpoint file at `path`, such as the model alone; return its step.

    Collective over chief and workers; rank 0 reads. Writes nothing. Values of numbers and texts are not
    returned, as there is no object to load them into.

    Args:
        path: path of a checkpoint of any run.
        strict: whether the file must have all of the objects, and each module's parameters and buffers. With False,
            objects and tensors that the file lacks stay as they are, and additional ones in the file are ignored;
            shapes must be equal.
        objects: objects by the names that they have in the checkpoint.

    Raises:
        UsageError: for objects that a Checkpoint does not take. Raises the errors of `Checkpoint.read` too.

    Cost: that of `Checkpoint.read`, and memory for the arrays of the other objects while it reads.
    """
    checkpoint = Checkpoint(**objects)
    restore = Restore(checkpoint.world, _Part(objects, strict))
    index = restore.restore_file(Path(path))
    checkpoint.publish()
    return index.step


def read_value(path: str | os.PathLike[str], name: str, example: float | str) -> Any:
    """Return a number or text of the checkpoint file at `path`.

    Collective over chief and workers; rank 0 reads. Raises the errors of `load_checkpoint`, and costs the same.

    Args:
        path: path of a checkpoint of any run.
        name: name of the value in the Checkpoint.
        example: a value of the same kind.
    """
    part = _Part({name: example}, is_strict=True)
    Restore(make_world(), part).restore_file(Path(path))
    return part.value(name)


def _require_state(name: str, item: Any) -> None:
    """Raise UsageError unless an object has a state that a Checkpoint can hold."""
    if is_loader(item):
        raise UsageError(
            f"Checkpoint: expected what strategy.experimental_distribute_dataset(loader) returns, got the "
            f"{type(item).__name__} itself for {name!r}, which counts what this rank has drawn, and not what "
            f"it has trained on; distribute it: its own state is not needed."
        )
    if _is_array(item) or isinstance(_plain(item), _PLAIN):
        return
    if not is_stateful(item):
        raise UsageError(
            "Checkpoint: expected objects with state_dict and load_state_dict, arrays, tensors, numbers or "
            f"texts, got {type(item).__name__} for {name!r}; wrap it or leave it out."
        )


def _write_image(image: FileImage, path: Path) -> None:
    """Write a checkpoint that is laid out in memory as the file at `path`. Not collective.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    try:
        durable.make_folders(Disk(), path.parent)
        durable.replace_file(Disk(), path, image.blocks(), image.nbytes)
    except OSError as error:
        raise CheckpointError(
            f"write: expected to write {image.nbytes} bytes to {path}, got {error.strerror}; free space, "
            f"or choose another path."
        ) from None


def _encode_all(states: Mapping[str, Any]) -> tuple[dict[str, Any], list[NamedArray]]:
    """Return states by name as nodes of JSON, and the arrays that the nodes refer to, without copying."""
    arrays: list[NamedArray] = []
    nodes: dict[str, Any] = {}
    for name, state in states.items():
        nodes[name] = encode(state, name, to_array, arrays)
    return nodes, arrays


def _is_trained(module: Any) -> bool:
    """Return whether a module has parameters that training changes, and is no average of weights."""
    if hasattr(module, "update_parameters"):
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())  # of sparse ones too


def _optimizer_bytes(optimizer: Any) -> int:
    """Return roughly how many bytes a torch optimizer keeps for its parameters, by its options."""
    defaults = getattr(optimizer, "defaults", {})
    n_values_per_element = int(bool(defaults.get("momentum")))
    if "betas" in defaults:
        n_values_per_element = 2
    parameter_bytes = 0
    for group in optimizer.param_groups:
        parameter_bytes += sum(map(_nbytes, group["params"]))
    return n_values_per_element * parameter_bytes


def _destination_of(stored_array: StoredArray, memory: tuple[str, Array] | None) -> Array:
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


def _named_array(stored_array: StoredArray, values: Array) -> NamedArray:
    """Return values with the name and dtype of a stored array; bools, which are stored as bytes, as bools."""
    if stored_array.dtype == "bool":
        values = values.view(np.bool_)
    return NamedArray(stored_array.name, stored_array.dtype, values)


def _with_loaded(state: dict[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state with loaded values where both have a name; other loaded values are dropped."""
    merged = dict(state)
    for name in state:
        if name in loaded:
            merged[name] = loaded[name]
    return merged


def _memory_in_objects(
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
        if _is_array(item):
            kind = "tensor" if _is_tensor(item) else "array"
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
    elif _is_tensor(value) and value.device.type == "cpu" and value.is_contiguous():
        array, dtype = to_array(value)
    else:
        return None
    if not (array.flags.c_contiguous and array.flags.writeable):
        return None
    if dtype == "bool":
        array = array.view(np.uint8)
    return dtype, array


def _settings_of(item: Any) -> Any:
    """Return the part of an object's state that can change without a step; None if there is no such part."""
    if isinstance(item, _PLAIN):
        return item
    if is_optimizer(item):
        return [dict(group, params=None) for group in item.param_groups]
    if hasattr(item, "named_buffers"):
        return dict(item.named_buffers())
    if _is_array(item) or is_strategy(item) or isinstance(item, DistributedInput):
        return None
    if has_collective_state(item):
        return None
    return item.state_dict()


def _state_of(item: Any) -> Any:
    if _is_array(item) or isinstance(item, _PLAIN):
        return item
    if is_module(item):
        return plain_state(item)
    return item.state_dict()


def _is_tensor(item: Any) -> bool:
    """Return whether an object is a torch tensor; this layer does not import torch."""
    return hasattr(item, "new_tensor")


def _is_array(item: Any) -> bool:
    """Return whether an object is its own state: a numpy array or a tensor."""
    return isinstance(item, np.ndarray) or _is_tensor(item)


def _plain(item: Any) -> Any:
    """Return a number or text of numpy, or of a subclass, as Python's own; anything else as it is."""
    if isinstance(item, np.generic):
        item = item.item()
    for kind in _PLAIN:
        if isinstance(item, kind):
            return kind(item)
    return item


def _plain_kind(value: Any) -> str:
    """Return "number" or "text", or the name of any other type."""
    if type(value) in (bool, int, float):
        return "number"
    if type(value) is str:
        return "text"
    return type(value).__name__


def _is_equal_everywhere(item: Any) -> bool:
    """Return whether all ranks hold the object: a module, a parameter, or an optimizer that every rank steps."""
    if is_module(item):
        return True
    if is_optimizer(item):
        return owners.stepper_of(item) is Stepper.EVERY_RANK
    return _is_tensor(item) and bool(item.requires_grad)


def _kinds_of(objects: Mapping[str, Any]) -> dict[str, str]:
    return {name: _kind(item) for name, item in objects.items()}


def _kind(item: Any) -> str:
    """Return the object's kind: the name of its class, unless its content alone counts.

    That is so for values and modules, and for strategies: a run may continue under another one.
    """
    if isinstance(item, _PLAIN):
        return "value"
    if is_strategy(item):
        return "strategy"
    if _is_tensor(item):
        return "tensor"
    if is_module(item):
        return "module"
    declared_kind: str = getattr(item, "checkpoint_kind", type(item).__name__)
    return declared_kind


def _damaged(expected: str, actual: Any, source: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"restore: expected {expected} in {source}, got {str(actual)[:60]!r}; use another."
    )


def _parts_of(state: Any, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the nodes and kinds of the objects in a state, which may be any JSON: a digest is not a signature."""
    parts = state if isinstance(state, dict) else {}
    nodes = parts.get("objects")
    kinds = parts.get("kinds")
    if not isinstance(nodes, dict) or not isinstance(kinds, dict) or nodes.keys() != kinds.keys():
        raise _damaged("objects, each with its kind,", state, source)
    return nodes, kinds


def _decoded(name: str, node: Any, arrays: list[NamedArray], source: str) -> Any:
    try:
        return decode(node, from_array, arrays)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{error} ({name!r} in {source})") from None


def _check_shape(name: str, item: Any, loaded: Any, source: str) -> None:
    """Raise CheckpointDamaged unless `loaded` has the structure of a module's or an optimizer's state."""
    if is_optimizer(item):
        # wrappers have states of another structure
        if _is_optimizer_state(item.state_dict()) and not _is_optimizer_state(loaded):
            raise _damaged(
                f"groups of parameters and a dict for each parameter of {name!r}", loaded, source
            )
    elif is_module(item) and not isinstance(loaded, Mapping):
        raise _damaged(f"a dict of arrays for {name!r}", loaded, source)


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
    states_of_parameters = [state for key, state in states.items() if isinstance(key, int)]
    return all(isinstance(state, Mapping) for state in states_of_parameters)


def _is_list_of_names(value: Any) -> bool:
    """Return whether a value names parameters as optimizers do: by number, in some by text."""
    if not isinstance(value, list):
        return False
    return all(type(name) in (int, str) for name in value)


def _check_layout(name: str, item: Any, loaded: Any, source: str) -> None:
    """Raise CheckpointMismatch unless `loaded` has the object's arrays or, for an optimizer, its parameter groups."""
    if is_optimizer(item):
        state = item.state_dict()
        # a wrapper's state: only the wrapper can find the groups
        if not _is_optimizer_state(state):
            return
        current = _group_sizes(state)
        stored = _group_sizes(loaded)
    elif _is_array(item):
        current = _layouts({name: item})
        stored = _layouts({name: loaded})
    elif isinstance(item, _PLAIN):
        current = {name: _plain_kind(item)}
        stored = {name: _plain_kind(loaded)}
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
        if current.get(key) != stored.get(key):
            raise CheckpointMismatch(
                f"restore: expected {name!r} with {len(current)} arrays, {key!r} {current.get(key, 'absent')}, got "
                f"{len(stored)}, {key!r} {stored.get(key, 'absent')} in {source}; {hint}build the same model, or start "
                f"with a new run folder."
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


def _load(name: str, item: Any, loaded: Any, source: str) -> None:
    try:
        if isinstance(item, np.ndarray):
            item[...] = loaded
        elif _is_tensor(item):
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
