"""DataLoaders of a program: their samplers, workers and collate functions are kept."""

import random

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import hpcdist
from hpcdist.data.batches import batch_sizes
from hpcdist.data.loader_reader import LoaderReader
from hpcdist.data.loader_worker import Progress, collate
from hpcdist.data.parts_without_rows import part_without_rows
from hpcdist.data.sampler_order import SamplerOrder, drawn_seed
from hpcdist.data.worker_reader import WorkerReader, _failure_of, _text_of_worker
from hpcdist.errors import DataError, WorkerDied
from hpcdist.plan.sample_order import SampleOrder
from hpcdist.runtime import worker_start


class ByLength(Sampler):
    """A batch sampler with an epoch and a generator of its own, and with batches of several sizes."""

    def __init__(self, generator):
        self.generator = generator
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first = int(np.random.randint(100)) + random.randrange(100) + 1000 * self.epoch
        draws = {
            torch.Generator: lambda: int(torch.randint(100, (), generator=self.generator)),
            random.Random: lambda: self.generator.randrange(100),
            np.random.Generator: lambda: int(self.generator.integers(100)),
            np.random.RandomState: lambda: int(self.generator.randint(100)),
        }
        for size in (1, 3, 2):
            yield [first + draws[type(self.generator)]() for _ in range(size)]


#: What torch writes before the text of an error that it sends from a worker.
SENT = "hpcdist.errors.DataError: "
GENERATORS = {
    "torch": torch.Generator,
    "python": random.Random,
    "numpy": np.random.default_rng,
    "legacy": np.random.RandomState,
}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_batches_of_a_sampler_depend_on_seed_and_pass_alone(name):
    loader = DataLoader(range(10**6), batch_sampler=ByLength(GENERATORS[name]()))
    passes = []
    for number in (0, 1, 0):
        np.random.seed()
        torch.seed()
        order = SamplerOrder(loader, seed=5, n_passes=number)
        order.draw(10)
        passes.append(order)
    first, second, repeated_pass = passes
    assert list(map(len, first.batches)) == [1, 3, 2]
    assert first.is_whole
    assert first.batches == repeated_pass.batches
    assert first.digests == repeated_pass.digests
    assert second.batches[0][0] // 1000 == 1, "set_epoch has the number of the pass"
    assert not set(first.digests) & set(second.digests)


def test_a_sampler_leaves_the_random_numbers_of_the_program_as_they_are():
    loader = DataLoader(range(10), 2, sampler=WeightedRandomSampler(torch.ones(10), 10))
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    SamplerOrder(loader, seed=1, n_passes=0).draw(3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


class Alternating(Sampler):
    """Batches of two samplers in turn, each with a generator of its own, in a list."""

    def __init__(self):
        self.parts = [RandomSampler(range(8), generator=torch.Generator()) for _ in range(2)]

    def __iter__(self):
        yield from zip(*self.parts, strict=True)


class Failing(Sampler):
    """Raises once, in its second batch."""

    def __init__(self):
        self.has_failed = False

    def __iter__(self):
        yield [0]
        if not self.has_failed:
            self.has_failed = True
            raise OSError("once")
        yield [1]


def test_each_sampler_in_a_list_gets_a_seed_of_its_own():
    loader = DataLoader(range(8), batch_sampler=Alternating())
    order = SamplerOrder(loader, 1, 0)
    order.draw(8)
    first, second = zip(*order.batches, strict=True)
    assert first != second
    for generator_part in loader.batch_sampler.parts:
        generator_part.generator.manual_seed(5)
    again = SamplerOrder(loader, 1, 0)
    again.draw(8)
    assert again.batches == order.batches, "the seed and the pass decide"
    assert again._seed not in [part.generator.initial_seed() for part in loader.batch_sampler.parts]


def test_a_sampler_that_raised_begins_its_pass_anew():
    order = SamplerOrder(DataLoader(range(8), batch_sampler=Failing()), 1, 0)
    with pytest.raises(OSError, match="once"):
        order.draw(2)
    order.draw(2)
    assert order.batches == [[0], [1]]
    assert order.is_whole


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield [int(torch.randint(1000, ()))]


def test_an_endless_sampler_is_drawn_in_chunks_that_do_not_depend_on_what_is_drawn_between():
    loader = DataLoader(range(1000), batch_sampler=Endless())
    whole, chunked = (SamplerOrder(loader, seed=1, n_passes=0) for _ in range(2))
    whole.draw(9000)
    for n_batches in (10, 4097, 9000):
        chunked.draw(n_batches)
        torch.rand(3)
        assert not chunked.is_whole
    assert whole.digest_of(9000) == chunked.digest_of(9000)
    assert whole.digest_of(0) == 0


def test_the_seed_of_a_loader_comes_from_its_own_generator():
    loader = DataLoader(range(4), 2, sampler=RandomSampler(range(4), generator=torch.Generator().manual_seed(1)))
    first = drawn_seed(loader)
    loader.sampler.generator.manual_seed(1)
    torch.seed()
    assert drawn_seed(loader) == first
    plain = DataLoader(range(4), batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, drop_last=False))
    torch.manual_seed(7)
    second = drawn_seed(plain)
    torch.manual_seed(7)
    assert drawn_seed(plain) == second


def joined(**more):
    return lambda items: {"x": torch.stack(items), **more}


