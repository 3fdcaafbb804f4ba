"""A job that runs in virtual hosts, and what became of it."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass
class Outcome:
    """What became of a job: exit code, what it printed, seconds, and bytes each host sent over its link meanwhile."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    bytes_sent: list[int]

    @property
    def result(self) -> dict:
        """The JSON object that the job printed last, on a line of its own."""
        lines = [line for line in self.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise ValueError(f"job: expected a JSON line, got none (exit code {self.code})\n{self.stdout}{self.stderr}")
        return json.loads(lines[-1])


class RunsJobs(Protocol):
    """What a job needs of the hosts it runs in."""

    def bytes_sent(self) -> list[int]: ...

    def kill_processes(self) -> None: ...


class Job:
    """A running launcher and, in the hosts, what it started."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], hosts: "RunsJobs") -> None:
        self._hosts = hosts
        self._before, self.started = hosts.bytes_sent(), time.monotonic()
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    def printed(self) -> tuple[str, str]:
        """Return what the job has printed so far: stdout, stderr."""
        texts = []
        for file in (self._stdout, self._stderr):
            size = os.fstat(file.fileno()).st_size
            # not seek and read: the job writes where this file's one position is
            texts.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return texts[0], texts[1]

    def wait(self, timeout_s: float) -> Outcome:
        """Return the outcome.

        Raises:
            TimeoutError: when the job has not ended in time; it is ended, and its output is in the message.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the job did not end within {timeout_s} s:\n{''.join(self.printed())}") from None
        sent = [now - before for now, before in zip(self._hosts.bytes_sent(), self._before, strict=True)]
        return Outcome(code, *self.printed(), time.monotonic() - self.started, sent)

    def kill(self) -> None:
        """End the launcher and all that runs in the hosts."""
        self._hosts.kill_processes()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
