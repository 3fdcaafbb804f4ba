"""The loops of fit, evaluate and predict, and the position in them that a checkpoint stores."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.data.row_writer import RowFile
from hpcdist.errors import DataError, UsageError
from hpcdist.nest import leaves, map_nest, with_leaves
from hpcdist.runtime.mpi import MPI
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.strategy.parameter_server import ParameterServerStrategy
from hpcdist.tf_compat.torch_metric import TorchMetric
from hpcdist.training.backup import BackupAndRestore
from hpcdist.training.callbacks import Callback, kind_of
from hpcdist.training.compiled_module import CompiledModule
from hpcdist.training.inputs import by_name, rows_of_batches
from hpcdist.training.progress import Progress

#: Cardinality of a dataset without end.
_INFINITE = -1


@dataclass(frozen=True)
class FitOptions:
    """The arguments of fit that its loops need; see `Model.fit`.

    Attributes:
        is_validated: returns whether an epoch, counted from 0, ends with a validation.
    """

    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    is_validated: Callable[[int], bool]
    verbose: int | str


class Position:
    """Where fit is, as a checkpoint holds it: consistent whenever a batch is asked for, where stop requests act.

    Attributes:
        epoch: number of the epoch in progress, or of the next one, from 0.
        has_begun: whether this epoch has begun.
        step: number of its steps so far.
        is_validating: whether its steps are done.
        logs: logs of its steps, once these are done.
        step_logs: means of the values of the last step, or test step, that are no metrics, where an earlier run made
            this step.
        has_begun_test: whether its validation has begun.
        test_step: number of batches of its validation so far.
        is_over: whether `stop_training` has ended fit.

    Args:
        model: model that trains; it computes these means.
        epoch: number of the first epoch.
    """

    #: All ranks must call `state_dict` together.
    is_state_collective = True

    def __init__(self, model: CompiledModule, epoch: int) -> None:
        self._model = model
        self._last = None
        self.epoch = epoch
        self.step_logs: dict[str, float] = {}
        self.step = self.test_step = 0
        self.has_begun = self.has_begun_test = False
        self.is_validating = self.is_over = False
        self.logs: dict[str, Any] = {}

    def count_step(self, returned: Any) -> None:
        """Count a step, and keep its result."""
        self.step += 1
        self._last = returned

    def count_test_step(self, returned: Any) -> None:
        """Count a batch of the validation, and keep the result of its step."""
        self.test_step += 1
        self._last = returned

    def end_steps(self) -> None:
        """Move to the validation. Collective over chief and workers."""
        self.logs = self.results()
        self._last = None
        self.step_logs = {}
        self.is_validating = True

    def results(self) -> dict[str, float]:
        """Return the metrics, and the means of further values of the last step. Collective over chief and workers."""
        return {**self._model.results(), **self._means()}

    def _means(self) -> dict[str, float]:
        """Return the means of the values of the last step that are no metrics. Collective over chief and workers."""
        if self._last is None:
            return self.step_logs
        return self._model.mean_of_step(self._last)

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.step = self.test_step = 0
        self.has_begun = self.has_begun_test = self.is_validating = False
        self.logs = {}
        self._last = None
        self.step_logs = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes. Equal on all ranks. Collective over chief and workers."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**public, "step_logs": self._means()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        vars(self).update(state)
        self._last = None


class LocalLogs(Mapping[str, float]):
    """The metrics of this rank's replicas so far, each computed when it is read. Not collective.

    Metrics of torchmetrics are left out: reading one is collective.
    """

    def __init__(self, model: CompiledModule) -> None:
        self._model = model
        self._names = [
            name
            for name, metric in model.named_metrics().items()
            if not isinstance(metric, TorchMetric)
        ]

    def __getitem__(self, name: str) -> float:
        value = self._model.local_result(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Fit:
    """One call of fit.

    Args:
        model: model to train.
        train, validation: batches to train on, and to validate on.
        options: arguments of fit.
        callbacks: callbacks of the user, and the History last.
    """

    def __init__(
        self,
        model: CompiledModule,
        train: DistributedInput,
        validation: DistributedInput | None,
        options: FitOptions,
        callbacks: Sequence[Callback],
    ) -> None:
        self._model = model
        self._train = train
        self._validation = validation
        self._options = options
        self.position = Position(model, options.initial_epoch)
        backups = [callback for callback in callbacks if isinstance(callback, BackupAndRestore)]
        if len(backups) > 1:
            raise UsageError("fit: expected at most one BackupAndRestore, got several; leave one.")
        self._backup = backups[0] if backups else None
        next_save = self._backup.next_save if self._backup else lambda: ""
        progress = Progress(options.verbose, next_save)
        self._callbacks_of_user = callbacks
        self._callbacks = list(callbacks)
        if options.verbose:
            self._callbacks.append(progress)
        self._has_begin_hooks = any(
            callback.has_hook("on_train_batch_begin", "on_batch_begin") for callback in callbacks
        )
        self._is_checked = False
        self._endless: Iterator[tuple[Any, int | None]] | None = None
        self._has_batch_hooks = any(callback.has_batch_hook() for callback in callbacks)
        require_end(train, options.steps_per_epoch, "fit", "steps_per_epoch")
        if validation is not None:
            require_end(validation, options.validation_steps, "fit", "validation_steps")
        n_batches = n_batches_of(train)
        n_steps = options.steps_per_epoch or n_batches
        if n_batches is not None and n_steps is not None and n_steps > n_batches:
            raise UsageError(
                f"fit: expected steps_per_epoch of at most {n_batches}, the batches of the dataset, got {n_steps}; "
                f"leave it out, or call repeat() on the dataset."
            )
        params = {
            "epochs": options.epochs,
            "initial_epoch": options.initial_epoch,
            "steps": n_steps,
            "verbose": options.verbose,
        }
        self._call_callbacks = _caller(self._callbacks, model, params)

    def run(self) -> None:
        """Train; with a BackupAndRestore from where an earlier run was. Collective over chief and workers.

        Raises:
            UsageError: when ranks have different callbacks, as some act on all ranks together; on every rank.
        """
        self._require_same_callbacks()
        self._model.train()
        self._call("on_train_begin")
        self._model.reset_metrics()
        saving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._backup:
            saving = self._backup.over(self._objects(), self._callbacks_of_user)
        with saving, _dropping_last(self._train):
            self._epochs()
        self._call("on_train_end", self._last_logs())

    def _require_same_callbacks(self) -> None:
        strategy = self._model.strategy
        if isinstance(strategy, MultiWorkerMirroredStrategy):
            kinds = ", ".join(map(_kind_with_hooks, self._callbacks_of_user))
            strategy.world.require_same(
                kinds,
                strategy.world.role_comm,
                lambda chiefs: UsageError(
                    f"fit: expected the callbacks of the chief, {chiefs}, got {kinds}; give all ranks the same: those "
                    f"that write do so on the chief alone."
                ),
            )

    def _objects(self) -> dict[str, Any]:
        """Return what a checkpoint holds, by name."""
        strategy = self._model.strategy
        checkpoint_objects: dict[str, Any] = {
            "model": self._model.net,
            "optimizer": self._model.optimizer,
            "data": self._train,
        }
        # a subclass may have several optimizers
        for name, value in sorted(vars(self._model).items()):
            if hasattr(value, "param_groups") and value is not self._model.optimizer:
                checkpoint_objects[name] = value
        if self._validation is not None:
            checkpoint_objects["validation_data"] = self._validation
        if type(strategy) is not Strategy:
            checkpoint_objects["strategy"] = strategy
        for name, metric in self._model.named_metrics().items():
            checkpoint_objects[f"metric {name}"] = metric
        if self._model.loss_scale is not None:
            checkpoint_objects["loss_scale"] = self._model.loss_scale
        return {**checkpoint_objects, "fit": self.position}

    def _last_logs(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self._model.history.history.items()}

    def _epochs(self) -> None:
        position = self.position
        while position.epoch < self._options.epochs:
            if position.is_over and not position.has_begun:
                break
            self._epoch(position.epoch)
            if self._backup:
                self._backup.after_epoch()

    # -- an epoch ---------------------------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> None:
        position = self.position
        self._model.require_compiled("fit")  # a callback may have changed the optimizer
        if not position.has_begun:
            self._call("on_epoch_begin", epoch)
            position.has_begun = True
        if not position.is_validating:
            self._steps(epoch)
            position.is_over = self._any_rank_stops()
            position.end_steps()
            self._model.reset_metrics()
        self._model.n_steps_of_epoch = position.step
        logs = dict(position.logs)
        if self._validation is not None and self._options.is_validated(epoch):
            for name, value in self._validate(self._validation).items():
                logs[f"val_{name}"] = value
        self._call("on_epoch_end", epoch, logs)
        self._model.reset_metrics()
        position.is_over = position.is_over or self._any_rank_stops()
        position.next_epoch()

    def _steps(self, epoch: int) -> None:
        """Make the remaining steps of an epoch."""
        position = self.position
        model = self._model
        logs = LocalLogs(model)
        n_remaining = self._options.steps_per_epoch
        if n_remaining is not None:
            n_remaining -= position.step
        for batch, n_rows in self._batches(n_remaining):
            if self._has_begin_hooks and position.step % model.steps_per_execution == 0:
                self._call("on_train_batch_begin", position.step)
            must_check = not self._is_checked
            returned = model.run_step(model.train_step, batch, n_rows, must_check=must_check)
            position.count_step(returned)
            self._is_checked = True
            if position.step % model.steps_per_execution == 0:
                self._call("on_train_batch_end", position.step - 1, logs)
                if self._is_stopped_between_batches():
                    break
        if position.step % model.steps_per_execution:
            self._call("on_train_batch_end", position.step - 1, logs)
        if position.step == 0:
            raise DataError(
                f"fit: expected batches in epoch {epoch + 1}, got none; give data with rows."
            )
        model.strategy.prepare(
            [model.net]
        )  # a validation and callbacks need equal ranks after local steps

    def _batches(self, n_batches: int | None) -> Iterator[tuple[Any, int | None]]:
        """Yield the batches of one pass. With `n_batches`, yield this number, and continue there in the next epoch."""
        if n_batches is None:
            yield from rows_of_batches(self._train)
            return
        if self._endless is None:
            self._endless = _endless(self._train)
        yield from itertools.islice(self._endless, n_batches)

    def _validate(self, batches: DistributedInput) -> dict[str, float]:
        if not self.position.test_step:  # else a run resumes in the middle of a validation
            batches.leave_pass()
        return _evaluate(
            self._model, batches, self._options.validation_steps, self._call, self.position
        )

    def _is_stopped_between_batches(self) -> bool:
        """Return whether the epoch ends here. Collective over chief and workers where callbacks act after batches.

        Workers of asynchronous parameter servers, which are at different batches, end at an epoch's end only.
        """
        if not self._has_batch_hooks:
            return False
        strategy = self._model.strategy
        is_apart = (
            isinstance(strategy, ParameterServerStrategy)
            and strategy.num_replicas_in_sync < strategy.n_replicas
        )
        return not is_apart and self._any_rank_stops()

    def _any_rank_stops(self) -> bool:
        """Return whether a callback of any rank asks for the end. Collective over chief and workers."""
        strategy = self._model.strategy
        is_stopped = self._model.stop_training
        if not isinstance(strategy, MultiWorkerMirroredStrategy):
            return is_stopped
        world = strategy.world
        if world.role_comm.size == 1:
            return is_stopped
        return bool(world.all_reduce_int(int(is_stopped), MPI.MAX, world.role_comm))

    def _call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks. A stop request waits: between two callbacks the state is of no use."""
        with self._backup.busy() if self._backup else contextlib.nullcontext():
            self._call_callbacks(hook, *args)


