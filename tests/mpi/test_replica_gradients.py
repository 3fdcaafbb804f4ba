"""Gradients, buffers and random numbers of several replicas on a rank: which are whose, and what merge_call changes."""

import pytest
import torch
from local_replicas import Strategy, collect
from torch import nn

import hpcdist
from hpcdist.errors import GradientError

pytestmark = pytest.mark.mpi


@pytest.fixture
def strategy():
    return Strategy(num_replicas=5)


def make_model(strategy, make=lambda: nn.Linear(2, 1)):
    with strategy.scope():
        return make()


def in_merge(change):
    """Call `change` once for all local replicas."""
    hpcdist.get_replica_context().merge_call(lambda strategy: change())


def drop(gradient):
    return None


def replace(gradient):
    return torch.full_like(gradient, 7)


def scale_unseen(gradient):
    gradient.data.mul_(2)
    return gradient


@pytest.mark.parametrize(
    ("change", "expected"),
    [(drop, None), (torch.Tensor.zero_, [[0, 0]]), (replace, [[7, 7]]), (scale_unseen, [[10, 10]])],
)
def test_gradients_changed_in_a_merge_call_are_every_replica_s(strategy, change, expected):
    model = make_model(strategy)

    def fn(replica):
        def change_weight():
            model.weight.grad = change(model.weight.grad)

        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.bias.grad.mul_(replica)
        in_merge(change_weight)
        found = model.weight.grad.tolist() if model.weight.grad is not None else None
        if found:
            model.weight.grad.add_(1)  # each has its own
        return [found, model.bias.grad.item() == 5 * replica]

    assert collect(strategy, fn) == [[expected], [True]]


def test_a_step_after_clipping_in_a_merge_call_takes_what_was_clipped(strategy):
    model = make_model(strategy, lambda: nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def fn(replica):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        in_merge(lambda: nn.utils.clip_grad_value_(model.parameters(), 0.5))
        optimizer.step()
        in_merge(optimizer.zero_grad)
        return [model.weight.grad]

    assert collect(strategy, fn) == [[None]]
    assert model.weight.tolist() == [[-0.5, -0.5]]


def test_buffers_changed_in_a_merge_call_are_every_replica_s(strategy):
    norm = make_model(strategy, lambda: nn.BatchNorm1d(1, momentum=1.0))

    def fn(replica):
        norm(torch.full((2, 1), float(replica)))
        in_merge(lambda: norm.running_var.fill_(9))
        return [norm.running_mean.item() == replica, norm.running_var.item()]

    assert collect(strategy, fn) == [[True], [9]]


def test_a_merge_call_draws_the_same_numbers_on_all_ranks_and_none_of_a_replica_s(strategy, comm):
    model, drawn = make_model(strategy), []

    def fn(merges):
        first = torch.rand(1).item()
        if merges:
            in_merge(lambda: drawn.append(torch.rand(1).item()))
        return first, torch.rand(1).item()

    model(torch.ones(1, 2))
    outside = [torch.rand(1).item()]
    found = []
    for merges in (True, False):
        strategy._engine.generators.restore(seed=0, step=1)
        found.append(strategy.run(fn, args=(merges,)))
        outside.append(torch.rand(1).item())
    assert [one.values for one in found[0]] == [one.values for one in found[1]]
    assert len(set(comm.allgather((*drawn, *outside)))) == 1
    assert len({*drawn, *outside}) == 3
    assert outside[-1] == drawn[0]


@pytest.mark.parametrize("where", ["before the run", "in a replica", "in a merge_call"])
def test_a_gradient_set_by_hand_is_refused_on_all_ranks(strategy, where):
    model = make_model(strategy)

    def fn():
        if where == "in a replica":
            model.weight.grad = torch.ones(1, 2)
        elif where == "in a merge_call":
            in_merge(lambda: setattr(model.weight, "grad", torch.ones(1, 2)))
        model(torch.ones(1, 2)).sum().backward()

    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    if where == "before the run":
        model.weight.grad = torch.ones(1, 2)
    with pytest.raises(GradientError, match=r"expected the gradient of 'weight' .* got one set by hand"):
        strategy.run(fn)
    model.zero_grad()
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    assert model.weight.grad.tolist() == [[5, 5]]


def test_gradients_of_an_earlier_run_are_each_replica_s_own(strategy):
    model = make_model(strategy)

    def fn(replica):
        found = model.weight.grad.mul_(0.5).tolist()
        model(torch.ones(1, 2)).sum().backward()
        return [found, model.weight.grad.tolist()]

    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    assert collect(strategy, fn) == [[[[2.5, 2.5]]], [[[7.5, 7.5]]]]
    assert collect(strategy, fn) == [[[[3.75, 3.75]]], [[[8.75, 8.75]]]]


def test_zeros_set_by_hand_and_sums_changed_in_a_merge_call_are_added_to(strategy):
    model = make_model(strategy)

    def fn(replica):
        model.weight.grad = torch.zeros(1, 2)
        model(torch.ones(1, 2)).sum().backward()
        in_merge(lambda: model.weight.grad.mul_(2))
        model(torch.ones(1, 2)).sum().backward()
        return [model.weight.grad.tolist()]

    for _ in range(2):
        assert collect(strategy, fn) == [[[[15, 15]]]]
