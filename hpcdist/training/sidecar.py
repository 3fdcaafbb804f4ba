"""SidecarEvaluator: evaluates each new checkpoint beside a job that trains, which never waits for it."""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.read import read_text
from hpcdist.checkpoint.store import Store
from hpcdist.errors import CheckpointDamaged, CheckpointError, ExitCode
from hpcdist.ps.serve import StopSignals
from hpcdist.retries import Retries
from hpcdist.run.side_errors import SideErrors
from hpcdist.runtime.process import end_of_training
from hpcdist.saving.checkpoint import load_checkpoint
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.training import inputs
from hpcdist.training.callbacks import Callback
from hpcdist.training.event_file import EventWriter, open_writer
from hpcdist.training.loop import evaluation
from hpcdist.training.model import Model

logger = logging.getLogger("hpcdist")

_MAX_DECISION_BYTES = 1 << 20


class SidecarEvaluator:
    """Evaluates the newest checkpoint, again and again, on an evaluator rank or in a separate job.

    It takes the newest checkpoint only, and ends after the last one: on an evaluator rank once the chief has left, with
    its code; in a separate job once `decision.json`, in its folder or above, says that the run is finished, or at a
    signal, with code 75. A checkpoint that is damaged, or gone, is left out.

    >>> if strategy.cluster_resolver.task_type == "evaluator":
    ...     hpcdist.SidecarEvaluator(model, test, "runs/fit/checkpoints", log_dir="runs/fit/evaluation").start()

    Args:
        model: a compiled model, like the model that trains.
        data: a dataset, or (x, y), as for `Model.evaluate`.
        checkpoint_dir: folder of a BackupAndRestore or CheckpointManager, whose checkpoints have a "model"; or of a
            ModelCheckpoint.
        steps: batches of an evaluation. Default: all of the data.
        max_evaluations: number of evaluations before it ends. Default: until training has ended.
        callbacks: callbacks of the evaluations.
        log_dir: folder for `evaluations.jsonl`, `best.h5` (the weights with the smallest loss) and events for
            TensorBoard, where that is installed. None only prints a line for each evaluation.
        poll_s: seconds between two looks for a new checkpoint.

    Attributes:
        evaluations: logs of the evaluations, with "step", "path" and "saved_ns", the time of the file. After `start`
            it begins with the evaluations of earlier jobs with the same log_dir.
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
        self._model = model
        self._folder = Path(checkpoint_dir).absolute()  # the program may change its folder
        self._steps = steps
        self._most = max_evaluations
        self._callbacks = list(callbacks or [])
        self._log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._poll_s = poll_s
        parts = data
        if not isinstance(data, (tuple, list)):
            parts = (data,)
        model.require_compiled("SidecarEvaluator")
        with model.strategy.scope():
            self._batches = inputs.distribute(model.strategy, *parts, call="SidecarEvaluator")
        self.evaluations: list[dict[str, Any]] = []
        self._n_earlier = 0
        self._has_read_earlier = False
        #: Evaluated files: name in the folder, which may have several names, and time, as a file may be replaced.
        self._seen: set[tuple[str, int]] = set()
        self._damaged: set[tuple[Path, int]] = set()
        self._writer: EventWriter | None = None
        self._retries = Retries("evaluating the newest checkpoint")
        resolver = model.strategy.cluster_resolver
        index = 0
        if resolver is not None:
            index = resolver.task_id or 0
        self._errors = SideErrors(self._run_folder(), f"evaluator-{index}")

    def _run_folder(self) -> Path:
        """Return the run folder: the folder of the checkpoints, or the folder above."""
        parent = self._folder.parent
        if self._folder.name == "checkpoints" or (parent / "decision.json").exists():
            return parent
        return self._folder

    def start(self) -> None:
        """Evaluate until training has ended, or max_evaluations are made.

        On an evaluator rank an error is logged, `hpcdist status` shows it, and the evaluation is tried again, after
        longer and longer pauses: training continues.

        Raises:
            SystemExit: on an evaluator rank, once the chief has left; in a separate job at a signal.
            Exception: in a separate job, the error of an evaluation.
            CheckpointError: in a separate job, if the folder cannot be read or log_dir cannot be written.
        """
        strategy = self._model.strategy
        is_beside = isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.world.size > 1
        with StopSignals() as signals:
            while self._most is None or len(self.evaluations) - self._n_earlier < self._most:
                code = end_of_training()  # before the look: no checkpoint comes after it then
                is_finished = self._is_finished()
                if self._try_next(is_beside, is_last=code is not None):
                    continue
                if code is not None:
                    sys.exit(code)
                elif is_finished and not is_beside:
                    return
                elif signals.last and not is_beside:
                    sys.exit(int(ExitCode.RUN_AGAIN))
                else:
                    time.sleep(self._poll_s)

    def _try_next(self, is_beside: bool, is_last: bool) -> bool:
        """Evaluate the newest checkpoint, unless that was done, or has just failed; return whether it was evaluated.

        Args:
            is_beside: whether training runs beside it, and continues if it fails.
            is_last: whether there is no time for a pause, as training has ended.
        """
        if not self._retries.is_due and not is_last:
            return False
        try:
            self._read_earlier()
            newest = self._next()
            if newest is None:
                return False
            path, saved_ns = newest
            self._batches.leave_pass()  # the pass of an evaluation that has failed
            self._evaluate(path, saved_ns)
        except Exception as error:
            if not is_beside:
                raise
            self._retries.failed(f"{type(error).__name__}: {error}")
            self._errors.update(self._retries)
            return False
        self._seen.add((path.name, saved_ns))
        self._retries.succeeded()
        self._errors.update(self._retries)
        return True

    def _read_earlier(self) -> None:
        """Take the evaluations of earlier jobs with the same log_dir, once."""
        if self._has_read_earlier:
            return
        self.evaluations = self._earlier()
        self._n_earlier = len(self.evaluations)
        self._seen = {
            (Path(entry["path"]).name, int(entry["saved_ns"])) for entry in self.evaluations
        }
        self._has_read_earlier = True

    def _earlier(self) -> list[dict[str, Any]]:
        """Return the evaluations of earlier jobs with the same log_dir."""
        if self._log_dir is None:
            return []
        try:
            lines = (self._log_dir / "evaluations.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refusal(self._log_dir, error) from error
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # cut off by a kill
                record = json.loads(line)
                if isinstance(record, dict) and {"path", "saved_ns"} <= record.keys():
                    records.append(record)
        return records

    def _is_finished(self) -> bool:
        for folder in (self._folder, self._folder.parent):
            try:
                decision = json.loads(read_text(folder / "decision.json", _MAX_DECISION_BYTES))
            except (OSError, ValueError, RecursionError):  # not there, or being replaced
                continue
            return isinstance(decision, dict) and decision.get("decision") == "finished"
        return False

    def _next(self) -> tuple[Path, int] | None:
        """Return the newest checkpoint that is not damaged, with its time. None if it was evaluated, or is missing."""
        whole = (
            checkpoint for checkpoint in self._newest_first() if checkpoint not in self._damaged
        )
        newest = next(whole, None)
        if newest is None:
            return None
        path, saved_ns = newest
        if (path.name, saved_ns) in self._seen:
            return None
        return newest

    def _newest_first(self) -> list[tuple[Path, int]]:
        """Return the checkpoints, unverified, with their times, in the order of their names, or of their times."""
        saved = Store(self._folder).saved()
        names = list(map(str, reversed(saved)))
        if not saved:
            names = [path.name for path in self._folder.glob("*")]
        timed_paths = []
        for name in names:
            path = self._folder / name
            if name.endswith((".h5", ".keras")):
                with contextlib.suppress(FileNotFoundError):  # gone since
                    timed_paths.append((path, path.stat().st_mtime_ns))
        if not saved:
            timed_paths.sort(key=lambda pair: pair[1], reverse=True)
        return timed_paths

    def _evaluate(self, path: Path, saved_ns: int) -> None:
        try:
            step = load_checkpoint(path, model=self._model.net)
        except CheckpointDamaged as error:
            logger.warning("SidecarEvaluator: left out %s: %s", path, error)
            self._damaged.add((path, saved_ns))
            return
        with self._model.strategy.scope():
            logs = evaluation(self._model, self._batches, self._steps, self._callbacks, 0)
        step = step or len(self.evaluations) + 1  # files of a ModelCheckpoint have no step
        is_best = self._is_best(logs.get("loss", math.nan))
        record = {"step": step, "path": str(path), "saved_ns": saved_ns, **logs}
        if self._log_dir is not None:
            self._write(self._log_dir, record, is_best)
        self.evaluations.append(record)
        texts = [f"{name} {value:.4g}" for name, value in logs.items()]
        values = "  ".join(texts)
        self._model.print_once(f"evaluation  step {step}  {values}")

    def _is_best(self, loss: float) -> bool:
        """Return whether a loss is finite, and smaller than the losses of all evaluations so far."""
        losses = [record.get("loss") for record in self.evaluations]
        numbers = [earlier for earlier in losses if isinstance(earlier, (int, float))]
        smallest = min(filter(math.isfinite, numbers), default=math.inf)
        return math.isfinite(loss) and loss < smallest

    def _write(
        self,
        folder: Path,
        record: dict[str, Any],
        is_best: bool,
    ) -> None:
        """Write an evaluation. Its line comes last, as the evaluation counts as made once the line is there."""
        path = folder / "evaluations.jsonl"
        disk = Disk()
        try:
            durable.make_folders(disk, folder)
        except OSError as error:
            raise self._refusal(folder, error) from error
        if is_best:
            self._model.save_weights(folder / "best.h5")
        self._writer = self._writer or open_writer(folder, record["step"], is_needed=False)
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name not in ("step", "saved_ns"):
                    self._writer.add_scalar(f"evaluation_{name}", value, record["step"])
            self._writer.flush()
        try:
            if not path.exists():
                disk.make_new(path)
            durable.append_line(disk, path, json.dumps(record))
        except OSError as error:
            raise self._refusal(folder, error) from error

    def _refusal(self, folder: Path, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"SidecarEvaluator: expected to write in {folder}, got {error.strerror}; choose another log_dir."
        )
