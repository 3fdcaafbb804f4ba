"""The programs of the guides, as users start them."""

import os
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


@pytest.mark.feature("checkpoints.resume-on-other-ranks")
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
        file.visititems(lambda name, node: arrays.update({name: node[()].tobytes()} if hasattr(node, "dtype") else {}))
    del arrays["index"]  # it has times and the numbers of attempts
    assert arrays
    return arrays


@pytest.mark.feature("training.custom-loops")
def test_the_custom_loop_learns(clean_environ):
    out = run(clean_environ, 2, "custom_loop.py", "--epochs", "4")
    assert float(re.findall(r"test accuracy ([0-9.]+)", out)[-1]) > 0.93


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_loss_curve_of_the_linear_regression(clean_environ, n_ranks):
    """Worked out by hand: d = w + b - 1 and w change by known amounts at each step."""
    out = run(clean_environ, n_ranks, "linear_regression.py")
    weight = 0.5
    bias = 0.0
    expected = []
    for _ in range(5):
        losses = []
        for _ in range(10):
            error = weight + bias - 1
            losses.append(error**2 + 1e-4 * weight**2)
            weight = weight - 0.01 * (2 * error + 2e-4 * weight)
            bias = bias - 0.01 * 2 * error
        expected.append(np.mean(losses))
    printed_losses = list(map(float, re.findall(r"loss ([0-9.]+)", out)))
    assert printed_losses == pytest.approx(expected, abs=2e-6)


