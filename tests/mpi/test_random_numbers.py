"""Random numbers of torch, numpy and Python: the same after a restart, with any workers and prefetching, on all ranks.

Rows have numbers of their own; the loop's are set after each step and where it gets a batch.
"""

import contextlib
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import hpcdist
from hpcdist.runtime.library_numbers import LIBRARIES

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
N_ROWS = 24
BATCH = 6
module_generator = np.random.default_rng(4)


class Augmentation:
    """A transform that draws from a generator of its own."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self):
        return float(self.generator.random())


module_transform = Augmentation(5)
module_transforms = [Augmentation(6)]


def numpy_number():
    return float(np.random.rand())


def normal_number():
    return float(np.random.randn())  # draws two, and keeps one


def python_number():
    return random.random()


def gauss_number():
    return random.gauss(0, 1)


def torch_number():
    return float(torch.rand(()))


def module_number():
    return float(module_generator.random())


def transform_number():
    return module_transform()


def listed_transform_number():
    return module_transforms[0]()


DRAWS = [
    numpy_number,
    normal_number,
    python_number,
    gauss_number,
    torch_number,
    module_number,
    transform_number,
    listed_transform_number,
]


class Rows(Dataset):
    """Rows beside a number that is drawn for each; late: for some alone."""

    def __init__(self, draw, late=False):
        self.draw = draw
        self.late = late

    def __len__(self):
        return N_ROWS

    def __getitem__(self, row):
        if not self.late or row % 7 == 5:
            number = self.draw()
        else:
            number = 0.0
        return torch.tensor([float(row), number], dtype=torch.float64)


class OwnGenerators(Rows):
    """Rows that draw from generators which the dataset holds."""

    def __init__(self):
        super().__init__(self.drawn)
        self.generators = {
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(2),
            "python": random.Random(3),
        }
        self.of_torch = torch.Generator().manual_seed(4)

    def drawn(self):
        number = self.generators["numpy"].random() + self.generators["legacy"].rand()
        return number + self.generators["python"].random() + float(torch.rand((), generator=self.of_torch))


class Reseeded(Rows):
    """Joins rows, and adds a number to all of them."""

    def join(self, rows):
        return torch.stack(rows) + torch.tensor([0.0, 100 * self.draw()], dtype=torch.float64)


class Stream(IterableDataset):
    """Rows of a stream beside a number that is drawn for each."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        for row in range(N_ROWS):
            yield torch.tensor([float(row), self.draw()], dtype=torch.float64)


def loader_of(rows, n_workers=0, **settings):
    return DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=n_workers, **settings)


def mapped(draw, n_ahead=0):
    """Return a dataset whose map draws."""

    def add(row):
        return torch.cat([torch.as_tensor(row)[None], torch.tensor([draw()], dtype=torch.float64)])

    dataset = hpcdist.Dataset.from_tensor_slices(np.arange(N_ROWS, dtype=np.float64)).shuffle().map(add).batch(BATCH)
    if n_ahead:
        return dataset.prefetch(n_ahead)
    return dataset


def drawn_stream(draw, n_ahead=0):
    def rows():
        for row in range(N_ROWS):
            yield np.array([row, draw()])

    dataset = hpcdist.Dataset.from_generator(rows).batch(BATCH)
    if n_ahead:
        return dataset.prefetch(n_ahead)
    return dataset


def seeded_strategy(seed=5):
    hpcdist.set_random_seed(seed)
    return hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")


def numbers_of_pass(comm, batches, limit=None):
    """Return the number of each row in a pass, or the rest of one, over all ranks."""
    own_rows = []
    for part in batches if limit is None else batches.take(limit):
        own_rows += part.tolist()
    return {int(row): number for row, number in itertools.chain(*comm.allgather(own_rows))}


def passes(comm, make, seed=5):
    """Return the numbers of two passes, of a rest after a restart, and whether the loop's own numbers were left."""
    strategy = seeded_strategy(seed)
    batches = strategy.experimental_distribute_dataset(make())
    marks = [library.mark() for library in LIBRARIES]
    first = numbers_of_pass(comm, batches)
    second = numbers_of_pass(comm, batches)
    is_untouched = marks == [library.mark() for library in LIBRARIES]
    return first, second, is_untouched


