"""Training over made-up hosts: buckets that start while backward runs give the bits of a sum after it."""

import functools
import os

import numpy as np
import pytest
import torch
from made_up_hosts import HOSTS
from torch import nn

import hpcdist
from hpcdist.cluster.environment import visible_gpus
from hpcdist.collectives import hierarchical
from hpcdist.collectives.gpu import nccl_setup
from hpcdist.errors import GradientError
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.buckets import Limits
from hpcdist.program import torch_hooks
from hpcdist.runtime.process import make_world
from hpcdist.strategy import multi_worker

pytestmark = pytest.mark.mpi


class Odd(nn.Module):
    """A layer that not every rank uses, one used twice, BatchNorm, a large and a frozen one, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.twice = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.large = nn.Linear(16, 20_000)
        self.back = nn.Linear(20_000, 16)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.twice.weight
        self.frozen = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x, uses_sometimes):
        x = torch.tanh(self.norm(self.twice(torch.tanh(self.twice(self.first(x))))))
        x = x + self.back(self.large(x)) / 100 + self.tied(x)
        if uses_sometimes:
            x = x + self.sometimes(x)
        return self.frozen(x).square().mean(1)


def train(comm, n_steps=4, gradient_op="sum", n_micro=1, **options):
    """Return the weights and statistics after some steps, as bytes, and the strategy."""
    torch.manual_seed(3)
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(**options), gradient_op=gradient_op
    )
    with strategy.scope():
        model = Odd()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = torch.Generator().manual_seed(comm.rank)
    for step in range(n_steps):
        optimizer.zero_grad()
        for micro in range(n_micro):
            x = torch.randn(4, 8, generator=rows)
            loss = model(x, uses_sometimes=comm.rank == step % 2).mean()
            if micro < n_micro - 1:
                with strategy.no_sync():
                    loss.backward()
            else:
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values()), strategy


@pytest.mark.feature("collectives.overlap-with-backward")
@pytest.mark.parametrize("n_micro", [1, 2])
@pytest.mark.parametrize("gradient_op", ["sum", "mean"])
@pytest.mark.parametrize("hosts", ["1 each", "2 each", "3 and rest"])
def test_bits_are_those_of_one_host(comm, over_hosts, hosts, gradient_op, n_micro):
    over_hosts(None)
    expected, _ = train(comm, gradient_op=gradient_op, n_micro=n_micro)
    over_hosts(hosts)
    trained_bytes, _ = train(comm, gradient_op=gradient_op, n_micro=n_micro, is_ordered=True, bytes_per_pack=4096)
    assert trained_bytes == expected
    assert len(set(comm.allgather(trained_bytes))) == 1


def test_a_backward_of_a_loss_that_says_nothing_starts_no_sum(comm, over_hosts):
    """Else the error would come after some buckets have started, and no later backward could be made."""
    if comm.size == 1:
        return
    over_hosts("1 each")
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(bytes_per_pack=64)  # several buckets
    )
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    assert strategy.reducer.route.is_overlapped

    def losses():
        model.zero_grad()
        return model(torch.ones(2, 8))[:, 0]

    for _ in range(2):
        with pytest.raises(GradientError, match="combine|expected a loss scaled"):
            losses().mean().backward()
        hpcdist.compute_average_loss(losses()).backward()
        assert model[2].bias.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize("hosts", [None, "1 each"])
def test_a_step_inside_a_backward_is_refused(comm, over_hosts, hosts):
    """Also where the gradient is on its way to the other ranks already, so that the optimizer would find none."""
    if comm.size == 1:
        return
    over_hosts(hosts)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 8)).sum()
    handle = model[1].bias.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(GradientError, match="got a local one in '1.bias'"):
        loss.backward()
    handle.remove()


def test_all_that_a_step_sends_is_in_the_journal(comm, over_hosts):
    """So that a rank which hangs in it is seen: the model at its first use, buckets, and buffers beside device ones."""
    over_hosts(comm.size)
    _, strategy = train(comm, n_steps=1)
    ops = [entry.op for entry in strategy.group.journal.entries]
    assert ("broadcast" in ops) == (comm.size > 1)
    assert ("gradients" in ops) == (comm.size > 1)
    assert ("buffers" in ops) == (comm.size > 1)


def test_what_the_bits_depend_on_is_described(comm, over_hosts):
    def described(**options):
        communication_options = hpcdist.CommunicationOptions(**options)
        facts = hpcdist.MultiWorkerMirroredStrategy(communication_options=communication_options).describe_sums()
        assert list(map(facts.pop, ("replicas", "comm_hook", "local_steps"))) == [None, None, None]
        return facts

    over_hosts("1 each")
    has_hosts = comm.size > 1
    assert described(is_ordered=True) == {"all_reduce": "in the order of replicas", "wire": None}
    if has_hosts:
        wire_dtype = "bfloat16"
    else:
        wire_dtype = None
    assert described(is_ordered=True, wire_dtype="bfloat16")["wire"] == wire_dtype
    assert described(implementation="halving") == {"all_reduce": "HALVING", "wire": None}
    over_hosts("3 and rest")
    is_aligned = comm.size <= 3
    assert (described()["all_reduce"] == "in the order of replicas") == is_aligned
    over_hosts(None)
    assert described(wire_dtype="bfloat16") == {"all_reduce": "in the order of replicas", "wire": None}


@pytest.mark.feature("collectives.ring-all-reduce")
@pytest.mark.parametrize("implementation", ["mpi", "ring", "halving", "hierarchical"])
def test_every_algorithm_trains_to_the_same_weights_on_all_ranks(comm, over_hosts, implementation):
    over_hosts(None)
    expected, _ = train(comm)
    over_hosts("1 each")
    trained_bytes, _ = train(comm, implementation=implementation)
    assert len(set(comm.allgather(trained_bytes))) == 1
    as_numbers = functools.partial(np.frombuffer, dtype=np.float32, count=1000)
    assert np.allclose(as_numbers(trained_bytes), as_numbers(expected), atol=1e-3)


@pytest.mark.feature("collectives.gradient-buckets", "collectives.overlap-with-backward")
def test_buckets_start_while_backward_runs_in_one_order(comm, over_hosts, monkeypatch):
    """The order of events: a bucket is started when its last gradient is there, also while others are missing."""
    events = []
    start = Reducer.start
    after = torch_hooks.after_accumulation

    def noted(self, array, bucket, is_exact, **more):
        if is_exact:
            event = "counts"
        else:
            event = bucket
        events.append(event)
        return start(self, array, bucket, is_exact, **more)

    def counted(parameter, see):
        def call(owner):
            events.append("gradient")
            see(owner)

        after(parameter, call)

    over_hosts("1 each")
    options = hpcdist.CommunicationOptions(bytes_per_pack=4096)
    strategy = hpcdist.MultiWorkerMirroredStrategy(communication_options=options, gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    monkeypatch.setattr(torch_hooks, "after_accumulation", counted)
    strategy.run(lambda: None)
    monkeypatch.setattr(Reducer, "start", noted)
    model(torch.ones(1, 32)).sum().backward()
    if comm.size > 1:
        assert events == ["gradient", 0, "gradient", 1, "gradient", 2, "gradient", 3, "counts"]


@pytest.mark.feature(
    "collectives.communication-options",
    "collectives.gradient-buckets",
    "collectives.autotuner",
    "semantics.options-per-call",
)
def test_bucket_sizes_follow_the_measured_link(comm, over_hosts):
    over_hosts("1 each")
    _, strategy = train(comm, n_steps=1)
    limits = strategy.reducer.begin_buckets(100_000_000)
    assert len(set(comm.allgather(limits))) == 1
    if comm.size > 1:
        assert (128 << 10) <= limits.bucket_bytes <= (32 << 20)
        assert 0 < limits.last_bytes < limits.bucket_bytes
    sized_reducer = Reducer(strategy.group, hpcdist.CommunicationOptions(bytes_per_pack=1000))
    assert sized_reducer.begin_buckets(1) == Limits(1000, 1 << 20, 250)


@pytest.mark.feature("collectives.half-precision-wire")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_half_wire_rounds_away_comes_later(comm, over_hosts, dtype):
    """The mean of many sums comes near the exact one; a single rounded sum does not."""
    over_hosts("1 each")
    group = multi_worker.group_of(make_world().role_comm)
    values = np.linspace(1, 2, 1001, dtype=np.float32) * (1 + comm.rank)
    exact = sum(np.linspace(1, 2, 1001) * (1 + rank) for rank in range(comm.size))
    half_wire = HalfWire(dtype)
    n_sums = 50
    total = np.zeros(1001)
    for _ in range(n_sums):
        buffer = values.copy()
        hierarchical.all_reduce(buffer, group, wire=half_wire)
        assert len(set(comm.allgather(buffer.tobytes()))) == 1
        total += buffer
    once = values.copy()
    hierarchical.all_reduce(once, group, wire=HalfWire(dtype))
    if comm.size > 1:
        assert np.abs(once - exact).max() > 5 * np.abs(total / n_sums - exact).max()


@pytest.mark.feature("collectives.half-precision-wire")
def test_a_half_wire_halves_the_bytes_and_leaves_other_dtypes_alone(comm):
    wire = HalfWire("bfloat16")
    assert wire.encode(np.ones(8, np.float32), ()).nbytes == 16
    assert wire.empty(np.ones(8, np.float32)).nbytes == 16
    doubles = np.ones(8)
    assert wire.encode(doubles, ()) is doubles
    overflowing = wire.encode(np.full(2, np.inf, np.float32), (1,))
    values = np.empty(2, np.float32)
    wire.decode(overflowing, values)
    assert np.isinf(values).all()
    wire.decode(wire.encode(np.ones(2, np.float32), (1,)), values)
    assert values.tolist() == [1, 1]


@pytest.mark.feature("collectives.half-precision-wire")
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16"])
def test_digits_are_learned_over_a_half_wire(comm, over_hosts, wire_dtype):
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    digits = sklearn_datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(digits.target)[order]
    over_hosts("1 each")
    torch.manual_seed(0)
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(wire_dtype=wire_dtype)
    )
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    dataset = hpcdist.Dataset.from_tensor_slices((x[:1440], y[:1440])).shuffle(seed=1).batch(48).repeat(12)
    for rows, labels in strategy.experimental_distribute_dataset(dataset):
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        hpcdist.compute_average_loss(losses, global_batch_size=48).backward()
        optimizer.step()
    accuracy = float((model(x[1440:]).argmax(1) == y[1440:]).float().mean())
    assert accuracy > 0.95


class Counting(hpcdist.CrossDeviceOps):
    """Sums by objects, and counts how often."""

    n_calls = 0

    def all_reduce(self, array, comm, op):
        self.n_calls += 1
        array[:] = sum(comm.allgather(array))


def gradient_of(strategy):
    with strategy.scope():
        model = nn.Linear(3, 1, bias=False)
    model(torch.ones(2, 3)).sum().backward()
    return model.weight.grad.reshape(-1).tolist()


@pytest.mark.feature(
    "tf.mirroredstrategy-devices-cross",
    "strategies.mirrored-strategy",
    "collectives.cross-device-ops",
    "collectives.communication-hook",
)
def test_cross_device_ops(comm):
    ops_by_name = {
        "own": Counting(),
        "one device": hpcdist.ReductionToOneDevice(),
        "other device": hpcdist.ReductionToOneDevice(comm.size - 1, sum),
        "hierarchical": hpcdist.HierarchicalCopyAllReduce(num_packs=2),
    }
    for name, ops in ops_by_name.items():
        strategy = hpcdist.MirroredStrategy(cross_device_ops=ops, gradient_op="sum")
        assert gradient_of(strategy) == [2.0 * comm.size] * 3, name
    assert comm.size == 1 or ops_by_name["own"].n_calls > 0


@pytest.mark.feature("tf.mirroredstrategy-devices-cross", "strategies.mirrored-strategy")
def test_mirrored_strategy_is_for_one_machine(comm, monkeypatch):
    assert hpcdist.MirroredStrategy([f"cpu:{rank}" for rank in range(comm.size)]).num_replicas_in_sync == comm.size
    if comm.size > 1:  # one rank has a replica for each device
        with pytest.raises(ValueError, match=f"one rank for each of {comm.size + 1} devices"):
            hpcdist.MirroredStrategy(["cpu"] * (comm.size + 1))
    monkeypatch.setattr(make_world(), "n_hosts", 2)
    with pytest.raises(ValueError, match="ranks.*host.*2"):
        hpcdist.MirroredStrategy()


def test_two_models_in_turn_as_a_gan(comm, over_hosts):
    """A backward through both models syncs both; each optimizer steps its own."""
    results = []
    for hosts in (None, "1 each" if "1 each" in HOSTS else None):
        over_hosts(hosts)
        torch.manual_seed(1)
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            maker = nn.Linear(4, 4)
            judge = nn.Linear(4, 1)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
        rows = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            for optimizer, model in zip(optimizers, (maker, judge), strict=True):
                model.zero_grad()
                other_model = judge if model is maker else maker
                judge(maker(torch.randn(3, 4, generator=rows))).mean().backward()
                optimizer.step()
                other_model.zero_grad()
        parameters = [*maker.parameters(), *judge.parameters()]
        results.append(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters))
    assert results[0] == results[1]
    assert len(set(comm.allgather(results[0]))) == 1


def test_a_gradient_that_is_summed_where_it_lies_is_private(comm):
    """What the user keeps of an earlier step is not overwritten by the next."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(600, 600, bias=False)
    model(torch.ones(1, 600)).sum().backward()
    first_gradient = model.weight.grad
    model.zero_grad()
    (model(torch.ones(1, 600)) * 3).sum().backward()
    assert first_gradient.unique().tolist() == [comm.size]
    assert model.weight.grad.unique().tolist() == [3 * comm.size]


