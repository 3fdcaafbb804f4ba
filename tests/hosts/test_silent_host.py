"""A host that falls silent: its link is cut while ranks sum, and nothing tells the others that it is gone."""

import time
from pathlib import Path

import pytest
from conftest import PROGRAMS, RATE_BITS_PER_S
from virtual_hosts import VirtualHosts

pytestmark = pytest.mark.timeout(120)
WATCHDOG_S = 5
LIMIT_S = 20


@pytest.fixture
def own_hosts(can_make_hosts, clean_environ):
    """Two hosts for one test: what it cuts stays cut."""
    with VirtualHosts(2, RATE_BITS_PER_S, environ=clean_environ) as hosts:
        yield hosts


def ranks(hosts):
    """Return how many ranks run in each host."""
    return [sum(map(is_rank, hosts.processes(host))) for host in hosts.hosts]


def is_rank(pid):
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it ended while we looked
        return False
    return b"python" in line[0] and any(part.endswith(b"reduce_forever.py") for part in line)


@pytest.mark.feature("debugging.stall-detection", "semantics.health-check", "complaints.stalled-collective")
def test_the_ranks_of_all_hosts_end(own_hosts, library):
    """Those that are cut off too. MPICH's launcher ends with the code; Open MPI's waits for the daemon that is gone."""
    command = [library.bin / "python", PROGRAMS / "reduce_forever.py"]
    environ = {"HPCDIST_TIMEOUT_S": str(WATCHDOG_S)}
    job = own_hosts.start(command, 2, environ, mpirun=library.bin / "mpirun")
    deadline = time.monotonic() + 40
    while not job.printed()[0]:
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.05)
    assert ranks(own_hosts) == [2, 2]
    own_hosts.switch.batch("ip", ["link set port1 down"])
    cut_at = time.monotonic()
    while ranks(own_hosts) != [0, 0]:
        assert time.monotonic() < cut_at + WATCHDOG_S + LIMIT_S, (ranks(own_hosts), job.printed())
        time.sleep(0.1)
    assert "look for a rank of another node that reports nothing" in job.printed()[1]
    if library.name == "MPICH":
        assert job.wait(5).code == 70
