"""What compile says of gradients: accumulated in pieces, clipped, in half precision with a loss scale."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import hpcdist
from hpcdist.errors import GradientError, UsageError
from hpcdist.training import precision

pytestmark = pytest.mark.mpi
N_ROWS = 37  # of batches of 16: the last one has 5 rows, fewer than pieces times replicas


@pytest.fixture
def rows():
    draws = np.random.default_rng(3)
    x = draws.normal(size=(N_ROWS, 5)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


@pytest.fixture(params=["one replica a rank", "four replicas"])
def strategy(request, comm):
    if request.param.startswith("one"):
        num_replicas = None
    else:
        num_replicas = 4
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas)


class Net(nn.Module):
    """A net that notes the dtype in which its layer computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.dtypes = []

    def forward(self, x):
        y = self.layer(x)
        self.dtypes.append(y.dtype)
        return y


def fitted(strategy, rows, n_epochs=2, **options):
    """Return a model after fit, and its History."""
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(Net())
        model.compile(**{"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "loss": "mse", **options})
    model.add_regularizer(hpcdist.regularizers.L2(0.01), model.net.layer.weight)
    return model, model.fit(*rows, batch_size=16, epochs=n_epochs, shuffle=False, verbose=0).history


def by_hand(rows, n_epochs=2, clip=None):
    """Return weights and losses of a loop in one process that uses nothing of fit."""
    x, y = map(torch.from_numpy, rows)
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(n_epochs):
        for begin in range(0, N_ROWS, 16):
            optimizer.zero_grad()
            losses = (net(x[begin : begin + 16]) - y[begin : begin + 16]).square()
            (losses.mean() + 0.01 * net.layer.weight.square().sum()).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}, {"global_clipnorm": 0.5}], ids=str)
def test_gradients_are_those_of_one_process(strategy, rows, options):
    model, _ = fitted(strategy, rows, **options)
    for parameter, expected in zip(model.parameters(), by_hand(rows, clip=options.get("global_clipnorm")), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.core
def test_pieces_are_summed_over_replicas_once(comm, strategy, rows):
    """As many collectives as without pieces."""
    journal = strategy.group.journal

    def run(**options):
        first = journal.n_entered
        model, history = fitted(strategy, rows, n_epochs=1, **options)
        return len(model.net.dtypes), history["loss"], journal.n_entered - first

    whole = run()
    pieces = run(gradient_accumulation_steps=3)
    assert pieces[0] > whole[0], "more, and smaller, forward passes"
    assert pieces[1] == pytest.approx(whole[1], rel=1e-5)
    assert pieces[2] == whole[2]


def on_workers(comm, work):
    """Call work(strategy) on the workers of a job with a server; raise on all ranks what it raises on one."""
    if comm.size < 2:
        pytest.skip("a server needs a rank of its own")
    error = code = None
    try:
        strategy = hpcdist.ParameterServerStrategy(hpcdist.MPIClusterResolver(roles="ps:1,worker:*"), synchronous=True)
    except SystemExit as server_exit:  # the server, at the end
        code = server_exit.code
    else:
        try:
            work(strategy)
        except (Exception, pytest.fail.Exception) as caught:  # the server waits for this rank
            error = caught
        strategy._client.leave(0)
    errors = [error_text for error_text in comm.allgather(error and repr(error)) if error_text]
    assert not errors, errors
    assert not code


@pytest.mark.core
def test_pieces_with_servers(comm, rows):
    def train(strategy):
        model, _ = fitted(strategy, rows, gradient_accumulation_steps=3)
        for weight, expected in zip(model.get_weights(), by_hand(rows), strict=True):
            torch.testing.assert_close(torch.from_numpy(weight), expected, rtol=1e-4, atol=1e-6)

    on_workers(comm, train)


def test_labels_that_do_not_count_are_refused_with_servers(comm):
    """No worker knows how many of the others' labels count."""

    def train(strategy):
        with strategy.scope():
            model = hpcdist.Model(nn.Linear(2, 3))
            loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
            model.compile("sgd", loss)
        with pytest.raises(UsageError, match="expected no ignore_class with parameter servers.*sample_weight of 0"):
            model.fit(torch.eye(2).repeat(4, 1), torch.arange(8) % 3, batch_size=4, verbose=0, shuffle=False)

    on_workers(comm, train)


@pytest.mark.feature("training.mixed-precision")
@pytest.mark.parametrize(
    ("policy", "dtype"), [("mixed_bfloat16", torch.bfloat16), ("mixed_float16", torch.float16)], ids=str
)
def test_layers_compute_in_half_precision(strategy, rows, policy, dtype, monkeypatch):
    monkeypatch.setattr(precision, "_FIRST_SCALE", 64.0)  # which does not overflow
    model, history = fitted(strategy, rows, n_epochs=8, dtype_policy=policy)
    assert set(model.net.dtypes) == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.predict(rows[0], verbose=0).dtype == np.float32
    assert history["loss"][-1] < 0.3 * history["loss"][0]
    for parameter, expected in zip(model.parameters(), by_hand(rows, n_epochs=8), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0.05, atol=0.02)


@pytest.mark.feature("training.mixed-precision")
@pytest.mark.core
def test_an_overflow_on_one_replica_is_skipped_on_all(comm, strategy, rows):
    """Its gradient is infinite in float16 with the scale of that step; half of it is not."""
    x = rows[0][:16].copy()
    y = rows[1][:16].copy()
    y[1] = 300.0  # of one replica: 2 * 300 / 16 * 32768 is more than float16 holds
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Linear(5, 1))
        model.compile(lambda p: torch.optim.SGD(p, lr=0.001), "mse", dtype_policy="mixed_float16")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scales = []
    for _ in range(14):
        model.train_on_batch(x, y)
        scales.append(model.loss_scale.scale)
        if scales[-1] < (scales[-2] if len(scales) > 1 else 2.0**15):
            assert all(map(torch.equal, before, model.parameters())), "no step"
    assert scales[0] == 2.0**14, "an overflow at the first step"
    assert scales[-1] == scales[-2], "then none"
    assert not all(map(torch.equal, before, model.parameters()))
    local_state = [scales, [parameter.tolist() for parameter in model.parameters()]]
    assert comm.bcast(local_state) == local_state, "the same on all ranks"


