"""Inputs on real ranks: uneven parts, ends that differ, datasets from a function, and what is agreed on."""

import itertools
import random
import sys

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import DataError
from hpcdist.runtime import worker_start

pytestmark = pytest.mark.mpi


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy()


def raised_everywhere(comm, function):
    """Return the text of the DataError that every rank raises alike."""
    with pytest.raises(DataError) as raised:
        function()
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert raised.value.is_agreed
    return str(raised.value)


def uneven(number, comm):
    rng = random.Random(number)
    rows = rng.choice([1, 2, rng.randint(1, 30)])
    batch = rng.randint(1, 3 * comm.size)
    return rows, batch, rng.random() < 0.3, rng.randint(0, 9)


@pytest.mark.feature(
    "tf.replicas-empty-part",
    "tf.without-drop-remainder",
    "input.zero-weight-participation",
    "input.gather-without-duplicates",
    "evaluation.multi-node-evaluator",
)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_uneven_inputs_every_sample_once_and_exact_metrics(strategy, comm, first):
    for number in range(first, first + 10):
        rows, batch, is_dropping, seed = uneven(number, comm)
        values = torch.arange(rows, dtype=torch.float64) + 0.5
        dataset = hpcdist.Dataset.from_tensor_slices(values).shuffle(seed=seed).batch(batch, is_dropping)
        whole = [part.tolist() for part in dataset]
        total = 0.0
        means = []
        for part in strategy.experimental_distribute_dataset(dataset):
            total += strategy.reduce("sum", part, axis=0).item()
            means.append(strategy.reduce("mean", part, axis=0).item())
        assert total == sum(map(sum, whole)), number
        assert means == pytest.approx(list(map(np.mean, whole)), rel=1e-15), number


@pytest.mark.feature("tf.replicas-empty-part", "input.zero-weight-participation", "complaints.last-uneven-batch")
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_gradients_of_uneven_parts_are_those_of_the_global_batch(comm, op):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=op)
    with strategy.scope():
        model = torch.nn.Linear(3, 1).double()
    x = torch.arange(21, dtype=torch.float64).reshape(7, 3)
    distributed = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(x).batch(4))

    def step(part):
        model.zero_grad()
        total = model(part).square().sum()
        share = len(whole) if op == "SUM" else max(len(part), 1)
        (total / share).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for whole, part in zip([x[:4], x[4:]], distributed, strict=True):
        grads = strategy.run(step, args=(part,))
        expected = torch.autograd.grad(model(whole).square().mean(), list(model.parameters()))
        torch.testing.assert_close(grads, list(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_parts_of_several_replicas_on_a_rank(comm, op):
    n_replicas = 2 * comm.size + 1
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op=op)
    with strategy.scope():
        model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    alone = torch.nn.Linear(3, 1).double()
    x = torch.arange(42, dtype=torch.float64).reshape(14, 3) / 42
    dataset = hpcdist.Dataset.from_tensor_slices((x, x[:, 0])).batch(9)
    grads = []

    def step(part, first):
        assert first.tolist() == part[:, 0].tolist()
        optimizer.zero_grad()
        share = len(whole) if op == "SUM" else max(len(part), 1)
        (model(part).square().sum() / share).backward()
        grads[:] = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        return part.sum(0)

    for whole, parts in zip([x[:9], x[9:]], strategy.experimental_distribute_dataset(dataset), strict=True):
        assert isinstance(parts[0], hpcdist.PerReplica)
        total = strategy.reduce("sum", strategy.run(step, args=parts), axis=None)
        torch.testing.assert_close(total, whole.sum(0))
        alone.load_state_dict(model.state_dict())
        expected = torch.autograd.grad(alone(whole).square().mean(), list(alone.parameters()))
        torch.testing.assert_close(grads, list(expected), rtol=1e-12, atol=0)


@pytest.mark.feature("input.datasets-from-function", "input.input-options")
@pytest.mark.parametrize("mode", hpcdist.InputReplicationMode)
def test_datasets_from_a_function_for_several_replicas_on_a_rank(comm, mode):
    n_replicas = 2 * comm.size
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas)
    options = hpcdist.InputOptions(experimental_replication_mode=mode)

    def dataset_fn(context):
        rows = hpcdist.Dataset.from_tensor_slices(torch.arange(3 * n_replicas + 1))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(
            context.get_per_replica_batch_size(2 * n_replicas)
        )

    distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
    local_rows = []
    for step in distributed:
        assert len(step.values) == 2
        for part in step.values:
            local_rows += part.tolist()
    seen = comm.allreduce(local_rows)
    assert sorted(seen) == list(range(3 * n_replicas + 1))


@pytest.mark.feature("tf.next-ends-all", "semantics.end-of-data")
def test_a_dataset_without_batches_ends_everywhere(strategy):
    rows = hpcdist.Dataset.from_tensor_slices(torch.ones(0, 3))
    few = hpcdist.Dataset.from_tensor_slices(torch.ones(2, 3)).batch(4, drop_remainder=True)
    for nothing in (rows.batch(4), few, few.repeat()):
        iterator = iter(strategy.experimental_distribute_dataset(nothing))
        assert not iterator.get_next_as_optional().has_value()


