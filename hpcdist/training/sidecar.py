"""SidecarEvaluator: evaluates each new checkpoint beside a job that trains, which never waits for it."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.store import Store
from hpcdist.errors import CheckpointDamaged, CheckpointError, ExitCode
from hpcdist.ps.serve import StopSignals
from hpcdist.resilience.checkpoint import load_checkpoint
from hpcdist.runtime.process import end_of_training
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.training import inputs
from hpcdist.training.callbacks import Callback
from hpcdist.training.loop import evaluation
from hpcdist.training.model import Model
from hpcdist.training.tensorboard import open_writer

logger = logging.getLogger("hpcdist")


class SidecarEvaluator:
    """Evaluates the newest checkpoint, again and again, on an evaluator rank or in a job of its own.

    It takes the newest checkpoint only, and ends after the last one: on an evaluator rank once the chief has left, with
    its code; in a job of its own once `decision.json`, in its folder or above, says that the run is finished, or at a
    signal, with code 75. A checkpoint that is damaged, or gone, is left out.

    >>> if strategy.cluster_resolver.task_type == "evaluator":
    ...     hpcdist.SidecarEvaluator(model, test, "runs/fit/checkpoints", log_dir="runs/fit/evaluation").start()

    Args:
        model: compiled, and like the one that trains.
        data: what `Model.evaluate` takes: a dataset, or (x, y).
        checkpoint_dir: of a BackupAndRestore or CheckpointManager, whose checkpoints have a "model"; or of a
            ModelCheckpoint.
        steps: batches of an evaluation; default: all of the data.
        max_evaluations: how many it makes before it ends; default: until training has ended.
        callbacks: of the evaluations.
        log_dir: where it writes `evaluations.jsonl`, `best.h5` (the weights with the smallest loss) and events for
            TensorBoard, where that is installed; None: it prints a line for each evaluation only.
        poll_s: seconds between two looks for a new checkpoint.

    Attributes:
        evaluations: the logs of each, with "step" and "path".
    """

    def __init__(  # noqa: PLR0913  Keras' names, and two
        self,
        model: Model,
        data: Any,
        checkpoint_dir: Any,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        log_dir: Any = None,
        poll_s: float = 1.0,
    ) -> None:
        self._model, self._folder, self._steps, self._most = model, Path(checkpoint_dir), steps, max_evaluations
        self._callbacks, self._log_dir, self._poll_s = list(callbacks or []), log_dir and Path(log_dir), poll_s
        parts = data if isinstance(data, (tuple, list)) else (data,)
        model.require_compiled("SidecarEvaluator")
        with model.strategy.scope():
            self._batches = inputs.distribute(model.strategy, *parts, call="SidecarEvaluator")
        self.evaluations: list[dict[str, Any]] = []
        self._seen: tuple[Path, int] | None = None  # and its time: a file may be replaced
        self._writer: Any = None

    def start(self) -> None:
        """Evaluate until training has ended, or max_evaluations are made.

        Raises:
            SystemExit: on an evaluator rank, once the chief has left; in a job of its own at a signal.
            CheckpointError: when the folder cannot be read, or log_dir cannot be written.
        """
        strategy = self._model.strategy
        is_beside = isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.world.size > 1
        with StopSignals() as signals:
            while self._most is None or len(self.evaluations) < self._most:
                code, is_finished = end_of_training(), self._is_finished()  # before the look: none comes after it then
                found = self._newest()
                if found is not None and found != self._seen:
                    self._seen = found
                    self._evaluate(found[0])
                elif code is not None:
                    sys.exit(code)
                elif is_finished and not is_beside:
                    return
                elif signals.last and not is_beside:
                    sys.exit(int(ExitCode.RUN_AGAIN))
                else:
                    time.sleep(self._poll_s)

    def _is_finished(self) -> bool:
        for folder in (self._folder, self._folder.parent):
            try:
                decision = json.loads((folder / "decision.json").read_text())
            except (OSError, ValueError):  # not there, or being replaced
                continue
            return isinstance(decision, dict) and decision.get("decision") == "finished"
        return False

    def _newest(self) -> tuple[Path, int] | None:
        """Return the newest checkpoint by its name or time, unverified, with its time; None without one."""
        saved = Store(self._folder).saved()
        if saved:
            return self._folder / str(saved[-1]), 0
        files = [one for one in self._folder.glob("*") if one.suffix in (".h5", ".keras")]
        return max(((one, one.stat().st_mtime_ns) for one in files), key=lambda pair: pair[1], default=None)

    def _evaluate(self, path: Path) -> None:
        try:
            step = load_checkpoint(path, model=self._model.net)
        except CheckpointDamaged as error:
            logger.warning("SidecarEvaluator: left out %s: %s", path, error)
            return
        with self._model.strategy.scope():
            logs = evaluation(self._model, self._batches, self._steps, self._callbacks, 0)
        step = step or len(self.evaluations) + 1  # files of a ModelCheckpoint have none
        is_best = all(logs["loss"] < one["loss"] for one in self.evaluations) if "loss" in logs else False
        self.evaluations.append({"step": step, "path": str(path), **logs})
        text = "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
        self._model.print_once(f"evaluation  step {step}  {text}")
        if self._log_dir is not None:
            self._write(self._log_dir, is_best)

    def _write(self, folder: Path, is_best: bool) -> None:
        """Write the last evaluation."""
        last, path, disk = self.evaluations[-1], folder / "evaluations.jsonl", Disk()
        try:
            durable.make_folders(disk, folder)
            if not path.exists():
                disk.make_new(path)
            durable.append_line(disk, path, json.dumps(last))
        except OSError as error:
            raise CheckpointError(
                f"SidecarEvaluator: expected to write in {folder}, got {error.strerror}; choose another log_dir."
            ) from error
        if is_best:
            self._model.save_weights(folder / "best.h5")
        self._writer = self._writer or open_writer(folder, last["step"], is_needed=False)
        if self._writer is not None:
            for name, value in last.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"evaluation_{name}", value, last["step"])
            self._writer.flush()
