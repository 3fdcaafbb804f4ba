"""What compile and fit are given in other ways: losses, optimizers, weights, steps and data of the program's own."""

import os

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.callbacks import LambdaCallback, ModelCheckpoint
from hpcdist.errors import DataError, UsageError

pytestmark = pytest.mark.mpi
N_ROWS = 37


@pytest.fixture
def rows():
    draws = np.random.default_rng(3)
    x = draws.normal(size=(N_ROWS, 5)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def fitted(rows, kind=None, compile_options=None, **options):
    """Return a model that was trained on rows, and its History."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(1)
        model = (kind or hpcdist.Model)(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
        model.compile(**{"optimizer": "adam", "loss": "mse", **(compile_options or {})})
    return model, model.fit(*rows, **{"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **options}).history


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), lambda y_true, y_pred: (y_pred - y_true).square()],
    ids=["of torch", "a function"],
)
def test_losses_of_torch_and_functions(rows, loss):
    history = fitted(rows, compile_options={"loss": loss})[1]
    expected = fitted(rows)[1]
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_loss_of_torch_that_is_a_sum_is_refused(rows):
    with pytest.raises(UsageError, match="averaged.*reduction.*'sum'"):
        fitted(rows, compile_options={"loss": nn.MSELoss(reduction="sum")})
    with pytest.raises(UsageError, match="got reduction 'batchmean' of KLDivLoss"):
        fitted(rows, compile_options={"loss": nn.KLDivLoss(reduction="batchmean")})


def test_an_optimizer_that_was_made_before(rows):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
        model.compile(torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7), "mse")
    history = model.fit(*rows, 16, epochs=2, shuffle=False, verbose=0).history
    of_torch = fitted(
        rows, compile_options={"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.001, eps=1e-7)}
    )
    assert history == of_torch[1]
    assert history["loss"] == pytest.approx(fitted(rows)[1]["loss"], rel=1e-6), "Keras adds epsilon elsewhere"


def test_metrics_take_weights_where_they_are_asked_to(rows):
    weights = np.linspace(0, 2, N_ROWS, dtype=np.float32)
    model, _ = fitted(rows, compile_options={"metrics": ["mae"], "weighted_metrics": ["mse"]})
    logs = model.evaluate(*rows, batch_size=16, sample_weight=weights, verbose=0, return_dict=True)
    errors = (model.predict(rows[0], 16) - rows[1])[:, 0]
    assert logs["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert logs["mse"] == pytest.approx((weights * errors**2).sum() / weights.sum(), rel=1e-5)
    assert logs["loss"] == pytest.approx((weights * errors**2).mean(), rel=1e-5)


def test_a_compiled_module_trains_alike(rows, monkeypatch):
    compiled = []
    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or make(module, backend="eager"))
    assert fitted(rows, compile_options={"jit_compile": True})[1] == fitted(rows)[1]
    assert len(compiled) == 1
    compiled.clear()
    torch.compiler.reset()  # its caches would keep the model, and so the strategy, which losses of later tests see


@pytest.mark.parametrize(("freq", "n_validations"), [(2, 2), ([1, 4, 9], 2), (1, 5)])
def test_validations_after_some_epochs(rows, freq, n_validations):
    options = {"validation_data": rows, "validation_batch_size": 7, "validation_freq": freq, "epochs": 5}
    assert len(fitted(rows, **options)[1]["val_loss"]) == n_validations


class OwnSteps(hpcdist.Model):
    def test_step(self, data):
        x, _, _ = self.unpack(data)
        return {"rows": torch.tensor(float(len(x)))}

    def predict_step(self, data):
        return 2 * self.call_with(self.unpack(data)[0])


def test_steps_of_an_evaluation_and_a_prediction(comm, rows):
    model, _ = fitted(rows, OwnSteps)
    logs = model.evaluate(*rows, batch_size=16, verbose=0, return_dict=True)
    n_last = N_ROWS % 16  # a value of a step is the mean over the replicas at the last one
    assert logs["rows"] == pytest.approx(n_last / comm.size)
    with torch.no_grad():
        np.testing.assert_allclose(model.predict(rows[0], 16), 2 * model.net(torch.tensor(rows[0])), rtol=1e-5)


def with_two_groups():
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1)))
        first, second = (layer.parameters() for layer in model.module)
        groups = [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]
        model.compile(torch.optim.SGD(groups, momentum=0.9), "mse")
    return strategy, model


def test_groups_keep_their_proportion_through_a_rate_of_0(rows, shared_path):
    """As a warm-up begins at 0; a run may resume there."""
    strategy, model = with_two_groups()
    model.learning_rate = 0.0
    model.fit(*rows, 16, epochs=1, verbose=0)
    objects = {"model": model, "optimizer": model.optimizer, "strategy": strategy}
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(**objects), shared_path / "run")
    manager.save(1)
    manager.wait()
    strategy, other = with_two_groups()
    objects = {"model": other, "optimizer": other.optimizer, "strategy": strategy}
    hpcdist.CheckpointManager(hpcdist.Checkpoint(**objects), shared_path / "run").restore_or_initialize()
    for resumed in (model, other):
        rates = [group["lr"] for group in resumed.optimizer.param_groups]
        assert rates == [0.0, 0.0]
        resumed.learning_rate = 0.0
        resumed.learning_rate = 0.2
        rates = [group["lr"] for group in resumed.optimizer.param_groups]
        assert rates == pytest.approx([0.2, 0.02])


class WithPenalty(hpcdist.Model):
    def forward(self, x):
        outputs = super().forward(x)
        self.add_loss(0.5 * next(self.parameters()).square().sum())
        return outputs


def test_losses_that_are_added_count_once(rows):
    by_tensor = fitted(rows, WithPenalty)[1]
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
        model.compile("adam", "mse")
    model.add_loss(lambda: 0.5 * next(model.parameters()).square().sum())
    by_function = model.fit(*rows, 16, epochs=2, shuffle=False, verbose=0).history
    regularized, _ = fitted(rows, epochs=0)
    regularized.add_regularizer(hpcdist.regularizers.L2(0.5), next(regularized.parameters()))
    by_regularizer = regularized.fit(*rows, 16, epochs=2, shuffle=False, verbose=0).history
    assert by_tensor["loss"] == pytest.approx(by_function["loss"], rel=1e-6)
    assert by_tensor["loss"] == pytest.approx(by_regularizer["loss"], rel=1e-6)
    assert by_tensor["loss"][0] > fitted(rows)[1]["loss"][0]


class WithPenaltyAndStatistics(hpcdist.Model):
    """Its forward adds a loss, and meets the other replicas after that, of which some share the process."""

    def forward(self, x):
        self.add_loss(0.5 * next(self.parameters()).square().sum())
        outputs = super().forward(x)
        total = hpcdist.get_replica_context().all_reduce(hpcdist.ReduceOp.SUM, outputs.detach().sum())
        return outputs - 0 * total


def test_losses_that_are_added_are_those_of_their_replica(rows):
    """Whoever begins a step drops the losses of the last one: its own, not those of the replicas beside it."""
    losses = []
    for kind in (WithPenaltyAndStatistics, WithPenalty):
        strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=6)
        with strategy.scope():
            torch.manual_seed(1)
            model = kind(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
            model.compile("adam", "mse")
        losses.append(model.fit(*rows, 24, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_losses_of_calls_between_steps_are_dropped(rows):
    """A callback that calls the model adds losses that no step uses: each would keep its graph."""
    n_losses = []

    def call(epoch, logs):
        model(torch.ones(2, 5))
        n_losses.append(len(model.losses))

    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = WithPenalty(nn.Linear(5, 1))
        model.compile("sgd", "mse")
    model.fit(*rows, 16, epochs=3, verbose=0, callbacks=[LambdaCallback(on_epoch_end=call)])
    assert n_losses == [1, 1, 1]


class Seeing(hpcdist.Model):
    def train_step(self, data):
        x, _, _ = self.unpack(data)
        self.seen.extend(x[:, 0].tolist())
        return super().train_step(data)


def test_arrays_are_read_in_a_new_order_in_each_epoch(comm, rows):
    orders = []
    for shuffle in (True, False):
        strategy = hpcdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = Seeing(nn.Linear(5, 1))
            model.compile("sgd", "mse")
        for _ in range(2):
            model.seen = []
            model.fit(*rows, 16, shuffle=shuffle, epochs=2, verbose=0)
            orders.append(comm.allgather(model.seen))
    every = sorted(rows[0][:, 0].tolist() * 2)
    assert all(sorted(sum(order, [])) == pytest.approx(every) for order in orders)
    if comm.size == 1:
        assert orders[0][0][:N_ROWS] != orders[0][0][N_ROWS:]
    assert orders[0] != orders[2]
    assert orders[2] == orders[3]


def test_datasets_of_h5py(comm, rows, shared_path):
    if comm.rank == 0:
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = rows
    comm.barrier()
    with h5py.File(shared_path / "data.h5", "r") as file:
        assert fitted((file["x"], file["y"]))[1] == fitted(rows)[1]


def test_files_whose_paths_differ_by_rank(comm, rows, shared_path):
    """As the guides give them: the chief's stay alone."""
    if comm.rank == 0:
        folder_name = "files"
    else:
        folder_name = f"other{comm.rank}"
    saved = ModelCheckpoint(shared_path / folder_name / "m-{epoch}.h5")
    fitted(rows, callbacks=[saved])
    comm.barrier()
    assert sorted(os.listdir(shared_path / "files")) == ["m-1.h5", "m-2.h5"]
    assert os.listdir(shared_path) == ["files"]


def test_a_dataset_without_rows(rows):
    model, _ = fitted(rows)
    empty = hpcdist.Dataset.from_tensor_slices(tuple(row[:0] for row in rows)).batch(16)
    for call in (model.fit, model.evaluate, lambda dataset, **options: model.predict(dataset)):
        with pytest.raises(DataError, match="expected .* got (none|no rows|0)"):
            call(empty, verbose=0)
