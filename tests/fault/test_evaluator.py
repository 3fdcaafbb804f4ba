"""An evaluator stands beside the job: it does not end the others while they save, and it ends when they have ended."""

import json
import os
import signal
import time

import pytest

from hpcdist.checkpoint.store import Store

PROGRAM = """
import os, pathlib, sys, time
import torch
import hpcdist
from hpcdist.checkpoint import durable

run = pathlib.Path(sys.argv[1])
n_steps, slow_s = int(sys.argv[2]), float(sys.argv[3])
strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles="worker:2,evaluator:1"))
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
manager = hpcdist.CheckpointManager(checkpoint, run / "checkpoints")
handler = hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=10)
if strategy.cluster_resolver.task_type == "evaluator":
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(torch.ones(40)).batch(2))
    while True:
        path = hpcdist.latest_checkpoint(run / "checkpoints")
        for _ in batches:  # polls, too
            time.sleep(0.005)
        (run / "seen").write_text(str(path))
        handler.poll()
        time.sleep(0.05)
rename = durable.Disk.rename
if slow_s:
    def rename_slowly(disk, path, to):
        time.sleep(slow_s * to.name.startswith("step"))
        rename(disk, path, to)
    durable.Disk.rename = rename_slowly

def step():
    optimizer.zero_grad()
    hpcdist.compute_average_loss(model(torch.ones(1, 2)).sum(1), global_batch_size=2).backward()
    optimizer.step()
    time.sleep(0.02)

with handler:
    for number in range(n_steps):
        handler.run(strategy.run, step)
        (run / f"step-{strategy.world.rank}").write_text(str(number))
"""


@pytest.mark.feature("evaluation.evaluator-apart-from-training", "complaints.servers-and-evaluators-end")
@pytest.mark.timeout(100)
def test_a_preemption_beside_an_evaluator_saves_the_last_step(start, tmp_path):
    """Saving takes longer than a rank that leaves early waits for others that fail."""
    run = tmp_path / "run"
    run.mkdir()
    job = start(3, "-c", PROGRAM, run, 100_000, 6.0)
    deadline = time.monotonic() + 60
    while not Store(run / "checkpoints").saved() and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in job.ranks():
        os.kill(pid, signal.SIGTERM)
    outcome = job.wait(60)
    told = json.loads((run / "decision.json").read_text())
    assert (told["decision"], told["reason"][:7]) == ("requeue", "SIGTERM"), outcome.output[-3000:]
    assert told["step"] == Store(run / "checkpoints").read_latest().index.step
    assert told["step"] > 10
    assert outcome.code == 75


@pytest.mark.feature(
    "evaluation.evaluator-role", "evaluation.evaluator-ends-by-itself", "complaints.servers-and-evaluators-end"
)
@pytest.mark.timeout(60)
def test_an_evaluator_that_loops_sees_the_last_checkpoint_and_ends_with_the_job(start, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    outcome = start(3, "-c", PROGRAM, run, 25, 0).wait(40)
    assert outcome.code == 0, outcome.output[-3000:]
    assert json.loads((run / "decision.json").read_text())["decision"] == "finished"
    assert (run / "seen").read_text().endswith("step-00000025-0001.h5")
