"""Gradients, buffers and random numbers of several replicas on a rank: which are whose, and what merge_call changes."""

import pytest
import torch
from local_replicas import Strategy, collect, ids
from mpi4py import MPI
from torch import nn

import hpcdist
from hpcdist.errors import DesyncError, GradientError

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
        if model.weight.grad is not None:
            weight_gradient = model.weight.grad.tolist()
        else:
            weight_gradient = None
        if weight_gradient:
            model.weight.grad.add_(1)  # each has its own
        return [weight_gradient, model.bias.grad.item() == 5 * replica]

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
        norm.running_mean.fill_(replica)
        in_merge(lambda: norm.running_var.fill_(9))
        in_merge(lambda: norm.running_var.mul_(0.5))
        return [norm.running_mean.item() == replica, norm.running_var.item()]

    assert collect(strategy, fn) == [[True], [4.5]]


class Held(nn.Module):
    """A weight, and a buffer that is not all numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.tensor([float("nan"), 0.0]))


def test_a_merge_call_that_does_nothing_changes_no_nan(strategy):
    model = make_model(strategy, Held)

    def fn(replica):
        model.b[1] = replica
        model.w.grad = torch.tensor([float("nan") if replica else 1.0])
        gradient_before = model.w.grad
        in_merge(lambda: None)
        return [model.b[1].item() == replica, model.w.grad is gradient_before]

    assert collect(strategy, fn) == [[True], [True]]


@pytest.mark.parametrize("factor", [0.5, float("nan")])
@pytest.mark.parametrize("n_replicas", [2, 5])
def test_a_change_of_buffers_that_are_a_replica_s_own_is_refused_on_all_ranks(comm, n_replicas, factor):
    strategy = Strategy(num_replicas=max(n_replicas, comm.size))
    model = make_model(strategy, Held)

    def fn(replica):
        model.b[1] = replica  # on the first one nothing changes
        in_merge(lambda: model.b.mul_(factor))

    with pytest.raises(hpcdist.errors.UsageError, match=r"merge_call.*'b'"):
        strategy.run(fn, args=(ids(strategy),))


def train_with_merges(strategy):
    """Return what some steps leave that change gradients, buffers and random numbers in merge_calls."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), Held())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = model[1]
    scale_layer = model[3]
    drawn = []
    scale_layer.forward = lambda x: x * scale_layer.w
    ema = torch.optim.swa_utils.AveragedModel(model)

    def after_backward():
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm.running_var.mul_(0.5).add_(torch.rand(3))
        scale_layer.b.add_(1)
        drawn.append(torch.rand(1).item())
        ema.update_parameters(model)

    def step(replica):
        in_merge(lambda: scale_layer.b.mul_(0.5).add_(1))
        optimizer.zero_grad()
        model(torch.full((2, 2), replica + 1.0)).square().sum().backward()
        in_merge(after_backward)
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(ids(strategy),))
    states = [*model.state_dict().values(), *ema.state_dict().values()]
    return [state.view(torch.uint8).tolist() for state in states if state.dim()], drawn


def test_what_merge_calls_leave_does_not_depend_on_ranks(comm):
    n_replicas = max(2, comm.size)
    alone = Strategy(hpcdist.MPIClusterResolver(comm=MPI.COMM_SELF), num_replicas=n_replicas)
    expected = train_with_merges(alone)
    assert train_with_merges(Strategy(num_replicas=n_replicas)) == expected


def test_an_error_in_a_merge_call_is_every_replica_s_to_catch(strategy):
    """Also the random numbers are the replica's again."""

    def fn(merges):
        first = torch.rand(1).item()
        if merges:
            with pytest.raises(KeyError, match="mine"):
                in_merge(lambda: {}["mine"])
        return hpcdist.get_replica_context() is not None, first, torch.rand(1).item()

    make_model(strategy)
    outcomes = []
    for merges in (True, False):
        strategy.engine.generators.restore(seed=0, step=1)
        outcomes.append(list(map(strategy.experimental_local_results, strategy.run(fn, args=(merges,)))))
    assert outcomes[0] == outcomes[1]


def test_a_merge_call_draws_the_same_numbers_on_all_ranks_and_none_of_a_replica_s(strategy, comm):
    model = make_model(strategy)
    drawn = []

    def fn(merges):
        first = torch.rand(1).item()
        if merges:
            in_merge(lambda: drawn.append(torch.rand(1).item()))
        return first, torch.rand(1).item()

    model(torch.ones(1, 2))
    outside = [torch.rand(1).item()]
    replica_draws = []
    for merges in (True, False):
        strategy.engine.generators.restore(seed=0, step=1)
        replica_draws.append(strategy.run(fn, args=(merges,)))
        outside.append(torch.rand(1).item())
    assert [per_replica.values for per_replica in replica_draws[0]] == [
        per_replica.values for per_replica in replica_draws[1]
    ]
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
    with pytest.raises(GradientError, match=r"'weight'"):
        strategy.run(fn)
    model.zero_grad()
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    assert model.weight.grad.tolist() == [[5, 5]]