@pytest.mark.feature("input.random-numbers")
@pytest.mark.parametrize("draw", DRAWS)
def test_rows_have_the_same_numbers_with_any_workers(comm, draw):
    first, second, _ = passes(comm, lambda: loader_of(Rows(draw)))
    assert len(set(first.values()) | set(second.values())) == 2 * N_ROWS, "each row of each pass has another number"
    for n_workers, settings in ((1, {}), (2, {}), (2, {"persistent_workers": True})):
        assert passes(comm, lambda n=n_workers, more=settings: loader_of(Rows(draw), n, **more))[:2] == (first, second)
    assert passes(comm, lambda: loader_of(Rows(draw)), seed=6)[0] != first


@pytest.mark.parametrize("make", [mapped, drawn_stream])
@pytest.mark.parametrize("draw", DRAWS)
def test_rows_have_the_same_numbers_with_any_prefetching(comm, make, draw):
    first, second, _ = passes(comm, lambda: make(draw))
    assert len(set(first.values()) | set(second.values())) == 2 * N_ROWS
    assert passes(comm, lambda: make(draw, 3))[:2] == (first, second)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: loader_of(Rows(numpy_number, late=True)), id="late"),
        pytest.param(lambda: loader_of(Rows(numpy_number, late=True), 2), id="late, workers"),
        pytest.param(lambda: loader_of(OwnGenerators()), id="own generators"),
        pytest.param(lambda: loader_of(OwnGenerators(), 2), id="own generators, workers"),
        pytest.param(lambda: DataLoader(Stream(numpy_number), BATCH), id="stream"),
        pytest.param(lambda: mapped(python_number).repeat(2), id="two epochs"),
        pytest.param(lambda: mapped(numpy_number, 2), id="prefetch"),
        pytest.param(lambda: drawn_stream(torch_number), id="generator"),
    ],
)
@pytest.mark.parametrize("n_used", [1, 3])
def test_a_restart_draws_the_same_numbers(comm, make, n_used):
    strategy = seeded_strategy()
    batches = strategy.experimental_distribute_dataset(make())
    before = numbers_of_pass(comm, batches, n_used)
    state = batches.state_dict()
    remaining_numbers = numbers_of_pass(comm, batches)
    hpcdist.set_random_seed(77)
    resumed = strategy.experimental_distribute_dataset(make())
    resumed.load_state_dict(state)
    assert numbers_of_pass(comm, resumed) == remaining_numbers
    assert before.keys() | remaining_numbers.keys()


def test_a_row_that_a_sampler_draws_twice_has_two_numbers(comm):
    strategy = seeded_strategy()
    sampler = WeightedRandomSampler([1.0] * N_ROWS, 4 * N_ROWS)
    batches = strategy.experimental_distribute_dataset(DataLoader(Rows(numpy_number), BATCH, sampler=sampler))
    own_numbers = []
    for part in batches:
        own_numbers += part[:, 1].tolist()
    numbers = list(itertools.chain(*comm.allgather(own_numbers)))
    assert len(set(numbers)) == len(numbers) == 4 * N_ROWS


def test_collate_draws_for_each_batch(comm):
    rows = Reseeded(python_number)
    first, second, _ = passes(comm, lambda: loader_of(rows, collate_fn=rows.join))
    worker_passes = passes(comm, lambda: loader_of(rows, 2, collate_fn=rows.join))
    assert worker_passes[:2] == (first, second)


def test_what_draws_never_runs_beside_the_loop(comm):
    threads = set()

    def draw_late(row):
        if row % 9 == 8:  # not in the first batch of every rank
            threads.add(threading.current_thread().name)
            return row + np.random.rand()
        return row

    def plain(row):
        plain_threads.add(threading.current_thread().name)
        return row

    plain_threads = set()
    rows = hpcdist.Dataset.from_tensor_slices(np.arange(60.0))
    strategy = seeded_strategy()
    unthreaded = list(strategy.experimental_distribute_dataset(rows.map(draw_late).batch(6)))
    threads.clear()
    strategy = seeded_strategy()
    threaded = list(strategy.experimental_distribute_dataset(rows.map(draw_late).batch(6).prefetch(2)))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(unthreaded, threaded, strict=True))
    list(strategy.experimental_distribute_dataset(rows.map(plain).batch(6).prefetch(2)))
    assert "hpcdist-prefetch" in plain_threads, "what draws nothing runs ahead"


