"""What programs written for Keras hand to fit: optimizers by name, weights, schedules, metrics and callbacks."""

import copy
import importlib.util
import math

import numpy as np
import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.training import keras_optimizers, optimizers
from hpcdist.training.callbacks import as_callbacks, kind_of
from hpcdist.training.inputs import table_of_classes, weights_of_classes

X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, (12, 1)).astype(np.float32)


def made(loss="mse", module=None, **options):
    torch.manual_seed(0)
    model = hpcdist.Model(nn.Linear(2, 1) if module is None else module)
    model.compile(options.pop("optimizer", "sgd"), loss, **options)
    return model


# -- optimizers -------------------------------------------------------------------------------------------------------


def keras_rmsprop(gradients, rate):
    weight = mean = 0.0
    for gradient in gradients:
        mean = 0.9 * mean + 0.1 * gradient**2
        weight -= rate * gradient / math.sqrt(mean + 1e-7)
    return weight


def keras_adam(gradients, rate):
    weight = first = second = 0.0
    for number, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        corrected = rate * math.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        weight -= corrected * first / (math.sqrt(second) + 1e-7)
    return weight


def keras_adamax(gradients, rate):
    weight = first = largest = 0.0
    for number, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        largest = max(0.999 * largest, abs(gradient))
        weight -= rate * first / ((1 - 0.9**number) * (largest + 1e-7))
    return weight


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e-8])
@pytest.mark.parametrize(
    ("name", "formula"), [("rmsprop", keras_rmsprop), ("adam", keras_adam), ("adamax", keras_adamax)]
)
def test_an_optimizer_by_name_steps_by_the_formula_of_keras(name, formula, scale):
    gradients = [scale * (1 + math.sin(number)) for number in range(100)]
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = optimizers.get(name, [parameter])
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    assert parameter.item() == pytest.approx(formula(gradients, 0.001), rel=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_step_that_a_scaler_takes_back_is_not_counted(name):
    def moved(n_overflows):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = optimizers.get(name, [parameter])
        for number in range(5):
            parameter.grad = torch.full_like(parameter, 1e-7)
            optimizer.found_inf = torch.full((), float(number < n_overflows))
            optimizer.grad_scale = torch.ones(())
            optimizer.step()
        return parameter.item()

    def moved_alone(n_steps):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = optimizers.get(name, [parameter])
        for _ in range(n_steps):
            parameter.grad = torch.full_like(parameter, 1e-7)
            optimizer.step()
        return parameter.item()

    assert moved(2) == pytest.approx(moved_alone(3), rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "adamw", "adamax"])
def test_parameters_that_begin_to_train_later_are_at_their_own_step(name):
    def moved(n_steps_of_other):
        first = nn.Parameter(torch.zeros(3))
        late_parameter = nn.Parameter(torch.zeros(2))
        optimizer = optimizers.get(name, [first, late_parameter])
        for number in range(5):
            first.grad = torch.full_like(first, 1e-7)
            late_parameter.grad = torch.full_like(late_parameter, 1e-7) if number < n_steps_of_other else None
            optimizer.step()
        return first.detach().clone(), late_parameter.detach().clone()

    late = moved(2)
    assert torch.equal(late[0], moved(5)[0])
    assert not torch.equal(late[1], moved(5)[1])


@pytest.mark.parametrize("name", optimizers.NAMED)
def test_an_optimizer_by_name_goes_on_where_its_state_was_saved(name):
    parameter = nn.Parameter(torch.zeros(3))
    restored_parameter = nn.Parameter(torch.zeros(3))
    optimizer = optimizers.get(name, [parameter])

    def step(optimizer, parameter, number):
        parameter.grad = torch.tensor([1e-7, 1e-3, 1.0]) * (number + 1)
        optimizer.step()

    for number in range(3):
        step(optimizer, parameter, number)
    with torch.no_grad():
        restored_parameter.copy_(parameter)
    restored = optimizers.get(name, [restored_parameter])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3):
        step(optimizer, parameter, number)
        step(restored, restored_parameter, number)
    assert torch.equal(parameter, restored_parameter)


def test_an_optimizer_of_torch_stays_torchs():
    model = made(optimizer=torch.optim.RMSprop)
    assert type(model.optimizer) is torch.optim.RMSprop
    assert type(made(optimizer="rmsprop").optimizer) is keras_optimizers.RMSprop


