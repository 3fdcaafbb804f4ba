"""Rows that are written to an HDF5 file as they come, for `Dataset.from_hdf5` and any other reader.

Disk space is allocated before HDF5 writes: on a full disk HDF5 1.14 leaves a file that it can neither write nor close,
and the process crashes when it frees it.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import DataError

#: The structures of HDF5 take less than this in each append.
_MARGIN_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 20


class RowFile:
    """A file of datasets that grow; it gets its name once it is whole. Written by one process.

    >>> with RowFile("out.h5") as file:
    ...     file.append({"predictions": rows})
    ...     file.publish()

    Args:
        path: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()  # the program may change its folder
        self._temporary: Path | None = None
        self._file: Any = None
        self._disk = Disk()
        self._descriptor = -1

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        # an error that came before publish is raised
        with contextlib.suppress(OSError, RuntimeError):
            if self._file is not None:
                self._file.close()
        if self._temporary is None:
            return
        with contextlib.suppress(OSError):  # the file has its name now
            self._disk.close(self._descriptor)
            self._disk.remove(self._temporary)

    def append(self, rows: dict[str, Any]) -> None:
        """Append (rows, ...) arrays to the datasets of their names.

        Raises:
            DataError: when they do not fit to earlier ones, or cannot be written.
        """
        try:
            if self._file is None:
                durable.make_folders(self._disk, self._path.parent)
                self._descriptor, self._temporary = durable.create_temporary(self._disk, self._path)
                self._file = h5py.File(self._temporary, "w", locking=False)
                self._disk.allocate(self._descriptor, _MARGIN_BYTES)
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
        """Append rows to a dataset, which is made if it is new."""
        shape = array.shape[1:]
        if name not in self._file:
            row_bytes = max(1, math.prod(shape) * array.itemsize)
            chunk_rows = max(1, _CHUNK_BYTES // row_bytes)
            self._file.create_dataset(
                name,
                (0, *shape),
                array.dtype,
                maxshape=(None, *shape),
                chunks=(chunk_rows, *(max(1, size) for size in shape)),
            )
        stored = self._file[name]
        stored_shape = stored.shape[1:]
        if stored_shape != shape:
            raise ValueError(f"rows of shape {shape} after those of {stored_shape}")
        chunk_bytes = math.prod(stored.chunks) * array.itemsize
        n_more_bytes = array.nbytes + chunk_bytes + _MARGIN_BYTES
        n_bytes = self._file.id.get_filesize()
        self._disk.allocate(self._descriptor, n_bytes + n_more_bytes)
        n_before = len(stored)
        stored.resize(n_before + len(array), 0)
        stored[n_before:] = array

    def publish(self) -> None:
        """Give the file its name, in place of a file of that name, once its content is durable.

        Raises:
            DataError: when it cannot be written.
        """
        try:
            self._file.flush()
            n_bytes = self._file.id.get_filesize()
            self._file.close()
            self._file = None
            # without the bytes that were allocated and not used
            self._disk.truncate(self._descriptor, n_bytes)
            self._disk.sync(self._descriptor)
            assert self._temporary is not None, "appended to"
            self._disk.rename(self._temporary, self._path)
            self._disk.sync_folder(self._path.parent)
        except (OSError, RuntimeError) as error:  # HDF5 raises both
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> DataError:
        reason = (isinstance(error, OSError) and error.strerror) or error
        return DataError(
            f"predict: expected to write rows to {self._path}, got {reason}; free space, or choose another path."
        )
