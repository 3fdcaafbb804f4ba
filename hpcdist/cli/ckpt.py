"""`hpcdist ckpt`: look at checkpoints, compare, convert and remove them. Reads by the code that training uses.

Reading writes nothing, and disturbs no job that runs: a folder may be read-only.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.read import CheckpointFile, Index, StoredArray
from hpcdist.checkpoint.retention import Retention, SaveFacts
from hpcdist.checkpoint.store import Saved, Store, use_one
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.cli.output import echo
from hpcdist.errors import CheckpointDamaged, CheckpointError, ExitCode, UsageError

#: Powers of 1024 bytes.
_UNITS = ("B", "KiB", "MiB", "GiB")
_Array = np.ndarray[Any, Any]
_PATH = click.Path(path_type=Path)
_as_json = click.option("--json", "is_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Look at checkpoints, compare, convert and remove them.

    A PATH is a checkpoint, a folder of them, or a run folder: then its newest checkpoint that verifies is meant.
    """


@command.command()
@click.argument("folder", type=_PATH)
@_as_json
def ls(folder: Path, is_json: bool) -> None:
    """List the checkpoints of a folder, oldest first: step, attempt, time, size and metrics.

    Sizes and indices are read, arrays are not: `verify` reads everything.

    \b
    hpcdist ckpt ls runs/train
    """
    store = _store_of(folder)
    rows = [_row_of(store, saved) for saved in store.saved()]
    if is_json:
        echo(json.dumps(rows, indent=1))
        return
    if not rows:
        echo(f"no checkpoints in {store.path}")
    for row in rows:
        echo(_line_of(row))


@command.command()
@click.argument("path", type=_PATH)
@_as_json
def show(path: Path, is_json: bool) -> None:
    """Show what a checkpoint holds: step, metrics, versions and every array.

    \b
    hpcdist ckpt show runs/train/checkpoints/best.h5
    """
    checkpoint_path = _newest(path)
    index = _read_index(checkpoint_path)
    if is_json:
        arrays = list(map(_facts_of_array, index.arrays))
        document = {
            "path": str(checkpoint_path),
            **_facts_of(index),
            "arrays": arrays,
        }
        echo(json.dumps(document, indent=1))
        return
    saved = _time(index.time_s)
    size = _size(index.header.nbytes)
    echo(f"{checkpoint_path}: step {index.step}, saved {saved}, {size}")
    for name, value in index.metrics.items():
        echo(f"  metrics  {name} = {value}")
    for name, value in index.written.items():
        echo(f"  written  {name} = {value}")
    for array in index.arrays:
        shape = _shape(array.shape)
        size = _size(array.nbytes)
        echo(f"  {array.dtype:9} {shape:16} {size:>10}  {array.name}")


@command.command()
@click.argument("paths", type=_PATH, nargs=-1, required=True)
@_as_json
def verify(paths: Sequence[Path], is_json: bool) -> int:
    """Read checkpoints whole, and compare them with their digests. Of a folder, all of them.

    The exit code is 74 if one is damaged, or a folder has none.

    \b
    hpcdist ckpt verify runs/train
    """
    verdicts: list[_Verdict] = []
    for path in paths:
        verdicts += map(_verify, _all_in(path))
    if is_json:
        echo(json.dumps([verdict.facts for verdict in verdicts]))
    else:
        for verdict in verdicts:
            echo(str(verdict))
    is_sound = all(verdict.is_sound for verdict in verdicts)
    return ExitCode.DONE if is_sound else ExitCode.CHECKPOINT_IO


@command.command()
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
@_as_json
def diff(first: Path, second: Path, is_json: bool) -> int:
    """Compare two checkpoints: which arrays are in one only, or differ, and by how much.

    The exit code is 0 if all arrays have the same bits, else 1.

    \b
    hpcdist ckpt diff runs/a runs/b
    """
    first_index, first_arrays = _read(_newest(first))
    second_index, second_arrays = _read(_newest(second))
    rows = list(_differences(first_arrays, second_arrays))
    if is_json:
        steps = [first_index.step, second_index.step]
        document = {"steps": steps, "differences": rows}
        echo(json.dumps(document, indent=1))
    else:
        for row in rows:
            echo(f"{row['name']}: {row['difference']}")
        names = {array.name for array in [*first_arrays, *second_arrays]}
        n_different = len(rows)
        n_equal = len(names) - n_different
        steps_text = f"steps {first_index.step} and {second_index.step}"
        echo(f"{steps_text}: {n_equal} arrays have the same bits, {n_different} differ")
    return ExitCode.UNCAUGHT if rows else ExitCode.DONE


