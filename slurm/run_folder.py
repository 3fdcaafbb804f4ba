"""Files of a batch job in the run folder: its marker, the program's decision, launches that ended early."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Launches in a row that may end before their program has begun.
MAX_EARLY_DEATHS = 3


def _open_no_link(path: str, flags: int) -> int:
    """Open a file for `open`, but not through a symbolic link, which others may have made."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _requeue_note(n_restarts: int) -> str:
    """Return the line of a marker about a start that this program has requeued."""
    return f"requeued after restart {n_restarts}"


class Decision(NamedTuple):
    """The content of `decision.json`, and a stamp that changes whenever it is written: the content may repeat."""

    verdict: str
    reason: str
    job: str
    stamp: tuple[int, int, str]


class UnreadableError(Exception):
    """The run folder could not be read for a minute."""


class RunFolder:
    """The run folder of this job.

    A file server may be unreachable for a while, and that may have ended the program: reading is repeated for a minute.

    Args:
        environ: variables of the job. RUN_DIR is the folder; READ_PAUSES_S are the pauses between tries, for tests.
        job: id of the job.
    """

    def __init__(self, environ: Mapping[str, str], job: str) -> None:
        run_dir = environ["RUN_DIR"]
        self.path = os.path.join(os.getcwd(), run_dir)
        self.marker = os.path.join(self.path, "jobs", job)
        self._early_deaths = os.path.join(self.path, "early-deaths")
        pauses = environ.get("READ_PAUSES_S", "2 4 8 16 32").split()
        self._pauses_s = [float(pause) for pause in pauses]

    # -- the marker: the starts of this job ------------------------------------------------------------------------

    def make_marker(self) -> None:
        """Make the folder, and the job's marker in it, at its first start."""
        folder = os.path.dirname(self.marker)
        os.makedirs(folder, exist_ok=True)
        with open(self.marker, "a", opener=_open_no_link):
            pass

    def has_marker(self) -> bool:
        """Return whether the marker exists. If a job that restarts has none, this node does not see the folder."""
        for pause_s in [*self._pauses_s, 0]:
            if os.path.exists(self.marker):
                return True
            time.sleep(pause_s)
        return False

    def note_requeue(self, n_restarts: int) -> None:
        """Note that this program has requeued a start of the job, so that the start counts if it made no progress."""
        note = _requeue_note(n_restarts)
        with contextlib.suppress(OSError), open(self.marker, "a", opener=_open_no_link) as file:
            file.write(f"{note}\n")

    def was_requeued(self, n_restarts: int) -> bool:
        """Return whether this program, and not the batch system itself, has requeued a start of the job."""
        with open(self.marker) as file:
            notes = file.read().splitlines()
        return _requeue_note(n_restarts) in notes

    # -- the decision ----------------------------------------------------------------------------------------------

    def decision(self) -> Decision | None:
        """Return the decision; None if there is none.

        Raises:
            UnreadableError: if the folder or the decision cannot be read.
        """
        for pause_s in [*self._pauses_s, None]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if "decision.json" not in os.listdir(self.path):
                    return None
                return self._read()
            if pause_s is not None:
                time.sleep(pause_s)
        raise UnreadableError

    def _read(self) -> Decision:
        """Return the content of `decision.json`."""
        path = os.path.join(self.path, "decision.json")
        # on NFS, opening the file refreshes the answer of `fstat`
        with open(path) as file:
            text = file.read()
            status = os.fstat(file.fileno())
        content: dict[str, Any] = json.loads(text)
        verdict = str(content["decision"])
        reason = str(content["reason"])
        job = str(content["job"])
        stamp = (status.st_ino, status.st_mtime_ns, text)
        return Decision(verdict, reason, job, stamp)

    # -- launches that ended before their program had begun --------------------------------------------------------

    def may_repeat(self, note: str) -> bool:
        """Record a launch that ended early; return whether to repeat it.

        After too many the count starts anew, so that a job that is submitted again may repeat as many.
        """
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S")
        try:
            with open(self._early_deaths, "a+", opener=_open_no_link) as file:
                file.write(f"{time_text} {note}\n")
                file.seek(0)
                deaths = file.readlines()
        except OSError:
            return False
        n_deaths = len(deaths)
        if n_deaths > MAX_EARLY_DEATHS:
            self.forget_early_deaths()
        return n_deaths <= MAX_EARLY_DEATHS

    def forget_early_deaths(self) -> None:
        """Start to count anew, as a program has begun."""
        with contextlib.suppress(OSError):
            os.remove(self._early_deaths)