def test_a_loop_that_draws_itself_gets_every_row_once(comm):
    strategy = seeded_strategy()

    def slow(row):
        for _ in range(200):
            row = row + 0.0
        return row

    rows = hpcdist.Dataset.from_tensor_slices(np.arange(600.0)).map(slow).batch(6).prefetch(2)
    batches = strategy.experimental_distribute_dataset(rows)
    for _ in range(2):
        seen = []
        for part in batches:
            np.random.rand(50)
            seen += part.tolist()
        assert sorted(sum(comm.allgather(seen), [])) == list(range(600))


# -- the program's loop ------------------------------------------------------------------------------------------------


class Program:
    """A loop that draws noise from all libraries."""

    def __init__(self, folder, seed_later=None):
        self.strategy = seeded_strategy()
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        rows = torch.arange(90, dtype=torch.float64).reshape(30, 3) / 90
        self.batches = self.strategy.experimental_distribute_dataset(DataLoader(rows, batch_size=5))
        checkpoint = hpcdist.Checkpoint(
            model=self.model, optimizer=self.optimizer, data=self.batches, strategy=self.strategy
        )
        self.handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder / "checkpoints", save_every_steps=3)
        self.seed_later = seed_later
        self.noise = []

    def train(self, n_epochs=2, stop_at=None, n_setup=0):
        np.random.rand(n_setup)
        for _ in range(n_setup):
            random.random()
        torch.rand(n_setup)
        with contextlib.suppress(SystemExit), self.handler:
            for _ in range(self.batches.epoch, n_epochs):
                for x in self.batches:
                    if self.handler.step == 2 and self.seed_later is not None:
                        self.seed_later()
                    self.noise.append((np.random.randn(), random.gauss(0, 1), float(torch.rand(()))))
                    self.optimizer.zero_grad()
                    self.model(x + self.noise[-1][0]).square().mean().backward()
                    self.optimizer.step()
                    if self.handler.step == stop_at:
                        self.handler.stop("test")
        self.handler.close()
        return self.noise


def seed_equally():
    np.random.seed(8)
    random.seed(8)


@pytest.mark.feature("input.random-numbers", "checkpoints.exact-resume")
@pytest.mark.parametrize("seed_later", [None, seed_equally], ids=["keyed", "seeded later"])
@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_a_loop_resumes_with_the_numbers_of_an_unbroken_run(comm, shared_path, stop_at, seed_later):
    unbroken = Program(shared_path / "unbroken", seed_later).train()
    before = Program(shared_path / "stopped", seed_later).train(stop_at=stop_at)
    after = Program(shared_path / "stopped", seed_later).train(n_setup=3)
    assert before + after == unbroken
    assert len(set(unbroken)) == len(unbroken) == 12


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_seed_between_the_restore_and_the_first_step_changes_nothing(comm, shared_path, stop_at):
    def noise_of(name, **settings):
        program = Program(shared_path / name)
        seed_equally()
        return program.train(**settings)

    unbroken = noise_of("unbroken")
    assert noise_of("stopped", stop_at=stop_at) + noise_of("stopped") == unbroken
    assert len(set(unbroken)) == len(unbroken) == 12


def test_a_seed_that_the_program_sets_later_keeps_its_sequence(comm, shared_path):
    noise = Program(shared_path, seed_equally).train()
    sequence = np.random.RandomState(8)
    assert [numbers[0] for numbers in noise[2:]] == [sequence.randn() for _ in noise[2:]]


def test_numbers_of_numpy_and_python_are_equal_on_all_ranks(comm, shared_path):
    program = Program(shared_path)
    permutations = [np.random.permutation(60)[comm.rank :: comm.size].tolist()]
    shuffled = list(range(60))
    random.shuffle(shuffled)
    permutations.append(shuffled[comm.rank :: comm.size])
    program.train(n_epochs=1)
    permutations.append(np.random.permutation(60)[comm.rank :: comm.size].tolist())
    for parts in zip(*comm.allgather(permutations), strict=True):
        assert sorted(sum(parts, [])) == list(range(60)), "no row is lost"
    of_torch = comm.allgather([numbers[2] for numbers in program.noise])
    assert comm.size == 1 or of_torch[0] != of_torch[1], "replicas have dropout of their own"


