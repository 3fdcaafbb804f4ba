"""A save in the background when the program ends: waited for, with whichever code all ranks leave."""

import pytest

pytestmark = pytest.mark.timeout(120)
PROGRAM = """
import sys, time
import numpy as np
import hpcdist
from hpcdist.checkpoint import durable

sync = durable.Disk.sync
def slow_sync(self, descriptor):
    time.sleep(2.5)
    sync(self, descriptor)

x = np.ones(4)
hpcdist.all_reduce(x)
manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(x=x), sys.argv[1])
durable.Disk.sync = slow_sync
manager.save(7, blocking=False)
{end}
"""
AGREED = "raise hpcdist.errors.agreed(hpcdist.errors.NoProgressError('on purpose'))"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(75)", 75), pytest.param(AGREED, 76, marks=pytest.mark.sweep)])
def test_a_slow_disk_is_waited_for(start, nothing_left, tmp_path, end, code):
    """Longer than a rank that failed alone would be waited for."""
    job = start(3, "-c", PROGRAM.format(end=end), tmp_path / "checkpoints")
    outcome = job.wait(60)
    assert outcome.code == code, outcome.output
    assert outcome.seconds > 5
    assert (tmp_path / "checkpoints" / "step-00000007-0001.h5").exists()
    assert "left with a non-zero exit" not in outcome.output
    nothing_left(job)