def test_gradients_that_are_no_numbers_are_no_overflow(strategy, rows):
    x = rows[0][:16].copy()
    x[3] = np.nan
    with strategy.scope():
        model = hpcdist.Model(nn.Linear(5, 1))
        model.compile("sgd", "mse", dtype_policy="mixed_float16")

    def train():
        for _ in range(20):
            model.train_on_batch(x, rows[1][:16])

    with pytest.raises(GradientError, match="scale.*1.*overflow"):
        train()


def test_what_servers_cannot_do(comm):
    def compile_all(strategy):
        with strategy.scope():
            model = hpcdist.Model(nn.Linear(5, 1))
        for options, text in (
            ({"global_clipnorm": 1.0}, "no global_clipnorm with parameter servers"),
            ({"dtype_policy": "mixed_float16"}, "take mixed_bfloat16"),
        ):
            with pytest.raises(UsageError, match=text):
                model.compile("sgd", "mse", **options)

    on_workers(comm, compile_all)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype_policy": "float8"}, "mixed_bfloat16, mixed_float16, got 'float8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps of at least 1, got 0"),
        ({"steps_per_execution": None}, "steps_per_execution of at least 1, got None"),
        ({"global_clipnorm": -1.0}, "global_clipnorm above 0, got -1.0"),
    ],
    ids=str,
)
def test_bad_values(options, text):
    with pytest.raises(UsageError, match=text):
        hpcdist.Model(nn.Linear(5, 1)).compile("sgd", "mse", **options)


def test_a_file_holds_how_a_model_was_compiled(strategy, rows, shared_path):
    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(nn.Linear(5, 1)))
        model.compile("sgd", "mse", dtype_policy="mixed_bfloat16", gradient_accumulation_steps=2, global_clipnorm=1.0)
    model.save(shared_path / "model.h5")
    with strategy.scope():
        loaded = hpcdist.load_model(shared_path / "model.h5")
    assert loaded.compiled_with["options"] == model.compiled_with["options"]


class OwnStep(hpcdist.Model):
    """A model whose step is that of a loop by hand, or calls what compile has options for."""

    def __init__(self, is_plain):
        super().__init__(nn.Linear(5, 1))
        self.is_plain = is_plain

    def train_step(self, data):
        x, y, _ = self.unpack(data)
        self.optimizer.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        if self.is_plain:
            loss.backward()
            self.optimizer.step()
        else:
            self.backward(loss)
            self.step()
        return {}


def test_a_step_of_its_own_does_not_ignore_options(strategy, rows):
    def train(is_plain, **options):
        with strategy.scope():
            torch.manual_seed(1)
            model = OwnStep(is_plain)
            model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "mse", **options)
        model.fit(*rows, batch_size=16, shuffle=False, verbose=0)
        return parameters_to_vector(model.parameters()).detach()

    assert not torch.equal(train(False, global_clipnorm=0.1), train(False))
    assert torch.equal(train(True), train(False))
    for options in ({"global_clipnorm": 0.1}, {"dtype_policy": "mixed_float16"}):
        with pytest.raises(UsageError, match=r"train_step.*self.backward\(loss\).*self.step\(\)"):
            train(True, **options)
    with pytest.raises(UsageError, match="gradient_accumulation_steps.*train_step"):
        train(False, gradient_accumulation_steps=2)


