"""TensorBoard: event files of the logs, which take the package tensorboard."""

from pathlib import Path
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.retries import Retries
from hpcdist.training.callbacks import Callback, Logs
from hpcdist.training.event_file import EventWriter, open_writer, require_tensorboard


class TensorBoard(Callback):
    """Writes logs for TensorBoard, on the chief alone: `train/` and `validation/` by epoch, `batches/` by step.

    Older events of the steps that it writes are purged, so that a reader sees each step once, also in a run that
    resumes. Values by step are over the chief's replicas. A folder that cannot be written is logged and tried again,
    and training continues; a reader may then see some values twice.

    Args:
        log_dir: folder of the event files, on the chief.
        update_freq: "epoch"; or "batch", or a number of steps, after which values are written too.

    Attributes:
        retries: failures to write, and when the next try is due.

    Raises:
        UsageError: for another update_freq.
        ConfigurationError: without the package tensorboard.
    """

    saved = ("n_steps",)

    def __init__(self, log_dir: Any = "logs", update_freq: str | int = "epoch") -> None:
        steps = update_freq
        if isinstance(update_freq, str):
            steps = {"epoch": 0, "batch": 1}.get(update_freq, update_freq)
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
        is_due = self._every and self.n_steps % self._every == 0
        if is_due and self.model.strategy.is_chief:
            step = self.n_steps - 1
            for name in logs:
                value = logs.get(name)
                if value is not None:
                    writer = self._writer("batches", step)
                    writer.add_scalar(f"batch_{name}", value, step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the values of an epoch."""
        if not self.model.strategy.is_chief:
            return
        values = {**logs, "learning_rate": self.model.learning_rate}
        for name, value in values.items():
            kind = "train"
            if name.startswith("val_"):
                kind = "validation"
            if isinstance(value, (int, float)):
                tag = f"epoch_{name.removeprefix('val_')}"
                self._writer(kind, epoch).add_scalar(tag, value, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, kind: str, step: int) -> EventWriter:
        """Return the writer of events of a kind. A new writer purges older events of this step and later ones."""
        if kind not in self._writers:
            writer = open_writer(self._folder / kind, step, retries=self.retries)
            assert writer is not None, "it is needed"
            self._writers[kind] = writer
        return self._writers[kind]
