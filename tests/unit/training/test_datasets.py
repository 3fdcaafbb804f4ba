"""hpcdist.datasets: image files as they are published, and what is said where they are not there."""

import gzip
import struct

import numpy as np
import pytest

import hpcdist
from hpcdist.errors import DataError

NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@pytest.fixture
def arrays():
    draws = np.random.default_rng(1)
    shapes = {"x_train": (6, 28, 28), "y_train": (6,), "x_test": (3, 28, 28), "y_test": (3,)}
    return {name: draws.integers(0, 256, shape).astype(np.uint8) for name, shape in shapes.items()}


def write_idx(folder, arrays, is_zipped=False):
    folder.mkdir(exist_ok=True)
    for key, array in arrays.items():
        data = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
        if is_zipped:
            (folder / f"{NAMES[key]}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / NAMES[key]).write_bytes(data)
    return folder


@pytest.mark.parametrize("form", ["idx", "gz", "npz"])
def test_all_forms_give_the_same_arrays(tmp_path, arrays, form):
    path = tmp_path / ("mnist.npz" if form == "npz" else "mnist")
    if form == "npz":
        np.savez(path, **arrays)
    else:
        write_idx(path, arrays, form == "gz")
    (x, y), (x_test, y_test) = hpcdist.datasets.mnist.load_data(path)
    for loaded_array, name in ((x, "x_train"), (y, "y_train"), (x_test, "x_test"), (y_test, "y_test")):
        np.testing.assert_array_equal(loaded_array, arrays[name])
        assert loaded_array.dtype == np.uint8
        assert loaded_array.flags.writeable


def test_standard_places(tmp_path, arrays, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(DataError, match=r"fashion_mnist.*fashion_mnist.npz.*none"):
        hpcdist.datasets.fashion_mnist.load_data()
    (tmp_path / "home" / ".keras" / "datasets").mkdir(parents=True)
    np.savez(tmp_path / "home" / ".keras" / "datasets" / "fashion_mnist.npz", **arrays)
    assert len(hpcdist.datasets.fashion_mnist.load_data()[0][0]) == 6
    write_idx(tmp_path / "fashion_mnist", {**arrays, "x_test": arrays["x_test"][:0], "y_test": arrays["y_test"][:0]})
    assert len(hpcdist.datasets.fashion_mnist.load_data()[1][0]) == 0, "the folder here comes first"
    (tmp_path / "elsewhere" / "fashion_mnist").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(hpcdist.datasets.fashion_mnist.load_data()[1][0]) == 3, "a folder of something else does not count"


def test_files_that_are_not_whole(tmp_path, arrays):
    folder = write_idx(tmp_path / "mnist", arrays)
    labels = folder / NAMES["y_test"]
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(DataError, match="whole.*IDX.*10.*labels"):
        hpcdist.datasets.mnist.load_data(folder)
    labels.unlink()
    with pytest.raises(DataError, match=r"ubyte.gz"):
        hpcdist.datasets.mnist.load_data(folder)
    write_idx(folder, {"y_test": arrays["y_train"]})
    with pytest.raises(DataError, match="3.*images.*6.*labels"):
        hpcdist.datasets.mnist.load_data(folder)
    (folder / f"{NAMES['y_test']}.gz").write_bytes(b"no archive")
    labels.unlink()
    with pytest.raises(DataError, match="fetch.*again"):
        hpcdist.datasets.mnist.load_data(folder)
    whole = gzip.compress(bytes(1000))
    (folder / f"{NAMES['y_test']}.gz").write_bytes(whole[:14] + b"\xff\xff\xff" + whole[17:])
    with pytest.raises(DataError, match="fetch.*again"):
        hpcdist.datasets.mnist.load_data(folder)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", b"text"], ids=["empty", "cut off", "text"])
def test_an_npz_file_that_is_none(tmp_path, content):
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(DataError, match="x_train.*y_train.*x_test.*y_test"):
        hpcdist.datasets.mnist.load_data(tmp_path / "mnist.npz")


def test_an_npz_file_of_something_else(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(DataError, match="x_train"):
        hpcdist.datasets.mnist.load_data(tmp_path / "other.npz")
