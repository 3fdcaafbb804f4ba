"""Comm hooks: a program's own sum of each bucket, and the two compressions that come with hpcdist."""

import numpy as np
import pytest
import torch
from sklearn import datasets as sklearn_datasets
from torch import nn
from torch.nn.utils import parameters_to_vector

import hpcdist
from hpcdist.errors import GradientError, UsageError

pytestmark = pytest.mark.mpi

ROWS = 24


class Trained:
    """A model whose gradients a hook sums."""

    def __init__(self, hook=None, state=None, gradient_op="sum", bytes_per_pack=0, **options):
        comm_options = hpcdist.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(
            communication_options=comm_options, gradient_op=gradient_op, **options
        )
        if hook is not None:
            self.strategy.register_comm_hook(state, hook)
        torch.manual_seed(3)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def backward(self, step=0):
        rank = self.strategy.rank
        size = self.strategy.size
        x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))[rank::size]
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square()
        (loss.mean() if self.strategy.sums.is_mean else loss.sum() / ROWS).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])

    def train(self, n_steps):
        for step in range(n_steps):
            self.backward(step)
            self.optimizer.step()
        return parameters_to_vector(self.model.parameters()).detach()


def blocking(state, bucket):
    hpcdist.all_reduce(bucket.buffer())
    return bucket.buffer()


def background(state, bucket):
    return hpcdist.all_reduce_async(bucket.buffer())


def future(state, bucket):
    promised = torch.futures.Future()
    promised.set_result(sum(hpcdist.all_gather(bucket.buffer()[None])))
    return promised.then(lambda ended: ended.value() + 0)


def in_place(state, bucket):
    for gradient in bucket.gradients():
        total = gradient.clone()
        hpcdist.all_reduce(total)
        gradient.copy_(total)


@pytest.mark.feature("collectives.communication-hook")
@pytest.mark.parametrize("hook", [blocking, background, future, in_place])
@pytest.mark.parametrize("gradient_op", ["sum", "mean"])
@pytest.mark.parametrize("bytes_per_pack", [0, 2048])
def test_a_hook_that_sums_trains_as_without_one(comm, hook, gradient_op, bytes_per_pack):
    hooked = Trained(hook, None, gradient_op, bytes_per_pack).train(3)
    torch.testing.assert_close(hooked, Trained(None, None, gradient_op).train(3), rtol=1e-5, atol=1e-7)
    assert len(set(comm.allgather(hooked.numpy().tobytes()))) == 1


@pytest.mark.feature("collectives.communication-hook")
def test_what_a_hook_sees(comm):
    seen = []

    def hook(state, bucket):
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(parameter.shape) for parameter in bucket.parameters()]
        state.append((bucket.index(), bucket.is_last(), len(shapes)))
        bucket.set_buffer(bucket.buffer() * 2)
        return hpcdist.all_reduce_async(bucket.buffer())

    trained = Trained(hook, seen, bytes_per_pack=2048)
    gradients = trained.backward()
    if comm.size == 1:
        assert seen == []
        return
    indices, are_last, n_gradients = zip(*seen, strict=True)
    assert list(indices) == list(range(len(seen)))
    assert list(are_last) == [False] * (len(seen) - 1) + [True]
    assert sum(n_gradients) == 6
    torch.testing.assert_close(gradients, 2 * Trained().backward(), rtol=1e-5, atol=1e-6)


def test_a_result_that_is_no_sum_is_an_error(comm):
    trained = Trained(lambda state, bucket: bucket.buffer()[1:])
    if comm.size > 1:
        with pytest.raises(GradientError, match=r"comm.*elements"):
            trained.backward()


@pytest.mark.feature("collectives.communication-hook")
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda: Trained("all_reduce"), r"expected hook\(state, bucket\), got str"),
        (lambda: Trained(blocking).strategy.register_comm_hook(None, blocking), "blocking registered already"),
        (lambda: Trained(blocking, num_replicas=12), r"expected one replica on each .* got 12 replicas"),
    ],
)
def test_what_cannot_be_registered(comm, start, message):
    with pytest.raises(UsageError, match=message):
        start()


def test_a_hook_comes_before_the_first_use(comm):
    trained = Trained()
    trained.backward()
    if comm.size > 1:
        with pytest.raises(UsageError, match="first.*planned"):
            trained.strategy.register_comm_hook(None, blocking)


# -- compressions -----------------------------------------------------------------------------------------------------


@pytest.mark.feature("collectives.powersgd")
def test_power_sgd_of_full_rank_is_the_sum(comm):
    state = hpcdist.PowerSGDState(matrix_approximation_rank=64, start_step=0, min_compression_rate=0)
    hooked = Trained(hpcdist.power_sgd_hook, state).backward()
    torch.testing.assert_close(hooked, Trained().backward(), rtol=1e-4, atol=1e-5)


@pytest.mark.feature("collectives.sparsifying-compression")
def test_top_k_of_all_is_the_sum(comm):
    hooked = Trained(hpcdist.top_k_hook, hpcdist.TopKState(1.0)).backward()
    torch.testing.assert_close(hooked, Trained().backward(), rtol=1e-5, atol=1e-6)