def test_numbers_are_each_ranks_own_if_the_program_seeds_by_rank(comm, shared_path):
    def seed_by_rank():
        np.random.seed(comm.rank)
        random.seed(comm.rank)

    unbroken = Program(shared_path / "unbroken", seed_by_rank).train()
    before = Program(shared_path / "stopped", seed_by_rank).train(stop_at=4)
    after = Program(shared_path / "stopped", seed_by_rank).train(n_setup=2)
    assert before + after == unbroken
    for column in range(2):
        firsts = comm.allgather(unbroken[2][column])
        assert len(set(firsts)) == comm.size


def test_batches_of_one_step_have_numbers_of_their_own(comm):
    strategy = seeded_strategy()
    with strategy.scope():
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = torch.ones(40, 3, dtype=torch.float64)
    numbers = []
    for number, x in enumerate(strategy.experimental_distribute_dataset(DataLoader(rows, batch_size=4))):
        numbers += [np.random.rand(), random.random(), float(torch.rand(()))]
        model(x).mean().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(numbers)) == len(numbers)


def test_an_unseeded_shuffle_follows_the_seed_of_the_program(comm):
    def order(seed):
        strategy = seeded_strategy(seed)
        dataset = hpcdist.Dataset.range(30).shuffle().batch(6)
        second_dataset = hpcdist.Dataset.range(30).shuffle().batch(6)
        passes = []
        for shuffled_dataset in (dataset, second_dataset):
            passes.append([part.tolist() for part in strategy.experimental_distribute_dataset(shuffled_dataset)])
        return passes

    first, second = order(3)
    assert first != second
    assert [first, second] == order(3)
    assert order(4)[0] != first


class OwnLoaderProgram(Program):
    """The same loop over a DataLoader of the program's own."""

    def __init__(self, folder, n_workers, persistent=False):
        super().__init__(folder / "unused")
        self.handler.close()
        rows = Rows(numpy_number)
        self.sampler = hpcdist.DistributedSampler(rows, seed=1)
        self.loader = DataLoader(
            rows, batch_size=2, sampler=self.sampler, num_workers=n_workers, persistent_workers=persistent
        )
        checkpoint = hpcdist.Checkpoint(
            model=self.model, optimizer=self.optimizer, data=self.sampler, strategy=self.strategy
        )
        self.handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder / "checkpoints", save_every_steps=3)

    def train(self, stop_at=None, n_setup=0):
        np.random.rand(n_setup)
        with contextlib.suppress(SystemExit), self.handler:
            for epoch in range(self.sampler.epoch, 2):
                self.sampler.set_epoch(epoch)
                for x in self.loader:
                    self.noise.append((x.tolist(), np.random.rand()))
                    self.optimizer.zero_grad()
                    self.model(x.sum() + torch.zeros(1, 3, dtype=torch.float64)).square().mean().backward()
                    self.optimizer.step()
                    if self.handler.step == stop_at:
                        self.handler.stop("test")
        self.handler.close()
        return self.noise


@pytest.mark.parametrize("settings", [(0,), (2,), (2, True)], ids=["here", "workers", "kept workers"])
def test_a_loader_of_the_programs_own_resumes_with_the_same_numbers(comm, shared_path, settings):
    unbroken = OwnLoaderProgram(shared_path / "unbroken", *settings).train()
    before = OwnLoaderProgram(shared_path / "stopped", *settings).train(stop_at=2)
    after = OwnLoaderProgram(shared_path / "stopped", *settings).train(n_setup=3)
    assert before + after == unbroken
    numbers = []
    for part, _ in unbroken:
        numbers += [number for _, number in part]
    assert len(set(numbers)) > len(numbers) - comm.size * 2, "rows that fill the last share come twice"
    assert OwnLoaderProgram(shared_path / "others", 2 - settings[0]).train() == unbroken


# -- what is easily overlooked -----------------------------------------------------------------------------------------


class LazyGenerator(Rows):
    """Makes its generator when it reads the first row, as torch's guides do for workers."""

    def __init__(self):
        super().__init__(self.drawn)
        self.generator = None

    def drawn(self):
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed() % 2**32)
        return float(self.generator.random())