class OwnAccumulation(hpcdist.Model):
    """A model that steps on the gradients of several batches."""

    def __init__(self, n_batches=2):
        super().__init__(nn.Linear(5, 1))
        self.n_calls = 0
        self.n_batches = n_batches

    def train_step(self, data):
        x, y, _ = self.unpack(data)
        self.n_calls += 1
        with self.strategy.no_sync() if self.n_calls % self.n_batches else contextlib.nullcontext():
            self.backward(self.compute_loss(x, y, self.call_with(x)) / self.n_batches)
        if not self.n_calls % self.n_batches:
            self.step()
            self.optimizer.zero_grad()
        return {}


def test_a_step_of_its_own_may_accumulate_and_clip(comm, rows):
    x = rows[0][:32]
    y = rows[1][:32]
    clip = 0.01
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(1)
        model = OwnAccumulation()
        model.compile(lambda p: torch.optim.SGD(p, lr=1.0), "mse", global_clipnorm=clip)
    before = torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    after = parameters_to_vector(model.parameters()).detach()
    assert (after - before).norm() == pytest.approx(clip, rel=1e-4)


def test_a_loss_scale_changes_between_steps_only(rows):
    """An overflow of gradients that accumulate over 24 batches halves the scale once, and is no error."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = OwnAccumulation(n_batches=24)
        model.compile(lambda p: torch.optim.SGD(p, lr=0.0), "mse", dtype_policy="mixed_float16")
    model.loss_scale.load_state_dict({"scale": 2.0**24, "n_good": 0})
    scales = []
    for _ in range(48):
        model.train_on_batch(rows[0][:16] * 100, rows[1][:16])
        scales.append(model.loss_scale.scale)
    assert scales == [2.0**24] * 23 + [2.0**23] * 24 + [2.0**22]


class OtherOptimizer(hpcdist.Model):
    """A model that lets another optimizer step, after its own or not at all."""

    steps = False

    def train_step(self, data):
        x, y, _ = self.unpack(data)
        self.backward(self.compute_loss(x, y, self(x)))
        if self.steps:
            self.step()
        self.other.step()
        return {}


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("options", [{"global_clipnorm": 1.0}, {"dtype_policy": "mixed_float16"}], ids=str)
def test_a_step_by_another_optimizer_does_not_ignore_options(comm, rows, options, steps):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = OtherOptimizer(nn.Linear(5, 1))
        model.steps = steps
        model.compile("sgd", "mse", **options)
        model.other = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"self.backward\(loss\).*self.step\(\).*Adam"):
        model.fit(*rows, batch_size=16, verbose=0)


class NoStep(hpcdist.Model):
    def train_step(self, data):
        x, y, _ = self.unpack(data)
        self.compute_loss(x, y, self(x)).backward()
        return {}


def test_a_step_that_calls_neither(comm, rows):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = NoStep(nn.Linear(5, 1))
        model.compile("sgd", "mse", global_clipnorm=1.0)
    with pytest.raises(UsageError, match=r"self.backward\(loss\).*self.step\(\).*neither"):
        model.fit(*rows, batch_size=16, verbose=0)


class NoSecondStep(hpcdist.Model):
    """A model whose train_step calls `backward` and `step` of the model the first time only."""

    n_steps = 0

    def train_step(self, data):
        x, y, _ = self.unpack(data)
        loss = self.compute_loss(x, y, self(x))
        self.n_steps += 1
        if self.n_steps > 1:
            loss.backward()
        else:
            self.backward(loss)
            self.step()
        return {}


def test_each_step_calls_them_anew(comm, rows):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = NoSecondStep(nn.Linear(5, 1))
        model.compile("sgd", "mse", global_clipnorm=1.0)
    with pytest.raises(UsageError, match="got neither"):
        model.fit(*rows, batch_size=16, verbose=0)
    assert model.n_steps == 2


def test_options_that_do_not_go_together(comm):
    mean = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with mean.scope():
        model = hpcdist.Model(nn.Linear(5, 1))
    with pytest.raises(UsageError, match="gradient_op.*MEAN"):
        model.compile("sgd", "mse", gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match="sparse=True"):
        hpcdist.Model(nn.Embedding(3, 2, sparse=True)).compile("sgd", "mse", global_clipnorm=1.0)


def test_local_steps_refuse_mixed_float16_and_leave_ranks_equal(comm):
    options = hpcdist.CommunicationOptions(local_steps=4)
    strategy = hpcdist.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = hpcdist.Model(nn.Linear(3, 1))
        with pytest.raises(ValueError, match=r"mixed_float16 with local_steps"):
            model.compile("sgd", "mse", dtype_policy="mixed_float16")
        model.compile("sgd", "mse")
    x = torch.randn(24 * 3, 3, generator=torch.Generator().manual_seed(1))
    model.fit(x, x.sum(1, keepdim=True), batch_size=24, verbose=0)  # three steps: a round is open
    assert not strategy.world.step_flags.is_in_round
    assert len(set(comm.allgather(model.net.weight.detach().numpy().tobytes()))) == 1
