import copy

import pytest
import torch

import hpcdist
from hpcdist.errors import ConfigurationError, GradientError, UsageError
from hpcdist.storage import host_storage

pytestmark = pytest.mark.mpi


def make_model():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)]
    layers[3].bias.requires_grad_(False)
    return torch.nn.Sequential(*layers)


def train(strategy, optimizer_class=torch.optim.Adam, steps=4):
    with strategy.scope():
        model = make_model()
        optimizer = optimizer_class(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(steps * 12, 3, generator=generator), torch.randn(steps * 12, 2, generator=generator)
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(12)

    def step(value_context):
        optimizer.zero_grad()
        x, y = value_context
        hpcdist.compute_average_loss(((model(x) - y) ** 2).sum(1), global_batch_size=12).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    n = strategy.num_replicas_in_sync
    for x, y in dataset:
        parts = strategy.experimental_distribute_values_from_function(
            lambda c, x=x, y=y: (x[c.replica_id_in_sync_group :: n], y[c.replica_id_in_sync_group :: n])
        )
        strategy.run(step, args=(parts,))
    return model, optimizer


@pytest.mark.feature(
    "tf.centralstoragestrategy-variables-once",
    "tf.optimizer-s-slots",
    "strategies.central-storage-strategy",
    "strategies.strategy-combinations",
)
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("replicas", [None, 4])
def test_weights_are_those_of_mirrored_replicas(comm, optimizer_class, replicas):
    if replicas and comm.size > replicas:
        pytest.skip("more ranks than replicas")
    central, optimizer = train(hpcdist.CentralStorageStrategy(num_replicas=replicas), optimizer_class)
    mirrored, _ = train(hpcdist.MultiWorkerMirroredStrategy(num_replicas=replicas), optimizer_class)
    expected = mirrored.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in central.state_dict().items())
    assert all(
        p.grad is None or torch.equal(p.grad, q.grad)
        for p, q in zip(central.parameters(), mirrored.parameters(), strict=True)
    )
    assert bool(optimizer.state) == (comm.rank == 0 or comm.size == 1) or optimizer_class is torch.optim.SGD


@pytest.mark.feature("tf.centralstoragestrategy-variables-once", "strategies.central-storage-strategy")
def test_all_ranks_see_the_same_memory(comm):
    model, _ = train(hpcdist.CentralStorageStrategy())
    private = copy.deepcopy(model)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model[0].weight.fill_(3.0)
            model[3].bias.fill_(4.0)
            model[1].running_mean.fill_(comm.rank + 5.0)
    comm.Barrier()
    assert model[0].weight.eq(3.0).all()
    assert model[3].bias.eq(4.0).all()
    assert not private[0].weight.eq(3.0).any()
    assert model[1].running_mean.eq(comm.size + 4.0).all() == (comm.rank == comm.size - 1)


