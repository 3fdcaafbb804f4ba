"""Estimators as jobs: roles from TF_CONFIG alone; killed and stopped at random moments, the bits of an unbroken run."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from hpcdist.checkpoint.store import Store

pytestmark = pytest.mark.timeout(200)
ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "estimator.py"
OPTIONS = ("--max-steps", 3000, "--save-every", 150)


def arrays_of(folder):
    """Return step and arrays of the newest checkpoint."""
    checkpoint = Store(folder / "checkpoints").read_latest()
    return checkpoint.index.step, {array.name: array.values.tobytes() for array in checkpoint.arrays}


def has_begun(folder, attempt):
    return (folder / "checkpoints" / "attempts" / f"{attempt:04d}.jsonl").exists()


@pytest.mark.feature("training.estimator")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 8))])
def test_a_run_that_is_harmed_ends_as_an_unbroken_one(start, tmp_path, seed):
    whole = start(2, JOB, "--model-dir", tmp_path / "whole", *OPTIONS).wait(90)
    assert whole.code == 0, whole.output
    run = tmp_path / "run"
    draws = random.Random(seed)
    n_harms = 0
    for attempt in range(1, 5):
        job = start(2, JOB, "--model-dir", run, *OPTIONS)
        sign = draws.choice([signal.SIGKILL, signal.SIGTERM])
        if attempt < 4:
            job.wait_until(lambda attempt=attempt: has_begun(run, attempt))
            time.sleep(draws.uniform(0.2, 1.2))
            if job.process.poll() is None:
                os.kill(job.pid_of(draws.choice([0, 1])), sign)
                n_harms += 1
        outcome = job.wait(90)
        if json.loads((run / "decision.json").read_text())["decision"] == "finished":
            break
        assert outcome.code != 0
        assert sign == signal.SIGKILL or outcome.code == 75, outcome.output
    assert n_harms > 0
    assert outcome.code == 0, outcome.output
    assert outcome.output.splitlines()[-1] == whole.output.splitlines()[-1]
    assert arrays_of(run) == arrays_of(tmp_path / "whole")
    assert arrays_of(run)[0] == 3000


TWO_CALLS = """
import os, signal, sys
import numpy as np
import torch
import hpcdist
from hpcdist.estimator import Estimator, RunConfig

strategy = hpcdist.MultiWorkerMirroredStrategy()
n_steps = 0

def model_fn():
    torch.manual_seed(1)
    model = hpcdist.Model(torch.nn.Linear(1, 1))
    model.compile(lambda p: torch.optim.SGD(p, lr=0.01), "mse")
    return model

def rows(first):
    x = np.arange(first, first + 40, dtype=np.float32)[:, None] / 100
    def input_fn():
        data = hpcdist.Dataset.from_tensor_slices((x, 2 * x))
        return data.map(noting).repeat().batch(2)
    return input_fn

def noting(x, y):
    global n_steps
    n_steps += 1
    if sys.argv[2] == "stop" and n_steps == 2 * 31 and strategy.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return x, y

made = Estimator(model_fn, config=RunConfig(sys.argv[1], train_distribute=strategy, log_step_count_steps=0))
made.train(rows(0), steps=20)
made.train(rows(100), steps=25)
if strategy.is_chief:
    print("end", made.global_step, made.model.get_weights(), flush=True)
"""


@pytest.mark.sweep
def test_a_stop_in_the_second_call_of_train(start, tmp_path):
    """The first call is left out then, and the second one resumes on its own rows."""
    program = tmp_path / "program.py"
    program.write_text(TWO_CALLS)
    whole = start(2, program, tmp_path / "whole", "never").wait(60)
    stopped = start(2, program, tmp_path / "run", "stop").wait(60)
    assert (whole.code, stopped.code) == (0, 75), stopped.output
    resumed = start(2, program, tmp_path / "run", "never").wait(60)
    assert resumed.code == 0, resumed.output
    assert resumed.output.splitlines()[-1] == whole.output.splitlines()[-1]
    assert "end 45 " in whole.output


DIES_IN_EVALUATE = """
import os, sys
import numpy as np
import hpcdist
from hpcdist.estimator import LinearRegressor, RunConfig, numeric_column

n_calls = 0

def input_fn():
    global n_calls
    n_calls += 1
    if sys.argv[2] == "die" and n_calls == 2:
        os._exit(9)  # in evaluate
    x = np.ones(8, np.float32)
    return hpcdist.Dataset.from_tensor_slices(({"x": x}, x)).repeat().batch(4)

config = RunConfig(sys.argv[1], log_step_count_steps=0)
regressor = LinearRegressor([numeric_column("x")], optimizer="SGD", config=config)
regressor.train(input_fn, max_steps=15)
print("end", regressor.evaluate(input_fn, steps=2)["global_step"])
"""


def test_a_run_that_has_its_evaluation_left_only_is_finished_by_it(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(DIES_IN_EVALUATE)
    died = start(1, program, tmp_path / "run", "die").wait(60)
    assert died.code != 0
    decision = tmp_path / "run" / "decision.json"
    assert json.loads(decision.read_text())["decision"] == "requeue"
    outcome = start(1, program, tmp_path / "run", "live").wait(60)
    assert (outcome.code, outcome.output.splitlines()[-1]) == (0, "end 15"), outcome.output
    assert json.loads(decision.read_text())["decision"] == "finished"


WITH_TF_CONFIG = """
import json, os, runpy, sys
cluster = json.loads(sys.argv[1])
tasks = [(kind, index) for kind, hosts in cluster.items() for index, _ in enumerate(hosts)]
kind, index = tasks[int(os.environ["PMI_RANK"])]
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
sys.argv[1:] = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.environ["JOB"]))
runpy.run_path(os.environ["JOB"], run_name="__main__")
"""


@pytest.mark.feature("training.estimator")
@pytest.mark.parametrize("kind", ["all-reduce", "parameter servers"])
def test_roles_come_from_tf_config_alone(start, tmp_path, kind):
    """Chief, worker and evaluator, with and without a server: the program is the same."""
    hosts = {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}
    if kind == "parameter servers":
        hosts["ps"] = ["d:1"]
    program = tmp_path / "program.py"
    program.write_text(WITH_TF_CONFIG)
    options = ("--model-dir", tmp_path / "run", "--max-steps", 800)
    outcome = start(len(hosts), program, json.dumps(hosts), *options, environ={"JOB": str(JOB)}).wait(90)
    assert outcome.code == 0, outcome.output
    assert "global step" not in outcome.output, "the evaluator evaluates"
    lines = list(map(json.loads, (tmp_path / "run" / "eval" / "evaluations.jsonl").read_text().splitlines()))
    n_apart = 2 if kind == "parameter servers" else 1  # each worker makes half of the steps
    assert lines[-1]["step"] == 800 // n_apart, "the last checkpoint, once training has ended"
    assert lines[-1]["accuracy"] > 0.93
