"""fit, evaluate and predict on real ranks: the History of any number of ranks, each row once, what callbacks see."""

import copy
import gc
import itertools
import json
import math
import os

import h5py
import numpy as np
import pytest
import torch
from sklearn import datasets as sklearn_datasets
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import hpcdist
from hpcdist.callbacks import Callback, EarlyStopping, LambdaCallback, LearningRateWarmup, ModelCheckpoint
from hpcdist.errors import DataError, UsageError
from hpcdist.losses import BinaryCrossentropy, Reduction, SparseCategoricalCrossentropy
from hpcdist.training.loop import Position

pytestmark = [pytest.mark.mpi, pytest.mark.core]
N_ROWS = 75  # of batches of 16: four whole ones, and one of 11


@pytest.fixture
def rows():
    draws = np.random.default_rng(3)
    x = draws.normal(size=(N_ROWS, 5)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64) + (x[:, 0] > 1)


def make_model(strategy, n_outputs=3, seed=1, **options):
    with strategy.scope():
        torch.manual_seed(seed)
        model = hpcdist.Model(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, n_outputs)))
        default_options = {
            "optimizer": "adam",
            "loss": SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        }
        model.compile(**{**default_options, **options})
    return model


@pytest.fixture(params=["one replica a rank", "four replicas"])
def strategy(request, comm):
    if request.param == "one replica a rank":
        return hpcdist.MultiWorkerMirroredStrategy()
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=4)


def by_hand(rows, epochs, make_optimizer=lambda parameters: torch.optim.Adam(parameters, eps=1e-7)):
    """Return the History of one process, by a loop that uses nothing of fit, and the module."""
    x, y = map(torch.from_numpy, rows)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make_optimizer(net.parameters())
    history = {"loss": [], "accuracy": []}
    for _ in range(epochs):
        total = 0.0
        right = 0
        for begin in range(0, N_ROWS, 16):
            outputs = net(x[begin : begin + 16])
            truth = y[begin : begin + 16]
            losses = nn.functional.cross_entropy(outputs, truth, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            total = total + losses.sum().item()
            right = right + int((outputs.argmax(1) == truth).sum())
        history["loss"].append(total / N_ROWS)
        history["accuracy"].append(right / N_ROWS)
    return history, net


@pytest.mark.feature("tf.fit-evaluate-predict", "training.compile-and-fit", "semantics.models-know-their-strategy")
def test_the_history_is_that_of_a_loop_by_hand(strategy, rows):
    model = make_model(strategy)
    history = model.fit(*rows, batch_size=16, epochs=3, shuffle=False, verbose=0)
    expected, net = by_hand(rows, 3)
    assert history.epoch == [0, 1, 2]
    assert history.history["accuracy"] == expected["accuracy"]
    assert history.history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert model.history is history
    for parameter, plain_parameter in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter, plain_parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.feature("training.history")
def test_four_replicas_have_one_history_on_any_number_of_ranks(comm, rows):
    """Compared with four replicas in this process alone, to the last digit."""

    def run(strategy):
        model = make_model(strategy)
        fitted = model.fit(*rows, batch_size=16, epochs=2, validation_data=rows, verbose=0, shuffle=False)
        return json.dumps(fitted.history), [parameter.detach().clone() for parameter in model.parameters()]

    distributed_outcome = run(hpcdist.MultiWorkerMirroredStrategy(num_replicas=4))
    alone = comm.Split(comm.rank, 0)
    single_rank_outcome = run(
        hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="worker:*", comm=alone), num_replicas=4)
    )
    assert distributed_outcome[0] == single_rank_outcome[0]
    assert all(map(torch.equal, distributed_outcome[1], single_rank_outcome[1]))


@pytest.mark.feature("tf.fit-evaluate-predict", "training.compile-and-fit")
def test_each_row_is_evaluated_once_and_predictions_are_in_order(strategy, rows):
    x, y = rows
    model = make_model(strategy)
    scores = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    with torch.no_grad():
        outputs = model.net(torch.from_numpy(x))
    losses = nn.functional.cross_entropy(outputs, torch.from_numpy(y), reduction="none")
    assert scores["accuracy"] == float((outputs.argmax(1).numpy() == y).sum()) / N_ROWS
    assert scores["loss"] == pytest.approx(losses.double().mean().item(), rel=1e-6)
    assert model.evaluate(x, y, batch_size=16, verbose=0) == list(scores.values())
    predicted = model.predict(x, batch_size=16, verbose=0)
    np.testing.assert_allclose(predicted, outputs.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(x[:7]), outputs[:7].numpy(), rtol=1e-5, atol=1e-6)
    assert model.training, "evaluate and predict leave the mode as it was"


