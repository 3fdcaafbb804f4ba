"""ZeroRedundancyOptimizer: weights and states of the plain optimizer bit for bit, gradients that nobody can misread."""

import contextlib
import copy
import functools
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import CheckpointMismatch, GradientError, UsageError
from hpcdist.gradients import planner
from hpcdist.optim import ZeroRedundancyOptimizer
from hpcdist.plan.runs import plan_runs
from hpcdist.storage import shares
from hpcdist.storage.sharded_state import SharedState
from hpcdist.storage.shares import blocks_of, flat_gradient, norm_of_blocks

pytestmark = pytest.mark.mpi
N_ROWS = 24  # of a global batch
CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam, fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "Adam, a loop": (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


class Net(nn.Module):
    """Small and large layers, BatchNorm, tied and frozen weights, and a layer that is not always used."""

    def __init__(self, width=40):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.rare = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x, is_rare=False):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.tied(self.frozen(torch.relu(self.middle(x)))))
        return self.last(self.rare(x) if is_rare else x)


def make(kind, options, *, is_sharded, width=40, strategy=None):
    strategy = strategy or hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = Net(width)
        named = dict(model.named_parameters())
        decayed = [parameter for name, parameter in named.items() if name.endswith("weight")]
        undecayed = []
        for name, parameter in named.items():
            if not name.endswith("weight"):
                undecayed.append(parameter)
        if kind is torch.optim.Rprop:
            decay = {}
        else:
            decay = {"weight_decay": 0.01}
        groups = [{"params": decayed, **decay}, {"params": undecayed, "lr": options["lr"] / 2}]
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(groups, kind, **options)
        else:
            optimizer = kind(groups, **options)
    return strategy, model, optimizer


def loss_of(strategy, model, step, is_rare=False):
    """Return this rank's part of the loss of a step, on rows that are the same on any number of ranks."""
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(N_ROWS, 7, generator=draws)
    y = torch.randn(N_ROWS, 3, generator=draws)
    rows = np.array_split(np.arange(N_ROWS), strategy.num_replicas_in_sync)[strategy.world.role_comm.rank]
    return hpcdist.compute_average_loss(((model(x[rows], is_rare) - y[rows]) ** 2).sum(1), global_batch_size=N_ROWS)


def train(strategy, model, optimizer, n_steps=5, first=0):
    for step in range(first, first + n_steps):
        optimizer.zero_grad()
        loss_of(strategy, model, step, is_rare=step % 3 == 1).backward()
        optimizer.step()


def require_equal(actual, expected):
    """Raise AssertionError unless two state_dicts, or values in them, have the same bits."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            require_equal(actual[key], value)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def both(kind="Adam", **options):
    """Return (strategy, model, optimizer) with shares, and with a plain optimizer."""
    return [make(*CLASSES[kind], is_sharded=is_sharded, **options) for is_sharded in (True, False)]


@pytest.mark.feature("strategies.sharded-optimizer-state")
@pytest.mark.parametrize(
    ("kind", "width"), [*((kind, 40) for kind in CLASSES), *((kind, 600) for kind in ("SGD", "Adam", "Adam, fused"))]
)
def test_weights_and_state_have_the_bits_of_the_plain_optimizer(kind, width):
    (strategy, model, optimizer), (_, plain_model, plain) = both(kind, width=width)
    train(strategy, model, optimizer)
    train(_, plain_model, plain)
    require_equal(model.state_dict(), plain_model.state_dict())
    require_equal(optimizer.state_dict(), plain.state_dict())


class Chain(nn.Module):
    """Layers whose parameters can be stepped as one, and the second of which a step may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.last = nn.Linear(64, 3)

    def forward(self, x, is_rare):
        x = nn.functional.pad(x, (0, 57))
        for number, layer in enumerate(self.layers):
            if number != 1 or not is_rare:
                x = torch.tanh(layer(x))
        return self.last(x)


