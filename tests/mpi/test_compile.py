"""torch.compile: compiled models train as others do, compiled steps are refused."""

import gc
import warnings

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import GradientError
from hpcdist.program import torch_hooks

pytestmark = pytest.mark.mpi

CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch._dynamo.reset()


def in_scope(model):
    return torch.compile(model, backend="eager")


def after_scope(model):
    return torch.compile(model, backend="eager")


def by_method(model):
    model.compile(backend="eager")
    return model


def not_at_all(model):
    return model


def train(comm, how, num_replicas=None):
    """Return the weights after three steps."""
    torch.manual_seed(1 + comm.rank)  # the chief's weights win
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas, gradient_op="mean")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        used = how(model) if how is in_scope else model
    used = used if how is in_scope else how(model)

    def step(rows):
        optimizer.zero_grad()
        used(rows).square().mean().backward()
        optimizer.step()

    rows = torch.linspace(-1, 1, 96).reshape(24, 4)
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(8))
    for part in batches:
        strategy.run(step, args=(part,))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("num_replicas", [None, 4])
@pytest.mark.parametrize("how", [in_scope, after_scope, by_method])
def test_compiled_models_train_as_others(comm, how, num_replicas):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of hooks that the compiler sees
        compiled_parameters = train(comm, how, num_replicas)
    for parameter, expected in zip(compiled_parameters, train(comm, not_at_all, num_replicas), strict=True):
        assert torch.equal(parameter, expected)
    assert all(
        torch.equal(compiled_parameters[0], peer_parameter) for peer_parameter in comm.allgather(compiled_parameters[0])
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch.compile traces before the backward
@pytest.mark.parametrize("is_in_run", [False, True])
def test_a_compiled_step_is_refused(comm, is_in_run):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)

    @torch.compile(backend="eager")
    def step(rows):
        model(rows).mean().backward()

    if comm.size == 1:  # there is nothing to sum
        step(torch.ones(2, 2))
        return
    with pytest.raises(GradientError, match=r"compiled.*compiled"):
        strategy.run(step, args=(torch.ones(2, 2),)) if is_in_run else step(torch.ones(2, 2))


def test_a_compiled_evaluation_is_as_any_other():
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)

    @torch.compile(backend="eager")
    def evaluate(rows):
        with torch.no_grad():
            return model(rows).sum()

    rows = torch.ones(3, 2)
    assert torch.equal(evaluate(rows), model(rows).sum())


def test_calls_of_modules_are_torchs_own_once_models_are_planned(monkeypatch):
    gc.collect()  # strategies of other tests
    monkeypatch.setattr(torch_hooks, "_outer_watchers", {})  # who watches the loops of other tests
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    assert nn.Module.__call__ is not CALL
    model(torch.ones(1, 2))
    assert nn.Module.__call__ is CALL
    with strategy.scope():
        nn.Linear(2, 1)
    assert nn.Module.__call__ is not CALL
    del strategy, model
    gc.collect()
    assert nn.Module.__call__ is CALL
