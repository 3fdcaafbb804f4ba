"""SyncBatchNorm: what torch's BatchNorm makes of the whole batch, in parts of any length on all replicas."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import hpcdist

pytestmark = pytest.mark.mpi

N_ROWS = 10
N_CHANNELS = 3
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(params=[None, 4, 6])
def strategy(request):
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=request.param, gradient_op="sum")


def batch(n_dims, offset=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n_dims)
    shape = (N_ROWS, N_CHANNELS, 4, 3, 2)[:n_dims]
    return torch.randn(shape, generator=generator).to(dtype) * 3 + offset, torch.randn(shape, generator=generator)


def own_part():
    """Return a replica's rows: none on the first of several, most on the last."""
    replica = hpcdist.get_replica_context()
    n = replica.num_replicas_in_sync
    number = replica.replica_id_in_sync_group
    return slice(N_ROWS * number**2 // n**2, N_ROWS * (number + 1) ** 2 // n**2)


def whole(old, rows, direction):
    """Return output, gradient of the rows, of weight and of bias, of torch's own layer."""
    rows = rows.clone().requires_grad_()
    output = old(rows)
    (output * direction).sum().backward()
    return [output.detach(), rows.grad, *(parameter.grad for parameter in old.parameters())]


def in_parts(strategy, new, rows, direction):
    def step():
        part = own_part()
        local_rows = rows[part].clone().requires_grad_()
        output = new(local_rows)
        (output * direction[part]).sum().backward()
        return output.detach(), local_rows.grad, [parameter.grad.clone() for parameter in new.parameters()]

    output, gradient, parameters = strategy.run(step)
    first = [strategy.experimental_local_results(parameter)[0] for parameter in parameters]
    return [strategy.gather(output, 0), strategy.gather(gradient, 0), *first]


def make(strategy, **options):
    torch.manual_seed(0)
    with strategy.scope():
        new = hpcdist.SyncBatchNorm(N_CHANNELS, **options)
        if new.affine:
            nn.init.uniform_(new.weight)
            nn.init.uniform_(new.bias)
    return new


def make_old(new, n_dims, **options):
    old = KINDS[n_dims](N_CHANNELS, **options)
    old.load_state_dict(new.state_dict())
    return old.train(new.training)


@pytest.mark.feature("tf.moving-statistics-those", "collectives.sync-batch-norm")
@pytest.mark.parametrize("n_dims", [2, 3, 4, 5])
def test_it_is_torchs_of_the_whole_batch(strategy, n_dims):
    new = make(strategy)
    old = make_old(new, n_dims)
    (rows, direction) = batch(n_dims)
    for _ in range(2):
        old.zero_grad()
        new.zero_grad()
        for part, expected in zip(in_parts(strategy, new, rows, direction), whole(old, rows, direction), strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=2e-5)
    for name, expected in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    new.eval()
    old.eval()
    output = strategy.experimental_local_results(strategy.run(lambda: new(rows)))[0]
    torch.testing.assert_close(output, old(rows), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_options(strategy, options):
    new = make(strategy, **options)
    old = make_old(new, 2, **options)
    (rows, direction) = batch(2)
    if options.get("affine") is False:
        assert not list(new.parameters())
        outputs = strategy.gather(strategy.run(lambda: new(rows[own_part()])), 0)
        torch.testing.assert_close(outputs, old(rows), rtol=1e-5, atol=1e-5)
    else:
        for _ in range(3):
            gathered = in_parts(strategy, new, rows, direction)
            torch.testing.assert_close(gathered[0], whole(old, rows, direction)[0], rtol=1e-5, atol=1e-5)
    for name, expected in old.state_dict().items():
        if name not in ("weight", "bias"):
            torch.testing.assert_close(new.state_dict()[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_large_mean_does_not_drown_the_variance(strategy):
    new = make(strategy)
    rows, direction = batch(2, offset=1e5, dtype=torch.float64)
    expected = whole(make_old(new, 2).double(), rows, direction.double())[0].float()
    outputs = strategy.gather(strategy.run(lambda: new(rows[own_part()].float()).detach()), 0)
    torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(strategy, dtype):
    new = make(strategy)
    (rows, _) = batch(2, dtype=dtype)
    new = new.double() if dtype is torch.float64 else new
    outputs = strategy.gather(strategy.run(lambda: new(rows[own_part()]).detach()), 0)
    assert outputs.dtype is dtype
    expected = make_old(new, 2).double()(rows.double())
    torch.testing.assert_close(outputs.double(), expected, rtol=2e-2, atol=2e-2)


def test_it_has_the_same_bits_on_any_number_of_ranks():
    """The sums of four parts of two rows, added as ((0 + 1) + (2 + 3)) in float64, say what the bits are."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=4, gradient_op="sum")
    new = make(strategy, affine=False)
    rows = batch(2)[0][:8]
    parts = rows.double().view(4, 2, N_CHANNELS)
    sums = [torch.cat([part.sum(0), (part * part).sum(0)]) for part in parts]
    mean, of_squares = (((sums[0] + sums[1]) + (sums[2] + sums[3])) / 8).chunk(2)
    scale = torch.rsqrt(of_squares - mean * mean + new.eps).float()
    expected = (rows - mean.float()) * scale

    def step():
        number = hpcdist.get_replica_context().replica_id_in_sync_group
        return new(rows[2 * number : 2 * number + 2])

    assert torch.equal(strategy.gather(strategy.run(step), 0), expected)


@pytest.mark.feature("collectives.sync-batch-norm")
def test_a_model_is_trained_as_by_one_process(strategy, comm):
    with strategy.scope():
        model = hpcdist.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, _ = batch(2)
    plain_model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    strategy.run(lambda: model.eval()(rows))  # made equal at first use
    plain_model.load_state_dict(model.state_dict())
    one_optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    model.train()

    def step():
        optimizer.zero_grad()
        (model(rows[own_part()]).square().sum() / N_ROWS).backward()
        optimizer.step()

    for _ in range(4):
        strategy.run(step)
        one_optimizer.zero_grad()
        (plain_model(rows).square().sum() / N_ROWS).backward()
        one_optimizer.step()
    for name, expected in plain_model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    bits = comm.allgather(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    assert len(set(bits)) == 1


def test_a_bare_loop_on_one_replica_per_rank(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    new = make(strategy)
    (rows, direction) = batch(2)
    output, gradient, *_ = whole(make_old(new, 2), rows, direction)
    part = slice(N_ROWS * comm.rank // comm.size, N_ROWS * (comm.rank + 1) // comm.size)
    local_rows = rows[part].clone().requires_grad_()
    local_output = new(local_rows)
    (local_output * direction[part]).sum().backward()
    torch.testing.assert_close(local_output.detach(), output[part], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(local_rows.grad, gradient[part], rtol=1e-5, atol=1e-5)


def test_where_it_is_called(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=2 * comm.size)
    new = make(strategy)
    with pytest.raises(RuntimeError, match="strategy.run.*2"):
        new(torch.ones(2, N_CHANNELS))
    second_strategy = hpcdist.MultiWorkerMirroredStrategy()
    with pytest.raises(RuntimeError, match="mixing"):
        second_strategy.run(lambda: new(torch.ones(2, N_CHANNELS)))
    assert new.eval()(torch.ones(2, N_CHANNELS)).shape == (2, N_CHANNELS)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 4, 3)])
def test_refuses_other_shapes(strategy, shape):
    with pytest.raises(ValueError, match=r"rows.*3"):
        make(strategy)(torch.ones(shape))


def test_one_value_per_channel_has_no_variance(strategy):
    new = make(strategy)

    def step():
        return new(torch.ones(int(hpcdist.get_replica_context().replica_id_in_sync_group == 0), N_CHANNELS))

    with pytest.raises(ValueError, match="more than (one|1) value per channel"):
        strategy.run(step)


def test_no_rows_at_all_leave_the_statistics_alone(strategy):
    new = make(strategy)
    if strategy.num_replicas_in_sync > 1:
        strategy.run(lambda: new(torch.ones(0, N_CHANNELS)).sum().backward())
        assert new.weight.grad.tolist() == [0.0] * N_CHANNELS
        assert int(new.num_batches_tracked) == 0
        assert new.running_mean.tolist() == [0.0] * N_CHANNELS


@pytest.mark.feature("collectives.sync-batch-norm")
def test_convert(strategy):
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ModuleDict({"norm": nn.BatchNorm2d(3, eps=0.5, momentum=None)})).eval()
    weight = model[1]["norm"].weight
    mean = model[1]["norm"].running_mean
    with strategy.scope():
        assert hpcdist.convert_sync_batchnorm(model) is model
        alone = hpcdist.convert_sync_batchnorm(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    new = model[1]["norm"]
    assert type(new) is hpcdist.SyncBatchNorm is type(alone)
    assert (new.weight is weight, new.running_mean is mean, new.eps, new.momentum, new.training) == (
        True,
        True,
        0.5,
        None,
        False,
    )
    assert (alone.weight, alone.running_mean, alone.training) == (None, None, True)
    with strategy.scope(), pytest.raises(ValueError, match="model.*batch"):
        hpcdist.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_copies_belong_to_the_same_strategy(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=2 * comm.size)
    with strategy.scope():
        new = hpcdist.SyncBatchNorm(N_CHANNELS)
    with pytest.raises(RuntimeError, match="inside strategy.run"):
        copy.deepcopy(new)(torch.ones(2, N_CHANNELS))
    assert pickle.loads(pickle.dumps(new))(torch.ones(2, N_CHANNELS)).detach().numpy().shape == (2, N_CHANNELS)


def test_outside_all_strategies_it_is_torchs():
    rows, direction = batch(2)
    new = hpcdist.SyncBatchNorm(N_CHANNELS)
    actual_tensors = whole(new, rows, direction)
    for actual, expected in zip(actual_tensors, whole(nn.BatchNorm1d(N_CHANNELS), rows, direction), strict=True):
        assert np.array_equal(actual.numpy(), expected.numpy())