@pytest.mark.parametrize("way", ["all used", "one unused", "loaded", "loaded with other steps"])
@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_that_are_stepped_as_one_have_the_bits_of_the_plain_optimizer(comm, kind, way):
    optimizer_class, options = CLASSES[kind]
    trained_states = []
    for is_sharded in (True, False):
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            model = Chain()
            make_optimizer = functools.partial(ZeroRedundancyOptimizer, optimizer_class=optimizer_class)
            optimizer = (make_optimizer if is_sharded else optimizer_class)(model.parameters(), **options)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(strategy, model, step, is_rare=step == 2 and way == "one unused").backward()
            optimizer.step()
            if step == 1 and is_sharded and comm.size > 1:
                n_joined = max(len(run.members) for run in optimizer._shares._runs)
                assert n_joined == 9, "all but the last bias"
            if step == 1 and "loaded" in way:
                state = copy.deepcopy(optimizer.state_dict())
                if "other" in way and "step" in state["state"].get(2, {}):
                    state["state"][2]["step"] += 1
                optimizer.load_state_dict(state)
        trained_states.append((model.state_dict(), optimizer.state_dict()))
    require_equal(trained_states[0][0], trained_states[1][0])
    require_equal(trained_states[0][1], trained_states[1][1])


@pytest.mark.feature("strategies.sharded-optimizer-state")
@pytest.mark.parametrize("hosts", ["1 each", "2 each", "1 and rest", "alternating"])
@pytest.mark.parametrize("width", [40, 600], ids=["small", "large"])
def test_over_hosts_too(comm, over_hosts, hosts, width):
    over_hosts(hosts)
    (strategy, model, optimizer), (_, plain_model, plain) = both(width=width)
    train(strategy, model, optimizer)
    assert optimizer.clip_grad_norm_(1e9) > 0
    train(_, plain_model, plain)
    require_equal(model.state_dict(), plain_model.state_dict())
    require_equal(optimizer.state_dict(), plain.state_dict())


def test_means_half_precision_and_schedules(comm):
    final_states = []
    for is_sharded in (True, False):
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 2)).bfloat16()
            if is_sharded:
                kind = ZeroRedundancyOptimizer
            else:
                kind = torch.optim.AdamW
            optimizer = kind(
                model.parameters(), **({"optimizer_class": torch.optim.AdamW} if is_sharded else {}), lr=0.1
            )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 10 + comm.rank)).bfloat16()
            model(x).square().mean().backward()
            optimizer.step()
            schedule.step()
        final_states.append({**model.state_dict(), "rate": optimizer.param_groups[0]["lr"]})
    require_equal(final_states[0], final_states[1])


@pytest.mark.parametrize("used", [(0, 3), (0, 2), (1,), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("way", ["backwards", "no_sync", "zeros", "no_sync then zeros"])
@pytest.mark.parametrize("width", [40, 600], ids=["small", "large"])
def test_gradients_accumulate(way, width, used):
    """The rare layer has a gradient in some micro-batches only."""
    if width == 600 and used != (0, 2):
        pytest.skip("large gradients have no slots, which is what the order concerns")
    trained = both(width=width)
    for strategy, model, optimizer in trained:
        for step in range(4):
            optimizer.zero_grad(set_to_none="zeros" not in way)
            for micro in range(4):
                is_local = "no_sync" in way and micro < 3
                with strategy.no_sync() if is_local else torch.enable_grad():
                    loss_of(strategy, model, 10 * step + micro, is_rare=step != 2 and micro in used).backward()
            optimizer.step()
    require_equal(trained[0][1].state_dict(), trained[1][1].state_dict())
    require_equal(trained[0][2].state_dict(), trained[1][2].state_dict())


# -- gradients in between ---------------------------------------------------------------------------------------------

READS = {
    "norm": lambda model: model.first.weight.grad.norm(),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "detach": lambda model: model.first.weight.grad.detach(),
    "data": lambda model: model.first.weight.grad.data,
    "item": lambda model: model.last.bias.grad[0].item(),
    "clone": lambda model: model.first.weight.grad.clone(),
    "written": lambda model: model.first.weight.grad.mul_(2),
    "sum of two": lambda model: torch.ones(40, 7) + model.first.weight.grad,
    "out": lambda model: torch.add(torch.ones(40, 7), 1, out=model.first.weight.grad),
    "plain step": lambda model: torch.optim.SGD([model.first.weight], lr=0.1).step.__wrapped__(
        torch.optim.SGD([model.first.weight], lr=0.1)
    ),
}
if hasattr(nn.utils, "get_total_norm"):  # from torch 2.6 on
    READS["get_total_norm"] = lambda model: nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("read", READS)
def test_reading_a_gradient_raises(comm, read):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
    loss_of(strategy, model, 0).backward()
    if comm.size == 1:
        READS[read](model)
        return
    with pytest.raises(GradientError, match=r"nobody.*gradient.*'.*'"):
        READS[read](model)
    with pytest.raises(RuntimeError, match="supported.*subclasses"):
        model.first.weight.grad.numpy()
    assert "ShardedGradient(of 'first.weight'" in repr(model.first.weight.grad)
    optimizer.step()


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("width", [40, 600], ids=["small", "large"])
def test_norms_are_those_of_torch_and_the_same_on_any_number_of_ranks(comm, order, width):
    (strategy, model, optimizer), (_, plain_model, plain) = both("SGD", width=width)
    for net in (model, plain_model):
        loss_of(strategy, net, 0).backward()
    norm = optimizer.clip_grad_norm_(0.5, order).item()
    whole = torch.cat(
        [parameter.grad.double().reshape(-1) for parameter in plain_model.parameters() if parameter.grad is not None]
    )
    assert norm == pytest.approx(whole.norm(order).item(), rel=1e-12)
    assert comm.allgather(norm) == [norm] * comm.size
    nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5, order)
    plain.step()
    optimizer.step()
    for parameter, plain_parameter in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-6, atol=1e-7)


