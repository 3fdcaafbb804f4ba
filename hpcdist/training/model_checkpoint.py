"""ModelCheckpoint: the model in a file after each epoch, or the best of them, by the rules of Keras."""

import os
from pathlib import Path
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.training.callbacks import Logs, _Monitor


class ModelCheckpoint(_Monitor):
    """Writes the model to a file, on the chief alone; see `keras.callbacks.ModelCheckpoint`.

    A file is there whole, or not at all: `load_model(path)`, `load_weights(path)` and `load_checkpoint` read it. To
    resume a run at the exact sample use BackupAndRestore.

    >>> best = hpcdist.callbacks.ModelCheckpoint("best.h5", monitor="loss", save_best_only=True)
    >>> history = keras_model.fit(x, y, batch_size=16, callbacks=[best], verbose=0)
    >>> model = hpcdist.load_model("best.h5")

    Args:
        filepath: path of the file, in which {epoch}, counted from 1, {batch} and names of logs are replaced.
        monitor, mode: as for EarlyStopping.
        verbose: 1: print each save.
        save_best_only: whether to write only when the value is better than before.
        save_weights_only: whether to leave the optimizer out.
        save_freq: "epoch", or a number of steps, counted over epochs.
        initial_value_threshold: best value before the first save.

    Raises:
        UsageError: for another save_freq, or a name in filepath that is not among the logs.
        CheckpointError: when a file cannot be written; on all ranks.
    """

    saved = ("best", "epoch", "n_steps")

    def __init__(  # noqa: PLR0913  Keras' names
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode, initial_value_threshold)
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise UsageError(
                f"ModelCheckpoint: expected save_freq 'epoch' or steps, got {save_freq!r}; leave it out for 'epoch'."
            )
        self._filepath = os.fspath(filepath)
        self._folder = Path().absolute()  # the program may change it
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self._save_freq = save_freq
        self.epoch = self.n_steps = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self.epoch = epoch

    def has_batch_hook(self) -> bool:
        """Return False: it never ends fit."""
        return False

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write after every save_freq steps; values are over all replicas."""
        if self._save_freq == "epoch":
            return
        self.n_steps += self.steps_until(batch)
        if self.n_steps >= int(self._save_freq):
            self.n_steps = 0
            self._save(batch, self.model.results())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write after an epoch."""
        if self._save_freq == "epoch":
            self._save(None, logs)

    def _save(self, batch: int | None, logs: dict[str, Any]) -> None:
        """Write, if the value is good enough. Collective over chief and workers where something is written."""
        path = self._path_of(batch, logs)
        if not self._is_wanted(path, logs):
            return
        if self.save_weights_only:
            self.model.save_weights(path)
        else:
            self.model.save(path)
        if self.verbose:
            self.model.print_once(f"Epoch {self.epoch + 1}: saved the model to {path}")

    def _is_wanted(self, path: str, logs: dict[str, Any]) -> bool:
        if not self.save_best_only:
            return True
        value = self._value(logs)
        if value is None:
            return True
        if not self._is_better(value, self.best):
            if self.verbose:
                self.model.print_once(
                    f"Epoch {self.epoch + 1}: {self.monitor} did not improve from {self.best:.5f}"
                )
            return False
        self.best = value
        return True

    def _path_of(self, batch: int | None, logs: dict[str, Any]) -> str:
        numbers: dict[str, Any] = {}
        if batch is not None:
            numbers["batch"] = batch + 1
        values = {**numbers, **logs}
        try:
            name = self._filepath.format(epoch=self.epoch + 1, **values)
        except (KeyError, IndexError) as error:
            known_names = ", ".join(["epoch", *numbers, *logs])
            raise UsageError(
                f"ModelCheckpoint: expected names of {known_names} in filepath, got {error} in {self._filepath!r}; "
                f"correct the name."
            ) from None
        return str(self._folder / name)
