"""DataLoaders over an IterableDataset with workers: every row once, whoever cuts, and exact restarts."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

import hpcdist
from hpcdist.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

N_ROWS = 53
NEW = {}
KEPT = {"persistent_workers": True}
FORKSERVER = {"multiprocessing_context": "forkserver"}


class Plain(IterableDataset):
    """Yields all rows, whoever asks."""

    def __init__(self, n_rows=N_ROWS):
        self.n_rows = n_rows

    def numbers(self):
        return range(self.n_rows)

    def __iter__(self):
        for row in self.numbers():
            yield torch.tensor([float(row)]), row


class CutByWorker(Plain):
    """Yields a worker's rows, as the documentation of torch shows."""

    def numbers(self):
        info = get_worker_info()
        if info is None:
            return range(self.n_rows)
        return range(info.id, self.n_rows, info.num_workers)


class CutByInit(Plain):
    """Yields the rows that `init` has left to a worker."""

    first = 0
    step = 1

    def numbers(self):
        return range(self.first, self.n_rows, self.step)

    @staticmethod
    def init(worker):
        info = get_worker_info()
        info.dataset.first = info.id
        info.dataset.step = info.num_workers


class CutByInitArgument(CutByInit):
    """Is told which worker it is in by the argument of `init`."""

    @staticmethod
    def init(worker):
        info = get_worker_info()
        info.dataset.first = worker
        info.dataset.step = info.num_workers


class CutOnce(Plain):
    """Remembers its cut, as datasets do that open their files once."""

    share = None

    def numbers(self):
        if self.share is None:
            info = get_worker_info()
            self.share = range(info.id, self.n_rows, info.num_workers)
        return self.share


class CutByRank(Plain):
    """Yields a rank's rows to all its workers."""

    def __init__(self, rank, size, n_rows=N_ROWS):
        super().__init__(n_rows)
        self.rank = rank
        self.size = size

    def numbers(self):
        return range(self.rank, self.n_rows, self.size)


class CutByRankAndWorker(CutByRank):
    """Yields a worker's share of a rank's rows, some ranks many more than others."""

    def numbers(self):
        info = get_worker_info()
        return itertools.islice(range(self.rank, self.n_rows, self.size), info.id, None, info.num_workers)


class Shuffled(Plain):
    """Shuffles all rows by the libraries' numbers, and then cuts; adds noise to each row."""

    def __iter__(self):
        rows = list(range(self.n_rows))
        random.shuffle(rows)
        rows = np.random.permutation(rows)
        rows = rows[torch.randperm(self.n_rows).numpy()].tolist()
        info = get_worker_info()
        for row in rows[info.id :: info.num_workers]:
            yield torch.rand(1), row


class BufferUncut(Plain):
    """Shuffles within a buffer while rows are drawn, and does not cut."""

    def __iter__(self):
        buffer = []
        for row in range(self.n_rows):
            buffer.append(row)
            if len(buffer) == 10:
                yield torch.rand(1), buffer.pop(random.randrange(10))
        while buffer:
            yield torch.rand(1), buffer.pop(int(torch.randint(len(buffer), ())))


class ShuffledUncut(Plain):
    """Shuffles all rows, and does not cut."""

    def __iter__(self):
        for row in torch.randperm(self.n_rows).tolist():
            yield torch.rand(1), row


def join_with_noise(rows):
    """Draw random numbers as one that masks words or mixes pictures does."""
    torch.rand(len(rows))
    random.random()
    np.random.rand()
    return default_collate(rows)


def name_of(value):
    """Return the name of a test's parameter."""
    if isinstance(value, dict):
        return "-".join(value)
    return getattr(value, "__name__", None)


def rows_of_pass(comm, batches):
    """Return all rows of a pass in their order, rank by rank, and this rank's parts."""
    parts = [(noise.ravel().tolist(), rows.tolist()) for noise, rows in batches]
    own_rows = sum((rows for _, rows in parts), [])
    return sum(comm.allgather(own_rows), []), parts


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")


