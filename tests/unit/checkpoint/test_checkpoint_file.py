"""The file format: what is written comes back; whatever was changed is refused without a crash."""

import json
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import xxhash

from hpcdist.checkpoint import image as image_module
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import FORMAT, lay_out
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.safe_open import digest_file, read_file
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError

STATE = {"dict": [["step", 3]]}


def write_file(path, state, arrays, image=None):
    image = image or FileImage()
    lay_out(image, state, arrays)
    digest = xxhash.xxh3_128()
    path.write_bytes(b"".join(image.blocks(digest)))
    assert (image.nbytes, digest.hexdigest()) == digest_file(path)


def arrays(*dtypes):
    random = np.random.RandomState(0)
    made = []
    for number, dtype in enumerate(dtypes):
        stored = {"bfloat16": "uint16"}.get(dtype, dtype)
        values = (random.standard_normal((number, 3)) * 9).astype(stored)
        made.append(NamedArray(f"array{number}", dtype, values))
    return made


ALL = ("float32", "float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64", "float32")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.h5"
    write_file(path, STATE, arrays(*ALL))
    return path


def test_everything_comes_back(path):
    state, found = read_file(path)
    assert state == STATE
    for mine, theirs in zip(arrays(*ALL), found, strict=True):
        assert (mine.name, mine.dtype) == (theirs.name, theirs.dtype)
        assert mine.values.dtype == theirs.values.dtype
        assert mine.values.shape == theirs.values.shape
        assert mine.values.tobytes() == theirs.values.tobytes()


def test_scalars_and_nothing_at_all(tmp_path):
    path = tmp_path / "file.h5"
    write_file(path, None, [NamedArray("x", "float32", np.float32(2.5).reshape(()))])
    assert read_file(path)[1][0].values == np.float32(2.5)
    write_file(path, None, [])
    assert read_file(path) == (None, [])


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (200, False)])
def test_a_state_that_is_nested_deeper_than_any_is_saved(tmp_path, depth, is_read):
    """Python would read it, and fail on the way to the other ranks."""
    path, state = tmp_path / "file.h5", 1
    for _ in range(depth):
        state = {"list": [state]}
    write_file(path, state, [])
    if is_read:
        assert read_file(path) == (state, [])
    else:
        with pytest.raises(CheckpointDamaged, match="nesting that is too deep"):
            read_file(path)


def test_any_hdf5_reader_can_open_it(path):
    with h5py.File(path) as file:
        assert set(file) == {"index", "arrays"}
        assert set(file["arrays"]) == set(ALL)
        assert all(file["arrays"][dtype].chunks is None for dtype in ALL)
        index = json.loads(file["index"][()].tobytes())
        assert index["format"] == FORMAT
        assert ["array9", "float32", [9, 3], 0] in index["arrays"]


def test_every_flipped_bit_and_every_cut_changes_the_digest(path):
    """The digest covers every byte: metadata, data and padding. Every byte of the file is tried."""
    data = path.read_bytes()
    manifest = Manifest(3, path.name, *digest_file(path), {})
    manifest.verify(path)
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :])
        with pytest.raises(CheckpointDamaged, match="other bytes"):
            manifest.verify(path)
    for length in range(0, len(data), 512):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointDamaged, match=f"got {length} bytes"):
            manifest.verify(path)


