"""Caches in files: other processes, then and later, find whole files of the same source and key, or none."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.data.cache import FileStore
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.row_file import pack, unpack
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
def test_a_later_process_reads_what_an_earlier_one_wrote(make, tmp_path, calls):
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


def test_ranks_write_their_parts_and_read_those_of_others(tmp_path, calls):
    def part(replica, n_replicas):
        rows = arrays().map(square).cache(tmp_path / "c").shuffle(seed=1).batch(4)
        return DistributedDataset(rows, range(replica, replica + 1), n_replicas)

    first = part(0, 2)
    second = part(1, 2)
    list(first), list(second)
    assert sorted(calls) == list(range(N_ROWS))
    assert len(files_of(tmp_path)) == 2
    calls.clear()
    list(first)  # other rows than in the epoch before
    list(part(0, 1))
    assert calls == []


@pytest.mark.parametrize("make", [arrays, stream])
def test_threads_write_side_by_side(make, tmp_path, calls):
    datasets = [make().map(square).cache(tmp_path / "c") for _ in range(8)]
    expected = read(make().map(square))
    rows_by_thread = []
    threads = [
        threading.Thread(target=lambda dataset=dataset: rows_by_thread.append(read(dataset))) for dataset in datasets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows_by_thread == [expected] * 8
    calls.clear()
    assert read(make().map(square).cache(tmp_path / "c")) == expected
    assert calls == []
    assert files_of(tmp_path) == sorted(tmp_path.iterdir())


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import test_cache_files as t
from hpcdist.data.distributed import DistributedDataset
replica = int(sys.argv[3])
rows = t.arrays().map(t.square).cache(sys.argv[2]).shuffle(seed=1).batch(4)
list(DistributedDataset(rows, range(replica, replica + 1), 2))
"""


def test_processes_write_side_by_side(tmp_path, calls):
    call = [sys.executable, "-c", PROCESS, __file__.rpartition("/")[0], str(tmp_path / "c")]
    processes = [subprocess.Popen([*call, str(replica)]) for replica in range(2)]
    assert [process.wait(timeout=50) for process in processes] == [0, 0]
    assert files_of(tmp_path) == sorted(tmp_path.iterdir())
    expected = read(arrays().map(square))
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c")) == expected
    assert calls == []


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import test_cache_files as t
from hpcdist.checkpoint.durable import Disk

def stop(self, *_):
    print("stopped", flush=True)
    sys.stdin.read()

