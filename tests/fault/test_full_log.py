"""Output that cannot be written, as where the log is on a disk that is full: jobs end as they would, and saves
are made."""

import json

import pytest

pytestmark = pytest.mark.timeout(120)
LOGS = {"full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)", "closed": "os.close(2)", "none": "sys.stderr = None"}
SOME_LOGS = [pytest.param(name, marks=[] if name == "full" else [pytest.mark.sweep]) for name in LOGS]
BEGIN = """
import errno, os, sys
import numpy as np
import hpcdist
from hpcdist.checkpoint import durable

x = np.ones(4)
hpcdist.all_reduce(x)
manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(x=x), sys.argv[1] + "/checkpoints")
config = hpcdist.TerminationConfig(grace_period=5)
handler = hpcdist.PreemptionCheckpointHandler(None, manager, termination_config=config)
rank = manager.checkpoint.world.rank

def refuse(self, descriptor, data, offset):
    if "step-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return os.pwrite(descriptor, data, offset)
"""
RAISES = """
if rank == 1:
    raise KeyError("on purpose")
hpcdist.all_reduce(x)
"""
RAISES_TOGETHER = "raise hpcdist.errors.agreed(hpcdist.errors.NoProgressError('on purpose'))"
LAST_SAVE_FAILS = """
durable.Disk.write = refuse
handler.run(x.__iadd__, 1)
manager.save(1, blocking=False)
"""
STOPPED = """
for step in range(10 ** 6):
    handler.run(x.__iadd__, 1)
    if step == 3:
        handler.stop()
"""
FITS = """
import os, sys
import torch
import hpcdist

with hpcdist.MultiWorkerMirroredStrategy().scope():
    model = hpcdist.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
backup = hpcdist.callbacks.BackupAndRestore(sys.argv[1])
model.fit(torch.ones(8, 2), torch.ones(8), batch_size=4, epochs=2, callbacks=[backup])
"""


@pytest.fixture
def run(start, tmp_path):
    """Return run(): the exit code of a program on two ranks that cannot write their log, and the decision it left."""

    def run(log, text, n_ranks=2):
        outcome = start(n_ranks, "-c", BEGIN + LOGS[log] + "\n" + text, tmp_path / "run").wait(60)
        return outcome, json.loads((tmp_path / "run" / "decision.json").read_text())

    return run


@pytest.mark.parametrize("log", SOME_LOGS)
def test_a_rank_that_raises_ends_the_job_at_once(run, log):
    outcome, told = run(log, RAISES)
    assert outcome.code in (1, 9), outcome.output
    assert told["decision"] == "requeue"


@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_an_error_of_all_ranks_keeps_its_code(run, n_ranks):
    outcome, _ = run("full", RAISES_TOGETHER, n_ranks)
    assert outcome.code == 76


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("log", SOME_LOGS)
def test_a_last_save_that_fails_is_no_success(run, log, n_ranks):
    outcome, told = run(log, LAST_SAVE_FAILS, n_ranks)
    if n_ranks == 1:
        codes = (74,)
    else:
        codes = (74, 9)
    assert outcome.code in codes, outcome.output
    assert told["decision"] == "requeue"


def test_a_stop_is_obeyed(run, tmp_path):
    outcome, told = run("full", STOPPED)
    assert outcome.code == 75
    assert told["reason"] == "stop() on rank 0"
    assert (tmp_path / "run" / "checkpoints" / f"step-{told['step']:08d}-0001.h5").exists()
    assert told["step"] > 4, "training continues within the grace period"


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_lines_of_fit_are_dropped(start, tmp_path, n_ranks):
    outcome = start(n_ranks, "-c", FITS, tmp_path / "run").wait(60)
    assert outcome.code == 0, outcome.output
    assert json.loads((tmp_path / "run" / "decision.json").read_text())["decision"] == "finished"
