"""MirroredStrategy and CentralStorageStrategy with devices: what is made in scope and in run is there, and batches too.

A machine without GPUs has one device that computes. So torch's default device is "meta" here, where nothing has a
value, and the replicas' device is the host: what is not put there by the strategy cannot be trained. Where batches go
is looked at with the devices the other way round.
"""

import itertools
import time

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import hpcdist

pytestmark = pytest.mark.mpi
STRATEGIES = [hpcdist.MirroredStrategy, hpcdist.CentralStorageStrategy]


@pytest.fixture
def default_device():
    """Return what sets torch's default device for the test."""
    yield torch.set_default_device
    torch.set_default_device(None)


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device "meta", and of which nothing but a copy on the host has values."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="meta")

    def __init__(self, values):
        self.held = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        to = dict(kwargs or {}).pop("device", None)
        result = func(*tree_map(lambda x: x.held if isinstance(x, cls) else x, args), **(kwargs or {}))
        is_moved = to is not None and torch.device(to).type == "cpu"
        if is_moved:
            return result
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


def make_data(n_rows=10, batch=4):
    return hpcdist.Dataset.from_tensor_slices((np.ones((n_rows, 1), np.float32), np.arange(n_rows))).batch(batch)


def train(strategy):
    """Return weights after two steps, with momentum and a variable that counts; and that number."""
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps = hpcdist.Variable(0.0, aggregation="SUM")
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.5)

    def step():
        optimizer.zero_grad()
        replica_id = hpcdist.get_replica_context().replica_id_in_sync_group
        x = torch.tensor([[1.0, replica_id], [replica_id, 2.0]])
        hpcdist.compute_average_loss(model(x).square().sum(1), global_batch_size=8).backward()
        optimizer.step()
        steps.assign_add(1.0)

    strategy.run(step)
    strategy.run(step)
    return {name: value.clone() for name, value in model.state_dict().items()}, float(steps)


@pytest.mark.feature(
    "tf.mirroredstrategy-devices-what",
    "tf.centralstoragestrategy-device-everything",
    "strategies.mirrored-strategy",
    "strategies.central-storage-strategy",
    "strategies.strategy-combinations",
)
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("replicas", [None, 4])
def test_what_is_made_and_run_is_on_the_devices_given(comm, default_device, kind, replicas):
    expected, n_steps = train(kind(num_replicas=replicas))
    strategy = kind(["/cpu:0"] * comm.size, num_replicas=replicas)
    default_device("meta")
    weights, counted = train(strategy)
    assert torch.ones(1).device.type == "meta"
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert counted == n_steps == 2 * strategy.num_replicas_in_sync


@pytest.mark.feature("tf.mirroredstrategy-devices-what", "strategies.values-from-function")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_values_and_threads_of_replicas_are_there_too(comm, default_device, kind):
    strategy = kind(["cpu"] * comm.size, num_replicas=max(3, comm.size))
    default_device("meta")
    distributed_values = strategy.experimental_distribute_values_from_function(lambda of: torch.ones(1))
    parts = strategy.run(lambda tensor: (tensor + 1, torch.zeros(1)), args=(distributed_values,))
    assert {value.device.type for value in itertools.chain.from_iterable(part.values for part in parts)} == {"cpu"}
    without = hpcdist.MirroredStrategy()
    assert without.run(lambda: torch.ones(1).device.type) == "meta"
    with without.scope():
        assert torch.nn.Linear(1, 1).weight.device.type == "meta"


@pytest.mark.feature("tf.mirroredstrategy-devices-what", "input.input-options")
@pytest.mark.parametrize("replicas", [None, 3])
@pytest.mark.parametrize("fetch", [None, False])
def test_batches_are_moved_to_the_devices_given(comm, replicas, fetch):
    strategy = hpcdist.MirroredStrategy(["meta"] * comm.size, num_replicas=replicas, gradient_op="mean")
    options = hpcdist.InputOptions(experimental_fetch_to_device=fetch)
    for batches in (
        strategy.experimental_distribute_dataset(make_data(), options),
        strategy.distribute_datasets_from_function(lambda context: make_data(), options),
    ):
        local_values = []
        for part in itertools.chain.from_iterable(batches):
            local_values += strategy.experimental_local_results(part)
        kind = torch.Tensor if fetch is None else np.ndarray
        assert all(isinstance(x, kind) for x in local_values)
        assert {x.device.type for x in local_values if fetch is None} == ({"meta"} if fetch is None else set())
    assert isinstance(
        next(iter(hpcdist.MirroredStrategy().experimental_distribute_dataset(make_data())))[0], np.ndarray
    )


