"""Caches in files: what a process leaves is found by later ones and by others beside it, whole or not at all."""

import errno
import functools
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.row_file import pack, unpack
from hpcdist.data.row_store import FileStore
from hpcdist.errors import DataError

N_ROWS = 12
CALLS = []


def square(x):
    CALLS.append(int(x))
    return torch.tensor([int(x) ** 2]), {"n": np.int16(x)}


def arrays():
    return Dataset.from_tensor_slices(np.arange(N_ROWS))


def count():
    return range(N_ROWS)


def stream():
    return Dataset.from_generator(count)


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()
    return CALLS


def read(dataset):
    return [(x.flatten().tolist(), n["n"].tolist()) for x, n in dataset.batch(5)]


def files_of(folder):
    return sorted(folder.glob("c.*.rows"))


@pytest.mark.parametrize("make", [arrays, stream])
def test_a_later_process_reads_what_was_left(make, tmp_path, calls):
    expected = read(make().map(square))
    calls.clear()
    code = (
        "import sys; sys.path.insert(0, {!r}); import test_cache_files as t; t.read(t.{}().map(t.square).cache({!r}))"
    )
    folder = str(tmp_path / "c")
    subprocess.run([sys.executable, "-c", code.format(__file__.rpartition("/")[0], make.__name__, folder)], check=True)
    assert len(files_of(tmp_path)) == len(list(tmp_path.iterdir())) == 1
    dataset = make().map(square).cache(folder)
    assert read(dataset) == read(dataset) == expected
    assert calls == []
    (x, n), *_ = dataset
    assert (type(x), x.dtype, n["n"].dtype) == (torch.Tensor, torch.int64, np.int16)
    assert len(files_of(tmp_path)) == 1


def test_a_stream_that_was_not_drawn_to_its_end_is_drawn_anew(tmp_path, calls):
    rows = iter(stream().map(square).cache(tmp_path / "c"))
    for _ in range(5):
        next(rows)
    rows.close()
    assert list(tmp_path.iterdir()) == []
    calls.clear()
    read(stream().map(square).cache(tmp_path / "c"))
    assert calls == list(range(N_ROWS))
    assert len(files_of(tmp_path)) == 1


def test_ranks_leave_their_parts_and_read_those_of_others(tmp_path, calls):
    def part(replica, n_replicas):
        rows = arrays().map(square).cache(tmp_path / "c").shuffle(seed=1).batch(4)
        return DistributedDataset(rows, range(replica, replica + 1), n_replicas)

    first, second = part(0, 2), part(1, 2)
    list(first), list(second)
    assert sorted(calls) == list(range(N_ROWS))
    assert len(files_of(tmp_path)) == 2
    calls.clear()
    list(first)  # other rows than in the epoch before
    list(part(0, 1))
    assert calls == []


def test_processes_write_side_by_side(tmp_path, calls):
    datasets = [make().map(square).cache(tmp_path / "c") for make in (arrays, stream) for _ in range(4)]
    expected, found = read(arrays().map(square)), []
    threads = [threading.Thread(target=lambda one=one: found.append(read(one))) for one in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
    calls.clear()
    assert [read(make().map(square).cache(tmp_path / "c")) for make in (arrays, stream)] == [expected] * 2
    assert calls == []
    assert files_of(tmp_path) == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("n_bytes", [0, 1, 20, 200, -1])
def test_a_file_that_was_cut_is_read_anew(tmp_path, calls, caplog, n_bytes):
    expected = read(arrays().map(square).cache(tmp_path / "c"))
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:n_bytes])
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c")) == expected
    assert calls == list(range(N_ROWS))
    assert "a file of rows that was cut or changed; they are read anew" in caplog.text
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c")) == expected
    assert calls == []


def test_no_bit_may_change(tmp_path, calls):
    def make():
        return Dataset.from_tensor_slices(np.arange(3)).map(square).cache(tmp_path / "c")

    def is_refused():
        calls.clear()
        try:
            assert read(make()) == expected
        except DataError as error:
            return "in a damaged file; remove the files" in str(error)
        assert calls, "a change went unseen"
        return False

    expected = read(make())
    (path,) = files_of(tmp_path)
    whole, n_refused = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        n_refused += is_refused()
        for other in files_of(tmp_path):
            other.unlink()
    assert n_refused == 3 * (8 + 2)  # what the rows hold; without the rest the file is read anew


MANY_FILES = """
import resource, sys
import numpy as np
from hpcdist.data.row_store import FileStore
folder, n_files = sys.argv[1], 80
for number in range(n_files):
    store = FileStore(folder, "key")
    store[number] = np.array(number)
    store.commit()
    del store
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
stores = [FileStore(folder, "key") for _ in range(3)]
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
for store in stores:
    assert [int(store[number]) for number in range(n_files)] == list(range(n_files))
for one in held:
    one.close()
"""


