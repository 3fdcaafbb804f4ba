"""A rank is killed, or stopped, in the middle of each algorithm: all others end, and nothing is left."""

import os
import signal
import time

import pytest

LIMIT_S, TIMEOUT_S = 15, 2
PROGRAM = """
import os, pathlib, sys
import numpy as np
import hpcdist
from hpcdist.runtime.process import make_world
pathlib.Path(sys.argv[2], f"pid-{make_world().rank}").write_text(str(os.getpid()))
buffer = np.zeros(1 << 21)
while True:
    if sys.argv[1] == "async":
        hpcdist.all_reduce_async(buffer).wait()
    else:
        hpcdist.all_reduce(buffer, implementation=sys.argv[1])
"""


LONG = {("hierarchical", "stopped"), ("halving", "stopped"), ("async", "stopped"), ("halving", "killed")}
CASES = [
    pytest.param(name, sign, id=f"{name}-{how}", marks=[pytest.mark.sweep] if (name, how) in LONG else [])
    for name in ("shared_memory", "hierarchical", "ring", "halving", "async")
    for how, sign in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
]


@pytest.mark.parametrize(("name", "sign"), CASES)
def test_a_rank_that_is_gone_ends_the_job(start, nothing_left, tmp_path, name, sign):
    """The ranks do nothing but reduce 16 MB again and again: the signal finds rank 1 inside the algorithm."""
    program, pids = tmp_path / "program.py", tmp_path / "pids"
    program.write_text(PROGRAM)
    pids.mkdir()
    job = start(2, program, name, pids, environ={"HPCDIST_TIMEOUT_S": str(TIMEOUT_S)})
    deadline = time.monotonic() + 30
    while len(list(pids.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.7)
    os.kill(int((pids / "pid-1").read_text()), sign)
    outcome = job.wait(LIMIT_S + TIMEOUT_S)
    assert outcome.code != 0
    nothing_left(job)
    if sign == signal.SIGSTOP:
        assert "all_reduce sum float64 x 2097152, has taken " in outcome.output
        assert "last collectives:" in outcome.output
        assert "is stopped by a signal" in outcome.output
