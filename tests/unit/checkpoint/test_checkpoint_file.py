"""The file format: what is written comes back; whatever was changed is refused without a crash."""

import json
import time

import h5py
import numpy as np
import pytest
import xxhash

from hpcdist.checkpoint import image as image_module
from hpcdist.checkpoint.header import FORMAT, HEADER_BYTES, Header, parse_header
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.read import open_checkpoint
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointMismatch

STATE = {"dict": [["step", 3]]}
FACTS = {"step": 3, "time_s": 0.5, "metrics": {"loss": 0.25}, "written": {"by": "test"}}


def write_file(path, state, arrays, image=None):
    image = image or FileImage()
    lay_out(image, FACTS, state, arrays)
    with path.open("wb") as file:
        for offset, block in image.blocks():
            file.seek(offset)
            file.write(block)


def read_file(path):
    with open_checkpoint(path) as file:
        return file.index.state, file.read_arrays()


def arrays(*dtypes):
    random = np.random.RandomState(0)
    named_arrays = []
    for number, dtype in enumerate(dtypes):
        stored = {"bfloat16": "uint16"}.get(dtype, dtype)
        values = (random.standard_normal((number, 3)) * 9).astype(stored)
        if number % 3:
            name = f"loose/{number}"
        else:
            name = f"model/{number}.weight"
        named_arrays.append(NamedArray(name, dtype, values))
    return named_arrays


ALL = ("float32", "float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64", "float32")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.h5"
    write_file(path, STATE, arrays(*ALL))
    return path


def test_everything_comes_back(path):
    state, restored_arrays = read_file(path)
    assert state == STATE
    for array, restored_array in zip(arrays(*ALL), restored_arrays, strict=True):
        assert (array.name, array.dtype) == (restored_array.name, restored_array.dtype)
        assert array.values.dtype == restored_array.values.dtype
        assert array.values.shape == restored_array.values.shape
        assert array.values.tobytes() == restored_array.values.tobytes()


def test_scalars_and_nothing_at_all(tmp_path):
    path = tmp_path / "file.h5"
    write_file(path, None, [NamedArray("x", "float32", np.float32(2.5).reshape(()))])
    assert read_file(path)[1][0].values == np.float32(2.5)
    write_file(path, None, [])
    assert read_file(path) == (None, [])


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (200, False)])
def test_a_state_that_is_nested_deeper_than_any_is_saved(tmp_path, depth, is_read):
    """Python would read it, and fail on the way to the other ranks."""
    path = tmp_path / "file.h5"
    state = 1
    for _ in range(depth):
        state = {"list": [state]}
    write_file(path, state, [])
    if is_read:
        assert read_file(path) == (state, [])
    else:
        with pytest.raises(CheckpointDamaged, match="nesting.*deep"):
            read_file(path)


@pytest.mark.feature("checkpoints.chief-writes-hdf5")
def test_any_hdf5_reader_sees_arrays_under_their_names(path):
    with h5py.File(path) as file:
        assert set(file) == {"index", "model", "loose"}
        for array in arrays(*ALL):
            assert file[array.name].chunks is None
            assert file[array.name][()].tobytes() == array.values.tobytes()
        index = json.loads(file["index"][()].tobytes())
    assert index["step"] == 3
    assert [row[:3] for row in index["arrays"]][9] == ["model/9.weight", "float32", [9, 3]]


NAMES = ["a/b", "a", "a/b/c", "index", "a//b", "../a", "", "/", "a/.", "#0", "x\0y", "\udcff", "é/ü", "a/b", "x" * 5000]


def test_arrays_of_any_names(tmp_path):
    """HDF5 takes a name once, and none that is a group already."""
    named = [NamedArray(name, "int64", np.full(3, number)) for number, name in enumerate(NAMES)]
    write_file(tmp_path / "x.h5", None, named)
    restored_arrays = read_file(tmp_path / "x.h5")[1]
    assert [(array.name, array.values.tolist()) for array in restored_arrays] == [
        (array.name, array.values.tolist()) for array in named
    ]
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["a/b"][0] == 0
        assert file["é/ü"][0] == NAMES.index("é/ü")


@pytest.mark.feature("checkpoints.checksums-and-fallback")
def test_every_flipped_bit_and_every_cut_is_noticed(path):
    """Metadata, data and padding: every byte of the file is tried."""
    data = path.read_bytes()
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :])
        with pytest.raises(CheckpointDamaged):
            read_file(path)
    for length in range(0, len(data), 512):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointDamaged):
            read_file(path)


def sealed(path, data):
    """Write a file whose header fits its bytes."""
    old = parse_header(data[:HEADER_BYTES], path)
    split = old.index_offset
    digests = list(map(xxhash.xxh3_128_hexdigest, (data[HEADER_BYTES:split], data[split:])))
    path.write_bytes(Header(len(data), split, old.index_nbytes, *digests).to_bytes() + data[HEADER_BYTES:])


def rewrite_index(path, change):
    """Change the index, within its padding, and seal the file."""
    data = path.read_bytes()
    old = parse_header(data[:HEADER_BYTES], path)
    index = json.loads(data[old.index_offset :][: old.index_nbytes])
    change(index)
    text = json.dumps(index).encode().ljust(old.index_nbytes)
    assert len(text) <= 4096
    header = Header(old.nbytes, old.index_offset, len(text), old.arrays_digest, old.index_digest).to_bytes()
    sealed(path, header + data[HEADER_BYTES : old.index_offset] + text + data[old.index_offset + len(text) :])


