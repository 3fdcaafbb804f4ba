"""The scripts of `hpcdist new` run as they are, and end with the same bits after a kill and a stop."""

import os
import re
import signal
import subprocess
import sys

import h5py
import pytest
import torch
from real_jobs import PYTHON

pytestmark = pytest.mark.timeout(300)
KINDS = ("loop", "fit", "ddp")
#: So many that a kill and a stop come long before the end.
N_EPOCHS = 30
LEAST_ACCURACY = 0.9


def write_script(folder, kind):
    command = [PYTHON, "-m", "hpcdist", "new", "train.py", "--kind", kind]
    subprocess.run(command, cwd=folder, check=True, timeout=60, capture_output=True)
    return folder / "train.py"


def results_of(output):
    """Return what a program printed last, without the path of its file."""
    [line] = [line for line in output.splitlines() if line.startswith("best accuracy")]
    return line.partition(",")[0]


def best_weights(run_dir):
    """Return the weights that the script kept, by their names."""
    if (run_dir / "best.pt").exists():
        state = torch.load(run_dir / "best.pt")
        return {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    weights = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset) and name.startswith("model/"):
            weights[name] = item[()].tobytes()

    with h5py.File(run_dir / "best.h5") as file:
        file.visititems(add)
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_script_resumes_with_the_same_bits(start, tmp_path, kind):
    script = write_script(tmp_path, kind)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ("--epochs", N_EPOCHS)
    outcome = start(2, script, *options, "--run-dir", whole).wait(120)
    assert outcome.code == 0, outcome.output
    result = results_of(outcome.output)
    accuracies = re.findall(r"^epoch .* (?:val_)?accuracy (0\.\d+)", outcome.output, re.MULTILINE)
    assert accuracies, outcome.output
    best_accuracy = max(map(float, accuracies))
    assert float(result.split()[-1]) == pytest.approx(best_accuracy, abs=1e-4)
    assert best_accuracy > LEAST_ACCURACY

    job = start(2, script, *options, "--run-dir", broken)
    job.wait_for_line("epoch 4/")
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.wait(60).code != 0
    job = start(2, script, *options, "--run-dir", broken)
    job.wait_for_line("epoch 7/")
    os.kill(job.pid_of(0), signal.SIGTERM)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    assert "epoch 2/" not in outcome.output, "a resumed run does not begin anew"
    outcome = start(2, script, *options, "--run-dir", broken).wait(120)
    assert outcome.code == 0, outcome.output
    assert results_of(outcome.output) == result
    weights = best_weights(whole)
    assert len(weights) == 4
    assert best_weights(broken) == weights


def test_a_script_on_one_rank_needs_no_launcher(tmp_path, job_environ):
    script = write_script(tmp_path, "loop")
    done = subprocess.run(
        [sys.executable, script, "--epochs", "2"],
        cwd=tmp_path,
        env=job_environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "train" / "best.pt").exists()
