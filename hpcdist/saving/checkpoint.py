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
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.read import Index, named_arrays
from hpcdist.checkpoint.tree import Array, NamedArray, decode, encode
from hpcdist.errors import (
    CheckpointError,
    CheckpointMismatch,
    UsageError,
)
from hpcdist.program import owners
from hpcdist.program.owners import Stepper
from hpcdist.program.tensors import from_array, to_array
from hpcdist.program.wrapped_modules import plain_parameter_names, plain_state
from hpcdist.run.metrics_file import MetricsFile
from hpcdist.run.provenance import describe
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World
from hpcdist.saving.generator_state import GeneratorState, is_generator
from hpcdist.saving.items import (
    PLAIN,
    as_plain,
    has_collective_state,
    is_equal_everywhere,
    is_module,
    is_optimizer,
    is_strategy,
    is_tensor,
    is_trained,
    kinds_of,
    n_bytes_of,
    optimizer_bytes,
    plain_kind,
    require_state,
    settings_of,
    state_of,
)
from hpcdist.saving.loaded_state import (
    check_layout,
    check_shape,
    damaged,
    decoded,
    destination_of,
    load_into,
    memory_in_objects,
    named_array,
    parts_of,
    with_loaded,
)
from hpcdist.saving.restore import Prepared, Restore
from hpcdist.saving.unsaved_state import UnsavedState


class Checkpoint:
    """Named objects whose state is saved and restored together.

    The objects that drive an optimizer of the Checkpoint must be in it: schedulers, GradScalers, averages of weights.
    If one is missing, the handler refuses the program after its first step, a manager at its first save.

    >>> checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy, phase="warm-up")
    >>> checkpoint.write("state.h5")
    >>> checkpoint["phase"] = "main"
    >>> step = checkpoint.read("state.h5")
    >>> checkpoint["phase"]
    'warm-up'

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
            require_state(name, item)
        self._objects = {name: as_plain(item) for name, item in objects.items()}
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
        value = as_plain(value)
        is_plain = isinstance(current_value, PLAIN)
        if not is_plain or plain_kind(value) != plain_kind(current_value):
            names = []
            for key, item in self._objects.items():
                if isinstance(item, PLAIN):
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

    def digest_between_passes(self) -> str | None:
        """Return a digest of what a program may change between two passes, as far as this rank holds it.

        That is the state of schedules, generators and metrics, the settings of optimizers, arrays and numbers. The
        parameters of modules, the strategy and sources of batches are left out. Not collective.

        Returns:
            The digest; None if the state of an object is none that a checkpoint can hold.
        """
        settings = {name: settings_of(item) for name, item in self._objects.items()}
        try:
            nodes, arrays = _encode_all(settings)
        except (CheckpointError, TypeError):
            return None
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
        """Make models equal on all ranks that have not been used yet, as a save is a use; end a round of local steps.

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
            states[name] = gathered[name] if name in gathered else state_of(item)
        nodes, arrays = _encode_all(states)
        return {"objects": nodes, "kinds": kinds_of(self._objects)}, arrays

    def collect_equal(self) -> tuple[dict[str, Any], list[NamedArray]]:
        """Return the state of models and optimizers as nodes and arrays, without copying. Not collective."""
        states: dict[str, Any] = {}
        for name, item in self._objects.items():
            if is_equal_everywhere(item):
                states[name] = state_of(item)
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
                if is_trained(item):
                    names = plain_parameter_names(item)
                    pairs = nodes[name]["dict"]
                    trained_pairs = [pair for pair in pairs if pair[0] in names]
                    parts[name] = {"dict": trained_pairs}
            elif is_equal_everywhere(item):
                parts[name] = nodes[name]
        return parts

    def estimate_bytes(self, n_images: int) -> int:
        """Return how much host memory the first step and the saves will take, as far as it is known. Not collective.

        Args:
            n_images: copies of the whole state that saves keep. Of tensors on a device there is one more, on the host.
        """
        tensors = self._tensors()
        state_bytes = sum(map(n_bytes_of, tensors))
        # gradients, and the states that optimizers allocate in their first step
        later_bytes = 0
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad is None:
                later_bytes += n_bytes_of(tensor)
        for item in self._objects.values():
            if is_optimizer(item):
                n_bytes = optimizer_bytes(item)
                state_bytes += n_bytes
                if not getattr(item, "state", None):
                    later_bytes += n_bytes
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
            elif is_tensor(item):
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
        kinds = kinds_of(self._objects)
        nodes, stored_kinds = parts_of(index.state, source)
        if stored_kinds != kinds:
            raise CheckpointMismatch(
                f"restore: expected objects {kinds}, got {str(stored_kinds)[:1000]} in {source}; make Checkpoint(...) "
                f"with the same objects, or start with a new run folder."
            )
        return self._prepare(index, nodes, source)

    def _prepare(
        self, index: Index, nodes: dict[str, Any], source: str, is_strict: bool = True
    ) -> Prepared:
        memory_by_number = memory_in_objects(self._objects, nodes)
        arrays: list[Array] = []
        named: list[NamedArray] = []
        for number, stored_array in enumerate(index.arrays):
            values = destination_of(stored_array, memory_by_number.get(number))
            arrays.append(values)
            named.append(named_array(stored_array, values))
        loaded: dict[str, Any] = {}
        for name, node in nodes.items():
            loaded[name] = decoded(name, node, named, source)
        for name, item in self._objects.items():
            may_lack_tensors = is_module(item) and not is_strict
            if may_lack_tensors and isinstance(loaded[name], Mapping):
                loaded[name] = with_loaded(plain_state(item), loaded[name])
        for name, item in self._objects.items():
            check_shape(name, item, loaded[name], source)
            check_layout(name, item, loaded[name], source)
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
            raise damaged("bools", error, prepared.source) from None
        for name, item in self._objects.items():
            if isinstance(item, PLAIN):
                self._objects[name] = prepared.loaded[name]
            elif is_own_run or not isinstance(item, MetricsFile):
                load_into(name, item, prepared.loaded[name], prepared.source)


class _Part:
    """Some of the objects that a checkpoint holds."""

    def __init__(self, objects: dict[str, Any], is_strict: bool) -> None:
        self._objects = objects
        self._is_strict = is_strict
        self._checkpoint = Checkpoint(**objects)

    def prepare(self, index: Index, source: str) -> Prepared:
        nodes, stored_kinds = parts_of(index.state, source)
        kinds = kinds_of(self._objects)
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
        objects: dict[str, Any] = {}
        for name, item in self._objects.items():
            if name not in wrong:
                objects[name] = item
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

    >>> checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
    >>> checkpoint.write("state.h5")
    >>> step = hpcdist.load_checkpoint("state.h5", model=model)

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
