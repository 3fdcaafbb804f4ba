"""A log file for each rank, and the chief's records on the screen."""

import errno
import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from hpcdist.cluster.environment import logs_json, read_environment
from hpcdist.errors import CheckpointError, log
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World

#: Longest wait for a traceback to be in a file.
_WRITE_S = 1.0


def log_to(directory: str | os.PathLike[str], level: int = logging.INFO) -> Path:
    """Write this rank's log records to a separate file; the screen shows the chief's records alone.

    That concerns the root logger of Python's logging, whose handlers are replaced; the prints of a program go where the
    launcher sends them. A restart appends. A line has time, level, role, rank, host and, in training, step:

    2026-11-26T00:25:01.123 INFO [worker:3 r3/16 n7 step 40] mine: loss 0.25

    With HPCDIST_LOG=json each is an object of JSON. `hpcdist logs RUN_DIR` merges the files in RUN_DIR/logs.

    Collective over all ranks.

    Args:
        directory: folder of the files, such as `rank-00003.log`; made if it is missing.
        level: lowest level of the records that are written, to files and screen.

    Returns:
        This rank's file.

    Raises:
        CheckpointError: if a file cannot be written; on all ranks. ConfigurationError: for another HPCDIST_LOG.
    """
    world = make_world()
    path = log_file(Path(directory), world)
    with world.agreed(world.comm):
        formatter = _make_formatter(world)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            open_log(path).close()  # here rather than at the first record
            handlers: list[logging.Handler] = [_FileHandler(path)]
        except OSError as error:
            raise CheckpointError(
                f"log_to: expected to write {path}, got {error.strerror} on {world}; choose a folder that every rank "
                f"can write."
            ) from None
    if world.is_chief:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(handlers=handlers, level=level, force=True)
    return path


def log_file(directory: Path, world: World) -> Path:
    """Return this rank's log file in a folder."""
    return directory / f"rank-{world.comm.rank:05d}.log"


def open_log(path: Path) -> TextIO:
    """Open a log file at its end, or make it; never through a symbolic link of its name, which may be a trap.

    Raises:
        OSError: if it is a link or no regular file, or the file system refuses.
    """

    def open_end(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no regular file", name)
        return descriptor

    return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=open_end)


class _FileHandler(logging.FileHandler):
    """Appends records to a log file that is no link."""

    def _open(self) -> Any:
        return open_log(Path(self.baseFilename))


class FailureLog:
    """Appends the tracebacks of this rank's uncaught exceptions to its log file: the screen shows only one rank's.

    The file is the one of `log_to`, in the format that HPCDIST_LOG asks for. Not collective.

    Args:
        path: path of the file. Its folder is created if the run folder exists.
        world: world of this rank.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path = path.absolute()  # the program may change its folder
        self._formatter = _make_formatter(world)

    def write(self, title: str, report: str) -> None:
        """Append a traceback, in a thread, with a wait of at most a second: a slow disk must not keep a job alive."""
        message = f"{title}\n{report.rstrip()}"
        record = logging.LogRecord(
            name="hpcdist",
            level=logging.ERROR,
            pathname="",
            lineno=0,
            msg="%s",
            args=(message,),
            exc_info=None,
        )
        line = self._formatter.format(record)
        writer = threading.Thread(target=self._append, args=(f"{line}\n",), daemon=True)
        writer.start()
        writer.join(_WRITE_S)

    def _append(self, text: str) -> None:
        try:
            if self._path.parents[1].is_dir():
                self._path.parent.mkdir(exist_ok=True)
                with open_log(self._path) as file:
                    file.write(text)
        except OSError as error:
            log(f"expected to write a traceback to {self._path}, got {error.strerror}; it is lost")


def _make_formatter(world: World) -> "_Lines":
    """Return the formatter that HPCDIST_LOG asks for."""
    if logs_json(read_environment()):
        return _JSONLines(world)
    return _Lines(world)


class _Lines(logging.Formatter):
    """Lines for people.

    Args:
        world: world of this rank, which knows its step.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._host = MPI.Get_processor_name()
        self._role = f"{world.task.type}:{world.task.index}"

    def format(self, record: logging.LogRecord) -> str:
        world = self._world
        label = f"{self._role} r{world.rank}/{world.size} {self._host}"
        if world.step is not None:
            label += f" step {world.step}"
        head = f"{_time(record)} {record.levelname} [{label}] {record.name}"
        return f"{head}: {self._text(record)}"

    def _text(self, record: logging.LogRecord) -> str:
        """Return the message, and the traceback behind it if there is one."""
        parts = [record.getMessage()]
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return "\n".join(parts)


class _JSONLines(_Lines):
    """Lines for programs."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": _time(record),
            "level": record.levelname,
            "role": self._role,
            "rank": self._world.rank,
            "size": self._world.size,
            "host": self._host,
            "step": self._world.step,
            "name": record.name,
            "message": self._text(record),
        }
        return json.dumps(facts)


def _time(record: logging.LogRecord) -> str:
    """Return the time of a record, in local time, as text that sorts."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
    milliseconds = int(record.msecs)
    return f"{seconds}.{milliseconds:03d}"
