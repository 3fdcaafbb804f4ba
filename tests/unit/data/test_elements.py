"""Datasets made of the elements of others: what tf.data gives, with an exact cursor."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcdist import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.options import AutoShardPolicy, Options
from hpcdist.errors import DataError


def numbers(stop=10):
    return Dataset.range(stop)


def drawn(stop=10):
    return Dataset.from_generator(lambda: iter(np.arange(stop)))


def plain(nest):
    """Return a nest of arrays as Python numbers, lists and tuples."""
    if isinstance(nest, tuple):
        return tuple(map(plain, nest))
    if isinstance(nest, dict):
        return {key: plain(child) for key, child in nest.items()}
    return nest.tolist()


def passes(dataset, n_passes=1):
    return [list(map(plain, dataset)) for _ in range(n_passes)]


BOTH = pytest.mark.parametrize("make", [numbers, drawn], ids=["random access", "stream"])


@BOTH
def test_filter(make):
    filtered = make().filter(lambda row: row % 3 == 0)
    assert passes(filtered, 2) == [[0, 3, 6, 9]] * 2
    assert passes(filtered.batch(3)) == [[[0, 3, 6], [9]]]
    pairs = Dataset.zip(make(), make()).filter(lambda first, second: first + second > 15)
    assert passes(pairs) == [[(8, 8), (9, 9)]]
    assert passes(make().batch(4).filter(lambda batch: len(batch) == 4)) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


@BOTH
@pytest.mark.parametrize(("count", "left"), [(0, 10), (3, 7), (10, 0), (12, 0), (-1, 0)])
def test_skip(make, count, left):
    assert passes(make().skip(count), 2) == [list(range(10 - left, 10))] * 2
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    if count >= 0:
        remaining = batches[count:]
    else:
        remaining = []
    assert passes(make().batch(4).skip(count)) == [remaining]


def test_skip_and_take_divide_rows_without_reading_them():
    train = numbers().skip(3)
    test = numbers().take(3)
    assert (len(train), len(test)) == (7, 3)
    assert not train.is_stream
    assert passes(train.take(2).skip(1)) == [[4]]
    assert sorted(passes(train.shuffle(seed=1))[0]) == [3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(DataError, match="skip.*count.*0.*1.*2"):
        numbers().skip(-2)


@pytest.mark.parametrize(("first", "second"), [*itertools.product([numbers, drawn], repeat=2)])
def test_zip_and_concatenate(first, second):
    zipped = Dataset.zip(first(4), second(3).map(lambda row: {"x": row * 10}))
    assert passes(zipped, 2) == [[(row, {"x": row * 10}) for row in range(3)]] * 2
    named = Dataset.zip({"a": first(2), "b": (second(2), second(5))})
    assert passes(named) == [[{"a": row, "b": (row, row)} for row in range(2)]]
    joined = first(3).concatenate(second(2).map(lambda row: row + 7))
    assert passes(joined, 2) == [[0, 1, 2, 7, 8]] * 2
    is_stream = drawn in (first, second)
    assert zipped.is_stream == joined.is_stream == is_stream
    assert passes(joined.batch(2)) == [[[0, 1], [2, 7], [8]]]
    if not is_stream:
        assert len(joined) == 5
        assert sorted(passes(joined.shuffle(seed=3))[0]) == [0, 1, 2, 7, 8]


def test_batches_are_zipped_and_joined_with_batches():
    batches = numbers(5).batch(2)
    assert passes(Dataset.zip(batches, batches.map(lambda rows: -rows))) == [
        [([0, 1], [0, -1]), ([2, 3], [-2, -3]), ([4], [-4])]
    ]
    assert passes(batches.concatenate(drawn(3).batch(3))) == [[[0, 1], [2, 3], [4], [0, 1, 2]]]
    for combine in (lambda first, second: Dataset.zip(first, second), lambda first, second: first.concatenate(second)):
        with pytest.raises(DataError, match="datasets.*batches"):
            combine(batches, drawn())
    with pytest.raises(DataError, match="zip.*dataset.*ndarray"):
        Dataset.zip((numbers(), np.arange(3))[1])


@pytest.mark.parametrize(("first", "second"), [*itertools.product([numbers, drawn], repeat=2)])
def test_what_is_joined_has_one_form_and_dtype(first, second):
    for change in (lambda row: row * 0.5, lambda row: (row, row), lambda row: torch.tensor(row)):
        with pytest.raises(DataError, match="concatenate.*elements.*dtype"):
            list(first().concatenate(second().map(change)))
    assert passes(first(0).concatenate(second(2).map(lambda row: row * 0.5))) == [[0.0, 0.5]]
    texts = first(2).map(lambda row: np.array("a" * (row + 1)))
    assert passes(texts.concatenate(second(1).map(lambda row: np.array("bcd")))) == [["a", "aa", "bcd"]]


@BOTH
@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 1), (2, 2), (3, 4), (9, 1)])
def test_interleave_takes_blocks_in_turn(make, cycle, block):
    lengths = [1, 3, 2, 0, 4]
    rows = make(5).map(lambda row: np.array(lengths[int(row)]))
    interleaved = rows.interleave(lambda n: Dataset.range(10 * int(n), 11 * int(n)), cycle, block)

    remaining = [list(range(10 * n, 11 * n)) for n in lengths]
    expected = []
    open_ = [remaining.pop(0) if remaining else None for _ in range(cycle)]
    while any(source_rows is not None for source_rows in open_):
        for place, source_rows in enumerate(open_):
            if source_rows is not None:
                expected += source_rows[:block]
                ended = len(source_rows) < block
                del source_rows[:block]
                if ended:
                    open_[place] = remaining.pop(0) if remaining else None
    assert passes(interleaved, 2) == [expected] * 2


def test_interleave_of_the_documentation():
    interleaved = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    assert passes(interleaved) == [
        [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5]
    ]
    assert passes(Dataset.range(3).flat_map(lambda x: Dataset.range(int(x)))) == [[0, 0, 1]]
    with pytest.raises(DataError, match="cycle_length.*block_length.*1.*0.*1"):
        Dataset.range(3).interleave(lambda x: numbers(), 0)
    with pytest.raises(DataError, match="interleave.*dataset.*int64"):
        list(Dataset.range(3).interleave(lambda x: x))


@BOTH
def test_unbatch(make):
    assert passes(make().batch(4).unbatch(), 2) == [list(range(10))] * 2
    assert passes(make().batch(4, drop_remainder=True).unbatch()) == [list(range(8))]
    assert passes(make().batch(4).map(lambda rows: rows[:1]).unbatch()) == [[0, 4, 8]]
    assert passes(make().batch(4).repeat(2).unbatch().batch(7)) == [
        [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    ]
    assert passes(make(2).map(lambda row: np.array([row, row + 10])).unbatch()) == [[0, 10, 1, 11]]


@pytest.mark.parametrize("make", [np.full, lambda shape, value: torch.full(shape, value)])
def test_padded_batch(make):
    rows = Dataset.from_generator(lambda: (make((n,), n) for n in (1, 3, 2)))
    assert passes(rows.padded_batch(2), 2) == [[[[1, 0, 0], [3, 3, 3]], [[2, 2]]]] * 2
    assert passes(rows.padded_batch(2, drop_remainder=True)) == [[[[1, 0, 0], [3, 3, 3]]]]
    assert passes(rows.padded_batch(3, (4,), -1)) == [[[[1, -1, -1, -1], [3, 3, 3, -1], [2, 2, -1, -1]]]]
    pairs = rows.map(lambda row: {"x": row, "n": len(row) * make((), 1)})
    batch = passes(pairs.padded_batch(3, {"x": [None], "n": []}, {"x": 9, "n": 0}))[0][0]
    assert batch == {"x": [[1, 9, 9], [3, 3, 3], [2, 2, 9]], "n": [1, 3, 2]}
    with pytest.raises(DataError, match=r"arrays.*shape.*2.*3"):
        list(rows.padded_batch(3, (2,)))
    with pytest.raises(DataError, match="arrays of 2 dimensions, got .1."):
        list(rows.padded_batch(3, (2, 2)))
    ragged = Dataset.from_generator(lambda: (make((1,) * n, n) for n in (1, 2)))
    with pytest.raises(DataError, match="arrays of 1 dimensions, got .1, 2."):
        list(ragged.padded_batch(2))
    with pytest.raises(DataError, match="batch_size.*1.*2"):
        rows.batch(1).padded_batch(2)


def test_padded_rows_of_known_shapes_are_read_in_any_order():
    rows = numbers(6).map(lambda row: np.arange(row))
    padded = rows.padded_batch(4, (5,))
    assert not padded.is_stream
    assert passes(padded)[0][1] == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]


def test_shuffles_after_batch_and_repeat_mix_what_comes():
    batches = passes(numbers(12).batch(3).shuffle(4, seed=1), 3)
    assert sorted(batches[0]) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert len(set(map(str, batches))) > 1
    assert passes(numbers(12).batch(3).shuffle(4, seed=1, reshuffle_each_iteration=False), 2)[0] in batches
    mixed = passes(numbers(6).repeat(2).shuffle(12, seed=1))[0]
    assert sorted(mixed) == sorted([*range(6)] * 2)
    assert sorted(mixed[:6]) != list(range(6))  # across the end of an epoch
    endless = numbers(4).repeat().shuffle(8, seed=2).batch(5)
    assert list(map(len, itertools.islice(endless, 7))) == [5] * 7
    with pytest.raises(DataError, match="shuffle.*buffer_size"):
        numbers().batch(2).shuffle(seed=1)


def test_what_is_made_of_a_shuffle_needs_its_seed():
    shuffled = numbers().shuffle(10)
    for make in (
        lambda: shuffled.filter(bool),
        lambda: shuffled.skip(1),
        lambda: shuffled.batch(2).shuffle(4, seed=1),
        lambda: Dataset.zip(shuffled, drawn()),
        lambda: drawn().concatenate(shuffled),
    ):
        with pytest.raises(DataError, match=r"shuffle.*shuffle"):
            make()
    seeded = numbers().shuffle(10, seed=4)
    epochs = passes(seeded.skip(3), 2)
    assert epochs[0] != epochs[1]
    assert epochs == [epoch[3:] for epoch in passes(numbers().shuffle(10, seed=4), 2)]


def test_cache_after_shuffle_keeps_the_order():
    first, second = passes(numbers(30).shuffle(30, seed=1).cache(), 2)
    assert first == second != list(range(30))
    first, second = passes(numbers(30).cache().shuffle(30, seed=1), 2)
    assert first != second


# -- how many --------------------------------------------------------------------------------------------------------


CHANGES = {
    "rows": lambda d: d,
    "batches": lambda d: d.batch(4),
    "whole batches": lambda d: d.batch(4, drop_remainder=True),
    "short": lambda d: d.batch(20),
    "none": lambda d: d.batch(20, drop_remainder=True),
    "epochs in batches": lambda d: d.repeat(3).batch(4),
    "epochs of batches": lambda d: d.batch(4).repeat(3),
    "first batches": lambda d: d.batch(4).take(2),
    "first of all batches": lambda d: d.batch(4).repeat(3).take(5),
    "first of endless batches": lambda d: d.repeat().batch(4).take(7),
    "first rows": lambda d: d.shuffle(seed=1).take(7).batch(2),
    "first of all rows": lambda d: d.repeat(2).take(13).batch(4, drop_remainder=True),
    "nothing": lambda d: d.take(0).batch(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_dataset_knows_its_length(change):
    dataset = change(numbers())
    assert len(dataset) == dataset.cardinality() == len(list(dataset))
    assert bool(dataset)


def test_endless_and_drawn_datasets_have_no_length():
    for dataset, cardinality in ((numbers().repeat(), -1), (drawn(), -2), (drawn().repeat().batch(2), -1)):
        assert dataset.cardinality() == cardinality
        with pytest.raises(TypeError, match="len.*dataset.*length"):
            len(dataset)
    assert drawn().repeat().take(3).cardinality() == -2


# -- lists, files, torch ---------------------------------------------------------------------------------------------


def test_lists_are_arrays():
    assert passes(Dataset.from_tensor_slices([1, 2, 3])) == [[1, 2, 3]]
    assert passes(Dataset.from_tensor_slices(([[1.0, 2.0], [3.0, 4.0]], [5, 6]))) == [
        [([1.0, 2.0], 5), ([3.0, 4.0], 6)]
    ]
    assert passes(Dataset.from_tensors(([1.0], [1.0])).repeat(2)) == [[([1.0], [1.0])] * 2]
    tensors = next(iter(Dataset.from_tensor_slices({"x": [torch.ones(2), torch.zeros(2)]})))
    assert torch.equal(tensors["x"], torch.ones(2))
    with pytest.raises(DataError, match="lists.*arrays"):
        Dataset.from_tensor_slices([[1, 2], [3]])
    with pytest.raises(DataError, match="numbers.*objects"):
        Dataset.from_tensor_slices([object(), object()])


def test_list_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).write_text(name)
    text_files = Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert passes(text_files.map(lambda name: np.array(name[-5:]))) == [["a.txt", "b.txt"]]
    matched_files = Dataset.list_files([str(tmp_path / "*.csv"), str(tmp_path / "a*")], seed=1)
    assert sorted(name[-5:] for name in passes(matched_files)[0]) == ["a.txt", "c.csv"]
    lines = text_files.interleave(lambda name: Dataset.from_tensors(np.array(len(Path(str(name)).read_text()))))
    assert passes(lines) == [[5, 5]]
    with pytest.raises(DataError, match="list_files.*files.*name"):
        Dataset.list_files(str(tmp_path / "*.png"))


def test_open_hdf5_datasets_are_read_from_their_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(12.0).reshape(6, 2)
        file["group/y"] = np.arange(6)
    with h5py.File(tmp_path / "rows.h5") as file:
        dataset = Dataset.from_tensor_slices((file["x"], file["group/y"])).batch(4)
        mixed = (file["x"], np.arange(6))
        with pytest.raises(DataError, match="arrays.*datasets"):
            Dataset.from_tensor_slices(mixed)
        whole = Dataset.from_tensor_slices(file).batch(4)
        named = Dataset.from_hdf5(file, "group/y").batch(4)
        with pytest.raises(DataError, match="from_hdf5.*'/x'"):
            Dataset.from_hdf5(file["x"], "x")
        with pytest.raises(DataError, match="from_hdf5.*'/group'"):
            Dataset.from_hdf5(file["group"], "y")
        assert len(Dataset.from_hdf5([file, tmp_path / "rows.h5"], "x")) == 12
    assert passes(dataset)[0][1] == ([[8.0, 9.0], [10.0, 11.0]], [4, 5])
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["gone"] = h5py.SoftLink("/nothing")
        with pytest.raises(DataError, match="link.*'gone'"):
            Dataset.from_tensor_slices(file)
    (first, _) = list(whole)
    assert first["group"]["y"].tolist() == [0, 1, 2, 3]
    assert first["x"].shape == (4, 2)
    assert passes(named) == [[[0, 1, 2, 3], [4, 5]]]


def test_arrays_on_a_device_come_to_the_host():
    class DeviceArray:
        def __init__(self, host):
            self.host = host
            self.shape = host.shape
            self.__cuda_array_interface__ = {"version": 3}

        def get(self):
            return self.host

    rows = DeviceArray(np.arange(6.0).reshape(3, 2))
    assert passes(Dataset.from_tensor_slices(rows).batch(2)) == [[[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]]]]


def test_torch_datasets_and_loaders_are_taken_where_a_dataset_is():
    rows = torch.utils.data.TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    parts = [plain(part) for (part,) in DistributedDataset(Dataset.from_torch(loader), range(1), 2)]
    assert parts == [[0, 1], [4, 5], [8]]
    ten = numbers().map(lambda row: (torch.tensor(int(row)),))
    assert passes(ten.concatenate(rows).batch(5)) == [[([0, 1, 2, 3, 4],), ([5, 6, 7, 8, 9],)] * 2]
    assert passes(Dataset.zip(numbers().batch(4), loader))[0][2] == ([8, 9], ([8, 9],))
    assert passes(Dataset.range(2).interleave(lambda _: rows).batch(20)) == [[([*range(10)] * 2,)]]


# -- cursors -----------------------------------------------------------------------------------------------------------


PIPELINES = {
    "filter": lambda: numbers(20).filter(lambda row: row % 3).batch(4),
    "shuffled filter": lambda: numbers(20).shuffle(seed=1).filter(lambda row: row % 3).batch(4).repeat(2),
    "skip": lambda: numbers(20).skip(3).shuffle(seed=2).batch(4).repeat(2),
    "zip": lambda: Dataset.zip(numbers(20).shuffle(seed=1), drawn(18)).batch(4).repeat(2),
    "concatenate": lambda: numbers(9).concatenate(drawn(8)).batch(4).repeat(2),
    "interleave": lambda: numbers(5).interleave(lambda n: Dataset.range(int(n)), 2).batch(3).repeat(2),
    "unbatch": lambda: numbers(9).batch(4).map(lambda rows: rows * 2).unbatch().batch(5).repeat(2),
    "padded": lambda: drawn(9).map(np.arange).padded_batch(4).repeat(2),
    "shuffled batches": lambda: numbers(18).batch(4).shuffle(3, seed=5).repeat(2),
    "mixed epochs": lambda: numbers(6).repeat(3).shuffle(9, seed=5).batch(4),
    "zipped batches": lambda: Dataset.zip(numbers(9).batch(4), drawn(9).batch(4)).repeat(2),
}


@pytest.mark.parametrize("n_replicas", [1, 3])
@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_a_run_resumes_after_any_batch_with_what_would_have_come(make, n_replicas):
    """Two passes, interrupted after each batch: the parts of all replicas are those of an unbroken run."""

    def read(state, n_passes=2):
        replicas = []
        for replica_id in range(n_replicas):
            replicas.append(DistributedDataset(make(), range(replica_id, replica_id + 1), n_replicas))
        if state is not None:
            for replica, replica_state in zip(replicas, state, strict=True):
                replica.load_state_dict(replica_state)
        for _ in range(n_passes):
            for parts in zip(*replicas, strict=True):
                yield list(map(plain, parts)), [replica.state_dict() for replica in replicas]

    whole = list(read(None))
    assert len(whole) > 3
    for number, (_, state) in enumerate(whole[:-1], 1):
        resumed = itertools.islice(read(state, n_passes=3), len(whole) - number)
        assert [parts for parts, _ in resumed] == [parts for parts, _ in whole[number:]], number


def test_batches_of_batches_are_divided_among_replicas():
    dataset = numbers(8).batch(4).shuffle(2, seed=1)
    replicas = [list(DistributedDataset(dataset, range(replica_id, replica_id + 1), 2)) for replica_id in range(2)]
    whole = list(map(plain, dataset))
    assert [[*first.tolist(), *second.tolist()] for first, second in zip(*replicas, strict=True)] == whole


def test_what_batches_of_batches_cannot_do_is_refused():
    dataset = numbers(8).batch(4).shuffle(2, seed=1)
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    with pytest.raises(DataError, match="AutoShardPolicy.OFF"):
        DistributedDataset(dataset.with_options(options), range(1), 1)
    state = DistributedDataset(dataset, range(1), 1).state_dict()
    mismatched = DistributedDataset(numbers(8).batch(2).shuffle(2, seed=1), range(1), 1)
    with pytest.raises(DataError, match="batches.*4.*checkpoint.*2"):
        mismatched.load_state_dict(state)
