"""DataLoaders with samplers and workers of their own, distributed."""

import gc
import os
import time
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import hpcdist
from hpcdist.errors import DataError, GradientError, UsageError

N_ROWS = 30


class Rows(Dataset):
    def __len__(self):
        return N_ROWS

    def __getitem__(self, row):
        return torch.tensor([float(row)]), row


class ByLength(Sampler):
    """Batches of 1 to 8 rows, in an order that numpy draws."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def __iter__(self):
        rows = self.generator.permutation(N_ROWS).tolist()
        size = 1
        while rows:
            yield rows[:size]
            rows = rows[size:]
            size = size % 8 + 1

    def __len__(self):
        return 9


def make_loader(name, **settings):
    if name == "bucket":
        return DataLoader(Rows(), batch_sampler=ByLength(), **settings)
    samplers = {
        "weighted": lambda: WeightedRandomSampler(torch.arange(N_ROWS) + 1.0, 20),
        "subset": lambda: SubsetRandomSampler(range(0, N_ROWS, 2)),
    }
    return DataLoader(Rows(), 8, sampler=samplers[name](), **settings)


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")


def batches_of_pass(comm, distributed):
    """Return the rows of each global batch of a pass, and the largest part of each."""
    own_parts = [rows.tolist() for _, rows in distributed]
    batches = []
    for parts in zip(*comm.allgather(own_parts), strict=True):
        assert max(map(len, parts)) == -(-sum(map(len, parts)) // comm.size), "divided by ceiling"
        batches.append(sum(parts, []))
    return batches


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_loader_with_a_state_is_distributed_and_not_saved(strategy, comm):
    """Its own state counts what a rank has drawn; that of what is distributed counts what was used, on any ranks."""
    loaders = [StatefulDataLoader(Rows(), 8, shuffle=True, num_workers=2) for _ in range(2)]
    with pytest.raises(UsageError, match=r"expected what strategy.experimental_distribute_dataset\(loader\) returns"):
        hpcdist.Checkpoint(data=loaders[0])
    first, second = map(strategy.experimental_distribute_dataset, loaders)
    iterator = iter(first)
    used = next(iterator)[1].tolist()
    second.load_state_dict(first.state_dict())
    remaining_batches = [rows.tolist() for _, rows in iterator]
    assert [rows.tolist() for _, rows in second] == remaining_batches
    assert sorted(sum(sum(comm.allgather([used, *remaining_batches]), []), [])) == list(range(N_ROWS))


@pytest.mark.feature("input.data-loaders")
@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("name", ["weighted", "subset", "bucket"])
def test_a_sampler_gives_one_order_that_is_cut_by_rank_and_resumed(strategy, comm, name, n_workers):
    settings = {"num_workers": n_workers, "persistent_workers": n_workers > 0}
    torch.manual_seed(1)
    distributed = strategy.experimental_distribute_dataset(make_loader(name, **settings))
    first = batches_of_pass(comm, distributed)
    second = batches_of_pass(comm, distributed)
    assert first != second
    assert list(map(len, first)) == list(map(len, second)) or name == "bucket"
    assert distributed.epoch == 2
    assert len(distributed) == len(second)
    torch.seed()
    resumed = strategy.experimental_distribute_dataset(make_loader(name, **settings))
    iterator = iter(resumed)
    state = {**distributed.state_dict(), "passes": 0, "batches": 0, "digest": 0}
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    for _ in range(2):
        next(iterator)
    state = resumed.state_dict()
    assert comm.allgather(state) == [state] * comm.size
    del iterator
    third = strategy.experimental_distribute_dataset(make_loader(name, **settings))
    third.load_state_dict(state)
    assert third.epoch == 0
    assert batches_of_pass(comm, third) == first[2:]
    assert batches_of_pass(comm, third) == second


def test_samplers_that_differ_by_rank_are_refused(strategy, comm):
    loader = DataLoader(Rows(), 8, sampler=DistributedSampler(Rows(), comm.size, comm.rank, shuffle=False))
    if comm.size == 1:
        assert len(batches_of_pass(comm, strategy.experimental_distribute_dataset(loader))) == 4
        return
    with pytest.raises(DataError, match="batches of the chief.*DistributedSampler.*does not depend on the rank"):
        strategy.experimental_distribute_dataset(loader)


class Forgetful(Sampler):
    """Has another order in each process."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_sampler_that_draws_other_rows_after_a_restart_is_refused(strategy):
    distributed = strategy.experimental_distribute_dataset(DataLoader(Rows(), 4, sampler=Forgetful([1, 2, 3, 4, 5])))
    next(iter(distributed))
    state = distributed.state_dict()
    changed_dataset = strategy.experimental_distribute_dataset(
        DataLoader(Rows(), 4, sampler=Forgetful([1, 2, 3, 5, 4]))
    )
    with pytest.raises(DataError, match="1 batches that the sampler Forgetful had drawn"):
        changed_dataset.load_state_dict(state)


