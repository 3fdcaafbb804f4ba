"""Fixtures for real jobs."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from real_jobs import MPIRUN, PYTHON, Job
from requirements import skip_unless_ci


@pytest.fixture
def job_environ(clean_environ, tmp_path):
    """Return an environment for jobs: one thread per rank, and a folder of their own for temporary files."""
    (tmp_path / "tmp").mkdir()
    return {**clean_environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}


@pytest.fixture
def start(job_environ, tmp_path):
    """Return start(n_ranks, *arguments of python, environ): a job that is ended with the test at the latest."""
    jobs = []

    def start(n_ranks, *arguments, environ=None, command=None):
        command = command or [MPIRUN, "-n", n_ranks, PYTHON, *arguments]
        jobs.append(Job(command, {**job_environ, **(environ or {})}, tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def nothing_left(tmp_path):
    """Return a check that a job left no process, no shared memory and no temporary file."""
    before = set(os.listdir("/dev/shm"))

    def check(job):
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and (job.processes() or left_in_memory(before)):
            time.sleep(0.1)
        assert job.processes() == []
        assert left_in_memory(before) == set()
        of_torch = ("torchinductor_", "torchelastic_")
        assert [name for name in os.listdir(tmp_path / "tmp") if not name.startswith(of_torch)] == []

    return check


def left_in_memory(before):
    """Return new names of the MPI libraries in /dev/shm that no living process has open: other jobs' are in use."""
    new = set()
    for name in set(os.listdir("/dev/shm")) - before:
        if re.match(r"mpich|vader|sm_", name):
            new.add(name)
    if not new:
        return new
    used = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal():
                used.update(re.findall(r"/dev/shm/([^/\s]+)", (folder / "maps").read_text()))
                used.update(Path(os.readlink(link)).name for link in (folder / "fd").iterdir())
        except OSError:  # it ended while we looked
            continue
    return new - used


def mount(folder, *options):
    folder.mkdir(exist_ok=True)
    return subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    if not mount(folder, "-o", "size=3500k"):
        skip_unless_ci("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
