"""The programs of the guides, as users start them."""

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.timeout(240)
JOBS = Path(__file__).resolve().parents[2] / "jobs"
MPIRUN = Path(sys.executable).with_name("mpirun")


def run(environ, n_ranks, name, *options):
    command = [MPIRUN, "-n", str(n_ranks), sys.executable, JOBS / name, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "options"),
    [("custom_loop.py", ("--replicas", "4", "--epochs", "1")), ("gan.py", ("--replicas", "4", "--steps", "30"))],
)
def test_the_same_digits_on_any_number_of_ranks(clean_environ, name, options):
    on_one, on_three = (run(clean_environ, n_ranks, name, *options) for n_ranks in (1, 3))
    assert on_one == on_three
    assert re.search(r"[0-9]\.[0-9]{6}", on_one)


@pytest.mark.sweep
def test_the_main_job_has_the_same_bits_on_any_number_of_ranks(clean_environ, tmp_path):
    """Also when it goes on on another number of ranks."""
    for folder, n_ranks, epochs in (("one", 1, 2), ("two", 2, 1), ("two", 3, 2)):
        options = ("--replicas", "5", "--model", "cnn", "--epochs", str(epochs), "--run-dir", tmp_path / folder)
        run(clean_environ, n_ranks, "train.py", *options)
    metrics = [(tmp_path / folder / "metrics.jsonl").read_bytes() for folder in ("one", "two")]
    arrays = [newest_arrays(tmp_path / folder / "checkpoints") for folder in ("one", "two")]
    assert metrics[0] == metrics[1]
    assert arrays[0] == arrays[1]


def newest_arrays(folder):
    """Return the bytes of all arrays of the newest checkpoint by their names."""
    arrays = {}
    with h5py.File(sorted(folder.rglob("step-*.h5"))[-1]) as file:
        file.visititems(lambda name, one: arrays.update({name: one[()].tobytes()} if hasattr(one, "dtype") else {}))
    del arrays["index"]  # it has times and the numbers of attempts
    assert arrays
    return arrays


def test_the_custom_loop_learns(clean_environ):
    out = run(clean_environ, 2, "custom_loop.py", "--epochs", "4")
    assert float(re.findall(r"test accuracy ([0-9.]+)", out)[-1]) > 0.93


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_loss_curve_of_the_linear_regression(clean_environ, n_ranks):
    """Worked out by hand: d = w + b - 1 and w change by known amounts at each step."""
    out = run(clean_environ, n_ranks, "linear_regression.py")
    weight, bias, expected = 0.5, 0.0, []
    for _ in range(5):
        losses = []
        for _ in range(10):
            error = weight + bias - 1
            losses.append(error**2 + 1e-4 * weight**2)
            weight, bias = weight - 0.01 * (2 * error + 2e-4 * weight), bias - 0.01 * 2 * error
        expected.append(np.mean(losses))
    found = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", out)]
    assert found == pytest.approx(expected, abs=2e-6)


def test_the_numpy_job_resumes_with_the_same_bits(clean_environ, tmp_path):
    whole = run(clean_environ, 2, "numpy_digits.py", "--epochs", "4", "--run-dir", tmp_path / "whole")
    for epochs in ("2", "4"):
        parts = run(clean_environ, 2, "numpy_digits.py", "--epochs", epochs, "--run-dir", tmp_path / "parts")
    weights = [newest_arrays(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert re.findall(r"accuracy [0-9.]+", whole) == re.findall(r"accuracy [0-9.]+", parts)
    assert float(re.findall(r"accuracy ([0-9.]+)", whole)[0]) > 0.9