@pytest.mark.feature("training.compile-and-fit")
def test_weights_of_rows_and_classes(strategy, rows):
    x, y = rows
    weights = np.linspace(0.5, 2, N_ROWS)

    def loss_of(**options):
        model = make_model(strategy, weighted_metrics=["accuracy"])
        return model.fit(x, y, batch_size=N_ROWS, verbose=0, shuffle=False, **options).history["loss"][0]

    with torch.no_grad():
        outputs = make_model(strategy).net(torch.from_numpy(x))
    losses = nn.functional.cross_entropy(outputs, torch.from_numpy(y), reduction="none").double().numpy()
    of_classes = np.array([1.0, 3.0, 1.0])
    assert loss_of(sample_weight=weights) == pytest.approx((losses * weights).sum() / N_ROWS, rel=1e-5)
    assert loss_of(class_weight={1: 3.0}) == pytest.approx((losses * of_classes[y]).sum() / N_ROWS, rel=1e-5)
    combined_loss = loss_of(class_weight={1: 3.0}, sample_weight=weights)
    assert combined_loss == pytest.approx((losses * of_classes[y] * weights).sum() / N_ROWS, rel=1e-5)


def test_datasets_and_loaders_are_taken_as_they_are(strategy, rows):
    expected = make_model(strategy).fit(*rows, batch_size=16, shuffle=False, verbose=0).history
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(16)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.from_numpy, rows)), batch_size=16, shuffle=False
    )
    for batches in (dataset, loader, strategy.experimental_distribute_dataset(dataset)):
        assert make_model(strategy).fit(batches, verbose=0).history == expected
    with pytest.raises(UsageError, match="batch_size"):
        make_model(strategy).fit(dataset, rows[1], batch_size=3, verbose=0)


@pytest.mark.feature("training.compile-and-fit")
def test_steps_of_an_epoch_go_on_where_the_last_one_ended(strategy, rows):
    numbers = np.arange(N_ROWS, dtype=np.float32).reshape(-1, 1).repeat(5, 1)
    seen = []

    class Noting(hpcdist.Model):
        def train_step(self, data):
            seen.extend(data[0][:, 0].tolist())
            return super().train_step(data)

    def make():
        with strategy.scope():
            model = Noting(nn.Linear(5, 3))
            model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = hpcdist.Dataset.from_tensor_slices((numbers, rows[1])).batch(16)
    model = make()
    model.fit(data, epochs=3, steps_per_epoch=2, verbose=0)
    assert model.n_steps_of_epoch == 2
    everywhere = sorted(hpcdist.all_gather(np.array(seen)).tolist())
    assert everywhere == sorted([*range(75), *range(16)]), "five steps are a pass, and the sixth begins the next one"
    with pytest.raises(UsageError, match="steps_per_epoch.*5.*6"):
        make().fit(data, steps_per_epoch=6, verbose=0)
    assert len(make().fit(data.repeat(), epochs=2, steps_per_epoch=6, verbose=0).epoch) == 2


@pytest.mark.feature("training.compile-and-fit")
def test_a_validation_of_some_steps_sees_the_same_rows_each_time(strategy, rows):
    model = make_model(strategy, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    history = model.fit(
        *rows, epochs=4, validation_data=rows, validation_steps=2, validation_freq=2, batch_size=16, verbose=0
    ).history
    first = model.evaluate(rows[0][:32], rows[1][:32], batch_size=16, verbose=0)
    assert history["val_loss"] == pytest.approx([first[0]] * 2, rel=1e-6)
    assert len(history["loss"]) == 4
    split = make_model(strategy).fit(*rows, validation_split=0.2, batch_size=16, verbose=0).history
    assert set(split) == {"loss", "accuracy", "val_loss", "val_accuracy"}


@pytest.mark.feature("training.other-callbacks")
def test_one_rank_that_stops_stops_all(comm, strategy, rows):
    class Stopping(Callback):
        def on_train_batch_end(self, batch, logs):
            assert math.isfinite(logs["loss"])
            assert set(logs) == {"loss", "accuracy"}
            if comm.rank == comm.size - 1 and batch == 2:
                self.model.stop_training = True

    model = make_model(strategy)
    history = model.fit(*rows, batch_size=16, epochs=5, callbacks=[Stopping()], verbose=0)
    assert (history.epoch, model.n_steps_of_epoch) == ([0], 3)

    def stop(epoch, logs):
        model.stop_training = comm.rank == 0 and epoch == 1

    ended = model.fit(*rows, batch_size=16, epochs=5, callbacks=LambdaCallback(on_epoch_end=stop), verbose=0)
    assert ended.epoch == [0, 1]


def test_callbacks_are_called_in_the_order_of_keras(strategy, rows):
    calls = []
    hooks = {name: (lambda *args, name=name: calls.append(name)) for name in dir(Callback) if name.startswith("on_")}
    model = make_model(strategy)
    model.fit(*rows, batch_size=N_ROWS, validation_data=rows, callbacks=LambdaCallback(**hooks), verbose=0)
    assert calls == [
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_test_begin",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_end",
        "on_epoch_end",
        "on_train_end",
    ]


@pytest.mark.feature("training.other-callbacks")
def test_the_best_weights_come_back(strategy, rows):
    seen = {}
    stopping = EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    model = make_model(strategy, optimizer="sgd")
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.setdefault(epoch, model.get_weights()))
    history = model.fit(*rows, batch_size=16, epochs=6, callbacks=[stopping, note], verbose=0)
    assert history.epoch == [0, 1], "the loss falls, so that the first epoch is the best one"
    assert all(map(np.array_equal, model.get_weights(), seen[0]))
    assert not all(map(np.array_equal, seen[1], seen[0]))


