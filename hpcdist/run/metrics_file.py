"""MetricsFile: one JSON line per record, no step duplicated or missing, however attempts end.

`write` puts a line into a queue, and a thread appends it to the file, so that a file server that hangs does not stop
training. Lines leave the queue once they are in the file: if an append fails, the next one begins with them. All that
is done to the file is done by that thread.
"""

import atexit
import bisect
import contextlib
import functools
import itertools
import json
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.background import BackgroundThread
from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import CheckpointDamaged, CheckpointError, UsageError
from hpcdist.forks import make_lock
from hpcdist.retries import Retries
from hpcdist.runtime.process import make_world, send_heartbeat
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: Records that are kept in memory while they cannot be written.
MAX_WAITING = 100_000
_Result = TypeVar("_Result")


class MetricsFile:
    """Records of a job, each with its step, in the order of steps.

    Pass it to the Checkpoint too: a restart then keeps the records that existed at the save, and training writes the
    later ones again. Otherwise the first record of an attempt drops the old records of its step and of later steps,
    after a copy of the file was made.

    A line damaged on disk does not affect others: a new attempt moves it to NAME.bad and logs its number.

    Not collective: all ranks call it, only the chief writes.

    Args:
        path: path of the file; its folder is created if missing.
        world: the world whose chief writes; None for the world of the process.
        disk: file system calls, which tests replace.

    Attributes:
        path: absolute path of the file.
        timeout_s: time limit of the world, in seconds.
        retries: the last failure to write, and the time of the next try. Meanwhile records are kept in memory, and
            training and its checkpoints continue.

    Raises:
        CheckpointError: from `flush` alone, if the file cannot be written; on the chief.
    """

    def __init__(
        self, path: str | os.PathLike[str], world: World | None = None, *, disk: Disk | None = None
    ) -> None:
        self.path = Path(path).absolute()  # the program may change its folder
        self._disk = disk or Disk()
        world = world or make_world()
        self._is_writer = world.is_chief
        self.timeout_s = world.timeout_s
        self._n_records = 0
        self._last_step = -1
        self._pid = os.getpid()
        self._thread = BackgroundThread("hpcdist-metrics")
        self._lock = make_lock()
        # with the lock
        self._queue: list[tuple[int, bytes]] = []
        self._appending: Future[None] | None = None
        self._will_append = False
        self._n_removed = 0
        self._resumed_step: int | None = None
        # in the thread
        self._file: int | None = None
        self._close: Callable[[], object] = lambda: None
        self._step_in_file = -1
        self._is_cut = False
        self._is_earlier_run_kept = False
        self._is_durable = True
        self.retries = Retries(f"metrics: writing records to {self.path}")
        self._unanswered: Future[Any] | None = None
        # for records that hooks of the program write, which run before this one
        if self._is_writer:
            atexit.register(_flush_if_alive, weakref.ref(self))

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
            line = (json.dumps({"step": step, **values}) + "\n").encode()
            with self._lock:
                self._queue.append((step, line))
                if len(self._queue) > MAX_WAITING:
                    self._drop_oldest()
                if self.retries.is_due:
                    self._start_to_append()
        self._n_records = self._n_records + 1
        self._last_step = step

    def _drop_oldest(self) -> None:
        """Forget half of the records that cannot be written. The caller holds the lock."""
        n_dropped = len(self._queue) // 2
        del self._queue[:n_dropped]
        self._n_removed += n_dropped
        logger.warning("metrics: %d records that %s did not take are lost.", n_dropped, self.path)

    def _start_to_append(self) -> None:
        """Let the thread append the queued records, unless it will anyway. The caller holds the lock."""
        if not self._will_append:
            # also keeps this object alive until all is in the file
            atexit.register(self.flush_at_exit)
            self._will_append = True
            self._appending = self._thread.submit(functools.partial(self._try, self._append_queued))

    def flush(self) -> None:
        """Wait until the records so far are in the file. Not collective, and free on other ranks than the chief.

        Raises:
            CheckpointError: if they cannot be written, or are not within the timeout; on the chief.
        """
        if self._is_writer:
            self._require(self._wait_for(self._append_queued))
            self.retries.succeeded()

    def is_written(self, for_s: float) -> bool:
        """Wait up to `for_s` seconds; return whether all records so far are in the file, as on ranks that do not write.

        Raises nothing. While writing fails, nothing waits for it: it counts as written.
        """
        if self.retries.failure is not None:
            return True
        with self._lock:
            appending = self._appending
        if appending is not None:
            wait([appending], for_s)
        with self._lock:
            return not self._queue and not self._will_append

    def make_durable(self, limit_s: float | None = None) -> None:
        """Make the records durable: a checkpoint that counts them relies on it. From any thread; chief only.

        Where that fails, it is logged, and the checkpoint is written: a restart may then miss records.

        Args:
            limit_s: longest wait, in seconds; default: the time limit of the world.
        """
        if self._is_writer:
            self._attempt(self._sync, limit_s)

    def claim(self) -> None:
        """Replace the file by this attempt's own copy, with the complete records of the old one.

        A process left over from an earlier attempt still has the old file open, so its writes have no effect. A
        CheckpointManager calls this when it replaces earlier managers; otherwise the first record does. Where it fails,
        that is logged, and tried again with the next records.
        """
        if self._is_writer:
            self._attempt(self._append_queued)
            self._attempt(functools.partial(durable.patiently, self._claim))

    def _attempt(self, act: Callable[[], _Result], limit_s: float | None = None) -> _Result | None:
        """Return act() of the thread; None if it fails, which is logged, or is not done within the limit."""
        limit_s = limit_s or self.timeout_s
        if self._unanswered is not None and not self._unanswered.done():
            return None  # the file system hangs, and was waited for once
        try_to_act = functools.partial(self._try, act)
        called: Future[_Result | None] = self._thread.submit(try_to_act)
        wait([called], limit_s)
        if called.done():
            return called.result()
        self._unanswered = called
        self.retries.failed(f"no answer for {limit_s:g} s")
        return None

    def _try(self, act: Callable[[], _Result]) -> _Result | None:
        """Return act(); None if the file system refuses, which is logged. In the thread."""
        try:
            result = act()
        except OSError as error:
            self.retries.failed(error)
            return None
        self.retries.succeeded()
        return result

    def _wait_for(self, act: Callable[[], _Result]) -> "Future[_Result]":
        """Let the thread call `act`, and wait at most for the timeout."""
        called: Future[_Result] = self._thread.submit(act)
        wait([called], self.timeout_s)
        return called

    def _require(self, called: "Future[_Result]") -> _Result:
        if not called.done():
            raise CheckpointError(
                f"metrics: expected {self.path} to take the records within {self.timeout_s:g} s, got no answer; check "
                f"the file system (HPCDIST_TIMEOUT_S sets the limit)."
            )
        try:
            return called.result()
        except OSError as error:
            raise CheckpointError(
                f"metrics: expected to write {self.path}, got {error.strerror}; free space or choose another run "
                f"folder."
            ) from None

    def flush_at_exit(self) -> None:
        """Write the queued records. A failure is logged only: the exit code of the job says how training ended."""
        if os.getpid() != self._pid:  # a forked child does not have the thread
            return
        with self._lock:
            is_written = not self._queue and not self._will_append
        if is_written or (self._unanswered is not None and not self._unanswered.done()):
            return
        until = time.monotonic() + self.timeout_s
        last = self._thread.submit(functools.partial(self._try, self._append_queued))
        while wait([last], 1.0).not_done and time.monotonic() < until:
            send_heartbeat()
        with self._lock:
            n_lost = len(self._queue)
        if n_lost:
            logger.warning("metrics: %d records that %s did not take are lost.", n_lost, self.path)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _append_queued(self) -> None:
        """Append the lines that are queued now, all or none."""
        with self._lock:
            self._will_append = False
            lines = self._queue[:]
            n_removed_before = self._n_removed
            resumed_step = self._resumed_step
        if resumed_step is not None:
            self._step_in_file = resumed_step
            self._is_cut = False
        if lines:
            durable.patiently(functools.partial(self._append, lines))
        with self._lock:
            if self._resumed_step == resumed_step and (lines or resumed_step is None):
                self._resumed_step = None
            # of these lines, the first ones or the last
            n_removed = self._n_removed - n_removed_before
            del self._queue[: max(0, len(lines) - n_removed)]
            if not self._queue:
                atexit.unregister(self.flush_at_exit)

    def _append(self, lines: list[tuple[int, bytes]]) -> None:
        file = self._claimed_file()
        first_step = lines[0][0]
        last_step = lines[-1][0]
        if not self._is_cut:
            if self._step_in_file < 0 and not self._is_earlier_run_kept:
                self._keep_earlier_run(file, first_step)
                self._is_earlier_run_kept = True
            self._cut(file, first_step - 1)
        self._is_durable = self._is_cut = False
        try:
            content = b"".join(line for _, line in lines)
            unwritten = memoryview(content)
            end = os.fstat(file).st_size
            while unwritten:
                done = self._disk.write(file, unwritten, end)
                unwritten = unwritten[done:]
                end = end + done
        except OSError:
            # the first error is raised; the next append cuts again
            with contextlib.suppress(OSError):
                self._cut(file, first_step - 1)
            raise
        self._is_cut = True
        self._step_in_file = last_step

    def _sync(self) -> None:
        self._append_queued()
        if self._file is None and not self._is_durable:  # after a sync that failed
            durable.patiently(self._claim)
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

    def _claim(self) -> int:
        """Replace the file by this attempt's own copy without damaged lines, and return it, open."""
        durable.make_folders(self._disk, self.path.parent)
        durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
        lines = _lines_in(_content_of(self.path))
        sound = _sound_among(lines)
        damaged = {number: line for number, line in enumerate(lines, 1) if number not in sound}
        if damaged:  # set aside before the file is replaced without them
            self._set_aside(damaged)
        self._replace(self.path, b"".join(sound.values()))
        self._forget_file()
        self._file = self._disk.open_end(self.path)
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
        aside = self.path.with_name(f"{self.path.name}.bad")
        before = _content_of(aside)
        lines = b"".join(damaged.values())
        if not before.endswith(lines):  # else set aside by a try that failed later
            self._replace(aside, before + lines)
            logger.warning(
                "metrics: expected records in the order of steps in %s, got %d damaged, at line %s; moved them to %s.",
                self.path,
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
            backup_path = self.path.with_name(f"{self.path.name}.{now}")
            self._replace(backup_path, content)
            logger.warning(
                "metrics: %s continues at step %d, but no checkpoint of its %d later records was restored; it was "
                "copied to %s.",
                self.path,
                step,
                n_going,
                backup_path,
            )

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
        n_kept = self._attempt(functools.partial(durable.patiently, self._cut_after_restore))
        if n_kept is not None and n_kept < self._n_records:
            logger.warning(
                "metrics: expected %d records in %s, as when the checkpoint was saved, got %d; the job continues "
                "without the others.",
                self._n_records,
                self.path,
                n_kept,
            )

    def _cut_after_restore(self) -> int:
        return self._cut(self._claimed_file(), self._last_step)

    def resume(self, state: dict[str, Any]) -> None:
        """Resume from a state of any run: the next record drops the old records of its step and of later steps.

        Raises:
            CheckpointDamaged: if the state is not one that `state_dict` returns.
        """
        self._n_records, self._last_step = _counts_in(state, self.path)
        if self._is_writer:
            with self._lock:  # records of later steps, which are undone now, must not come
                kept_records = [record for record in self._queue if record[0] <= self._last_step]
                self._n_removed += len(self._queue) - len(kept_records)
                self._queue = kept_records
                self._resumed_step = self._last_step
            self._attempt(self._append_queued)


def _flush_if_alive(file: "weakref.ref[MetricsFile]") -> None:
    live_file = file()
    if live_file is not None:
        live_file.flush_at_exit()


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
