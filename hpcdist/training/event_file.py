"""Event files for TensorBoard: read, and written at once and by no thread, so that errors come where they are handled.

The packages tensorboard and torch define the record format and the events.
"""

import contextlib
import importlib.util
import secrets
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.retries import Retries

#: Number of waiting events at which they are written.
_N_WRITTEN = 100
#: Most events that are kept while they cannot be written: the oldest are dropped.
_N_KEPT = 100_000


class Scalar(NamedTuple):
    """A number of a curve: its tag, its value, its step, and the time, in seconds since 1970."""

    tag: str
    value: float
    step: int
    time_s: float


class EventFile:
    """One event file, new in its folder.

    Args:
        folder: folder of the file; made if it is missing.
        purge_step: first step whose events in older files are hidden from readers. None hides no events.

    Raises:
        ImportError: without the package tensorboard.
        OSError: here and from all methods, if the file system refuses.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._make_event = Event
        folder.mkdir(parents=True, exist_ok=True)
        now_ns = time.time_ns()
        # readers take the files of a folder in the order of their names
        seconds, nanoseconds = divmod(now_ns, 10**9)
        token = secrets.token_hex(8)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{token}"
        self._file = open(folder / name, "xb")  # noqa: SIM115  closed by `close`
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self._file.flush()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def write(self, scalar: Scalar) -> None:
        """Write a number."""
        from torch.utils.tensorboard.summary import scalar as summary_of

        summary = summary_of(scalar.tag, scalar.value)  # type: ignore[no-untyped-call]
        self._write(self._make_event(wall_time=scalar.time_s, step=scalar.step, summary=summary))

    def flush(self) -> None:
        """Pass the written events to the file system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventWriter:
    """Writes numbers for TensorBoard beside training: numbers that cannot be written now are kept, and tried later.

    Waiting numbers are also written when this object is dropped, and when the program ends.

    Args:
        folder: folder of the event files; made at the first number.
        purge_step: first step whose events in older files are hidden from readers.
        retries: failures to write, and when the next try is due. Writers may share it.

    Raises:
        ImportError: without the package tensorboard.
    """

    def __init__(
        self,
        folder: Path,
        purge_step: int,
        retries: Retries,
    ) -> None:
        import tensorboard  # noqa: F401  whether it is there

        self._events = _Events(folder, purge_step, retries)
        weakref.finalize(self, self._events.close)

    def add_scalar(
        self,
        tag: str,
        value: float,
        step: int,
    ) -> None:
        """Add a number to a curve."""
        self._events.add(Scalar(tag, float(value), step, time.time()))

    def flush(self) -> None:
        """Write the waiting numbers, unless that has just failed."""
        self._events.flush()

    def close(self) -> None:
        """Write the waiting numbers, a last time, and close the file."""
        self._events.close()


class _Events:
    """The waiting numbers of a writer, and the file in progress.

    Args:
        folder: folder of the event files.
        purge_step: first step whose events in older files are hidden from readers.
        retries: failures to write, and when the next try is due.
    """

    def __init__(
        self,
        folder: Path,
        purge_step: int,
        retries: Retries,
    ) -> None:
        self._retries = retries
        self._folder = folder
        self._purge_step: int | None = purge_step
        self._file: EventFile | None = None
        self._waiting: list[Scalar] = []

    def add(self, scalar: Scalar) -> None:
        """Add a number."""
        self._waiting.append(scalar)
        if len(self._waiting) >= _N_WRITTEN:
            self.flush()

    def flush(self) -> None:
        """Write the waiting numbers, unless that has just failed."""
        if self._waiting and self._retries.is_due:
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            if self._file is None:
                self._file = EventFile(self._folder, self._purge_step)
                self._purge_step = None
            for scalar in self._waiting:
                self._file.write(scalar)
            self._file.flush()
        except OSError as error:
            self._abandon()
            del self._waiting[:-_N_KEPT]
            self._retries.failed(error)
        else:
            self._waiting = []
            self._retries.succeeded()

    def _abandon(self) -> None:
        """Leave a file that may end in a torn record, where readers stop: the next try makes a new one."""
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):  # the numbers in it are written again
                file.close()

    def close(self) -> None:
        """Write the waiting numbers, a last time, and close the file."""
        if self._waiting:
            self._try_to_write()
        self._abandon()


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of the numbers in the event files of a folder, by tag, as TensorBoard shows them.

    A file that is cut off counts up to its cut. Without the package tensorboard there are no numbers.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:
        return {}
    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    with contextlib.suppress(Exception):
        accumulator.Reload()
    scalars: dict[str, list[tuple[int, float]]] = {}
    for tag in accumulator.Tags()[SCALARS]:
        scalars[tag] = [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return scalars


def require_tensorboard() -> None:
    """Raise ConfigurationError without the package tensorboard."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            "TensorBoard: expected the package tensorboard, got none; pip install tensorboard."
        )


def open_writer(
    folder: Path,
    step: int,
    is_needed: bool = True,
    retries: Retries | None = None,
) -> EventWriter | None:
    """Return a writer of events in a folder, from a step on.

    Args:
        folder: folder of the event files.
        step: first step whose events in older files are hidden from readers.
        is_needed: whether a missing package is an error; else None is returned.
        retries: failures to write; see `EventWriter`. Default: a new one.

    Raises:
        ConfigurationError: if there is no such package.
    """
    if is_needed:
        require_tensorboard()
    if retries is None:
        retries = Retries(f"TensorBoard: writing events in {folder}")
    try:
        return EventWriter(folder, step, retries)
    except ImportError:
        if is_needed:
            raise
        return None
