"""Jobs over two hosts: right results, bytes that did cross the links, and an end when a rank is killed."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PROGRAMS

pytestmark = pytest.mark.timeout(90)
LIMIT_S = 15
#: What is on a link beside the data: barriers, and a launcher that watches its ranks.
QUIET_BYTES = 100_000


@pytest.mark.quick
def test_all_reduce_is_right_and_crosses_the_links(hosts, library):
    report = library.run(hosts, "all_reduce.py", 1, 1001, 1 << 18, (1 << 21) + 1).result
    assert report["n_hosts"] == 2
    for row in report["rows"]:
        assert row["n_wrong"] == 0
        bound = row["nbytes"]  # 2(m-1)/m * n for m = 2: with less, a host cannot know the sum
        assert len(row["sent"]) == 2
        assert min(row["sent"]) >= bound
        assert max(row["sent"]) < 4 * bound + QUIET_BYTES, report


def test_ranks_of_one_host_do_not_use_its_link(hosts, library):
    outcome = library.run(hosts, "all_reduce.py", 1 << 21, ranks_per_host=[0, 3])
    (row,) = outcome.result["rows"]
    assert outcome.result["n_hosts"] == 1
    assert row["n_wrong"] == 0
    assert max(row["sent"]) < QUIET_BYTES
    assert max(outcome.bytes_sent) < QUIET_BYTES


@pytest.mark.timeout(150)
def test_training_over_two_hosts_equals_training_in_one(hosts, mpich):
    apart = mpich.run(hosts, "train.py").result
    together = mpich.run(hosts, "train.py", ranks_per_host=[4, 0]).result
    assert (apart["n_hosts"], together["n_hosts"]) == (2, 1)
    assert apart["n_different_weights"] == together["n_different_weights"] == 1
    assert apart["losses"][-1] < 0.9 * apart["losses"][0]
    np.testing.assert_allclose(apart["losses"], together["losses"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(apart["weights"], together["weights"], rtol=0, atol=1e-6)


@pytest.mark.timeout(150)
def test_servers_and_workers_on_two_hosts_train_as_in_one_and_end(hosts, mpich):
    """Between hosts payloads go in pieces, within one through shared memory."""
    apart = mpich.run(hosts, "servers.py").result
    together = mpich.run(hosts, "servers.py", ranks_per_host=[4, 0]).result
    assert apart["n_workers"] == 3
    assert apart["weights"][0] == apart["weights"][1] == apart["weights"][2]
    assert apart["weights"] == together["weights"]


@pytest.mark.feature("semantics.health-check")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_on_all_hosts(hosts, mpich, victim):
    job = hosts.start([mpich.bin / "python", PROGRAMS / "reduce_forever.py"], 2, mpirun=mpich.bin / "mpirun")
    deadline = time.monotonic() + 40
    while not job.printed()[0]:
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.05)
    killed_at = time.monotonic()
    os.kill(ranks_of(hosts, hosts.hosts[victim])[-1], signal.SIGKILL)
    assert job.wait(LIMIT_S).code != 0
    while hosts.processes() and time.monotonic() < killed_at + LIMIT_S:
        time.sleep(0.05)
    assert hosts.processes() == []
    assert [host.shared_memory() for host in hosts.hosts] == [[], []]


def ranks_of(hosts, host):
    """Return the pids of the ranks in a host."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in hosts.processes(host)}
    return [pid for pid, line in lines.items() if b"python" in line[0]]
