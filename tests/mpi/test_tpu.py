"""TPUStrategy: without torch_xla the error, with it (PJRT_DEVICE=CPU will do) the strategy."""

import sys

import pytest
import torch

import hpcdist
from hpcdist.errors import ConfigurationError, UsageError

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    "call",
    [hpcdist.TPUStrategy, lambda: hpcdist.TPUStrategy(hpcdist.TPUClusterResolver()), hpcdist.initialize_tpu_system],
)
def test_without_torch_xla(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(
        ConfigurationError, match=r"expected torch_xla .*; install .* pip install 'torch_xla\[tpu\]'"
    ) as e:
        call()
    assert "\n" not in str(e.value)


def test_there_is_nothing_to_connect_to():
    assert hpcdist.experimental_connect_to_cluster(hpcdist.TPUClusterResolver("local")) is None
    assert hpcdist.experimental_connect_to_cluster(hpcdist.ClusterSpec({"worker": ["a"]})) is None
    with pytest.raises(UsageError, match="expected a ClusterSpec or a ClusterResolver, got str"):
        hpcdist.experimental_connect_to_cluster("local")


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