# -- losses and weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "sum_over_batch_size"])
def test_losses_of_sequences(reduction):
    predicted = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30).reshape(6, 5) % 4
    loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)(labels, predicted)
    elements = nn.functional.cross_entropy(predicted.reshape(30, 4), labels.reshape(30), reduction="none")
    due = {"none": elements.reshape(6, 5), "sum": elements.sum(), "sum_over_batch_size": elements.mean()}
    torch.testing.assert_close(loss, due[reduction])


@pytest.mark.parametrize("weight", [2.0, np.float32(2.0), np.full(3, 2.0), np.full((3, 4), 2.0), np.full((3, 1), 2.0)])
def test_weights_of_a_loss_may_be_one_number_or_of_rows_or_of_elements(weight):
    loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = torch.zeros(3, 4, dtype=torch.long)
    predicted = torch.randn(3, 4, 2)
    torch.testing.assert_close(loss(labels, predicted, weight), 2 * loss(labels, predicted))


@pytest.mark.parametrize("shape", [(4,), (2, 1), (1,), (3, 3)])
def test_weights_that_do_not_fit(shape):
    loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(UsageError, match="expected a weight for each of 3 rows"):
        loss(torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2, 4), np.ones(shape))


def test_a_weight_for_each_row_may_be_a_column():
    predicted = torch.randn(3, 4, 5)
    weight = np.array([[1.0], [2.0], [0.0]])
    loss = hpcdist.losses.MeanSquaredError(reduction="none")
    due = predicted.square().mean(-1) * torch.tensor(weight, dtype=torch.float32)
    torch.testing.assert_close(loss(torch.zeros(3, 4, 5), predicted, weight), due)


def test_no_label_counts():
    loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    assert float(loss(torch.zeros(3, dtype=torch.long), torch.randn(3, 2))) == 0


@pytest.mark.parametrize(
    ("class_weight", "labels", "due"),
    [
        ({1: 5.0}, [-1.0, 1.0, 0.0, 7.0], [1, 5, 1, 1]),
        ({-1: 2.0, 3: 0.5}, [[-1], [3], [2]], [2, 0.5, 1]),
        ({0: 2.0}, [[1.0, 0.0], [0.0, 1.0]], [2, 1]),
        ({1: 3.0}, [0.9, 1.2, 0.2], [3, 3, 1]),
    ],
)
def test_weights_of_classes(class_weight, labels, due):
    weights = weights_of_classes(torch.tensor(labels), table_of_classes(class_weight))
    assert weights.tolist() == pytest.approx(due)


@pytest.mark.parametrize("class_weight", [{}, {0.5: 1.0}, {0: "heavy"}, [1.0, 2.0]])
def test_class_weights_that_are_none(class_weight):
    with pytest.raises(UsageError, match="expected class_weight as a dict of whole numbers and weights"):
        table_of_classes(class_weight)


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Precision", "Recall"])
def test_a_threshold_is_compared_as_the_predictions_are(kind):
    metric = getattr(hpcdist.metrics, kind)(thresholds=0.2)
    assert float(metric(torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.9]))) == 1.0


@pytest.mark.parametrize("kind", ["AUC", "Precision", "Recall"])
def test_predictions_that_are_nan_end_no_fit(kind):
    metric = getattr(hpcdist.metrics, kind)()
    metric.update_state(torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 0.9]))
    assert math.isfinite(float(metric.result()))
    with pytest.raises(UsageError, match="expected predictions from 0 to 1, got 0.5 to 1.5"):
        metric.update_state(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.5]))


METRICS = [
    hpcdist.metrics.BinaryAccuracy(threshold=0.25),
    hpcdist.metrics.AUC(num_thresholds=7, curve="PR", summation_method="minoring", name="area"),
    hpcdist.metrics.Precision(thresholds=[0.25, 0.75]),
    hpcdist.metrics.Recall(),
    hpcdist.metrics.BinaryCrossentropy(label_smoothing=0.125),
]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: type(metric).__name__)
def test_a_model_is_saved_with_its_metrics_and_loaded(tmp_path, metric):
    def compiled_with(metric):
        module = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
        return made("binary_crossentropy", module, metrics=["mse"], weighted_metrics=[metric], optimizer="adam")

    model = compiled_with(type(metric)(**metric.get_config()))
    model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
    model.save(tmp_path / "model.h5")
    loaded = hpcdist.load_model(tmp_path / "model.h5")
    assert type(loaded.optimizer) is keras_optimizers.Adam
    assert loaded.optimizer.defaults == model.optimizer.defaults
    assert loaded.evaluate(X, Y, verbose=0, return_dict=True) == model.evaluate(X, Y, verbose=0, return_dict=True)
    histories = [fitted_model.fit(X, Y, epochs=2, verbose=0, shuffle=False).history for fitted_model in (model, loaded)]
    assert histories[0] == histories[1]


