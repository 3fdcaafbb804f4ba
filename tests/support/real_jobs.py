"""Real jobs: started in sessions of their own with a time limit, and found again by a mark in their environment."""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcdist.checkpoint.store import Store

PYTHON = Path(sys.executable)
#: The launcher beside the interpreter, or a site's own: then MPI4PY_LIBMPI names its library.
MPIRUN = Path(os.environ.get("TEST_MPIRUN", PYTHON.parent / "mpirun"))
_MARK = "HPC_TEST_JOB"


@dataclass
class Outcome:
    """What became of a job."""

    code: int
    output: str
    seconds: float


class Job:
    """A running job: a launcher and everything that descends from it."""

    def __init__(self, command, environ, folder):
        self.mark = uuid.uuid4().hex
        self.started = time.monotonic()
        self.log = folder / f"job-{self.mark}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env={**environ, _MARK: self.mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def processes(self):
        """Return the pids of all processes of the job that are alive."""
        needle = f"{_MARK}={self.mark}".encode()
        pids = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and needle in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:  # it ended while we looked
                continue
        return pids

    def ranks(self):
        """Return the pids of the Python processes of the job."""
        return [
            pid for pid in self.processes() if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        ]

    def pid_of(self, rank):
        """Return the pid of a rank, as MPICH's launcher numbers them."""
        for pid in self.ranks():
            if f"PMI_RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(f"no rank {rank}")

    def wait_until(self, is_true, limit_s=60):
        """Wait for something while the job runs; it fails the test to end, or not to become true in time."""
        deadline = time.monotonic() + limit_s
        while not is_true():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.01)

    def wait_for_line(self, text):
        """Wait until the job has printed a text."""
        self.wait_until(lambda: text in self.log.read_text())

    def kill(self, sign=signal.SIGKILL):
        """Send a signal to every process of the job at once, launcher included."""
        for pid in self.processes():
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    def wait(self, timeout_s):
        """Return the outcome; a job that does not end in time is ended and fails the test."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the job did not end within {timeout_s} s:\n{self.log.read_text()[-4000:]}")
        return Outcome(code, self.log.read_text(), time.monotonic() - self.started)


def final_state(run_dir):
    """Return everything that training left: arrays and state of the last checkpoint, and the metrics."""
    checkpoint = Store(run_dir / "checkpoints").read_latest()
    arrays = {array.name: array.values.tobytes() for array in checkpoint.arrays}
    return checkpoint.index.step, arrays, checkpoint.index.state, (run_dir / "metrics.jsonl").read_text()
