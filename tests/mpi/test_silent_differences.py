"""Programs in which ranks could go ways of their own unnoticed: they train as one process does, or raise."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from local_replicas import Strategy
from torch import nn

import hpcdist
from hpcdist.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.mpi

N_ROWS = 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(n=N_ROWS):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.prod(1, keepdim=True)


def train(model, optimizer, x, y, scale, n_steps=4):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum() * scale
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(n_steps)]


def optimizer_of(model, kind):
    if kind == "LBFGS":
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # LBFGS itself does, with one replica
@pytest.mark.parametrize("gradient_op", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["LBFGS", "SGD"])
def test_steps_with_a_closure_are_those_of_one_process(comm, kind, gradient_op):
    """The line search of LBFGS decides by the loss: it gets that of all replicas."""
    model = make_model()
    expected = train(model, optimizer_of(model, kind), *rows(), 1 / N_ROWS)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=gradient_op)
    with strategy.scope():
        distributed_model = make_model()
        optimizer = optimizer_of(distributed_model, kind)
    data = hpcdist.Dataset.from_tensor_slices(rows()).batch(N_ROWS).repeat(None)
    batches = iter(strategy.experimental_distribute_dataset(data))
    losses = []
    for _ in range(4):
        x, y = next(batches)
        losses += train(
            distributed_model, optimizer, x, y, 1 / N_ROWS if gradient_op == "sum" else 1 / max(1, len(x)), n_steps=1
        )
    for trained_parameter, parameter in zip(distributed_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained_parameter, parameter, rtol=1e-9, atol=1e-9)
    if kind == "LBFGS":
        assert losses == pytest.approx(expected)


def test_closures_take_a_replica_per_rank(comm):
    strategy = Strategy(num_replicas=comm.size + 1)
    with strategy.scope():
        model = make_model()
        optimizer = optimizer_of(model, "LBFGS")
    x, y = rows()
    with pytest.raises(GradientError, match="strategy.run"):
        strategy.run(lambda: train(model, optimizer, x, y, 1.0, n_steps=1))


@pytest.mark.parametrize("what", ["no_sync", "by hand", "unfrozen"])
def test_gradients_that_a_closure_leaves_are_checked(comm, what):
    if comm.size == 1:
        return
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model()
        model[0].requires_grad_(what != "unfrozen")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = rows()
    local_inputs = x[comm.rank :: comm.size]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(local_inputs)
    model.requires_grad_(True)

    def closure():
        optimizer.zero_grad()
        loss = model(local_inputs).sum()
        if what == "by hand":
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = gradient
        else:
            loss.backward()
        return loss

    def step():
        if what == "no_sync":
            with strategy.no_sync():
                optimizer.step(closure)
        else:
            optimizer.step(closure)

    with pytest.raises(GradientError, match="step: expected"):
        step()
    assert all(map(torch.equal, before, model.parameters())), "no step was made"


@pytest.mark.parametrize("n_replicas", [None, 3])
def test_gradients_of_zeros_that_are_set_by_hand_stay(comm, n_replicas):
    """Optimizers decay what has a gradient of zero, and leave alone what has none; on all ranks alike."""
    if n_replicas is not None and n_replicas < comm.size:
        n_replicas = comm.size
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum", num_replicas=n_replicas)

    def steps(model, optimizer, backward):
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            backward(model[2].weight.sum())
            optimizer.step()

    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    n = strategy.num_replicas_in_sync
    strategy.run(steps, args=(model, optimizer, lambda loss: (loss / n).backward()))
    plain = make_model()
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5), lambda loss: loss.backward())
    for trained_parameter, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(trained_parameter, parameter, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_its_forward_changes_is_refused(comm, kind):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(kind(10, 2, max_norm=0.5))
    numbers = torch.tensor([[comm.rank]])
    if comm.size == 1:
        model(numbers).sum().backward()
        return
    with pytest.raises(ConfigurationError, match="max_norm.*'0'.*0.5"):
        model(numbers)


@pytest.mark.parametrize("way", ["by hand", "apply_gradients"])
def test_what_replaces_local_gradients_is_not_summed_as_if_it_was_one(comm, way):
    if comm.size == 1:
        return
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = rows()
    with strategy.no_sync():
        model(x).sum().backward()
    if way == "by hand":
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
    else:
        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        strategy.apply_gradients(optimizer, zip(gradients, model.parameters(), strict=True))
    with pytest.raises(GradientError, match="earlier.*backward"):
        model(x).sum().backward()


def train_on_lists(strategy, model, batches, listed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        if len(x):
            (model(x) - y).square().mean().backward()
        else:
            (model(x).sum() * 0).backward()
        optimizer.step()

    if listed == "list":
        batches = list(batches)
    for x, y in batches:
        last = (x, y)
        strategy.run(step, args=(x, y))
    if listed == "once more":
        strategy.run(step, args=last)


@pytest.mark.parametrize("n_replicas", [None, 4])
@pytest.mark.parametrize(("listed", "n_rows"), [("list", 3), ("list", 4), ("once more", 12)])
def test_parts_that_are_used_after_their_pass_weigh_by_their_rows(comm, listed, n_rows, n_replicas):
    """With ReduceOp.MEAN: the tensors that went into a forward tell which part a backward uses."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean", num_replicas=n_replicas)
    with strategy.scope():
        model = make_model()
    data = hpcdist.Dataset.from_tensor_slices(rows(2 * n_rows)).batch(n_rows)
    batches = strategy.experimental_distribute_dataset(data)
    train_on_lists(strategy, model, batches, listed)
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    whole = []
    for start in (0, n_rows):
        whole.append(tuple(part[start : start + n_rows] for part in rows(2 * n_rows)))
    for x, y in [*whole, *([whole[-1]] if listed == "once more" else [])]:
        optimizer.zero_grad()
        (plain(x) - y).square().mean().backward()
        optimizer.step()
    for trained_parameter, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(trained_parameter, parameter, rtol=1e-9, atol=1e-9)