@pytest.mark.feature("input.stream-workers")
@pytest.mark.parametrize(
    ("kind", "context"),
    [
        *itertools.product([Plain, CutByWorker, CutByInitArgument, CutOnce, Shuffled, BufferUncut], [NEW, KEPT]),
        (CutByInit, KEPT | FORKSERVER),  # starts a process with all its imports
    ],
    ids=name_of,
)
def test_every_row_comes_once_in_each_pass(comm, strategy, kind, context):
    init = getattr(kind, "init", None)
    loader = DataLoader(kind(), 6, num_workers=2, worker_init_fn=init, collate_fn=join_with_noise, **context)
    batches = strategy.experimental_distribute_dataset(loader)
    passes = []
    for _ in range(3):
        rows, parts = rows_of_pass(comm, batches)
        assert sorted(rows) == list(range(N_ROWS))
        assert max(len(part) for _, part in parts) <= -(-6 // comm.size)
        assert len(set(comm.allgather(len(parts)))) == 1, "passes end at the same step"
        passes.append(rows)
    assert batches.epoch == 3
    assert (passes[0] == passes[1]) == (kind not in (Shuffled, BufferUncut))


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_dataset_that_cuts_by_rank_is_not_cut_again(comm, strategy, n_workers):
    dataset = CutByRankAndWorker(comm.rank, comm.size)
    loader = DataLoader(dataset, 2 * comm.size, num_workers=n_workers)
    batches = strategy.experimental_distribute_dataset(loader, is_sharded=True)
    rows, parts = rows_of_pass(comm, batches)
    assert sorted(rows) == list(range(N_ROWS))
    assert max(len(part) for _, part in parts) == 2


def test_a_dataset_that_cuts_by_rank_without_a_word_is_refused(comm, strategy):
    loader = DataLoader(CutByRank(comm.rank, comm.size), 6, num_workers=2)
    batches = strategy.experimental_distribute_dataset(loader)
    if comm.size == 1:
        assert len(rows_of_pass(comm, batches)[0]) == N_ROWS
        return
    with pytest.raises(DataError, match="is_sharded=True"):
        list(batches)


class CutTwice(CutByRank):
    """Cuts by rank, and then by what it takes for the workers of this rank alone."""

    def numbers(self):
        info = get_worker_info()
        return range(self.rank, self.n_rows, self.size)[info.id :: info.num_workers]


def test_a_dataset_that_cuts_by_rank_and_worker_without_a_word_is_refused(comm, strategy):
    batches = strategy.experimental_distribute_dataset(DataLoader(CutTwice(comm.rank, comm.size), 6, num_workers=2))
    if comm.size == 1:
        assert len(rows_of_pass(comm, batches)[0]) == N_ROWS
        return
    with pytest.raises(DataError, match="is_sharded=True"):
        list(batches)


class CutByNumberAlone(Plain):
    def numbers(self):
        return range(get_worker_info().id, self.n_rows, 2)


class CutLate(Plain):
    def __iter__(self):
        for row in range(self.n_rows):
            if row == 0 or row % get_worker_info().num_workers == 0:
                yield torch.tensor([float(row)]), row


class CutByConstant(CutByInit):
    @staticmethod
    def init(worker):
        dataset = get_worker_info().dataset
        dataset.first = worker
        dataset.step = 3


class NumberLate(Plain):
    """Common rows, and then a cut that knows the number of workers by itself."""

    def numbers(self):
        yield from range(3)
        yield from range(3 + get_worker_info().id, self.n_rows, 2)


class SeededUncut(Plain):
    """Shuffles by the worker's own seed, and does not cut."""

    def numbers(self):
        rows = list(range(self.n_rows))
        random.Random(get_worker_info().seed).shuffle(rows)
        return rows


class EntropyUncut(Plain):
    """Shuffles by numbers that nobody repeats, beside a leaf that is always the same."""

    def __iter__(self):
        for row in np.random.default_rng().permutation(self.n_rows).tolist():
            yield torch.zeros(1), row


class Graph:
    """A row that is no array."""

    def __init__(self, row):
        self.edges = [torch.tensor([row])]


class GraphsInVain(Plain):
    def __iter__(self):
        assert get_worker_info().num_workers > 0
        for row in range(self.n_rows):
            yield Graph(row)


class AskedInVain(Plain):
    def numbers(self):
        assert get_worker_info().num_workers > 0
        return range(self.n_rows)


@pytest.mark.parametrize(
    ("kind", "settings", "is_sharded", "message"),
    [
        (CutByNumberAlone, {}, False, r"num_workers beside id.*got id alone"),
        (CutLate, {}, False, r"num_workers before its first row, got it read after row 1"),
        (CutByConstant, {"worker_init_fn": CutByConstant.init}, False, "the same rows to the same share"),
        (NumberLate, {}, False, r"num_workers beside id.*got id alone"),
        (SeededUncut, {}, False, "the same rows to the same share"),
        (SeededUncut, {"persistent_workers": True}, False, "the same rows to the same share"),
        (EntropyUncut, {}, False, "the same rows to the same share"),
        (AskedInVain, {}, False, "other rows in each worker that reads AskedInVain, got the same ones in worker 0 of"),
        (AskedInVain, {"persistent_workers": True}, False, "other rows in each worker that reads AskedInVain"),
        (GraphsInVain, {"collate_fn": list}, False, "other rows in each worker that reads GraphsInVain"),
        (Plain, {}, True, "other rows in each worker that reads Plain"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("part_rows", [1, 6])
def test_rows_that_would_be_lost_or_doubled_are_refused(strategy, kind, settings, is_sharded, message, part_rows):
    if kind in (CutLate, NumberLate):
        part_rows = 6  # workers raise: in the first part of all, or a rank would wait for one that has ended
    loader = DataLoader(kind(), part_rows * strategy.num_replicas_in_sync, num_workers=2, **settings)
    batches = strategy.experimental_distribute_dataset(loader, is_sharded=is_sharded)
    if settings.get("persistent_workers"):
        next(iter(batches))  # a peek
    with pytest.raises(DataError, match=message) as caught:
        list(batches)
    assert "\n" not in str(caught.value)


class CutByEpoch(Plain):
    """Counts its passes by itself, and shuffles and cuts by that."""

    epoch = 0

    def numbers(self):
        self.epoch += 1
        rows = list(range(self.n_rows))
        random.Random(self.epoch).shuffle(rows)
        info = get_worker_info()
        return rows[info.id :: info.num_workers]


class Headers(CutByWorker):
    """Files that begin with the same two lines."""

    def numbers(self):
        return [-1, -2, *super().numbers()]


class Noise(Plain):
    """Rows that are made at random, as many as there are workers."""

    def __iter__(self):
        for _ in range(48 // get_worker_info().num_workers):
            yield torch.rand(1), 0


class CutNoise(CutByWorker):
    """Rows of one leaf that nobody can repeat."""

    def __iter__(self):
        for row in self.numbers():
            yield torch.tensor([row + np.random.default_rng().random() / 2]), row


@pytest.mark.parametrize("part_rows", [1, 6])
@pytest.mark.parametrize("kind", [CutByEpoch, Headers, Noise, CutNoise])
def test_what_is_right_is_not_refused(comm, strategy, kind, part_rows):
    batches = strategy.experimental_distribute_dataset(DataLoader(kind(), part_rows * comm.size, num_workers=2))
    rows, parts = rows_of_pass(comm, batches)
    if kind is Noise:
        noise = sum(sum(comm.allgather([noise for noise, _ in parts]), []), [])
        assert len(set(noise)) == 48 // (2 * comm.size) * 2 * comm.size
        return
    assert sorted(row for row in rows if row >= 0) == list(range(N_ROWS))


class RandomLeaf(Plain):
    """Adds noise that no seed of the libraries repeats."""

    def __iter__(self):
        noise = np.random.default_rng()
        for row in range(self.n_rows):
            yield torch.tensor([noise.random()]), row


def test_noise_from_elsewhere_does_not_count_as_another_row(comm, strategy):
    batches = strategy.experimental_distribute_dataset(DataLoader(RandomLeaf(), 6, num_workers=2))
    assert sorted(rows_of_pass(comm, batches)[0]) == list(range(N_ROWS))


@pytest.mark.parametrize("n_rows", [0, 1, 3])
def test_fewer_rows_than_workers(comm, strategy, n_rows):
    batches = strategy.experimental_distribute_dataset(DataLoader(CutByWorker(n_rows), 6, num_workers=3))
    for _ in range(2):
        parts = [(noise.shape, rows.dtype, rows.tolist()) for noise, rows in batches]
        rows = sum((part[2] for part in sum(comm.allgather(parts), [])), [])
        assert sorted(rows) == list(range(n_rows))
        for shape, dtype, _ in parts:
            assert (shape[1:], dtype) == ((1,), torch.int64)


def test_a_rank_without_any_row_has_the_form_of_anothers_parts(comm, strategy):
    dataset = CutByRankAndWorker(0, 1, 8 if comm.rank == 0 else 0)
    loader = DataLoader(dataset, 2 * comm.size, num_workers=1)
    parts = list(strategy.experimental_distribute_dataset(loader, is_sharded=True))
    assert [tuple(noise.shape) for noise, _ in parts] == [(2 if comm.rank == 0 else 0, 1)] * 4
    assert {rows.dtype for _, rows in parts} == {torch.int64}


def test_whole_parts_alone_with_drop_last(comm, strategy):
    loader = DataLoader(Plain(), 6 * comm.size, num_workers=2, drop_last=True)
    _, parts = rows_of_pass(comm, strategy.experimental_distribute_dataset(loader))
    assert {len(rows) for _, rows in parts} == {6}
    assert len(set(comm.allgather(len(parts)))) == 1


@pytest.mark.parametrize(
    ("kind", "context", "n_used"),
    [*itertools.product([Shuffled, ShuffledUncut], [NEW, KEPT], [0, 3]), (Shuffled, KEPT | FORKSERVER, 3)],
    ids=name_of,
)
def test_a_restart_goes_on_with_the_same_rows_and_random_numbers(comm, strategy, kind, context, n_used):
    def distribute():
        return strategy.experimental_distribute_dataset(DataLoader(kind(), 6, num_workers=2, **context))

    unbroken = distribute()
    list(unbroken)
    iterator = iter(unbroken)
    for _ in range(n_used):
        next(iterator)
    state = unbroken.state_dict()
    expected = [(noise.tolist(), rows.tolist()) for noise, rows in iterator]
    resumed = distribute()
    resumed.load_state_dict(state)
    assert [(noise.tolist(), rows.tolist()) for noise, rows in resumed] == expected
    following = [(noise.tolist(), rows.tolist()) for noise, rows in unbroken]
    assert [(noise.tolist(), rows.tolist()) for noise, rows in resumed] == following != expected


class OwnSeed(CutByWorker):
    """Draws noise by the seed of the worker, and by the libraries' numbers."""

    def __iter__(self):
        noise = random.Random(get_worker_info().seed)
        for values, row in super().__iter__():
            yield values + noise.random() + torch.rand(1) + torch.initial_seed() % 1000, row


def test_the_seed_of_a_worker_is_that_of_the_pass_after_a_restart(strategy):
    def distribute():
        return strategy.experimental_distribute_dataset(DataLoader(OwnSeed(), 6, num_workers=2))

    unbroken = distribute()
    list(unbroken)
    state = unbroken.state_dict()
    resumed = distribute()
    resumed.load_state_dict(state)
    expected = [noise.tolist() for noise, _ in unbroken]
    assert [noise.tolist() for noise, _ in resumed] == expected
    assert [noise.tolist() for noise, _ in unbroken] != expected


def test_few_files_are_spread_over_the_ranks(comm, strategy):
    class Files(Plain):
        def __iter__(self):
            info = get_worker_info()
            for file in range(info.id, comm.size, info.num_workers):
                for row in range(8):
                    yield torch.zeros(1), 8 * file + row

    loader = DataLoader(Files(), 4 * comm.size, num_workers=2, drop_last=True)
    rows, _ = rows_of_pass(comm, strategy.experimental_distribute_dataset(loader))
    assert sorted(rows) == list(range(8 * comm.size))


def test_a_pass_in_which_nothing_would_be_read_is_refused(comm, strategy):
    loader = DataLoader(CutByWorker(4), 4 * comm.size, num_workers=1, drop_last=True)
    batches = strategy.experimental_distribute_dataset(loader)
    if comm.size == 1:
        assert len(list(batches)) == 1
    else:
        assert list(batches) == []  # no rank has a whole part
    lonely = DataLoader(
        CutByRank(comm.rank, comm.size, 8 if comm.rank == 0 else 0), 2 * comm.size, num_workers=1, drop_last=True
    )
    batches = strategy.experimental_distribute_dataset(lonely, is_sharded=True)
    if comm.size == 1:
        assert len(list(batches)) == 4
        return
    with pytest.raises(DataError, match="expected a whole part for each replica in the first step"):
        list(batches)


@pytest.mark.parametrize("kind", [Plain, CutByWorker])
def test_weights_are_those_of_one_process_by_counts_that_travel(comm, strategy, kind):
    """Ranks have different numbers of rows at most steps, which only they know."""
    torch.manual_seed(3)
    with strategy.scope():
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    alone = torch.nn.Linear(1, 1).double()
    alone.load_state_dict(model.state_dict())
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=1e-3)
    loader = DataLoader(kind(), 6, num_workers=2)
    for values, _ in strategy.experimental_distribute_dataset(loader):
        optimizer.zero_grad()
        model(values.double()).square().mean().backward()
        optimizer.step()
        whole = torch.tensor(sum(comm.allgather(values.double().tolist()), []), dtype=torch.float64)
        optimizer_alone.zero_grad()
        alone(whole).square().mean().backward()
        optimizer_alone.step()
    for weight, expected, first in zip(model.parameters(), alone.parameters(), start, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
        assert not torch.equal(weight, first)


@pytest.mark.parametrize(
    ("name", "settings", "other"),
    [
        ("num_workers", {"num_workers": 1}, {}),
        ("part_rows", {"batch_size": 12}, {}),
        ("drop_last", {"drop_last": True}, {}),
        ("is_sharded", {}, {"is_sharded": True}),
        ("ranks", {}, {}),
    ],
)
def test_a_restart_that_cuts_otherwise_is_refused(strategy, name, settings, other):
    def distribute(is_sharded=False, **settings):
        loader = DataLoader(Plain(), **{"batch_size": 6, "num_workers": 2, **settings})
        return strategy.experimental_distribute_dataset(loader, is_sharded=is_sharded)

    state = distribute().state_dict()
    if name == "ranks":
        state["ranks"] += 1
    with pytest.raises(DataError, match=f"expected {name}=.* as in the checkpoint, got"):
        distribute(**settings, **other).load_state_dict(state)


def test_batches_of_the_dataset_itself_are_refused(strategy):
    with pytest.raises(DataError, match="expected a batch_size of the DataLoader over Plain, got none"):
        strategy.experimental_distribute_dataset(DataLoader(Plain(), None, num_workers=2))


def raise_in_init(worker):
    raise KeyError("no such shard")


@pytest.mark.parametrize("dataset", [Plain(), list(range(60))], ids=["stream", "items"])
def test_a_worker_init_fn_that_raises_is_one_line(strategy, dataset, capfd):
    loader = DataLoader(dataset, 6, num_workers=2, worker_init_fn=raise_in_init)
    batches = strategy.experimental_distribute_dataset(loader)
    with pytest.raises(
        DataError, match=r"worker_init_fn to return in worker \d, got KeyError: 'no such shard'"
    ) as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    assert "raise KeyError" in capfd.readouterr().err


def test_what_a_stream_says_before_it_is_read(strategy):
    batches = strategy.experimental_distribute_dataset(DataLoader(Plain(), 6, num_workers=2))
    assert [spec.dtype for spec in batches.element_spec] == [torch.float32, torch.int64]
    with pytest.raises(TypeError):
        len(batches)
