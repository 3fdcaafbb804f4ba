"""hpcdist.summary: numbers of a custom loop in event files, read back by TensorBoard's own reader."""

import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hpcdist
from hpcdist.errors import UsageError

LOOP = """
import os, sys
import hpcdist
writer = hpcdist.summary.create_file_writer(sys.argv[1])
with writer.as_default():
    for step in range(int(sys.argv[2]), int(sys.argv[3])):
        hpcdist.summary.scalar("loss", 1 / (step + 1), step=step)
        if step % 4 == 0:
            hpcdist.summary.scalar("accuracy", step, step=step)
os._exit(9)  # killed: nothing is closed
"""


def read(folder, name):
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(name)]


def test_a_loop_that_resumes_from_a_checkpoint_has_each_step_once(tmp_path):
    """Killed after step 9, resumed at 5; killed after 6, resumed at 6: nothing is lost, nothing comes twice."""
    for first, last in ((0, 10), (5, 7), (6, 13)):
        ended = subprocess.run([sys.executable, "-c", LOOP, tmp_path, str(first), str(last)], timeout=120, check=False)
        assert ended.returncode == 9
    assert read(tmp_path, "loss") == [(step, round(1 / (step + 1), 5)) for step in range(13)]
    assert read(tmp_path, "accuracy") == [(step, step) for step in range(0, 13, 4)]


def test_what_may_be_written(tmp_path):
    writer = hpcdist.summary.create_file_writer(tmp_path)
    assert not hpcdist.summary.scalar("outside", 1.0, step=0), "no writer is entered"
    with writer.as_default(step=3):
        assert hpcdist.summary.scalar("number", 1)
        hpcdist.summary.scalar("tensor", torch.ones(1, 1, requires_grad=True), step=4)
        hpcdist.summary.scalar("variable", hpcdist.Variable(2.0))
        with pytest.raises(UsageError, match=r"number.*'two'.*shape.*2"):
            hpcdist.summary.scalar("two", torch.ones(2))
        with pytest.raises(UsageError, match="strategy.reduce"):
            hpcdist.summary.scalar("replicas", hpcdist.PerReplica([torch.ones(()), torch.ones(())]))
    with writer.as_default(), pytest.raises(UsageError, match="step.*'none'"):
        hpcdist.summary.scalar("none", 1.0)
    writer.close()
    written_scalars = {name: read(tmp_path, name) for name in ("number", "tensor", "variable")}
    assert written_scalars == {"number": [(3, 1.0)], "tensor": [(4, 1.0)], "variable": [(3, 2.0)]}


def test_inside_run_the_first_replica_writes(tmp_path):
    strategy = hpcdist.MirroredStrategy(["/cpu:0", "/cpu:1"])

    def step():
        replica = hpcdist.get_replica_context().replica_id_in_sync_group
        assert hpcdist.summary.scalar("a", 10.0 + replica, step=5)

    with hpcdist.summary.create_file_writer(tmp_path).as_default():
        strategy.run(step)
    assert read(tmp_path, "a") == [(5, 10.0)]


def test_writers_in_writers(tmp_path):
    outer, inner = (hpcdist.summary.create_file_writer(tmp_path / name) for name in ("outer", "inner"))
    with outer.as_default(step=1):
        with inner.as_default(step=2):
            hpcdist.summary.scalar("a", 1.0)
        hpcdist.summary.scalar("a", 2.0)
    assert read(tmp_path / "inner", "a") == [(2, 1.0)]
    assert read(tmp_path / "outer", "a") == [(1, 2.0)]