@pytest.mark.feature("tf.replicas-empty-part", "semantics.splitting-of-batches")
def test_one_row_is_enough_for_all_replicas(strategy, comm):
    dataset = hpcdist.Dataset.from_tensor_slices((np.ones((1, 3), np.float32), np.ones(1))).batch(8)
    ((x, y),) = strategy.experimental_distribute_dataset(dataset)
    assert x.shape == (int(comm.rank == 0), 3)
    assert y.shape == (int(comm.rank == 0),)


def own_rows(comm, n_rows):
    """Return a dataset function for `n_rows` rows per rank, batches of 2."""

    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (comm.size, comm.rank)
        assert context.num_replicas_in_sync == comm.size
        rows = hpcdist.Dataset.from_tensor_slices(torch.full((n_rows, 3), float(comm.rank)))
        return rows.batch(context.get_per_replica_batch_size(2 * comm.size))

    return dataset_fn


@pytest.mark.feature(
    "tf.next-ends-all",
    "tf.get-next-optional",
    "input.datasets-from-function",
    "input.input-context",
    "input.join-of-uneven-inputs",
    "semantics.end-of-data",
    "complaints.last-uneven-batch",
)
@pytest.mark.parametrize("is_shortest_first", [True, False])
def test_datasets_from_a_function_end_together(strategy, comm, is_shortest_first):
    if is_shortest_first:
        place = comm.rank
    else:
        place = comm.size - 1 - comm.rank
    distributed = strategy.distribute_datasets_from_function(own_rows(comm, 1 + 2 * place))
    for _ in range(2):
        parts = list(distributed)
        assert list(map(len, parts)) == [2] * place + [1] + [0] * (comm.size - 1 - place)
        assert all(part.shape[1:] == (3,) for part in parts)
    iterator = iter(distributed)
    values = [iterator.get_next_as_optional().has_value() for _ in range(comm.size + 1)]
    assert values == [True] * comm.size + [False]


@pytest.mark.feature("input.join-of-uneven-inputs")
def test_ranks_out_of_data_take_part_in_the_mean_with_weight_zero(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="MEAN")
    with strategy.scope():
        model = torch.nn.Linear(3, 1, bias=False)
    distributed = strategy.distribute_datasets_from_function(own_rows(comm, 1 + 2 * comm.rank))
    for step, part in enumerate(distributed):
        model.zero_grad()
        (model(part).sum() / max(len(part), 1)).backward()
        lengths = [min(2, max(0, 1 + 2 * rank - 2 * step)) for rank in range(comm.size)]
        mean = sum(rank * length for rank, length in enumerate(lengths)) / sum(lengths)
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), mean))


def test_the_seed_of_a_function_is_the_chiefs(strategy, comm):
    rows = hpcdist.Dataset.from_tensor_slices(np.arange(30))
    distributed = strategy.distribute_datasets_from_function(lambda context: rows.shuffle().batch(30))
    assert len(set(comm.allgather(distributed.state_dict()["seed"]))) == 1
    assert len(set(map(tuple, comm.allgather(next(iter(distributed)).tolist())))) == comm.size


def test_a_function_that_fails_on_one_rank_fails_on_all(strategy, comm, tmp_path):
    def dataset_fn(context):
        if comm.rank == comm.size - 1:
            return hpcdist.Dataset.from_hdf5(str(tmp_path / "missing.h5"), "x").batch(2)
        return hpcdist.Dataset.from_tensor_slices(np.ones(3)).batch(2)

    text = raised_everywhere(comm, lambda: strategy.distribute_datasets_from_function(dataset_fn))
    assert "expected an HDF5 file" in text


def test_a_generator_that_ends_early_on_one_rank_is_an_error_on_all(strategy, comm):
    if comm.size == 1:
        pytest.skip("needs 2 ranks")
    n_rows = 8 if comm.rank else 5
    dataset = hpcdist.Dataset.from_generator(lambda: range(n_rows)).batch(4).prefetch(1)
    distributed = iter(strategy.experimental_distribute_dataset(dataset))
    next(distributed)
    assert "got global batches of 1 to 4 rows at one step" in raised_everywhere(comm, lambda: next(distributed))


