"""`loss.backward(); optimizer.step()` on all ranks: what `.grad` holds, and what is refused."""

import contextlib
import copy
import functools
import gc
import itertools
import logging
import pickle
import weakref

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import hpcdist
from hpcdist.collectives.group import Group
from hpcdist.errors import DesyncError, GradientError, NotFiniteError
from hpcdist.program import owners, torch_hooks
from hpcdist.runtime.process import make_world
from hpcdist.strategy.base import live_strategies

pytestmark = [pytest.mark.mpi, pytest.mark.core]
ROWS = 12


def local_rows(comm, n_rows=ROWS):
    """Return this rank's part of a global batch that all ranks can compute, and the whole."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(n_rows, 4, generator=generator), torch.randn(n_rows, 3, generator=generator)
    size = -(-n_rows // comm.size)
    part = slice(comm.rank * size, (comm.rank + 1) * size)
    return (whole[0][part], whole[1][part]), whole


def loss_of(model, rows, divisor=ROWS):
    """Return the sum of squared errors over the rows, divided by the global batch."""
    return mse_loss(model(rows[0]), rows[1], reduction="sum") / divisor


def build():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")


@pytest.fixture
def pair(strategy, comm):
    """Return a distributed model and a plain copy of it that is fed the whole batch."""
    torch.manual_seed(comm.rank)  # every rank starts elsewhere: the chief's values win
    with strategy.scope():
        model = build()
    strategy.run(lambda: None)
    return model, copy.deepcopy(model)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (actual_tensor is None) == (expected_tensor is None)
        if actual_tensor is not None:
            torch.testing.assert_close(actual_tensor, expected_tensor)


def assert_same_on_all_ranks(comm, tensors):
    bits = b"".join(b"-" if t is None else t.detach().contiguous().numpy().tobytes() for t in tensors)
    assert len(set(comm.allgather(bits))) == 1


@pytest.mark.feature("training.broadcast-of-initial-state")
def test_models_start_identical_from_the_chief(pair, comm):
    model, _ = pair
    assert_same_on_all_ranks(comm, model.parameters())
    torch.manual_seed(0)
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in build().parameters()])


@pytest.mark.feature("tf.gradients-summed-over", "semantics.gradients-are-summed")
def test_grad_is_the_sum_over_replicas_when_backward_returns(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    loss_of(model, local_batch).backward()
    loss_of(reference, whole).backward()
    assert_close(gradients(model), gradients(reference))
    assert_same_on_all_ranks(comm, gradients(model))


def test_the_sum_is_private_to_the_rank(pair, comm):
    model, _ = pair
    loss_of(model, local_rows(comm)[0]).backward()
    before = gradients(model)
    comm.Barrier()
    if comm.rank == 0:
        for parameter in model.parameters():
            parameter.grad.mul_(100)
    comm.Barrier()
    if comm.rank == 0:
        expected = [g * 100 for g in before]
    else:
        expected = before
    assert_close(gradients(model), expected)


def test_clipping_between_backward_and_step(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    for module, rows in ((model, local_batch), (reference, whole)):
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        loss_of(module, rows).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_kinds_of_zero_grad(pair, comm, set_to_none):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    for module, rows in ((model, local_batch), (reference, whole)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(module, rows).backward()
            optimizer.step()
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])
    assert_same_on_all_ranks(comm, model.parameters())


def test_a_second_backward_adds_only_its_own_sum(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    for factor in (1.0, 3.0, -2.0):
        (factor * loss_of(model, local_batch)).backward()
        (factor * loss_of(reference, whole)).backward()
        assert_close(gradients(model), gradients(reference))


def test_a_second_backward_through_other_parameters_keeps_the_first_sum(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    for module, rows in ((model, local_batch), (reference, whole)):
        loss_of(module, rows).backward()
        module[2](torch.ones(2, 5)).sum().backward() if module is reference else (
            module[2](torch.ones(2, 5)).sum() / comm.size
        ).backward()
    assert_close(gradients(model), gradients(reference))


@pytest.mark.feature("collectives.accumulation-without-sync")
def test_no_sync_defers_the_sum(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    with model_strategy(pair).no_sync():
        loss_of(model, local_batch).backward()
        local = gradients(model)
        loss_of(model, local_batch).backward()
    assert_close(gradients(model), [2 * g for g in local])
    loss_of(model, local_batch).backward()
    (3 * loss_of(reference, whole)).backward()
    assert_close(gradients(model), gradients(reference))
    assert_same_on_all_ranks(comm, gradients(model))


def model_strategy(pair):
    """Return the strategy that made the pair: the only one alive with its scope's models."""

    return next(live_strategy for live_strategy in live_strategies() if pair[0] in live_strategy.engine.managed.modules)


