"""MetricsFile: one JSON line per record, no step twice and none missing, whatever ended the job in between."""

import bisect
import contextlib
import itertools
import json
import logging
import operator
import os
import weakref
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

    Give it to the Checkpoint too: a restart then keeps the records that were there when the state was saved, and the
    rest are written again. Without that, the first record of an attempt drops those of its own step and of later ones.

    A line that was damaged on the disk costs no other: a new attempt moves it to NAME.bad, and the log says which.

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
        self._file: FileIO | None = None
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

    def _claim(self) -> FileIO:
        durable.make_folders(self._disk, self.path.parent)
        durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
        lines = _lines_in(_content_of(self.path))
        sound = _sound_among(lines)
        if len(sound) < len(lines):  # before the file goes on without them
            self._set_aside({number: line for number, line in enumerate(lines, 1) if number not in sound})
        self._replace(self.path, b"".join(sound.values()))
        file = self._file = FileIO(self.path, "a+")  # without a buffer, which would keep what could not be written
        weakref.finalize(self, file.close)
        return file

    def _set_aside(self, damaged: dict[int, bytes]) -> None:
        """Add lines, by their numbers, to the file of damaged ones."""
        aside = self.path.with_name(f"{self.path.name}.bad")
        self._replace(aside, _content_of(aside) + b"".join(damaged.values()))
        logger.warning(
            "metrics: expected records in the order of steps in %s, got %d damaged, at line %s; these are in %s now.",
            self.path,
            len(damaged),
            ", ".join(map(str, [*damaged][:8])),
            aside,
        )

    def _replace(self, path: Path, content: bytes) -> None:
        durable.replace_file(self._disk, path, [memoryview(content)], len(content))

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
                self._add(file, line.encode(), step)
            except OSError as error:
                raise self._error(error) from None
        self._n_records, self._last_step = self._n_records + 1, step

    def _add(self, file: FileIO, line: bytes, step: int) -> None:
        """Write a line to the end, all of it or nothing."""
        self._is_durable = self._is_cut = False
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):  # the first error tells; the next record cuts again
                self._cut(file, step - 1)
            raise
        self._is_cut = True

    def _cut(self, file: FileIO, last_step: int) -> int:
        """Drop the records after a step, and a torn line; return how many stay.

        This attempt's own file is made shorter: nothing is put in its place, which may be a later attempt's by now.
        """
        file.seek(0)
        lines = [(line, _step_of(line)) for line in _lines_in(file.read())]
        kept = list(itertools.takewhile(lambda record: record[1] is None or record[1] <= last_step, lines))
        file.truncate(sum(len(line) for line, _ in kept))
        self._is_durable, self._is_cut = False, True
        return sum(step is not None for _, step in kept)

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
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the job goes on without "
                "the others.",
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


def _content_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _lines_in(content: bytes) -> list[bytes]:
    """Return the whole lines of a file: the last one is left out if it is torn."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _sound_among(lines: list[bytes]) -> dict[int, bytes]:
    """Return the lines that are records, by their numbers from 1.

    Where steps do not go up, some were damaged: as few as possible are left out.
    """
    records = [(number, step) for number, line in enumerate(lines, 1) if (step := _step_of(line)) is not None]
    sound = (records[place][0] for place in _longest_rise([step for _, step in records]))
    return {number: lines[number - 1] for number in sound}


def _longest_rise(steps: list[int]) -> list[int]:
    """Return the places of as many steps as go up (a longest increasing subsequence, found by patience sorting)."""
    last_steps: list[int] = []  # with which a rise of each length can end at the lowest
    rises: list[Any] = []  # (its last place, the rise before that), of each length
    for place, step in enumerate(steps):
        length = bisect.bisect_left(last_steps, step)
        last_steps[length : length + 1] = [step]
        rises[length : length + 1] = [(place, rises[length - 1] if length else None)]
    found, rise = [], rises[-1] if rises else None
    while rise:
        place, rise = rise
        found.append(place)
    return found[::-1]


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None of anything else."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
