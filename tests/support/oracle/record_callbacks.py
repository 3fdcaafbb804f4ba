"""Record what callbacks of Keras 3 decide for made-up logs: what training/callbacks.py and model_checkpoint.py must do.

    KERAS_BACKEND=torch .venv-keras/bin/python tests/support/oracle/record_callbacks.py

Each case is a callback, its arguments, and the logs of some epochs; recorded are the epoch after which it stops, the
learning rate after each, and which files it writes. Also recorded: values of losses for random rows.
"""

import gzip
import json
import random
import types
import warnings
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().with_name("callbacks.json.gz")
N_CASES = {"EarlyStopping": 150, "ReduceLROnPlateau": 150, "ModelCheckpoint": 150}
NAMES = ("loss", "val_loss", "accuracy", "val_accuracy")


def draw_logs(draws: random.Random, n_epochs: int) -> list[dict[str, float]]:
    """Return logs of epochs: values that improve, stay, get worse, are sometimes NaN, or missing."""
    value = draws.uniform(0.5, 3)
    logs = []
    for _ in range(n_epochs):
        value = max(0.001, value + draws.choice([-0.2, -0.05, -0.01, 0.0, 0.0, 0.02, 0.1]) * draws.random())
        value = round(value, draws.choice([1, 2, 4]))
        epoch_logs = {}
        for name in NAMES:
            if "loss" in name:
                epoch_logs[name] = value
            else:
                epoch_logs[name] = round(1 / (1 + value), 4)
        if draws.random() < 0.03:
            epoch_logs["val_loss"] = float("nan")
        if draws.random() < 0.03:
            del epoch_logs["val_accuracy"]
        logs.append(epoch_logs)
    return logs


def draw_case(kind: str, number: int) -> dict[str, Any]:
    draws = random.Random(f"{kind} {number}")
    monitor = draws.choice(NAMES)
    arguments: dict[str, Any] = {"monitor": monitor, "mode": draws.choice(["auto", "min", "max"])}
    if arguments["mode"] == "auto":
        arguments["mode"] = "auto" if "loss" in monitor else "max"
    if kind != "ModelCheckpoint":
        arguments["patience"] = draws.choice([0, 1, 2, 3, 5])
        arguments["min_delta"] = draws.choice([0, 0.001, 0.01, 0.1])
    if kind == "EarlyStopping":
        arguments["baseline"] = draws.choice([None, None, 0.4, 1.0])
        arguments["start_from_epoch"] = draws.choice([0, 0, 2, 5])
    elif kind == "ReduceLROnPlateau":
        arguments["factor"] = draws.choice([0.1, 0.5, 0.9])
        arguments["cooldown"] = draws.choice([0, 1, 3])
        arguments["min_lr"] = draws.choice([0, 0.001, 0.05])
    else:
        arguments["filepath"] = draws.choice(
            ["m.h5", "m-{epoch}.h5", "m-{epoch:02d}-{loss:.3f}.h5", "e{epoch}-b{batch:03d}.h5", "{val_loss:.2f}.h5"]
        )
        has_batch = "batch" in arguments["filepath"]
        if has_batch:
            arguments["save_freq"] = draws.choice([1, 3, 4, 7, 11])
        else:
            arguments["save_freq"] = "epoch"
        arguments["save_best_only"] = draws.choice([True, False]) and not has_batch
        arguments["initial_value_threshold"] = draws.choice([None, None, 0.5, 1.5])
    return {"kind": kind, "arguments": arguments, "logs": draw_logs(draws, draws.choice([6, 12, 20])), "steps": 4}