@pytest.mark.feature("collectives.accumulation-without-sync")
def test_a_parameter_touched_only_under_no_sync_is_summed_too(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    with model_strategy(pair).no_sync():
        loss_of(model, local_batch).backward()
    model[2](torch.zeros(1, 5)).sum().backward()
    loss_of(reference, whole).backward()
    reference[2](torch.zeros(1, 5)).sum().mul(comm.size).backward()
    assert_close(gradients(model), gradients(reference))


def test_step_on_local_gradients_raises(pair, comm):
    model, _ = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model_strategy(pair).no_sync():
        loss_of(model, local_rows(comm)[0]).backward()
    if comm.size == 1:
        optimizer.step()
        return
    with pytest.raises(GradientError, match="'0.weight'"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, local_rows(comm)[0]).backward()
    optimizer.step()


def test_mixing_summed_and_local_gradients_raises(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica has no two kinds")
    model, _ = pair
    loss_of(model, local_rows(comm)[0]).backward()
    with pytest.raises(GradientError, match="call zero_grad"), model_strategy(pair).no_sync():
        loss_of(model, local_rows(comm)[0]).backward()
    model.zero_grad(set_to_none=False)
    with model_strategy(pair).no_sync():
        loss_of(model, local_rows(comm)[0]).backward()


def test_unused_parameters_have_no_gradient_on_any_rank(pair, comm):
    model, _ = pair
    used = model[0] if comm.rank == 0 else model[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    used(torch.ones(2, used.in_features)).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(comm, gradients(model))
    assert (model[0].weight.grad is None) == (model[2].weight.grad is None and comm.size > 1)
    assert_same_on_all_ranks(comm, model.parameters())
    if comm.size == 1:
        assert model[2].weight.grad is None


def test_unused_parameters_train_as_on_one_rank(pair, comm):
    """Ranks use the second layer in the first step only; momentum and decay of what is unused follow torch's rules."""
    model, reference = pair
    local_batch, whole = local_rows(comm)
    for set_to_none in (True, False):
        for module, rows in ((model, local_batch), (reference, whole)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for step in range(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                if step == 0:
                    loss = loss_of(module, rows)
                else:
                    loss = module[0](rows[0]).square().sum() / ROWS
                loss.backward()
                optimizer.step()
        assert_close([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])
        assert_close(gradients(model), gradients(reference))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens))


def test_tied_weights(strategy, comm):
    with strategy.scope():
        model = Tied()
    tokens = torch.arange(comm.size * 2)[comm.rank * 2 :][:2] % 6
    loss = cross_entropy(model(tokens), tokens, reduction="sum")
    reference = copy.deepcopy(model)
    loss.backward()
    whole = torch.arange(comm.size * 2) % 6
    cross_entropy(reference(whole), whole, reduction="sum").backward()
    assert_close(gradients(model), gradients(reference))


def test_deep_copied_layers_are_found(strategy, comm):
    with strategy.scope():
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
    x = torch.full((1, 3, 8), float(comm.rank)) + torch.arange(8)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_same_on_all_ranks(comm, gradients(model))
    torch.optim.Adam(model.parameters()).step()
    assert_same_on_all_ranks(comm, model.parameters())


def test_weights_loaded_and_moved_between_scope_and_first_use(strategy, comm):
    with strategy.scope():
        model = build()
    model.double().float()
    nn.init.constant_(model[0].weight, float(comm.rank + 5))
    strategy.run(lambda: None)
    assert (model[0].weight == 5).all()


@pytest.mark.feature("training.mixed-precision")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(strategy, comm, dtype):
    with strategy.scope():
        model = nn.Linear(4, 2).to(dtype)
    x = torch.full((1, 4), comm.rank + 1.0).to(dtype)
    model(x).sum().backward()
    assert model.weight.grad.dtype is dtype
    assert (model.weight.grad == comm.size * (comm.size + 1) / 2).all()
    assert (model.bias.grad == comm.size).all()


def test_channels_last_weights_keep_their_strides(strategy, comm):
    with strategy.scope():
        model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model(torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(comm.rank))).sum().backward()
    assert model.weight.grad.stride() == model.weight.stride()
    assert_same_on_all_ranks(comm, gradients(model))


def test_several_optimizers_and_models(strategy, comm):
    """A GAN's two optimizers: each backward sums what it touched, and step moves only its own parameters."""
    with strategy.scope():
        generator = nn.Linear(2, 4)
        critic = nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())]
    for step in range(3):
        noise = torch.randn(2, 2)
        optimizers[1].zero_grad()
        critic(generator(noise).detach()).sum().backward()
        assert generator.weight.grad is None or step > 0
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(generator(noise)).sum().backward()
        optimizers[0].step()
    assert_same_on_all_ranks(comm, [*generator.parameters(), *critic.parameters()])


def test_a_model_built_after_the_first_step_joins(strategy, comm):
    with strategy.scope():
        first = nn.Linear(2, 2)
    first(torch.full((1, 2), float(comm.rank))).sum().backward()
    torch.manual_seed(comm.rank)
    with strategy.scope():
        second = nn.Linear(2, 2)
    second(first(torch.full((1, 2), float(comm.rank)))).sum().backward()
    assert_same_on_all_ranks(comm, [*second.parameters(), *gradients(first), *gradients(second)])


def test_unfreezing_inside_the_scope(strategy, comm):
    with strategy.scope():
        model = build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, local_rows(comm)[0]).backward()
    optimizer.step()
    with strategy.scope():
        model[0].requires_grad_(True)
    loss_of(model, local_rows(comm)[0]).backward()
    optimizer.step()
    assert_same_on_all_ranks(comm, [*model.parameters(), *gradients(model)])