def test_gradients_of_an_earlier_run_are_each_replica_s_own(strategy):
    model = make_model(strategy)

    def fn(replica):
        earlier_gradient = model.weight.grad.mul_(0.5).tolist()
        model(torch.ones(1, 2)).sum().backward()
        return [earlier_gradient, model.weight.grad.tolist()]

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


def test_a_backward_that_failed_is_counted_on_no_rank(comm):
    """Ranks hold different numbers of replicas here: one with several has begun a sum when the first replica fails."""
    strategy = Strategy(num_replicas=comm.size + 1)
    with strategy.scope():
        model = nn.Embedding(4, 2)

    def backward():
        model(torch.tensor([1])).sum().backward()

    strategy.run(lambda: None)
    model.sparse = True  # it is planned: its gradients may not become sparse any more
    with pytest.raises(GradientError, match="sparse"):
        strategy.run(backward)
    model.zero_grad()
    model.sparse = False
    strategy.run(backward)
    assert model.weight.grad[1].tolist() == [comm.size + 1] * 2


@pytest.mark.parametrize("implementation", ["AUTO", "SHARED_MEMORY", "RING"])
def test_hosts_with_different_numbers_of_replicas(comm, over_hosts, implementation):
    """No bucket size is given, so the link is measured too, by the way that sums go."""
    over_hosts("1 each")
    n_replicas = 2 * comm.size + 1
    strategy = Strategy(
        num_replicas=n_replicas,
        communication_options=hpcdist.CommunicationOptions(implementation=implementation),
    )
    with strategy.scope():
        model = nn.Linear(3, 2, bias=False)
    strategy.run(lambda: model(torch.ones(1, 3)).sum().backward())
    assert model.weight.grad.tolist() == [[n_replicas] * 3] * 2


def test_a_first_replica_without_the_first_backward_is_named(comm):
    strategy = Strategy(num_replicas=3 * comm.size)
    with strategy.scope():
        model = nn.Linear(3, 2)
    first = strategy.own_replicas[0]

    def step(replica):
        if replica != first:
            model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(DesyncError, match=f"expected replica {first + 1} at its end, as replica {first}"):
        strategy.run(step, args=(ids(strategy),))


@pytest.mark.parametrize("n_local", [1, 2])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "SyncBatchNorm"])
def test_gradients_of_gradients_cross_replicas_too(comm, n_local, call):
    """The backward of a sum is a sum, and that sum's backward as well: a penalty on gradients, as WGAN-GP's."""
    n_replicas = n_local * comm.size
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas)
    rows = torch.linspace(-1, 2, 3 * n_replicas, dtype=torch.float64).reshape(n_replicas, 3, 1)
    with strategy.scope():
        norm = hpcdist.SyncBatchNorm(1).double()
    weights = torch.arange(1.0, 3 * n_replicas + 1, dtype=torch.float64).reshape(n_replicas, 3, 1)

    def join(part, replica):
        context = hpcdist.get_replica_context()
        if call == "all_reduce":
            return (context.all_reduce("sum", part) ** 3 * weights[replica]).sum()
        if call == "all_gather":
            return (context.all_gather(part, 0) ** 3).prod() * weights[replica].sum()
        return (norm(part) ** 3 * weights[replica]).sum()

    def joined(whole):
        if call == "all_reduce":
            return sum((whole.sum(0) ** 3 * weight).sum() for weight in weights)
        if call == "all_gather":
            return sum((whole.reshape(-1, 1) ** 3).prod() * weight.sum() for weight in weights)
        normed = torch.nn.functional.batch_norm(whole.reshape(-1, 1), None, None, training=True, eps=norm.eps)
        return (normed.reshape(whole.shape) ** 3 * weights).sum()

    def step():
        replica = hpcdist.get_replica_context().replica_id_in_sync_group
        part = rows[replica].clone().requires_grad_()
        (first,) = torch.autograd.grad(join(part, replica), part, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), part)
        return first.detach(), second

    replica_derivatives = strategy.run(step)
    whole = rows.clone().requires_grad_()
    (first,) = torch.autograd.grad(joined(whole), whole, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), whole)
    start = comm.rank * n_local
    for values, expected in zip(replica_derivatives, (first, second), strict=True):
        local_derivatives = torch.stack(strategy.experimental_local_results(values))
        torch.testing.assert_close(local_derivatives, expected.detach()[start : start + n_local], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_replicas", [3, 4, 5, 8])
def test_means_are_over_all_replicas(comm, n_replicas):
    """Whether a rank holds one of them, or several, whose sums are one subtree or more."""
    if n_replicas < comm.size:
        return
    strategy = Strategy(num_replicas=n_replicas, gradient_op="mean")
    model = make_model(strategy, lambda: nn.Linear(2, 1, bias=False))

    def fn(replica):
        model.zero_grad()
        model(torch.full((4, 2), replica + 1.0)).mean().backward()
        return model.weight.grad.tolist()

    assert collect(strategy, fn) == [[[(n_replicas + 1) / 2] * 2]]
