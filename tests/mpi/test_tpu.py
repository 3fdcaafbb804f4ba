"""TPUStrategy: without torch_xla the error, with it (PJRT_DEVICE=CPU will do) the strategy."""

import sys

import pytest
import torch

import hpcdist
from hpcdist.errors import ConfigurationError, UsageError

pytestmark = pytest.mark.mpi


@pytest.mark.feature("tf.tpustrategy-resolver-connect", "strategies.tpu-strategy")
@pytest.mark.parametrize(
    "call",
    [hpcdist.TPUStrategy, lambda: hpcdist.TPUStrategy(hpcdist.TPUClusterResolver()), hpcdist.initialize_tpu_system],
)
def test_without_torch_xla(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigurationError, match=r"torch_xla.*'torch_xla\[tpu\]'") as e:
        call()
    assert "\n" not in str(e.value)


@pytest.mark.feature("tf.tpustrategy-resolver-connect", "strategies.tpu-strategy")
def test_there_is_nothing_to_connect_to():
    assert hpcdist.experimental_connect_to_cluster(hpcdist.TPUClusterResolver("local")) is None
    assert hpcdist.experimental_connect_to_cluster(hpcdist.ClusterSpec({"worker": ["a"]})) is None
    with pytest.raises(UsageError, match="ClusterSpec.*ClusterResolver.*str"):
        hpcdist.experimental_connect_to_cluster("local")


@pytest.mark.feature("tf.tpustrategy-resolver-connect", "strategies.tpu-strategy")
def test_models_train_on_xla_devices(comm):
    pytest.importorskip("torch_xla")
    strategy = hpcdist.TPUStrategy(hpcdist.TPUClusterResolver("local"))
    assert strategy.num_replicas_in_sync == comm.size
    assert strategy.extended.worker_devices[0].startswith("xla:")
    with strategy.scope():
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert model.weight.device.type == "xla"

    def step():
        x = torch.full((1, 2), comm.rank + 1.0)
        assert x.device.type == "xla"
        hpcdist.compute_average_loss(model(x).sum(1), global_batch_size=comm.size).backward()
        optimizer.step()

    strategy.run(step)
    mean = (comm.size + 1) / 2
    assert model.weight.grad.tolist() == [[mean, mean]]
    assert model.weight.tolist() == [[1 - mean / 2] * 2]
    assert strategy.reduce("sum", torch.ones(2, device=model.weight.device), axis=None).tolist() == [comm.size] * 2


def test_random_numbers_are_keyed_by_step(make_linear):
    pytest.importorskip("torch_xla")
    strategy = hpcdist.TPUStrategy(gradient_op="sum")
    model, optimizer = make_linear(strategy, 2, 0.0)

    def step():
        optimizer.zero_grad()
        noise = torch.rand(2)
        model(noise).sum().backward()
        optimizer.step()
        return noise.tolist()

    strategy.run(step)
    state = strategy.state_dict()
    first = strategy.run(step)
    second = strategy.run(step)
    strategy.load_state_dict(state)
    assert [strategy.run(step), strategy.run(step)] == [first, second]
    assert first != second


@pytest.mark.feature("strategies.tpu-strategy")
def test_weights_are_those_of_the_host():
    pytest.importorskip("torch_xla")
    rows = torch.randn(16, 600, generator=torch.Generator().manual_seed(2))

    def train(strategy, start=None):
        with strategy.scope():
            layers = torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 2)
            model = torch.nn.Sequential(*layers)  # the first gradient is of more than 1 MiB
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if start is not None:
            model.load_state_dict(start)
        start = {name: value.cpu().clone() for name, value in model.state_dict().items()}

        def step():
            optimizer.zero_grad()
            place = hpcdist.get_replica_context().replica_id_in_sync_group
            local_rows = rows[place :: strategy.num_replicas_in_sync].to(model[0].weight.device)
            hpcdist.compute_average_loss((model(local_rows) ** 2).sum(1), global_batch_size=16).backward()
            optimizer.step()

        strategy.run(step)
        strategy.run(step)
        return start, {name: value.cpu() for name, value in model.state_dict().items()}

    start, ours = train(hpcdist.TPUStrategy())
    host_weights = train(hpcdist.MultiWorkerMirroredStrategy(), start)[1]
    del host_weights["1.running_var"]  # XLA divides by n where torch divides by n - 1
    assert all(torch.allclose(ours[name], host_weights[name], rtol=1e-3, atol=1e-4) for name in host_weights)
    assert not torch.allclose(ours["0.weight"], start["0.weight"], rtol=1e-3, atol=1e-4)
