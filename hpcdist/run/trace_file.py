"""TraceFile: a file of JSON records, written by a background thread; records are lost rather than waited for."""

import contextlib
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
from hpcdist.run.append_log import AppendLog, Line

logger = logging.getLogger("hpcdist")

#: Records that wait for a disk that hangs.
MAX_WAITING = 20_000


class TraceFile:
    """Appends records to a file, in a background thread. A failure is logged once, and ends the recording.

    Nothing waits for the file: records that cannot be written are lost, and training continues. A rank that does not
    see the run folder records nothing: only the chief needs the folder.

    Args:
        path: path of the file, two folders below the run folder, such as `RUN_DIR/trace/0002/rank-00003.jsonl`; those
            two folders are made.
        every_s: least seconds between two appends.
        first_s: seconds before the first append, so that ranks do not all write at once.
        disk: file system calls, which tests replace.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        every_s: float,
        first_s: float = 0.0,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path.absolute()
        self._every_s = every_s
        self._disk = disk or Disk()
        self._clock = clock
        self._next_s = clock() + first_s
        self._file: int | None = None
        self._is_over = False
        self._log = AppendLog(
            "trace", self._path, self._append, MAX_WAITING, limit_s=0.0, is_kept_at_exit=False
        )

    def add(self, record: dict[str, Any]) -> None:
        """Queue a record for the thread."""
        if self._is_over:
            return
        text = json.dumps(record, separators=(",", ":")) + "\n"
        is_due = self._clock() >= self._next_s
        if is_due:
            self._next_s = self._clock() + self._every_s
        self._log.add(Line(text.encode()), may_start=is_due)

    def flush(self, for_s: float) -> None:
        """Write the queued records: wait up to `for_s` seconds for the last append, and `for_s` for these records."""
        if not self._log.wait(for_s):
            self._log.start()
            self._log.wait(for_s)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _append(self, lines: Sequence[Line], _: int | None) -> None:
        if self._is_over or not self._path.parents[2].is_dir():
            self._is_over = True
            return
        content = b"".join(line.content for line in lines)
        try:
            if self._file is None:
                self._file = self._open()
            file = self._file
            end = os.fstat(file).st_size
            durable.patiently(lambda: durable.write_all(self._disk, file, content, end))
        except OSError as error:
            self._is_over = True
            logger.warning(
                "trace: expected to write %s, got %s; training continues, and no more steps are recorded in this file.",
                self._path,
                error.strerror,
            )

    def _open(self) -> int:
        """Open the file. No name is made durable: records may be lost."""
        for folder in (self._path.parents[1], self._path.parent):
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(folder)
        with contextlib.suppress(FileExistsError):  # an earlier handler of this attempt has made it
            self._disk.make_new(self._path)
        file = self._disk.open_end(self._path)
        weakref.finalize(self, os.close, file).atexit = False
        return file
