"""The backend `hpcdist` under torchrun: shared memory on one host, and no MPI."""

import os
import signal
import time

import pytest
from real_jobs import PYTHON

TORCHRUN = PYTHON.parent / "torchrun"
TIMEOUT_S = 2
#: torchrun waits so long for a stopped process before it kills it.
CLOSE_S = 30
PROGRAM = """
import os, pathlib, sys
import torch
import torch.distributed as dist
import hpcdist.torch_backend
dist.init_process_group("hpcdist")
rank, tensor, parts = dist.get_rank(), torch.zeros(1 << 21), list(torch.zeros(1 << 21).chunk(2))
def exchange():
    dist.send(parts[0], 1 - rank) if rank else dist.recv(parts[0], 1 - rank)
call = eval("lambda: " + sys.argv[1])
call()
pathlib.Path(sys.argv[2], f"pid-{rank}").write_text(str(os.getpid()))
while True:
    call()
"""


@pytest.fixture
def torchrun(start):
    """Return torchrun(n_ranks, *arguments, environ): a job."""
    return lambda n_ranks, *arguments, environ=None: start(
        n_ranks, command=[TORCHRUN, "--standalone", "--nproc-per-node", n_ranks, *arguments], environ=environ
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_what_gloo_makes_and_starts_no_mpi(torchrun, root, nothing_left, n_ranks):
    """All tests of the backend that mpirun starts: 2,500 random cases against gloo, messages, groups, DDP, FSDP."""
    plugins = ["--noconftest", "-p", "no:pytest_mpi", "-p", "torchrun_ranks", "-p", "no:cacheprovider"]
    tests = root / "tests" / "mpi" / "test_torch_backend.py"
    job = torchrun(n_ranks, "-m", "pytest", "-q", *plugins, "--rootdir", root, "-c", root / "pyproject.toml", tests)
    outcome = job.wait(180)
    assert outcome.code == 0, outcome.output[-4000:]
    assert outcome.output.count("44 passed") == n_ranks
    nothing_left(job)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torch_s_own_tests_of_collectives_pass(torchrun, root, tmp_path):
    outcome = torchrun(3, root / "tests" / "support" / "torch_own_tests.py", tmp_path / "files").wait(220)
    assert outcome.code == 0, outcome.output[-4000:]
    assert '"failures": {}' in outcome.output
    assert '{"ok": 9' in outcome.output


@pytest.mark.parametrize(
    ("call", "sign"),
    [
        ("dist.all_reduce(tensor)", signal.SIGKILL),
        pytest.param("dist.all_gather(list(tensor.chunk(2)), parts[0])", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("exchange()", signal.SIGSTOP, marks=pytest.mark.sweep),
    ],
    ids=["all_reduce-killed", "all_gather-stopped", "messages-stopped"],
)
def test_a_rank_that_is_gone_ends_the_job(torchrun, nothing_left, tmp_path, call, sign):
    program, pids = tmp_path / "program.py", tmp_path / "pids"
    program.write_text(PROGRAM)
    pids.mkdir()
    job = torchrun(2, program, call, pids, environ={"HPCDIST_TIMEOUT_S": str(TIMEOUT_S)})
    job.wait_until(lambda: len(list(pids.iterdir())) == 2)
    time.sleep(0.3)
    os.kill(int((pids / "pid-1").read_text()), sign)
    outcome = job.wait(TIMEOUT_S + CLOSE_S + 15)
    assert outcome.code != 0
    if sign == signal.SIGSTOP:
        assert "expected every rank within 2 s, got no answer from " in outcome.output
    nothing_left(job)


def test_several_hosts_are_refused(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", 29731]
    both = [start(1, command=[*command, "--node-rank", node, program, "1", tmp_path]) for node in (0, 1)]
    for outcome in [job.wait(60) for job in both]:
        assert outcome.code != 0
        assert "expected all ranks on one host under torchrun, got 1 of 2 here; start the program by srun" in (
            outcome.output
        )