def test_a_norm_has_the_bits_of_one_rank(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        torch.manual_seed(1)
        weights = nn.Parameter(torch.randn(5000))
        optimizer = ZeroRedundancyOptimizer([weights], torch.optim.SGD, lr=0.1)
        model = nn.Module()
        model.weights = weights
    strategy.run(lambda: (weights * torch.linspace(0, 1, 5000) * (comm.rank == 0)).sum().backward())
    blocks = np.zeros(5120)
    blocks[:5000] = np.square(torch.linspace(0, 1, 5000).double().numpy())
    assert optimizer.clip_grad_norm_(1e9).item() == blocks.reshape(5, 1024).sum(1).sum() ** 0.5


def test_a_gradient_that_lies_otherwise_in_memory_is_clipped(comm):
    if comm.size > 1:
        pytest.skip("a gradient that is summed lies as its parameter")
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=1.0)
    parameter.grad = torch.ones(4, 3).T
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(12**0.5)
    assert parameter.grad.norm().item() == pytest.approx(1.0)


def test_values_are_clipped():
    (strategy, model, optimizer), (_, plain_model, plain) = both("SGD")
    for net in (model, plain_model):
        loss_of(strategy, net, 0).backward()
    optimizer.clip_grad_value_(0.01)
    nn.utils.clip_grad_value_(plain_model.parameters(), 0.01)
    optimizer.step()
    plain.step()
    require_equal(model.state_dict(), plain_model.state_dict())


