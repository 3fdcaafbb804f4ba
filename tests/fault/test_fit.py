"""fit is stopped and killed at random moments: History, weights, lines and events are those of an unbroken run."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import h5py
import pytest
from real_jobs import MPIRUN, PYTHON
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcdist.checkpoint.read import open_checkpoint
from hpcdist.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
FIT = ROOT / "jobs" / "fit.py"

pytestmark = pytest.mark.timeout(200)


def command(run, *options):
    return [FIT, "--run-dir", run, "--epochs", 6, *options]


def events_of(folder):
    """Return what a reader of event files sees: (tag, step, value) of each."""
    accumulator = EventAccumulator(str(folder), purge_orphaned_data=True)
    accumulator.Reload()
    events = []
    for tag in accumulator.Tags()["scalars"]:
        events += [(tag, event.step, event.value) for event in accumulator.Scalars(tag)]
    return events


def end_of(run):
    """Return all that a run leaves."""
    with open_checkpoint(run / "best.h5") as file:
        weights = [array.values.tobytes() for array in file.read_arrays()]
    events = [sorted(events_of(run / "tensorboard" / kind)) for kind in ("train", "validation")]
    return json.loads((run / "history.json").read_text()), (run / "log.csv").read_text(), weights, events


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    arguments = list(map(str, (MPIRUN, "-n", 2, PYTHON, *command(run))))
    subprocess.run(
        arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=90, check=True, stdout=subprocess.DEVNULL
    )
    end_state = end_of(run)
    assert len(end_state[0]["val_loss"]) == 6
    assert [step for tag, step, _ in end_state[3][0] if tag == "epoch_loss"] == list(range(6))
    return end_state


def run_with_harm(start, run, draws, options):
    """Run it, harmed at three random moments, until it ends; return how many were in time, and how it ended."""
    n_harms = 0
    for number in range(4):
        job = start(2, *command(run, *options))
        sign = draws.choice([signal.SIGKILL, signal.SIGTERM])
        if number < 3:
            job.wait_until(
                lambda number=number: (run / "checkpoints" / "attempts" / f"{number + 1:04d}.jsonl").exists()
            )
            time.sleep(draws.uniform(0, 1.5))
            victim = draws.choice([0, 1])
            if job.process.poll() is None:
                os.kill(job.pid_of(victim), sign)
                n_harms += 1
        outcome = job.wait(90)
        if json.loads((run / "decision.json").read_text())["decision"] == "finished":
            return n_harms, outcome.code
        assert sign == signal.SIGKILL or outcome.code == 75, outcome.output
        assert outcome.code != 0
    raise AssertionError(f"the run did not end: {outcome.output}")


PROGRAM = """
import os, signal, sys, time
import torch
import hpcdist
from hpcdist.callbacks import BackupAndRestore, Callback, ModelCheckpoint

run, stop_at, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
hpcdist.set_random_seed(1)
strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    model = hpcdist.Model(torch.nn.Sequential(*layers))
    model.compile("adam", "mse")

class Stopping(Callback):
    saved = ("n_calls",)

    def __init__(self):
        self.n_calls = 0

    def stop_at(self, what):
        if stop_at == what and strategy.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, batch, logs):
        self.n_calls += 1
        if options.get("stops") == "step 7" and self.n_calls == 7:
            model.stop_training = True
        self.stop_at(f"step {self.n_calls}")

    def on_test_batch_end(self, batch, logs):
        self.stop_at(f"test {self.n_calls} {batch}")
        time.sleep(0.3 * stop_at.startswith("test"))  # ranks agree on requests every so many milliseconds

    def on_epoch_end(self, epoch, logs):
        model.evaluate(x[:6], y[:6], verbose=0)
        self.stop_at(f"end {epoch}")
        if options.get("stops") == "epoch 1" and epoch == 1:
            model.stop_training = True