def test_models_of_later_scopes_and_strides_are_shared_too(comm):
    strategy = hpcdist.CentralStorageStrategy(gradient_op="sum")
    train(strategy)
    with strategy.scope():
        later = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).double()
        stride = later.weight.stride()
        optimizer = torch.optim.SGD(later.parameters(), lr=0.1)
    later(torch.randn(1, 2, 5, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    comm.Barrier()
    before = later.weight.detach().clone()
    comm.Barrier()
    if comm.rank == 0:
        later.weight.data.add_(1)
    comm.Barrier()
    assert torch.equal(later.weight, before + 1)
    assert later.weight.stride() == stride


def test_parameters_on_devices_are_taken_anew_after_each_step(comm, monkeypatch):
    for module in (host_storage,):
        monkeypatch.setattr(module, "is_on_host", lambda parameter: False)
    copied, _ = train(hpcdist.CentralStorageStrategy())
    monkeypatch.undo()
    central, _ = train(hpcdist.CentralStorageStrategy())
    assert all(torch.equal(p, q) for p, q in zip(copied.parameters(), central.parameters(), strict=True))
    comm.Barrier()
    if comm.rank == 0:
        copied[0].weight.data.fill_(9.0)
    comm.Barrier()
    assert copied[0].weight.eq(9.0).all() == (comm.rank == 0)


@pytest.mark.feature("tf.centralstoragestrategy-variables-once", "strategies.central-storage-strategy")
def test_an_update_is_made_once(comm):
    strategy = hpcdist.CentralStorageStrategy()
    model, _ = train(strategy)
    before = model[0].weight.detach().clone()
    comm.Barrier()
    result = strategy.extended.update(model[0].weight, lambda v, by: v.add_(by).sum().item(), args=(2.0,))
    assert torch.equal(model[0].weight.detach(), before + 2)
    assert (result is None) == (comm.rank > 0)
    local_tensor = torch.zeros(1)
    strategy.extended.update(local_tensor, lambda v: v.add_(1))
    assert local_tensor.item() == 1


def test_weights_that_were_moved_are_refused(comm):
    if comm.size == 1:
        pytest.skip("one rank shares nothing")
    model, optimizer = train(hpcdist.CentralStorageStrategy())
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(GradientError, match="'0.weight'"):
        optimizer.step()


def test_a_closure_is_refused_where_others_step(comm, make_linear):
    if comm.size == 1:
        pytest.skip("one rank steps itself")
    strategy = hpcdist.CentralStorageStrategy(gradient_op="sum")
    model, optimizer = make_linear(strategy, 1, 0.1)

    def closure():
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        return loss

    optimizer.zero_grad()
    if comm.rank == 0:
        optimizer.step(closure)
        return
    with pytest.raises(GradientError, match="without a closure"):
        optimizer.step(closure)
    strategy.engine.managed.storage.end_change(list(model.parameters()))  # the chief waits


@pytest.mark.feature("tf.centralstoragestrategy-device-everything")
def test_devices_are_those_of_the_ranks(comm):
    strategy = hpcdist.CentralStorageStrategy(["/cpu:0"] * comm.size, "/cpu:0")
    assert strategy.num_replicas_in_sync == comm.size
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices == ("cpu",)
    with pytest.raises(ConfigurationError, match="parameter_device.*'cpu'.*'/gpu:0'"):
        hpcdist.CentralStorageStrategy(["/cpu:0"] * comm.size, "/gpu:0")
    if comm.size == 1:  # several names of the host are as many replicas of one process
        assert hpcdist.CentralStorageStrategy(["/cpu:0", "/cpu:1"]).num_replicas_in_sync == 2
    else:
        with pytest.raises(ConfigurationError, match="CentralStorageStrategy.*rank"):
            hpcdist.CentralStorageStrategy(["/cpu:0"] * (comm.size + 1))
    with pytest.raises(ConfigurationError, match="CentralStorageStrategy.*cuda.*process"):
        hpcdist.CentralStorageStrategy([f"/gpu:{77 + rank}" for rank in range(comm.size)])


def test_several_hosts_are_for_another_strategy(monkeypatch):
    world = hpcdist.MirroredStrategy().world
    monkeypatch.setattr(world, "n_hosts", 2)
    with pytest.raises(ConfigurationError, match="2.*MultiWorkerMirroredStrategy"):
        hpcdist.CentralStorageStrategy()


WRITES = {"counted": lambda weight: weight.mul_(0.5), "past torch's counter": lambda weight: weight.data.mul_(0.5)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_in_run_is_refused(comm, write):
    """The ranks of a host have one copy, which each of them would write to."""
    strategy = hpcdist.CentralStorageStrategy()
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(has_written):
        optimizer.zero_grad()
        hpcdist.compute_average_loss(model(torch.ones(2, 3)).square().sum(1), global_batch_size=2).backward()
        optimizer.step()
        if has_written:
            with torch.no_grad():
                write(model.weight)

    for _ in range(2):
        strategy.run(step, args=(False,))
    if comm.size == 1:
        strategy.run(step, args=(True,))
        return
    with pytest.raises(UsageError, match=r"run.*replicas.*parameter"):
        strategy.run(step, args=(True,))