def test_unfreezing_elsewhere_is_refused_at_step(strategy, comm):
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    with strategy.scope():
        model = build()
    model[0].requires_grad_(False)
    loss_of(model, local_rows(comm)[0]).backward()
    model[0].requires_grad_(True)
    loss_of(model, local_rows(comm)[0]).backward()
    with pytest.raises(GradientError, match="gradient.*summed"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_parameter_made_outside_the_scope_is_refused_at_step(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    model, _ = pair
    outside = nn.Linear(3, 1)
    outside(model(local_rows(comm)[0][0])).sum().backward()
    with pytest.raises(GradientError, match="gradient.*summed"):
        torch.optim.SGD([*model.parameters(), *outside.parameters()], lr=0.1).step()


def test_a_model_of_the_users_own_is_left_alone(pair, comm):
    private_model = nn.Linear(2, 1)
    nn.init.constant_(private_model.weight, 1.0)
    private_model(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert private_model.weight.grad.tolist() == [[comm.rank] * 2]
    torch.optim.SGD(private_model.parameters(), lr=1.0).step()
    assert private_model.weight.tolist() == [[1.0 - comm.rank] * 2]


def test_a_gradient_set_by_hand_is_refused(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    model, _ = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, local_rows(comm)[0]).backward()
    model[0].weight.grad = model[0].weight.grad * 2
    with pytest.raises(GradientError, match="backward.*another"):
        optimizer.step()
    with pytest.raises(GradientError, match="set by hand"):
        loss_of(model, local_rows(comm)[0]).backward()


def test_autograd_grad_leaves_grad_alone(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    loss_of(model, local_batch).backward()
    before = gradients(model)
    torch.autograd.grad(loss_of(model, local_batch), list(model.parameters()))
    assert_close(gradients(model), before)
    loss_of(model, local_batch).backward()
    (2 * loss_of(reference, whole)).backward()
    assert_close(gradients(model), gradients(reference))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ZeroDivisionError


@pytest.mark.parametrize("is_zeroed", [True, False])
def test_a_backward_that_raised_and_was_caught_leaves_nothing_behind(pair, comm, is_zeroed):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    with pytest.raises(ZeroDivisionError):
        model[2](Failing.apply(model[0](local_batch[0]))).sum().backward()
    if is_zeroed or comm.size == 1:  # on one rank it is as in torch
        model.zero_grad()
    loss_of(model, local_batch).backward()
    loss_of(reference, whole).backward()
    assert_close(gradients(model), gradients(reference))
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_failed_backward_after_a_good_one(pair, comm, set_to_none):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    loss_of(model, local_batch).backward()
    with pytest.raises(ZeroDivisionError):
        model[2](Failing.apply(model[0](local_batch[0]))).sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    loss_of(model, local_batch).backward()
    loss_of(reference, whole).backward()
    assert_close(gradients(model), gradients(reference))


def test_a_backward_that_raises_leaves_what_it_did_not_write(strategy, comm):
    """As torch does: a second backward through a freed graph touches nothing."""
    with strategy.scope():
        used = nn.Linear(2, 1)
        idle_layer = nn.Linear(2, 1)
    x = torch.ones(3, 2)
    (used(x) + idle_layer(x)).sum().backward()
    sums = [idle_layer.weight.grad.clone(), used.weight.grad.clone()]
    loss = used(x).square().sum()
    loss.backward()
    summed = used.weight.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert torch.equal(idle_layer.weight.grad, sums[0])
    assert torch.equal(used.weight.grad, summed)
    assert not torch.equal(summed, sums[1])
    torch.optim.SGD([*used.parameters(), *idle_layer.parameters()], lr=0.1).step()


def test_a_backward_past_torch_autograd_backward_is_refused(pair, comm):
    """Nobody has seen it begin, so it has added to the sum of an earlier one, or left a local gradient."""
    if comm.size == 1:
        pytest.skip("one replica sums nothing")
    model, _ = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, local_rows(comm)[0]).backward()
    loss = loss_of(model, local_rows(comm)[0])
    ones = torch.ones_like(loss)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    with pytest.raises(GradientError, match="another call of autograd"):
        optimizer.step()


def test_a_step_inside_a_backward_is_refused_for_gradients_of_an_earlier_one(pair, comm):
    """They are put away meanwhile: the optimizer would find nothing, and torch alone would step on them."""
    if comm.size == 1:
        pytest.skip("one replica sums nothing")
    model, _ = pair
    last = model[2].bias
    first = model[0].bias
    optimizer = torch.optim.SGD([first], lr=0.1)
    loss_of(model, local_rows(comm)[0]).backward()
    handle = last.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())  # before the first layer's
    with pytest.raises(GradientError, match="got a local one in '0.bias'"):
        loss_of(model, local_rows(comm)[0]).backward()
    handle.remove()


class Inner(torch.autograd.Function):
    """Goes backward through a model in its own backward."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.model(ctx.saved_tensors[0].detach()).sum().backward()
        return gradient, None


@pytest.mark.parametrize("outer", ["backward", "autograd.grad"])
def test_a_backward_inside_another_call_of_autograd_is_refused(pair, comm, outer):
    if comm.size == 1:
        pytest.skip("one replica sums nothing")
    model, _ = pair
    x = local_rows(comm)[0][0].requires_grad_()
    loss = Inner.apply(x, model).sum()
    if outer == "backward":
        go_backward = loss.backward
    else:
        go_backward = functools.partial(torch.autograd.grad, loss, x)
    with pytest.raises(GradientError, match="one backward at a time"):
        go_backward()


def test_a_gradient_whose_data_was_replaced_is_refused(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    model, _ = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, local_rows(comm)[0]).backward()
    model[0].weight.grad.data = model[0].weight.grad.data * 0.5
    with pytest.raises(GradientError, match="got another tensor"):
        optimizer.step()


def test_strides_changed_after_a_backward(strategy, comm):
    with strategy.scope():
        model = nn.Conv2d(2, 3, 3)
    x = torch.full((1, 2, 3, 3), float(comm.rank + 1))
    model(x).sum().backward()
    model.to(memory_format=torch.channels_last)
    model.zero_grad()
    model(x).sum().backward()
    assert (model.weight.grad == comm.size * (comm.size + 1) / 2).all()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own hint; as an error it would hang torch
def test_a_graph_of_the_gradient_is_refused(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica sums nothing")
    model, _ = pair
    with pytest.raises(GradientError, match="create_graph"):
        loss_of(model, local_rows(comm)[0]).backward(create_graph=True)


def test_two_forwards_through_batch_norm_then_two_backwards(strategy, comm):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first, second = (model(torch.randn(4, 2)).square().sum() for _ in range(2))
    first.backward()
    second.backward()
    assert_same_on_all_ranks(comm, [*gradients(model), model[1].running_mean])


def test_a_first_use_in_inference_mode(strategy, comm):
    with strategy.scope():
        model = nn.Linear(2, 1)
    with torch.inference_mode():
        model(torch.ones(1, 2))
    model(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert model.weight.grad.tolist() == [[comm.size * (comm.size - 1) / 2] * 2]


def test_layers_keep_their_order_when_others_were_thrown_away(strategy, comm):
    """Python gives new modules the ids of dead ones, in another order on every rank."""
    with strategy.scope():
        for _ in range(50 + 13 * comm.rank):
            nn.Linear(1, 1)
        layers = [nn.Linear(1, 1) for _ in range(20)]
    strategy.run(lambda: None)
    for number, layer in enumerate(layers):
        (layer(torch.ones(1, 1)).sum() * number).backward()
    assert [layer.bias.grad.item() for layer in layers] == [number * comm.size for number in range(20)]


def test_a_copy_of_a_whole_model_made_in_the_scope_is_summed(strategy, comm):
    base = nn.Linear(2, 1)
    with strategy.scope():
        model = copy.deepcopy(base)
    model(torch.full((1, 2), float(comm.rank))).sum().backward()
    assert model.weight.grad.tolist() == [[comm.size * (comm.size - 1) / 2] * 2]
    assert_same_on_all_ranks(comm, model.parameters())


class WithMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Parameter(torch.ones(2))

    def loss(self, x):
        return (self.layer * x).sum()


def unsummed(strategy, kind, comm):
    """Return (model, loss, optimizer) of a program whose gradients hpcdist never saw."""
    if kind == "unfrozen elsewhere":
        with strategy.scope():
            model = nn.Linear(2, 1).requires_grad_(False)
        model(torch.ones(1, 2))
        model.requires_grad_(True)
        return model, model(torch.ones(1, 2)).sum(), torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "a method":
        with strategy.scope():
            model = WithMethod()
        return model, model.loss(torch.ones(2) * comm.rank), torch.optim.SGD(model.parameters(), lr=1.0)
    with strategy.scope():
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, (parameter * comm.rank).sum(), optimizer


@pytest.mark.parametrize("kind", ["unfrozen elsewhere", "a method", "a bare parameter"])
def test_what_was_never_summed_is_refused_at_step(strategy, comm, kind):
    if comm.size == 1:
        pytest.skip("one replica cannot differ")
    _model, loss, optimizer = unsummed(strategy, kind, comm)
    loss.backward()
    with pytest.raises(GradientError, match="gradient.*summed"):
        optimizer.step()


def mean_job(comm, n_rows, batch):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    rows = torch.arange(2.0 * n_rows).reshape(n_rows, 2)
    return (
        strategy,
        model,
        strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(batch)),
    )


def test_mean_weighs_a_part_that_was_drawn_ahead_by_its_own_rows(comm):
    """Parts are known by their tensors, as long as the model gets these, or views of them."""
    _, model, dataset = mean_job(comm, 5, 4)
    reference = copy.deepcopy(model)
    parts = iter(dataset)
    ahead = [next(parts), next(parts)]
    for first, part in zip((0, 4), ahead, strict=True):
        model.zero_grad()
        (model(part[:]).mean() if len(part) else model(part).sum() * float("nan")).backward()
        reference.load_state_dict(model.state_dict())
        reference.zero_grad()
        reference(torch.arange(10.0).reshape(5, 2)[first : first + 4]).mean().backward()
        assert_close(gradients(model), gradients(reference))


def test_mean_refuses_copies_of_parts_of_which_one_or_another_may_be_meant(comm):
    """Nobody could tell which part a gradient stands for."""
    _, model, dataset = mean_job(comm, 3 * comm.size - 1, 2 * comm.size)
    if comm.size == 1:
        pytest.skip("one replica weighs nothing")
    parts = iter(dataset)
    ahead = [next(parts), next(parts)]
    with pytest.raises(GradientError, match=r"may be meant|look at the line of that rank"):
        model(ahead[0].clone()).mean().backward()


@pytest.mark.feature("collectives.accumulation-without-sync")
def test_mean_under_no_sync_weighs_equal_parts_and_refuses_others(comm):
    """Two batches of 2 rows a replica, then one of a single row in all."""
    strategy, model, dataset = mean_job(comm, 4 * comm.size + 1, 2 * comm.size)
    reference = copy.deepcopy(model)
    if comm.size == 1:
        pytest.skip("one replica weighs nothing")
    parts = iter(dataset)
    for number in range(2):
        with strategy.no_sync() if number == 0 else contextlib.nullcontext():
            model(next(parts)).mean().backward()
    reference.load_state_dict(model.state_dict())
    for rows in torch.arange(8.0 * comm.size).reshape(2, -1, 2):
        reference(rows).mean().backward()
    assert_close(gradients(model), gradients(reference))
    model.zero_grad()
    with strategy.no_sync():
        model(torch.ones(2, 2)).mean().backward()  # the rows of the last part weigh it
    with pytest.raises(GradientError, match="micro.*batches"):
        model(next(parts)).sum().backward()


def test_mean_weighs_the_second_backward_as_the_first(comm):
    """Rows 0..4 over the replicas: uneven parts, and two backwards for each."""
    _, model, dataset = mean_job(comm, 5, 5)
    reference = copy.deepcopy(model)
    for x in dataset:
        model(x).mean().backward() if len(x) else (model(x).sum() * float("nan")).backward()
        model(x).square().mean().backward() if len(x) else (model(x).sum() * float("nan")).backward()
    reference.load_state_dict(model.state_dict())
    whole = torch.arange(10.0).reshape(5, 2)
    reference(whole).mean().backward()
    reference(whole).square().mean().backward()
    assert_close(gradients(model), gradients(reference))


@pytest.mark.filterwarnings("ignore:.*autocast.*:FutureWarning")  # of torch 2.4 itself
def test_checkpointing_without_reentry_works_and_with_it_is_refused(pair, comm):
    model, reference = pair
    local_batch, whole = local_rows(comm)
    x = local_batch[0].clone().requires_grad_()
    mse_loss(checkpoint(model, x, use_reentrant=False), local_batch[1], reduction="sum").backward()
    mse_loss(reference(whole[0]), whole[1], reduction="sum").backward()
    assert_close(gradients(model), gradients(reference))
    if comm.size > 1:
        model.zero_grad()
        with pytest.raises(GradientError, match="use_reentrant=False"):
            checkpoint(model, x, use_reentrant=True).sum().backward()


def test_strategies_may_be_collected_while_an_optimizer_steps():
    """As in a notebook whose cell runs again: torch goes through its hooks then."""
    gone = []

    def collect(*_):
        gone.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        for _ in range(3):
            gone += [hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum") for _ in range(3)]
            optimizer.step()
            assert not gone
    finally:
        handle.remove()


@pytest.mark.parametrize("n_local", [None, 2])
def test_a_forgotten_scope_is_an_error_at_the_first_step(comm, n_local, caplog):
    """Each rank would train a model of its own, and the job would end with 0."""
    hpcdist.barrier_async().wait()  # there is a communication thread, with a journal of its own
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_local and n_local * comm.size)
    rows = torch.ones(20 * comm.size, 2)
    dataset = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(4 * comm.size))
    batches = iter(dataset)

    def step(model, between=lambda model: None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(strategy.experimental_local_results(batch)[0]).sum().backward()
        between(model)
        optimizer.step()

    def in_pieces(model):
        strategy.reduce("mean", torch.ones(()), None)
        for piece in model.weight.grad.reshape(-1).split(3):
            hpcdist.all_reduce(piece)

    batch = next(batches)
    step(nn.Linear(2, 1), lambda model: hpcdist.all_reduce(model.weight.grad))  # it sums by itself
    second_strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with second_strategy.scope():
        step(nn.Linear(2, 1))  # another strategy's model
    batch = next(batches)
    if n_local is None:
        with strategy.no_sync():
            step(nn.Linear(2, 1))
    if strategy.num_replicas_in_sync == 1:
        step(nn.Linear(2, 1))
        return
    with pytest.raises(GradientError, match=r"strategy.scope\(\)"):
        step(nn.Linear(2, 1))
    with pytest.raises(GradientError, match=r"strategy.scope\(\)"):  # a loss is no gradient
        step(nn.Linear(2, 8), lambda model: (strategy.reduce("mean", torch.ones(()), None), strategy.barrier()))
    step(nn.Linear(2, 8), in_pieces)  # sums by itself, beside a loss
    batch = next(batches)
    step(nn.Linear(2, 8), lambda model: hpcdist.all_reduce_async(model.weight.grad).wait())
    with strategy.scope():  # a part of the models alone is made in the scope: another one may be meant to differ
        scoped_model = nn.Linear(2, 1)
    assert "expected a model made" not in caplog.text
    batch = next(batches)
    for _ in range(2):
        step(nn.Linear(2, 8))
    assert caplog.text.count("expected a model made in strategy.scope()") == 1, "logged once"
    assert scoped_model.weight.grad is None


def test_beside_the_model_of_the_scope_a_rank_may_optimize_tensors_of_its_own(comm):
    """Such as a perturbation of its rows, before the step of the model."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(2, 1)
    rows = torch.ones(8 * comm.size, 2)
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(4 * comm.size)
    for x in strategy.experimental_distribute_dataset(dataset):
        delta = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.1 * (1 + comm.rank))
        (delta.grad,) = torch.autograd.grad(model(x + delta).sum(), delta)
        attack.step()
        model(x + delta.detach()).sum().backward()


def scaled(model, rows=1):
    return hpcdist.compute_average_loss(model(torch.ones(rows, 2))[:, 0])


@pytest.mark.feature("tf.gradients-summed-over", "semantics.loss-scaling")
def test_nobody_said_how_gradients_combine(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = nn.Linear(2, 1)
    loss = model(torch.ones(1, 2) * comm.rank).mean()
    if comm.size == 1:
        loss.backward()
        return
    with torch.no_grad():
        scaled(model)  # a loss that is only looked at says nothing
    scaled(model)  # nor one that reaches no backward
    with pytest.raises(GradientError, match=r"compute_average_loss.*ReduceOp.SUM.*ReduceOp.MEAN"):
        loss.backward()
    model.zero_grad()
    scaled(model).backward()
    assert model.bias.grad.item() == pytest.approx(1.0)


@pytest.mark.feature("semantics.loss-scaling")
@pytest.mark.parametrize("n_local", [None, 2])
def test_a_second_kind_of_loss_is_an_error(comm, n_local):
    """After scaled losses, the mean over local rows would give a gradient that is too large by the replicas."""
    if comm.size == 1 and n_local is None:
        return
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_local and n_local * comm.size)
    with strategy.scope():
        model = nn.Linear(2, 1)
        second_model = nn.Linear(2, 1)

    def step(loss_fn):
        model.zero_grad()
        loss_fn().backward()
        return model.bias.grad.item()

    def run(loss_fn):
        return strategy.experimental_local_results(strategy.run(step, args=(loss_fn,)))

    assert run(lambda: scaled(model))[0] == pytest.approx(1.0)
    with pytest.raises(GradientError, match="hpcdist.compute_average_loss"):
        run(lambda: model(torch.ones(1, 2)).mean())
    assert run(lambda: scaled(model, 3))[0] == pytest.approx(1.0)
    more = run(lambda: scaled(model) + second_model(torch.ones(1, 2)).sum() * 0.5)  # a term of one's own beside it
    assert more[0] == pytest.approx(1.0)
    penalty = run(lambda: hpcdist.scale_regularization_loss(2 * model.bias.sum()))
    assert penalty[0] == pytest.approx(2.0)
    with strategy.scope():
        joint = nn.Linear(2, 1)
    another = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_local and n_local * comm.size)
    with another.scope():
        foreign_model = nn.Linear(2, 1)
    for _ in range(2):  # models of two strategies in one backward
        run(lambda: scaled(joint) + hpcdist.scale_regularization_loss(model.bias.sum()))
    assert foreign_model.bias.grad is None


