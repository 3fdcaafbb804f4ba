"""Gradients that a program computes itself: `apply_gradients`, and sums by `all_reduce` that an optimizer steps on."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import GradientError, UsageError

pytestmark = pytest.mark.mpi

N_ROWS = 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows():
    return torch.randn(N_ROWS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients_of(model, x):
    """Return gradients of a loss with a penalty on the gradient by the rows, which backward could not give."""
    x = x.detach().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad((y.square().sum() + slope.square().sum()) / N_ROWS, list(model.parameters()))


def trained_alone(n_steps):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, rows()), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return list(model.parameters())


class Trained:
    """A strategy, and a model and an optimizer of it."""

    def __init__(self, n_replicas=None, gradient_op="sum"):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op=gradient_op)
        with self.strategy.scope():
            self.model = make_model()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.parameters = list(self.model.parameters())

    def own_rows(self):
        context = hpcdist.get_replica_context()
        return rows()[context.replica_id_in_sync_group :: context.num_replicas_in_sync]

    def own_gradients(self):
        return gradients_of(self.model, self.own_rows())


@pytest.fixture(params=["by default", "several a rank"])
def trained(request, comm):
    if request.param == "by default":
        return Trained()
    return Trained(2 * comm.size + 1)


def by_strategy(trained):
    trained.strategy.apply_gradients(trained.optimizer, zip(trained.own_gradients(), trained.parameters, strict=True))


def by_optimizer(trained):
    trained.optimizer.apply_gradients(zip(trained.own_gradients(), trained.parameters, strict=True))


def by_all_reduce(trained):
    sums = hpcdist.get_replica_context().all_reduce("sum", list(trained.own_gradients()))
    for parameter, total in zip(trained.parameters, sums, strict=True):
        parameter.grad = total
    trained.optimizer.step()


def by_sums(trained):
    sums = hpcdist.get_replica_context().all_reduce("sum", list(trained.own_gradients()))
    trained.optimizer.apply_gradients(zip(sums, trained.parameters, strict=True))


@pytest.mark.feature("training.custom-loops", "semantics.gradients-are-summed")
@pytest.mark.parametrize("step", [by_strategy, by_optimizer, by_all_reduce, by_sums])
def test_the_weights_are_those_of_one_process(trained, step):
    for _ in range(3):
        trained.strategy.run(step, args=(trained,))
    torch.testing.assert_close(trained.parameters, trained_alone(3))


def test_gradients_of_backward_are_not_summed_again(trained):
    """And a backward follows on a step of the program's own."""

    def step():
        trained.optimizer.zero_grad()
        loss = hpcdist.compute_average_loss(trained.model(trained.own_rows())[:, 0].square(), global_batch_size=N_ROWS)
        loss.backward()
        trained.optimizer.apply_gradients([(parameter.grad, parameter) for parameter in trained.parameters])

    trained.strategy.run(by_optimizer, args=(trained,))
    trained.strategy.run(step)

    alone = make_model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for parameter, gradient in zip(alone.parameters(), gradients_of(alone, rows()), strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    alone(rows())[:, 0].square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(trained.parameters, list(alone.parameters()))


def test_none_is_no_gradient_where_all_have_none(trained):
    """Where another replica has one, it counts as zero."""

    def step():
        context = hpcdist.get_replica_context()
        gradients = list(map(torch.ones_like, trained.parameters))
        gradients[0] = None
        if context.replica_id_in_sync_group == 0 and context.num_replicas_in_sync > 1:
            gradients[1] = None
        trained.optimizer.apply_gradients(zip(gradients, trained.parameters, strict=True))

    before = copy.deepcopy(trained.parameters)
    trained.strategy.run(step)
    assert torch.equal(trained.parameters[0], before[0])
    assert not trained.optimizer.state[trained.parameters[0]]
    n_given = max(1, trained.strategy.num_replicas_in_sync - 1)
    assert torch.equal(trained.parameters[1].grad, torch.full_like(before[1], n_given))


def test_outside_of_run(comm):
    trained = Trained()
    rank_rows = rows()[comm.rank :: comm.size]
    trained.optimizer.apply_gradients(zip(gradients_of(trained.model, rank_rows), trained.parameters, strict=True))
    torch.testing.assert_close(trained.parameters, trained_alone(1))
    fixed = Trained(comm.size)
    with pytest.raises(RuntimeError, match="apply_gradients.*strategy.run"):
        fixed.optimizer.apply_gradients([])


def test_an_optimizer_does_not_keep_the_strategy_alive(comm):
    """Else a loss outside of scopes would find several strategies."""
    parameter = nn.Parameter(torch.ones(1))  # one of the scope would keep it
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = torch.optim.SGD([parameter])
    reference = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert reference() is None
    with pytest.raises(UsageError, match="apply_gradients.*optimizer.*model"):
        optimizer.apply_gradients([])


@pytest.mark.parametrize("strategy", [hpcdist.get_strategy, lambda: hpcdist.OneDeviceStrategy("cpu")])
def test_one_replica(strategy):
    with strategy().scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.apply_gradients(zip(gradients_of(model, rows()), model.parameters(), strict=True))
    assert not hasattr(copy.deepcopy(optimizer), "apply_gradients"), "it is no state"
    torch.testing.assert_close(list(model.parameters()), trained_alone(1))


def test_a_sum_of_summed_gradients_is_refused(trained, comm):
    def step():
        trained.model(trained.own_rows()).sum().backward()
        return hpcdist.get_replica_context().all_reduce("sum", [parameter.grad for parameter in trained.parameters])

    trained = Trained(trained.strategy.num_replicas_in_sync + 1)
    with pytest.raises(UsageError, match="all_reduce.*gradient.*backward"):
        trained.strategy.run(step)


def mixed(trained):
    (trained.model(trained.own_rows()).sum() * 0.1).backward()
    gradients = [parameter.grad for parameter in trained.parameters]
    return [(gradients[0].clone(), trained.parameters[0]), *zip(gradients[1:], trained.parameters[1:], strict=True)]


def made_of_sums(trained):
    (trained.model(trained.own_rows()).sum() * 0.1).backward()
    return [(parameter.grad * 0.5, parameter) for parameter in trained.parameters]


WRONG = {
    "made of sums": (made_of_sums, "expected gradients of this replica, got others than those that backward"),
    "parameters": (lambda t: [(torch.ones(1), nn.Parameter(torch.ones(1)))], "that is none of them"),
    "shapes": (lambda t: [(torch.ones(1), t.parameters[0])], r"expected a gradient of shape \(4, 3\)"),
    "some sums": (mixed, "expected gradients that are all summed"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_pairs_are_refused(comm, wrong):
    trained = Trained(comm.size + 1)
    make, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        trained.strategy.run(lambda: trained.optimizer.apply_gradients(make(trained)))


def test_gradients_that_were_not_summed_are_refused(comm):
    def step():
        for parameter, gradient in zip(trained.parameters, trained.own_gradients(), strict=True):
            parameter.grad = gradient
        trained.optimizer.step()

    trained = Trained(comm.size + 1)
    with pytest.raises(GradientError, match="step.*gradient"):
        trained.strategy.run(step)


@pytest.mark.parametrize("gradient_op", ["mean", None])
def test_other_ops_than_sums_are_refused(comm, gradient_op):
    """A mean is weighted by rows, which are unknown here."""
    trained = Trained(comm.size + 1, gradient_op)
    with pytest.raises(UsageError, match="apply_gradients.*strategy.*sums"):
        trained.strategy.run(by_optimizer, args=(trained,))