def test_generators_are_divided_and_restarted(strategy, comm):
    dataset = hpcdist.Dataset.from_generator(lambda: range(7)).shuffle(4).batch(3).repeat(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    with torch.no_grad():  # else the parts may wait for a step, in a strategy that has optimizers
        first = [next(iterator).tolist() for _ in range(2)]
    after = strategy.experimental_distribute_dataset(dataset)
    after.load_state_dict(distributed.state_dict())
    local_batches = first + [part.tolist() for part in after]
    rows = sum(itertools.chain.from_iterable(zip(*comm.allgather(local_batches), strict=True)), [])
    assert sorted(rows[:7]) == sorted(rows[7:]) == list(range(7))


@pytest.mark.feature("tf.auto-data-experimental", "input.hdf5-source")
def test_hdf5_files_are_read_in_one_global_order(strategy, comm, shared_path):
    if comm.rank == 0:
        for number in range(3):
            with h5py.File(shared_path / f"{number}.h5", "w") as file:
                file["x"] = np.arange(number * 5, number * 5 + 5)
    comm.Barrier()
    rows = hpcdist.Dataset.from_hdf5(str(shared_path / "*.h5"), "x")
    dataset = rows.shuffle(seed=2).batch(4).prefetch(2)
    parts = [part.tolist() for part in strategy.experimental_distribute_dataset(dataset)]
    steps = [sum(step, []) for step in zip(*comm.allgather(parts), strict=True)]
    assert steps == [batch.tolist() for batch in dataset]
    comm.Barrier()


def test_policies_must_be_those_of_the_chief(strategy, comm):
    if comm.size == 1:
        pytest.skip("needs 2 ranks")
    options = hpcdist.Options()
    if comm.rank:
        options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy.OFF
    dataset = hpcdist.Dataset.from_tensor_slices(np.arange(4)).batch(2).with_options(options)
    assert "AutoShardPolicy.OFF" in raised_everywhere(comm, lambda: strategy.experimental_distribute_dataset(dataset))


@pytest.mark.feature("complaints.fork-after-mpi")
@pytest.mark.parametrize("has_rdma", [False, True])
def test_workers_are_forked_only_where_mpi_uses_no_card_for_rdma(strategy, comm, has_rdma, monkeypatch, tmp_path):
    (tmp_path / "class" / "infiniband").mkdir(parents=True)
    if has_rdma:
        (tmp_path / "class" / "infiniband" / "mlx5_0").mkdir()
    monkeypatch.setattr(worker_start, "_SYS", tmp_path)
    worker_start.is_fork_safe.cache_clear()
    loader = torch.utils.data.DataLoader(Modules(), 4, num_workers=1, multiprocessing_context="fork")
    distributed = strategy.experimental_distribute_dataset(loader)
    has_mpi = list(itertools.chain.from_iterable(flags.tolist() for numbers, flags in distributed))
    own_loader = torch.utils.data.DataLoader(Modules(), 4, num_workers=1, multiprocessing_context="fork")
    own_flags = torch.cat([flags for numbers, flags in own_loader]).tolist()
    worker_start.is_fork_safe.cache_clear()
    assert own_flags == [not has_rdma] * 6
    assert comm.allreduce(len(has_mpi)) == 6
    assert any(has_mpi) is (not has_rdma and bool(has_mpi))  # a fork server has no MPI


class Modules(torch.utils.data.Dataset):
    """Rows that say whether MPI runs in the process that reads them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        module = sys.modules.get("mpi4py.MPI")
        return index, bool(module and module.Is_initialized())


@pytest.mark.feature("input.distributed-sampler")
@pytest.mark.parametrize("drop_last", [False, True])
def test_samplers_divide_the_rows_of_an_epoch_among_the_ranks(comm, drop_last):
    rows = torch.utils.data.TensorDataset(torch.arange(11))
    sampler = hpcdist.DistributedSampler(rows, drop_last=drop_last)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        local_rows = rows_of(loader)
        orders.append(local_rows)
        shares = comm.allgather(local_rows)
        assert set(map(len, shares)) == {len(sampler)}
        if drop_last:
            n_rows = len(shares) * len(sampler)
        else:
            n_rows = 11
        assert len(set(itertools.chain.from_iterable(shares))) == n_rows
    assert orders[0] != orders[1]
    sampler.set_epoch(1, n_used=2)  # as after a restart
    assert rows_of(loader) == orders[1][2:]
    sampler.set_epoch(1)
    assert rows_of(loader) == orders[1]


def rows_of(batches):
    """Return the rows of batches of one column, in order."""
    rows = []
    for (column,) in batches:
        rows += column.tolist()
    return rows


def test_a_loader_is_distributed_as_it_is(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    rows = torch.utils.data.TensorDataset(torch.arange(4 * comm.size))
    loader = torch.utils.data.DataLoader(rows, batch_size=2 * comm.size, shuffle=True)
    local_rows = rows_of(strategy.experimental_distribute_dataset(loader))
    assert sorted(itertools.chain.from_iterable(comm.allgather(local_rows))) == list(range(4 * comm.size))
    distributed = strategy.distribute_datasets_from_function(
        lambda context: torch.utils.data.DataLoader(rows, batch_size=2)
    )
    assert next(part.tolist() for (part,) in distributed) == [0, 1]
    with pytest.raises(DataError, match=r"batch\(global_batch\)"):
        strategy.experimental_distribute_dataset(rows)


def test_datasets_made_of_others_are_distributed_with_one_order(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    dataset = hpcdist.Dataset.range(20).shuffle(20, seed=1).filter(lambda row: row % 2 == 0).batch(3).shuffle(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        local_batches = [part.tolist() for part in distributed]
        whole = []
        for parts in zip(*comm.allgather(local_batches), strict=True):
            whole.append(sorted(itertools.chain.from_iterable(parts)))
        assert sorted(itertools.chain.from_iterable(whole)) == list(range(0, 20, 2))
