"""What a batch job keeps and reads in the run folder: its marker, the program's decision, launches that ended early."""

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
        environ: RUN_DIR is the folder; READ_PAUSES_S are the pauses between tries, for tests.
        job: the job's id.
    """

    def __init__(self, environ: Mapping[str, str], job: str) -> None:
        self.path = os.path.join(os.getcwd(), environ["RUN_DIR"])
        self.marker = os.path.join(self.path, "jobs", job)
        self._early_deaths = os.path.join(self.path, "early-deaths")
        self._pauses_s = [
            float(pause) for pause in environ.get("READ_PAUSES_S", "2 4 8 16 32").split()
        ]

    # -- the marker: which starts of this job there have been ------------------------------------------------------

    def make_marker(self) -> None:
        """Make the folder, and the job's marker in it, at its first start."""
        os.makedirs(os.path.dirname(self.marker), exist_ok=True)
        with open(self.marker, "a", opener=_open_no_link):
            pass

    def has_marker(self) -> bool:
        """Return whether the marker is there. If a job that restarts has none, this node does not see the folder."""
        for pause_s in [*self._pauses_s, 0]:
            if os.path.exists(self.marker):
                return True
            time.sleep(pause_s)
        return False

    def note_requeue(self, n_restarts: int) -> None:
        """Note that this program has a start of the job requeued, so that it counts if it made no progress."""
        with contextlib.suppress(OSError), open(self.marker, "a", opener=_open_no_link) as file:
            file.write(f"requeued after restart {n_restarts}\n")

    def was_requeued(self, n_restarts: int) -> bool:
        """Return whether this program, not the batch system itself, had a start of the job requeued."""
        with open(self.marker) as file:
            return f"requeued after restart {n_restarts}" in file.read().splitlines()

    # -- the decision ----------------------------------------------------------------------------------------------

    def decision(self) -> Decision | None:
        """Return the decision; None if there is none.

        Raises:
            UnreadableError: if it cannot be known.
        """
        for pause_s in [*self._pauses_s, None]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return self._read() if "decision.json" in os.listdir(self.path) else None
            if pause_s is not None:
                time.sleep(pause_s)
        raise UnreadableError

    def _read(self) -> Decision:
        # on NFS, opening it refreshes what `fstat` says
        with open(os.path.join(self.path, "decision.json")) as file:
            text = file.read()
            status = os.fstat(file.fileno())
        content: dict[str, Any] = json.loads(text)
        stamp = (status.st_ino, status.st_mtime_ns, text)
        return Decision(
            str(content["decision"]), str(content["reason"]), str(content["job"]), stamp
        )

    # -- launches that ended before their program had begun --------------------------------------------------------

    def may_repeat(self, note: str) -> bool:
        """Record one more such launch; return whether to repeat it. After too many, submitting again permits more."""
        try:
            with open(self._early_deaths, "a+", opener=_open_no_link) as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {note}\n")
                file.seek(0)
                n_deaths = len(file.readlines())
        except OSError:
            return False
        if n_deaths > MAX_EARLY_DEATHS:
            self.forget_early_deaths()
        return n_deaths <= MAX_EARLY_DEATHS

    def forget_early_deaths(self) -> None:
        """Start to count anew, as a program has begun."""
        with contextlib.suppress(OSError):
            os.remove(self._early_deaths)
