"""Opens HDF5 files of training data, which are not trusted: plain datasets inside the file, and nothing else."""

from typing import Any

import h5py

from hpcdist.errors import DataError

#: Datasets of a file by their names.
Datasets = dict[str, h5py.Dataset]


def open_data(path: str, names: list[str]) -> tuple[h5py.File, Datasets]:
    """Open a file of training data; return it and its datasets by their names, to be read by rows.

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
    """Return a dataset of rows of numbers that lies inside the file."""
    member: Any = file
    for part in name.strip("/").split("/"):
        is_group = isinstance(member, h5py.Group)
        link = member.get(part, getlink=True) if is_group else None
        if not isinstance(link, h5py.HardLink):
            actual = "none" if link is None else "a link"
            sibling_names = sorted(member)[:8] if is_group else []
            raise DataError(
                f"from_hdf5: expected a dataset {name!r} in {path!r}, got {actual} at {part!r}, beside "
                f"{sibling_names}; name an existing one."
            )
        member = member[part]
    if not _holds_rows(member):
        raise DataError(
            f"from_hdf5: expected rows inside the file at {name!r} in {path!r}, got {member!r}; copy them into a plain "
            f"dataset with at least one dimension."
        )
    if member.dtype.kind not in "biufc":
        raise DataError(
            f"from_hdf5: expected numbers at {name!r} in {path!r}, got dtype {member.dtype}; convert them to a numeric "
            f"dtype."
        )
    return member


def _holds_rows(member: Any) -> bool:
    """Return whether a member of a file is a plain dataset of at least one dimension, whose data is in the file."""
    if not isinstance(member, h5py.Dataset) or member.ndim < 1:
        return False
    return not member.is_virtual and not member.external


def _line(error: BaseException) -> str:
    """Return the type and the text of an error in one line."""
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:200]
