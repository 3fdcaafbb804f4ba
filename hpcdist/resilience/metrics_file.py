"""MetricsFile: one JSON line per record, no step twice and none missing, whatever ended the job in between."""

import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any, TextIO

from hpcdist.checkpoint import durable
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.world import World, make_world

logger = logging.getLogger("hpcdist")


class MetricsFile:
    """Records of a job, each with its step, in the order of steps.

    Give it to the Checkpoint too: a restart then keeps the records that were there when the state was saved, and the
    rest are written again. Without that, the first record of an attempt drops those of its own step and of later ones.
    What is kept is copied to a new file, so a process that is left over from an earlier attempt, and still holds the
    old file, writes to no effect.

    Not collective: all ranks call it, the chief alone writes.

    Args:
        path: of the file; its folder is made if need be.
        world: whose chief writes; default: the process's.

    Attributes:
        path: see above.

    Raises:
        CheckpointError: from `write` and on restoring, when the file cannot be written; on the chief only.
    """

    def __init__(self, path: str | os.PathLike[str], world: World | None = None) -> None:
        self.path = Path(path)
        self._is_writer = (world or make_world()).is_chief
        self._n_records = 0
        self._last_step = -1
        self._file: TextIO | None = None

    def __len__(self) -> int:
        """Return how many records there are: those that were kept, and those written since; equal on all ranks."""
        return self._n_records

    def write(self, step: int, **values: Any) -> None:
        """Add a record: the step and some values that JSON can hold. It is in the file when this returns.

        Raises:
            UsageError: for a step that is not after that of the last record.
        """
        if step <= self._last_step:
            raise UsageError(
                f"MetricsFile: expected a step after the last record's {self._last_step}, got {step}; put what belongs "
                f"to one step into one record."
            )
        if self._is_writer:
            line = json.dumps({"step": step, **values}) + "\n"
            try:
                file = self._open(step)
                file.write(line)
                file.flush()
            except OSError as error:
                raise self._error(error) from None
        self._n_records, self._last_step = self._n_records + 1, step

    def _open(self, step: int) -> TextIO:
        if self._file is None:
            durable.make_folders(durable.Disk(), self.path.parent)
            self._rewrite([line for line, of in self._read() if of < step])
        assert self._file is not None, "opened by _rewrite"
        return self._file

    def _read(self) -> list[tuple[str, int]]:
        """Return the lines of the file with their steps, up to the first that is torn or no record."""
        found: list[tuple[str, int]] = []
        if self.path.exists():
            for line in self.path.read_text(errors="replace").splitlines(keepends=True):
                step = _step_of(line)
                if step is None:
                    break
                found.append((line, step))
        return found

    def _rewrite(self, lines: list[str]) -> None:
        if self._file is not None:
            self._file.close()
        durable.sweep_temporary(durable.Disk(), self.path.parent, f"{self.path.name}.")
        durable.replace_text(durable.Disk(), self.path, "".join(lines))
        self._file = open(self.path, "a")  # noqa: SIM115  open as long as this object lives
        weakref.finalize(self, self._file.close)

    def state_dict(self) -> dict[str, Any]:
        """Return how many records there are, and make them durable: a checkpoint relies on them. Equal on all ranks."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._error(error) from None
        return {"records": self._n_records, "last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the records that were there when the state was saved."""
        self._n_records, self._last_step = state["records"], state["last_step"]
        if not self._is_writer:
            return
        try:
            durable.make_folders(durable.Disk(), self.path.parent)
            lines = [line for line, _ in self._read()]
            self._rewrite(lines[: self._n_records])
        except OSError as error:
            raise self._error(error) from None
        if len(lines) < self._n_records:
            logger.warning(
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the others are lost.",
                self._n_records,
                self.path,
                len(lines),
            )

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"metrics: expected to write {self.path}, got {error.strerror}; free space or choose another run folder."
        )


def _step_of(line: str) -> int | None:
    """Return the step of a whole record; None of anything else."""
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
