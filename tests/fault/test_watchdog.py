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
