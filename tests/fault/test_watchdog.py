"""One rank stops coming to collectives: the others say so, then end the job with everybody's stack."""

import os
import re
import signal
import time

import pytest

WARN_S, LIMIT_S = 0.4, 1.5
PROGRAM = """
import itertools, mmap, os, pathlib, signal, sys, threading, time
import numpy as np
import hpcdist
from hpcdist.collectives.journal import Journal
from hpcdist.collectives.stacks import Peer
from hpcdist.collectives.watchdog import Watchdog
from hpcdist.world import end_job, make_world

def wire(warn_s, limit_s, folder, has_board):
    world = make_world()
    board, peers = None, ()
    if has_board:
        (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        if world.rank == 0:
            (folder / "board").write_bytes(bytes(8 * world.size))
        world.comm.Barrier()
        with open(folder / "board", "r+b") as file:
            board = memoryview(mmap.mmap(file.fileno(), 8 * world.size)).cast("q")
        pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(world.size)]
        peers = [Peer(f"rank {rank} (worker {rank})", pid) for rank, pid in enumerate(pids)]
    journal = Journal(board, world.rank)
    watchdog = Watchdog(world.describe, lambda: end_job("", 70), warn_s, limit_s)
    watchdog.watch(journal, peers)
    return world, journal

def reduce(n_elements=8):
    journal.enter("all_reduce", "float64", n_elements)
    hpcdist.all_reduce(np.ones(n_elements))
    journal.leave()

folder = pathlib.Path(sys.argv[3])
world, journal = wire(float(sys.argv[1]), float(sys.argv[2]), folder, HAS_BOARD)
rank = world.rank

def stay_away():
    (folder / "away").write_text(str(os.getpid()))
    HOW

for number in range(70):
    reduce(number)
if rank == 1:
    stay_away()
while True:
    reduce(1000)
    time.sleep(0.001)
"""
SLEEPS = "time.sleep(1000)"
HOLDS_THE_INTERPRETER = "max(itertools.repeat(0))"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


def run(start, tmp_path, how, has_board, n_ranks=3, limit_s=LIMIT_S):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("HOW", how).replace("HAS_BOARD", str(has_board)))
    (tmp_path / "shared").mkdir()
    return start(n_ranks, program, WARN_S, limit_s, tmp_path / "shared")


def away_at(tmp_path, job):
    """Return when, in seconds of the job, the odd rank stayed away."""
    return (tmp_path / "shared" / "away").stat().st_mtime - (time.time() - (time.monotonic() - job.started))


def check_end(job, tmp_path):
    outcome = job.wait(40)
    assert outcome.seconds - away_at(tmp_path, job) < LIMIT_S + 15
    assert outcome.code != 0
    return outcome.output


def check_reports(output, ranks):
    """Each waiting rank reported its last 64 of 71 collectives and its stack."""
    for rank in ranks:
        head = (
            rf"hpcdist: rank {rank} \(worker {rank}\): collective 71, all_reduce float64 x 1000, has taken [\d.]+ s, "
        )
        assert len(re.findall(head + "the limit; ending the job", output)) == 1
        assert len(re.findall(head + "(not entered|entered by every|of other ranks)", output)) == 1
    assert len(re.findall(r"^ +70  all_reduce float64 x 69  [\d.]+ ms$", output, re.MULTILINE)) >= len(ranks)
    assert len(re.findall(r"^ +71  all_reduce float64 x 1000  under way for ", output, re.MULTILINE)) == len(ranks)
    assert output.count(" 8  all_reduce float64 x 7 ") >= len(ranks)
    assert output.count(" 7  all_reduce float64 x 6 ") <= output.count("no collective for")
    assert len(re.findall(r"program\.py:\d+ in reduce", output)) >= len(ranks)


@pytest.mark.parametrize("how", [SLEEPS, HOLDS_THE_INTERPRETER], ids=["sleeps", "holds the interpreter lock"])
def test_a_rank_that_hangs_elsewhere_is_shown(start, nothing_left, tmp_path, how):
    job = run(start, tmp_path, how, has_board=True)
    output = check_end(job, tmp_path)
    check_reports(output, [0, 2])
    pid = (tmp_path / "shared" / "away").read_text()
    assert (
        output.count(f"not entered by rank 1 (worker 1) of this node; the job ends when it has taken {LIMIT_S:g} s")
        == 2
    )
    assert output.count(f"see what that does: py-spy dump --pid {pid}.") == 2
    assert output.count(f"hpcdist: rank 1 (worker 1), process {pid}, is here:") == 1
    assert len(re.findall(r'File ".*program\.py", line \d+ in stay_away', output)) == 1
    nothing_left(job)