def test_a_metric_of_the_program_is_lost_and_named(tmp_path):
    class Own(hpcdist.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_pred)

    model = made(metrics=[Own()])
    model.save(tmp_path / "model.h5")
    with pytest.raises(UsageError, match="got one with metrics that no file can hold"):
        hpcdist.load_model(tmp_path / "model.h5")


# -- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.25, np.float32(0.25), np.array(0.25), torch.tensor(0.25)])
def test_a_schedule_may_return_any_number(rate):
    model = made()
    history = model.fit(
        X, Y, verbose=0, callbacks=[hpcdist.callbacks.LearningRateScheduler(lambda epoch, before: rate)]
    )
    assert history.history["learning_rate"] == [0.25]


class Foreign:
    """As callbacks of libraries that log are: hooks of Keras, and no base class of ours."""

    def __init__(self):
        self.seen = []

    def set_params(self, params):
        self.seen.append(("params", params["epochs"]))

    def on_train_begin(self, logs):
        self.seen.append(("begin", logs))

    def on_train_batch_end(self, batch, logs=None):
        assert type(logs) is dict
        self.seen.append(("batch", batch, sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        logs["own"] = 7.0
        self.seen.append(("epoch", epoch, self.model.metrics_names))
        self.model.stop_training = epoch == 1

    def on_train_end(self, logs=None):
        self.seen.append(("end", sorted(logs)))


def test_a_callback_of_another_library():
    foreign = Foreign()
    history = made().fit(X, Y, epochs=5, batch_size=12, verbose=0, callbacks=[foreign])
    assert history.history["own"] == [7.0, 7.0]
    assert foreign.seen == [
        ("params", 5),
        ("begin", {}),
        ("batch", 0, ["loss"]),
        ("epoch", 0, ["loss"]),
        ("batch", 0, ["loss"]),
        ("epoch", 1, ["loss"]),
        ("end", ["loss", "own"]),
    ]


def test_a_callback_of_another_library_sees_the_optimizer_as_keras_has_it():
    seen = []

    class Logger:
        def on_epoch_end(self, epoch, logs=None):
            optimizer = self.model.optimizer
            seen.append((optimizer.learning_rate, optimizer.iterations, optimizer.get_config()["name"]))
            optimizer.learning_rate = 0.5

    model = made(optimizer="adam")
    model.fit(X, Y, epochs=2, batch_size=4, verbose=0, callbacks=[Logger()])
    assert seen == [(0.001, 3, "Adam"), (0.5, 6, "Adam")]
    assert model.learning_rate == 0.5


def test_foreign_callbacks_are_told_apart_by_their_classes():
    class Other(Foreign):
        pass

    kinds = [kind_of(callback) for callback in as_callbacks([Foreign(), Other(), hpcdist.callbacks.TerminateOnNaN()])]
    assert kinds == ["Foreign", "Other", "TerminateOnNaN"]


def test_the_empty_hooks_of_keras_cost_nothing():
    """A hook after batches makes fit read its numbers after each of them."""

    class OfKeras(Foreign):
        def on_batch_end(self, batch, logs=None):
            raise AssertionError("called")

    OfKeras.on_batch_end.__module__ = "keras.src.callbacks.callback"
    OfKeras.on_train_batch_end = OfKeras.on_batch_end
    assert not as_callbacks(OfKeras())[0].has_batch_hook()
    assert as_callbacks(Foreign())[0].has_batch_hook()


@pytest.mark.parametrize("given", ["EarlyStoping", 3, Foreign, object()])
def test_what_has_no_hooks_is_no_callback(given):
    with pytest.raises(UsageError, match="expected callbacks, objects with hooks such as on_epoch_end"):
        made().fit(X, Y, verbose=0, callbacks=[given])


def test_tensorboard_without_its_package_fails_when_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="expected the package tensorboard, got none; pip install"):
        hpcdist.callbacks.TensorBoard(tmp_path)
