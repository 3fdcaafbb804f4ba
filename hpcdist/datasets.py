"""The path hpcdist.datasets, as `keras.datasets`: MNIST and Fashion-MNIST from files that are there already.

>>> (x_train, y_train), (x_test, y_test) = hpcdist.datasets.mnist.load_data("/datasets/mnist")

Nothing is fetched: the nodes of a cluster often cannot, and a thousand ranks should not.
"""

import gzip
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.errors import DataError

Array = npt.NDArray[np.uint8]
_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


class ImageDataset:
    """Images and labels to train on and to test on.

    Args:
        name: name of the dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def load_data(
        self, path: str | os.PathLike[str] | None = None
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return (x_train, y_train), (x_test, y_test): (rows, 28, 28) uint8 images and (rows,) uint8 labels.

        Args:
            path: folder with the four IDX files, gzipped or not; or an .npz file as Keras has it. Default: `NAME.npz`
                or a folder `NAME` with such files, in the current folder or in ~/.keras/datasets.

        Raises:
            DataError: when there is no such file, or a file is not whole.
        """
        dataset_path = self._find(path)
        if dataset_path.is_file():
            parts = _read_npz(dataset_path)
        else:
            parts = {key: _read_idx(dataset_path, name) for key, name in _FILES.items()}
        for images, labels in (("x_train", "y_train"), ("x_test", "y_test")):
            if len(parts[images]) != len(parts[labels]):
                raise DataError(
                    f"load_data: expected a label for each image, got {len(parts[images])} images and "
                    f"{len(parts[labels])} labels in {dataset_path}; fetch it again."
                )
        return (parts["x_train"], parts["y_train"]), (parts["x_test"], parts["y_test"])

    def _find(self, path: str | os.PathLike[str] | None) -> Path:
        """Return the path of the dataset.

        Raises:
            DataError: when there is no dataset.
        """
        if path is not None and Path(path).exists():
            return Path(path)
        places = str(path)
        if path is None:
            standard_paths = self._standard_paths()
            for standard_path in standard_paths:
                if standard_path.is_file() or _has_idx_file(standard_path):
                    return standard_path
            places = ", ".join(map(str, standard_paths))
        raise DataError(
            f"load_data: expected {self._name} at {places}, got none; put {self._name}.npz, or a folder with "
            f"{_FILES['x_train']}.gz and the other three files, there, or give its path."
        )

    def _standard_paths(self) -> list[Path]:
        """Return the paths where the dataset may be, without duplicates."""
        keras_name = self._name.replace("_", "-")
        paths: list[Path] = []
        for folder in (Path(), Path.home() / ".keras" / "datasets"):
            for name in (f"{self._name}.npz", self._name, keras_name):
                if folder / name not in paths:
                    paths.append(folder / name)
        return paths


def _has_idx_file(folder: Path) -> bool:
    """Return whether one of the IDX files is in a folder."""
    return any(_idx_path(folder, name) is not None for name in _FILES.values())


def _idx_path(folder: Path, name: str) -> Path | None:
    """Return the path of an IDX file, gzipped or not. None if it is missing."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    return None


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {key: file[key] for key in _FILES}
    except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"load_data: expected an .npz file with {', '.join(_FILES)}, got {path}: {error}; fetch it again."
        ) from error


def _read_idx(folder: Path, name: str) -> Array:
    """Return the array in an IDX file: two zero bytes, type 8, dimensions, their sizes, then bytes."""
    path = _idx_path(folder, name)
    if path is None:
        raise DataError(
            f"load_data: expected {name} or {name}.gz in {folder}, got neither; put it there."
        )
    try:
        open_file: Any = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"load_data: expected to read {path}, got {error}; fetch it again."
        ) from error
    n_dims = 0
    if data[:3] == b"\0\0\x08" and len(data) >= 4 + 4 * data[3]:
        n_dims = data[3]
    offset = 4 + 4 * n_dims
    shape = np.frombuffer(data[4:offset], ">u4")
    if not n_dims or len(data) != offset + shape.prod(dtype=np.int64):
        raise DataError(
            f"load_data: expected a whole IDX file of bytes, got {len(data)} bytes in {path}; fetch it again."
        )
    pixels = np.frombuffer(data, np.uint8, offset=offset)
    array: Array = pixels.reshape(shape).copy()
    return array


mnist = ImageDataset("mnist")
fashion_mnist = ImageDataset("fashion_mnist")
