"""Rows that are written to an HDF5 file as they come, for `Dataset.from_hdf5` and any other reader."""

import contextlib
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import DataError


class RowFile:
    """A file of datasets that grow; it has its name once it is whole. Written by one process.

    >>> with RowFile("out.h5") as file:
    ...     file.append({"predictions": rows})
    ...     file.publish()

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f"{self._path.name}.tmp-{os.getpid()}")
        self._file: Any = None

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # an error that came before publish is raised
            if self._file is not None:
                self._close()
        with contextlib.suppress(OSError):  # it has its name now, or was never made
            Disk().remove(self._temporary)

    def append(self, rows: dict[str, Any]) -> None:
        """Append (rows, ...) arrays to the datasets of their names.

        Raises:
            DataError: when they do not fit to earlier ones, or cannot be written.
        """
        try:
            if self._file is None:
                durable.make_folders(Disk(), self._path.parent)
                self._file = h5py.File(self._temporary, "w")
            for name, array in rows.items():
                self._append_one(name, np.asarray(array))
        except (OSError, RuntimeError) as error:
            raise self._refusal(error) from error
        except (ValueError, TypeError) as error:
            raise DataError(
                f"predict: expected rows of numbers that fit to the earlier ones in {self._path}, got {error}; return "
                f"outputs of one shape and dtype."
            ) from error

    def _append_one(self, name: str, array: Any) -> None:
        if name not in self._file:
            self._file.create_dataset(name, (0, *array.shape[1:]), array.dtype, maxshape=(None, *array.shape[1:]))
        stored = self._file[name]
        if stored.shape[1:] != array.shape[1:]:
            raise ValueError(f"rows of shape {array.shape[1:]} after those of {stored.shape[1:]}")
        n_before = len(stored)
        stored.resize(n_before + len(array), 0)
        stored[n_before:] = array

    def publish(self) -> None:
        """Give the file its name, in place of what is there, once its content is durable.

        Raises:
            DataError: when it cannot be written.
        """
        disk = Disk()
        try:
            self._close()
            descriptor = os.open(self._temporary, os.O_RDONLY)
            try:
                disk.sync(descriptor)
            finally:
                os.close(descriptor)
            disk.rename(self._temporary, self._path)
            disk.sync_folder(self._path.parent)
        except (OSError, RuntimeError) as error:  # HDF5 raises both
            raise self._refusal(error) from error

    def _close(self) -> None:
        file, self._file = self._file, None
        file.close()

    def _refusal(self, error: Exception) -> DataError:
        reason = (isinstance(error, OSError) and error.strerror) or error
        return DataError(
            f"predict: expected to write rows to {self._path}, got {reason}; free space, or choose another path."
        )
