"""Ranks compare the rows of a dataset when it is distributed: each of them reads a part."""

import random

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hpcdist
from hpcdist.errors import DataError

pytestmark = pytest.mark.mpi


@pytest.fixture
def strategy(comm):
    return hpcdist.MultiWorkerMirroredStrategy()


def distribute(strategy, dataset):
    return strategy.experimental_distribute_dataset(dataset.batch(4))


def array_of(generator=None):
    return torch.randn(40, 3, generator=generator)


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


class Transformed(torch.utils.data.Dataset):
    """Rows that are changed at random at every read, by the numbers of a library or of a generator of its own."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 20

    def __getitem__(self, row):
        return torch.tensor([float(row)]) + self.draw()


def own_numbers(comm, probability):
    numbers = np.random.default_rng(comm.rank)
    return lambda: float(numbers.random() < probability)


def different(comm, shared_path):
    """Yield datasets that differ between ranks, by name."""
    torch.manual_seed(comm.rank)
    rows = array_of()
    yield "arrays", hpcdist.Dataset.from_tensor_slices(rows)
    yield "mapped", hpcdist.Dataset.from_tensor_slices({"x": rows.numpy()}).map(lambda row: row)
    yield "shuffled", hpcdist.Dataset.from_tensor_slices(rows).shuffle(seed=1)
    yield "cached", hpcdist.Dataset.from_tensor_slices(rows).cache()
    changed_rows = array_of(seeded())
    changed_rows[17, 1] += comm.rank
    yield "one value", hpcdist.Dataset.from_tensor_slices(changed_rows)
    yield "numbers of rows", hpcdist.Dataset.from_tensor_slices(torch.zeros(40 + comm.rank))
    yield "torch dataset", hpcdist.Dataset.from_torch(TensorDataset(rows))
    yield "random_split", hpcdist.Dataset.from_torch(random_split(TensorDataset(torch.zeros(40)), [30, 10])[0])
    inside = Subset(TensorDataset(torch.zeros(40)), [*range(9), 9 + comm.rank, *range(20, 30)])
    yield "subset of a subset", hpcdist.Dataset.from_torch(Subset(inside, range(15)))
    path = shared_path / f"rank-{comm.rank}.h5"
    with h5py.File(path, "w") as file:
        file["x"] = rows.numpy()
    yield "files", hpcdist.Dataset.from_hdf5(path, "x")


@pytest.mark.parametrize("number", range(10))
def test_rows_that_differ_between_ranks_are_refused(comm, strategy, shared_path, number):
    name, dataset = list(different(comm, shared_path))[number]
    if comm.size == 1:
        distribute(strategy, dataset)
        return
    with pytest.raises(DataError, match="the same rows on every rank|the dataset of the chief") as caught:
        distribute(strategy, dataset)
    assert caught.value.is_agreed, name


def test_equal_rows_are_taken_from_files_of_each_host(comm, strategy, tmp_path):
    """Copies of a file, each with a path and a time of its own."""
    path = tmp_path / f"{comm.rank}.h5"
    with h5py.File(path, "w") as file:
        file["x"] = array_of(seeded()).numpy()
    distribute(strategy, hpcdist.Dataset.from_hdf5(path, "x"))


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "often", "half", "seldom"])
def test_random_transforms_differ_rightly(comm, strategy, kind):
    torch.manual_seed(comm.rank)
    np.random.seed(comm.rank)
    random.seed(comm.rank)
    draws = {
        "torch": lambda: torch.rand(1),
        "numpy": lambda: np.random.rand(),
        "python": random.random,
        "often": own_numbers(comm, 0.9),
        "half": own_numbers(comm, 0.5),
        "seldom": own_numbers(comm, 0.05),
    }
    for _ in range(30 if kind in ("often", "half", "seldom") else 1):
        distribute(strategy, hpcdist.Dataset.from_torch(Transformed(draws[kind])))


def test_the_programs_random_numbers_are_left_alone(comm, strategy):
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    distribute(strategy, hpcdist.Dataset.from_torch(Transformed(lambda: torch.rand(1))))
    drawn_numbers = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert drawn_numbers == (torch.rand(1).item(), np.random.rand(), random.random())


def test_rows_that_cannot_be_read_here_are_not_compared(comm, strategy):
    """Such as those of a dataset that its worker processes open."""

    class Closed(Transformed):
        def __getitem__(self, row):
            raise OSError("opened in workers only")

    distribute(strategy, hpcdist.Dataset.from_torch(Closed(None)))


def test_objects_are_compared_by_their_type(comm, strategy):
    class Image:
        pass

    class Images(Transformed):
        def __getitem__(self, row):
            return {"image": Image(), "name": f"row {row}"}

    loader = DataLoader(Images(None), batch_size=4, collate_fn=lambda rows: torch.zeros(len(rows)))
    strategy.experimental_distribute_dataset(hpcdist.Dataset.from_torch(loader))


def test_a_source_of_ones_own_says_what_is_compared(comm, strategy):
    class Own(hpcdist.RowSource):
        n_rows = 12

        def take(self, rows):
            return rows + comm.rank

    if comm.size > 1:
        with pytest.raises(DataError, match="rows.*rank"):
            distribute(strategy, hpcdist.Dataset.from_source(Own()))
    Own.to_compare = lambda self, rows: None
    distribute(strategy, hpcdist.Dataset.from_source(Own()))


def test_the_order_of_a_loader_follows_the_seed_of_torch(comm, strategy):
    def order(seed):
        torch.manual_seed(seed + comm.rank)  # the chief's counts
        loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=24, shuffle=True)
        batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_torch(loader))
        return [comm.allgather(rows.tolist()) for (rows,) in batches]

    assert order(1) == order(1)
    assert order(1) != order(20)


def test_distributed_from_a_function_each_rank_has_its_own(comm, strategy):
    torch.manual_seed(comm.rank)
    strategy.distribute_datasets_from_function(lambda _: hpcdist.Dataset.from_tensor_slices(array_of()).batch(4))


def test_datasets_that_worker_processes_read_are_left_unread(comm, strategy, tmp_path):
    """A file that is opened at the first read could not be sent to the workers any more."""
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["x"] = array_of(seeded()).numpy()
    dataset = Lazy(path)
    loader = DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="spawn")
    strategy.experimental_distribute_dataset(hpcdist.Dataset.from_torch(loader))
    assert dataset.file is None


class Lazy(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return 40

    def __getitem__(self, row):
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["x"][row])


def test_shards_that_the_program_makes_are_its_own(comm, strategy):
    """With AutoShardPolicy.OFF, as in TensorFlow."""
    options = hpcdist.Options()
    options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy.OFF
    dataset = hpcdist.Dataset.range(4 * comm.size).shard(comm.size, comm.rank).batch(comm.size).with_options(options)
    batches = strategy.experimental_distribute_dataset(dataset)
    assert [rows.tolist() for rows in batches] == [[step * comm.size + comm.rank] for step in range(4)]
