"""Opens untrusted HDF5 files: reads plain datasets inside the file and refuses anything else."""

import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpcdist.checkpoint.layout import FORMAT, stored_dtype
from hpcdist.checkpoint.tree import NamedArray, is_too_deep
from hpcdist.errors import CheckpointDamaged, CheckpointError, CheckpointMissing, DataError

_BLOCK_BYTES = 4 << 20
#: Most dimensions of an array; no numpy version allows more.
_MAX_DIMENSIONS = 64
#: Errors that mean that no such file exists, on a disk that works.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
#: Pauses before a failed read is repeated: a network file system may recover.
_PAUSES_S = (0.1, 0.4)
_HDF5_ERRNO = re.compile(r"\berrno = (\d+)")
_LAYOUTS = (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)


_Read = TypeVar("_Read")


def read_patiently(path: Path, read: Callable[[], _Read]) -> _Read:
    """Return the result of `read`; retry a few times if the file system cannot read.

    A read error is not damage: if it were treated as such, the job would resume from an older checkpoint.

    Raises:
        CheckpointError: if `path` still cannot be read.
        CheckpointMissing: if there is no such file.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            return read()
        except OSError as error:
            number, reason = _errno_of(error), error.strerror or _line(error)
            if number is None:  # the file was read, but is not HDF5
                raise
        if number in _NO_FILE:
            raise CheckpointMissing(f"restore: expected {path}, got {reason}; use another.")
        if pause_s is not None:
            time.sleep(pause_s)
    raise CheckpointError(
        f"restore: expected to read {path}, got {reason}, {len(_PAUSES_S) + 1} times; check the file system and run "
        f"again. Checkpoints are untouched."
    )


def _errno_of(error: OSError) -> int | None:
    """Return the errno of an error, which HDF5 only puts into its text; None if there is none."""
    if error.errno is not None:
        return error.errno
    match = _HDF5_ERRNO.search(str(error))
    return int(match[1]) if match else None


def digest_file(path: Path, on_block: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Return (bytes, xxh3-128 hex digest) of a file.

    Args:
        path: path of the file.
        on_block: called after each block.

    Raises:
        OSError: if it cannot be read.
    """
    digest, nbytes = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            nbytes += len(block)
            on_block()
    return nbytes, digest.hexdigest()


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a path that may be anything; neither waits for a pipe nor reads a device to its end.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a regular file, is too large, or is not text.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"no file of at most {max_bytes} bytes")
        return file.read().decode()


def read_file(path: Path, on_block: Callable[[], None] = lambda: None) -> tuple[Any, list[NamedArray]]:
    """Return (state, arrays) of a checkpoint file whose digest was checked.

    Reads only plain, contiguous datasets under the names in layout.py. Refuses links, virtual and external datasets,
    filters and sizes beyond the file before it reads any of their data.

    Args:
        path: path of the file.
        on_block: called after each block of the arrays.

    Raises:
        CheckpointDamaged: if the file does not have the layout of `layout.lay_out`.
        CheckpointError: if a newer hpcdist wrote it, or it cannot be read.
    """
    try:
        datasets = read_patiently(path, lambda: _read_datasets(path, on_block))
        index = json.loads(datasets.pop("index").tobytes())
        if is_too_deep(index):
            raise ValueError("nesting that is too deep")
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamaged(f"restore: expected a checkpoint in {path}, got {_line(error)}; use another.") from None
    check_format(index.get("format") if isinstance(index, dict) else None, path)
    rows = index.get("arrays")
    if not isinstance(rows, list) or "state" not in index:
        raise CheckpointDamaged(
            f"restore: expected state and arrays in the index of {path}, got {list(index)[:8]}; use another."
        )
    return index["state"], _arrays_of(rows, datasets, path)


def check_format(found: Any, path: Path) -> None:
    """Raise CheckpointError for a format that this version cannot read."""
    if type(found) is not int or found < 1:
        raise CheckpointDamaged(f"restore: expected a checkpoint format number in {path}, got {found!r}; use another.")
    if found > FORMAT:
        raise CheckpointError(
            f"restore: expected checkpoint format up to {FORMAT}, got {found} in {path}; install the hpcdist that "
            f"wrote it, or move the file away to resume from an older one."
        )


