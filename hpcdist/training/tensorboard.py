"""TensorBoard: event files of the logs, which take the package tensorboard."""

from pathlib import Path
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.retries import Retries
from hpcdist.training.callbacks import Callback, Logs
from hpcdist.training.event_file import EventWriter, open_writer, require_tensorboard


class TensorBoard(Callback):
    """Writes logs for TensorBoard, on the chief alone: `train/` and `validation/` by epoch, `batches/` by step.

    What is there of the steps that it writes is purged, so that a reader sees each step once, also in a run that goes
    on. Values by step are those of the chief's replicas. Where the folder cannot be written, that is logged and tried
    again, and training goes on; a reader may then see some values twice.

    Args:
        log_dir: the folder. Paths of other ranks do not count.
        update_freq: "epoch"; or "batch", or a number of steps, after which values are written too.

    Attributes:
        retries: what could not be written, and when it is tried again.

    Raises:
        UsageError: for another update_freq.
        ConfigurationError: without the package tensorboard.
    """

    saved = ("n_steps",)

    def __init__(self, log_dir: Any = "logs", update_freq: str | int = "epoch") -> None:
        steps = (
            {"epoch": 0, "batch": 1}.get(update_freq, update_freq)
            if isinstance(update_freq, str)
            else update_freq
        )
        if not isinstance(steps, int) or steps < 0:
            raise UsageError(
                f"TensorBoard: expected update_freq 'epoch', 'batch' or steps, got {update_freq!r}; "
                f"leave it out for 'epoch'."
            )
        require_tensorboard()
        self._folder = Path(log_dir).absolute()  # the program may change its folder
        self._every = steps
        self._writers: dict[str, EventWriter] = {}
        self.n_steps = 0
        self.retries = Retries(f"TensorBoard: writing events in {self._folder}")

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin anew."""
        self.n_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps: their events are in the files then."""
        for writer in self._writers.values():
            writer.flush()
        return super().state_dict()

    def has_batch_hook(self) -> bool:
        """Return False: it never ends fit."""
        return False

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write the values of this rank, if due."""
        self.n_steps += self.steps_until(batch)
        if self._every and self.n_steps % self._every == 0 and self.model.strategy.is_chief:
            for name in logs:
                value = logs.get(name)
                if value is not None:
                    self._writer("batches", self.n_steps - 1).add_scalar(
                        f"batch_{name}", value, self.n_steps - 1
                    )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the values of an epoch."""
        if not self.model.strategy.is_chief:
            return
        for name, value in {**logs, "learning_rate": self.model.learning_rate}.items():
            kind = "validation" if name.startswith("val_") else "train"
            if isinstance(value, (int, float)):
                self._writer(kind, epoch).add_scalar(
                    f"epoch_{name.removeprefix('val_')}", value, epoch
                )
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, kind: str, step: int) -> EventWriter:
        """Return what writes events of a kind; those of this step and later ones that are there are purged."""
        if kind not in self._writers:
            writer = open_writer(self._folder / kind, step, retries=self.retries)
            assert writer is not None, "it is needed"
            self._writers[kind] = writer
        return self._writers[kind]
