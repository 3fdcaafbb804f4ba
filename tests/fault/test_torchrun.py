"""The backend `hpcdist` under torchrun: shared memory on one host, and no MPI."""

import os
import re
import signal
import time

import pytest
from real_jobs import MPIRUN, PYTHON

TORCHRUN = PYTHON.parent / "torchrun"
TIMEOUT_S = 2
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
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_it_is_what_gloo_makes_and_starts_no_mpi(torchrun, root, nothing_left, n_ranks):
    """All tests of the backend that mpirun starts: 2,500 random cases against gloo, messages, groups, DDP, FSDP."""
    plugins = ["--noconftest", "-p", "no:pytest_mpi", "-p", "torchrun_ranks", "-p", "no:cacheprovider"]
    tests = root / "tests" / "mpi" / "test_torch_backend.py"
    job = torchrun(n_ranks, "-m", "pytest", "-q", *plugins, "--rootdir", root, "-c", root / "pyproject.toml", tests)
    outcome = job.wait(180)
    assert outcome.code == 0, outcome.output[-4000:]
    counts = re.findall(r"^(\d+) passed", outcome.output, re.MULTILINE)
    assert len(counts) == n_ranks
    assert len(set(counts)) == 1
    assert int(counts[0]) >= 44
    nothing_left(job)


@pytest.mark.sweep
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
        ("dist.all_gather(list(tensor.chunk(2)), parts[0])", signal.SIGSTOP),
        ("exchange()", signal.SIGSTOP),
    ],
    ids=["all_reduce-killed", "all_gather-stopped", "messages-stopped"],
)
def test_a_rank_that_is_gone_ends_the_job(torchrun, nothing_left, tmp_path, call, sign):
    program = tmp_path / "program.py"
    pids = tmp_path / "pids"
    program.write_text(PROGRAM)
    pids.mkdir()
    job = torchrun(2, program, call, pids, environ={"HPCDIST_TIMEOUT_S": str(TIMEOUT_S)})
    job.wait_until(lambda: len(list(pids.iterdir())) == 2)
    time.sleep(0.3)
    gone = int((pids / "pid-1").read_text())
    os.kill(gone, sign)
    if sign == signal.SIGSTOP:
        job.wait_for_line("expected every rank within 2 s, got no answer from ")
        os.kill(gone, signal.SIGCONT)  # else torchrun waits 30 s before it kills what does not end
    outcome = job.wait(30)
    assert outcome.code != 0
    nothing_left(job)


def test_several_hosts_are_refused(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", 29731]
    jobs = [start(1, command=[*command, "--node-rank", node, program, "1", tmp_path]) for node in (0, 1)]
    for outcome in [job.wait(60) for job in jobs]:
        assert outcome.code != 0
        assert "expected all ranks on one host under torchrun, got 1 of 2 here; start the program by srun" in (
            outcome.output
        )


def test_a_message_is_received_after_its_sender_has_ended(torchrun, tmp_path):
    """Also when the sender has not shut its group down, and when the receiver first waits in its own shutdown."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, torch, torch.distributed as dist\nimport hpcdist.torch_backend\n"
        'dist.init_process_group("hpcdist")\nsizes = (3, 1 << 16)\n'
        "for n in sizes:\n"
        "    if dist.get_rank() == 0:\n        dist.send(torch.full((n,), 7.0), 1)\n"
        "if dist.get_rank() == 1:\n    time.sleep(1)\n    for n in sizes:\n        got = torch.empty(n)\n"
        "        dist.recv(got, 0)\n        assert got.unique().tolist() == [7.0]\n    print('both came', flush=True)\n"
    )
    outcome = torchrun(2, program).wait(60)
    assert outcome.code == 0, outcome.output
    assert "both came" in outcome.output


def test_groups_are_made_again(torchrun, tmp_path):
    """torchrun's store keeps what the first group has put there."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time, torch, torch.distributed as dist\nimport hpcdist.torch_backend\n"
        'rank = int(os.environ["RANK"])\n'
        "for one in range(3):\n    time.sleep(0.3 * (rank == 0))\n"
        '    dist.init_process_group("hpcdist")\n    value = torch.full((1 << 16,), float(one))\n'
        "    dist.all_reduce(value)\n    assert value.unique().tolist() == [2.0 * one]\n"
        "    posted = dist.irecv(torch.empty(3), 1 - rank, tag=5)\n    dist.isend(torch.ones(3), 1 - rank, tag=5)\n"
        "    dist.destroy_process_group()\n"
        "print('made again', flush=True)\n"
    )
    outcome = torchrun(2, program, environ={"HPCDIST_TIMEOUT_S": "10"}).wait(60)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("made again") == 2


def test_ranks_of_mpi_inside_a_process_of_torchrun(torchrun, tmp_path):
    """They are MPI's, whatever RANK and WORLD_SIZE they inherit."""
    inner = tmp_path / "inner.py"
    outer = tmp_path / "outer.py"
    inner.write_text(
        "import torch, torch.distributed as dist\nimport hpcdist.torch_backend\n"
        'dist.init_process_group("hpcdist", init_method="hpcdist://")\nvalue = torch.ones(1)\ndist.all_reduce(value)\n'
        "print(f'inner {value.item()}\\n', end='', flush=True)\ndist.destroy_process_group()\n"
    )
    outer.write_text(
        "import os, subprocess\nif os.environ['RANK'] == '0':\n"
        f"    subprocess.run([{str(MPIRUN)!r}, '-n', '3', {str(PYTHON)!r}, {str(inner)!r}], check=True)\n"
    )
    outcome = torchrun(2, outer).wait(60)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("inner 3.0") == 3


def test_a_rank_that_fails_waits_for_nobody(torchrun, tmp_path):
    """Its message is never received: it ends all the same, long before the limit of 600 s."""
    program = tmp_path / "program.py"
    program.write_text(
        "import time, torch, torch.distributed as dist\nimport hpcdist.torch_backend\n"
        'dist.init_process_group("hpcdist")\n'
        "if dist.get_rank() == 0:\n    dist.send(torch.ones(3), 1)\n    raise ValueError('on purpose')\n"
        "time.sleep(100)\n"
    )
    outcome = torchrun(2, program).wait(40)
    assert outcome.code != 0
    assert "ValueError: on purpose" in outcome.output
