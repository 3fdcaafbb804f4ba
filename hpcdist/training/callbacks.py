"""Callbacks of fit, by the names and rules of Keras: each runs on every rank, and decides by what all ranks know.

Source: keras/src/callbacks (Keras 3), whose decisions these are.
"""

import contextlib
import csv
import difflib
import functools
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.read import read_text
from hpcdist.errors import UsageError
from hpcdist.retries import Retries

logger = logging.getLogger("hpcdist")

Logs = Mapping[str, float]
#: Longest CSV file that is read again.
_MAX_TABLE_BYTES = 1 << 30


class Callback:
    """The base of callbacks: a subclass overrides the hooks that it needs.

    Hooks run on every rank, at the same points. Logs of epochs are exact over all replicas, and equal on all ranks.
    Logs of batches are over the rows that this rank's first replica has seen in the epoch so far. Set
    `model.stop_training` to end fit after the batch or epoch: one rank suffices.

    With BackupAndRestore the attributes named in `saved` are saved, as the chief has them, and set on all ranks in the
    run that resumes. Override `state_dict` and `load_state_dict` for more than numbers and texts.

    Attributes:
        saved: names of the attributes that are saved.
        model: the `Model` that is trained, of any subclass.
        params: arguments of fit: epochs, steps (None where not known), verbose.
    """

    saved: tuple[str, ...] = ()
    model: Any
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        """Take the model; fit calls it first."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the arguments of fit."""
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Act before the first epoch of this fit, and before a state is loaded."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Act after the last epoch; not in a run that a stop request ends."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Act before an epoch, counted from 0; not again in an epoch in which a run resumes."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Act after an epoch and its validation. Values that are written to `logs` go to the History."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a step, counted from 0 in each epoch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Act after a step."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a step: the older name."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Act after a step: the older name."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Act before an evaluation, also of fit."""

    def on_test_end(self, logs: Logs) -> None:
        """Act after an evaluation."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Act after a batch of an evaluation."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Act before a prediction."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Act after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Act before a batch of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Act after a batch of a prediction."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run needs to resume. Not collective."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier run."""
        vars(self).update(state)

    def steps_until(self, batch: int) -> int:
        """Return the number of steps since the last call of the hook after a batch. It is smaller at an epoch's end."""
        n_steps: int = self.model.steps_per_execution
        return (batch + 1) % n_steps or n_steps

    def has_hook(self, *names: str) -> bool:
        """Return whether one of these hooks does something."""
        for name in names:
            is_overridden = getattr(type(self), name) is not getattr(Callback, name)
            if is_overridden or name in vars(self):
                return True
        return False

    def has_batch_hook(self) -> bool:
        """Return whether it acts after each step, and may end fit there."""
        return self.has_hook("on_train_batch_end", "on_batch_end")


def as_callbacks(user_callbacks: Any) -> list[Callback]:
    """Return callbacks as a list.

    Args:
        user_callbacks: a callback, a sequence of callbacks, or None.

    Raises:
        UsageError: for something else, such as a name, for which it lists close ones.
    """
    if user_callbacks is None:
        return []
    if not isinstance(user_callbacks, (list, tuple)):
        user_callbacks = [user_callbacks]
    return [_as_callback(callback) for callback in user_callbacks]


def _as_callback(callback: Any) -> Callback:
    """Return a callback as it is, or a wrapper around a callback of another library.

    Raises:
        UsageError: for an object without hooks.
    """
    if isinstance(callback, Callback):
        return callback
    has_hook = any(callable(getattr(callback, name, None)) for name in _HOOKS)
    if has_hook and not isinstance(callback, type):
        return _ForeignCallback(callback)
    raise _no_callback(callback)


def _no_callback(callback: Any) -> UsageError:
    names = [kind.__name__ for kind in _kinds_of(Callback) if not kind.__name__.startswith("_")]
    close: list[str] = []
    if isinstance(callback, str):
        close = difflib.get_close_matches(callback, names, 4, 0.4)
    return UsageError(
        f"fit: expected callbacks, objects with hooks such as on_epoch_end, got {callback!r}; those of "
        f"hpcdist.callbacks are {', '.join(close or sorted(names))}."
    )


#: Names of the hooks of a callback.
_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def kind_of(callback: Callback) -> str:
    """Return the name of a class, by which ranks, and a run that resumes, know that callbacks are the same."""
    if isinstance(callback, _ForeignCallback):
        return callback.name_of_kind
    return type(callback).__name__