def test_a_regularizer_settles_nothing_and_is_right_with_a_mean_too(comm):
    def grad(loss_of, **options):
        strategy = hpcdist.MultiWorkerMirroredStrategy(**options)
        with strategy.scope():
            model = nn.Linear(2, 1)
            nn.init.ones_(model.weight)
            loss_of(model).backward()
        return model.weight.grad[0, 0].item()

    def mean_and_penalty(model):
        penalty = hpcdist.scale_regularization_loss((model.weight**2).sum())
        return model(torch.ones(1, 2)).mean() + penalty

    assert grad(mean_and_penalty, gradient_op="mean") == pytest.approx(3.0)
    if comm.size > 1:
        with pytest.raises(GradientError, match="gradient_op"):
            grad(mean_and_penalty)


def test_mean_weighs_replicas_by_the_rows_they_were_handed(comm):
    """11 rows over the replicas are 11 on one, 6 + 5 on two, and with 4 replicas 3 + 3 + 3 + 2."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    torch.manual_seed(0)
    with strategy.scope():
        model = build()
    _, whole = local_rows(comm, 11)
    dataset = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(whole).batch(11))
    for x, y in dataset:
        mse_loss(model(x), y).backward()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    mse_loss(reference(whole[0]), whole[1]).backward()
    assert_close(gradients(model), gradients(reference))


@pytest.mark.feature("input.zero-weight-participation")
def test_mean_of_an_empty_part_adds_zero_not_nan(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    rows = torch.ones(1, 2)
    dataset = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(4))
    for x in dataset:
        model(x).mean().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_rows_of_an_evaluation_do_not_weigh_later_gradients(comm):
    """One row of evaluation leaves all replicas but one without rows; training then uses a loader of its own."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    dataset = hpcdist.Dataset.from_tensor_slices(torch.ones(1, 2)).batch(4)
    with torch.no_grad():
        for x in strategy.experimental_distribute_dataset(dataset):
            model(x)
    model(torch.full((3, 2), float(comm.rank))).mean().backward()
    assert model.weight.grad.tolist() == [pytest.approx([(comm.size - 1) / 2] * 2)]