@pytest.mark.feature("training.learning-rate-warm-up")
def test_the_learning_rate_warms_up_to_that_of_all_replicas(strategy, rows):
    rates = []
    model = make_model(strategy, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(model.learning_rate))
    warmup = LearningRateWarmup(warmup_epochs=2)
    model.fit(*rows, batch_size=16, epochs=4, callbacks=[warmup, note], verbose=0)
    n = strategy.num_replicas_in_sync
    assert rates[0] == pytest.approx(0.01)
    assert rates[1] == pytest.approx(0.01 * (1 + (1 + 4 / 5) / 2 * (n - 1)))
    assert rates[2:] == pytest.approx([0.01 * n] * 2)


@pytest.mark.feature("training.model-checkpoint-callback", "semantics.checkpoint-callback-rules")
def test_a_model_is_saved_and_loaded_with_its_optimizer(strategy, rows, shared_path):
    folder = shared_path / "models"
    model = make_model(strategy)
    model.fit(
        *rows, batch_size=16, epochs=2, callbacks=ModelCheckpoint(folder / "m-{epoch}.h5"), verbose=0, shuffle=False
    )
    assert sorted(os.listdir(folder)) == ["m-1.h5", "m-2.h5"]
    expected = model.fit(*rows, batch_size=16, verbose=0, shuffle=False).history
    with strategy.scope():
        loaded = hpcdist.load_model(folder / "m-2.h5")
    assert loaded.fit(*rows, batch_size=16, verbose=0, shuffle=False).history == expected
    model.save_weights(folder / "w.h5")
    reloaded_model = make_model(strategy, seed=9)
    reloaded_model.load_weights(folder / "w.h5")
    assert all(map(np.array_equal, reloaded_model.get_weights(), model.get_weights()))


def test_a_model_that_needs_a_factory(strategy, rows, shared_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x)

    with strategy.scope():
        model = hpcdist.Model(Own())
        model.compile("adam", SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*rows, verbose=0)
    path = shared_path / "own.h5"
    model.save(path)
    with strategy.scope():
        with pytest.raises(UsageError, match="load_model.*factory"):
            hpcdist.load_model(path)
        loaded = hpcdist.load_model(path, Own)
    assert loaded.evaluate(*rows, verbose=0) == model.evaluate(*rows, verbose=0)


def test_a_subclass_with_steps_of_its_own(strategy, rows):
    """As in the guides: a loss tracker that the model makes, and values that are no metrics."""

    class Own(hpcdist.Model):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)
            self.tracker = hpcdist.metrics.Mean("my_loss")

        def forward(self, x):
            return self.layer(x)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y, _ = hpcdist.Model.unpack(data)
            self.optimizer.zero_grad()
            losses = (self(x)[:, 0] - y).square()
            hpcdist.compute_average_loss(losses, global_batch_size=25).backward()
            self.optimizer.step()
            self.tracker.update_state(losses.detach())
            return {"my_loss": self.tracker.result(), "rows": float(len(x))}

    with strategy.scope():
        model = Own()
        model.compile("sgd")
    logs = model.fit(*rows, batch_size=25, verbose=0, epochs=2).history
    assert set(logs) == {"my_loss", "rows"}
    assert logs["my_loss"][1] < logs["my_loss"][0]
    assert logs["rows"] == [25 / strategy.n_replicas] * 2


def test_several_outputs_have_losses_and_metrics_of_their_own(strategy, rows):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(5, 3)
            self.two = nn.Linear(5, 1)

        def forward(self, x):
            return {"kind": self.one(x), "sum": self.two(x)}

    x, y = rows
    truth = {"kind": y, "sum": x.sum(1)}
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(Two())
        model.compile(
            "sgd",
            loss={"kind": SparseCategoricalCrossentropy(from_logits=True), "sum": "mse"},
            loss_weights={"kind": 1.0, "sum": 0.5},
            metrics={"kind": ["accuracy"], "sum": ["mae"]},
        )
    with torch.no_grad():
        outputs = model.net(torch.from_numpy(x))
    expected = nn.functional.cross_entropy(outputs["kind"], torch.from_numpy(y)) + 0.5 * nn.functional.mse_loss(
        outputs["sum"][:, 0], torch.from_numpy(x.sum(1))
    )
    logs = model.evaluate(x, truth, verbose=0, return_dict=True)
    assert set(logs) == {"loss", "kind_accuracy", "sum_mae", "kind_loss", "sum_loss"}
    assert logs["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert logs["kind_loss"] + 0.5 * logs["sum_loss"] == pytest.approx(logs["loss"], rel=1e-6)
    assert set(model.predict(x, verbose=0)) == {"kind", "sum"}


def test_the_guides_custom_loop_prints_the_guides_losses(strategy):
    """They follow by hand: kernel -0.382, bias 0, cross-entropy from logits, L2(1e-4), SGD(0.01), rows of ones."""
    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(nn.Linear(1, 1)))
        model.add_regularizer(hpcdist.regularizers.L2(1e-4), model.net[0].weight)
        with torch.no_grad():
            model.net[0].weight.fill_(-0.382)
            model.net[0].bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.ones(16, 1)
    data = strategy.experimental_distribute_dataset(
        hpcdist.Dataset.from_tensor_slices((rows, rows)).batch(16).repeat(210)
    )
    loss_object = BinaryCrossentropy(from_logits=True, reduction=Reduction.NONE)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = hpcdist.compute_average_loss(loss_object(y, model(x)), global_batch_size=16)
        loss = loss + hpcdist.scale_regularization_loss(sum(model.losses))
        loss.backward()
        optimizer.step()
        return loss.detach()

    printed = [float(strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)) for batch in data]
    kernel = -0.382
    bias = 0.0
    expected = []
    for _ in range(210):
        z = kernel + bias
        expected.append(math.log1p(math.exp(-z)) + 1e-4 * kernel**2)
        slope = -1 / (1 + math.exp(z))
        kernel = kernel - 0.01 * (slope + 2e-4 * kernel)
        bias = bias - 0.01 * slope
    assert printed == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "adm"}, "expected a known optimizer, got 'adm'; close ones are .*adam"),
        ({"loss": "sparse_crossentropy"}, "expected a known loss, got 'sparse_crossentropy'; close ones are .*sparse"),
        ({"metrics": ["acuracy"]}, "expected a known metric, got 'acuracy'; close ones are .*accuracy"),
        ({"optimizer": 3}, "expected an optimizer, its name, or a function"),
        ({"loss": 3}, "expected a loss by name, or a function, got int"),
    ],
)
def test_unknown_names_list_close_ones(strategy, options, text):
    with pytest.raises(UsageError, match=text):
        make_model(strategy, **options)