def test_the_numpy_job_resumes_with_the_same_bits(clean_environ, tmp_path):
    whole = run(clean_environ, 2, "numpy_digits.py", "--epochs", "4", "--run-dir", tmp_path / "whole")
    for epochs in ("2", "4"):
        parts = run(clean_environ, 2, "numpy_digits.py", "--epochs", epochs, "--run-dir", tmp_path / "parts")
    weights = [newest_arrays(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert re.findall(r"accuracy [0-9.]+", whole) == re.findall(r"accuracy [0-9.]+", parts)
    assert float(re.findall(r"accuracy ([0-9.]+)", whole)[0]) > 0.9


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ps", "all-reduce"])
def test_the_wide_embedding_learns(clean_environ, strategy):
    if strategy == "ps":
        roles = ("--roles", "ps:1,worker:*")
    else:
        roles = ("--strategy", "all-reduce")
    out = run(clean_environ, 3, "wide_embedding.py", *roles, "--features", "20000", "--steps", "150")
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+), [\d.]+ steps/s", out).groups())
    assert last < 0.85 * first


@pytest.mark.sweep
@pytest.mark.parametrize("options", [("--max-staleness", "4"), ("--synchronous",)])
def test_stragglers(clean_environ, options):
    options = ("--roles", "ps:1,worker:*", "--compute-s", "0.002", "--steps", "120", *options)
    out = run(clean_environ, 4, "stragglers.py", *options)
    accuracy, oldest = re.search(r"accuracy ([\d.]+), values up to (\d+) updates old", out).groups()
    assert float(accuracy) > 0.9
    # 3 workers, each at most 5 steps apart
    if "--synchronous" in options:
        most_steps = 0
    else:
        most_steps = 2 * 3 * 5
    assert int(oldest) <= most_steps


GUIDES_CLUSTER = """
import json, os, sys
is_new = sys.argv[1] == "new"
cluster = {"worker": ["host1:port", "host2:port", "host3:port"], "ps": ["host4:port", "host5:port"]}
if is_new:  # "Parameter server training with ParameterServerStrategy"; without: "Distributed training with TensorFlow"
    cluster["chief"] = ["host6:port"]
tasks = [(kind, index) for kind, hosts in cluster.items() for index, _ in enumerate(hosts)]
kind, index = tasks[int(os.environ["PMI_RANK"])]
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})

import torch
import hpcdist

resolver = hpcdist.cluster_resolver.TFConfigClusterResolver()
program = ("chief", 0) if is_new else ("worker", 0)
drives = sys.argv[2] == "coordinator"
if drives and (resolver.task_type, resolver.task_id) != program:
    spec = resolver.cluster_spec()
    hpcdist.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc").join()
strategy = hpcdist.experimental.ParameterServerStrategy(resolver) if is_new else hpcdist.ParameterServerStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

def step():
    optimizer.zero_grad()
    (-model(torch.ones(1, 2))).sum().backward()
    optimizer.step()

if drives:
    coordinator = hpcdist.coordinator.ClusterCoordinator(strategy)
    for _ in range(30):
        coordinator.schedule(step)
    coordinator.join()
else:
    for _ in range(10):
        step()
    strategy.refresh()
if strategy.is_chief:
    print("weights", model.weight.tolist(), "workers", strategy.n_replicas, flush=True)
"""


@pytest.mark.feature("launch.server")
@pytest.mark.parametrize(
    ("guide", "mode"),
    [
        pytest.param("old", "loop", marks=pytest.mark.sweep),
        pytest.param("old", "coordinator", marks=pytest.mark.sweep),
        pytest.param("new", "loop", marks=pytest.mark.sweep),
        ("new", "coordinator"),
    ],
)
def test_the_guides_tf_config_of_parameter_servers(clean_environ, tmp_path, guide, mode):
    """Every push counts: a whole number for each step. A chief of workers that loop trains like them."""
    program = tmp_path / "program.py"
    program.write_text(GUIDES_CLUSTER)
    if guide == "new":
        n_ranks = 6
    else:
        n_ranks = 5
    out = run(clean_environ, n_ranks, program, guide, mode)
    if mode == "coordinator" or guide == "old":
        n_steps = 30
    else:
        n_steps = 40
    if mode == "coordinator":
        n_workers = 1
    elif guide == "old":
        n_workers = 3
    else:
        n_workers = 4
    assert f"weights [[{n_steps}.0, {n_steps}.0]] workers {n_workers}" in out


@pytest.mark.parametrize("n_ranks", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_the_guide_by_compile_and_fit_goes_on_from_its_own_files(clean_environ, tmp_path, n_ranks):
    """The second call of its training function lists the folder, and restores the newest file, as in the guide."""
    lines = run(clean_environ, n_ranks, "keras_guide.py", "--folder", tmp_path, "--epochs", "3").splitlines()
    assert [line for line in lines if not line.startswith("epoch")] == [
        "Creating a new model",
        f"Restoring from {tmp_path}/ckpt/ckpt-3.keras",
        lines[-1],
    ]
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == [
        *("1/3", "2/3", "3/3"),
        *("4/6", "5/6", "6/6"),
    ]
    assert float(lines[-1].removeprefix("test accuracy ")) > 0.93
    assert sorted(os.listdir(tmp_path / "ckpt")) == [f"ckpt-{n}.keras" for n in range(1, 7)]


@pytest.mark.sweep
def test_the_gpt_learns_in_pieces_and_in_half_precision(clean_environ, tmp_path):
    """Uniform guesses would have a loss of 4.85."""
    options = ("--kib", "256", "--steps", "80", "--epochs", "1", "--pieces", "2", "--precision", "mixed_bfloat16")
    out = run(clean_environ, 2, "gpt.py", *options, "--run-dir", tmp_path, "--prompt", "def f(x")
    first, *written = out.splitlines()
    assert float(first.split("val_loss ")[1]) < 3.2
    assert written[0].startswith("def f(x")


#: Program -> options; figures after so few steps say only that it learns.
PROGRAMS = {
    "keras_guide.py": ("--folder", "{run}"),
    "custom_loop.py": ("--epochs", "1"),
    "gpt.py": ("--epochs", "1", "--steps", "10", "--kib", "64", "--run-dir", "{run}"),
    "estimator.py": ("--model-dir", "{run}", "--max-steps", "60"),
    "fit.py": ("--model", "cnn", "--epochs", "3", "--run-dir", "{run}"),
}


@pytest.mark.parametrize("n_ranks", [None, pytest.param(4, marks=pytest.mark.sweep)], ids=["python", "mpirun -n 4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_runs_alone_and_on_four_ranks(clean_environ, tmp_path, name, n_ranks):
    options = [option.format(run=tmp_path / "run") for option in PROGRAMS[name]]
    if n_ranks is None:
        launcher = []
    else:
        launcher = [MPIRUN, "-n", str(n_ranks)]
    environ = {**clean_environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, sys.executable, JOBS / name, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    if name == "gpt.py":
        assert float(re.findall(r"val_loss ([0-9.]+)", done.stdout)[-1]) < 5
    else:
        assert float(re.findall(r"accuracy (0\.[0-9]+|1)", done.stdout)[-1]) > 0.8, done.stdout
