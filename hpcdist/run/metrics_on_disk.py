"""The file of a MetricsFile: this attempt's own copy of the records, in the order of steps, and cut at restarts."""

import bisect
import contextlib
import functools
import itertools
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.run.append_log import Line

logger = logging.getLogger("hpcdist")


class MetricsOnDisk:
    """The records of a job in a file. One thread uses it.

    A process left over from an earlier attempt still has the old file open, so its writes have no effect.

    Args:
        path: absolute path of the file; its folder is created if missing.
        disk: file system calls, which tests replace.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._file: int | None = None
        self._close: Callable[[], object] = lambda: None
        self._step_in_file = -1
        self._is_cut = False
        self._is_earlier_run_kept = False
        self._is_durable = True

    def append(self, lines: Sequence[Line], last_step: int | None) -> None:
        """Append lines, all or none.

        Args:
            lines: records in the order of steps; they replace records of their steps and of later ones.
            last_step: step of a checkpoint that was restored; None without one. Later records are undone.

        Raises:
            OSError: if the file system refuses.
        """
        if last_step is not None:
            self._step_in_file = last_step
            self._is_cut = False
        if lines:
            durable.patiently(functools.partial(self._append, lines))

    def _append(self, lines: Sequence[Line]) -> None:
        file = self._claimed_file()
        first_step = lines[0].step
        if not self._is_cut:
            if self._step_in_file < 0 and not self._is_earlier_run_kept:
                self._keep_earlier_run(file, first_step)
                self._is_earlier_run_kept = True
            self._cut(file, first_step - 1)
        self._is_durable = self._is_cut = False
        try:
            content = b"".join(line.content for line in lines)
            durable.write_all(self._disk, file, content, os.fstat(file).st_size)
        except OSError:
            # the first error is raised; the next append cuts again
            with contextlib.suppress(OSError):
                self._cut(file, first_step - 1)
            raise
        self._is_cut = True
        self._step_in_file = lines[-1].step

    def sync(self) -> None:
        """Make what was appended durable.

        Raises:
            OSError: if the file system refuses.
        """
        if self._file is None and not self._is_durable:  # after a sync that failed
            self.claim()
        if self._file is not None and not self._is_durable:
            try:
                self._disk.sync(self._file)
            except OSError:
                # records may be lost, and a later sync would not tell: write them again
                self._forget_file()
                raise
            self._is_durable = True

    def _claimed_file(self) -> int:
        """Return this attempt's open file, which the first call makes."""
        if self._file is None:
            return self._claim()
        return self._file

    def claim(self) -> None:
        """Replace the file by this attempt's own copy, without damaged lines.

        Raises:
            OSError: if the file system refuses.
        """
        durable.patiently(self._claim)

    def _claim(self) -> int:
        """Replace the file by this attempt's own copy, and return it, open."""
        durable.make_folders(self._disk, self._path.parent)
        durable.sweep_temporary(self._disk, self._path.parent, f"{self._path.name}.")
        lines = _lines_in(_content_of(self._path))
        sound = _sound_among(lines)
        damaged = {number: line for number, line in enumerate(lines, 1) if number not in sound}
        if damaged:  # set aside before the file is replaced without them
            self._set_aside(damaged)
        self._replace(self._path, b"".join(sound.values()))
        self._forget_file()
        self._file = self._disk.open_end(self._path)
        self._is_durable = True
        closing = weakref.finalize(self, self._disk.close, self._file)
        closing.atexit = False  # it would come before the last append
        self._close = closing
        return self._file

    def _forget_file(self) -> None:
        """Close the file: the next append makes this attempt's own copy of it anew."""
        self._file = None
        with contextlib.suppress(OSError):  # of a file that is replaced
            self._close()

    def _set_aside(self, damaged: dict[int, bytes]) -> None:
        """Append damaged lines, given by their numbers, to NAME.bad, unless its end has them."""
        aside = self._path.with_name(f"{self._path.name}.bad")
        before = _content_of(aside)
        lines = b"".join(damaged.values())
        if not before.endswith(lines):  # else set aside by a try that failed later
            self._replace(aside, before + lines)
            logger.warning(
                "metrics: expected records in the order of steps in %s, got %d damaged, at line %s; moved them to %s.",
                self._path,
                len(damaged),
                ", ".join(map(str, [*damaged][:8])),
                aside,
            )

    def _replace(self, path: Path, content: bytes) -> None:
        durable.replace_file(self._disk, path, [(0, memoryview(content))], len(content))

    def _keep_earlier_run(self, file: int, step: int) -> None:
        """Copy the file if records of this and later steps are about to be dropped although nothing was restored."""
        content = _content_in(file)
        steps = map(_step_of, _lines_in(content))
        n_going = sum(old_step is not None and old_step >= step for old_step in steps)
        if n_going:
            now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            backup_path = self._path.with_name(f"{self._path.name}.{now}")
            self._replace(backup_path, content)
            logger.warning(
                "metrics: %s continues at step %d, but no checkpoint of its %d later records was restored; it was "
                "copied to %s.",
                self._path,
                step,
                n_going,
                backup_path,
            )

    def cut_after(self, last_step: int) -> int:
        """Drop the records after a step; return how many remain.

        Raises:
            OSError: if the file system refuses.
        """
        return durable.patiently(lambda: self._cut(self._claimed_file(), last_step))

    def _cut(self, file: int, last_step: int) -> int:
        """Drop the records after a step, and a torn last line; return how many remain.

        Truncates this attempt's open file and does not replace it: the path may belong to a later attempt by now.
        """
        content = _content_in(file)
        lines = [(line, _step_of(line)) for line in _lines_in(content)]
        retained_lines = list(
            itertools.takewhile(lambda record: record[1] is None or record[1] <= last_step, lines)
        )
        n_bytes = sum(len(line) for line, _ in retained_lines)
        self._disk.truncate(file, n_bytes)
        self._is_durable = False
        self._is_cut = True
        return sum(step is not None for _, step in retained_lines)


def _content_of(path: Path) -> bytes:
    if not path.exists():
        return b""
    return path.read_bytes()


def _content_in(file: int) -> bytes:
    """Return the content of an open file."""
    content = b""
    while more := os.pread(file, os.fstat(file).st_size - len(content), len(content)):
        content += more
    return content


def _lines_in(content: bytes) -> list[bytes]:
    """Return the complete lines of a file, without a torn last one."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _sound_among(lines: list[bytes]) -> dict[int, bytes]:
    """Return the sound records, by their line numbers from 1.

    If steps do not increase, some were damaged; as few as possible are left out.
    """
    numbers: list[int] = []
    steps: list[int] = []
    for number, line in enumerate(lines, 1):
        step = _step_of(line)
        if step is not None:
            numbers.append(number)
            steps.append(step)
    sound_numbers = [numbers[index] for index in _longest_rise(steps)]
    return {number: lines[number - 1] for number in sound_numbers}


def _longest_rise(steps: list[int]) -> list[int]:
    """Return the indices of a longest increasing subsequence, found by patience sorting in O(n log n)."""
    # for each length, the lowest step in which a rise of that length can end
    last_steps: list[int] = []
    rises: list[Any] = []  # for each length, (index of its last step, the rise before it)
    for index, step in enumerate(steps):
        length = bisect.bisect_left(last_steps, step)
        rise_before = rises[length - 1] if length else None
        last_steps[length : length + 1] = [step]
        rises[length : length + 1] = [(index, rise_before)]
    indices = []
    rise = rises[-1] if rises else None
    while rise:
        index, rise = rise
        indices.append(index)
    return indices[::-1]


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None if the line is not a record."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(step, int):
        return step
    return None
