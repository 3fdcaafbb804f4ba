"""What runs beside training fails, and training goes on: the job's exit code is its own, and status shows the error."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys, threading
import numpy as np
import torch
import hpcdist
from hpcdist.callbacks import BackupAndRestore, CSVLogger, TensorBoard

run, how = sys.argv[1], sys.argv[2]
roles = "worker:1,evaluator:1" if how.startswith("evaluator") else None
strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver(roles=roles), gradient_op="sum")
with strategy.scope():
    model = hpcdist.Model(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse")
x = np.ones((64, 4), np.float32)
data = (x, x[:, :1])
if strategy.cluster_resolver.task_type == "evaluator":
    if how == "evaluator raises at once":
        raise ValueError("on purpose")
    if how == "evaluator raises":
        checkpoint = hpcdist.Checkpoint(model=model.net, optimizer=model.optimizer, strategy=strategy)
        handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, run + "/checkpoints")
        raise ValueError("on purpose")
    if how == "evaluator's thread raises":
        threading.Thread(target=lambda: 1 / 0).start()
    folder = "/proc/evaluation" if how == "evaluator cannot write" else run + "/evaluation"
    hpcdist.SidecarEvaluator(model, data, run + "/checkpoints", log_dir=folder, poll_s=0.05).start()
callbacks = {
    "events": [TensorBoard("/proc/events", update_freq="batch")],
    "lines": [CSVLogger("/proc/lines.csv")],
}
if how == "metrics":
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(x).batch(16))
    records = hpcdist.MetricsFile("/proc/metrics.jsonl")
    parts = {"model": model.net, "optimizer": model.optimizer, "data": batches, "metrics": records}
    checkpoint = hpcdist.Checkpoint(**parts, strategy=strategy)
    with hpcdist.PreemptionCheckpointHandler(None, checkpoint, run + "/checkpoints", save_every_steps=1) as handler:
        for batch in map(torch.as_tensor, batches):
            model.optimizer.zero_grad()
            hpcdist.compute_average_loss(model.net(batch).square().sum(1), global_batch_size=16).backward()
            model.optimizer.step()
            records.write(handler.step, loss=1.0)
else:
    backup = BackupAndRestore(run, delete_checkpoint=False)
    model.fit(*data, 16, epochs=3, callbacks=[backup, *callbacks.get(how, [])], verbose=0)
print("trained on", strategy.rank)
"""


@pytest.mark.feature("evaluation.evaluator-apart-from-training")
@pytest.mark.parametrize(
    ("how", "name", "error"),
    [
        pytest.param(
            "evaluator cannot write", "evaluator-0", "expected to write in /proc/evaluation", marks=pytest.mark.quick
        ),
        ("evaluator raises", "evaluator-0", "ValueError: on purpose"),
        ("evaluator's thread raises", None, None),
        ("evaluator raises at once", None, None),
        ("events", "TensorBoard", "/proc/events"),
        ("lines", "CSVLogger", "/proc/lines.csv"),
        ("metrics", "metrics", "/proc/"),
    ],
)
def test_training_goes_on(start, tmp_path, nothing_left, how, name, error):
    run = tmp_path / "run"
    job = start(2, "-c", PROGRAM, run, how)
    outcome = job.wait(60)
    assert outcome.code == 0, outcome.output
    if how.startswith("evaluator"):
        n_trained = 1
    else:
        n_trained = 2
    assert outcome.output.count("trained on") == n_trained
    assert "raining goes on" in outcome.output
    assert json.loads((run / "decision.json").read_text())["decision"] == "finished"
    nothing_left(job)
    if name is None:
        return
    content = json.loads((run / "errors" / f"{name}.json").read_text())
    assert error in content["error"]
    assert not content["is_over"]
    told = subprocess.run([sys.executable, "-m", "hpcdist", "status", run], capture_output=True, text=True, timeout=60)
    assert f"beside it   {name} has failed " in told.stdout
    assert error in told.stdout


def test_a_preemption_after_an_evaluator_has_failed_saves_the_last_step(start, tmp_path):
    """The signal goes to all ranks; the evaluator, which is done, must not end the job before the others have saved."""
    run = tmp_path / "run"
    job = start(2, "-c", PROGRAM.replace("epochs=3", "epochs=100_000"), run, "evaluator raises at once")
    job.wait_for_line("training goes on without this rank")
    job.wait_until(lambda: any((run / "checkpoints").glob("step-*.h5")))
    for pid in job.ranks():
        os.kill(pid, signal.SIGTERM)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output[-3000:]
    assert json.loads((run / "decision.json").read_text())["decision"] == "requeue"
    assert "saved in" in outcome.output


def test_an_evaluator_whose_folder_comes_back_evaluates(start, tmp_path):
    run = tmp_path / "run"
    blocked = run / "evaluation"
    run.mkdir()
    blocked.write_text("a file where a folder should be")
    program = PROGRAM.replace("epochs=3", "epochs=400")
    job = start(2, "-c", program, run, "evaluator")
    job.wait_until(lambda: (run / "errors" / "evaluator-0.json").exists())
    blocked.unlink()
    job.wait_until(lambda: (blocked / "evaluations.jsonl").exists())
    outcome = job.wait(100)
    assert outcome.code == 0, outcome.output[-3000:]
    assert json.loads((run / "errors" / "evaluator-0.json").read_text())["is_over"]