class Probabilities(nn.Module):
    """A module whose last layer cannot be known."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("last", "loss"),
    [
        (nn.Sigmoid(), BinaryCrossentropy(from_logits=True)),
        (nn.Sigmoid(), nn.BCEWithLogitsLoss()),
        (nn.Softmax(-1), nn.CrossEntropyLoss()),
        (nn.Sequential(nn.Softmax(-1)), SparseCategoricalCrossentropy(from_logits=True)),
    ],
    ids=str,
)
def test_a_last_layer_that_a_loss_of_logits_does_not_take(last, loss):
    model = hpcdist.Model(nn.Sequential(nn.Linear(5, 3), last))
    with pytest.raises(UsageError, match="logits.*logits.*S"):
        model.compile("sgd", loss)


@pytest.mark.parametrize("misspelled_callbacks", ["EarlyStoping", ["EarlyStoping"]])
def test_a_callback_by_a_name(rows, misspelled_callbacks):
    model = make_model(hpcdist.get_strategy())
    for call in (model.fit, model.evaluate):
        with pytest.raises(UsageError, match="'EarlyStoping'.*EarlyStopping"):
            call(*rows, callbacks=misspelled_callbacks, verbose=0)
    with pytest.raises(UsageError, match=r"'on_epoch_ends'.*'on_epoch_end'"):
        hpcdist.callbacks.LambdaCallback(on_epoch_ends=print)


def test_a_label_that_torch_would_ignore(rows):
    model = make_model(hpcdist.get_strategy())
    with pytest.raises(UsageError, match="100.*bounds"):
        model.fit(rows[0], np.full(N_ROWS, -100), verbose=0)


def test_the_summary_is_that_of_the_chief(comm, strategy):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.layer = nn.Linear(3, 2)

    with strategy.scope():
        model = hpcdist.Model(Own())
    lines = []
    model.summary(lines.append)
    assert bool(lines) == (comm.rank == 0)
    if comm.rank == 0:
        assert [line.split()[:3] for line in lines[1:3]] == [["Own", "Own", "2"], ["layer", "Linear", "8"]]
        assert lines[-1] == "10 parameters, 10 of them trained"


def test_steps_that_a_call_does_not_divide(comm, rows, shared_path):
    """Five steps, two of them for each call: the last call stands for one."""
    model = make_model(hpcdist.MultiWorkerMirroredStrategy(), steps_per_execution=2)
    seen = []
    saved = hpcdist.callbacks.ModelCheckpoint(shared_path / "m-{epoch}-{batch}.h5", save_freq=6)
    hook = hpcdist.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model.fit(*rows, batch_size=16, epochs=2, callbacks=[saved, hook], verbose=0)
    assert seen == [1, 3, 4] * 2
    comm.barrier()
    assert sorted(path.name for path in shared_path.glob("m-*")) == ["m-2-2.h5"]


def test_outputs_that_are_not_what_a_loss_takes(strategy, rows):
    """On all ranks, as each has rows."""
    if strategy.replicas.is_fixed:
        pytest.skip("one kind of replicas is enough")
    with pytest.raises(UsageError, match=r"SparseCategoricalCrossentropy\(from_logits=True\)"):
        make_model(strategy, loss="sparse_categorical_crossentropy").fit(*rows, batch_size=16, verbose=0)
    with strategy.scope():
        model = hpcdist.Model(Probabilities())
        model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UsageError, match="Softmax"):
        model.fit(*rows, batch_size=16, verbose=0)
    model.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"])
    model.fit(*rows, batch_size=16, verbose=0)


def test_data_that_does_not_fit(strategy, rows):
    if strategy.replicas.is_fixed:
        pytest.skip("one kind of replicas is enough")
    x, y = rows
    with pytest.raises(UsageError, match=r"0.*Linear\(in_features=5.*4"):
        make_model(strategy).fit(x[:, :4], y, batch_size=16, verbose=0)
    with pytest.raises(UsageError, match="sparse_categorical_crossentropy.*y_true"):
        make_model(strategy).fit(x, y + 7, batch_size=16, verbose=0)
    with pytest.raises(DataError, match="rows.*arrays"):
        make_model(strategy).fit(x[:0], y[:0], verbose=0)
    with pytest.raises(DataError, match="number.*rows"):
        make_model(strategy).fit(x, y[:-1], verbose=0)
    with strategy.scope(), pytest.raises(UsageError, match="expected model.compile"):
        hpcdist.Model(nn.Linear(5, 3)).fit(x, y)


def test_the_digits_are_learned(strategy):
    digits = sklearn_datasets.load_digits()
    x = (digits.data / 16).astype(np.float32)
    y = digits.target
    order = np.random.default_rng(1).permutation(len(x))
    train = order[:1500]
    test = order[1500:]
    with strategy.scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10), nn.Softmax(-1)))
        model.compile(
            lambda parameters: torch.optim.Adam(parameters, 0.003), "sparse_categorical_crossentropy", ["accuracy"]
        )
    data = hpcdist.Dataset.from_tensor_slices((x[train], y[train])).shuffle(seed=1).batch(32)
    history = model.fit(data, epochs=12, validation_data=(x[test], y[test]), verbose=0).history
    assert history["val_accuracy"][-1] >= 0.97


# -- parameter servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
def test_fit_on_parameter_servers(comm, rows, synchronous):
    """All workers end an epoch together, and see one state when they evaluate."""
    if comm.size < 2:
        pytest.skip("servers need a rank of their own")
    left_with = outcome = error = None
    try:
        strategy = hpcdist.ParameterServerStrategy(
            hpcdist.MPIClusterResolver(roles="ps:1,worker:*"), synchronous=synchronous
        )
    except SystemExit as server_exit:
        left_with = server_exit.code
    else:
        try:
            model = make_model(strategy, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2))
            note = EarlyStopping("val_loss", patience=2, restore_best_weights=True)
            history = model.fit(
                *rows, batch_size=16, epochs=6, validation_data=rows, callbacks=note, verbose=0, shuffle=False
            ).history
            outcome = (
                json.dumps(history),
                str(model.evaluate(*rows, verbose=0)),
                model.predict(rows[0], verbose=0).tobytes(),
            )
            assert history["val_loss"][-1] < history["val_loss"][0]
        except Exception as caught:  # the server goes on with the test, and would wait for this rank
            error = caught
        strategy._client.leave(0)
    everywhere = comm.allgather((left_with, outcome, repr(error)))
    if error is not None:
        raise error
    assert everywhere[0][0] == 0
    assert len({worker_outcome for _, worker_outcome, _ in everywhere[1:]}) == 1, everywhere
    if synchronous:
        losses = json.loads(everywhere[1][1][0])["loss"]
        expected, _ = by_hand(rows, len(losses), lambda parameters: torch.optim.SGD(parameters, lr=0.2))
        assert losses == pytest.approx(expected["loss"], rel=1e-5)


# -- callbacks that fail ----------------------------------------------------------------------------------------------


def test_training_ends_at_a_loss_that_is_no_number(strategy, rows):
    x, y = rows
    x = x.copy()
    x[40] = float("nan")  # on one rank, in the third batch
    model = make_model(strategy, optimizer="sgd")
    history = model.fit(
        x, y, batch_size=16, epochs=5, callbacks=hpcdist.callbacks.TerminateOnNaN(), shuffle=False, verbose=0
    )
    assert history.epoch == [0]
    assert model.n_steps_of_epoch in (3, 4), "the other ranks' losses are no numbers one step later"
    assert math.isnan(history.history["loss"][0])


def test_a_folder_that_cannot_be_written(strategy, rows, shared_path):
    (shared_path / "file").write_text("not a folder")
    model = make_model(strategy)
    with pytest.raises(hpcdist.errors.CheckpointError, match=r"write.*Not"):
        model.fit(*rows, callbacks=ModelCheckpoint(shared_path / "file" / "m.h5"), verbose=0)


def test_more_than_one_backup(strategy, rows, shared_path):
    model = make_model(strategy)
    backup = hpcdist.callbacks.BackupAndRestore(shared_path / "run")
    with pytest.raises(UsageError, match="BackupAndRestore.*several"):
        model.fit(*rows, callbacks=[backup, backup], verbose=0)


# -- rows of all replicas ---------------------------------------------------------------------------------------------


def test_a_batch_counts_with_its_rows_wherever_a_pass_begins_or_ends(strategy, rows):
    """After a pass that was left in the middle, and between epochs of which a remainder is dropped."""
    seen = []

    class Noting(hpcdist.Model):
        def train_step(self, data):
            seen.append(self.batch_rows)
            return super().train_step(data)

    with strategy.scope():
        model = Noting(nn.Linear(5, 3))
        model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
    dataset = hpcdist.Dataset.from_tensor_slices(rows)
    batches = strategy.experimental_distribute_dataset(dataset.batch(16))
    model.fit(batches, steps_per_epoch=2, verbose=0)
    model.fit(batches, verbose=0)
    n_local = len(strategy.own_replicas)
    assert seen == [rows for rows, _ in itertools.product((16, 16, 16, 16, 16, 16, 11), range(n_local))]
    seen.clear()
    model.fit(dataset.batch(16, drop_remainder=True).repeat(2), verbose=0)
    assert seen == [16] * 8 * n_local


def test_validation_is_not_weighted_by_classes(strategy, rows):
    model = make_model(strategy, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    history = model.fit(*rows, class_weight={0: 5.0}, validation_data=rows, batch_size=16, verbose=0).history
    assert history["val_loss"][0] == pytest.approx(model.evaluate(*rows, batch_size=16, verbose=0)[0], rel=1e-6)
    assert history["loss"][0] != pytest.approx(history["val_loss"][0], rel=1e-3)


def test_a_subclass_with_a_module_and_more_has_all_of_it(strategy, shared_path):
    class Own(hpcdist.Model):
        def __init__(self):
            super().__init__(nn.Linear(5, 4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.module(x))

    with strategy.scope():
        model = Own()
        loaded_model = Own()
    model.save_weights(shared_path / "own.h5")
    loaded_model.load_weights(shared_path / "own.h5")
    assert len(model.get_weights()) == 4
    assert all(map(np.array_equal, loaded_model.get_weights(), model.get_weights()))


def test_what_a_file_cannot_hold_is_not_left_out(strategy, rows, shared_path):
    model = make_model(strategy)
    model.add_regularizer(hpcdist.regularizers.L2(1e-4), model.net[0].weight)
    model.save(shared_path / "m.h5")
    with strategy.scope():
        with pytest.raises(UsageError, match=r"got one with regularizers that no file can hold; give a factory"):
            hpcdist.load_model(shared_path / "m.h5")
        with pytest.raises(UsageError, match=r"let the factory add them and call compile"):
            hpcdist.load_model(shared_path / "m.h5", lambda: hpcdist.Model(copy.deepcopy(model.net)))
    frozen = make_model(strategy)
    frozen.net[0].requires_grad_(False)
    with strategy.scope():
        frozen.compile("adam", SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    frozen.fit(*rows, batch_size=16, verbose=0)
    frozen.save(shared_path / "frozen.h5")
    with strategy.scope():
        loaded = hpcdist.load_model(shared_path / "frozen.h5")
    assert [parameter.requires_grad for parameter in loaded.net.parameters()] == [False, False, True, True]


def test_data_without_end(strategy, rows):
    endless = hpcdist.Dataset.from_tensor_slices(rows).batch(16).repeat()
    model = make_model(strategy)
    with pytest.raises(UsageError, match="fit.*steps_per_epoch"):
        model.fit(endless, verbose=0)
    with pytest.raises(UsageError, match="fit.*validation_steps"):
        model.fit(*rows, validation_data=endless, verbose=0)
    with pytest.raises(UsageError, match="evaluate.*steps.*dataset"):
        model.evaluate(endless, verbose=0)
    model.fit(endless, steps_per_epoch=7, validation_data=endless, validation_steps=1, verbose=0)


def test_a_regularizer_counts_once_for_all_replicas(strategy):
    """Its gradient is that of one process, however many replicas there are."""
    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(nn.Linear(1, 1, bias=False)))
        model.compile(lambda parameters: torch.optim.SGD(parameters, lr=1.0), "mse")
        with torch.no_grad():
            model.net[0].weight.fill_(2.0)
    model.add_regularizer(hpcdist.regularizers.L2(0.05), model.net[0].weight)
    history = model.fit(np.zeros((16, 1)), np.zeros((16, 1)), batch_size=16, verbose=0).history
    assert history["loss"][0] == pytest.approx(0.2)
    assert model.net[0].weight.item() == pytest.approx(1.8)


def test_a_metric_of_one_output_reads_that_one(strategy, rows):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 1)
            self.b = nn.Linear(5, 1)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    x, _ = rows
    with strategy.scope():
        model = hpcdist.Model(Two())
        model.compile("sgd", {"a": "mse", "b": "mse"}, metrics={"b": ["mae"]})
    truth = {"a": x.sum(1), "b": np.full(N_ROWS, 100.0, np.float32)}
    assert model.evaluate(x, truth, verbose=0, return_dict=True)["b_mae"] > 90


def test_callbacks_that_differ_between_ranks(comm, rows):
    if comm.size == 1:
        pytest.skip("two ranks")
    model = make_model(hpcdist.MultiWorkerMirroredStrategy())
    if comm.rank == 0:
        rank_callbacks = [hpcdist.callbacks.TerminateOnNaN()]
    else:
        rank_callbacks = []
    with pytest.raises(UsageError, match=r"TerminateOnNaN.*History"):
        model.fit(*rows, callbacks=rank_callbacks, verbose=0)
    if comm.rank == 0:
        hooks = {"on_train_batch_end": lambda batch, logs: None}
    else:
        hooks = {}
    with pytest.raises(UsageError, match=r"LambdaCallback"):
        model.fit(*rows, callbacks=[hpcdist.callbacks.LambdaCallback(**hooks)], verbose=0)


def test_predictions_go_to_a_file_row_by_row(comm, strategy, rows, shared_path):
    x, _ = rows
    model = make_model(strategy)
    path = shared_path / "new" / "out.h5"
    assert model.predict(x, batch_size=16, output_file=path) is None
    np.testing.assert_array_equal(h5py.File(path)["predictions"][:], model.predict(x, batch_size=16))
    assert os.listdir(path.parent) == ["out.h5"]
    back = hpcdist.Dataset.from_hdf5(path, "predictions").batch(16)
    assert sum(map(len, back)) == N_ROWS
    comm.barrier()
    with strategy.scope():
        named = hpcdist.Model(Named())
    named.predict(x, batch_size=16, output_file=path)
    assert sorted(h5py.File(path)) == ["one", "two"]
    assert h5py.File(path)["two"].shape == (N_ROWS, 1)
    comm.barrier()
    with strategy.scope():
        several = hpcdist.Model(Several())
    several.predict(x, batch_size=16, output_file=path)
    with h5py.File(path) as file:
        assert sorted(file) == ["predictions_0", "predictions_1"]
        assert file["predictions_0"].shape == (N_ROWS, 3)
        assert sorted(file["predictions_1"]) == ["one", "two"]
    comm.barrier()
    if strategy.is_chief:
        (shared_path / "file").write_text("")
    comm.barrier()
    with pytest.raises(DataError, match="write.*rows.*/out.h5"):
        model.predict(x, batch_size=16, output_file=shared_path / "file" / "out.h5")


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(5, 3)
        self.named = Named()

    def forward(self, x):
        return [self.own(x), self.named(x)]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 3)
        self.two = nn.Linear(5, 1)

    def forward(self, x):
        return {"one": self.one(x), "two": self.two(x)}


@pytest.mark.parametrize("call", ["evaluate", "test_on_batch"])
def test_an_evaluation_in_a_hook_leaves_the_epoch_as_it_is(strategy, rows, call):
    class Evaluate(Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 2:
                options = {"batch_size": 16, "verbose": 0} if call == "evaluate" else {}
                getattr(self.model, call)(rows[0][:20], rows[1][:20], **options)

    histories = []
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}
    for callbacks in ([], [Evaluate()]):
        fit = make_model(strategy).fit(*rows, callbacks=callbacks, **options)
        histories.append(fit.history)
    assert histories[1]["accuracy"] == histories[0]["accuracy"]
    assert histories[1]["loss"] == pytest.approx(histories[0]["loss"], rel=1e-12)


def test_labels_that_torch_ignores_by_default_are_refused(strategy, rows):
    """Their number differs between ranks: a mean without them takes a message, which few programs need."""
    x, y = rows
    with pytest.raises(UsageError, match="SparseCategoricalCrossentropy.*ignore_class=-100"):
        make_model(strategy, loss=nn.CrossEntropyLoss()).train_on_batch(x, np.full_like(y, -100))


@pytest.mark.parametrize("ignore_index", [0, 1])
def test_rows_that_a_loss_of_torch_ignores_are_no_part_of_its_mean(strategy, rows, ignore_index):
    x, y = rows
    y = y.copy()
    y[::3] = ignore_index
    formula = nn.CrossEntropyLoss(ignore_index=ignore_index)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    outputs = plain(torch.from_numpy(x))
    formula(outputs, torch.from_numpy(y)).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    trained = make_model(strategy, loss=formula, optimizer="sgd", metrics=[])
    trained.optimizer.param_groups[0]["lr"] = 1.0
    trained.train_on_batch(x, y)
    for parameter, expected in zip(trained.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_loss_that_ignores_a_class_counts_all_probabilities(strategy, rows):
    """torch leaves out labels of a class, and no floating values that happen to be equal to its number."""
    x, y = rows
    weights = np.eye(3, dtype=np.float32)[y] - np.eye(3, dtype=np.float32)[(y + 1) % 3]
    formula = nn.CrossEntropyLoss(ignore_index=-1)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    expected = formula(plain(torch.from_numpy(x)), torch.from_numpy(weights)).item()
    trained = make_model(strategy, loss=formula, optimizer="sgd", metrics=[])
    assert trained.train_on_batch(x, weights)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["before fit", "in a hook"])
def test_a_learning_rate_in_keras_way_is_refused(strategy, rows, where):
    """An optimizer of torch takes any attribute and does not read it; the model has the learning rate."""

    class Set(hpcdist.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5

    model = make_model(strategy, optimizer="adam")
    callbacks = []
    if where == "in a hook":
        callbacks = [Set()]
    else:
        model.optimizer.learning_rate = 0.5
    with pytest.raises(UsageError, match=r"fit: expected model.learning_rate = 0.5"):
        model.fit(*rows, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    del model.optimizer.learning_rate
    model.learning_rate = 0.5
    assert model.optimizer.param_groups[0]["lr"] == 0.5
    model.fit(*rows, batch_size=16, epochs=1, verbose=0)


def test_the_older_names_of_batch_hooks(strategy, rows):
    seen = []

    class Old(Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_batch_end(self, batch, logs=None):
            seen.append(("end", batch))
            self.model.stop_training = batch == 1

    make_model(strategy).fit(*rows, batch_size=16, epochs=2, verbose=0, callbacks=[Old()])
    assert seen == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


def test_what_a_step_returned_last_is_in_the_checkpoint(strategy):
    """A stop after the last batch of an epoch, before its logs are made."""
    model = make_model(strategy)
    position = Position(model, 0)
    position.count_step({"rows": 3.0, "loss": 1.0})
    resumed = Position(model, 0)
    resumed.load_state_dict(position.state_dict())
    resumed.end_steps()
    assert resumed.logs["rows"] == 3.0
    assert resumed.step == 1
    resumed.count_test_step({"rows": 5.0})
    resumed_again = Position(model, 0)
    resumed_again.load_state_dict(resumed.state_dict())
    assert resumed_again.results()["rows"] == 5.0
    assert (resumed_again.test_step, resumed_again.logs["rows"]) == (1, 3.0)


def test_after_a_fit_that_raised_another_model_trains(strategy, rows):
    """The batch that it was at is not waited for."""

    class Fail(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise ValueError("of the program")

    def fail():
        make_model(strategy).fit(*rows, batch_size=16, verbose=0, callbacks=[Fail()])

    with pytest.raises(ValueError, match="of the program"):
        fail()
    gc.collect()
    plain_model = hpcdist.Model(nn.Linear(5, 3))  # of no strategy
    plain_model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
    plain_model.fit(*rows, batch_size=16, verbose=0)


def test_a_layer_that_does_not_fit_is_named_without_another_call(strategy, rows):
    calls = []

    class Count(nn.Module):
        def forward(self, x):
            calls.append(None)
            return x

    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(Count(), nn.Linear(4, 3)))
        model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UsageError, match=r"1.*Linear.*5.*torch.float32"):
        model.fit(*rows, batch_size=16, verbose=0)
    assert len(calls) <= 4, "one for each replica of this rank"


def test_a_custom_loop_writes_numbers_on_the_chief_alone(comm, shared_path):
    with hpcdist.summary.create_file_writer(shared_path).as_default():
        for step in range(3):
            assert hpcdist.summary.scalar("loss", step / 2, step=step)
    comm.barrier()
    files = list(shared_path.iterdir())
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_a_module_that_takes_no_empty_batch_is_evaluated(strategy, rows):
    """Of one row, all replicas but one get nothing."""

    class Reshape(nn.Module):
        def forward(self, x):
            return x.view(len(x), 5, -1).mean(-1)

    x = rows[0][:1]
    y = rows[1][:1]
    with strategy.scope():
        model = hpcdist.Model(nn.Sequential(Reshape(), nn.Linear(5, 3)))
        model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    with torch.no_grad():
        expected = model.net(torch.from_numpy(x))
    np.testing.assert_allclose(model.predict(x, verbose=0), expected.numpy(), rtol=1e-6)
    loss, _ = model.evaluate(x, y, verbose=0)
    assert loss == pytest.approx(float(nn.functional.cross_entropy(expected, torch.from_numpy(y))), rel=1e-6)


def test_a_pass_that_is_left_does_not_drop_the_rows_of_its_last_batch(comm):
    """A mean over rows weighs each rank by its rows, also where the loop over batches has ended by break."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
    rows = torch.arange(1.0, comm.size + 2)[:, None]
    batch = next(iter(strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(64))))
    strategy.run(lambda x: model(x).mean().backward(), args=(batch,))
    assert model.weight.grad.item() == pytest.approx(rows.mean().item())


def test_an_evaluator_takes_the_newest_file_that_is_whole(comm, rows, shared_path, tmp_path, caplog):
    """Two files, of which the newer one is damaged; then the older one is not evaluated again."""
    files = shared_path / "files"
    whole = files / "whole.h5"
    damaged = files / "damaged.h5"
    hpcdist.Checkpoint(model=nn.Linear(5, 3)).write(whole)
    with hpcdist.get_strategy().scope():
        torch.manual_seed(1)
        model = hpcdist.Model(nn.Linear(5, 3))
        model.compile("sgd", SparseCategoricalCrossentropy(from_logits=True))
    if comm.rank == 0:
        content = bytearray(whole.read_bytes())
        content[-100:] = b"x" * 100
        damaged.write_bytes(content)
        os.utime(whole, (1, 1))
    comm.barrier()
    evaluator = hpcdist.SidecarEvaluator(model, rows, files, max_evaluations=1, log_dir=tmp_path / "log", poll_s=0.01)
    evaluator.start()
    assert [evaluation["path"] for evaluation in evaluator.evaluations] == [str(whole)]
    assert comm.rank or "left out" in caplog.text
    assert evaluator._next() is None