class Shared(nn.Module):
    """Two large parameters to which autograd hands views of one gradient."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(700, 600))
        self.b = nn.Parameter(torch.zeros(700, 600))

    def forward(self, x):
        return (self.a.view(-1) + self.b.view(-1)) * x


@pytest.mark.parametrize("hosts", [None, "1 each"])
def test_gradients_that_share_memory_are_summed_once(comm, over_hosts, hosts):
    over_hosts(hosts)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = Shared()
    x = torch.full((420_000,), comm.rank + 1.0)
    model(x).sum().backward()
    wanted = comm.size * (comm.size + 1) / 2
    assert model.a.grad.unique().tolist() == model.b.grad.unique().tolist() == [wanted]


def test_a_users_tensor_that_is_the_gradient_stays_as_it_is(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = Shared()
    strategy.run(lambda: None)
    incoming_gradient = torch.ones(420_000)
    model.a.view(-1).backward(incoming_gradient)
    assert incoming_gradient.unique().tolist() == [1]
    assert model.a.grad.unique().tolist() == [comm.size]


@pytest.mark.parametrize("hosts", [None, "1 each"])
def test_replicas_at_different_backwards_are_an_error(comm, over_hosts, hosts):
    """A rank that skipped a step would else be given sums of other steps, without a word."""
    if comm.size == 1:
        return
    over_hosts(hosts)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    strategy.engine.sums.n_sums += comm.rank == 0  # as if this rank had skipped one
    with pytest.raises(hpcdist.errors.GradientError, match="replica.*backward"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hpcdist.errors.GradientError, match="earlier.*backwards"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*autocast.*:FutureWarning")  # of torch 2.4 itself
def test_a_module_built_between_forward_and_a_checkpointed_backward(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(2, 2)
        last = nn.Linear(2, 1)
    loss = last(torch.utils.checkpoint.checkpoint(model, torch.ones(1, 2), use_reentrant=False)).sum()
    with strategy.scope():
        later = nn.Linear(2, 1)
    loss.backward()  # has the last layer's gradients when it runs the checkpointed one again
    assert last.bias.grad.tolist() == [comm.size]
    assert torch.equal(model.bias.grad, comm.size * last.weight[0])
    later(torch.ones(1, 2)).sum().backward()
    assert later.bias.grad.tolist() == [comm.size]


def test_a_new_plan_owes_nothing_to_the_old_one(comm, over_hosts):
    """What a half wire rounded away from the gradients of one model is not added to another's."""
    over_hosts("1 each")
    options = hpcdist.CommunicationOptions(wire_dtype="bfloat16", bytes_per_pack=64)
    strategy = hpcdist.MultiWorkerMirroredStrategy(communication_options=options, gradient_op="sum")
    mean_gradients = []
    for value in (1.0e4 + 1, 2.0**-9):
        with strategy.scope():
            model = nn.Linear(64, 1, bias=False)
        (model(torch.full((1, 64), value))).sum().backward()
        mean_gradients.append(model.weight.grad.mean().item())
    assert abs(mean_gradients[1] - comm.size * 2.0**-9) < 1e-4


