"""BackupAndRestore: a run of fit that is stopped or killed resumes at the exact sample, with the exact bits."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.checkpoint.durable import is_same
from hpcdist.errors import UsageError
from hpcdist.retries import Retries
from hpcdist.run.record import RunRecord
from hpcdist.run.side_errors import SideErrors
from hpcdist.runtime.process import call_when_done
from hpcdist.saving.checkpoint import Checkpoint
from hpcdist.saving.manager import CheckpointManager
from hpcdist.saving.schedule import SaveSchedule
from hpcdist.stopping.preemption import PreemptionCheckpointHandler
from hpcdist.strategy.base import Strategy
from hpcdist.training.callbacks import Callback, kind_of

#: Resolved paths of the folders of this program's fits. On the chief alone, whose paths count.
_used: list[Path] = []
#: The runs of this program that train no more, by their folders. On the chief alone.
_ended: dict[str, "EndedRun"] = {}


class BackupAndRestore(Callback):
    """Saves the state of fit, and resumes it when the same program runs again, in the middle of an epoch or validation.

    The state covers model, optimizer, data, metrics, History and callbacks. On a stop request (SIGTERM, the end of
    the batch job, ...: see docs/concepts/stopping.md) all ranks save after the same batch, and exit with code 75; so do
    later calls of evaluate. After a kill fit resumes at the last save. The run is finished when the program has ended
    with code 0.

    The folder is a run folder: `checkpoints/` and `decision.json`.

    >>> resume = hpcdist.callbacks.BackupAndRestore("runs/fit", save_freq=100)
    >>> history = keras_model.fit(x, y, batch_size=16, callbacks=[resume], verbose=0)

    Args:
        backup_dir: folder, a different one for each fit of a program. The chief's path counts.
        save_freq: "epoch", or a number of steps, after which it saves.
        delete_checkpoint: whether the checkpoints are removed once the program has ended with code 0, so that it trains
            anew when it is started again. Keras removes them when fit ends; a program that is killed later would then
            train again.
        schedule: saves by time, copies in memory and so on, in place of save_freq; see `SaveSchedule`.

    Raises:
        UsageError: for another save_freq; for a folder that another fit of this program uses.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: str | int = "epoch",
        delete_checkpoint: bool = True,
        *,
        schedule: SaveSchedule | None = None,
    ) -> None:
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise UsageError(
                f"BackupAndRestore: expected save_freq 'epoch' or steps, got {save_freq!r}; "
                f"give a number of steps, or a SaveSchedule."
            )
        self._folder = Path(backup_dir).absolute()  # the program may change its folder
        self._save_freq = save_freq
        self._schedule = schedule
        self._deletes = delete_checkpoint
        self._manager: CheckpointManager | None = None
        self._handler: PreemptionCheckpointHandler | None = None
        self._errors: list[tuple[Retries, SideErrors]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: it saves the states of further objects."""
        return {}

    @contextmanager
    def over(self, objects: dict[str, Any], callbacks: Sequence[Callback]) -> Iterator[None]:
        """Restore the state that an earlier run saved, and save in the block and at its end.

        Collective over chief and workers.

        Args:
            objects: objects to save, by name.
            callbacks: callbacks whose states are saved too.
        """
        if type(self.model.strategy) is Strategy:
            raise UsageError(
                "BackupAndRestore: expected a model made in strategy.scope(), whose random numbers and steps are "
                "known, got one without; MultiWorkerMirroredStrategy() will do, on one rank too."
            )
        checkpoint = Checkpoint(**objects, callbacks=_States(callbacks))
        with checkpoint.world.agreed(checkpoint.world.role_comm):
            if checkpoint.world.is_chief:
                _claim(self._folder)
        self._manager = CheckpointManager(checkpoint, self._folder / "checkpoints")
        schedule = self._schedule
        if schedule is None:
            every_steps = self._save_freq if isinstance(self._save_freq, int) else None
            schedule = SaveSchedule(every_steps=every_steps)
        self._handler = PreemptionCheckpointHandler(None, self._manager, schedule=schedule)
        if self.model.strategy.is_chief:
            for callback in callbacks:
                retries = getattr(callback, "retries", None)
                if isinstance(retries, Retries):
                    errors = SideErrors(self._folder, type(callback).__name__)
                    self._errors.append((retries, errors))
        with contextlib.ExitStack() as stack:
            stack.push(self._handler)  # records how the block ends, if not well
            yield
            stack.pop_all()
        self._manager.save(self._handler.step, if_changed=True)
        end_when_done(self._handler, self._manager, self._deletes)
        self._manager = None  # a program that makes many fits keeps no managers
        self._handler = None
        self._errors = []

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Let stop requests wait for the end of a block."""
        if self._handler is None:
            return contextlib.nullcontext()
        return self._handler.busy()

    def next_save(self) -> str:
        """Return when it saves next, as a text; "" where a schedule decides."""
        if self._schedule is not None or self._handler is None:
            return ""
        if isinstance(self._save_freq, int):
            n_steps = self._save_freq - self._handler.step % self._save_freq
            return f"save in {n_steps} steps"
        return "save after the epoch"

    def after_epoch(self) -> None:
        """Save after an epoch, and record what callbacks could not write. Collective over chief and workers."""
        for retries, errors in self._errors:
            errors.update(retries)
        if self._save_freq == "epoch" and self._schedule is None:
            assert self._manager is not None, "in the block"
            assert self._handler is not None, "in the block"
            self._manager.save(self._handler.step, blocking=False)


def _claim(folder: Path) -> None:
    """Note that a fit of this program uses a folder.

    Raises:
        UsageError: if an earlier fit has used it, also by another name: a link, or a path relative to elsewhere.
    """
    for used_folder in _used:
        if is_same(folder, used_folder):
            also = ""
            if folder != used_folder:
                also = f", also as {used_folder}"
            raise UsageError(
                f"BackupAndRestore: expected a folder for each fit of a program, got {folder} twice{also}; give each "
                f"fit its own, as a restart would not know which one a checkpoint belongs to."
            )
    _used.append(folder.resolve())


class _States:
    """The states of the callbacks of a fit, as one object of a checkpoint."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        states = [callback.state_dict() for callback in self._callbacks]
        return {"kinds": self._kinds(), "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["kinds"] != self._kinds():
            raise UsageError(
                f"fit: expected the callbacks of the run that goes on, {state['kinds']}, got {self._kinds()}; give the "
                f"same, or a new folder to BackupAndRestore."
            )
        for callback, callback_state in zip(self._callbacks, state["states"], strict=True):
            callback.load_state_dict(callback_state)

    def _kinds(self) -> list[str]:
        return [kind_of(callback) for callback in self._callbacks]


@dataclass(frozen=True)
class EndedRun:
    """A run that trains no more, and is finished once its program has ended with code 0.

    Attributes:
        record: decision.json of the run.
        step: step of its last checkpoint.
        is_removed: whether its checkpoints are removed once it is finished.
    """

    record: RunRecord
    step: int
    is_removed: bool

    def finish(self) -> None:
        """Record that the program has ended well."""
        self.record.finish(self.step)
        if self.is_removed:
            self.record.remove_checkpoints()


def end_when_done(
    handler: PreemptionCheckpointHandler,
    manager: CheckpointManager,
    is_removed: bool = False,
) -> None:
    """Let a run save no more, and be finished once the program has ended with code 0: it may have more to do.

    Args:
        handler: handler of the run; stop requests still end the program.
        manager: manager of its checkpoints, which is not kept.
        is_removed: whether the checkpoints are removed when the program has ended.
    """
    record = handler.end_saving()  # what the program trains from here on is not this run
    if manager.checkpoint.world.is_chief:
        _ended[manager.directory] = EndedRun(record, manager.saved_step, is_removed)
    call_when_done(_finish_all)


def _finish_all() -> None:
    """Record that runs are finished, and remove their checkpoints: the program has ended well."""
    for run in _ended.values():
        run.finish()