def test_a_penalty_after_an_epoch_is_of_no_part(comm):
    """All parts were used, the last ones of different length: a backward between the epochs uses none of them."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = make_model()
    data = hpcdist.Dataset.from_tensor_slices(rows(5)).batch(5)
    for _ in range(2):
        for x, y in strategy.experimental_distribute_dataset(data):
            train_on_lists(strategy, model, [(x, y)], "as they come")
        model.zero_grad()
        model[2].weight.square().sum().backward()
        torch.testing.assert_close(model[2].weight.grad, 2 * model[2].weight.detach())


def test_a_loss_that_the_closure_has_reduced_is_taken_as_it_is(comm):
    def train_reduced(strategy, model, x, scale):
        optimizer = optimizer_of(model, "LBFGS")

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum() * scale
            loss.backward()
            return strategy.reduce("sum", loss.detach(), axis=None)

        return [float(optimizer.step(closure)) for _ in range(3)]

    x, _ = rows()
    plain = make_model()
    expected = train_reduced(hpcdist.get_strategy(), plain, x, 1 / N_ROWS)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model()
    losses = train_reduced(strategy, model, x[comm.rank :: comm.size], 1 / N_ROWS)
    assert losses == pytest.approx(expected)
    for parameter, plain_parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-9, atol=1e-9)


def test_a_loss_that_is_equal_on_all_ranks_at_first_is_summed_all_the_same(comm):
    """Logistic regression from zeros: the first loss is log 2 for any rows."""

    def fit(model, x, y, n_rows):
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=10, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum") / n_rows
            loss.backward()
            return loss

        optimizer.step(closure)

    n_rows = 8 * comm.size
    x = torch.randn(n_rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y = (x.sum(1, keepdim=True) + torch.linspace(-2, 2, n_rows)[:, None] > 0).double()
    plain = nn.Linear(3, 1, bias=False).double()
    fit(plain, x, y, n_rows)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(3, 1, bias=False).double()
    fit(model, x[comm.rank :: comm.size], y[comm.rank :: comm.size], n_rows)
    assert plain.weight.abs().sum() > 0.1
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=1e-6)


def test_nests_of_other_forms_are_not_added(comm):
    if comm.size == 1:
        return
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    if comm.rank == 0:
        nest = {"a": 1.0, "b": 2.0}
    else:
        nest = {"b": 1.0, "c": 2.0}
    with pytest.raises(ValueError, match="nest.*tensors"):
        strategy.reduce("sum", nest, axis=None)


def test_parts_of_an_evaluation_are_of_no_backward(comm):
    """They came under no_grad: what is trained on rows of its own afterwards weighs alike."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = make_model()
    data = hpcdist.Dataset.from_tensor_slices(rows(5)).batch(5)
    with torch.no_grad():
        for x, _ in strategy.experimental_distribute_dataset(data):
            model(x)
    model(torch.full((1, 3), float(comm.rank), dtype=torch.float64)).mean().backward()
    reference_model = make_model()
    for rank in range(comm.size):
        (reference_model(torch.full((1, 3), float(rank), dtype=torch.float64)).mean() / comm.size).backward()
    torch.testing.assert_close(model[0].weight.grad, reference_model[0].weight.grad)