@pytest.mark.feature("collectives.sparsifying-compression", "collectives.powersgd")
@pytest.mark.parametrize(
    ("hook", "make"),
    [
        (hpcdist.power_sgd_hook, lambda: hpcdist.PowerSGDState(1, start_step=0)),
        (hpcdist.top_k_hook, lambda: hpcdist.TopKState(0.1)),
    ],
)
def test_what_is_left_out_arrives_later(comm, hook, make):
    """With the same gradient at each step, the mean of what arrives goes to it: nothing is lost for good."""
    if comm.size == 1:
        return
    trained = Trained(hook, make())
    exact = Trained().backward()
    first = trained.backward()
    assert (first - exact).norm() > 0.1 * exact.norm()
    n_steps = 60
    total = first.clone()
    for _ in range(n_steps - 1):
        total += trained.backward()
    assert (total / n_steps - exact).norm() < 0.1 * exact.norm()
    assert len(set(comm.allgather(total.numpy().tobytes()))) == 1


class TwoModels:
    """Two models that take turns, trained by means of batches of 12 rows and of a last one of 4."""

    def __init__(self, hook=None, state=None):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        if hook is not None:
            self.strategy.register_comm_hook(state, hook)
        torch.manual_seed(3)
        with self.strategy.scope():
            self.models = nn.ModuleList([nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(16, 24)])
        rows = torch.randn(28, 16, generator=torch.Generator().manual_seed(1))
        dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(12).repeat(4)
        self.batches = self.strategy.experimental_distribute_dataset(dataset)
        self.parameters = list(self.models.parameters())

    def sum_of_gradients(self):
        """Return the sum over steps of each parameter's gradient; nothing is trained."""
        totals = list(map(torch.zeros_like, self.parameters))
        for step, rows in enumerate(self.batches):
            self.models.zero_grad()
            losses = self.models[step % 2](rows).square().sum(1)
            (losses.mean() if len(rows) else losses.sum()).backward()
            for total, parameter in zip(totals, self.parameters, strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        return totals


@pytest.mark.parametrize(
    ("hook", "make", "memory"),
    [
        (hpcdist.power_sgd_hook, lambda: hpcdist.PowerSGDState(1, start_step=0), "_errors"),
        (hpcdist.top_k_hook, lambda: hpcdist.TopKState(0.1), "_unsent"),
    ],
)
def test_nothing_is_lost_between_models_in_turn_and_batches_of_any_size(comm, hook, make, memory):
    """What has arrived and what is remembered are together the sum of all gradients, whatever a step divides by."""
    state = make()
    trained = TwoModels(hook, state)
    exact = TwoModels().sum_of_gradients()
    arrived = trained.sum_of_gradients()
    n_remembered = 0
    for parameter, total, expected in zip(trained.parameters, arrived, exact, strict=True):
        local_residual = getattr(state, memory).get(parameter, torch.zeros_like(parameter)).reshape(parameter.shape)
        n_remembered += bool(local_residual.any())
        total_residual = torch.from_numpy(comm.allreduce(local_residual.detach().numpy()))
        torch.testing.assert_close(total + total_residual, expected, rtol=1e-3, atol=1e-4)
    assert comm.size == 1 or n_remembered >= 2


@pytest.mark.feature("collectives.sparsifying-compression")
def test_overflow_is_not_remembered(comm):
    trained = Trained(hpcdist.top_k_hook, hpcdist.TopKState(0.5))
    with torch.no_grad():
        saved = [parameter.clone() for parameter in trained.model.parameters()]
        next(trained.model.parameters()).fill_(float("inf"))
    trained.backward()
    with torch.no_grad():
        for parameter, values in zip(trained.model.parameters(), saved, strict=True):
            parameter.copy_(values)
    trained.backward()
    assert np.isfinite(trained.backward().numpy()).all()


@pytest.mark.parametrize(
    "make", [lambda: hpcdist.PowerSGDState(0), lambda: hpcdist.TopKState(0), lambda: hpcdist.TopKState(1.5)]
)
def test_values_out_of_range(make):
    with pytest.raises(UsageError, match=r"expected a (matrix_approximation_rank of 1 or more|ratio above 0)"):
        make()


@pytest.mark.feature("collectives.sparsifying-compression", "collectives.powersgd")
@pytest.mark.parametrize(
    ("hook", "make"),
    [
        (None, lambda: None),
        (hpcdist.power_sgd_hook, lambda: hpcdist.PowerSGDState(4)),
        (hpcdist.top_k_hook, lambda: hpcdist.TopKState(0.05)),
    ],
)
def test_digits_are_learned(comm, hook, make):
    images, labels = sklearn_datasets.load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    data = hpcdist.Dataset.from_tensor_slices((images, labels))
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    if hook is not None:
        strategy.register_comm_hook(make(), hook)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = strategy.experimental_distribute_dataset(data.take(1500).shuffle(seed=1).batch(60))
    for _ in range(8):
        for x, y in train:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            hpcdist.compute_average_loss(losses, global_batch_size=60).backward()
            optimizer.step()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy {right:.3f} with {hook and hook.__name__}")
    assert right > 0.88