def _kind_with_hooks(callback: Callback) -> str:
    """Return the kind of a callback, and whether it has a hook after batches, as fit then asks all ranks to stop."""
    if callback.has_batch_hook():
        return f"{kind_of(callback)} (after batches)"
    return kind_of(callback)


def validated_epochs(freq: int | Sequence[int]) -> Callable[[int], bool]:
    """Return a function that returns whether an epoch, counted from 0, ends with a validation; see `Model.fit`."""
    if isinstance(freq, int) and freq < 1:
        raise UsageError(f"fit: expected validation_freq of at least 1, got {freq}; leave it out.")
    if isinstance(freq, int):
        return lambda epoch: (epoch + 1) % freq == 0
    return lambda epoch: epoch + 1 in freq


def _endless(batches: DistributedInput) -> Iterator[tuple[Any, int | None]]:
    """Yield batches of one pass after another."""
    n_empty = 0  # a run that resumes at the end of a pass finds one whose rows are used
    while n_empty < 2:
        n_empty += 1
        for batch_with_rows in rows_of_batches(batches):
            n_empty = 0
            yield batch_with_rows
    raise DataError(
        "fit: expected batches for steps_per_epoch, got a dataset without rows; give data."
    )


def require_end(
    batches: DistributedInput,
    steps: int | None,
    call: str,
    name: str,
) -> None:
    """Raise UsageError for a dataset without end if `steps` does not limit the number of its batches."""
    is_endless = (
        isinstance(batches, DistributedDataset) and batches.dataset.cardinality() == _INFINITE
    )
    if is_endless and steps is None:
        raise UsageError(
            f"{call}: expected {name} for a dataset without end, got none; give the number of batches."
        )