x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1)
more = {name: value for name, value in options.items() if name != "stops"}
callbacks = [BackupAndRestore(run), Stopping(), ModelCheckpoint(run + "/m-{epoch}.h5")]
history = model.fit(
    x, y, batch_size=4, epochs=3, validation_data=(x, y), callbacks=callbacks, verbose=0, **more
)
if strategy.is_chief:
    print("end", history.history, callbacks[1].n_calls, [float(one.astype(float).sum()) for one in model.get_weights()])
"""


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        pytest.param({}, ["step 5", "end 0"], marks=pytest.mark.sweep),
        pytest.param({"steps_per_epoch": 5, "validation_steps": 2}, ["test 5 0"], marks=pytest.mark.sweep),
        pytest.param({}, ["test 5 1", "step 3"], marks=pytest.mark.sweep),
        pytest.param({"steps_per_epoch": 5, "validation_steps": 2}, ["step 5"], marks=pytest.mark.sweep),
        pytest.param({"steps_per_epoch": 3}, ["step 3", "step 5", "test 6 4"], marks=pytest.mark.sweep),
        ({"stops": "step 7"}, ["test 7 1"]),
        pytest.param({"stops": "epoch 1"}, ["test 10 2"], marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_a_stop_at_any_point_of_an_epoch(start, tmp_path, options, moments):
    def end_of(job):
        outcome = job.wait(60)
        return outcome.code, [line for line in outcome.output.splitlines() if line.startswith("end")]

    code, unbroken = end_of(start(2, "-c", PROGRAM, tmp_path / "unbroken", "", options))
    assert (code, len(unbroken)) == (0, 1)
    for number, moment in enumerate(moments):
        run = tmp_path / str(number)
        assert end_of(start(2, "-c", PROGRAM, run, moment, options))[0] == 75, moment
        assert end_of(start(2, "-c", PROGRAM, run, "", options)) == (0, unbroken), moment


@pytest.mark.feature(
    "evaluation.evaluator-role",
    "evaluation.sidecar-evaluator",
    "evaluation.best-checkpoint-export",
    "semantics.sidecar-rules",
)
def test_an_evaluator_sees_the_last_checkpoint_and_ends_with_the_job(start, tmp_path, unbroken):
    run = tmp_path / "run"
    outcome = start(3, *command(run, "--save-every", 7, "--roles", "worker:2,evaluator:1")).wait(90)
    assert outcome.code == 0, outcome.output
    lines = list(map(json.loads, (run / "evaluation" / "evaluations.jsonl").read_text().splitlines()))
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == 138
    assert lines[-1]["loss"] == pytest.approx(unbroken[0]["val_loss"][-1], rel=1e-6)
    assert (run / "evaluation" / "best.h5").exists()
    assert [step for tag, step, _ in events_of(run / "evaluation") if tag == "evaluation_loss"] == steps


@pytest.mark.feature("evaluation.sidecar-evaluator")
def test_an_evaluator_in_a_job_of_its_own_ends_when_the_run_is_finished(start, tmp_path, root):
    """Its folder is that of a ModelCheckpoint; while the run is not finished it stops at a signal."""
    run = tmp_path / "run"
    assert start(1, *command(run, "--epochs", 2)).wait(90).code == 0
    program = f"""