@command.command()
@click.argument("path", type=_PATH)
@click.argument("target", type=_PATH)
@click.option(
    "--object",
    "name",
    default="model",
    show_default=True,
    help="Which object of the Checkpoint; '' for all.",
)
def export(path: Path, target: Path, name: str) -> None:
    """Write the arrays of a checkpoint to TARGET, for other programs.

    TARGET ends in .safetensors, or in .pt for a state_dict that torch.load reads. Names are those of the object's
    state_dict. An existing file is not replaced.

    \b
    hpcdist ckpt export runs/train/checkpoints/best.h5 best.safetensors
    """
    _require_new(target, (".safetensors", ".pt"))
    checkpoint_path = _newest(path)
    index, every = _read(checkpoint_path)
    arrays = _of_object(every, name, checkpoint_path)
    from hpcdist.cli.torch_files import write_tensors

    write_tensors(target, arrays)
    objects = name or "all objects"
    echo(f"{target}: {len(arrays)} arrays of {objects}, step {index.step}")


@command.command("import")
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option(
    "--object",
    "name",
    default="model",
    show_default=True,
    help="What the Checkpoint calls the module.",
)
@click.option("--key", help="Where a file of torch has the state_dict, if it holds more.")
def import_(source: Path, target: Path, name: str, key: str | None) -> None:
    """Write a checkpoint from SOURCE, a .safetensors file or a state_dict of torch, to start from its weights.

    hpcdist.load_checkpoint(TARGET, model=model) loads it. An existing file is not replaced.

    \b
    hpcdist ckpt import resnet.safetensors start.h5
    """
    _require_new(target, (".h5",))
    from hpcdist.cli.torch_files import import_tensors

    n_arrays = import_tensors(source, target, name, key)
    echo(f"{target}: {n_arrays} arrays of {name}, step 0")


@command.command()
@click.argument("folder", type=_PATH)
@click.option(
    "--keep", type=click.IntRange(1), required=True, help="How many of the newest to keep."
)
@click.option(
    "--keep-every-steps", type=click.IntRange(1), help="Keep older ones at this interval, too."
)
@click.option(
    "--keep-best", metavar="METRIC", help="Keep the one with the best value of a metric, too."
)
@click.option("--best-mode", type=click.Choice(["min", "max"]), default="min", show_default=True)
@click.option("--yes", is_flag=True, help="Remove them; else they are listed only.")
def prune(
    folder: Path,
    keep: int,
    keep_every_steps: int | None,
    keep_best: str | None,
    best_mode: str,
    yes: bool,
) -> None:
    """Remove older checkpoints of a folder. Without --yes it only lists them.

    The newest one that verifies stays, as does what is newer, which is damaged.

    \b
    hpcdist ckpt prune runs/train --keep 3 --keep-best loss --yes
    """
    store = _store_of(folder)
    newest = store.latest()
    if newest is None:
        raise CheckpointError(
            f"prune: expected checkpoints in {store.path}, got none; correct the folder."
        )
    retention = Retention(
        keep, keep_best=keep_best, best_mode=best_mode, keep_every_n_steps=keep_every_steps
    )
    newest_saved, _ = newest
    readable: dict[Saved, SaveFacts] = {}
    for saved in store.saved():
        if saved > newest_saved:  # damaged
            continue
        facts = _save_facts(store, saved)
        if facts is not None:
            readable[saved] = facts
    retained_facts = retention.retained(list(readable.values()))
    for saved, facts in readable.items():
        is_retained = any(facts is retained for retained in retained_facts)
        if is_retained or saved == newest_saved:
            continue
        if yes:
            path = store.path / str(saved)
            durable.Disk().remove(path)
            echo(f"removed {saved}")
        else:
            echo(f"would remove {saved}")


# -- paths ---------------------------------------------------------------------------------------------------------


