"""MetricsFile: one JSON line per record, no step duplicated or missing, however attempts end."""

import bisect
import contextlib
import itertools
import json
import logging
import operator
import os
import time
import weakref
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, UsageError
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")


class MetricsFile:
    """Records of a job, each with its step, in the order of steps.

    Pass it to the Checkpoint too: a restart then keeps the records that existed at the save, and training writes the
    later ones again. Otherwise the first record of an attempt drops those of its own and of later steps, after a copy
    of the file was made.

    A line damaged on disk does not affect others: a new attempt moves it to NAME.bad and logs its number.

    Not collective: all ranks call it, only the chief writes.

    Args:
        path: path of the file; its folder is created if missing.
        world: the world whose chief writes; default: that of the process.
        disk: file system calls, which tests replace; records are appended and truncated through the open file.

    Attributes:
        path: see above.

    Raises:
        CheckpointError: from `write` and from a restore, if the file cannot be written; on the chief only.
    """

    def __init__(self, path: str | os.PathLike[str], world: World | None = None, *, disk: Disk | None = None) -> None:
        self.path = Path(path)
        self._disk = disk or Disk()
        self._is_writer = (world or make_world()).is_chief
        self._n_records = 0
        self._last_step = -1
        self._n_changes = self._n_durable = 0
        self._file: FileIO | None = None
        self._is_cut = False

    def __len__(self) -> int:
        """Return the number of records of the run, earlier attempts included; equal on all ranks."""
        return self._n_records

    def claim(self) -> None:
        """Replace the file by this attempt's own copy, with the complete records of the old one.

        A process left over from an earlier attempt still has the old file open, so its writes have no effect. A
        CheckpointManager calls this when it replaces earlier managers; otherwise the first record does.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._is_writer:
            try:
                self._claim()
            except OSError as error:
                raise self._error(error) from None

    def _claim(self) -> FileIO:
        durable.make_folders(self._disk, self.path.parent)
        durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
        lines = _lines_in(_content_of(self.path))
        sound = _sound_among(lines)
        if len(sound) < len(lines):  # set them aside before the file is replaced without them
            self._set_aside({number: line for number, line in enumerate(lines, 1) if number not in sound})
        self._replace(self.path, b"".join(sound.values()))
        file = self._file = FileIO(self.path, "a+")  # unbuffered: a buffer would retain bytes after a failed write
        weakref.finalize(self, file.close)
        return file

    def _set_aside(self, damaged: dict[int, bytes]) -> None:
        """Append damaged lines, given by their numbers, to NAME.bad."""
        aside = self.path.with_name(f"{self.path.name}.bad")
        self._replace(aside, _content_of(aside) + b"".join(damaged.values()))
        logger.warning(
            "metrics: expected records in the order of steps in %s, got %d damaged, at line %s; moved them to %s.",
            self.path,
            len(damaged),
            ", ".join(map(str, [*damaged][:8])),
            aside,
        )

    def _replace(self, path: Path, content: bytes) -> None:
        durable.replace_file(self._disk, path, [(0, memoryview(content))], len(content))

    def write(self, step: int, **values: Any) -> None:
        """Append a record of the step and JSON values. It is in the file, not yet durable, when this returns.

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
            line = json.dumps({"step": step, **values}) + "\n"
            try:
                file = self._file or self._claim()
                if not self._is_cut:
                    if self._last_step < 0:
                        self._keep_earlier_run(file, step)
                    self._cut(file, step - 1)
                self._add(file, line.encode(), step)
            except OSError as error:
                raise self._error(error) from None
        self._n_records, self._last_step = self._n_records + 1, step

    def _keep_earlier_run(self, file: FileIO, step: int) -> None:
        """Copy the file if records of this and later steps are about to be dropped although nothing was restored."""
        file.seek(0)
        content = file.read()
        n_going = sum((_step_of(line) or -1) >= step for line in _lines_in(content))
        if n_going:
            kept = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
            self._replace(kept, content)
            logger.warning(
                "metrics: %s continues at step %d, but no checkpoint of its %d later records was restored; it was "
                "copied to %s.",
                self.path,
                step,
                n_going,
                kept,
            )

    def _add(self, file: FileIO, line: bytes, step: int) -> None:
        """Append a whole line or nothing."""
        self._n_changes += 1
        self._is_cut = False
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):  # the first error is raised; the next record cuts again
                self._cut(file, step - 1)
            raise
        self._is_cut = True

    def _cut(self, file: FileIO, last_step: int) -> int:
        """Drop the records after a step, and a torn last line; return how many remain.

        Truncates this attempt's open file and does not replace it: the path may belong to a later attempt by now.
        """
        file.seek(0)
        lines = [(line, _step_of(line)) for line in _lines_in(file.read())]
        kept = list(itertools.takewhile(lambda record: record[1] is None or record[1] <= last_step, lines))
        file.truncate(sum(len(line) for line, _ in kept))
        self._n_changes += 1
        self._is_cut = True
        return sum(step is not None for _, step in kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of records and the last step. Equal on all ranks."""
        return {"records": self._n_records, "last_step": self._last_step}

    def make_durable(self) -> None:
        """Make the records durable: a checkpoint that counts them relies on it. From any thread; chief only.

        Raises:
            CheckpointError: if the file system refuses.
        """
        n_changes = self._n_changes  # the main thread may add records meanwhile
        if self._file is not None and self._n_durable != n_changes:
            try:
                self._disk.sync(self._file.fileno())
            except OSError as error:
                raise self._error(error) from None
            self._n_durable = n_changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the records that existed when the state was saved.

        Raises:
            CheckpointDamaged: if the state is not one that `state_dict` returns.
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
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the job continues "
                "without the others.",
                self._n_records,
                self.path,
                n_kept,
            )

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from a state of any run: the next record drops those of its own and later steps.

        Raises:
            CheckpointDamaged: if the state is not one that `state_dict` returns.
        """
        self._n_records, self._last_step = _counts_in(state, self.path)
        self._is_cut = False

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"metrics: expected to write {self.path}, got {error.strerror}; free space or choose another run folder."
        )