def test_a_norm_that_is_not_finite(comm):
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    (loss_of(strategy, model, 0) * float("nan")).backward()
    with pytest.raises(RuntimeError, match=r"finite.*2.0.*gradients.*nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_grad_scaler_skips_a_step_on_all_ranks(comm, is_unscaled):
    trained = both("SGD with momentum")
    scales = []
    for strategy, model, optimizer in trained:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(strategy, model, step)
            if step == 2 and comm.rank == comm.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if is_unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    require_equal(trained[0][1].state_dict(), trained[1][1].state_dict())


def test_no_share_steps_where_another_rank_overflows(comm):
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss_of(strategy, model, 0).backward()
    before = copy.deepcopy(model.state_dict())
    scaler.scale(torch.ones(1))
    if comm.size > 1 and comm.rank == 0:  # of its own share alone
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.share.fill_(float("inf"))
    if comm.size == 1:
        model.first.weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    require_equal(model.state_dict(), before)


def test_a_closure_makes_the_gradients():
    outcomes = []
    for strategy, model, optimizer in both():

        def closure(strategy=strategy, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(strategy, model, 3)
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(3)]
        outcomes.append((losses, model.state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    require_equal(outcomes[0][1], outcomes[1][1])


def test_a_graph_that_is_kept_over_a_step_is_refused():
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    loss = loss_of(strategy, model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified.*operation"):
        loss.backward()


def test_copies_and_compiled_models(comm):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
    train(strategy, model, optimizer, 2)
    loss_of(strategy, model, 9).backward()
    private = copy.deepcopy(model)
    optimizer.step()
    assert not torch.equal(private.first.weight, model.first.weight)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled = torch.compile(model, backend="eager")
    loss_of(strategy, compiled, 3).backward()
    optimizer.step()


def test_gradients_of_the_programs_own(comm):
    """Summed by apply_gradients, or by all_reduce in `run`."""
    model_states = []
    for strategy, model, optimizer in both("SGD with momentum"):
        train(strategy, model, optimizer, 1)

        def own_step(strategy=strategy, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            parameters = [model.first.weight, model.last.weight]
            gradients = torch.autograd.grad(loss_of(strategy, model, 1), parameters)
            strategy.apply_gradients(optimizer, zip(gradients, parameters, strict=True))
            optimizer.zero_grad()
            gradients = torch.autograd.grad(loss_of(strategy, model, 2), parameters)
            context = hpcdist.get_replica_context()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = context.all_reduce("sum", gradient)
            optimizer.step()

        strategy.run(own_step)
        model_states.append(model.state_dict())
    require_equal(model_states[0], model_states[1])


def test_local_gradients_are_refused_on_all_ranks(comm):
    if comm.size == 1:
        pytest.skip("one rank has no local gradients")
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    optimizer.zero_grad()
    with strategy.no_sync():
        loss_of(strategy, model, 0).backward()
    for call in (lambda: optimizer.clip_grad_norm_(1.0), lambda: optimizer.clip_grad_value_(1.0)):
        with pytest.raises(GradientError, match="gradients.*replicas"):
            call()


@pytest.mark.parametrize("kind", ["SGD", "Adam, fused"])
def test_local_and_summed_gradients_are_zeroed_together(kind):
    model_states = []
    for strategy, model, optimizer in both(kind):
        loss_of(strategy, model, 0).backward()
        with strategy.no_sync():
            model.rare(torch.ones(2, 40)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(strategy, model, 1, is_rare=True).backward()
        optimizer.step()
        model_states.append(model.state_dict())
    require_equal(model_states[0], model_states[1])


def test_an_error_after_the_sums_leaves_the_slots_in_step(comm):
    """Parts of unequal rows with ReduceOp.MEAN and a backward through all_reduce: all ranks raise, and go on."""
    if comm.size == 1:
        pytest.skip("parts are equal on one rank")
    model_states = []
    for is_sharded in (True, False):
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Linear(6, 2)
            if is_sharded:
                optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.randn(8 * comm.size - 1, 6, generator=torch.Generator().manual_seed(1))
        dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(4 * comm.size)

        def step(part, model=model, optimizer=optimizer, strategy=strategy):
            optimizer.zero_grad()
            mean = hpcdist.get_replica_context().all_reduce("mean", model(part).mean())
            (mean + model(part).square().mean()).backward()
            optimizer.step()

        for _ in range(2):
            for part in strategy.experimental_distribute_dataset(dataset):
                with contextlib.suppress(GradientError):
                    strategy.run(step, args=(part,))
        model_states.append(model.state_dict())
    require_equal(model_states[0], model_states[1])


def test_parameters_that_others_read_in_a_closure_do_not_change(comm):
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)

    def closure():
        optimizer.zero_grad()
        loss_of(strategy, model, 3).backward()
        if comm.rank == comm.size - 1:
            time.sleep(0.2)
        seen.append(copy.deepcopy(model.state_dict()))

    seen = []
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer.step(closure)
    assert all(torch.equal(parameter, seen[0][name]) for name, parameter in before.items())


def test_an_update_is_made_once(comm):
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    before = model.last.weight.detach().clone()
    strategy.extended.update(model.last.weight, lambda v: v.mul_(0.5))
    assert torch.equal(model.last.weight, before / 2)
    comm.Barrier()  # the next lines write to what others look at
    if comm.size > 1:
        with pytest.raises(UsageError, match="'last.weight'"):
            strategy.run(lambda: model.last.weight.data.mul_(0.5))


def test_averages_of_weights_are_private(comm):
    average_states = []
    for strategy, model, optimizer in both("SGD"):
        with strategy.scope():
            average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(3):
            train(strategy, model, optimizer, 1, first=step)
            average.update_parameters(model)
        average_states.append(average.state_dict())
    require_equal(average_states[0], average_states[1])


# -- memory and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.feature("strategies.sharded-optimizer-state")
def test_parameters_and_state_are_there_once(comm):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
    train(strategy, model, optimizer, 2)
    comm.Barrier()
    if comm.rank == 0:
        model.last.weight.data.fill_(7.0)
        optimizer.state_dict()["state"][0]["exp_avg"].fill_(8.0)
    comm.Barrier()
    assert model.last.weight.eq(7.0).all()
    assert optimizer.state_dict()["state"][0]["exp_avg"].eq(8.0).all()


def test_a_large_gradient_is_freed_by_zero_grad(comm):
    if comm.size == 1:
        pytest.skip("plain torch")
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True, width=600)
    loss_of(strategy, model, 0).backward()
    share = model.middle.weight.grad.share
    assert 0 < share.numel() < 600 * 600
    storage = share.untyped_storage()
    assert storage.nbytes() == share.nbytes  # the rest of the gradient is gone
    optimizer.step()
    share_ref = weakref.ref(share)
    del share, storage
    assert share_ref() is not None
    optimizer.zero_grad()
    assert share_ref() is None


@pytest.mark.feature("strategies.sharded-optimizer-state")
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("is_first_sharded", [True, False])
def test_checkpoints_are_those_of_the_plain_optimizer(shared_path, is_first_sharded, is_sharded):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=is_first_sharded)
    train(strategy, model, optimizer, 3)
    hpcdist.Checkpoint(model=model, optimizer=optimizer).write(shared_path / "c.h5")
    train(strategy, model, optimizer, 3, first=3)
    strategy, restored_model, restored_optimizer = make(*CLASSES["Adam"], is_sharded=is_sharded)
    with torch.no_grad():
        restored_model.last.bias.fill_(9.0)
    hpcdist.load_checkpoint(shared_path / "c.h5", model=restored_model, optimizer=restored_optimizer)
    train(strategy, restored_model, restored_optimizer, 3, first=3)
    require_equal(restored_model.state_dict(), model.state_dict())
    require_equal(restored_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_is_loaded_before_or_after_the_first_use():
    (strategy, model, optimizer), (_, plain_model, plain) = both()
    train(strategy, plain_model, plain, 2)
    saved = copy.deepcopy((plain_model.state_dict(), plain.state_dict()))
    train(strategy, plain_model, plain, 2, first=2)
    train(strategy, model, optimizer, 1)
    fresh = make(*CLASSES["Adam"], is_sharded=True)
    for loaded_strategy, net, loaded_optimizer in ((strategy, model, optimizer), fresh):
        net.load_state_dict(saved[0])
        loaded_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        loaded_strategy.barrier()
        train(loaded_strategy, net, loaded_optimizer, 2, first=2)
        require_equal(net.state_dict(), plain_model.state_dict())
        require_equal(loaded_optimizer.state_dict(), plain.state_dict())


def test_a_model_of_a_later_scope_leaves_the_state_as_it_is():
    (strategy, model, optimizer), (_, plain_model, plain) = both()
    train(strategy, model, optimizer, 2)
    optimizer.zero_grad()
    with strategy.scope():
        later = nn.Linear(2000, 2)
        second = ZeroRedundancyOptimizer(later.parameters(), torch.optim.Adam, lr=0.1)
    loss_of(strategy, model, 2, is_rare=True).backward()
    later(torch.ones(2, 2000)).sum().backward()  # plans again, between a backward and its step
    optimizer.step()
    second.step()
    train(strategy, model, optimizer, 1, first=3)
    train(_, plain_model, plain, 2)
    plain.zero_grad()
    loss_of(_, plain_model, 2, is_rare=True).backward()
    plain.step()
    train(_, plain_model, plain, 1, first=3)
    require_equal(model.state_dict(), plain_model.state_dict())
    require_equal(optimizer.state_dict(), plain.state_dict())


def test_it_trains_by_fit(comm, shared_path):
    histories = []
    for is_sharded in (True, False):
        strategy = hpcdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            torch.manual_seed(1)
            model = hpcdist.Model(nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 1)))

            def make_adam(parameters, is_sharded=is_sharded):
                if is_sharded:
                    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
                return torch.optim.Adam(parameters, lr=0.01)

            model.compile(make_adam, "mse", global_clipnorm=1e9)
        x = np.random.default_rng(1).normal(size=(64, 5)).astype(np.float32)
        folder = shared_path / str(is_sharded)
        histories.append(
            model.fit(
                x, x.sum(1), 16, epochs=3, verbose=0, callbacks=[hpcdist.callbacks.BackupAndRestore(folder)]
            ).history
        )
    assert histories[0] == histories[1]


def test_state_that_appears_later_is_saved_too():
    optimizer_states = []
    for strategy, model, optimizer in both("SGD"):
        train(strategy, model, optimizer, 2)
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
        train(strategy, model, optimizer, 2, first=2)
        optimizer_states.append(copy.deepcopy(optimizer.state_dict()))
    require_equal(optimizer_states[0], optimizer_states[1])
    strategy, model, optimizer = make(*CLASSES["Adam, a loop"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    _, plain_model, plain = make(*CLASSES["Adam"], is_sharded=False)
    train(_, plain_model, plain, 2)
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    strategy.barrier()
    require_equal(optimizer.state_dict(), plain.state_dict())


class Replacing(torch.optim.SGD):
    """An optimizer of a program's own, whose step is its base class's and puts new tensors into its state."""

    is_elementwise = True

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = (
                        self.state[parameter].get("seen", torch.zeros_like(parameter)) + parameter.grad
                    )
        return super().step(closure)


def test_a_class_of_its_own():
    class Undeclared(torch.optim.SGD):
        pass

    with pytest.raises(UsageError, match="Undeclared"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3))], Undeclared, lr=0.1)
    trained_states = []
    for is_sharded in (True, False):
        strategy, model, optimizer = make(Replacing, {"lr": 0.05}, is_sharded=is_sharded)
        strategy.run(train, args=(strategy, model, optimizer, 3))
        trained_states.append((model.state_dict(), copy.deepcopy(optimizer.state_dict())))
    require_equal(trained_states[0][0], trained_states[1][0])
    require_equal(trained_states[0][1], trained_states[1][1])


def test_copies_of_an_optimizer(comm):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
    train(strategy, model, optimizer, 2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    require_equal(copied.state_dict(), optimizer.state_dict())
    assert copied.param_groups[0]["params"][0] is next(copied_model.parameters())
    before = copy.deepcopy(copied.state_dict())
    train(strategy, model, optimizer, 1)
    require_equal(copied.state_dict(), before)


def test_parameters_without_elements(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    trained_states = []
    for is_sharded in (True, False):
        with strategy.scope() if is_sharded else contextlib.nullcontext():
            torch.manual_seed(1)
            model = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in (0, 3, 3)])
            if is_sharded:
                kind = ZeroRedundancyOptimizer
            else:
                kind = torch.optim.Adam
            optimizer = kind(model.parameters(), lr=0.1)

        def step(n_ranks, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            (sum((parameter * torch.arange(len(parameter))).sum() for parameter in model) / n_ranks).backward()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        for _ in range(2):
            if is_sharded:
                strategy.run(step, args=(comm.size,))
            else:
                step(1)
        trained_states.append((model.state_dict(), optimizer.state_dict()["state"]))
    (weights, state), (plain_weights, plain_state) = trained_states
    torch.testing.assert_close(weights, plain_weights)
    torch.testing.assert_close(state, plain_state)  # also that of no elements, as checkpoints have it


def test_parameters_in_several_pieces_of_memory_are_planned_alike(comm, monkeypatch):
    """Where the pieces lie differs between ranks, and so may not decide what is stepped together."""
    if comm.size == 1:
        pytest.skip("one rank joins nothing")
    planned = []

    def plan(places, joins):
        planned.append(places)
        return plan_runs(places, joins)

    monkeypatch.setattr(shares, "plan_runs", plan)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        first = nn.Linear(64, 64)
        optimizer = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, lr=0.1)
    first(torch.ones(1, 64))
    with strategy.scope():
        second = nn.Linear(64, 64)
        optimizer = ZeroRedundancyOptimizer([*first.parameters(), *second.parameters()], torch.optim.SGD, lr=0.1)
    second(torch.ones(1, 64))
    kinds = [place.kind for place in planned[-1]]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]
    assert max(len(run.members) for run in optimizer._shares._runs) == 2


