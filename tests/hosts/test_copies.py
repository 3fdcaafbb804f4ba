"""Copies in memory on hosts whose /dev/shm is their own, as on a cluster: one host's copy is enough for all."""

import shutil
from pathlib import Path

import pytest
from conftest import PROGRAMS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def memory_of(host):
    return Path(f"/proc/{host.pid}/root/dev/shm")


def copies_in(host):
    return sorted(path.name for path in memory_of(host).glob("hpcdist-*/step-*.h5"))


@pytest.mark.feature("checkpoints.checkpointer-with-a-file-per-rank")
@pytest.mark.parametrize("lost", [0, 1], ids=["the chief's host", "another host"])
def test_a_host_whose_memory_is_lost_restores_from_another_one(hosts, mpich, run_dir, lost):
    job = hosts.start([mpich.bin / "python", PROGRAMS / "copies.py", run_dir, "die"], 2, mpirun=mpich.bin / "mpirun")
    assert job.wait(60).code != 0
    assert list(map(copies_in, hosts.hosts)) == [["step-00000007-0001.h5"]] * 2
    (folder,) = memory_of(hosts.hosts[lost]).glob("hpcdist-*")
    shutil.rmtree(folder)
    restore_report = mpich.run(hosts, "copies.py", run_dir, "restore").result
    ((path, least, most),) = restore_report["found"]
    assert path.startswith("/dev/shm/"), path
    assert (least, most, restore_report["n_hosts"]) == (7, 7, 2)
    assert list(map(copies_in, hosts.hosts)) == [[], []], "given back"