def test_a_rank_that_is_stopped_is_named(start, nothing_left, tmp_path):
    job = run(start, tmp_path, STOPS, has_board=True)
    output = check_end(job, tmp_path)
    check_reports(output, [0, 2])
    assert "hpcdist: rank 1 (worker 1), process " in output
    assert "is stopped by a signal; kill -CONT lets it go on" in output
    nothing_left(job)


def test_a_rank_that_hangs_alone_on_its_node_shows_itself(start, nothing_left, tmp_path):
    """Without a board, as when every rank has a node of its own: nobody can ask it."""
    job = run(start, tmp_path, SLEEPS, has_board=False)
    output = check_end(job, tmp_path)
    check_reports(output, [0, 2])
    assert output.count("hpcdist: rank 1 (worker 1): no collective for 1.5 s; if others wait for this rank") == 1
    assert len(re.findall(r"program\.py:\d+ in stay_away", output)) == 1
    nothing_left(job)


def test_a_job_that_was_stopped_and_goes_on_is_not_late(start, tmp_path):
    """As a batch system does that suspends jobs: rank 1 comes back in time, as this job counts time."""
    job = run(start, tmp_path, "time.sleep(1)", has_board=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "shared" / "away").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for pid in job.ranks():
            os.kill(pid, sign)
        time.sleep(2 * LIMIT_S if sign == signal.SIGSTOP else LIMIT_S)
    assert job.process.poll() is None, job.log.read_text()
    assert "ending the job" not in job.log.read_text()


CHECKED = """
import sys
import numpy as np
import hpcdist
from hpcdist.collectives.fingerprint import Fingerprints
from hpcdist.world import make_world

world = make_world()
checks = Fingerprints(world.comm, world) if "collectives" in world.debug else None

def reduce(op, n_elements, dtype="float64"):
    if checks is not None:
        checks.check(f"all_reduce {op}", dtype, n_elements, site=f"{__file__}:{sys._getframe(1).f_lineno}")
    hpcdist.all_reduce(np.ones(n_elements, dtype), op)

for number in range(5):
    reduce("sum", 8)
if world.rank == 1:
    ODD
else:
    reduce("sum", 8); reduce("max", 8)
reduce("sum", 8)
"""
ODD = {
    "count": ('reduce("sum", 9); reduce("max", 8)', 6, "all_reduce sum float64 x 9"),
    "dtype": ('reduce("sum", 8, "float32"); reduce("max", 8)', 6, "all_reduce sum float32 x 8"),
    "order": ('reduce("max", 8); reduce("sum", 8)', 6, "all_reduce max float64 x 8"),
    "number": ("pass", 6, "all_reduce sum float64 x 8"),
}


@pytest.mark.parametrize("name", ODD)
def test_the_odd_rank_is_named_under_debug(start, nothing_left, tmp_path, name):
    odd, number, call = ODD[name]
    program = tmp_path / "program.py"
    program.write_text(CHECKED.replace("ODD", odd))
    job = start(3, program, environ={"HPCDIST_DEBUG": "collectives"})
    outcome = job.wait(40)
    assert outcome.code == 76, outcome.output
    expected = (
        rf"hpcdist: collective {number}: expected all_reduce sum float64 x 8 at \S*program\.py:\d+ as on 2 of 3 ranks, "
    )
    got = rf"got {call} at \S*program\.py:\d+ on rank 1 \(worker 1\); "
    assert len(re.findall(expected + got, outcome.output)) == 1, outcome.output
    assert "Traceback" not in outcome.output
    nothing_left(job)


def test_the_rank_that_left_early_is_named_under_debug(start, nothing_left, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CHECKED.replace("ODD", "sys.exit(0)"))
    job = start(3, program, environ={"HPCDIST_DEBUG": "collectives", "HPCDIST_TIMEOUT_S": "1"})
    outcome = job.wait(40)
    assert outcome.code != 0
    assert "collective 6: expected every rank within 1 s for all_reduce sum float64 x 8 at " in outcome.output
    assert "got no answer from rank 1 (worker 1); look whether" in outcome.output
    nothing_left(job)


STUCK_IN_ABORT = """
import itertools
from types import SimpleNamespace
from hpcdist import abort
abort.ABORT_LIMIT_S = 0.5
abort.end_job(SimpleNamespace(Abort=lambda code: max(itertools.repeat(0))), "the report\\n", 70)
"""


def test_a_process_that_is_stuck_in_abort_ends_itself(start, tmp_path):
    """Stuck with the interpreter lock in its hands, as mpi4py does not give it back for Abort."""
    program = tmp_path / "program.py"
    program.write_text(STUCK_IN_ABORT)
    outcome = start(1, program).wait(20)
    assert outcome.code != 0
    assert outcome.output.startswith("the report\n")
    assert "line 6 in <lambda>" in outcome.output
