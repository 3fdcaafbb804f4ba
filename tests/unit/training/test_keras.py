"""Callbacks and losses do what Keras 3 does, as recorded by tests/support/oracle/record_callbacks.py."""

import gzip
import json
import math
import os
from pathlib import Path

import pytest
import torch

import hpcdist
import hpcdist.errors

RECORDED = Path(__file__).parents[2] / "support" / "oracle" / "callbacks.json.gz"
CASES = json.loads(gzip.decompress(RECORDED.read_bytes()))


@pytest.fixture
def model():
    compiled_model = hpcdist.Model(torch.nn.Linear(1, 1))
    compiled_model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.1), "mse")
    return compiled_model


def replay(case, model):
    """Return what our callback does with a case, in the form in which Keras' is recorded."""
    files = []
    model.save = lambda path: files.append(os.path.relpath(path))
    callback = getattr(hpcdist.callbacks, case["kind"])(**case["arguments"])
    callback.set_model(model)
    callback.on_train_begin()
    rates = []
    stopped = None
    for epoch, logs in enumerate(case["logs"]):
        callback.on_epoch_begin(epoch)
        for batch in range(case["steps"]):
            model.results = lambda logs=logs: dict(logs)
            callback.on_train_batch_end(batch, logs)
        callback.on_epoch_end(epoch, dict(logs))
        rates.append(model.learning_rate)
        if model.stop_training:
            stopped = epoch
            break
    return {"files": files, "rates": rates, "stopped": stopped}


def begins_with_nan(case):
    """Keras never finds a better value than a first one that is NaN, and stops; here any number is better."""
    first = case["arguments"].get("start_from_epoch", 0)
    values = [
        logs[case["arguments"]["monitor"]] for logs in case["logs"][first:] if case["arguments"]["monitor"] in logs
    ]
    return bool(values) and math.isnan(values[0])


@pytest.mark.feature(
    "training.model-checkpoint-callback", "training.other-callbacks", "semantics.checkpoint-callback-rules"
)
@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint"])
def test_callbacks_decide_as_those_of_keras(kind):
    cases = [case for case in CASES["callbacks"] if case["kind"] == kind]
    assert len(cases) == 150
    compared = [case for case in cases if not begins_with_nan(case)]
    assert len(compared) > 140
    for case in compared:
        compiled_model = hpcdist.Model(torch.nn.Linear(1, 1))
        compiled_model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.1), "mse")
        replayed = replay(case, compiled_model)
        assert replayed["files"] == case["files"], case["arguments"]
        assert replayed["stopped"] == case["stopped"], case["arguments"]
        assert replayed["rates"] == pytest.approx(case["rates"], rel=1e-5), case["arguments"]


def test_the_recorded_cases_are_not_all_alike():
    cases = CASES["callbacks"]
    assert len({case["stopped"] for case in cases if case["kind"] == "EarlyStopping"}) > 8
    assert sum(case["rates"][0] != case["rates"][-1] for case in cases if case["kind"] == "ReduceLROnPlateau") > 50
    assert sum(0 < len(case["files"]) < 12 for case in cases if case["kind"] == "ModelCheckpoint") > 40


@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau"])
def test_a_number_is_better_than_a_first_value_that_was_nan(model, kind):
    callback = getattr(hpcdist.callbacks, kind)("loss", patience=2)
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, value in enumerate([math.nan, 3.0, 2.0, math.nan, 1.0]):
        callback.on_epoch_end(epoch, {"loss": value})
        assert not model.stop_training
    assert callback.best == 1.0
    for epoch in range(5, 8):
        callback.on_epoch_end(epoch, {"loss": math.nan})
    assert model.stop_training == (kind == "EarlyStopping")
    assert callback.best == 1.0


@pytest.mark.parametrize("case", CASES["losses"], ids=lambda case: case["name"])
def test_losses_have_the_values_of_keras(case):
    loss = getattr(hpcdist.losses, case["name"].split()[0])(**case["arguments"], reduction="none")
    predicted = torch.tensor(case["predicted"], dtype=torch.float32)
    truth = torch.tensor(case["truth"])
    torch.testing.assert_close(loss(truth, predicted), torch.tensor(case["values"]), rtol=1e-5, atol=1e-6)
    weighted = loss(truth, predicted, torch.tensor(case["weight"]))
    torch.testing.assert_close(weighted, torch.tensor(case["weighted"]), rtol=1e-5, atol=1e-6)
    mean = getattr(hpcdist.losses, case["name"].split()[0])(**case["arguments"])(truth, predicted)
    n_ignored = case["truth"].count(case["arguments"].get("ignore_class", "none"))
    assert float(mean) == pytest.approx(sum(case["values"]) / (6 - n_ignored), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("EarlyStopping", {"mode": "largest"}, "expected mode auto, min or max, got 'largest'"),
        ("ReduceLROnPlateau", {"factor": 1.5}, "expected a factor below 1, got 1.5"),
        ("ModelCheckpoint", {"filepath": "a", "save_freq": "week"}, "expected save_freq 'epoch' or steps"),
        ("BackupAndRestore", {"backup_dir": "a", "save_freq": 0}, "expected save_freq 'epoch' or steps, got 0"),
        ("TensorBoard", {"log_dir": "a", "update_freq": "week"}, "expected update_freq 'epoch', 'batch' or steps"),
        (
            "LambdaCallback",
            {"on_epoch": print},
            "expected names of hooks, got 'on_epoch'; close ones are .*'on_epoch_end'",
        ),
    ],
)
def test_callbacks_with_wrong_arguments(kind, arguments, text):
    with pytest.raises(hpcdist.errors.UsageError, match=text):
        getattr(hpcdist.callbacks, kind)(**arguments)


def test_a_monitored_value_whose_best_is_not_known(model):
    stopping = hpcdist.callbacks.EarlyStopping("val_something")
    stopping.set_model(model)
    with pytest.raises(hpcdist.errors.UsageError, match="'val_something'.*mode='min'.*mode='max'"):
        stopping.on_epoch_end(0, {"val_something": 1.0})


def test_names_in_a_file_name_that_are_no_logs(model):
    checkpoint = hpcdist.callbacks.ModelCheckpoint("{epoch}-{val_los}.h5")
    checkpoint.set_model(model)
    with pytest.raises(hpcdist.errors.UsageError, match="'val_los'"):
        checkpoint.on_epoch_end(0, {"loss": 1.0})


def test_a_schedule_of_one_or_two_arguments(model):
    for schedule in (lambda epoch: 0.1 / (epoch + 1), lambda epoch, rate: 0.1 / (epoch + 1)):
        scheduler = hpcdist.callbacks.LearningRateScheduler(schedule)
        scheduler.set_model(model)
        rates = []
        for epoch in range(3):
            logs = {}
            scheduler.on_epoch_begin(epoch)
            scheduler.on_epoch_end(epoch, logs)
            rates.append(logs["learning_rate"])
        assert rates == [0.1, 0.05, pytest.approx(0.1 / 3)]


def test_nan_is_no_improvement():
    stopping = hpcdist.callbacks.EarlyStopping("loss", patience=1)
    model = hpcdist.Model(torch.nn.Linear(1, 1))
    stopping.set_model(model)
    for epoch, loss in enumerate((1.0, float("nan"))):
        stopping.on_epoch_end(epoch, {"loss": loss})
    assert model.stop_training