def test_many_files_need_few_descriptors(tmp_path):
    """With all others in use, a store gets on with those that it has."""
    call = [sys.executable, "-c", MANY_FILES, str(tmp_path / "c")]
    found = subprocess.run(call, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened_now_is_found_later(number, tmp_path, monkeypatch, calls, caplog):
    expected = read(arrays().map(square).cache(tmp_path / "c"))
    real, is_refused = os.open, True
    calls.clear()  # which `square` uses: another list is another dataset

    def refusing(path, *args, **more):
        if is_refused and str(path).endswith(".rows"):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    dataset = arrays().map(square).cache(tmp_path / "c")
    assert os.strerror(number) in caplog.text
    assert "remove" not in caplog.text
    assert ("ulimit -n" in caplog.text) == (number != errno.EACCES)
    is_refused = False
    assert read(dataset) == expected
    assert calls == []
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize(("number", "advice"), [(errno.EMFILE, "ulimit -n"), (errno.ENOENT, "its rows are read anew")])
def test_a_file_that_is_gone_ends_the_pass_with_advice(number, advice, tmp_path, monkeypatch, calls):
    read(arrays().map(square).cache(tmp_path / "c"))
    calls.clear()
    [path] = files_of(tmp_path)
    for copy in range(20):  # more than stay open
        shutil.copy(path, tmp_path / f"c.z{copy}.rows")
    dataset = arrays().map(square).cache(tmp_path / "c")

    def refusing(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(DataError, match=f"cache: expected the file of rows .*{os.strerror(number)}.*{advice}"):
        read(dataset)


def test_no_advice_to_make_folders_or_room_where_files_are_short(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    store = FileStore(str(tmp_path / "c"), "key")
    store[0] = np.zeros(1)
    monkeypatch.setattr("hpcdist.data.row_store.write_rows", refusing)
    with pytest.raises(DataError, match="to be written, got .*; allow more open files"):
        store.commit()
    monkeypatch.setattr("tempfile.TemporaryFile", refusing)
    with pytest.raises(DataError, match="expected a folder .*; allow more open files"):
        FileStore(str(tmp_path / "c"), "key")


def other_square(x):
    return square(x)


def generator_of(start):
    return lambda: range(start, start + 3)


def adding(number):
    return lambda x: square(x + number)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.from_generator(generator_of(5)).map(square),
        lambda: Dataset.from_generator(functools.partial(range, 5, 8)).map(square),
        lambda: arrays().map(adding(1)),
        lambda: Dataset.from_tensor_slices(np.arange(N_ROWS) + 1).map(square),
        lambda: Dataset.from_tensor_slices(np.arange(2 * N_ROWS)).shard(2, 0).map(square),
        lambda: Dataset.from_tensor_slices(np.arange(2 * N_ROWS)).shard(2, 1).map(square),
        lambda: arrays().map(other_square),
        lambda: Dataset.from_generator(range, args=(1, N_ROWS)).map(square),
        lambda: Dataset.from_generator(range, args=(2, N_ROWS)).map(square),
        lambda: Dataset.from_generator(range, args=(2, N_ROWS)).shard(2, 1).map(square),
        lambda: Dataset.from_generator(range, args=(2, N_ROWS)).take(3).map(square),
    ],
)
def test_other_datasets_keep_rows_of_their_own(tmp_path, calls, make):
    generators = generator_of(0), functools.partial(range, 0, 3)
    streams = [*map(Dataset.from_generator, generators), Dataset.from_generator(range, args=(N_ROWS,)), stream()]
    for other in (arrays().map(square), arrays().map(adding(0)), *(one.map(square) for one in streams)):
        read(other.cache(tmp_path / "c"))
    expected = read(make())
    calls.clear()
    assert read(make().cache(tmp_path / "c")) == expected
    assert calls


def test_rows_of_files_are_told_apart(tmp_path):
    import h5py

    paths = []
    for number in range(2):
        paths.append(str(tmp_path / f"{number}.h5"))
        with h5py.File(paths[-1], "w") as file:
            file["x"] = np.arange(3) + 10 * number
    rows = Dataset.from_hdf5(paths, "x").cache(tmp_path / "c")
    both = [rows.files_of(2, index).take(np.arange(3)).tolist() for index in range(2)]
    assert both == [[0, 1, 2], [10, 11, 12]]
    again = Dataset.from_hdf5(paths, "x").cache(tmp_path / "c")
    assert [again.files_of(2, index).take(np.arange(3)).tolist() for index in range(2)] == both
    assert len(files_of(tmp_path)) == 2


@pytest.mark.parametrize(
    "row",
    [
        np.zeros((0, 2)),
        (np.array(1.5, np.float32), [torch.zeros(2, 0), {"a": np.array("text"), "b": torch.tensor(True)}]),
        np.array(["2026-11-21"], "M8[D]"),
        np.arange(6).reshape(2, 3).T,
    ],
)
def test_rows_come_back_as_they_were(row):
    found = unpack(*pack(row))
    assert repr(found) == repr(row) or np.array_equal(found, row)
    assert pack(found) == pack(row)


@pytest.mark.parametrize("row", [{1: np.ones(1)}, np.array([None]), (object(),)])
def test_what_no_file_can_hold_is_refused(tmp_path, row):
    with pytest.raises(DataError, match="expected rows of numbers or text .* or leave the filename out"):
        list(Dataset.from_generator(lambda: [row]).cache(tmp_path / "c"))