def link_out(file):
    file["arrays/evil"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft_link(file):
    file["arrays/evil"] = h5py.SoftLink("/index")


def external_storage(file):
    file.create_dataset("arrays/evil", (8,), "u1", external=[("/etc/hostname", 0, 8)])


def virtual(file):
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", (4,))
    file.create_virtual_dataset("arrays/evil", layout)


def shape_bomb(file):
    file.create_dataset("arrays/evil", (1 << 50,), "f8", chunks=(1 << 10,))


def late_bomb(file):
    """A contiguous dataset of a petabyte that was never allocated."""
    file.create_dataset("arrays/evil", (1 << 47,), "f8")


def text(file):
    file.create_dataset("arrays/evil", data=["some", "text"])


def nested(file):
    file.create_group("arrays/evil/a/b/c")


def extra(file):
    file["other"] = np.zeros(3)


def no_index(file):
    del file["index"]


def index_is_a_group(file):
    del file["index"]
    file.create_group("index")


@pytest.mark.parametrize(
    "harm",
    [
        link_out,
        soft_link,
        external_storage,
        virtual,
        shape_bomb,
        late_bomb,
        text,
        nested,
        extra,
        no_index,
        index_is_a_group,
    ],
)
def test_refuses_a_file_that_is_more_than_data(path, harm):
    with h5py.File(path, "r+") as file:
        harm(file)
    with pytest.raises(CheckpointDamaged):
        read_file(path)


def rewrite_index(path, change):
    with h5py.File(path, "r+") as file:
        index = json.loads(file["index"][()].tobytes())
        change(index)
        del file["index"]
        file["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)


@pytest.mark.parametrize(
    "row",
    [
        ["x", "float32", [10**9], 0],
        ["x", "float32", [3], 10**9],
        ["x", "float32", [-1], 0],
        ["x", "float32", "3", 0],
        ["x", "float99", [1], 0],
        ["x", "float32", [1]],
        7,
    ],
)
def test_refuses_an_index_that_does_not_fit(path, row):
    rewrite_index(path, lambda index: index["arrays"].append(row))
    with pytest.raises(CheckpointDamaged, match="index rows"):
        read_file(path)


@pytest.mark.parametrize("change", [lambda index: index.pop("state"), lambda index: index.update(arrays=7)])
def test_refuses_an_index_without_its_parts(path, change):
    rewrite_index(path, change)
    with pytest.raises(CheckpointDamaged, match="state and arrays"):
        read_file(path)


def test_refuses_a_newer_format_and_says_what_to_do(path):
    rewrite_index(path, lambda index: index.update(format=FORMAT + 1))
    with pytest.raises(CheckpointError, match="install the hpcdist that wrote it") as caught:
        read_file(path)
    assert not isinstance(caught.value, CheckpointDamaged)


@pytest.mark.parametrize("found", [None, "1", 0, -1, 1.5, True])
def test_refuses_a_format_that_is_no_number(path, found):
    rewrite_index(path, lambda index: index.update(format=found))
    with pytest.raises(CheckpointDamaged, match="format number"):
        read_file(path)


def test_damaged_files_do_not_crash_the_process(path):
    """Files reach libhdf5 only after the digest was checked; even so, no changed byte of its structures kills us."""
    code = """
import pathlib, sys
from hpcdist.checkpoint.safe_open import read_file
from hpcdist.errors import CheckpointError
path = pathlib.Path(sys.argv[1])
data = path.read_bytes()
refused = 0
for offset in range(0, 800):
    path.write_bytes(data[:offset] + bytes([data[offset] ^ 255]) + data[offset + 1:])
    try:
        read_file(path)
    except CheckpointError:
        refused += 1
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100


def test_manifest_round_trip_and_damage(tmp_path):
    path = tmp_path / "manifest.json"
    manifest = Manifest(7, "step-00000007.h5", 100, "ab", {"ranks": 2, "torch": "x"})
    path.write_text(manifest.to_text())
    assert read_manifest(path) == manifest
    content = path.read_text()
    for offset in range(len(content)):
        changed = content[:offset] + chr(ord(content[offset]) ^ 1) + content[offset + 1 :]
        path.write_text(changed)
        try:
            found = read_manifest(path)
        except CheckpointError:
            continue
        assert found == manifest, f"offset {offset}"  # only white space was changed


def test_manifest_of_a_newer_format(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(Manifest(7, "step-00000007.h5", 100, "ab", {}, format=FORMAT + 1).to_text())
    with pytest.raises(CheckpointError, match="install the hpcdist that wrote it"):
        read_manifest(path)


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
    for view, found in zip(views, read_file(tmp_path / "x.h5")[1], strict=True):
        assert np.array_equal(view, found.values)


def test_large_arrays_start_where_the_disk_takes_them_directly(tmp_path):
    image = FileImage()
    lay_out(image, None, [NamedArray("x", "float32", np.zeros(1 << 16, np.float32))])
    path = tmp_path / "x.h5"
    path.write_bytes(b"".join(image.blocks(xxhash.xxh3_128())))
    with h5py.File(path) as file:
        assert file["arrays/float32"].id.get_offset() % 4096 == 0


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
    same = {
        found.name: np.array_equal(found.values, values[found.name]) for found in read_file(tmp_path / "file.h5")[1]
    }
    assert same == dict.fromkeys(values, True)