@pytest.mark.parametrize(
    ("join", "shapes"),
    [
        (lambda items: torch.stack(items), (0, 3)),
        (lambda items: torch.stack(items, 1), (3, 0)),
        (lambda items: np.stack(items), (0, 3)),
        (joined(name="batch", scale=0.5, missing=None, mean=torch.ones(2)), {"x": (0, 3), "mean": (2,)}),
    ],
)
def test_a_part_without_rows_has_the_shapes_of_others(join, shapes):
    part = part_without_rows(join, torch.arange(3.0))
    if isinstance(part, dict):
        assert part["name"] == "batch"
        assert part["missing"] is None
        part = {key: value for key, value in part.items() if hasattr(value, "shape")}
        assert {key: tuple(value.shape) for key, value in part.items()} == shapes
    else:
        assert tuple(part.shape) == shapes


@pytest.mark.parametrize(
    ("join", "name"),
    [
        (lambda items: {"x": torch.stack(items), "n": len(items)}, "got int "),
        (list, r"got list of form \[\*\]"),
        (lambda items: pack_sequence(items), "got PackedSequence "),
        (lambda items: torch.stack(items).to_sparse(), "layout sparse_coo"),
        (lambda items: torch.tensor(float(len(items))), r"got Tensor of shape \(\)"),
        (lambda items: torch.cat(items), r"got Tensor of shape \(3,\)"),
        (lambda items: {"x": object()}, "got object "),
    ],
)
def test_what_has_no_value_for_no_rows_is_refused_by_its_type(join, name):
    with pytest.raises(DataError, match=name):
        part_without_rows(join, torch.arange(3.0))


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        (SampleOrder(10, batch_rows=4), {4, 2}),
        (SampleOrder(10, batch_rows=4, drop_remainder=True), {4}),
        (SampleOrder(8, batch_rows=4), {4}),
        (SampleOrder(5, batch_rows=4, inner_epochs=2), {4, 2}),
        (SampleOrder(10, batch_rows=4, outer_epochs=2, pass_limit=11), {4, 2, 3, 1}),
    ],
)
def test_the_sizes_that_batches_may_have(order, sizes):
    drawn = {stop - start for start, stop in order.batches(0, order.n_samples)}
    assert drawn <= batch_sizes(order)
    assert batch_sizes(order) == sizes


def test_cards_for_rdma_are_found_in_sys(tmp_path):
    assert worker_start.rdma_cards(tmp_path) is None
    (tmp_path / "class").mkdir()
    assert worker_start.rdma_cards(tmp_path) == []
    (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "class" / "cxi" / "cxi0").mkdir(parents=True)
    assert worker_start.rdma_cards(tmp_path) == ["mlx5_0", "cxi0"]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(1)])


def test_a_stream_with_workers_is_refused_with_what_to_do():
    with pytest.raises(DataError, match="num_workers=0 for the IterableDataset Stream.*got 2; use num_workers=0"):
        hpcdist.Dataset.from_torch(DataLoader(Stream(), 2, num_workers=2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", 2),
        ("prefetch_factor", 7),
        ("pin_memory", True),
        ("persistent_workers", True),
        ("timeout", 11),
    ],
)
def test_settings_of_a_loader_are_kept(name, value):
    settings = {"num_workers": 1, name: value}
    row_loader = LoaderReader(DataLoader(range(4), 2, **settings))._make_worker_loader()
    assert getattr(row_loader, name) == value
    assert row_loader.timeout > 0, "a worker that hangs ends the job"


class Alive:
    exitcode = None
    pid = 1

    def join(self, timeout_s):
        raise AssertionError("nobody waits for a worker whose item has raised")


class Iterator:
    _workers = (Alive(), Alive())


def test_the_text_of_a_worker_s_error_has_all_its_lines():
    text = "DataLoader: expected worker_init_fn to return, got ValueError: two\nlines; look at its traceback above."
    error = DataError(f"Caught DataError in worker 1.\nTraceback\n  hpcdist.errors.DataError: no\n{SENT}{text}\n")
    assert _text_of_worker(error) == text


@pytest.mark.parametrize("key", [7, np.int64(7), np.uint8(7)])
def test_a_worker_tells_which_item_it_reads(key):
    progress = Progress(2, "item {}")
    progress.note(1, key)
    assert (progress.describe(0), progress.describe(1)) == ("item of unknown number", "item 7")


@pytest.mark.parametrize("key", [-1, 1 << 63, "seven", 7.0])
def test_of_other_keys_nothing_is_known(key):
    progress = Progress(1, "item {}")
    progress.note(0, key)
    assert progress.describe(0) == "item of unknown number"


def test_items_are_joined_in_their_form():
    item = ({"a": [1.0, (2.0, 3.0)]}, 4.0)
    joined = collate([item, item])
    assert isinstance(joined, tuple)
    assert isinstance(joined[0]["a"], list)
    assert isinstance(joined[0]["a"][1], tuple)


def test_an_error_of_an_item_waits_for_no_worker():
    error = OSError("Caught OSError in DataLoader worker process 1.\nOriginal Traceback")
    assert _failure_of(Iterator(), None, error) is None


def test_a_worker_of_another_loader_that_dies_keeps_its_error():
    """The handler of SIGCHLD raises while this loader is read. As a DataError it would end the job for good."""

    def interrupted():
        raise WorkerDied("DataLoader: expected worker 0 of 1 to read item 3, got process 7 killed by signal 9; ...")
        yield

    with pytest.raises(WorkerDied, match="killed by signal 9"):
        WorkerReader._next_batch(None, interrupted(), None)