def test_options_that_contradict_each_other_are_refused():
    for wrong in ({"wire_dtype": "bfloat16"}, {"is_ordered": True}):
        with pytest.raises(ValueError, match="AUTO.*HIERARCHICAL.*wire_dtype.*is_ordered"):
            hpcdist.CommunicationOptions(implementation="RING", **wrong)
    with pytest.raises(ValueError, match="cross_device_ops.*RING"):
        hpcdist.MultiWorkerMirroredStrategy(
            communication_options=hpcdist.CommunicationOptions(implementation="RING"),
            cross_device_ops=hpcdist.HierarchicalCopyAllReduce(),
        )
    with pytest.raises(ValueError, match="CrossDeviceOps"):
        hpcdist.MirroredStrategy(cross_device_ops=hpcdist.ReductionToOneDevice)
    with pytest.raises(ValueError, match="ReduceOp.MEAN"):
        hpcdist.MultiWorkerMirroredStrategy(
            communication_options=hpcdist.CommunicationOptions(wire_dtype="float16"), gradient_op="mean"
        )


@pytest.mark.feature("strategies.multi-worker-mirrored-strategy", "semantics.transport-of-gradients")
@pytest.mark.skipif(visible_gpus(os.environ) > 0, reason="there is a GPU: tests/gpu")
@pytest.mark.parametrize("how", ["operations", "options"])
def test_nccl_without_any_gpu_warns_and_sums_otherwise(comm, caplog, how):
    if how == "operations":
        strategy = hpcdist.MirroredStrategy(cross_device_ops=hpcdist.NcclAllReduce(), gradient_op="sum")
    else:
        options = hpcdist.CommunicationOptions(implementation="NCCL")
        strategy = hpcdist.MultiWorkerMirroredStrategy(communication_options=options, gradient_op="sum")
    assert ("expected a GPU for NCCL, got none on any rank" in caplog.text) == (comm.rank == 0)
    with strategy.scope():
        model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[comm.size, comm.size]]


def test_nccl_with_gpus_and_without_cupy_is_refused_when_the_strategy_is_made(monkeypatch):
    monkeypatch.setattr(nccl_setup, "visible_gpus", lambda environ: 1)
    with pytest.raises(ValueError, match="cupy|GPU|driver"):
        hpcdist.MirroredStrategy(cross_device_ops=hpcdist.NcclAllReduce())
    with pytest.raises(ValueError, match="cupy|GPU|driver"):
        hpcdist.MultiWorkerMirroredStrategy(communication_options=hpcdist.CommunicationOptions(implementation="NCCL"))


@pytest.mark.feature("collectives.autotuner")
def test_a_restart_chooses_as_the_run_before(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    hpcdist.all_reduce(np.ones(5000))
    state = strategy.state_dict()
    strategy.load_state_dict({**state, "algorithms": [[4096, "RING"]]})
    assert strategy.state_dict()["algorithms"] == [(4096, "RING")]
    strategy.load_state_dict(state)
    assert comm.size == 1 or strategy.state_dict()["algorithms"] == state["algorithms"]