def test_generators_that_are_made_late_are_found(comm):
    first, second, _ = passes(comm, lambda: loader_of(LazyGenerator()))
    assert len(set(first.values()) | set(second.values())) == 2 * N_ROWS
    assert passes(comm, lambda: loader_of(LazyGenerator(), 2))[:2] == (first, second)


class Drawing(hpcdist.RowSource):
    """A source of the program's own, which draws for each part, and may read ahead."""

    n_rows = N_ROWS

    def take(self, rows):
        return np.stack([rows.astype(np.float64), np.random.rand(len(rows))], axis=1)


class DrawingAhead(Drawing):
    def take_many(self, requests):
        for rows in requests:
            yield self.take(rows)


class Reader(Drawing):
    """A source whose own methods have names that come to mind."""

    def read(self, rows):
        return np.random.rand(len(rows))

    def take(self, rows):
        return np.stack([rows.astype(np.float64), self.read(rows)], axis=1)


@pytest.mark.parametrize("source", [Drawing, DrawingAhead, Reader])
def test_sources_of_the_program_draw_for_each_part(comm, source):
    def make(n_ahead=0):
        rows = hpcdist.Dataset.from_source(source()).batch(BATCH)
        if n_ahead:
            return rows.prefetch(n_ahead)
        return rows

    first, second, _ = passes(comm, make)
    assert len(set(first.values()) | set(second.values())) == 2 * N_ROWS
    assert passes(comm, lambda: make(2))[:2] == (first, second)


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_rows_of_a_cache_keep_their_numbers(comm, is_looked_at):
    def make():
        rows = hpcdist.Dataset.from_tensor_slices(np.arange(N_ROWS, dtype=np.float64))
        return rows.map(lambda row: np.array([row, np.random.rand()])).cache().batch(BATCH)

    strategy = seeded_strategy()
    batches = strategy.experimental_distribute_dataset(make())
    if is_looked_at:
        assert batches.element_spec.shape == (None, 2)
    first = numbers_of_pass(comm, batches)
    assert numbers_of_pass(comm, batches) == first
    assert first == numbers_of_pass(comm, seeded_strategy().experimental_distribute_dataset(make()))


def test_a_cache_in_memory_is_filled_alike_in_a_later_epoch(comm):
    def make():
        rows = hpcdist.Dataset.from_tensor_slices(np.arange(N_ROWS, dtype=np.float64))
        return rows.map(lambda row: np.array([row, np.random.rand()])).cache().batch(BATCH)

    strategy = seeded_strategy()
    batches = strategy.experimental_distribute_dataset(make())
    first = numbers_of_pass(comm, batches)
    resumed = strategy.experimental_distribute_dataset(make())
    resumed.load_state_dict(batches.state_dict())
    assert numbers_of_pass(comm, resumed) == first


def test_passes_over_a_stream_of_each_rank_differ(comm):
    strategy = seeded_strategy()
    batches = strategy.distribute_datasets_from_function(lambda _: drawn_stream(lambda: 0.0).map(add_number))
    first = [part.tolist() for part in batches]
    assert first != [part.tolist() for part in batches]


def add_number(rows):
    return rows + np.random.rand()


def test_a_row_that_comes_twice_in_a_batch_has_two_numbers(comm):
    strategy = seeded_strategy()
    rows = hpcdist.Dataset.from_tensor_slices(np.arange(2.0)).map(lambda row: np.array([row, np.random.rand()]))
    numbers = []
    for part in strategy.experimental_distribute_dataset(rows.repeat(12).batch(12)):
        numbers += part[:, 1].tolist()
    numbers = list(itertools.chain(*comm.allgather(numbers)))
    assert len(set(numbers)) == len(numbers) == 24


def test_parts_without_rows_leave_the_loops_numbers_alone(comm):
    """Also where a thread reads ahead: one that seeds and restores would disturb the loop."""

    def numbers(n_ahead):
        strategy = seeded_strategy()
        rows = hpcdist.Dataset.from_tensor_slices(np.arange(4.0 * comm.size + 1)).map(lambda row: row + 0).batch(4)
        batches = strategy.experimental_distribute_dataset(rows.prefetch(n_ahead) if n_ahead else rows)
        drawn = []
        for _ in range(3):
            for _ in batches:
                drawn.append(np.random.rand(40).tolist())
        return drawn

    assert numbers(3) == numbers(0)