import sys; sys.path.insert(0, {str(root / "jobs")!r})
import hpcdist, images
model = hpcdist.load_model({str(run / "best.h5")!r})
test = images.load_digits()[1]
evaluator = hpcdist.SidecarEvaluator(model, test, {str(run)!r}, max_evaluations=int(sys.argv[1]))
evaluator.start()
print(len(evaluator.evaluations), "evaluations")
"""
    outcome = start(1, "-c", program, 5).wait(60)
    assert (outcome.code, outcome.output.splitlines()[-1]) == (0, "1 evaluations"), outcome.output
    (run / "decision.json").unlink()
    waiting = start(1, "-c", program, 5)
    waiting.wait_for_line("evaluation  step 1")
    os.kill(waiting.pid_of(0), signal.SIGTERM)
    assert waiting.wait(30).code == 75


SEEDS = [2, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, *range(3, 26)))]


@pytest.mark.feature(
    "training.backup-and-restore-callback", "training.tensorboard-callback", "semantics.backup-callback-rules"
)
@pytest.mark.parametrize("seed", SEEDS)
def test_harm_at_random_moments_changes_nothing(start, tmp_path, unbroken, seed):
    run = tmp_path / "run"
    options = ("--save-every", 7) if seed % 2 else ()  # else after each epoch
    n_harms, code = run_with_harm(start, run, random.Random(seed), options)
    assert n_harms > 0
    assert end_of(run) == unbroken
    if code == 0:  # else it was harmed after it had said that it is finished
        assert not list((run / "checkpoints").glob("*.h5")), "the program has ended: a new one trains anew"
    assert json.loads((run / "decision.json").read_text())["decision"] == "finished"


@pytest.mark.sweep
def test_fit_on_parameter_servers_resumes(start, tmp_path):
    """A worker is killed, then the job is stopped: each epoch has its line once, of all its steps."""
    run = tmp_path / "run"
    for number, (sign, code) in enumerate([(signal.SIGKILL, None), (signal.SIGTERM, 75), (None, 0)]):
        job = start(3, *command(run, "--strategy", "ps", "--roles", "ps:1,worker:*", "--save-every", 10))
        if sign is not None:
            job.wait_until(lambda number=number: list(run.glob(f"checkpoints/step-*-{number + 1:04d}.h5")))
            os.kill(job.pid_of(2), sign)
        outcome = job.wait(90)
        assert outcome.code == code or (code is None and outcome.code != 0), outcome.output
    history = json.loads((run / "history.json").read_text())
    assert len(history["val_accuracy"]) == 6
    assert history["val_accuracy"][-1] > 0.9
    assert [line.split(",")[0] for line in (run / "log.csv").read_text().splitlines()] == ["epoch", *map(str, range(6))]
    assert "hpcdist: resuming at step" in outcome.output


PREDICT = """
import sys
import numpy as np
import torch
import hpcdist

with hpcdist.MultiWorkerMirroredStrategy().scope():
    model = hpcdist.Model(torch.nn.Linear(4, 64))
model.predict(np.ones((20000, 4), np.float32), batch_size=512, output_file=sys.argv[1])
"""


def test_predictions_that_do_not_fit_on_the_disk(start, tmp_path, small_disk):
    """5 MB on a disk of 3.5: one line, and nothing is left. HDF5 itself would crash the process."""
    program = tmp_path / "program.py"
    program.write_text(PREDICT)
    outcome = start(2, program, small_disk / "out.h5").wait(60)
    assert outcome.code == DataError.exit_code, outcome.output
    assert "predict: expected to write rows to" in outcome.output
    assert "got No space left on device; free space, or choose another path." in outcome.output
    assert list(small_disk.iterdir()) == []
    assert start(2, program, tmp_path / "out.h5").wait(60).code == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["predictions"].shape == (20000, 64)
    assert (tmp_path / "out.h5").stat().st_size < 1.1 * 20000 * 64 * 4


ONE_RANK = """
import sys
import numpy as np
import torch
import hpcdist
from hpcdist.callbacks import LambdaCallback

strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = hpcdist.Model(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse")

def fail(epoch, logs):
    if strategy.rank == 1 and epoch == 1:
        raise ValueError("on purpose")

x = np.ones((64, 4), np.float32)
model.fit(x, x[:, :1], 16, epochs=3, callbacks=[LambdaCallback(on_epoch_end=fail)], verbose=0)
"""


def test_a_callback_that_fails_on_one_rank_ends_the_job(start, tmp_path, nothing_left):
    program = tmp_path / "program.py"
    program.write_text(ONE_RANK)
    job = start(2, program)
    outcome = job.wait(40)
    assert outcome.code != 0
    assert outcome.output.count("ValueError: on purpose") == 1, outcome.output
    nothing_left(job)