def n_batches_of(batches: DistributedInput) -> int | None:
    """Return the number of batches of a pass; None where it is not known, or there is no end."""
    if not isinstance(batches, DistributedDataset):
        return None
    n_batches = batches.dataset.cardinality()
    if n_batches < 0:
        return None
    return n_batches


def _evaluate(
    model: CompiledModule,
    batches: DistributedInput,
    steps: int | None,
    call: Callable[..., None],
    position: Position,
) -> dict[str, float]:
    """Evaluate the remaining batches of a validation; return its logs. Collective over chief and workers.

    Args:
        model: model to evaluate.
        batches: batches of this rank.
        steps: number of batches. None for all of them.
        call: function that calls a hook of all callbacks.
        position: counter of the batches.
    """
    if not position.has_begun_test:
        call("on_test_begin")
        position.has_begun_test = True
    local = LocalLogs(model)
    n_remaining = steps
    if n_remaining is not None:
        n_remaining -= position.test_step
    with model.evaluating(), _dropping_last(batches):
        for batch, n_rows in itertools.islice(rows_of_batches(batches), n_remaining):
            call("on_test_batch_begin", position.test_step)
            is_first = position.test_step == 0
            returned = model.run_step(model.test_step, batch, n_rows, must_check=is_first)
            position.count_test_step(returned)
            call("on_test_batch_end", position.test_step - 1, local)
        if not position.test_step:
            raise DataError("evaluate: expected batches, got none; give data with rows.")
        logs = position.results()
    call("on_test_end", logs)
    return logs