def test_a_late_draw_leaves_the_loops_numbers_alone(comm):
    def numbers(draws):
        strategy = seeded_strategy()
        np.random.seed(3)

        def add(row):
            if draws and row == 20:
                return row + np.random.rand()
            return row

        rows = hpcdist.Dataset.from_tensor_slices(np.arange(36.0)).map(add).batch(6)
        drawn = []
        with torch.no_grad():  # an evaluation: nothing is seeded where its batches come
            for _ in strategy.experimental_distribute_dataset(rows):
                drawn.append(np.random.rand())
        return drawn

    assert numbers(True) == numbers(False)


@pytest.mark.parametrize("seeded", ["numpy", "Python"])
def test_what_the_program_does_not_seed_is_shared_all_the_same(comm, seeded):
    hpcdist.set_random_seed(5)
    for library in LIBRARIES:
        if library.name != seeded:
            library.seed(comm.rank)  # as chance would
            library.n_seeds = 0
    hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    assert len(set(comm.allgather((np.random.rand(), random.random())))) == 1


class OtherBatches(Program):
    """Validates with gradients between steps, and seeds again where its training begins."""

    def train(self, stop_at=None):
        validation = self.strategy.experimental_distribute_dataset(hpcdist.Dataset.range(12).batch(6))
        self.model(torch.ones(1, 3, dtype=torch.float64))  # the first use
        with contextlib.suppress(SystemExit), self.handler:
            random.seed(7)
            for _ in range(self.batches.epoch, 2):
                for x in self.batches:
                    self.noise.append((np.random.randn(), random.random(), float(torch.rand(()))))
                    self.optimizer.zero_grad()
                    self.model(x).square().mean().backward()
                    self.optimizer.step()
                    if self.handler.step % 2 == 0:
                        list(validation)
                    np.random.rand()  # as for a sample to print
                    if self.handler.step == stop_at:
                        self.handler.stop("test")
        self.handler.close()
        return self.noise


@pytest.mark.parametrize("stop_at", [1, 4])
def test_validations_and_seeds_that_are_set_again_change_nothing(comm, shared_path, stop_at):
    unbroken = OtherBatches(shared_path / "unbroken").train()
    before = OtherBatches(shared_path / "stopped").train(stop_at=stop_at)
    assert before + OtherBatches(shared_path / "stopped").train() == unbroken
    assert len(set(unbroken)) == len(unbroken)


@pytest.mark.parametrize("n_replicas", [4])
def test_replicas_draw_alike_on_any_number_of_ranks(comm, n_replicas):
    hpcdist.set_random_seed(5)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum", num_replicas=n_replicas)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = []

    def step():
        optimizer.zero_grad()
        numbers = [np.random.rand()]
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        numbers.append(random.random())
        drawn.append(numbers)

    for _ in range(2):
        strategy.run(step)
    of_steps = set(map(tuple, itertools.chain(*comm.allgather(drawn))))
    assert len(of_steps) == 2, "all replicas draw the same, and other numbers at each step"


GENERATORS = {
    "PCG64": lambda seed: np.random.default_rng(seed),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "RandomState": np.random.RandomState,
    "random": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def normal_of(generator):
    """Return a normal number: some generators draw two, and keep one."""
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    return float(generator.normal())


@pytest.mark.parametrize("is_by_rank", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_loop_is_saved(comm, shared_path, name, is_by_rank):
    def make():
        return GENERATORS[name](3 + comm.rank * is_by_rank)

    generator = make()
    normal_of(generator)
    checkpoint = hpcdist.Checkpoint(rng=generator)
    assert checkpoint["rng"] is generator
    hpcdist.CheckpointManager(checkpoint, shared_path / "checkpoints").save(1)
    expected = [normal_of(generator) for _ in range(3)]
    resumed = make()
    hpcdist.CheckpointManager(hpcdist.Checkpoint(rng=resumed), shared_path / "checkpoints").restore_or_initialize()
    assert [normal_of(resumed) for _ in range(3)] == expected
    assert comm.size == 1 or (len(set(map(tuple, comm.allgather(expected)))) > 1) == is_by_rank
