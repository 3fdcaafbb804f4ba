"""The watch over the next rank of the node: which ends are reported, and when the job is ended."""

import os
import resource
import subprocess
import sys
import threading
import time
from array import array

import pytest

from hpcdist.diagnostics import neighbour
from hpcdist.diagnostics.neighbour import NeighbourWatch
from hpcdist.diagnostics.stacks import Peer
from hpcdist.diagnostics.watchdog import FAILED, LEFT, NOTICED


@pytest.fixture
def lose(monkeypatch, capfd):
    """Return lose(): rank 1 ends, as rank 0 sees it; whether the job was ended, the output, rank 0's flags."""
    monkeypatch.setattr(neighbour, "PATIENCE_S", 0.2)

    def lose(flags_of_neighbour=0, has_left=False, is_stopped=False):
        flags = memoryview(array("q", [0, flags_of_neighbour]))
        ended = threading.Event()
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        peers = [Peer("rank 0 (worker 0)", os.getpid()), Peer("rank 1 (worker 1)", process.pid)]
        before = set(threading.enumerate())
        watch = NeighbourWatch(peers, 0, flags, lambda: has_left, ended.set)
        if is_stopped:
            watch.stop()
        process.kill()
        process.wait()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        return ended.is_set(), capfd.readouterr().err, flags[0]

    return lose


def test_a_rank_that_ends_without_notice_is_named_and_the_job_ends(lose):
    started = time.monotonic()
    is_ended, printed, flags = lose()
    assert (is_ended, flags) == (True, NOTICED)
    assert printed.startswith("hpcdist: rank 1 (worker 1), process ")
    assert printed.count("has ended without notice at ") == 1
    assert time.monotonic() - started >= 0.2, "the launcher has some time"


def test_a_rank_that_failed_has_printed_why_itself(lose):
    assert lose(flags_of_neighbour=FAILED) == (True, "", 0)


@pytest.mark.parametrize("how", [{"flags_of_neighbour": LEFT}, {"has_left": True}, {"is_stopped": True}])
def test_ranks_may_end_once_they_have_left_their_programs(lose, how):
    assert lose(**how) == (False, "", 0)


def test_a_process_with_many_open_files(lose):
    """More than select takes."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limit[1]), limit[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert lose()[0]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