def _read_datasets(path: Path, on_block: Callable[[], None]) -> dict[str, npt.NDArray[Any]]:
    with h5py.File(path, "r", locking=False) as file:
        return {name: _read(dataset, on_block) for name, dataset in _safe_datasets(file, path).items()}


def _read(dataset: h5py.Dataset, on_block: Callable[[], None]) -> npt.NDArray[Any]:
    values = np.empty(dataset.shape, dataset.dtype)
    step = _BLOCK_BYTES // dataset.dtype.itemsize
    for start in range(0, len(values), step):
        values[start : start + step] = dataset[start : start + step]
        on_block()
    return values


def _safe_datasets(file: h5py.File, path: Path) -> dict[str, h5py.Dataset]:
    """Return the datasets of a checkpoint, without reading their data."""
    _check_members(file, {"index", "arrays"}, path)
    group = file["arrays"]
    if not isinstance(group, h5py.Group):
        raise CheckpointDamaged(f"restore: expected a group /arrays in {path}, got a dataset; use another file.")
    _check_members(group, None, path)
    found = {name: _plain(group[name], stored_dtype(name), path) for name in group}
    index = _plain(file["index"], np.dtype(np.uint8), path)
    if sum(dataset.nbytes for dataset in (index, *found.values())) > os.path.getsize(path):
        raise CheckpointDamaged(f"restore: expected datasets no larger than {path}, got larger ones; use another file.")
    return {**found, "index": index}


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


def _plain(dataset: Any, dtype: np.dtype[Any], path: Path) -> h5py.Dataset:
    """Return the dataset if it holds just numbers of a dtype inside this file, without reading its data."""
    is_plain = (
        isinstance(dataset, h5py.Dataset)
        and dataset.id.get_create_plist().get_layout()
        in _LAYOUTS  # first: other layouts may open other files for their size
        and not dataset.external
        and dataset.ndim == 1
        and dataset.dtype == dtype
        and dtype.kind in "iufc"
        and h5py.check_enum_dtype(dataset.dtype) is None
    )
    if not is_plain:
        raise CheckpointDamaged(f"restore: expected plain datasets in {path}, got {dataset!r}; use another file.")
    return dataset


def _arrays_of(rows: list[Any], datasets: dict[str, npt.NDArray[Any]], path: Path) -> list[NamedArray]:
    """Return the arrays described by the rows of the index, which must fill the datasets in order."""
    ends = dict.fromkeys(datasets, 0)
    arrays = []
    for row in rows:
        arrays.append(_array_at(row, ends, datasets, path))
        ends[arrays[-1].dtype] += arrays[-1].values.size
    sizes = {name: values.size for name, values in datasets.items()}
    if ends != sizes:
        raise CheckpointDamaged(f"restore: expected index rows that fill {path}, got {ends} of {sizes}; use another.")
    return arrays


def _array_at(row: Any, ends: dict[str, int], datasets: dict[str, npt.NDArray[Any]], path: Path) -> NamedArray:
    try:
        name, dtype, shape, offset = row
        numbers = [*shape, offset]
        is_fit = len(numbers) <= _MAX_DIMENSIONS + 1 and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        if not is_fit or type(name) is not str or offset != ends[dtype]:
            raise ValueError(f"{str(row)[:60]} after {ends[dtype]}")
        values = datasets[dtype][offset : offset + math.prod(shape)].reshape(shape)
        if dtype == "bool" and (values > 1).any():
            raise ValueError("a bool that is neither 0 nor 1")
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointDamaged(
            f"restore: expected index rows that fit {path}, got {_line(error)}; use another."
        ) from None
    return NamedArray(name, dtype, values.view(np.bool_) if dtype == "bool" else values)


def open_data(path: str, names: list[str]) -> tuple[h5py.File, dict[str, h5py.Dataset]]:
    """Open a file of training data; return it and its datasets of the given names, to be read by rows.

    As in checkpoints, links, virtual and external datasets are refused. If the file system has locks, a shared lock is
    held while the file is open.

    Raises:
        DataError: if the file is missing, not HDF5 or locked, or if a dataset is missing or does not hold rows of
            numbers in this file.
    """
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except BlockingIOError:
        raise DataError(
            f"from_hdf5: expected a file without a writer, got {path!r}, which is locked; wait until its writer has "
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
                f"{part!r}, beside {there}; name an existing one."
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