@pytest.mark.parametrize("way", ["sync", "no_sync", "overlapped", "replicas"])
def test_a_gradient_that_is_undefined_counts_as_none(comm, over_hosts, way):
    """A penalty on slopes alone is linear in the bias of a norm: torch calls the bias's hooks, without a gradient."""
    over_hosts("1 each" if way == "overlapped" else None)

    def penalty(model, x):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1, bias=False)).double()

    n_replicas = 2 * comm.size if way == "replicas" else None
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum", num_replicas=n_replicas)
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        model = build()
    x = torch.randn(2 * n, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()

    def step():
        number = hpcdist.get_replica_context().replica_id_in_sync_group
        replica_inputs = x[2 * number : 2 * number + 2].detach().requires_grad_()
        if way == "no_sync":
            with strategy.no_sync():
                penalty(model, replica_inputs).backward()
        for _ in range(1 + (way != "no_sync")):
            penalty(model, replica_inputs).backward()

    strategy.run(step)
    plain = build()
    for _ in range(2):
        penalty(plain, x).backward()
    assert plain[1].bias.grad is None
    assert model[1].bias.grad is None
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_more", "is_used_by_all"), [(1, True), (0, False)])
def test_sums_inside_a_backward_do_not_meet_buckets(comm, over_hosts, n_more, is_used_by_all):
    """Between hosts buckets start when a rank's backward has filled them: before SyncBatchNorm's sum, or after it."""
    over_hosts("1 each")
    n = comm.size + n_more
    strategy = Strategy(num_replicas=n, communication_options=hpcdist.CommunicationOptions(bytes_per_pack=256))

    def build(norm):
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(4, 3), norm(3), nn.Linear(3, 2), nn.Linear(2, 2)]).double()

    x = torch.randn(4 * n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if not is_used_by_all:
        is_used = torch.arange(4 * n) % n == 0
    else:
        is_used = torch.ones(4 * n, dtype=torch.bool)

    def loss_of(model, part, is_used):
        y = model[2](model[1](model[0](part)))
        if is_used.any():
            y = y + model[3](y) * is_used[:, None]
        return y.square().sum() / len(x)

    with strategy.scope():
        model = build(hpcdist.SyncBatchNorm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        number = hpcdist.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        loss_of(model, x[number::n], is_used[number::n]).backward()
        optimizer.step()

    plain = build(nn.BatchNorm1d)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        strategy.run(step)
        plain_optimizer.zero_grad()
        loss_of(plain, x, is_used).backward()
        plain_optimizer.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_applied_after_zero_grad_of_either_kind(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = rows()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = model[2].bias.item()
    gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    strategy.apply_gradients(optimizer, zip(gradients, model.parameters(), strict=True))
    assert before - model[2].bias.item() == pytest.approx(0.1 * N_ROWS * comm.size)


@pytest.mark.parametrize("drops", [False, True])
def test_whole_parts_end_with_the_first_replica_that_has_none(comm, drops):
    """As in TensorFlow, where drop_remainder promises the length of every part."""
    strategy = Strategy(num_replicas=2 * comm.size)
    options = hpcdist.InputOptions(experimental_replication_mode=hpcdist.InputReplicationMode.PER_REPLICA)
    n = 2 * comm.size

    def make(context):
        return hpcdist.Dataset.range(6 * n + 3).shard(n, context.input_pipeline_id).batch(3, drop_remainder=drops)

    parts = list(strategy.distribute_datasets_from_function(make, options))
    lengths = [list(map(len, strategy.experimental_local_results(part))) for part in parts]
    assert len(parts) == (2 if drops else 3)
    assert all(length == 3 for length in itertools.chain.from_iterable(lengths[:2]))
    if comm.size > 1 and not drops:
        with pytest.raises(ValueError, match="expected drop_remainder="):
            strategy.distribute_datasets_from_function(
                lambda context: hpcdist.Dataset.range(9).batch(3, drop_remainder=comm.rank == 0), options
            )


@pytest.mark.parametrize("n_rows", [6, 7])
@pytest.mark.parametrize("n_replicas", [None, 3])
def test_sums_in_the_model_and_a_mean_over_parts_of_different_length(comm, n_rows, n_replicas):
    """What one replica's loss gives to another's activations cannot be weighted by rows: uneven parts are refused."""
    if n_replicas is not None:
        n_replicas = max(n_replicas, comm.size)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean", num_replicas=n_replicas)
    n = strategy.num_replicas_in_sync

    def build(norm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh(), nn.Linear(4, 1)).double()

    with strategy.scope():
        model = build(hpcdist.SyncBatchNorm)

    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()

    x, _ = rows(n_rows)
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(x).batch(n_rows))
    if n > 1 and n_rows % n:
        part = next(iter(batches))
        with pytest.raises(GradientError, match="all_reduce.*all_gather.*SyncBatchNorm"):
            strategy.run(step, args=(part,))
        return
    for part in batches:
        strategy.run(step, args=(part,))
    plain = build(nn.BatchNorm1d)
    plain(x).square().mean().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-9)


def test_sums_have_the_strides_of_what_is_summed(comm):
    """Fused optimizers walk through the memory of a gradient as through that of its parameter."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")

    def build():
        torch.manual_seed(0)
        return nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(2))
    with strategy.scope():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    plain = build()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        gradients = torch.autograd.grad(model(x).square().sum() / comm.size, list(model.parameters()))
        strategy.apply_gradients(optimizer, zip(gradients, model.parameters(), strict=True))
        plain_optimizer.zero_grad()
        plain(x).square().sum().backward()
        plain_optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)
    summed = strategy.run(lambda: hpcdist.get_replica_context().all_reduce("sum", model.weight.detach()))
    assert summed.stride() == model.weight.stride()
    whole = torch.arange(6).reshape(2, 3).T + 1 - comm.rank % 2
    mean = strategy.run(lambda: hpcdist.get_replica_context().all_reduce("mean", whole))
    expected = torch.arange(6.0).reshape(2, 3).T.double() + 1 - (comm.size // 2) / comm.size
    torch.testing.assert_close(mean, expected)


def test_an_error_in_a_backward_through_a_sum_does_not_keep_the_strategy_alive(comm):
    def train():
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 4), hpcdist.SyncBatchNorm(4)).double()
        y = model(rows()[0])
        y.square().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.square().sum().backward()
        return weakref.ref(strategy)

    strategy = train()
    gc.collect()
    assert strategy() is None


@pytest.mark.parametrize("n_replicas", [None, 8])
def test_run_inside_run_is_refused(comm, n_replicas):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas)
    with pytest.raises(RuntimeError, match="run.*strategy.run"):
        strategy.run(lambda: strategy.run(lambda: 1))
    default = hpcdist.get_strategy()
    assert default.run(lambda: default.run(lambda: 1)) == 1


def test_plain_values_are_refused_on_all_ranks_alike(comm):
    """A rank with one replica could take a plain value for its replica's, where a rank with two cannot."""
    strategy = Strategy(num_replicas=comm.size + 1)
    total = strategy.reduce("sum", strategy.run(lambda: torch.ones(2)), axis=None)
    same = torch.ones(2)
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.reduce("sum", total, axis=None)
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.gather(total, axis=0)
    with pytest.raises(ValueError, match=r"expected"):  # where two replicas return one object, it is a plain value
        strategy.reduce("sum", strategy.run(lambda: same), axis=None)
    with pytest.raises(ValueError, match=r"expected"):
        strategy.reduce("sum", strategy.run(lambda: "text" if comm.rank == 0 else torch.ones(1)), axis=None)
    assert strategy.reduce("mean", total, axis=None).tolist() == total.tolist()


@pytest.mark.feature("strategies.default-strategy", "semantics.reduce-of-nests")
def test_nests_of_values(comm):
    """As in TensorFlow: values from a function are a nest of PerReplica values, and a nest is reduced at once."""
    strategy = Strategy(num_replicas=2 * comm.size)
    nest = strategy.experimental_distribute_values_from_function(
        lambda of: {"one": torch.ones(2), "numbers": [of.replica_id_in_sync_group, 3]}
    )
    assert isinstance(nest["one"], hpcdist.PerReplica)
    n = 2 * comm.size
    total = strategy.reduce("sum", nest, axis=None)
    assert total["one"].tolist() == [n, n]
    assert total["numbers"] == [n * (n - 1) // 2, 3 * n]
    default = hpcdist.get_strategy()
    assert default.experimental_distribute_values_from_function(lambda of: [of.replica_id_in_sync_group]) == [0]
    rows = default.experimental_distribute_dataset(hpcdist.Dataset.range(3))
    assert list(map(int, rows)) == [0, 1, 2]


def test_empty_parts_are_per_replica_values_too(comm):
    """Those of a rank without rows are one object, which must not be taken for a plain value."""
    strategy = Strategy(num_replicas=3 * comm.size)
    data = hpcdist.Dataset.from_tensor_slices(np.ones((1, 1), np.float32)).map(lambda x: x + 1).batch(2)
    for batch in strategy.experimental_distribute_dataset(data):
        assert len(strategy.experimental_local_results(batch)) == 3
        assert strategy.gather(batch, axis=0).tolist() == [[2.0]]