@contextlib.contextmanager
def _dropping_last(batches: DistributedInput) -> Iterator[None]:
    """Let nobody wait for a step on the last batch of a block, however it ends: the program may train another model."""
    try:
        yield
    finally:
        batches.drop_batch()


def evaluation(
    model: CompiledModule,
    batches: DistributedInput,
    steps: int | None,
    callbacks: Sequence[Callback],
    verbose: int | str,
) -> dict[str, float]:
    """Evaluate, for `Model.evaluate`. Collective over chief and workers."""
    params = {"epochs": 1, "steps": steps or n_batches_of(batches), "verbose": verbose}
    call = _caller([*callbacks, Progress(verbose)], model, params)
    require_end(batches, steps, "evaluate", "steps")
    model.reset_metrics()
    return _evaluate(model, batches, steps, call, Position(model, 0))


def _caller(
    callbacks: Sequence[Callback],
    model: CompiledModule,
    params: dict[str, Any],
) -> Callable[..., None]:
    """Return a function that calls a hook of all callbacks, which take the model and the parameters."""
    for callback in callbacks:
        callback.set_model(model)
        callback.set_params(dict(params))

    def call(hook: str, *args: Any) -> None:
        for callback in callbacks:
            getattr(callback, hook)(*args)

    return call


def prediction(
    model: CompiledModule,
    batches: DistributedInput,
    steps: int | None,
    callbacks: Sequence[Callback],
) -> Generator[Any, None, None]:
    """Yield the outputs of all rows of each batch, for `Model.predict`. Close the generator.

    Collective over chief and workers.
    """
    params = {"epochs": 1, "steps": steps or n_batches_of(batches), "verbose": 0}
    call = _caller(callbacks, model, params)
    require_end(batches, steps, "predict", "steps")
    call("on_predict_begin")
    number = -1
    with model.evaluating(), _dropping_last(batches):
        for number, (batch, n_rows) in enumerate(itertools.islice(rows_of_batches(batches), steps)):
            call("on_predict_batch_begin", number)
            outputs = model.run_step(model.predict_step, batch, n_rows)
            yield map_nest(lambda value: np.asarray(model.strategy.gather(value, 0)), outputs)
            call("on_predict_batch_end", number)
    call("on_predict_end")
    if number < 0:
        raise DataError("predict: expected batches, got none; give data with rows.")


def joined(parts: Sequence[Any]) -> Any:
    """Return the outputs of batches, joined to outputs of all rows."""
    columns = zip(*map(leaves, parts), strict=True)
    return with_leaves(parts[0], [np.concatenate(column) for column in columns])


def write_rows(
    strategy: Strategy,
    path: Any,
    parts: Generator[Any, None, None],
) -> None:
    """Write outputs of batches to an HDF5 file as they come, on the chief. Collective over chief and workers.

    Args:
        strategy: strategy of the model.
        path: path of the file.
        parts: generator that `prediction` returned; it is closed.

    Raises:
        DataError: when it cannot be written; on all ranks.
    """
    file = RowFile(path) if strategy.is_chief else None
    with contextlib.closing(parts), file or contextlib.nullcontext():
        for part in parts:
            named = by_name(part)
            with _agreed(strategy):
                if file is not None:
                    file.append(named)
        with _agreed(strategy):
            if file is not None:
                file.publish()


def _agreed(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Return a block that fails on all ranks if it fails on one. Collective over chief and workers at its end."""
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        return strategy.world.agreed(strategy.world.role_comm)
    return contextlib.nullcontext()
