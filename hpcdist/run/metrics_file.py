"""MetricsFile: one JSON line per record, no step duplicated or missing, however attempts end.

`write` puts a line into a queue (`AppendLog`), and its thread appends it to the file (`MetricsOnDisk`), so that a file
server that hangs does not stop training. All that is done to the file is done by that thread.
"""

import functools
import json
import logging
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, UsageError
from hpcdist.retries import Retries
from hpcdist.run.append_log import AppendLog, Line
from hpcdist.run.metrics_on_disk import MetricsOnDisk
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: Records that are kept in memory while they cannot be written.
MAX_WAITING = 100_000


class MetricsFile:
    """Records of a job, each with its step, in the order of steps.

    Pass it to the Checkpoint too: a restart then keeps the records that existed at the save, and training writes the
    later ones again. Otherwise the first record of an attempt drops the old records of its step and of later steps,
    after a copy of the file was made.

    A line damaged on disk does not affect others: a new attempt moves it to NAME.bad and logs its number.

    Not collective: all ranks call it, only the chief writes.

    >>> metrics = hpcdist.MetricsFile("runs/a/metrics.jsonl")
    >>> checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy, metrics=metrics)
    >>> metrics.write(1, loss=0.5)
    >>> len(metrics)
    1

    Args:
        path: path of the file; its folder is created if missing.
        world: the world whose chief writes; None for the world of the process.
        disk: file system calls, which tests replace.

    Attributes:
        path: absolute path of the file.
        timeout_s: time limit of the world, in seconds.

    Raises:
        CheckpointError: from `flush` alone, if the file cannot be written; on the chief.
    """

    def __init__(
        self, path: str | os.PathLike[str], world: World | None = None, *, disk: Disk | None = None
    ) -> None:
        self.path = Path(path).absolute()  # the program may change its folder
        world = world or make_world()
        self._is_writer = world.is_chief
        self.timeout_s = world.timeout_s
        self._n_records = 0
        self._last_step = -1
        self._on_disk = MetricsOnDisk(self.path, disk or Disk())
        self._log = AppendLog(
            "metrics",
            self.path,
            self._on_disk.append,
            max_waiting=MAX_WAITING,
            limit_s=self.timeout_s,
            is_kept_at_exit=self._is_writer,
        )

    @property
    def retries(self) -> Retries:
        """The last failure to write, and the time of the next try.

        Meanwhile records are kept in memory, and training and its checkpoints continue.
        """
        return self._log.retries

    def __len__(self) -> int:
        """Return the number of records of the run, earlier attempts included; equal on all ranks."""
        return self._n_records

    def write(self, step: int, **values: Any) -> None:
        """Add a record of the step and JSON values. It is in the file soon, and durable with the next checkpoint.

        Raises:
            UsageError: if the step is not after the last record's.
            TypeError: if the step is not an integer.
        """
        step = operator.index(step)
        if step <= self._last_step:
            raise UsageError(
                f"MetricsFile: expected a step after the last record's {self._last_step}, got {step}; put all values "
                f"of a step into one record."
            )
        if self._is_writer:
            text = json.dumps({"step": step, **values}) + "\n"
            self._log.add(Line(text.encode(), step))
        self._n_records = self._n_records + 1
        self._last_step = step

    def flush(self) -> None:
        """Wait until the records so far are in the file. Not collective, and free on other ranks than the chief.

        Raises:
            CheckpointError: if they cannot be written, or are not within the timeout; on the chief.
        """
        if not self._is_writer:
            return
        appending = self._log.call(self._log.append_waiting)
        if not appending.done():
            raise CheckpointError(
                f"metrics: expected {self.path} to take the records within {self.timeout_s:g} s, got no answer; check "
                f"the file system (HPCDIST_TIMEOUT_S sets the limit)."
            )
        try:
            appending.result()
        except OSError as error:
            raise CheckpointError(
                f"metrics: expected to write {self.path}, got {error.strerror}; free space or choose another run "
                f"folder."
            ) from None
        self.retries.succeeded()

    def is_written(self, for_s: float) -> bool:
        """Wait up to `for_s` seconds; return whether all records so far are in the file, as on ranks that do not write.

        Raises nothing. While writing fails, nothing waits for it: it counts as written.
        """
        return self.retries.failure is not None or self._log.wait(for_s)

    def make_durable(self, limit_s: float | None = None) -> None:
        """Make the records durable: a checkpoint that counts them relies on it. From any thread; chief only.

        Where that fails, it is logged, and the checkpoint is written: a restart may then miss records.

        Args:
            limit_s: longest wait, in seconds; default: the time limit of the world.
        """
        if self._is_writer:
            self._log.attempt(self._append_and_sync, limit_s)

    def _append_and_sync(self) -> None:
        self._log.append_waiting()
        self._on_disk.sync()

    def claim(self) -> None:
        """Replace the file by this attempt's own copy, with the complete records of the old one.

        A process left over from an earlier attempt still has the old file open, so its writes have no effect. A
        CheckpointManager calls this when it replaces earlier managers; otherwise the first record does. Where it fails,
        that is logged, and tried again with the next records.
        """
        if self._is_writer:
            self._log.attempt(self._log.append_waiting)
            self._log.attempt(self._on_disk.claim)

    # -- as part of a checkpoint ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of records and the last step. Equal on all ranks."""
        return {"records": self._n_records, "last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the records that existed when the state was saved.

        Raises:
            CheckpointDamaged: if the state is not one that `state_dict` returns.
        """
        self.resume(state)
        if not self._is_writer:
            return
        cut = functools.partial(self._on_disk.cut_after, self._last_step)
        n_kept = self._log.attempt(cut)
        if n_kept is not None and n_kept < self._n_records:
            logger.warning(
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the job continues "
                "without the others.",
                self._n_records,
                self.path,
                n_kept,
            )

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from a state of any run: the next record drops the old records of its step and of later steps.

        Raises:
            CheckpointDamaged: if the state is not one that `state_dict` returns.
        """
        self._n_records, self._last_step = _counts_in(state, self.path)
        if self._is_writer:
            self._log.go_back_to(self._last_step)
            self._log.attempt(self._log.append_waiting)


def make_durable(files: Sequence[MetricsFile]) -> None:
    """Make the records of files durable; see `MetricsFile.make_durable`.

    It takes at most a quarter of the time limit: a save in which no block is written for that long counts as stuck.
    """
    for file in files:
        file.make_durable(file.timeout_s / 4 / len(files))


def _counts_in(state: Any, path: Path) -> tuple[int, int]:
    """Return the number of records and the last step; a negative number is refused, as it would drop all records."""
    counts = state if isinstance(state, dict) else {}
    records = counts.get("records")
    last_step = counts.get("last_step")
    if type(records) is not int or type(last_step) is not int or records < 0:
        raise CheckpointDamaged(
            f"metrics: expected a number of records and a step for {path}, got {str(state)[:60]!r}; use another "
            f"checkpoint."
        )
    return records, last_step