def test_initial_state_is_whole_on_every_rank_after_the_first_use(comm, monkeypatch):
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    take = SharedState.take

    def take_late(state, number, values):
        time.sleep(0.2 * (comm.rank == comm.size - 1))
        take(state, number, values)

    monkeypatch.setattr(SharedState, "take", take_late)
    monkeypatch.setattr(planner, "warn_of_equal_batches", lambda batch, world: None)  # nobody waits there
    _, model, optimizer = make(*CLASSES["Adagrad"], is_sharded=True)
    model(torch.ones(2, 7))
    initial_states = {number: dict(state) for number, state in optimizer.state_dict()["state"].items()}
    plain = make(*CLASSES["Adagrad"], is_sharded=False)[2]
    require_equal(initial_states, plain.state_dict()["state"])


def test_an_option_that_is_off_for_a_while(comm):
    trained_states = []
    for is_sharded in (True, False):
        strategy, model, optimizer = make(*CLASSES["SGD with momentum"], is_sharded=is_sharded)
        for step, momentum in enumerate([0.9, 0.9, 0.0, 0.0, 0.9, 0.9]):
            for group in optimizer.param_groups:
                group["momentum"] = momentum
                group["nesterov"] = momentum > 0
            train(strategy, model, optimizer, 1, step)
        trained_states.append((model.state_dict(), optimizer.state_dict()["state"]))
    require_equal(trained_states[0][0], trained_states[1][0])
    require_equal(trained_states[0][1], trained_states[1][1])