def record(case: dict[str, Any]) -> dict[str, Any]:
    """Return what a callback of Keras does with a case."""
    import keras

    files: list[str] = []
    optimizer = keras.optimizers.SGD(0.1)
    metric = keras.metrics.MeanSquaredError(name="accuracy")  # its direction is given by mode
    model = types.SimpleNamespace(
        optimizer=optimizer,
        metrics=[metric],
        stop_training=False,
        get_weights=lambda: None,
        set_weights=lambda weights: None,
        save=lambda path, overwrite: files.append(path),
    )
    callback = getattr(keras.callbacks, case["kind"])(**case["arguments"])
    callback.set_model(model)
    callback.on_train_begin()
    rates = []
    stopped = None
    for epoch, logs in enumerate(case["logs"]):
        callback.on_epoch_begin(epoch)
        for batch in range(case["steps"]):
            callback.on_train_batch_end(batch, dict(logs))
        callback.on_epoch_end(epoch, dict(logs))
        rates.append(float(optimizer.learning_rate))
        if model.stop_training:
            stopped = epoch
            break
    return {"files": files, "rates": rates, "stopped": stopped}


LOSSES = {
    "MeanSquaredError": ({}, "numbers"),
    "MeanAbsoluteError": ({}, "numbers"),
    "MeanAbsolutePercentageError": ({}, "numbers"),
    "Huber": ({"delta": 0.5}, "numbers"),
    "Hinge": ({}, "signs"),
    "KLDivergence": ({}, "distributions"),
    "BinaryCrossentropy": ({"from_logits": False}, "chances"),
    "BinaryCrossentropy smoothed": ({"from_logits": True, "label_smoothing": 0.1}, "yes or no"),
    "CategoricalCrossentropy": ({"from_logits": False, "label_smoothing": 0.2}, "one-hot"),
    "CategoricalCrossentropy logits": ({"from_logits": True}, "one-hot logits"),
    "SparseCategoricalCrossentropy": ({"from_logits": False}, "classes"),
    "SparseCategoricalCrossentropy logits": ({"from_logits": True}, "class logits"),
    "SparseCategoricalCrossentropy ignoring": ({"from_logits": True, "ignore_class": 1}, "class logits"),
}


def rows_of(kind: str) -> tuple[Any, Any, Any]:
    """Return y_true, y_pred and sample_weight of a kind."""
    import numpy as np

    draws = np.random.default_rng(5)
    predictions = draws.normal(size=(6, 4))
    weight = draws.uniform(0.5, 2, 6)
    truth = draws.normal(size=(6, 4))
    shares = np.exp(predictions) / np.exp(predictions).sum(1, keepdims=True)
    classes = draws.integers(0, 4, 6)
    chosen = {
        "numbers": (truth, predictions),
        "signs": (np.sign(truth), predictions),
        "distributions": (np.exp(truth) / np.exp(truth).sum(1, keepdims=True), shares),
        "chances": ((truth > 0) * 1.0, shares),
        "yes or no": ((truth > 0) * 1.0, predictions),
        "one-hot": (np.eye(4)[classes], shares),
        "one-hot logits": (np.eye(4)[classes], predictions),
        "classes": (classes, shares),
        "class logits": (classes, predictions),
    }
    return (*chosen[kind], weight)


def record_losses() -> list[dict[str, Any]]:
    import keras
    import numpy as np

    records = []
    for name, (arguments, kind) in LOSSES.items():
        truth, predicted, weight = rows_of(kind)
        loss = getattr(keras.losses, name.split()[0])(**arguments, reduction="none")
        args = []
        for array in (truth, predicted):
            if array.dtype.kind == "f":
                args.append(np.asarray(array, "float32"))
            else:
                args.append(array)
        values = loss(*args).cpu().numpy().tolist()
        weighted = loss(*args, sample_weight=weight.astype("float32")).cpu().numpy().tolist()
        rows = {"truth": truth.tolist(), "predicted": predicted.tolist(), "weight": weight.tolist()}
        records.append({"name": name, "arguments": arguments, **rows, "values": values, "weighted": weighted})
    return records


def main() -> None:
    warnings.simplefilter("ignore")
    cases = []
    for kind, n_cases in N_CASES.items():
        cases += [draw_case(kind, number) for number in range(n_cases)]
    text = json.dumps({"callbacks": [{**case, **record(case)} for case in cases], "losses": record_losses()})
    RECORDED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(cases)} cases in {RECORDED} ({RECORDED.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