def test_a_model_converted_after_its_first_use_is_refused(pair, comm):
    if comm.size == 1:
        pytest.skip("one replica needs no bucket")
    model, _ = pair
    model.double()
    with pytest.raises(GradientError, match="first"):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()


def test_mean_without_a_distributed_dataset_is_the_mean_over_replicas(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    model(torch.full((3, 2), float(comm.rank))).mean().backward()
    assert model.weight.grad.tolist() == [pytest.approx([(comm.size - 1) / 2] * 2)]


@pytest.mark.feature("tf.moving-statistics-those")
def test_batch_norm_statistics_are_averaged_and_other_buffers_keep_their_bits(strategy, comm):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model.register_buffer("constant", torch.full((3,), 0.1))
    frozen = model.constant.clone()
    means = []
    for step in range(3):
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        before = model[1].running_mean.clone()
        hidden = model[0](x)
        model(x).square().sum().backward()
        means.append(hidden.detach().mean(0))
        expected = 0.9 * before + 0.1 * torch.stack(comm.allgather(means[-1])).mean(0)
        torch.testing.assert_close(model[1].running_mean, expected)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.zero_grad()
    assert_same_on_all_ranks(comm, [model[1].running_mean, model[1].running_var])
    assert torch.equal(model.constant, frozen)


@pytest.mark.feature("debugging.finite-and-shape-checks")
def test_a_model_built_differently_on_one_rank(strategy, comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    with strategy.scope():
        if comm.rank < comm.size - 1:
            width = 5
        else:
            width = 6
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh())
    with pytest.raises(DesyncError) as caught:
        model(torch.ones(1, 4))
    text = str(caught.value)
    assert "got 2, first difference '0.weight (6, 4)" in text
    assert f"[rank {comm.size - 1} (worker {comm.size - 1})]" in text
    assert len(set(comm.allgather(text))) == 1


def test_lazy_modules_are_refused(strategy, comm):
    with strategy.scope():
        model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="uninitialized '0.weight'"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("is_same", [True, False])
def test_the_same_first_batch_on_every_rank_is_reported_once(strategy, comm, caplog, is_same):
    with strategy.scope():
        model = nn.Linear(4, 1)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        if is_same:
            value = 1.0
        else:
            value = float(comm.rank)
        strategy.run(model, args=(torch.full((2, 4), value),))
        strategy.run(model, args=(torch.ones(2, 4),))
    reports = comm.allgather(caplog.messages)
    n_expected = 1 if is_same and comm.size > 1 else 0
    assert list(map(len, reports)) == [n_expected] + [0] * (comm.size - 1)
    if n_expected:
        assert "got the same first batch on all; if it comes from a plain DataLoader, use strategy." in reports[0][0]


def test_a_validation_of_the_same_rows_is_not_reported(strategy, caplog):
    """It may come first, as where a run resumes at the end of an epoch."""
    with strategy.scope():
        model = nn.Linear(4, 1)
    with caplog.at_level(logging.WARNING, "hpcdist"), torch.no_grad():
        model(torch.ones(2, 4))
    assert not caplog.messages


def test_nothing_is_said_of_one_rank_that_has_several_replicas(caplog):
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        hpcdist.MPIClusterResolver(comm=MPI.COMM_SELF), num_replicas=3, gradient_op="sum"
    )
    with strategy.scope():
        model = nn.Linear(1, 1)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        strategy.run(lambda x: model(x).sum().backward(), args=(torch.ones(2, 1),))
    assert caplog.records == []