def _store_of(folder: Path) -> Store:
    """Return the store of a folder of checkpoints, or of the run folder above.

    Raises:
        UsageError: for a path that is no folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"hpcdist ckpt: expected a folder, got {str(folder)!r}, which is none; correct the path."
        )
    inner = folder / "checkpoints"
    return Store(inner if inner.is_dir() else folder)


def _newest(path: Path) -> Path:
    """Return the checkpoint that is meant by a file, or by a folder.

    Raises:
        CheckpointError: for a folder without a checkpoint.
    """
    if not path.is_dir():
        return path
    store = _store_of(path)
    latest = store.latest()
    if latest is None:
        raise CheckpointError(
            f"hpcdist ckpt: expected checkpoints in {store.path}, got none; correct the folder."
        )
    return latest[1]


def _all_in(path: Path) -> list[Path]:
    """Return all checkpoints of a folder, or the one checkpoint of a file.

    Raises:
        CheckpointError: for a folder without a checkpoint.
    """
    if not path.is_dir():
        return [path]
    store = _store_of(path)
    checkpoint_paths = [store.path / str(saved) for saved in store.saved()]
    if not checkpoint_paths:
        raise CheckpointError(
            f"hpcdist ckpt: expected checkpoints in {store.path}, got none; correct the folder."
        )
    return checkpoint_paths


def _require_new(target: Path, suffixes: Sequence[str]) -> None:
    if target.suffix not in suffixes:
        raise UsageError(
            f"hpcdist ckpt: expected a name that ends in {' or '.join(suffixes)}, got {str(target)!r}; add one."
        )
    if os.path.lexists(target):  # also a link that leads nowhere
        raise UsageError(
            f"hpcdist ckpt: expected a new file, got {str(target)!r}, which is there; remove it first."
        )


# -- what is in them -----------------------------------------------------------------------------------------------


def _read_index(path: Path) -> Index:
    return use_one(path, lambda _, file: file.index)


def _row_of(store: Store, saved: Saved) -> dict[str, Any]:
    """Return what `ls` says of a checkpoint, with "damaged" if its index is."""
    try:
        index = _read_index(store.path / str(saved))
    except CheckpointDamaged as error:
        return {
            "name": str(saved),
            "step": saved.step,
            "attempt": saved.attempt,
            "damaged": str(error),
        }
    return {
        "name": str(saved),
        "attempt": saved.attempt,
        **_facts_of(index),
        "arrays": len(index.arrays),
    }


def _line_of(row: dict[str, Any]) -> str:
    """Return a row of `ls` as a line of text."""
    name = row["name"]
    if "damaged" in row:
        return f"{name}  damaged: {row['damaged']}"
    size = _size(row["bytes"])
    n_arrays = row["arrays"]
    columns = [name, row["time"], f"{size:>10}", f"{n_arrays} arrays"]
    for metric, value in row["metrics"].items():
        columns.append(f"{metric} {value:.6g}")
    return "  ".join(columns)


def _facts_of(index: Index) -> dict[str, Any]:
    return {
        "step": index.step,
        "time": _time(index.time_s),
        "bytes": index.header.nbytes,
        "metrics": index.metrics,
        "written": index.written,
    }


def _facts_of_array(array: StoredArray) -> dict[str, Any]:
    return {
        "name": array.name,
        "dtype": array.dtype,
        "shape": array.shape,
        "bytes": array.nbytes,
    }


def _save_facts(store: Store, saved: Saved) -> SaveFacts | None:
    """Return what retention asks of a checkpoint. None if its index is damaged: it is neither counted nor removed."""
    try:
        index = _read_index(store.path / str(saved))
    except CheckpointDamaged:
        return None
    return SaveFacts(index.step, index.time_s, index.metrics)


@dataclass(frozen=True)
class _Verdict:
    """Result of the verification of a checkpoint.

    Attributes:
        path: path of the checkpoint.
        error: its damage, in one line. Empty if it is sound.
    """

    path: Path
    error: str

    @property
    def is_sound(self) -> bool:
        return not self.error

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "is_sound": self.is_sound,
            "error": self.error,
        }

    def __str__(self) -> str:
        if self.is_sound:
            return f"sound    {self.path}"
        return f"damaged  {self.error}"


def _verify(path: Path) -> _Verdict:
    try:
        use_one(path, lambda _, file: file.verify())
    except CheckpointDamaged as error:
        words = str(error).split()
        return _Verdict(path, " ".join(words))
    return _Verdict(path, "")


def _read(path: Path) -> tuple[Index, list[NamedArray]]:
    def read(_: Saved, file: CheckpointFile) -> tuple[Index, list[NamedArray]]:
        return file.index, file.read_arrays()

    return use_one(path, read)


def _differences(
    first: Sequence[NamedArray], second: Sequence[NamedArray]
) -> Iterator[dict[str, str]]:
    """Yield name and difference of each array that has not the same bits in both."""
    first_by_name = _by_name(first)
    second_by_name = _by_name(second)
    for name in dict.fromkeys([*first_by_name, *second_by_name]):
        difference = _difference(first_by_name.get(name), second_by_name.get(name))
        if difference:
            yield {"name": name, "difference": difference}


def _by_name(arrays: Sequence[NamedArray]) -> dict[str, NamedArray]:
    return {array.name: array for array in arrays}


def _difference(first: NamedArray | None, second: NamedArray | None) -> str:
    """Return how two arrays differ. Empty if they have the same bits.

    Args:
        first: array of the first checkpoint. None if it has no such array.
        second: array of the second checkpoint. None if it has no such array.
    """
    if second is None:
        return "only in the first"
    if first is None:
        return "only in the second"
    first_kind = _kind_of(first)
    second_kind = _kind_of(second)
    if first_kind != second_kind:
        return f"{first_kind} and {second_kind}"
    if first.values.tobytes() == second.values.tobytes():
        return ""
    n_different = int((_bits_of(first.values) != _bits_of(second.values)).any(axis=1).sum())
    return f"{n_different} of {first.values.size} elements{_distance(first, second)}"


def _kind_of(array: NamedArray) -> str:
    """Return dtype and shape of an array."""
    shape = _shape(array.values.shape)
    return f"{array.dtype} {shape}"


def _distance(first_array: NamedArray, second_array: NamedArray) -> str:
    """Return by how much the elements of two arrays of one shape and dtype differ, to follow their number."""
    with np.errstate(invalid="ignore", over="ignore"):
        first = _as_numbers(first_array)
        second = _as_numbers(second_array)
        distances = np.abs(first - second)
    largest = float(distances[~np.isnan(distances)].max(initial=0))
    text = f", at most by {largest:.3g}"
    if first.dtype.kind in "fc":
        is_nan = np.isnan(first) | np.isnan(second)
        n_nan = int(is_nan.sum())
        if n_nan:
            text += f", {n_nan} NaN"
    return text


def _bits_of(array: _Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the (elements, bytes) uint8 of an array: by them -0.0 differs from 0.0, and a NaN equals itself."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, array.dtype.itemsize)


def _as_numbers(array: NamedArray) -> _Array:
    """Return an array whose elements can be subtracted."""
    if array.dtype == "bfloat16":
        return (array.values.astype(np.uint32) << 16).view(np.float32)
    if array.values.dtype.kind in "biuf":
        return array.values.astype(np.float64)
    return array.values


def _of_object(arrays: Sequence[NamedArray], name: str, path: Path) -> list[NamedArray]:
    """Return the arrays of one object, under their names in its state_dict.

    Args:
        arrays: arrays of the checkpoint.
        name: name of the object. Empty for all arrays, under the names that they have.
        path: path of the checkpoint, for messages.

    Raises:
        UsageError: for an object that is not there, or has no arrays.
    """
    if not name:
        return list(arrays)
    prefix = f"{name}/"
    object_arrays: list[NamedArray] = []
    for array in arrays:
        if array.name.startswith(prefix):
            name_in_object = array.name.removeprefix(prefix)
            object_arrays.append(NamedArray(name_in_object, array.dtype, array.values))
    if not object_arrays:
        object_names = {array.name.partition("/")[0] for array in arrays}
        objects = ", ".join(sorted(object_names))
        raise UsageError(
            f"hpcdist ckpt: expected an object with arrays in {path}, {objects}, got {name!r}; name one."
        )
    return object_arrays


# -- text ----------------------------------------------------------------------------------------------------------


def _size(nbytes: int) -> str:
    """Return a number of bytes as people write it."""
    if nbytes < 1024:
        return f"{nbytes} B"
    exponent = min(len(_UNITS) - 1, int(math.log(nbytes, 1024)))
    value = nbytes / 1024**exponent
    unit = _UNITS[exponent]
    return f"{value:.1f} {unit}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _time(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
