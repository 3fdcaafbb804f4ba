"""`hpcdist bench`: which command each benchmark is. One is run in tests/fault/test_benchmarks.py."""

import subprocess
import sys

import pytest

from hpcdist.cli import bench
from hpcdist.cli.launcher import Launcher


@pytest.fixture
def started(monkeypatch):
    """Return a list of the commands that are started; mpi4py loads MPICH."""
    commands = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(command, **options):
        commands.append(list(map(str, command)))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(bench, "mpi_library", lambda: "mpich")
    monkeypatch.setattr(bench, "find_launcher", lambda library, environ: Launcher(library, "/opt/mpirun"))
    monkeypatch.setattr(bench.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (
            ["allreduce", "-n", "4", "--sizes", "1K"],
            ["/opt/mpirun", "-n", "4"],
            ["--out", "out/bench", "--sizes", "1K"],
        ),
        (["step", "--quick", "--out", "o"], ["/opt/mpirun", "-n", "2"], ["o", "--rounds", "2", "--steps", "20"]),
        (["ckpt", "--training"], [sys.executable], ["checkpoint.py", "--out", "out/bench", "--training"]),
        (["ps"], [sys.executable], ["speed", "--out", "out/bench", "--mpirun", "/opt/mpirun"]),
    ],
)
def test_the_command(started, hpcdist, arguments, first, last):
    code, _, error = hpcdist("bench", *arguments)
    (command,) = started
    assert code == 7, "the benchmark's own"
    assert command[: len(first)] == first
    assert [part.rpartition("/benchmarks/")[2] for part in command[-len(last) :]] == last
    assert error.startswith("+ OMP_NUM_THREADS=1 ")


def test_hosts_say_how_many_ranks(started, hpcdist):
    hpcdist("bench", "allreduce", "--hosts", "n1:4,n2:4")
    assert started[0][1:5] == ["-n", "8", "-hosts", "n1:4,n2:4"]


@pytest.mark.parametrize("name", ["ckpt", "ps"])
def test_ranks_are_for_two_of_them(started, hpcdist, name):
    code, _, error = hpcdist("bench", name, "-n", "4")
    assert (code, error.count("\n"), started) == (2, 1, [])
    assert f"expected -n and --hosts with allreduce and step, got {name}" in error


def test_an_unknown_benchmark(hpcdist):
    code, _, error = hpcdist("bench", "network")
    assert (code, error.count("\n")) == (2, 1)
    assert "'network' is not one of 'allreduce', 'step', 'ckpt', 'ps'" in error


def test_within_a_launcher(started, hpcdist, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "1")
    assert hpcdist("bench", "step")[0] == 2
    assert started == []