class EagerState(torch.optim.Optimizer):
    """Asks for the state of a parameter before it knows whether there is a gradient."""

    is_elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None:
                    continue
                if not state:
                    state["total"] = torch.zeros_like(parameter)
                state["total"].add_(parameter.grad)
                parameter.sub_(state["total"], alpha=group["lr"])


def test_state_of_a_parameter_that_has_a_gradient_later(comm):
    optimizer_states = []
    for is_sharded in (True, False):
        strategy, model, optimizer = make(EagerState, {"lr": 0.05}, is_sharded=is_sharded)
        train(strategy, model, optimizer, 4)
        optimizer_states.append(optimizer.state_dict()["state"])
    assert {number for number, state in optimizer_states[1].items() if state} == set(optimizer_states[0])
    require_equal(optimizer_states[0], {number: state for number, state in optimizer_states[1].items() if state})


def test_joined_gradients_are_remembered_for_two_sums(comm):
    if comm.size == 1:
        pytest.skip("one rank joins nothing")
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).bfloat16()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 64).bfloat16()).sum().backward()
        optimizer.step()
    assert max(map(len, optimizer._shares._gradients)) <= 2


def test_a_norm_is_that_of_gradients_in_the_order_of_memory(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    torch.manual_seed(3)
    weights = torch.randn(300, 700)
    x = torch.randn(700, 300)
    norms = []
    for scope in (strategy.scope(), contextlib.nullcontext()):
        with scope:
            parameter = nn.Parameter(weights.clone().t())
            optimizer = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)
        if not norms:
            strategy.run(lambda: None)
            (parameter * x).sum().div(comm.size).backward()
            norms.append(float(optimizer.clip_grad_norm_(1e9)))
        else:
            blocks = blocks_of([parameter], [(0, flat_gradient(parameter, x))], 2.0)
            norms.append(norm_of_blocks(blocks, 2.0))
    if comm.size in (1, 2, 4):  # x is divided exactly
        assert norms[0] == norms[1]


