"""Opens HDF5 files of training data, which are not trusted: plain datasets inside the file, and nothing else."""

from typing import Any

import h5py

from hpcdist.errors import DataError


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
        raise DataError(
            f"from_hdf5: expected an HDF5 file, got {path!r}: {_line(error)}; check the path."
        ) from None
    try:
        return file, {name: _data(file, name, path) for name in names}
    except BaseException:
        file.close()
        raise


def _data(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    group: Any = file
    for part in name.strip("/").split("/"):
        link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            sibling_names = sorted(group)[:8] if isinstance(group, h5py.Group) else []
            raise DataError(
                f"from_hdf5: expected a dataset {name!r} in {path!r}, got {'none' if link is None else 'a link'} at "
                f"{part!r}, beside {sibling_names}; name an existing one."
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