def test_a_loader_without_batches_is_refused(strategy):
    with pytest.raises(DataError, match="at least one batch, got none from the batch_sampler list"):
        strategy.experimental_distribute_dataset(DataLoader(Rows(), batch_sampler=[]))


def test_a_dataset_that_has_grown_is_refused(strategy):
    rows = list(range(20))
    distributed = strategy.experimental_distribute_dataset(DataLoader(rows, 4, sampler=Forgetful([1, 2, 3, 4, 5])))
    state = distributed.state_dict()
    rows.append(20)
    with pytest.raises(DataError, match="a dataset of 20 items as in the checkpoint, got 21"):
        distributed.load_state_dict(state)


class Processes(Dataset):
    """Says of each row which process reads it, by which seed, and whether it sees this dataset and a launcher."""

    def __len__(self):
        return 16

    def __getitem__(self, row):
        info = torch.utils.data.get_worker_info()
        has_launch = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK"))
        return os.getpid(), torch.initial_seed() % 2**31, info.dataset is self, has_launch


@pytest.mark.parametrize("has_sampler", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_are_kept_if_they_are_persistent(strategy, comm, method, is_persistent, has_sampler):
    if has_sampler:
        settings = {"sampler": SubsetRandomSampler(range(16))}
    else:
        settings = {"shuffle": True}
    loader = DataLoader(
        Processes(),
        4 * comm.size,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=is_persistent,
        **settings,
    )
    distributed = strategy.experimental_distribute_dataset(loader)
    torch.manual_seed(1)
    pids = []
    for _ in range(3):
        parts = list(distributed)
        pids.append(set(torch.cat([part[0] for part in parts]).tolist()))
        assert all(torch.cat([part[2] for part in parts])), "get_worker_info().dataset is the program's"
        assert (method == "forkserver") == (not any(torch.cat([part[3] for part in parts]))) or not pids[-1]
    assert all(len(pid) <= 1 for pid in pids)
    workers = set().union(*pids)
    assert os.getpid() not in workers
    if is_persistent:
        n_workers = 1
    else:
        n_workers = 3
    assert len(workers) == n_workers
    assert torch.initial_seed() == 1


def count_rows(items):
    return {"x": torch.stack([x for x, _ in items]), "n": len(items)}


def test_a_part_without_rows_of_what_has_none_is_refused_on_all_ranks(strategy, comm):
    loader = DataLoader(Rows(), 7, collate_fn=count_rows)
    distributed = strategy.experimental_distribute_dataset(loader)
    if comm.size < 3:  # the last batch has two rows
        assert next(iter(distributed))["n"] == -(-7 // comm.size) - (comm.rank == 1)
        return
    with pytest.raises(DataError, match="got int from its collate_fn"):
        next(iter(distributed))


def test_random_numbers_of_the_program_do_not_depend_on_workers(strategy):
    states = []
    for n_workers in (0, 1):
        torch.manual_seed(3)
        list(strategy.experimental_distribute_dataset(DataLoader(Rows(), 8, num_workers=n_workers)))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Stream(IterableDataset):
    """24 rows; of each rank its own if it is cut, and with random numbers beside them if it is noisy."""

    def __init__(self, rank=0, n_ranks=1, n_rows=24, noise=None):
        self.rows = range(rank, n_rows, n_ranks)
        self.noise = noise

    def __iter__(self):
        for row in self.rows:
            label = row if self.noise is None else self.noise()
            yield torch.full((2,), float(row)), label


def rows_of_all(comm, distributed):
    own_rows = []
    for x, _ in distributed:
        own_rows += x[:, 0].tolist()
    return sorted(sum(comm.allgather(own_rows), []))


def test_a_stream_that_is_cut_by_rank_is_refused_unless_that_is_said(strategy, comm):
    stream = Stream(comm.rank, comm.size)
    loader = DataLoader(stream, batch_size=5)
    distributed = strategy.experimental_distribute_dataset(loader)
    if comm.size > 1:
        with pytest.raises(DataError, match="is_sharded=True"):
            next(iter(distributed))
    distributed = strategy.experimental_distribute_dataset(loader, is_sharded=True)
    for _ in range(2):
        assert rows_of_all(comm, distributed) == list(range(24))


def test_shards_of_different_lengths_end_together_with_parts_without_rows(strategy, comm):
    stream = Stream(0, 1, n_rows=2 + 3 * comm.rank)
    distributed = strategy.experimental_distribute_dataset(
        DataLoader(stream, batch_size=2 * comm.size), is_sharded=True
    )
    sizes = [len(x) for x, _ in distributed]
    n_steps = -(-(2 + 3 * (comm.size - 1)) // 2)
    assert len(sizes) == n_steps
    assert sum(sizes) == 2 + 3 * comm.rank
    with torch.no_grad():
        weights = strategy.reduce("sum", torch.tensor(float(sum(sizes))), axis=None)
    assert weights == sum(2 + 3 * rank for rank in range(comm.size))


NOISES = {
    "seeded alike": lambda: float(torch.rand(())),
    "of its own": lambda: float(np.random.default_rng().random()),
}


@pytest.mark.parametrize("name", NOISES)
def test_random_numbers_beside_the_rows_make_no_other_stream(strategy, comm, name):
    torch.manual_seed(comm.rank)
    stream = Stream(noise=NOISES[name])
    distributed = strategy.experimental_distribute_dataset(DataLoader(stream, batch_size=8))
    assert rows_of_all(comm, distributed) == list(range(24))
    cut = strategy.experimental_distribute_dataset(DataLoader(Stream(comm.rank, comm.size, noise=NOISES[name]), 8))
    if comm.size > 1:
        with pytest.raises(DataError, match="is_sharded=True"):
            next(iter(cut))


def test_a_sharded_stream_resumes_on_as_many_ranks(strategy, comm):
    loader = DataLoader(Stream(comm.rank, comm.size), batch_size=2 * comm.size)
    distributed = strategy.experimental_distribute_dataset(loader, is_sharded=True)
    whole = [x[:, 0].tolist() for x, _ in distributed]
    interrupted = strategy.experimental_distribute_dataset(loader, is_sharded=True)
    iterator = iter(interrupted)
    first = [next(iterator)[0][:, 0].tolist() for _ in range(2)]
    state = interrupted.state_dict()
    resumed = strategy.experimental_distribute_dataset(loader, is_sharded=True)
    resumed.load_state_dict(state)
    assert first + [x[:, 0].tolist() for x, _ in resumed] == whole


@pytest.mark.usefixtures("no_handler_left")
def test_a_peek_at_a_stream_is_refused_in_a_program_that_saves(strategy, tmp_path, comm):
    folder = comm.bcast(str(tmp_path))
    distributed = strategy.experimental_distribute_dataset(DataLoader(Stream(), batch_size=8))
    next(iter(distributed))
    next(iter(distributed))
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=distributed, strategy=strategy)
    hpcdist.PreemptionCheckpointHandler(None, checkpoint, f"{folder}/checkpoints")
    with pytest.raises(DataError, match="look at the dataset itself"):
        next(iter(distributed))


class OneCursor(Stream):
    """A stream whose iterators share one position, as those of an open file do."""

    def __iter__(self):
        self.position = 0
        while self.position < 24:
            self.position += 1
            yield torch.full((2,), self.position - 1.0), float(torch.rand(()))


def test_a_stream_with_one_position_for_all_iterators_loses_no_row(strategy, comm):
    torch.manual_seed(comm.rank)  # the second leaf differs, so that the first rows are drawn again
    distributed = strategy.experimental_distribute_dataset(DataLoader(OneCursor(), batch_size=4))
    for _ in range(2):
        assert rows_of_all(comm, distributed) == list(range(24))


def test_workers_may_ask_far_ahead(strategy, comm):
    batches = [[number % N_ROWS] * comm.size for number in range(4500)]
    loader = DataLoader(Rows(), batch_sampler=batches, num_workers=1, prefetch_factor=1500)
    distributed = strategy.experimental_distribute_dataset(loader)
    assert sum(1 for _ in distributed) == 4500


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_collate_function_may_need_more_items_than_one(strategy, comm, n_workers):
    loader = DataLoader(
        torch.arange(8.0 * comm.size),
        4 * comm.size,
        num_workers=n_workers,
        collate_fn=lambda x: torch.stack(x).view(-1, 2),
    )
    distributed = strategy.experimental_distribute_dataset(loader)
    assert [tuple(part.shape) for part in distributed] == [(2, 2)] * 2


class Late(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        raise TimeoutError("read of a shard timed out")


def test_an_error_of_an_item_is_its_own(strategy):
    distributed = strategy.experimental_distribute_dataset(DataLoader(Late(), 4, num_workers=1))
    with pytest.raises(TimeoutError, match="read of a shard timed out"):
        next(iter(distributed))


def test_a_sampler_that_is_changed_counts_from_the_next_pass_on(strategy, comm):
    sampler = Forgetful([1, 2, 3, 4])
    distributed = strategy.experimental_distribute_dataset(DataLoader(Rows(), 2, sampler=sampler))
    sampler.rows = [5, 6]
    assert len(distributed) == 2
    assert batches_of_pass(comm, distributed) == [[5, 6]]


class Batches(Dataset):
    """Reads batches alone."""

    def __len__(self):
        return 8

    def __getitems__(self, rows):
        return [torch.tensor(float(row)) for row in rows]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_dataset_that_reads_batches_is_asked_for_batches(strategy, comm, n_workers):
    distributed = strategy.experimental_distribute_dataset(DataLoader(Batches(), 4, num_workers=n_workers))
    own_rows = torch.cat(list(distributed)).tolist()
    assert sorted(sum(comm.allgather(own_rows), [])) == list(range(8))


def test_persistent_workers_are_kept_after_two_passes_side_by_side(strategy, comm):
    loader = DataLoader(Processes(), 4 * comm.size, num_workers=1, persistent_workers=True)
    dataset = hpcdist.Dataset.from_torch(loader)
    first, second = (strategy.experimental_distribute_dataset(dataset) for _ in range(2))
    pids = set()
    for epoch in range(4):
        for part in first if epoch != 1 else (pair[0] for pair in zip(first, second, strict=True)):
            pids |= set(part[0].tolist())
    assert len(pids) == 1


@pytest.mark.parametrize("has_sampler", [False, True])
def test_each_pass_seeds_its_workers_anew_and_alike_after_a_restart(strategy, comm, has_sampler):
    def make_distributed():
        torch.manual_seed(1)
        if has_sampler:
            settings = {"sampler": Forgetful(range(16))}
        else:
            settings = {}
        return strategy.experimental_distribute_dataset(
            DataLoader(Processes(), 4 * comm.size, num_workers=1, **settings)
        )

    def seeds_of_pass(distributed):
        return set(torch.cat([part[1] for part in distributed]).tolist())

    distributed = make_distributed()
    first = seeds_of_pass(distributed)
    state = distributed.state_dict()
    second = seeds_of_pass(distributed)
    assert len(first) == len(second) == 1
    assert first != second
    if has_sampler:  # those of other loaders are keyed by row later
        resumed = make_distributed()
        resumed.load_state_dict(state)
        assert seeds_of_pass(resumed) == second


def test_a_short_batch_of_a_sampler_is_refused_at_the_first_batch_on_all_ranks(strategy, comm):
    loader = DataLoader(Rows(), batch_sampler=[[0] * 6, [1]], collate_fn=count_rows)
    distributed = strategy.experimental_distribute_dataset(loader)
    if comm.size == 1:
        assert [part["n"] for part in distributed] == [6, 1]
        return
    with pytest.raises(DataError, match="got int from its collate_fn"):
        next(iter(distributed))


class DrawsByRankLater(Sampler):
    """The same rows on all ranks in the first pass, and others later."""

    def __init__(self, rank):
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first = self.rank if self.epoch else 0
        return iter(range(first, first + 6))


def test_samplers_that_differ_later_are_refused_at_the_sum(strategy, comm):
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    distributed = strategy.experimental_distribute_dataset(DataLoader(Rows(), 6, sampler=DrawsByRankLater(comm.rank)))

    def train():
        for x, _ in distributed:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    train()
    if comm.size == 1:
        train()
        return
    with pytest.raises(GradientError, match="same global batch"):
        train()


@pytest.mark.parametrize("has_sampler", [False, True])
def test_kept_workers_keep_nobody_and_end_at_once_with_their_loader(strategy, comm, has_sampler):
    if has_sampler:
        settings = {"sampler": Forgetful(range(16))}
    else:
        settings = {}
    loader = DataLoader(Processes(), comm.size, num_workers=2, persistent_workers=True, **settings)
    distributed = strategy.experimental_distribute_dataset(loader)
    list(distributed)
    next(iter(distributed))  # a pass that is left
    cycle = [distributed]
    cycle.append(cycle)
    reference = weakref.ref(distributed)
    del distributed, cycle, loader
    start_s = time.monotonic()
    gc.collect()
    assert time.monotonic() - start_s < 4, "torch waits 5 s for each worker that it cannot reach"
    assert reference() is None


def test_noise_on_one_rank_makes_no_other_stream(strategy, comm):
    noises = [lambda: 0.5] * (comm.size - 1) + [NOISES["of its own"]]
    distributed = strategy.experimental_distribute_dataset(DataLoader(Stream(noise=noises[comm.rank]), 8))
    assert rows_of_all(comm, distributed) == list(range(24))


class Noise(IterableDataset):
    def __iter__(self):
        generator = np.random.default_rng()
        for _ in range(8):
            yield torch.tensor(generator.random())


def test_a_stream_of_which_nothing_is_known_to_be_equal_is_refused(strategy, comm):
    distributed = strategy.experimental_distribute_dataset(DataLoader(Noise(), 4))
    if comm.size == 1:
        assert len(list(distributed)) == 2
        return
    with pytest.raises(DataError, match="seeded generators"):
        next(iter(distributed))


class FewRows(ByLength):
    """Batches of one row, which leave all ranks but one without rows."""

    def __iter__(self):
        return iter([[row] for row in range(6)])


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("n_ahead", [0, 1, 3])
def test_parts_without_rows_are_told_apart_in_a_loop_that_draws_ahead(comm, strategy, n_workers, n_ahead):
    """Each rank without rows had the same memory for all of them, and counted a later part as used."""
    torch.manual_seed(1)
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_sampler=FewRows(), num_workers=n_workers)
    waiting = []
    n_steps = 0

    def train(values):
        optimizer.zero_grad()
        (model(values).square().mean() if len(values) else model(values).sum() * 0).backward()
        optimizer.step()

    for values, _ in strategy.experimental_distribute_dataset(loader):
        waiting.append(values)
        if len(waiting) > n_ahead:
            train(waiting.pop(0))
            n_steps += 1
    for values in waiting:
        train(values)
        n_steps += 1
    assert n_steps == 6
