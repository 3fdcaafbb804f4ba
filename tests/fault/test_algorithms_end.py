"""A rank is killed, or stopped, in the middle of each collective: all others end, and nothing is left."""

import itertools
import os
import signal
import time

import pytest

LIMIT_S = 15
TIMEOUT_S = 2
PROGRAM = """
import os, pathlib, sys
import numpy as np
import torch
import torch.distributed as dist
import hpcdist
import hpcdist.torch_backend
from hpcdist.collectives import slices
from hpcdist.collectives.group import group_of
from hpcdist.runtime.process import make_world
rank = make_world().rank
group = group_of()
array, few = np.zeros(1 << 21), np.zeros(2)
tensor, other = torch.zeros(1 << 21), torch.zeros(1 << 21)
half, parts = tensor[: 1 << 20], list(other.chunk(2))
if "dist." in sys.argv[1] or "exchange" in sys.argv[1]:
    dist.init_process_group("hpcdist", init_method="hpcdist://")

def reduce_by_slices():
    with group.recorded("all_reduce sum", array):
        slices.all_reduce(array, group)

def exchange():
    dist.send(half, 1 - rank) if rank else dist.recv(half, 1 - rank)

call = eval("lambda: " + sys.argv[1])
call()
pathlib.Path(sys.argv[2], f"pid-{rank}").write_text(str(os.getpid()))
while True:
    call()
"""
REDUCTIONS = {
    "shared_memory": "hpcdist.all_reduce(array, implementation='SHARED_MEMORY')",
    "hierarchical": "hpcdist.all_reduce(array, implementation='HIERARCHICAL')",
    "ring": "hpcdist.all_reduce(array, implementation='RING')",
    "halving": "hpcdist.all_reduce(array, implementation='HALVING')",
    "async": "hpcdist.all_reduce_async(array).wait()",
    "small": "hpcdist.all_reduce(few)",
    "slices": "reduce_by_slices()",
}
BACKEND = {
    "all_reduce": "dist.all_reduce(tensor)",
    "broadcast": "dist.broadcast(tensor, 0)",
    "reduce": "dist.reduce(tensor, 0)",
    "all_gather": "dist.all_gather(parts, half)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(tensor, half.clone())",
    "reduce_scatter": "dist.reduce_scatter(half.clone(), parts)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(half.clone(), other)",
    "all_to_all": "dist.all_to_all_single(tensor, other)",
    "gather": "dist.gather(half, parts if rank == 0 else None)",
    "scatter": "dist.scatter(half, parts if rank == 0 else None)",
    "barrier": "dist.barrier()",
    "send_and_receive": "exchange()",
}
CALLS = {**REDUCTIONS, **{f"torch-{name}": call for name, call in BACKEND.items()}}
#: Those that .ci/run takes.
SAMPLE = {
    *itertools.product(("shared_memory", "ring", "small"), ("killed", "stopped")),
    ("hierarchical", "killed"),
    ("async", "killed"),
    ("slices", "stopped"),
    ("torch-all_reduce", "killed"),
    ("torch-all_to_all", "stopped"),
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def cases():
    """Return every call with both signals; what is no sample is marked as a sweep."""
    parameters = []
    for name, how in itertools.product(CALLS, SIGNALS):
        marks = []
        if (name, how) not in SAMPLE:
            marks = [pytest.mark.sweep]
        parameters.append(pytest.param(name, SIGNALS[how], id=f"{name}-{how}", marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "sign"), cases())
def test_a_rank_that_is_gone_ends_the_job(start, nothing_left, tmp_path, name, sign):
    """The ranks do nothing but make one call again and again: the signal finds rank 1 inside it."""
    program = tmp_path / "program.py"
    pids = tmp_path / "pids"
    program.write_text(PROGRAM)
    pids.mkdir()
    job = start(2, program, CALLS[name], pids, environ={"HPCDIST_TIMEOUT_S": str(TIMEOUT_S)})
    deadline = time.monotonic() + 30
    while len(list(pids.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.7)
    os.kill(int((pids / "pid-1").read_text()), sign)
    outcome = job.wait(LIMIT_S + TIMEOUT_S)
    assert outcome.code != 0
    nothing_left(job)
    if sign == signal.SIGSTOP and name == "torch-send_and_receive":
        assert f"within {TIMEOUT_S} s" in outcome.output  # a message is no collective: its wait raises
    elif sign == signal.SIGSTOP:
        assert name not in REDUCTIONS or "all_reduce sum float64 x 2" in outcome.output
        assert ", has taken " in outcome.output
        assert "last collectives:" in outcome.output
        assert "is stopped by a signal" in outcome.output