@pytest.mark.feature("debugging.determinism")
def test_dropout_draws_by_seed_step_and_replica(comm):
    def draws(seed):
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        torch.manual_seed(seed)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        drawn = []
        for _ in range(2):
            model(torch.ones(4, 4)).sum().backward()
            torch.rand(comm.rank + 1)  # what a step draws besides does not shift the next step
            optimizer.step()
            drawn.append(torch.rand(4).tolist())
        return drawn

    first = draws(1)
    same_seed_draws = draws(1)
    other_seed_draws = draws(2)
    assert first == same_seed_draws
    assert first != other_seed_draws
    everyone = list(map(tuple, itertools.chain.from_iterable(comm.allgather(first))))
    assert len(set(everyone)) == 2 * comm.size


def test_step_is_counted_and_survives_a_state_dict(strategy, comm):
    with strategy.scope():
        model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    state = strategy.state_dict()
    assert state["step"] == 3
    assert strategy.world.describe().endswith("at step 3")
    resumed_strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    resumed_strategy.load_state_dict(state)
    first = torch.rand(3)
    strategy.load_state_dict(state)
    assert torch.equal(first, torch.rand(3))


def test_an_unused_strategy_takes_its_hooks_away(comm):
    gc.collect()
    before = len(torch_hooks._before_steps)
    n_watchers = len(torch_hooks._watchers)
    unused = hpcdist.MultiWorkerMirroredStrategy()
    with unused.scope():
        model = nn.Linear(1, 1)
    assert len(torch_hooks._watchers) == n_watchers + 1
    del unused, model
    gc.collect()
    assert len(torch_hooks._watchers) == n_watchers
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(1, 1)
    model(torch.ones(1, 1) * comm.rank).sum().backward()
    assert len(torch_hooks._before_steps) == before + 1
    del strategy, model
    gc.collect()
    assert len(torch_hooks._before_steps) == before


