"""Opens HDF5 files that nobody vouches for: plain datasets inside the file are read, anything else is refused."""

import json
import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.checkpoint.layout import FORMAT
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError, DataError

_BLOCK_BYTES = 4 << 20


def digest_file(path: Path) -> tuple[int, str]:
    """Return (bytes, xxh3-128 hex digest) of a file.

    Raises:
        OSError: when it cannot be read.
    """
    digest, nbytes = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            nbytes += len(block)
    return nbytes, digest.hexdigest()


def read_file(path: Path) -> tuple[Any, list[NamedArray]]:
    """Return (state, arrays) of a checkpoint file whose digest was checked.

    Only plain, contiguous datasets under the names above are read: links that lead elsewhere, virtual and external
    datasets, filters and sizes beyond the file are refused before any of their data is read.

    Raises:
        CheckpointDamaged: when the file is not laid out as `layout.lay_out` does.
        CheckpointError: when it was written by a newer hpcdist.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            datasets = _safe_datasets(file, path)
            index = json.loads(datasets.pop("index").tobytes())
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"restore: expected a checkpoint in {path}, got {_line(error)}; use another.") from None
    check_format(index.get("format") if isinstance(index, dict) else None, path)
    rows = index.get("arrays")
    if not isinstance(rows, list) or "state" not in index:
        raise CheckpointDamaged(
            f"restore: expected state and arrays in the index of {path}, got {list(index)}; use another."
        )
    return index["state"], [_array_at(row, datasets, path) for row in rows]


def check_format(found: Any, path: Path) -> None:
    """Raise CheckpointError for a format that this version cannot read."""
    if type(found) is not int or found < 1:
        raise CheckpointDamaged(f"restore: expected a checkpoint format number in {path}, got {found!r}; use another.")
    if found > FORMAT:
        raise CheckpointError(
            f"restore: expected checkpoint format up to {FORMAT}, got {found} in {path}; install the hpcdist that "
            f"wrote it, or move the file away to go on from an older one."
        )


def _safe_datasets(file: h5py.File, path: Path) -> dict[str, npt.NDArray[Any]]:
    _check_members(file, {"index", "arrays"}, path)
    group = file["arrays"]
    if not isinstance(group, h5py.Group):
        raise CheckpointDamaged(f"restore: expected a group /arrays in {path}, got a dataset; use another file.")
    _check_members(group, None, path)
    found = {name: _plain(group[name], path) for name in group}
    return {**found, "index": _plain(file["index"], path)}


def _check_members(group: h5py.Group, expected: set[str] | None, path: Path) -> None:
    names = set(group)
    if expected is not None and names != expected:
        raise CheckpointDamaged(
            f"restore: expected {sorted(expected)} in {path}, got {sorted(names)[:8]}; use another file."
        )
    for name in names:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise CheckpointDamaged(
                f"restore: expected plain datasets in {path}, got a link at {name!r}; use another file."
            )


def _plain(dataset: Any, path: Path) -> npt.NDArray[Any]:
    """Return the values of a dataset that is nothing but numbers inside this file."""
    is_plain = (
        isinstance(dataset, h5py.Dataset)
        and dataset.ndim == 1
        and dataset.dtype.kind in "iufc"
        and dataset.chunks is None
        and not dataset.is_virtual
        and not dataset.external
        and dataset.nbytes <= os.path.getsize(path)
    )
    if not is_plain:
        raise CheckpointDamaged(f"restore: expected plain datasets in {path}, got {dataset!r}; use another file.")
    return np.asarray(dataset[()])


def _array_at(row: Any, datasets: dict[str, npt.NDArray[Any]], path: Path) -> NamedArray:
    try:
        name, dtype, shape, offset = row
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, offset)):
            raise ValueError(f"shape {shape!r} at {offset!r}")
        n_elements = math.prod(shape)
        flat = datasets[dtype][offset : offset + n_elements]
        values = flat.reshape(shape)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointDamaged(
            f"restore: expected index rows that fit {path}, got {_line(error)}; use another."
        ) from None
    return NamedArray(str(name), str(dtype), values.view(np.bool_) if dtype == "bool" else values)


def open_data(path: str, names: list[str]) -> tuple[h5py.File, dict[str, h5py.Dataset]]:
    """Open a file of training data; return it and its datasets of the given names, to be read by rows.

    As in checkpoints, links that lead elsewhere, virtual and external datasets are refused. A shared lock is held while
    the file is open, where the file system has locks.

    Raises:
        DataError: when the file is missing, no HDF5 or locked, or a dataset is missing, or no rows of numbers in this
            file.
    """
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except BlockingIOError:
        raise DataError(
            f"from_hdf5: expected a file that nobody writes, got {path!r}, which is locked; wait until its writer has "
            f"closed it."
        ) from None
    except OSError as error:
        raise DataError(f"from_hdf5: expected an HDF5 file, got {path!r}: {_line(error)}; check the path.") from None
    try:
        return file, {name: _data(file, name, path) for name in names}
    except BaseException:
        file.close()
        raise


def _data(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    group: Any = file
    for part in name.strip("/").split("/"):
        found = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        if not isinstance(found, h5py.HardLink):
            there = sorted(group)[:8] if isinstance(group, h5py.Group) else []
            raise DataError(
                f"from_hdf5: expected a dataset {name!r} in {path!r}, got {'none' if found is None else 'a link'} at "
                f"{part!r}, beside {there}; name one that is there."
            )
        group = group[part]
    if not isinstance(group, h5py.Dataset) or group.ndim < 1 or group.is_virtual or group.external:
        raise DataError(
            f"from_hdf5: expected rows inside the file at {name!r} in {path!r}, got {group!r}; copy them into a plain "
            f"dataset with at least one dimension."
        )
    if group.dtype.kind not in "biufc":
        raise DataError(
            f"from_hdf5: expected numbers at {name!r} in {path!r}, got dtype {group.dtype}; convert them to a numeric "
            f"dtype."
        )
    return group


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