setattr(Disk, sys.argv[3], stop)
t.read(t.arrays().map(t.square).cache(sys.argv[2]))
"""


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
def test_a_kill_in_the_middle_of_a_commit_leaves_nothing_half(tmp_path, calls, step):
    call = [sys.executable, "-c", KILLED, __file__.rpartition("/")[0], str(tmp_path / "c"), step]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    assert files_of(tmp_path) == []
    expected = read(arrays().map(square))
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c")) == expected
    assert calls == list(range(N_ROWS))
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("n_bytes", [0, 1, 20, 200, -1])
def test_a_file_that_was_cut_is_read_anew(tmp_path, calls, caplog, n_bytes):
    expected = read(arrays().map(square).cache(tmp_path / "c"))
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:n_bytes])
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c")) == expected
    assert calls == list(range(N_ROWS))
    assert "a file that was cut or changed; they are read anew" in caplog.text
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
            return "which is damaged; remove the file" in str(error)
        assert calls, "a change went unseen"
        return False

    expected = read(make())
    (path,) = files_of(tmp_path)
    whole = path.read_bytes()
    n_refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        n_refused += is_refused()
        for cache_file in files_of(tmp_path):
            cache_file.unlink()
    assert n_refused == 3 * (8 + 2)  # what the rows hold; without the rest the file is read anew


def test_few_files_are_open_at_a_time(tmp_path):
    for number in range(80):
        store = FileStore(str(tmp_path / "c"), {}, "")
        store.add(number, np.array(number))
        store.commit()
    del store
    store = FileStore(str(tmp_path / "c"), {}, "")
    assert [int(store.get(number)) for number in range(80)] == list(range(80))
    links = []
    for name in os.listdir("/proc/self/fd"):
        if name.isdigit() and os.path.exists(f"/proc/self/fd/{name}"):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    assert 0 < sum(str(tmp_path) in link and link.endswith(".rows") for link in links) <= 16
    del store
    links = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}"):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    assert not any(str(tmp_path) in link for link in links)


def test_a_file_that_is_gone_ends_the_pass_with_advice(tmp_path, calls):
    read(arrays().map(square).cache(tmp_path / "c"))
    (path,) = files_of(tmp_path)
    for copy in range(20):  # more than stay open
        shutil.copy(path, tmp_path / f"c.{copy:016x}.rows")
    dataset = arrays().map(square).cache(tmp_path / "c")
    for cache_file in files_of(tmp_path):
        cache_file.unlink()
    with pytest.raises(DataError, match=r"readable.*No.*start"):
        read(dataset)
    calls.clear()
    read(arrays().map(square).cache(tmp_path / "c"))
    assert calls == list(range(N_ROWS))


def test_file_systems_that_refuse(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = FileStore(str(tmp_path / "c"), {}, "")
    store.add(0, np.zeros(1))
    with monkeypatch.context() as patch:
        patch.setattr("hpcdist.checkpoint.durable.Disk.write", refusing)
        with pytest.raises(DataError, match="written.*No.*space"):
            store.commit()
    assert list(tmp_path.iterdir()) == []
    store.commit()  # nothing was lost
    assert len(files_of(tmp_path)) == 1
    files_of(tmp_path)[0].chmod(0)
    if os.geteuid():
        with pytest.raises(DataError, match="readable file of rows, got .*; allow reading, or remove it"):
            FileStore(str(tmp_path / "c"), {}, "")
    monkeypatch.setattr("tempfile.TemporaryFile", refusing)
    with pytest.raises(DataError, match="folder.*folder"):
        FileStore(str(tmp_path / "d"), {}, "")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Dataset.from_tensor_slices(np.arange(N_ROWS + 1)), r'"n_rows": 12'),
        (lambda: Dataset.from_tensor_slices(np.arange(N_ROWS).astype("f4")), "int64"),
        (lambda: Dataset.from_tensor_slices(np.zeros((N_ROWS, 2))), "int64"),
        (lambda: Dataset.from_tensor_slices(np.arange(2 * N_ROWS)).shard(2, 1), '"ArraySource"'),
        (lambda: arrays().map(abs), '"functions": 1'),
        (stream, '"mapped"'),
    ],
)
def test_another_source_is_refused(tmp_path, make, found):
    read(arrays().map(square).cache(tmp_path / "c"))
    with pytest.raises(DataError, match=rf"cache: expected rows with the description .*, got .*{found}.* in .*"):
        make().map(square).cache(tmp_path / "c")
    make().map(square).cache(tmp_path / "d")


@pytest.mark.parametrize(
    "make",
    [lambda: stream().shard(2, 0), lambda: stream().shard(2, 1), lambda: stream().take(3), lambda: stream().map(abs)],
)
def test_a_stream_says_which_of_its_rows_are_kept(tmp_path, make):
    read(stream().map(square).cache(tmp_path / "c"))
    with pytest.raises(DataError, match="rows.*description"):
        make().map(square).cache(tmp_path / "c")


def test_another_key_is_refused_with_what_to_do(tmp_path, calls):
    expected = read(arrays().map(square).cache(tmp_path / "c", key="v1"))
    text = (
        rf'cache: expected rows with the key "v2", got "v1" in .*; remove the files {tmp_path}/c\.\*\.rows, or give '
        "another filename or key"
    )
    with pytest.raises(DataError, match=text):
        arrays().map(square).cache(tmp_path / "c", key="v2")
    with pytest.raises(DataError, match='expected rows with the key ""'):
        arrays().map(square).cache(tmp_path / "c")
    calls.clear()
    assert read(arrays().map(square).cache(tmp_path / "c", key="v1")) == expected
    assert calls == []


def test_a_changed_function_is_not_noticed(tmp_path):
    """As the docstring says: the key is for that."""
    first = read(arrays().map(square).cache(tmp_path / "c"))
    assert read(arrays().map(lambda x: square(x + 1)).cache(tmp_path / "c")) == first


def test_changed_hdf5_files_are_refused(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["x"] = file["y"] = np.arange(3)
    assert len(list(Dataset.from_hdf5(path, "x").cache(tmp_path / "c"))) == 3
    assert len(list(Dataset.from_hdf5(path, "x").cache(tmp_path / "c"))) == 3
    with pytest.raises(DataError, match="'y'.*, got .*'x'"):
        Dataset.from_hdf5(path, "y").cache(tmp_path / "c")
    os.utime(path, ns=(0, time.time_ns() + 10**9))
    with pytest.raises(DataError, match="rows.*description"):
        Dataset.from_hdf5(path, "x").cache(tmp_path / "c")


def test_shards_of_files_share_the_rows_of_one_cache(tmp_path, calls):
    paths = []
    for number in range(2):
        paths.append(str(tmp_path / f"{number}.h5"))
        with h5py.File(paths[-1], "w") as file:
            file["x"] = np.arange(3) + 10 * number
    options = hpcdist.Options()
    options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy.FILE
    for _ in range(2):
        rows = Dataset.from_hdf5(paths, "x").map(square).cache(tmp_path / "c").with_options(options)
        assert [int(x[0]) for x, _ in rows.shard(2, 0)] == [0, 1, 4]
        assert [int(x[0]) for x, _ in rows.shard(2, 1)] == [100, 121, 144]
    assert sorted(calls) == [0, 1, 2, 10, 11, 12]


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
    unpacked = unpack(*pack(row))
    assert repr(unpacked) == repr(row) or np.array_equal(unpacked, row)
    assert pack(unpacked) == pack(row)


@pytest.mark.parametrize("row", [{1: np.ones(1)}, np.array([None]), (object(),)])
def test_what_no_file_can_hold_is_refused(tmp_path, row):
    with pytest.raises(DataError, match="numbers.*filename"):
        list(Dataset.from_generator(lambda: [row]).cache(tmp_path / "c"))


def test_a_full_disk_refuses_a_row_and_keeps_the_others(tmp_path):
    store = FileStore(str(tmp_path / "c"), {}, "")
    store.add(0, np.zeros(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the disk's own refusal, for any file that grows beyond
    try:
        with pytest.raises(DataError, match="to be written, got .*; make room on the disk, or leave the filename out"):
            store.add(1, np.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.add(2, np.ones(1))
    store.commit()
    reopened = FileStore(str(tmp_path / "c"), {}, "")
    assert {number: reopened.get(number).tolist() for number in reopened.rows} == {0: [0], 2: [1]}
