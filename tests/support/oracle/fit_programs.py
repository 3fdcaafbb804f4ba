"""Random programs of fit that Keras and hpcdist both run: a dense layer, a loss, an optimizer by name, and callbacks.

A program is plain data. What it trains on is drawn by numpy from its number, so both sides see the same.
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

OPTIMIZERS = ("sgd", "adam", "adamw", "adamax", "nadam", "rmsprop", "adagrad", "adadelta")
#: Losses by the kind of truth that they need: name, arguments, activation of the layer.
LOSSES = {
    "numbers": [
        ("MeanSquaredError", {}, None),
        ("MeanAbsoluteError", {}, None),
        ("MeanAbsolutePercentageError", {}, None),
        ("Huber", {"delta": 0.5}, None),
    ],
    "signs": [("Hinge", {}, None)],
    "distributions": [("KLDivergence", {}, "softmax")],
    "yes or no": [
        ("BinaryCrossentropy", {}, "sigmoid"),
        ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.1}, None),
    ],
    "one-hot": [
        ("CategoricalCrossentropy", {"label_smoothing": 0.2}, "softmax"),
        ("CategoricalCrossentropy", {"from_logits": True}, None),
    ],
    "classes": [
        ("SparseCategoricalCrossentropy", {}, "softmax"),
        ("SparseCategoricalCrossentropy", {"from_logits": True}, None),
        ("SparseCategoricalCrossentropy", {"from_logits": True, "ignore_class": 1}, None),
        ("SparseCategoricalCrossentropy", {"ignore_class": 0}, "softmax"),
    ],
}
METRICS = {
    "numbers": ["MeanSquaredError", "MeanAbsoluteError", "RootMeanSquaredError"],
    "signs": ["MeanAbsoluteError"],
    "distributions": ["MeanSquaredError"],
    "yes or no": ["BinaryAccuracy", "AUC", "Precision", "Recall"],
    "one-hot": ["CategoricalAccuracy"],
    "classes": ["SparseCategoricalAccuracy"],
}
N_INPUTS = 4


@dataclass
class Program:
    """One program.

    Attributes:
        number: draws the data.
        kind: of truth.
        loss: name of a loss, with `loss_arguments`.
        activation: of the layer; None: none.
        n_outputs: of the layer.
        n_steps_of_row: length of a sequence; 0: rows are no sequences.
        optimizer: its name, and `rate` its learning rate.
        metrics: names of metrics; `weighted_metrics` take sample weights.
        rows: of the training data, and `validation_rows` of those for validation; 0: none.
        batch_size: rows of a step.
        epochs: how many.
        has_weights: whether there are sample weights.
        class_weight: class -> weight, as pairs; None: none.
        callbacks: names and arguments.
    """

    number: int
    kind: str
    loss: str
    loss_arguments: dict[str, Any]
    activation: str | None
    n_outputs: int
    n_steps_of_row: int
    optimizer: str
    rate: float
    metrics: list[str]
    weighted_metrics: list[str]
    rows: int
    validation_rows: int
    batch_size: int
    epochs: int
    has_weights: bool
    class_weight: list[tuple[int, float]] | None
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draw_program(number: int) -> Program:
    draws = random.Random(f"fit {number}")
    kind = draws.choice(list(LOSSES))
    loss, arguments, activation = draws.choice(LOSSES[kind])
    is_binary = kind in ("yes or no", "signs")
    is_sequence = kind in ("classes", "numbers") and draws.random() < 0.3
    metrics = [] if is_sequence else METRICS[kind]
    if activation is None and kind == "yes or no":
        metrics = []  # of probabilities
    takes_weighted = bool(metrics) and "ignore_class" not in arguments  # where Keras changes the weights it is given
    validation_rows = draws.choice([0, 5, 12])
    has_class_weight = kind in ("classes", "signs", "yes or no") and not is_sequence and draws.random() < 0.4
    classes = {"signs": [-1, 1], "yes or no": [0, 1]}.get(kind, [0, 1, 2])
    class_weights = []
    for label in classes:
        if draws.random() < 0.8:
            class_weights.append((label, draws.choice([0.5, 1.0, 3.0])))
    if has_class_weight and class_weights:
        class_weight = class_weights
    else:
        class_weight = None
    return Program(
        number=number,
        kind=kind,
        loss=loss,
        loss_arguments=arguments,
        activation=activation,
        n_outputs=1 if is_binary else 3,
        n_steps_of_row=5 if is_sequence else 0,
        optimizer=draws.choice(OPTIMIZERS),
        rate=draws.choice([0.001, 0.01, 0.1]),
        metrics=draws.sample(metrics, draws.randint(0, min(2, len(metrics)))),
        weighted_metrics=draws.sample(metrics, draws.randint(0, 1)) if takes_weighted and draws.random() < 0.4 else [],
        rows=draws.choice([7, 12, 23]),
        validation_rows=validation_rows,
        batch_size=draws.choice([3, 4, 8]),
        epochs=draws.choice([2, 4, 6]),
        has_weights=draws.random() < 0.4 and class_weight is None,  # Keras refuses both
        class_weight=class_weight,
        callbacks=draw_callbacks(draws, validation_rows > 0),
    )


def draw_callbacks(draws: random.Random, has_validation: bool) -> list[tuple[str, dict[str, Any]]]:
    if has_validation and draws.random() < 0.7:
        monitor = "val_loss"
    else:
        monitor = "loss"
    callbacks: list[tuple[str, dict[str, Any]]] = []
    if draws.random() < 0.3:
        restores = draws.choice([True, False])
        patience = draws.choice([0, 1, 2])
        callbacks.append(
            ("EarlyStopping", {"monitor": monitor, "patience": patience, "restore_best_weights": restores})
        )
    if draws.random() < 0.2:
        callbacks.append(("ReduceLROnPlateau", {"monitor": monitor, "patience": 1, "factor": 0.5}))
    elif draws.random() < 0.2:
        callbacks.append(("LearningRateScheduler", {"rates": [0.1, 0.05, 0.02, 0.01, 0.01, 0.005]}))
    if draws.random() < 0.2:
        callbacks.append(("TerminateOnNaN", {}))
    return callbacks


@dataclass
class Data:
    """What a program trains on: float32 inputs, truth, weights or None; of training and of validation."""

    kernel: np.ndarray
    train: tuple[Any, Any, Any]
    validation: tuple[Any, ...] | None


def draw_data(program: Program) -> Data:
    draws = np.random.default_rng(program.number)
    kernel = draws.normal(size=(N_INPUTS, program.n_outputs)).astype(np.float32)
    train = _draw_rows(program, draws, program.rows)
    validation = None
    if program.validation_rows:
        x, y, weight = _draw_rows(program, draws, program.validation_rows)
        validation = (x, y) if weight is None else (x, y, weight)
    return Data(kernel, train, validation)


def _draw_rows(program: Program, draws: Any, n_rows: int) -> tuple[Any, Any, Any]:
    if program.n_steps_of_row:
        shape = (n_rows, program.n_steps_of_row)
    else:
        shape = (n_rows,)
    x = draws.normal(size=(*shape, N_INPUTS)).astype(np.float32)
    whole = (*shape, program.n_outputs)
    if program.kind == "classes":
        y = draws.integers(0, program.n_outputs, shape)
    elif program.kind == "one-hot":
        y = np.eye(program.n_outputs, dtype=np.float32)[draws.integers(0, program.n_outputs, shape)]
    elif program.kind == "distributions":
        exponentials = np.exp(draws.normal(size=whole))
        y = (exponentials / exponentials.sum(-1, keepdims=True)).astype(np.float32)
    elif program.kind == "signs":
        y = draws.choice([-1.0, 1.0], whole).astype(np.float32)
    elif program.kind == "yes or no":
        y = draws.integers(0, 2, whole).astype(np.float32)
    else:
        y = draws.normal(size=whole).astype(np.float32)
    if program.has_weights:
        weight = draws.uniform(0.25, 2, shape).astype(np.float32)
    else:
        weight = None
    return x, y, weight


def make_callback(library: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Return a callback of Keras, or of a library with the same names."""
    if name == "LearningRateScheduler":
        rates = arguments["rates"]
        return library.callbacks.LearningRateScheduler(lambda epoch, rate: float(rates[epoch]))
    return getattr(library.callbacks, name)(**arguments)


def fit_and_evaluate(model: Any, program: Program, data: Data, library: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the history of fit, and an evaluation after it, of a compiled model.

    Args:
        model: of Keras or of hpcdist.
        program: what fit is told.
        data: what it is trained on.
        library: keras or hpcdist, whose callbacks are taken.
    """
    x, y, weight = data.train
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=program.batch_size,
        epochs=program.epochs,
        shuffle=False,
        verbose=0,
        class_weight=None if program.class_weight is None else dict(program.class_weight),
        validation_data=data.validation,
        callbacks=[make_callback(library, name, arguments) for name, arguments in program.callbacks],
    )
    evaluated = model.evaluate(x, y, sample_weight=weight, batch_size=program.batch_size, verbose=0, return_dict=True)
    return history.history, evaluated
