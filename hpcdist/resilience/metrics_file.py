"""MetricsFile: one JSON line per record, no step twice and none missing, whatever ended the job in between."""

import itertools
import json
import logging
import operator
import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, UsageError
from hpcdist.process import make_world
from hpcdist.world import World

logger = logging.getLogger("hpcdist")


class MetricsFile:
    """Records of a job, each with its step, in the order of steps.

    Give it to the Checkpoint too: a restart then keeps the records that were there when the state was saved, and the
    rest are written again. Without that, the first record of an attempt drops those of its own step and of later ones.

    Not collective: all ranks call it, the chief alone writes.

    Args:
        path: of the file; its folder is made if need be.
        world: whose chief writes; default: the process's.
        disk: the seam to the file system; records alone are added, and dropped, through the open file.

    Attributes:
        path: see above.

    Raises:
        CheckpointError: from `write` and on restoring, when the file cannot be written; on the chief only.
    """

    def __init__(self, path: str | os.PathLike[str], world: World | None = None, *, disk: Disk | None = None) -> None:
        self.path = Path(path)
        self._disk = disk or Disk()
        self._is_writer = (world or make_world()).is_chief
        self._n_records = 0
        self._last_step = -1
        self._is_durable = True
        self._file: BinaryIO | None = None
        self._is_cut = False

    def __len__(self) -> int:
        """Return how many records the run has written, those before a restart included; equal on all ranks."""
        return self._n_records

    def claim(self) -> None:
        """Put a file of this attempt's own in the place of the last one's, with the whole records of that.

        A process that is left over from an earlier attempt still has the old file, and writes to no effect. A
        CheckpointManager calls this when those before it were replaced; else the first record does.

        Raises:
            CheckpointError: when it cannot be written.
        """
        if self._is_writer:
            try:
                self._claim()
            except OSError as error:
                raise self._error(error) from None

    def _claim(self) -> BinaryIO:
        durable.make_folders(self._disk, self.path.parent)
        durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
        old = self.path.read_bytes() if self.path.exists() else b""
        durable.replace_text(self._disk, self.path, "".join(line for line, _ in _records_in(old)))
        file = self._file = open(self.path, "ab+")  # noqa: SIM115  open as long as this object lives
        weakref.finalize(self, file.close)
        return file

    def write(self, step: int, **values: Any) -> None:
        """Add a record: the step and some values that JSON can hold. It is in the file when this returns.

        Raises:
            UsageError: for a step that is not after that of the last record.
            TypeError: for one that is no whole number.
        """
        step = operator.index(step)
        if step <= self._last_step:
            raise UsageError(
                f"MetricsFile: expected a step after the last record's {self._last_step}, got {step}; put what belongs "
                f"to one step into one record."
            )
        if self._is_writer:
            line = json.dumps({"step": step, **values}) + "\n"
            try:
                file = self._file or self._claim()
                if not self._is_cut:
                    self._cut(file, step - 1)
                self._is_durable = False
                file.write(line.encode())
                file.flush()
            except OSError as error:
                raise self._error(error) from None
        self._n_records, self._last_step = self._n_records + 1, step

    def _cut(self, file: BinaryIO, last_step: int) -> int:
        """Drop the records after a step; return how many stay.

        This attempt's own file is made shorter: nothing is put in its place, which may be a later attempt's by now.
        """
        file.seek(0)
        kept = [
            line for line, _ in itertools.takewhile(lambda record: record[1] <= last_step, _records_in(file.read()))
        ]
        file.truncate(sum(len(line.encode()) for line in kept))
        self._is_durable, self._is_cut = False, True
        return len(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return how many records there are, and make them durable: a checkpoint relies on them. Equal on all ranks."""
        if self._file is not None and not self._is_durable:
            try:
                self._disk.sync(self._file.fileno())
            except OSError as error:
                raise self._error(error) from None
            self._is_durable = True
        return {"records": self._n_records, "last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the records that were there when the state was saved.

        Raises:
            CheckpointDamaged: for a state that is not what `state_dict` returns.
        """
        self._n_records, self._last_step = _counts_in(state, self.path)
        if not self._is_writer:
            return
        try:
            n_kept = self._cut(self._file or self._claim(), self._last_step)
        except OSError as error:
            raise self._error(error) from None
        if n_kept < self._n_records:
            logger.warning(
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the others are lost.",
                self._n_records,
                self.path,
                n_kept,
            )

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"metrics: expected to write {self.path}, got {error.strerror}; free space or choose another run folder."
        )


def _counts_in(state: Any, path: Path) -> tuple[int, int]:
    """Return the number of records and the last step: a negative number would drop records that belong to a run."""
    records, last_step = (state.get("records"), state.get("last_step")) if isinstance(state, dict) else (None, None)
    if type(records) is not int or type(last_step) is not int or records < 0:
        raise CheckpointDamaged(
            f"metrics: expected a number of records and a step for {path}, got {str(state)[:60]!r}; use another "
            f"checkpoint."
        )
    return records, last_step


def _records_in(content: bytes) -> list[tuple[str, int]]:
    """Return the lines of a file with their steps, up to the first that is torn or no record."""
    found: list[tuple[str, int]] = []
    for line in content.decode(errors="replace").splitlines(keepends=True):
        step = _step_of(line)
        if step is None:
            break
        found.append((line, step))
    return found


def _step_of(line: str) -> int | None:
    """Return the step of a whole record; None of anything else."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