@pytest.mark.feature("tf.variables-models-remember", "semantics.models-know-their-strategy")
def test_a_model_keeps_summing_when_its_strategy_is_out_of_sight(comm):
    import gc

    def build_model():
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            return nn.Linear(1, 1)

    model = build_model()
    gc.collect()
    model(torch.full((1, 1), float(comm.rank))).sum().backward()
    gc.collect()
    model.zero_grad()
    model(torch.full((1, 1), float(comm.rank))).sum().backward()
    assert model.weight.grad.item() == comm.size * (comm.size - 1) / 2


def test_steps_are_seen_when_the_strategy_is_out_of_sight(comm):
    def build():
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            model = nn.Linear(1, 1)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    for step in range(1, 3):
        gc.collect()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert make_world().step == step
        optimizer.zero_grad()
    gc.collect()
    if comm.size > 1:
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(GradientError, match="as backward left it"):
            optimizer.step()
    reference = weakref.ref(model)
    n_watchers = len(torch_hooks._before_steps)
    del model, optimizer
    owners.collect_garbage()
    assert reference() is None
    assert len(torch_hooks._before_steps) == n_watchers - 1


def test_steps_on_parameters_that_are_in_no_module_are_seen_too(comm):
    def build():
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            parameters = [nn.Parameter(torch.ones(2)), *nn.Linear(1, 1).parameters()]
        strategy.run(lambda: None)
        return parameters, torch.optim.SGD(parameters, lr=0.1)

    parameters, optimizer = build()
    gc.collect()
    for step in range(1, 3):
        parameters[0].sum().backward()
        optimizer.step()
        assert make_world().step == step