def make_durable(files: Sequence[MetricsFile]) -> None:
    """Make the records of files durable; see `MetricsFile.make_durable`."""
    for file in files:
        file.make_durable()


def _counts_in(state: Any, path: Path) -> tuple[int, int]:
    """Return the number of records and the last step; a negative number is refused, as it would drop all records."""
    records, last_step = (state.get("records"), state.get("last_step")) if isinstance(state, dict) else (None, None)
    if type(records) is not int or type(last_step) is not int or records < 0:
        raise CheckpointDamaged(
            f"metrics: expected a number of records and a step for {path}, got {str(state)[:60]!r}; use another "
            f"checkpoint."
        )
    return records, last_step


def _content_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _lines_in(content: bytes) -> list[bytes]:
    """Return the complete lines of a file, without a torn last one."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _sound_among(lines: list[bytes]) -> dict[int, bytes]:
    """Return the sound records, by their line numbers from 1.

    If steps do not increase, some were damaged; as few as possible are left out.
    """
    records = [(number, step) for number, line in enumerate(lines, 1) if (step := _step_of(line)) is not None]
    sound = (records[index][0] for index in _longest_rise([step for _, step in records]))
    return {number: lines[number - 1] for number in sound}


def _longest_rise(steps: list[int]) -> list[int]:
    """Return the indices of a longest increasing subsequence, found by patience sorting in O(n log n)."""
    last_steps: list[int] = []  # for each length, the lowest step in which a rise of that length can end
    rises: list[Any] = []  # for each length, (index of its last step, the rise before it)
    for index, step in enumerate(steps):
        length = bisect.bisect_left(last_steps, step)
        last_steps[length : length + 1] = [step]
        rises[length : length + 1] = [(index, rises[length - 1] if length else None)]
    found, rise = [], rises[-1] if rises else None
    while rise:
        index, rise = rise
        found.append(index)
    return found[::-1]


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None if the line is not a record."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
