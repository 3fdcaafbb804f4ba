"""Where rows come from, and what is done to them: HDF5, torch, generators; map, take, cache, prefetch."""

import itertools
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.iterator import Delivery
from hpcdist.data.rows import TensorSpec
from hpcdist.data.sources import RowSource
from hpcdist.errors import DataError
from hpcdist.plan.sample_order import SampleOrder


def lists(dataset):
    return [batch.tolist() for batch in dataset]


def slices(n_rows=10):
    return Dataset.from_tensor_slices(np.arange(n_rows))


def drawn(n_rows=10):
    return Dataset.from_generator(lambda: range(n_rows))


class Squares(torch.utils.data.Dataset):
    def __init__(self, n_rows=7):
        self.n_rows = n_rows

    def __len__(self):
        return self.n_rows

    def __getitem__(self, index):
        return torch.tensor([index, index**2]), index


class Counting(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(5)


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as h5_file:
        h5_file["x"] = np.arange(40.0).reshape(20, 2)
        h5_file.create_dataset("group/labels", data=np.arange(20, dtype=np.int32), chunks=(3,), compression="gzip")
        h5_file["names"] = ["a"] * 20
        h5_file["fixed"] = np.full(20, b"a", "S1")
        h5_file.create_dataset("ragged", (20,), h5py.vlen_dtype(np.int32))
        h5_file["few"] = np.arange(3)
        h5_file["one"] = 1.0
        h5_file["soft"] = h5py.SoftLink("/x")
        h5_file["outside"] = h5py.ExternalLink("other.h5", "/x")
        layout = h5py.VirtualLayout((20, 2), float)
        layout[:] = h5py.VirtualSource(h5_file["x"])
        h5_file.create_virtual_dataset("virtual", layout)
    return str(tmp_path / "rows.h5")


@pytest.mark.feature("input.hdf5-source")
def test_hdf5_rows_in_order_and_shuffled(file):
    rows = Dataset.from_hdf5(file, {"x": "x", "y": "group/labels"})
    first = next(iter(rows.batch(3)))
    assert first["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert first["y"].dtype == np.int32
    mixed = list(rows.shuffle(seed=1).batch(6).repeat(2))
    memory = Dataset.from_tensor_slices(np.arange(20)).shuffle(seed=1).batch(6).repeat(2)
    assert [batch["y"].tolist() for batch in mixed] == lists(memory)
    assert all((batch["x"][:, 0] == 2 * batch["y"]).all() for batch in mixed)


def test_hdf5_files_follow_each_other_and_repeat_across_epochs(tmp_path):
    for number in range(20):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as h5_file:
            h5_file["x"] = np.arange(number * 3, number * 3 + 3)
    rows = Dataset.from_hdf5(str(tmp_path / "*.h5"), "x")
    assert lists(rows.batch(60)) == [list(range(60))]
    assert lists(rows.repeat(2).batch(50))[1] == [*range(50, 60), *range(40)]
    chosen = Dataset.from_hdf5([tmp_path / "03.h5", tmp_path / "00.h5"], "x")
    assert lists(chosen.batch(6)) == [[9, 10, 11, 0, 1, 2]]


@pytest.mark.feature("input.hdf5-source")
def test_hdf5_reads_one_slab_per_run_of_rows(file, monkeypatch):
    read = []
    original = h5py.Dataset.read_direct

    def read_direct(self, values, source, target):
        read.append((source.start, source.stop))
        return original(self, values, source, target)

    monkeypatch.setattr(h5py.Dataset, "read_direct", read_direct)
    source = Dataset.from_hdf5(file, "group/labels").source
    assert source.take(np.array([8, 2, 3, 9, 2])).tolist() == [8, 2, 3, 9, 2]
    assert read == [(2, 4), (8, 10)]


def count_rows_read(monkeypatch):
    read = []
    original = h5py.Dataset.read_direct

    def read_direct(self, values, source, target):
        read.append(source.stop - source.start)
        return original(self, values, source, target)

    monkeypatch.setattr(h5py.Dataset, "read_direct", read_direct)
    return read


@pytest.fixture
def compressed(tmp_path):
    """Return two files of 95 and 45 rows in chunks of 10, row i of (x, y) being (2 i, i)."""
    for name, rows in (("a", np.arange(95)), ("b", np.arange(95, 140))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as h5_file:
            h5_file.create_dataset("x", data=2 * rows, chunks=(5,), compression="gzip")
            h5_file.create_dataset("y", data=rows, chunks=(10,), compression="gzip")
    return [str(tmp_path / "a.h5"), str(tmp_path / "b.h5")]


def test_shuffled_chunks_are_read_once_in_an_epoch(compressed, monkeypatch):
    dataset = Dataset.from_hdf5(compressed, ("x", "y")).shuffle(30, seed=1).batch(7)
    read = count_rows_read(monkeypatch)
    passes = []
    for _ in range(2):
        passes.append(list(itertools.chain.from_iterable(batch[1].tolist() for batch in dataset)))
    assert sum(read) == 2 * 2 * 140
    assert passes[0] != passes[1]
    for rows in passes:
        assert sorted(rows) == list(range(140))
        assert rows != sorted(rows)
        for start in range(0, 120, 30):
            chunks = {row // 10 for row in rows[start : start + 30]}
            assert len(chunks) == 3
    assert all((x == 2 * y).all() for x, y in dataset)


def test_without_a_buffer_and_with_a_large_one_all_rows_are_mixed(compressed):
    rows = Dataset.from_hdf5(compressed, "y")
    for mixed in (rows.shuffle(seed=1), rows.shuffle(140, seed=1)):
        assert lists(mixed.batch(140)) == lists(Dataset.range(140).shuffle(seed=1).batch(140))


def test_shuffled_chunks_are_divided_and_resumed_at_any_sample(compressed):
    def distributed(replica, n_replicas, buffer_size=20):
        dataset = Dataset.from_hdf5(compressed, "y").shuffle(buffer_size, seed=1).batch(9).repeat(2).prefetch(2)
        return DistributedDataset(dataset, range(replica, replica + 1), n_replicas)

    whole = lists(distributed(0, 1))
    parts = zip(*(lists(distributed(replica, 3)) for replica in range(3)), strict=True)
    assert [sum(part, []) for part in parts] == whole
    first = distributed(0, 1)
    resumed = distributed(0, 1)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    resumed.load_state_dict(first.state_dict())
    assert lists(resumed) == whole[5:]
    for mismatched in (distributed(0, 1, 50), distributed(0, 1, None)):
        with pytest.raises(DataError, match=r"dataset.*10.*2.*checkpoint"):
            mismatched.load_state_dict(first.state_dict())


@pytest.mark.feature("input.hdf5-source")
def test_hdf5_files_larger_than_memory(tmp_path):
    """A sparse file of 64 GiB is read with 1 GiB of address space to spare."""
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", (1 << 23, 1024), np.float64, chunks=None)
        h5_file["x"][-1] = 7
    code = f"""
import resource
from hpcdist.data.dataset import Dataset
rows = Dataset.from_hdf5({str(path)!r}, "x")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
print(rows.source.take(__import__("numpy").array([1 << 22, (1 << 23) - 1]))[:, 5].tolist())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout == "[0.0, 7.0]\n", run.stderr


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("y", r"expected a dataset 'y' in .* got none at 'y', beside \['few', .*name an existing one"),
        ("x/y", "got none at 'y'"),
        ("names", "expected numbers at 'names'.*got dtype object"),
        ("fixed", "expected numbers at 'fixed'.*got dtype"),
        ("ragged", "expected numbers at 'ragged'.*got dtype object"),
        ("one", "expected rows inside the file"),
        ("group", "expected rows inside the file"),
        ("virtual", "expected rows inside the file"),
        ("soft", "got a link at 'soft'"),
        ("outside", "got a link at 'outside'"),
        (("x", "few"), "expected datasets with the same number of rows"),
    ],
)
def test_hdf5_refuses(file, names, message):
    with pytest.raises(DataError, match=message):
        Dataset.from_hdf5(file, names)


def test_hdf5_refuses_files(file, tmp_path):
    (tmp_path / "text.h5").write_text("text")
    with h5py.File(tmp_path / "other.h5", "w") as h5_file:
        h5_file["x"] = np.zeros((4, 2), np.float32)
    for wrong, message in (
        (str(tmp_path / "none-*.h5"), "expected at least one file"),
        ([], "expected at least one file"),
        (str(tmp_path / "missing.h5"), "expected an HDF5 file, got .*missing.h5"),
        (str(tmp_path / "text.h5"), "expected an HDF5 file, got .*text.h5"),
        ([file, str(tmp_path / "other.h5")], r"expected rows as in .*float64.* got .*float32.*in .*other.h5"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset.from_hdf5(wrong, "x")


@pytest.mark.feature("complaints.hdf5-locks")
def test_a_locked_hdf5_file_is_refused(file):
    code = f"import h5py, sys; f = h5py.File({file!r}, 'r+'); print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as writer:
        writer.stdout.readline()
        with pytest.raises(DataError, match="locked.*writer"):
            Dataset.from_hdf5(file, "x")
        writer.communicate(timeout=20)
    assert len(lists(Dataset.from_hdf5(file, "x"))) == 20


def test_a_damaged_chunk_is_named(file):
    with h5py.File(file, "r+") as h5_file:
        place = h5_file["group/labels"].id.get_chunk_info(2)
    with open(file, "r+b") as raw:
        raw.seek(place.byte_offset)
        raw.write(b"\xff" * place.size)
    with pytest.raises(DataError, match="6.*9.*'group/labels'"):
        Dataset.from_hdf5(file, "group/labels").source.take(np.arange(6, 9))


def test_torch_datasets():
    x, y = next(iter(Dataset.from_torch(Squares()).batch(3)))
    assert (x.tolist(), y.tolist(), y.dtype) == ([[0, 0], [1, 1], [2, 4]], [0, 1, 2], torch.int64)
    part = next(iter(DistributedDataset(Dataset.from_torch(Squares(1)).batch(3), range(1, 2), 2)))
    assert (part[0].shape, part[1].shape) == ((0, 2), (0,))
    assert lists(Dataset.from_torch(Counting()).batch(3)) == [[0, 1, 2], [3, 4]]


def test_torch_loaders_keep_batch_and_order():
    loader = torch.utils.data.DataLoader(Squares(), batch_size=3, drop_last=True)
    assert [y.tolist() for _, y in Dataset.from_torch(loader)] == [[0, 1, 2], [3, 4, 5]]
    mixed = Dataset.from_torch(torch.utils.data.DataLoader(Squares(), batch_size=7, shuffle=True))
    assert mixed.has_drawn_seed
    (_, first), (_, second) = mixed.repeat(2)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(7))
    assert first.tolist() != second.tolist()
    joined = torch.utils.data.DataLoader(Squares(), batch_size=4, collate_fn=lambda rows: torch.tensor(len(rows))[None])
    assert lists(Dataset.from_torch(joined)) == [[4], [3]]
    assert lists(Dataset.from_torch(torch.utils.data.DataLoader(Counting(), batch_size=2))) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 7, 7)}, "got the sampler WeightedRandomSampler"),
        ({"sampler": torch.utils.data.RandomSampler(range(7), replacement=True)}, "got the sampler RandomSampler"),
        ({"batch_sampler": [[0], [1]]}, "got the batch_sampler list"),
    ],
)
def test_torch_loaders_that_cannot_be_kept(loader, message):
    with pytest.raises(DataError, match=message):
        Dataset.from_torch(torch.utils.data.DataLoader(Squares(), **loader))


def test_what_is_no_torch_data_is_refused():
    with pytest.raises(DataError, match="DataLoader.*int"):
        Dataset.from_torch(1)


def test_worker_processes_read_ahead_and_keep_the_order():
    loader = torch.utils.data.DataLoader(Squares(5), 2, num_workers=1, multiprocessing_context="forkserver")
    dataset = Dataset.from_torch(loader)
    assert [y.tolist() for _, y in dataset] == [[0, 1], [2, 3], [4]]
    part = DistributedDataset(dataset.repeat(2).prefetch(1), range(1, 2), 2)
    assert [y.tolist() for _, y in part] == [[1], [3], []] * 2


def test_generators():
    assert lists(drawn(5).batch(2)) == [[0, 1], [2, 3], [4]]
    assert lists(drawn(5).batch(2, drop_remainder=True).repeat(2)) == [[0, 1], [2, 3]] * 2
    assert lists(drawn(3).repeat(2).batch(2)) == [[0, 1], [2, 0], [1, 2]]
    assert list(map(int, Dataset.from_generator(range, args=(3,)))) == [0, 1, 2]
    for never in (drawn(0).batch(2).repeat(), drawn(0).repeat().batch(2), drawn(1).batch(2, True).repeat()):
        assert lists(never) == []
    with pytest.raises(DataError, match="expected a function"):
        Dataset.from_generator([1, 2])


def test_a_shuffled_generator_mixes_its_buffer_anew_in_every_epoch():
    first, second = lists(drawn().shuffle(4, seed=1).batch(10).repeat(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert all(row <= place + 3 for place, row in enumerate(first))
    assert lists(drawn().shuffle(4, seed=1).batch(10)) == [first]
    with pytest.raises(DataError, match="buffer_size"):
        drawn().shuffle()


STREAMS = [
    lambda make: make(7).shuffle(3, seed=1).batch(3).repeat(3),
    lambda make: make(7).shuffle(3, seed=1).repeat(3).batch(3),
    lambda make: make(7).batch(3, drop_remainder=True).repeat(2),
    lambda make: make(7).repeat(2).take(10).batch(3),
    lambda make: make(4).repeat().batch(3).take(4),
]


@pytest.mark.feature("input.data-cursor", "complaints.mid-epoch-resume")
@pytest.mark.parametrize("make", [slices, drawn])
@pytest.mark.parametrize("form", STREAMS)
def test_a_pass_resumes_at_the_exact_sample(make, form):
    dataset = form(make)
    whole = lists(dataset)
    assert len(whole) >= 4
    for kill_at in range(len(whole) + 1):
        before, after = (DistributedDataset(dataset, range(1), 1) for _ in range(2))
        iterator = iter(before)
        first = [next(iterator).tolist() for _ in range(kill_at)]
        after.load_state_dict(before.state_dict())
        assert (after.epoch, after.position) == (before.epoch, before.position)
        assert first + lists(after) == whole


def test_epochs_of_a_stream_are_counted():
    distributed = DistributedDataset(drawn(5).shuffle(5, seed=1).batch(2), range(1), 1)
    first = lists(distributed)
    assert (distributed.epoch, distributed.position) == (1, 5)
    next(iter(distributed))
    assert (distributed.epoch, distributed.position) == (1, 7)
    assert sorted(sum(lists(distributed), [])) == sorted(sum(first, []))
    assert (distributed.epoch, distributed.position) == (2, 12)  # the pass that was left is no epoch


def test_streams_that_differ_between_ranks_are_reported():
    seen = []
    list(DistributedDataset(drawn(5).batch(4), range(1), 2, Delivery(agree_rows=seen.append)))
    assert seen == [4, 1, 0]
    list(DistributedDataset(slices(5).batch(4), range(1), 2, Delivery(agree_rows=seen.append)))
    assert seen == [4, 1, 0]


def test_an_error_of_a_generator_comes_through():
    def broken():
        yield 1
        raise OSError("no more")

    for dataset in (Dataset.from_generator(broken).batch(1), Dataset.from_generator(broken).batch(1).prefetch(2)):
        batches = iter(dataset)
        assert next(batches).tolist() == [1]
        with pytest.raises(OSError, match="no more"):
            next(batches)


@pytest.mark.parametrize("make", [slices, drawn])
def test_map_before_and_after_batch(make):
    assert lists(make(4).map(lambda x: x * 2).batch(3).map(lambda x: x + len(x))) == [[3, 5, 7], [7]]
    pairs = make(2).map(lambda x: (x, x + 1)).map(lambda a, b: {"sum": a + b})
    assert [int(row["sum"]) for row in pairs] == [1, 3]
    with pytest.raises(DataError, match="rows.*shape"):
        lists(make(4).map(lambda x: np.zeros(int(x))).batch(2))


def test_a_row_is_mapped_once_to_see_what_an_empty_part_looks_like():
    calls = []
    dataset = slices(4).map(lambda x: calls.append(int(x)) or [x, x]).batch(3).repeat(2)
    part = DistributedDataset(dataset, range(1, 2), 2)
    assert [batch[0].tolist() for batch in part] == [[2], [], [2], []]
    assert calls == [2, 0, 2]


@pytest.mark.parametrize("make", [slices, drawn])
def test_take(make):
    assert lists(make(5).take(3).batch(2)) == [[0, 1], [2]]
    assert lists(make(5).batch(2).take(2)) == [[0, 1], [2, 3]]
    assert lists(make(5).batch(2).take(-1)) == lists(make(5).batch(2))
    assert lists(make(5).take(0).batch(2)) == lists(make(5).batch(2).take(0)) == []
    assert lists(make(3).repeat().take(5).batch(3)) == [[0, 1, 2], [0, 1]]
    assert lists(make(5).take(2).repeat(2).batch(4)) == [[0, 1, 0, 1]]
    shuffled = make(50).shuffle(50, seed=1)
    taken_rows = sum(lists(shuffled.take(4).batch(2).repeat(2)), [])
    assert taken_rows[:4] == sum(lists(shuffled.batch(2)), [])[:4]
    assert taken_rows[:4] != taken_rows[4:]
    assert len(taken_rows) == 8
    with pytest.raises(DataError, match="take: expected"):
        make(5).take(-2)
    with pytest.raises(DataError, match="repeat.*call.*take"):
        make(5).repeat(2).take(3).repeat(2)


def test_take_after_batch_and_repeat():
    assert lists(slices(5).batch(2).repeat(3).take(4)) == [[0, 1], [2, 3], [4], [0, 1]]
    assert lists(slices(5).batch(2, True).repeat().take(3)) == [[0, 1], [2, 3], [0, 1]]
    assert lists(slices(3).repeat().batch(2).repeat().take(2)) == [[0, 1], [2, 0]]
    with pytest.raises(DataError, match="take.*call.*repeat"):
        drawn(5).batch(2).repeat(2).take(1)


def test_every_epoch_of_every_run_has_an_order_of_its_own():
    plain = SampleOrder(7, seed=1)
    runs = SampleOrder(7, seed=1, inner_epochs=2, outer_epochs=2)
    assert runs.rows(0, 28).tolist() == plain.rows(0, 28).tolist()
    limited_order = SampleOrder(7, seed=1, inner_epochs=2, outer_epochs=2, run_limit=10)
    assert limited_order.rows(0, 20).tolist() == [*plain.rows(0, 10).tolist(), *plain.rows(14, 24).tolist()]
    assert list(map(limited_order.epoch_of, (0, 7, 9, 10, 17))) == [0, 1, 1, 2, 3]


def test_from_tensors():
    (row,) = Dataset.from_tensors((np.arange(3), 5))
    assert (row[0].tolist(), int(row[1])) == ([0, 1, 2], 5)
    assert next(iter(Dataset.from_tensors(torch.ones(2)).repeat(3).batch(3))).shape == (3, 2)


@pytest.mark.parametrize("make", [slices, drawn])
@pytest.mark.parametrize("in_file", [False, True])
def test_cached_rows_are_mapped_once(make, in_file, tmp_path):
    calls = []

    def mapped(x):
        calls.append(int(x))
        return torch.tensor([int(x), 1]), np.float32(x)

    dataset = make(5).map(mapped).cache(str(tmp_path / "cache") if in_file else "").shuffle(5, seed=1).batch(2)
    first, second = (list(itertools.chain.from_iterable(y.tolist() for _, y in dataset)) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    assert sorted(calls) == list(range(5))
    (x, y), *_ = dataset
    assert (type(x), y.dtype) == (torch.Tensor, np.float32)
    assert len(list(tmp_path.iterdir())) == in_file


class SquaresInFiles(RowSource):
    """A source of a user's own: the least that it needs, and the rows of its files."""

    n_rows = 7
    rows_of_files = (4, 0, 3)

    def take(self, rows):
        return {"x": rows, "y": torch.as_tensor(rows**2)}


def test_a_source_of_the_users_own_is_shuffled_divided_and_resumed():
    rows = Dataset.from_source(SquaresInFiles())
    dataset = rows.map(lambda row: (row["x"], row["y"])).shuffle(seed=1).batch(4).repeat(2)
    whole = [x.tolist() for x, _ in dataset]
    assert all(torch.equal(y, torch.as_tensor(x) ** 2) for x, y in dataset)
    assert sorted(whole[0] + whole[1]) == list(range(7))
    parts = [DistributedDataset(dataset.prefetch(1), range(replica, replica + 1), 2) for replica in range(2)]
    steps = [[x.tolist() + second_half.tolist() for (x, _), (second_half, _) in zip(*parts, strict=True)]]
    assert steps == [whole]
    before = DistributedDataset(dataset, range(1), 1)
    next(iter(before))
    after = DistributedDataset(dataset, range(1), 1)
    after.load_state_dict(before.state_dict())
    assert [x.tolist() for x, _ in after] == whole[1:]
    assert [spec.shape for spec in dataset.element_spec] == [(None,), (None,)]


def test_files_of_a_source_of_the_users_own_are_divided():
    options = hpcdist.Options()
    options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy.FILE
    rows = hpcdist.Dataset.from_source(SquaresInFiles()).map(lambda row: row["x"]).with_options(options)
    assert [lists(rows.shard(2, index).batch(9)) for index in range(2)] == [[list(range(7))], []]
    assert [lists(rows.shard(3, index).batch(9)) for index in range(3)] == [[[0, 1, 2, 3]], [], [[4, 5, 6]]]
    second = rows.shard(2, 0).shard(2, 1)  # file 2 is the second of what the first shard has
    assert lists(second.batch(9)) == [[4, 5, 6]]


def test_a_source_must_be_one_and_define_take():
    class Source(RowSource):
        n_rows = 1

    with pytest.raises(TypeError, match="abstract.*take"):
        Source()
    with pytest.raises(DataError, match="from_source.*hpcdist.RowSource.*list"):
        Dataset.from_source([1, 2])


def test_a_cache_holds_what_this_process_has_read():
    calls = []
    dataset = slices(4).map(lambda x: calls.append(int(x)) or x).cache().batch(3)
    part = DistributedDataset(dataset, range(1, 2), 2)
    assert lists(part) == lists(part) == [[2], []]
    assert calls == [2, 0, 0], "the first row shows what parts without rows look like, and is not kept"
    with pytest.raises(DataError, match="cache.*whole.*batches"):
        dataset.map(lambda x: x).cache()
    with pytest.raises(DataError, match="'/none/cache'"):
        slices().cache("/none/cache")


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hpcdist-prefetch"]


def wait_for(is_true):
    for _ in range(500):
        if is_true():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.feature("tf.distributed-dataset-reads", "input.distribute-dataset")
@pytest.mark.parametrize("make", [slices, drawn])
def test_prefetch_reads_ahead_and_the_cursor_counts_what_was_handed_out(make):
    read = []
    dataset = make(20).map(lambda x: read.append(int(x)) or x).batch(2).prefetch(3)
    distributed = DistributedDataset(dataset, range(1), 1)
    iterator = iter(distributed)
    assert next(iterator).tolist() == [0, 1]
    # one in the caller's hands, three waiting, one in the thread's
    assert wait_for(lambda: len(read) == 10)
    assert distributed.position == 2
    after = DistributedDataset(dataset, range(1), 1)
    after.load_state_dict(distributed.state_dict())
    assert lists(after) == lists(make(20).batch(2))[1:]
    del iterator
    assert wait_for(lambda: not threads())
    assert len(read) < 40


def test_the_thread_of_prefetch_ends_with_its_pass():
    assert lists(slices(5).batch(2).prefetch()) == [[0, 1], [2, 3], [4]]
    assert not threads()


@pytest.mark.feature("input.prefetch-to-device")
def test_tensors_stay_as_they_are_where_torch_uses_no_gpu():
    rows = torch.arange(4)
    parts = list(Dataset.from_tensor_slices(rows).batch(4).prefetch(1))
    assert not parts[0].is_pinned()
    assert torch.equal(parts[0], rows)


def spec(shape, dtype):
    return TensorSpec(shape, dtype)


@pytest.mark.parametrize(
    ("signature", "row", "expected"),
    [
        (spec((), np.float32), 1, np.float32(1)),
        (spec((3,), np.int64), [1, 2, 3], np.array([1, 2, 3])),
        (spec((2,), np.uint8), [5, 255], np.array([5, 255], np.uint8)),
        (spec((), np.float16), 1e3, np.float16(1e3)),
        (spec(None, np.float32), np.ones((2, 3)), np.ones((2, 3), np.float32)),
        (spec((None, 2), np.float32), np.ones((4, 2)), np.ones((4, 2), np.float32)),
        (spec((2,), torch.float32), np.ones(2, np.int64), torch.ones(2)),
        (spec((), np.str_), "text", np.array("text")),
    ],
)
def test_rows_of_a_generator_become_what_the_signature_says(signature, row, expected):
    """So that a rank without rows has an empty part like those of the others."""
    dataset = Dataset.from_generator(lambda: iter([{"a": row}]), {"a": signature})
    (element,) = list(dataset)
    assert isinstance(element["a"], torch.Tensor) == isinstance(expected, torch.Tensor)
    assert element["a"].dtype == expected.dtype
    assert element["a"].tolist() == expected.tolist()
    empty = Dataset.from_generator(lambda: iter([]), {"a": signature}).batch(2).part_without_rows()
    if signature.dtype is not np.str_ and signature.shape is not None:
        assert empty["a"].dtype == element["a"].dtype


@pytest.mark.parametrize(
    ("signature", "row", "message"),
    [
        (spec((), np.int64), 1.5, "expected arrays of .*int64.*, got one of float64"),
        (spec((), torch.int64), torch.ones(()), "expected arrays of torch.int64, .*, got one of torch.float32"),
        (spec((), np.int8), 300, "expected arrays of .*int8.*, got one of int64 that does not fit: 300"),
        (spec((), np.int32), 2**40, "expected arrays of"),
        (spec((), torch.uint8), -1, "expected arrays of torch.uint8"),
        (spec((), np.float16), 1e6, "expected arrays of"),
        (spec((), torch.float16), 1e6, "expected arrays of"),
        (spec((3,), np.float32), np.ones(4), r"expected arrays of shape \(3,\), .*, got one of shape \(4,\)"),
        (spec((None,), np.float32), np.ones((4, 1)), "expected arrays of shape"),
        ((spec((), np.float32),) * 2, (1.0,), r"expected rows of the form \[\*, \*\], .* got one of the form \[\*\]"),
        ({"a": spec((), np.float32)}, {"b": 1.0}, "expected rows of the form {'a': \\*}"),
        ({"a": spec((), np.float32)}, (1.0,), "expected rows of the form"),
        ((spec((), np.float32),), {"a": 1.0}, "expected rows of the form"),
    ],
)
def test_rows_of_a_generator_that_do_not_fit_its_signature_are_refused(signature, row, message):
    with pytest.raises(DataError, match=f"from_generator: {message}"):
        list(Dataset.from_generator(lambda: iter([row]), signature))