@pytest.mark.feature("input.input-options")
@pytest.mark.parametrize("n_ahead", [1, 3])
def test_as_many_parts_are_read_ahead_as_the_options_say(comm, n_ahead):
    """With the part that waits to be handed over, and the one on its way to the device."""
    read = []

    def rows():
        for number in range(20):
            read.append(number)
            yield np.float32(number)

    strategy = hpcdist.MirroredStrategy(["meta"] * comm.size, gradient_op="sum")
    options = hpcdist.InputOptions(experimental_fetch_to_device=True, experimental_per_replica_buffer_size=n_ahead)
    dataset = hpcdist.Dataset.from_generator(rows).batch(1)
    batches = iter(strategy.experimental_distribute_dataset(dataset, options))
    read.clear()
    next(batches)
    expected = 1 + 1 + 1 + n_ahead  # handed over, on its way, read by the thread, in the buffer
    deadline = time.monotonic() + 10
    while len(read) < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(read) == expected
    comm.Barrier()


def in_steps(dataset):
    """Return rows that are mapped to tensors where torch makes them, one by one and in whole batches."""
    return dataset.map(lambda x: torch.tensor(float(x))).batch(4).map(lambda x: (x, torch.ones(len(x))))


@pytest.mark.parametrize("fetch", [None, False])
@pytest.mark.parametrize("n_ahead", [0, 2])
@pytest.mark.parametrize("policy", ["OFF", "DATA", "HINT", "stream"])
def test_rows_are_read_on_the_host_inside_a_scope(comm, policy, n_ahead, fetch):
    rows = np.arange(8.0)
    dataset = hpcdist.Dataset.from_tensor_slices(rows)
    if policy == "HINT":
        dataset = dataset.shard(hpcdist.SHARD_HINT, hpcdist.SHARD_HINT)
    if policy == "stream":
        dataset = hpcdist.Dataset.from_generator(lambda: iter(rows))
    else:
        options = hpcdist.Options()
        options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy[policy]
        dataset = dataset.with_options(options)
    strategy = hpcdist.MirroredStrategy(["meta"] * comm.size, gradient_op="sum")
    options = hpcdist.InputOptions(experimental_fetch_to_device=fetch)
    batches = strategy.experimental_distribute_dataset(in_steps(dataset).prefetch(n_ahead), options)
    with strategy.scope():
        assert len(batches.element_spec) == 2
        fetched_columns = list(itertools.chain.from_iterable(batches))
    assert {x.device.type for x in fetched_columns} == {"meta" if fetch is None else "cpu"}


def test_text_stays_on_the_host(comm):
    strategy = hpcdist.MirroredStrategy(["meta"] * comm.size, gradient_op="sum")
    texts = np.array(["a", "b"] * comm.size)
    dataset = hpcdist.Dataset.from_tensor_slices((texts, np.arange(len(texts)))).batch(len(texts))
    text, number = next(iter(strategy.experimental_distribute_dataset(dataset)))
    assert text.tolist() == ["a", "b"]
    assert number.device.type == "meta"


def test_parts_weigh_by_their_rows_when_batches_are_moved(comm):
    """Nothing is read ahead: a backward knows the rows of the part in use."""
    strategy = hpcdist.MirroredStrategy(["meta"] * comm.size, gradient_op="mean")
    batches = iter(strategy.experimental_distribute_dataset(make_data(4 * comm.size + 2, 4 * comm.size)))
    next(batches)
    loop = strategy.world.step_flags.loop
    assert strategy.engine.sums.weights.find(0).rows == 4
    loop.begin_backward()
    loop.note_managed()
    loop.end_backward()
    assert next(batches)[0].shape[0] == strategy.engine.sums.weights.find(0).rows


@pytest.mark.feature("tf.reduce-result-lies", "semantics.reduce-over-axes")
@pytest.mark.parametrize("replicas", [None, 4])
def test_reduced_values_lie_on_the_host_or_in_a_replica_where_they_were(comm, replicas):
    strategy = hpcdist.MirroredStrategy(num_replicas=replicas, gradient_op="sum")
    n = strategy.num_replicas_in_sync
    value = OnDevice(torch.ones(2, 3))
    assert value.device.type == "meta"
    parts = strategy.run(lambda: OnDevice(torch.ones(2, 3)))
    for reduced, expected in (
        (strategy.reduce("sum", parts, axis=None), [[n] * 3] * 2),
        (strategy.reduce("mean", parts, axis=0), [1.0] * 3),
        (strategy.gather(parts, axis=0), [[1.0] * 3] * (2 * n)),
    ):
        assert type(reduced) is torch.Tensor
        assert reduced.device.type == "cpu"
        assert reduced.tolist() == expected

    def fn():
        context = hpcdist.get_replica_context()
        summed = context.all_reduce("sum", [value, torch.ones(1)])
        return [tensor.device.type for tensor in (*summed, context.all_gather(value, axis=0))] == [
            "meta",
            "cpu",
            "meta",
        ]

    assert all(strategy.experimental_local_results(strategy.run(fn)))