@pytest.mark.parametrize(
    "row",
    [
        ["x", "float32", [10**9], 5000],
        ["x", "float32", [3], 10**9],
        ["x", "float32", [3], 0],
        ["x", "float32", [-1], 5000],
        ["x", "float32", "3", 5000],
        ["x", "float99", [1], 5000],
        ["x", "float32", [1]],
        7,
    ],
)
def test_refuses_an_index_that_does_not_fit(path, row):
    rewrite_index(path, lambda index: index["arrays"].append(row))
    with pytest.raises(CheckpointDamaged, match="expected an index"):
        read_file(path)


def test_refuses_arrays_that_share_bytes(path):
    """A small file could fill the memory with copies."""
    rewrite_index(path, lambda index: index["arrays"].append(["x", *index["arrays"][1][1:]]))
    with pytest.raises(CheckpointDamaged, match="at byte"):
        read_file(path)


@pytest.mark.parametrize("change", [lambda index: index.pop("state"), lambda index: index.update(arrays=7)])
def test_refuses_an_index_without_its_parts(path, change):
    rewrite_index(path, change)
    with pytest.raises(CheckpointDamaged, match="expected an index"):
        read_file(path)


def header_of(**parts):
    fields = {"format": 2, "nbytes": 9000, "index": [5000, 100], "xxh3_128": ["a", "b"], **parts}
    line = json.dumps(fields)
    return f"{line}\n{xxhash.xxh3_128_hexdigest(line.encode())}\n".encode().ljust(HEADER_BYTES, b"\0")


def test_a_header_comes_back_and_any_other_bytes_do_not(tmp_path):
    data = header_of()
    assert parse_header(data, tmp_path) == Header(9000, 5000, 100, "a", "b")
    assert parse_header(data, tmp_path).to_bytes() == data
    for offset in range(HEADER_BYTES):
        with pytest.raises(CheckpointDamaged, match="header.*checkpoint"):
            parse_header(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :], tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        {"format": None},
        {"format": "2"},
        {"format": 0},
        {"format": -1},
        {"format": 1.5},
        {"format": True},
        {"format": 1},
        {"nbytes": 5050},
        {"nbytes": "9000"},
        {"nbytes": True},
        {"nbytes": 10**400},
        {"index": [10, 100]},
        {"index": [5000, -1]},
        {"index": [5000, 10**300]},
        {"index": [5000.0, 100]},
        {"index": [5000]},
        {"index": 7},
        {"xxh3_128": ["a"]},
        {"xxh3_128": [1, 2]},
        {"xxh3_128": {"a": 1, "b": 2}},
        {"more": 1},
    ],
)
def test_refuses_a_header_that_no_save_writes(tmp_path, parts):
    with pytest.raises(CheckpointDamaged):
        parse_header(header_of(**parts), tmp_path)


def test_refuses_a_newer_format_and_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointMismatch, match="install.*hpcdist"):
        parse_header(header_of(format=FORMAT + 1, more=True), tmp_path)


def test_a_smaller_file_after_a_larger_one_holds_nothing_of_it(tmp_path):
    """The room is kept from one save to the next: padding must not tell what was there before."""
    image = FileImage()
    write_file(tmp_path / "large.h5", STATE, [NamedArray("x", "float32", np.full(9999, 7.0, np.float32))], image)
    write_file(tmp_path / "small.h5", STATE, arrays(*ALL), image)
    write_file(tmp_path / "fresh.h5", STATE, arrays(*ALL))
    assert (tmp_path / "small.h5").read_bytes() == (tmp_path / "fresh.h5").read_bytes()


def test_the_same_state_is_the_same_file_at_any_time(tmp_path):
    write_file(tmp_path / "first.h5", STATE, arrays(*ALL))
    time.sleep(1.1)  # HDF5 keeps times in whole seconds
    write_file(tmp_path / "second.h5", STATE, arrays(*ALL))
    assert (tmp_path / "first.h5").read_bytes() == (tmp_path / "second.h5").read_bytes()


def test_arrays_of_any_strides(tmp_path):
    square = np.arange(12.0).reshape(3, 4)
    views = [square.T, square[:, ::2], square[::-1], np.broadcast_to(square[0], (2, 4))]
    write_file(tmp_path / "x.h5", None, [NamedArray(str(n), "float64", view) for n, view in enumerate(views)])
    for view, restored_array in zip(views, read_file(tmp_path / "x.h5")[1], strict=True):
        assert np.array_equal(view, restored_array.values)


@pytest.mark.parametrize("n_copiers", [1, 2, 3, 4])
def test_large_arrays_are_copied_whole_by_any_number_of_threads(tmp_path, monkeypatch, n_copiers):
    """Pieces of odd lengths, dtypes and strides, more and fewer than there are threads."""
    monkeypatch.setattr(image_module, "MAX_COPIERS", n_copiers)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    random = np.random.default_rng(0)
    per_block = image_module.BLOCK_BYTES // 8
    values = {
        "long": random.random(3 * per_block + 1),
        "block": random.random(per_block),
        "transposed": random.random((per_block // 512 + 3, 700)).T,
        "bytes": random.integers(0, 255, 5_000_001, np.uint8),
        "scalar": np.float32(3.5),
    }
    named = [NamedArray(name, str(array.dtype), np.asarray(array)) for name, array in values.items()]
    write_file(tmp_path / "file.h5", None, named)
    same = {}
    for restored in read_file(tmp_path / "file.h5")[1]:
        same[restored.name] = np.array_equal(restored.values, values[restored.name])
    assert same == dict.fromkeys(values, True)