# -- bad input --------------------------------------------------------------------------------------------------------

NOT_ELEMENTWISE = [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer, "adam"]
if hasattr(torch.optim, "Adafactor"):  # from torch 2.5 on
    NOT_ELEMENTWISE.append(torch.optim.Adafactor)


@pytest.mark.parametrize("kind", [*NOT_ELEMENTWISE, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])])
def test_optimizers_that_are_not_element_by_element(kind):
    with pytest.raises(UsageError, match="optimizer.*element"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3))], kind, lr=0.1)


def refused(comm, text, strategy=None, prepare=None, model=None, optimizers=None):
    if comm.size == 1:
        pytest.skip("one rank has plain torch")
    strategy = strategy or hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(3, 2) if model is None else model()
        if optimizers:
            scope_optimizers = optimizers(model)
        else:
            scope_optimizers = [ZeroRedundancyOptimizer(model.parameters(), lr=0.1)]
    if prepare is not None:
        prepare(strategy)
    with pytest.raises(UsageError, match=text) as caught:
        strategy.run(lambda: model(torch.ones(2, 3)))
    assert caught.value.is_agreed
    assert scope_optimizers


def test_an_optimizer_beside_a_model_in_use(comm):
    if comm.size == 1:
        pytest.skip("one rank has plain torch")
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        first = nn.Linear(3, 2)
    first(torch.ones(2, 3))
    with strategy.scope():
        second = nn.Linear(3, 2)
        joint_optimizer = ZeroRedundancyOptimizer([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="first.*model.*2"):
        second(torch.ones(2, 3))
    assert joint_optimizer


def test_steps_before_the_first_use_do_nothing():
    _, _, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    optimizer.step()
    with pytest.raises(UsageError, match="norm_type.*0.*0"):
        optimizer.clip_grad_norm_(1.0, 0)


def test_two_optimizers_on_one_parameter(comm):
    def two(model):
        return [ZeroRedundancyOptimizer(model.parameters(), lr=0.1), ZeroRedundancyOptimizer([model.bias], lr=0.1)]

    refused(comm, "got a parameter in two of them", optimizers=two)


def test_a_plain_optimizer_beside_it(comm):
    def two(model):
        return [ZeroRedundancyOptimizer([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]

    refused(comm, "got SGD for parameters of the scope", optimizers=two)


def test_strategies_that_cannot_sum_by_shares(comm):
    refused(comm, "got parameters that the strategy itself holds", hpcdist.CentralStorageStrategy(gradient_op="sum"))
    refused(
        comm, "got a strategy with num_replicas", hpcdist.MultiWorkerMirroredStrategy(num_replicas=8, gradient_op="sum")
    )
    by_name = {"implementation": "RING"}
    options = hpcdist.CommunicationOptions(**by_name)
    refused(
        comm,
        "got gradients summed by RING",
        hpcdist.MultiWorkerMirroredStrategy(communication_options=options, gradient_op="sum"),
    )
    options = hpcdist.CommunicationOptions(local_steps=2)
    refused(
        comm, "got local_steps", hpcdist.MultiWorkerMirroredStrategy(communication_options=options, gradient_op="sum")
    )
    refused(comm, "got a comm hook", prepare=lambda strategy: strategy.register_comm_hook(None, lambda *_: None))


def test_sparse_gradients(comm):
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)

        def forward(self, x):
            return self.table(x.long())

    refused(comm, "got sparse gradients of 'table.weight'", model=Looked)


def test_a_parameter_of_elsewhere_beside_those_of_the_scope(comm):
    if comm.size == 1:
        pytest.skip("one rank owns everything")
    foreign = nn.Parameter(torch.zeros(64))
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer([*model.parameters(), foreign], torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match="not made in the scope"):
        model(torch.ones(1, 2))
    assert not optimizer.state_dict()["state"]


def test_parameters_that_were_not_made_in_the_scope(comm):
    model = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    if comm.size == 1:
        optimizer.step()
        return
    with pytest.raises(UsageError, match=r"parameters.*optimizer"):
        optimizer.step()


def test_an_optimizer_that_is_made_too_late(comm):
    if comm.size == 1:
        pytest.skip("one rank has plain torch")
    strategy, model, _ = make(*CLASSES["SGD"], is_sharded=False)
    loss_of(strategy, model, 0).backward()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match="optimizer.*first"):
        optimizer.step()


def test_a_group_that_comes_too_late():
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    with pytest.raises(UsageError, match="groups.*first"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_model_that_was_moved(comm):
    if comm.size == 1:
        pytest.skip("one rank shares nothing")
    strategy, model, optimizer = make(*CLASSES["SGD"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    model.first.weight.data = model.first.weight.data.clone()
    with pytest.raises(GradientError, match=r"'first.weight'"):
        optimizer.step()


def test_states_that_do_not_fit(shared_path):
    strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
    train(strategy, model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"groups.*parameters"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})
    wrong = copy.deepcopy(state)
    wrong["state"][0]["exp_avg"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"state.*parameter.*0.*40.*7.*1"):
        optimizer.load_state_dict(wrong)
    hpcdist.Checkpoint(model=model, optimizer=optimizer).write(shared_path / "c.h5")
    _, sgd_model, sgd_optimizer = make(*CLASSES["SGD"], is_sharded=True)
    with pytest.raises(CheckpointMismatch, match="Adam"):
        hpcdist.load_checkpoint(shared_path / "c.h5", model=sgd_model, optimizer=sgd_optimizer)


def test_it_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy, model, optimizer = make(*CLASSES["Adam"], is_sharded=True)
        train(strategy, model, optimizer, 3)
        optimizer.zero_grad(set_to_none=False)
