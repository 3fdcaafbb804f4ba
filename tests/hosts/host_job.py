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
        self._before = hosts.bytes_sent()
        self.started = time.monotonic()
        self._files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())
        self._last_printed: tuple[str, str] | None = None
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    def printed(self) -> tuple[str, str]:
        """Return what the job has printed so far: stdout, stderr."""
        return self._last_printed or (self._read(0), self._read(1))

    def _read(self, number: int) -> str:
        """Return a file's text by pread: the job writes where the file's one position is."""
        descriptor = self._files[number].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

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
        self._close()
        sent = [now - before for now, before in zip(self._hosts.bytes_sent(), self._before, strict=True)]
        return Outcome(code, *self.printed(), time.monotonic() - self.started, sent)

    def kill(self) -> None:
        """End the launcher and all that runs in the hosts."""
        self._hosts.kill_processes()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._close()

    def _close(self) -> None:
        self._last_printed = self.printed()
        for file in self._files:
            file.close()