class _ForeignCallback(Callback):
    """A callback of another library: an object with some of Keras' hooks, such as W&B and MLflow have.

    Args:
        callback: the object. Logs reach it as dicts; it is saved if it has `state_dict` and `load_state_dict`.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        for name in _HOOKS:
            if _does_something(callback, name):
                vars(self)[name] = _with_plain_logs(getattr(callback, name))

    @property
    def name_of_kind(self) -> str:
        """The name of the object's class."""
        return type(self._callback).__name__

    def set_model(self, model: Any) -> None:
        """Pass the model to the object, with the optimizer as Keras has it."""
        super().set_model(model)
        self._hand_on("set_model", "model", _ForeignModel(model))

    def set_params(self, params: dict[str, Any]) -> None:
        """Pass the arguments of fit to the object."""
        super().set_params(params)
        self._hand_on("set_params", "params", params)

    def _hand_on(
        self,
        method: str,
        attribute: str,
        value: Any,
    ) -> None:
        take = getattr(self._callback, method, None)
        if callable(take):
            take(value)
        else:
            setattr(self._callback, attribute, value)

    @property
    def _has_state(self) -> bool:
        can_save = callable(getattr(self._callback, "state_dict", None))
        return can_save and callable(getattr(self._callback, "load_state_dict", None))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the object, if it has one."""
        if not self._has_state:
            return {}
        return dict(self._callback.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state of an earlier run to the object."""
        if self._has_state:
            self._callback.load_state_dict(state)


class _ForeignModel:
    """A model as callbacks of other libraries see it: its optimizer has the attributes of Keras' optimizers."""

    def __init__(self, model: Any) -> None:
        vars(self)["_model"] = model

    @property
    def optimizer(self) -> "_ForeignOptimizer":
        """The optimizer, with learning_rate, iterations and get_config."""
        return _ForeignOptimizer(self._model)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._model(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)


class _ForeignOptimizer:
    """The optimizer of a model, with the attributes of Keras' optimizers and of torch's. Settings are torch's."""

    __slots__ = ("_model",)

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def learning_rate(self) -> float:
        """The rate of the first group; setting it scales the rates of further groups in proportion."""
        return float(self._model.learning_rate)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._model.learning_rate = float(rate)

    @property
    def iterations(self) -> int:
        """The steps that were made, as far as the optimizer counts them: SGD of torch does not."""
        states = self._model.optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def get_config(self) -> dict[str, Any]:
        """Return the settings, as plain numbers and texts, and the name."""
        optimizer = self._model.optimizer
        config: dict[str, Any] = {
            "name": type(optimizer).__name__,
            "learning_rate": self.learning_rate,
        }
        for name, value in optimizer.defaults.items():
            if name != "lr" and isinstance(value, (bool, int, float, str, tuple)):
                config[name] = value
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.optimizer, name)


def _does_something(callback: Any, name: str) -> bool:
    """Return whether an object has a hook that is not the empty one of Keras' base class."""
    method = getattr(callback, name, None)
    is_of_base = getattr(method, "__module__", "") == "keras.src.callbacks.callback"
    return callable(method) and not is_of_base


def _with_plain_logs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that gets its logs, the last argument, as a dict. It may change the logs of an epoch."""

    @functools.wraps(hook)
    def call(*arguments: Any) -> Any:
        # numbers of the epoch or the batch
        numbers = [argument for argument in arguments if isinstance(argument, int)]
        logs = next((argument for argument in arguments if isinstance(argument, Mapping)), {})
        if not isinstance(logs, dict):
            logs = dict(logs)
        return hook(*numbers, logs)

    return call


def _kinds_of(kind: type[Callback]) -> list[type[Callback]]:
    """Return the subclasses of a class, and their subclasses."""
    kinds: list[type[Callback]] = []
    for subclass in kind.__subclasses__():
        kinds.append(subclass)
        kinds += _kinds_of(subclass)
    return kinds


class History(Callback):
    """The result of fit: the logs of its epochs.

    Attributes:
        history: name -> value of each epoch.
        epoch: numbers of these epochs, from 0.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Append the logs."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return all logs so far."""
        return {
            "epoch": list(self.epoch),
            "history": {name: list(values) for name, values in self.history.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the logs of an earlier run."""
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}


class LambdaCallback(Callback):
    """Functions as hooks, by their names: LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs)).

    Raises:
        UsageError: for a name that is no hook.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        wrong = sorted(set(hooks) - set(_HOOKS))
        if wrong:
            close = difflib.get_close_matches(wrong[0], _HOOKS, 3) or _HOOKS
            raise UsageError(
                f"LambdaCallback: expected names of hooks, got {wrong[0]!r}; close ones are {close}."
            )
        vars(self).update(hooks)