def test_a_step_on_a_parameter_that_was_never_planned_is_refused(comm):
    if comm.size == 1:
        pytest.skip("one replica sums nothing")

    def build():
        with hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum").scope():
            return nn.Parameter(torch.ones(2))

    parameter = build()
    gc.collect()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    with pytest.raises(GradientError, match="was not summed"):
        optimizer.step()


def test_a_strategy_that_holds_its_model_is_freed_with_it(comm):
    gc.collect()
    n_alive = len(live_strategies())
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        strategy.model = nn.Linear(1, 1)
    strategy.model(torch.ones(1, 1)).sum().backward()
    weight = strategy.model.weight
    assert not vars(weight), "its module keeps the strategy, which garbage collection sees in every release of torch"
    del strategy, weight
    gc.collect()
    assert len(live_strategies()) == n_alive


def test_a_state_dict_makes_no_second_group(strategy, monkeypatch):
    monkeypatch.setattr(Group, "__init__", None)
    assert strategy.state_dict()["step"] == 0


def test_copies_and_pickles_of_a_model_know_nothing_of_its_strategy(strategy):
    with strategy.scope():
        model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not [value for value in vars(copied).values() if type(value).__module__.startswith("hpcdist")]
    assert b"hpcdist.program" not in pickle.dumps(model.state_dict())


def test_a_model_that_is_gone_takes_part_as_nothing(strategy, comm):
    with strategy.scope():
        first = nn.Linear(1, 1)
        second = nn.BatchNorm1d(1)
    first(torch.ones(1, 1)).sum().backward()
    del second
    first.zero_grad()
    first(torch.ones(1, 1)).sum().backward()
    assert first.weight.grad.item() == comm.size


def test_a_layer_that_only_some_replicas_use_sums_what_they_have(strategy, comm):
    """From the second step on rank 0 alone uses the layer: the others add zero, not what their slot held before."""
    with strategy.scope():
        layer = nn.Linear(1, 1)
        always = nn.Linear(1, 1)
    for step in range(3):
        layer.zero_grad()
        loss = always(torch.ones(1, 1)).sum()
        if step == 0 or comm.rank == 0:
            loss = loss + layer(torch.full((1, 1), comm.rank + 2.0)).sum()
        loss.backward()
        everyone = sum(rank + 2.0 for rank in range(comm.size))
        if step == 0:
            expected = everyone
        else:
            expected = 2.0
        assert layer.weight.grad.item() == expected


def test_a_buffer_that_one_replica_changed_takes_its_value(strategy, comm):
    with strategy.scope():
        model = nn.Linear(1, 1)
        model.register_buffer("seen", torch.zeros(1))
    model(torch.ones(1, 1)).sum().backward()
    if comm.rank == comm.size - 1:
        model.seen.fill_(6.0)
    model(torch.ones(1, 1)).sum().backward()
    assert model.seen.item() == 6.0


def test_nan_of_an_empty_part_is_not_added(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
    for x in strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(torch.ones(1, 2)).batch(4)):
        if len(x):
            loss = model(x).mean()
        else:
            loss = model(torch.ones(1, 2)).sum() * float("nan")
        loss.backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.feature("debugging.finite-and-shape-checks")
@pytest.mark.parametrize("num_replicas", [None, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_debug_names_the_parameter_whose_gradient_is_not_finite(comm, monkeypatch, num_replicas, value):
    monkeypatch.setattr(make_world(), "debug", frozenset(["finite"]))
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas, gradient_op="sum")
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica sums nothing")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def step(rows):
        model(rows).sum().backward()

    strategy.run(step, args=(torch.ones(1, 2),))
    with pytest.raises(NotFiniteError, match=r"NaN.*'\d\.weight'"):
        strategy.run(step, args=(torch.full((1, 2), value),))


def test_a_grad_scaler_outside_of_run_with_several_replicas_is_that_of_one_process(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=2 * comm.size)
    torch.manual_seed(3)
    plain = nn.Linear(2, 1)
    with strategy.scope():
        model = nn.Linear(2, 1)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(8.0 * comm.size).reshape(-1, 2) / (4 * comm.size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(len(rows))
    for x in strategy.experimental_distribute_dataset(dataset):

        def backward(x):
            losses = model(x).square()[:, 0]
            scaler.scale(hpcdist.compute_average_loss(losses, global_batch_size=len(rows))).backward()

        strategy.run(backward, args=(x,))
        scaler.step(optimizer)
        scaler.update()
    plain(rows).square().mean().backward()
    expected = plain.weight - 0.1 * plain.weight.grad
    torch.testing.assert_close(model.weight, expected)


@pytest.mark.feature("training.mixed-precision")
def test_a_grad_scaler_skips_a_step_on_all_ranks_when_one_overflows(comm):
    """Gradients are sums, so that all ranks see the infinity of one."""
    torch.manual_seed(1)  # ranks are compared before the first forward, too
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights = [model.weight.detach().clone()]
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        overflows = step == 1 and comm.rank == comm.size - 1
        if overflows:
            factor = float("inf")
        else:
            factor = 1.0
        loss = model(torch.ones(2, 2)).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.detach().clone())
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[2], weights[3])
    assert len(set(map(str, comm.allgather([weight.tolist() for weight in weights])))) == 1
