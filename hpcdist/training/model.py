"""Model: a torch module with compile, fit, evaluate and predict, as keras.Model."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.errors import UsageError
from hpcdist.nest import is_nest, leaves
from hpcdist.saving.checkpoint import Checkpoint, load_checkpoint
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.parameter_server import ParameterServerStrategy
from hpcdist.training import inputs
from hpcdist.training.callbacks import Callback, History, as_callbacks
from hpcdist.training.compiled_module import CompiledModule
from hpcdist.training.description import describe, describe_compiled, table_of_layers
from hpcdist.training.loop import (
    Fit,
    FitOptions,
    evaluation,
    joined,
    prediction,
    validated_epochs,
    write_rows,
)

logger = logging.getLogger("hpcdist")


class Model(CompiledModule):
    """A module that trains, evaluates and predicts on all replicas of a strategy.

    It belongs to the strategy in whose scope it is made, and enters that scope by itself. Pass a module, or write a
    subclass with `forward`; `train_step`, `test_step` and `predict_step` may be overridden, and run on each replica.

    >>> with strategy.scope():
    ...     model = hpcdist.Model(torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Softmax(-1)))
    ...     model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> model.fit(x, y, batch_size=64, epochs=3)

    fit, evaluate and predict are collective over chief and workers, with the same arguments.

    Args:
        module: module to train. None in a subclass.
        name: name in messages and in `summary`. Default: name of the module's class.

    Attributes:
        strategy: strategy in whose scope the model was made.
        optimizer: optimizer of the parameters. None before `compile`.
        stop_training: whether fit ends after this batch or epoch. It suffices that one rank sets it.
        history: logs of the last fit, or of the fit in progress.
        n_steps_of_epoch: number of steps of the last epoch that was completed.
        loss_scale: loss scale of float16. None without float16.
    """

    def __init__(self, module: nn.Module | None = None, name: str | None = None) -> None:
        super().__init__(module, name)
        self._is_fitting = False

    # -- fit, evaluate, predict ---------------------------------------------------------------------------------------

    def fit(  # noqa: PLR0913  Keras' names
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[Callback] | Callback | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> History:
        """Train, and return the logs of the epochs.

        >>> history = keras_model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2

        Args:
            x: arrays, or a dataset; see `training.inputs.distribute`.
            y: labels for arrays.
            batch_size: rows of a batch of all replicas together, for arrays; default 32.
            epochs: number of the last epoch + 1.
            verbose: 0: nothing; 1: a bar; 2: a line for each epoch; "auto": a bar on a terminal, else lines.
            callbacks: one callback, or a sequence of them; see `hpcdist.callbacks`.
            validation_split: fraction of the rows of arrays, from their end, that are for validation.
            validation_data: (x, y), (x, y, sample_weight) or a dataset.
            shuffle: whether arrays are read in a new random order in every epoch.
            class_weight: class -> weight of its rows.
            sample_weight: weight of each row of arrays.
            initial_epoch: number of the first epoch, from 0.
            steps_per_epoch: steps of an epoch; default: all of the data. The next epoch resumes where it ended.
            validation_steps: batches of a validation; default: all of the data.
            validation_batch_size: rows of a batch of a validation, for arrays; default: batch_size.
            validation_freq: number of epochs between validations, or the epochs that end with one, counted from 1.

        Raises:
            UsageError: before `compile`; for arguments that do not fit together. DataError: for data without rows.

        Cost: a step takes a few hundredths longer than in a loop by hand (`benchmarks/fit.py`), and a call some
        milliseconds; nothing is sent for metrics before an epoch ends.
        """
        self.require_compiled("fit")
        strategy = self.strategy
        if isinstance(strategy, ParameterServerStrategy) and strategy.world.coordinator is not None:
            raise UsageError(
                "fit: expected every worker to run the program, got workers that serve; schedule steps by a "
                "ClusterCoordinator, or let workers call fit in place of Server.join()."
            )
        if type(strategy) is Strategy:
            self._warn_of_several_ranks()
        if epochs < initial_epoch or epochs < 0:
            raise UsageError(
                f"fit: expected epochs of at least initial_epoch, got {epochs} and {initial_epoch}; epochs count "
                f"from 0."
            )
        self._class_weights = inputs.table_of_classes(class_weight)
        if validation_split:
            if validation_data is not None or not (is_nest(x) or hasattr(x, "shape")):
                raise UsageError(
                    "fit: expected validation_split with arrays alone, got a dataset or validation_data; give either."
                )
            (x, y, sample_weight), validation_data = inputs.split_all(
                x, y, sample_weight, validation_split
            )
        with self.strategy.scope():
            train = inputs.distribute(
                self.strategy,
                x,
                y,
                sample_weight,
                batch_size=batch_size,
                shuffle=shuffle,
                call="fit",
            )
            validation = self._validation(validation_data, validation_batch_size or batch_size)
            options = FitOptions(
                epochs,
                initial_epoch,
                steps_per_epoch,
                validation_steps,
                validated_epochs(validation_freq),
                verbose,
            )
            callback_list = as_callbacks(callbacks)
            self.history = History()
            self.stop_training = False
            self._is_fitting = True
            try:
                Fit(self, train, validation, options, [*callback_list, self.history]).run()
            finally:
                self._class_weights = None
                self._is_fitting = False
        return self.history

    def _warn_of_several_ranks(self) -> None:
        """Log a warning if a model without a strategy is trained by each rank of a launcher."""
        launcher = launcher_of(read_environment())
        if launcher is not None and launcher.size > 1:
            logger.warning(
                "fit: %s was made outside of every strategy.scope(): each of %d ranks trains a model of "
                "its own; make it in the scope of a strategy.",
                self.name,
                launcher.size,
            )

    def _validation(self, validation_data: Any, batch_size: int | None) -> Any:
        """Return the batches to validate on. None without validation."""
        if validation_data is None:
            return None
        parts = validation_data
        if not isinstance(validation_data, (tuple, list)):
            parts = (validation_data,)
        if len(parts) > 3:
            raise UsageError(
                f"fit: expected validation_data of (x, y) or (x, y, sample_weight), got {len(parts)} parts; "
                f"leave out the others."
            )
        if len(parts) == 1:  # a dataset, which has batches already
            batch_size = None
        return inputs.distribute(
            self.strategy, *parts, batch_size=batch_size, call="validation_data"
        )

    def evaluate(  # noqa: PLR0913  Keras' names
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss, or a list of the loss and the metrics, over each row once; with return_dict by name.

        >>> loss, accuracy = keras_model.evaluate(x, y, batch_size=16, verbose=0)

        Args:
            x: as `fit`.
            y: as `fit`.
            batch_size: as `fit`.
            verbose: as `fit`.
            sample_weight: as `fit`.
            callbacks: as `fit`.
            steps: batches; default: all of the data.
            return_dict: whether the values come as a dict by their names in logs.
        """
        self.require_compiled("evaluate")
        with self.strategy.scope():
            batches = inputs.distribute(
                self.strategy, x, y, sample_weight, batch_size=batch_size, call="evaluate"
            )
            with self._keeping_metrics_of_fit():
                logs = evaluation(self, batches, steps, as_callbacks(callbacks), verbose)
        if return_dict:
            return logs
        values = list(logs.values())
        if len(values) == 1:
            return values[0]
        return values

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        output_file: Any = None,
    ) -> Any:
        """Return the outputs for each row once, in the order of the rows, as numpy arrays, on every rank.

        >>> keras_model.predict(x).shape
        (32, 3)

        Args:
            x: as `fit`; y of a dataset is left out.
            batch_size: as `fit`.
            verbose: accepted and ignored.
            callbacks: as `fit`.
            steps: batches; default: all of the data.
            output_file: path of an HDF5 file that the chief writes in place of returning arrays, batch by batch, so
                that no rank holds all of them: the dataset "predictions", or one under the key of each output,
                "predictions_0" and so on for a list of outputs. The file appears once it is whole.

        Raises:
            DataError: for data without rows; when the file cannot be written; on all ranks.

        With AutoShardPolicy FILE or OFF, and for a stream that workers read, rows come in the order of the replicas'
        parts; with OFF each row comes once for each replica.

        Cost: every rank receives the outputs of all.
        """
        with self.strategy.scope():
            batches = inputs.distribute(self.strategy, x, batch_size=batch_size, call="predict")
            parts = prediction(self, batches, steps, as_callbacks(callbacks))
            if output_file is None:
                return joined(list(parts))
            write_rows(self.strategy, output_file, parts)
            return None

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
    ) -> dict[str, float]:
        """Train on one global batch; return the logs of that batch alone.

        Collective over chief and workers, with the same rows.
        """
        self.require_compiled("train_on_batch")
        self.train()
        return self._on_batch(self.train_step, x, y, sample_weight, class_weight)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
    ) -> dict[str, float]:
        """Evaluate one global batch; return its logs. Collective over chief and workers, with the same rows."""
        self.require_compiled("test_on_batch")
        with self.evaluating():
            return self._on_batch(self.test_step, x, y, sample_weight, None)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one global batch, as numpy arrays. Collective over chief and workers."""
        return self.predict(x, batch_size=len(leaves(x)[0]), verbose=0)

    def _on_batch(
        self,
        step: Any,
        x: Any,
        y: Any,
        weight: Any,
        class_weight: dict[int, float] | None,
    ) -> dict[str, float]:
        weights_of_fit = self._class_weights
        self._class_weights = inputs.table_of_classes(class_weight)
        try:
            with self.strategy.scope(), self._keeping_metrics_of_fit():
                rows = len(leaves(x)[0])
                batches = inputs.distribute(
                    self.strategy, x, y, weight, batch_size=rows, call="train_on_batch"
                )
                self.reset_metrics()
                for batch, global_rows in inputs.rows_of_batches(batches):
                    self.run_step(step, batch, global_rows, must_check=True)
                return self.results()
        finally:
            self._class_weights = weights_of_fit

    @contextlib.contextmanager
    def _keeping_metrics_of_fit(self) -> Iterator[None]:
        """Leave what metrics have seen in an epoch as it is, where a hook of fit uses them for something else.

        Collective over chief and workers.
        """
        states: list[dict[str, Any]] = []
        if self._is_fitting:
            states = [metric.state_dict() for metric in self.metrics]
        yield
        for metric, state in zip(self.metrics, states, strict=self._is_fitting):
            metric.reset_state()
            metric.load_state_dict(state)

    # -- weights ------------------------------------------------------------------------------------------------------

    def get_weights(self) -> list[Any]:
        """Return all weights as numpy arrays, buffers included."""
        arrays = []
        for value in self.net.state_dict().values():
            array = value.detach().cpu().numpy()
            arrays.append(array.copy())
        return arrays

    def set_weights(self, weights: Any) -> None:
        """Set all weights: a list as `get_weights` returns it, or a state_dict. All ranks give the same.

        On parameter servers collective over the workers.
        """
        if isinstance(weights, Mapping):
            self.load_state_dict(weights)
        else:
            current_state = self.net.state_dict()
            if len(weights) != len(current_state):
                raise UsageError(
                    f"set_weights: expected {len(current_state)} arrays, got {len(weights)}; see get_weights."
                )
            new_state = {}
            for name, array in zip(current_state, weights, strict=True):
                new_state[name] = torch.as_tensor(np.asarray(array))
            self.net.load_state_dict(new_state)
        Checkpoint(model=self.net).publish()

    def save_weights(self, filepath: Any) -> None:
        """Write the weights to one file, for `load_weights` and `load_checkpoint(path, model=module)`.

        Collective over chief and workers; the chief writes.

        Raises:
            CheckpointError: when it cannot be written; on all ranks.
        """
        Checkpoint(model=self.net, **self._with_strategy()).write(filepath)

    def load_weights(self, filepath: Any) -> None:
        """Load weights that `save_weights` or `save` has written, or the weights of any checkpoint with a "model".

        Collective over chief and workers; the chief reads.

        Raises:
            CheckpointMismatch: for weights of another model.
            CheckpointError: when they cannot be read.
        """
        load_checkpoint(filepath, model=self.net)

    def save(self, filepath: Any) -> None:
        """Write weights, optimizer, the arguments of `compile`, and a module of torch.nn to one file.

        `hpcdist.load_model` reads it. Collective over chief and workers; the chief writes.

        Raises:
            CheckpointError: when it cannot be written; on all ranks.
        """
        compiled = None
        optimizer: dict[str, Any] = {}
        if self.optimizer is not None:
            optimizer = {"optimizer": self.optimizer}
            extra: list[str] = []
            if self._regularizers:
                extra.append("regularizers")
            if self.has_added_losses:
                extra.append("add_loss")
            compiled = describe_compiled(self.optimizer, self.compiled_with, extra)
        description = describe(self.net, compiled)
        checkpoint = Checkpoint(
            model=self.net, description=description, **optimizer, **self._with_strategy()
        )
        checkpoint.write(filepath)

    def _with_strategy(self) -> dict[str, Any]:
        """Return the strategy by its name in checkpoints; nothing outside of every strategy."""
        if type(self.strategy) is Strategy:
            return {}
        return {"strategy": self.strategy}

    def summary(self, print_fn: Callable[[str], Any] | None = None) -> None:
        """Print layers, shapes and numbers of parameters, on the chief alone."""
        if self.strategy.is_chief:
            for line in table_of_layers(self.net, self.name):
                (print_fn or print)(line)