class TerminateOnNaN(Callback):
    """Ends fit after a step whose loss is not finite, on all ranks."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Look at the loss so far."""
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(loss):
            logger.warning("Batch %d: invalid loss %s, terminating training", batch, loss)
            self.model.stop_training = True


class _Monitor(Callback):
    """The base of callbacks that watch one value of the logs.

    Attributes:
        best: best value so far. None before the first value.
    """

    saved: tuple[str, ...] = ("best",)

    def __init__(
        self,
        monitor: str,
        mode: str,
        best: float | None,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(
                f"{type(self).__name__}: expected mode auto, min or max, got {mode!r}; min is for losses."
            )
        self.monitor = monitor
        self.mode = mode
        self.best = best
        self.min_delta = abs(min_delta)

    def _is_better(self, value: float, than: float | None) -> bool:
        is_min = self._is_min()
        if than is None:
            return True
        if math.isnan(than):  # Keras never finds a better value than a first one that is NaN
            return not math.isnan(value)
        if is_min:
            return value + self.min_delta < than
        return value - self.min_delta > than

    def _is_min(self) -> bool:
        if self.mode != "auto":
            return self.mode == "min"
        direction: str | None = self.model.direction_of(self.monitor.removeprefix("val_"))
        if direction is None:
            raise UsageError(
                f"{type(self).__name__}: expected a metric whose best value is known to be its largest or smallest, "
                f"got {self.monitor!r}; give mode='min' or mode='max'."
            )
        return direction == "min"

    def _value(self, logs: Mapping[str, Any]) -> float | None:
        value = logs.get(self.monitor)
        if value is None:
            kind = type(self).__name__
            log_names = ", ".join(logs)
            logger.warning("%s: no %s among the logs: %s", kind, self.monitor, log_names)
        return value


class EarlyStopping(_Monitor):
    """Ends fit when a value has not improved for some epochs; see `keras.callbacks.EarlyStopping`.

    NaN is no improvement, but for the first value; any number is better than a first value that was NaN.

    >>> stop = hpcdist.callbacks.EarlyStopping(monitor="loss", patience=3, restore_best_weights=True)
    >>> history = keras_model.fit(x, y, batch_size=16, callbacks=[stop], verbose=0)

    Args:
        monitor: name of the value in the logs.
        min_delta: an improvement is a change of more than this.
        patience: epochs without improvement after which fit ends.
        verbose: 1: print that fit ends, and that weights are restored.
        mode: "min" or "max": which value is best; "auto": by its name.
        baseline: value that an improvement has to beat, too.
        restore_best_weights: whether the model has the weights of the best epoch at the end.
        start_from_epoch: number of the first epoch that counts.
    """

    saved = ("best", "wait", "stopped_epoch", "best_epoch")

    def __init__(  # noqa: PLR0913  Keras' names
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, None, min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self._best_weights: dict[str, Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget an earlier fit."""
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best = self._best_weights = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Compare the value with the best one."""
        value = self._value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self._best_weights is None:
            self._note_weights(epoch)
        self.wait += 1
        if self._is_better(value, self.best):
            self.best = value
            self._note_weights(epoch)
            if self.baseline is None or self._is_better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def _note_weights(self, epoch: int) -> None:
        self.best_epoch = epoch
        if self.restore_best_weights:
            self._best_weights = {
                name: value.detach().clone() for name, value in self.model.state_dict().items()
            }

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the best weights."""
        if self.stopped_epoch and self.verbose:
            self.model.print_once(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self._best_weights is not None:
            if self.verbose:
                self.model.print_once(
                    f"Restoring model weights from the end of the best epoch: {self.best_epoch + 1}."
                )
            self.model.set_weights(self._best_weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers, and the best weights."""
        return {**super().state_dict(), "best_weights": self._best_weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier run."""
        numbers = dict(state)
        self._best_weights = numbers.pop("best_weights")
        super().load_state_dict(numbers)


class ReduceLROnPlateau(_Monitor):
    """Reduces the learning rate when a value has not improved for some epochs; see Keras' of this name.

    Args:
        monitor, mode, min_delta: as for EarlyStopping.
        factor: number below 1 that the rate is multiplied by.
        patience: epochs without improvement after which the rate is reduced.
        verbose: 1: print each reduction.
        cooldown: epochs after a reduction that do not count.
        min_lr: lowest rate.

    Raises:
        UsageError: for a factor of 1 or more.
    """

    saved = ("best", "wait", "cooldown_counter")

    def __init__(  # noqa: PLR0913  Keras' names
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, None, min_delta)
        if factor >= 1:
            raise UsageError(
                f"ReduceLROnPlateau: expected a factor below 1, got {factor}; 0.1 is usual."
            )
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.wait = self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget an earlier fit."""
        self.best = None
        self.wait = 0
        self.cooldown_counter = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Compare the value with the best one; the rate goes to the logs."""
        logs["learning_rate"] = self.model.learning_rate
        value = self._value(logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._is_better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience and self._reduce(epoch):
                self.cooldown_counter = self.cooldown
                self.wait = 0

    def _reduce(self, epoch: int) -> bool:
        before = self.model.learning_rate
        if before <= self.min_lr:
            return False
        self.model.learning_rate = rate = max(before * self.factor, self.min_lr)
        if self.verbose:
            self.model.print_once(
                f"Epoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {rate}."
            )
        return True


class LearningRateScheduler(Callback):
    """Sets the learning rate before each epoch to schedule(epoch, rate), or schedule(epoch).

    Args:
        schedule: a function of the epoch, counted from 0, and the rate.
        verbose: 1: print each rate.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self._schedule = schedule
        self.verbose = verbose

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the rate."""
        try:
            rate = self._schedule(epoch, self.model.learning_rate)
        except TypeError:  # a function of one argument, as in older versions of Keras
            rate = self._schedule(epoch)
        is_scalar_array = getattr(rate, "ndim", None) == 0  # of numpy or torch
        if not is_scalar_array and not isinstance(rate, (int, float)):
            raise UsageError(
                f"LearningRateScheduler: expected a number from the schedule, got {type(rate).__name__} for epoch "
                f"{epoch}; return a float."
            )
        rate = float(rate)
        self.model.learning_rate = rate
        if self.verbose:
            self.model.print_once(
                f"Epoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the rate to the logs."""
        logs["learning_rate"] = self.model.learning_rate


class LearningRateWarmup(Callback):
    """Raises the learning rate from `rate` to `rate` times the number of replicas over the first epochs.

    Source: Goyal et al., Accurate, large minibatch SGD (2017); Horovod's LearningRateWarmupCallback.

    Args:
        warmup_epochs: number of epochs until the last rate is reached.
        initial_lr: rate of one replica. Default: rate of the optimizer when fit begins.
        verbose: 1: print the rate at the end.
    """

    saved = ("initial_lr", "n_steps", "epoch")

    def __init__(
        self,
        warmup_epochs: int = 5,
        initial_lr: float | None = None,
        verbose: int = 0,
    ) -> None:
        self.warmup_epochs = warmup_epochs
        self.initial_lr = initial_lr
        self.verbose = verbose
        self.n_steps = 0
        self.epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Note the rate."""
        if self.initial_lr is None:
            self.initial_lr = self.model.learning_rate

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self.epoch = epoch
        self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate, once the steps of an epoch are known; in the first epoch it stays."""
        if self.n_steps:
            self._set(self.epoch + batch / self.n_steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Note the steps of an epoch."""
        self.n_steps = self.model.n_steps_of_epoch
        if epoch == self.warmup_epochs - 1 and self.verbose:
            self.model.print_once(
                f"Epoch {epoch + 1}: warm-up ends at learning rate {self.model.learning_rate:g}."
            )

    def _set(self, epoch: float) -> None:
        if epoch > self.warmup_epochs or self.initial_lr is None:
            return
        share = 1.0
        if self.warmup_epochs:
            share = epoch / self.warmup_epochs
        n_replicas = self.model.strategy.num_replicas_in_sync
        self.model.learning_rate = self.initial_lr * (1 + share * (n_replicas - 1))


class CSVLogger(Callback):
    """Writes a line for each epoch to a CSV file, on the chief alone. A resumed run writes none twice.

    Columns are "epoch", then the names of the first epoch's logs in alphabetical order, then later names. A value that
    an epoch does not have is NA. A list is one field, such as "[0.5, 0.25]".

    Args:
        filename: path of the file.
        separator: one character between values.
        append: whether lines of earlier runs stay.

    A file that cannot be written is logged and tried again with a later epoch, and training continues. A file that is
    no such table is moved to NAME.bad.

    Attributes:
        retries: failures to write, and when the next try is due.

    Raises:
        UsageError: for another separator.

    Source: keras/src/callbacks/csv_logger.py (Keras 3), whose columns and fields these are.
    """

    def __init__(
        self,
        filename: str,
        separator: str = ",",
        append: bool = False,
    ) -> None:
        if len(separator) != 1 or separator in '"\r\n':
            raise UsageError(
                f"CSVLogger: expected one character as separator, and no quote or line end, got {separator!r}; "
                f"choose a comma, a semicolon or a tab."
            )
        self._path = Path(filename).absolute()  # the program may change its folder
        self._separator = separator
        self.append = append
        self._columns = ["epoch"]
        self._rows: list[dict[str, str]] = []
        self._is_written = False
        self.retries = Retries(f"CSVLogger: writing {self._path}")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Read the lines that stay."""
        self._columns = ["epoch"]
        self._rows = []
        self._is_written = False
        if self.append:
            self._read()

    def _read(self) -> None:
        """Read the file, on the chief, if there is one. A file that is no such table is moved to NAME.bad."""
        if not self.model.strategy.is_chief or not self._path.exists():
            return
        try:
            table = read_text(self._path, _MAX_TABLE_BYTES)
            self._columns, self._rows = _parse_table(table, self._separator)
        except (OSError, ValueError, csv.Error) as error:
            aside = self._path.with_name(f"{self._path.name}.bad")
            logger.warning(
                "CSVLogger: expected a table in %s, got %s; moved it to %s.",
                self._path,
                error,
                aside,
            )
            with contextlib.suppress(OSError):  # then it is replaced
                Disk().rename(self._path, aside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the lines of the run that resumes: later ones come again."""
        self._read()
        self._rows = self._rows[: state["n_rows"]]
        self._is_written = False

    def state_dict(self) -> dict[str, Any]:
        """Return how many lines there are."""
        return {"n_rows": len(self._rows)}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Append a line; where the file may have been replaced, or columns are new, write the whole file at once."""
        fields = {_field_of(name): _field_of(value) for name, value in logs.items()}
        new_columns = sorted(name for name in fields if name not in self._columns)
        self._columns += new_columns
        self._rows.append({"epoch": str(epoch), **fields})
        if not self.model.strategy.is_chief or not self.retries.is_due:
            self._is_written = False
            return
        try:
            if self._is_written and not new_columns and self._path.exists():
                line = self._text_of(self._rows[-1:]).rstrip("\n")
                durable.append_line(Disk(), self._path, line)
            else:
                self._replace_file()
        except OSError as error:
            self._is_written = False
            self.retries.failed(error)
        else:
            self._is_written = True
            self.retries.succeeded()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Try a last time to write lines that could not be written before."""
        if self.retries.failure is not None:
            with contextlib.suppress(OSError):  # it was logged before
                self._replace_file()
                self.retries.succeeded()

    def _replace_file(self) -> None:
        """Write all lines so far.

        Raises:
            OSError: when they cannot be written.
        """
        durable.make_folders(Disk(), self._path.parent)
        durable.replace_text(Disk(), self._path, self._text_of(self._rows, has_header=True))

    def _text_of(self, rows: Sequence[dict[str, str]], has_header: bool = False) -> str:
        """Return rows as lines of the file."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(
            text,
            self._columns,
            restval="NA",
            extrasaction="ignore",
            delimiter=self._separator,
            lineterminator="\n",
        )
        if has_header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _field_of(value: Any) -> str:
    """Return a value of the logs as the text of a field."""
    if value is None:
        return ""
    is_list = (
        isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0
    )
    if is_list:
        items = ", ".join(str(item) for item in value)
        value = f'"[{items}]"'
    # csv writes it as it is, and reads it as the end of a line
    text = str(value).replace("\r", "\\r")
    return text.encode("utf-8", "backslashreplace").decode()


def _parse_table(table: str, separator: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of a CSV file.

    Raises:
        ValueError: if it is no table of epochs.
        csv.Error: if it cannot be read as CSV.
    """
    limit_before = csv.field_size_limit(_MAX_TABLE_BYTES)  # a list in the logs may be long
    try:
        reader = csv.DictReader(io.StringIO(table, newline=""), delimiter=separator)
        columns = list(reader.fieldnames or ["epoch"])
        rows = list(reader)
    finally:
        csv.field_size_limit(limit_before)
    # the last row may be torn by a crash while it was appended
    if rows and (not table.endswith("\n") or _has_other_length(rows[-1])):
        rows.pop()
    if columns[0] != "epoch" or any(map(_has_other_length, rows)):
        raise ValueError(f"columns {columns} and {len(rows)} rows, some of another length")
    return columns, rows


def _has_other_length(row: Mapping[Any, Any]) -> bool:
    """Return whether a row of `csv.DictReader` has more or fewer fields than there are columns."""
    return None in row or None in row.values()
