"""The command on a login node, where torch and MPI cannot be imported: it reads runs, and says what is missing."""

import os
import subprocess
import sys

import pytest

#: Modules that need libraries or devices of compute nodes.
HIDDEN = ("torch", "mpi4py", "cupy")
TRAIN = """
import logging
import sys
import numpy as np
import hpcdist

hpcdist.log_to(sys.argv[1] + "/logs")
values = np.arange(4.0)
checkpoint = hpcdist.Checkpoint(values=values)
with hpcdist.PreemptionCheckpointHandler(None, checkpoint, sys.argv[1] + "/checkpoints") as handler:
    for _ in range(3):
        values += 1
        logging.warning("values of %s", values)
        handler.save_checkpoint_if_preempted()
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Return the folder of a run of one rank that has finished."""
    folder = tmp_path_factory.mktemp("run")
    subprocess.run([sys.executable, "-c", TRAIN, str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def hiding(tmp_path_factory):
    """Return an environment in which the hidden modules cannot be imported."""
    folder = tmp_path_factory.mktemp("hidden")
    for module in HIDDEN:
        (folder / f"{module}.py").write_text(f"raise ImportError('no {module} on a login node')")
    return {**os.environ, "PYTHONPATH": str(folder)}


def hpcdist(environment, *arguments):
    command = [sys.executable, "-m", "hpcdist", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_modules_are_hidden(hiding):
    for module in HIDDEN:
        imported = subprocess.run(
            [sys.executable, "-c", f"import {module}"], env=hiding, capture_output=True, timeout=60
        )
        assert b"on a login node" in imported.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("status", "."), "finished: the program has finished"),
        (("status", "--json", "."), '"step": 3'),
        (("logs", "."), "values of [3. 4. 5. 6.]"),
        (("report", "."), "report.html"),
        (("trace", "."), "trace.json"),
        (("ckpt", "ls", "checkpoints"), "step-00000003-0001.h5"),
        (("ckpt", "show", "checkpoints"), "float64"),
        (("ckpt", "verify", "checkpoints"), "sound"),
        (("ckpt", "diff", "checkpoints", "checkpoints"), "1 arrays have the same bits"),
        (("ckpt", "prune", "--keep", "1", "checkpoints"), ""),
        (("new", "train.py"), "wrote train.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_run_is_read(hiding, run_folder, monkeypatch, arguments, text):
    monkeypatch.chdir(run_folder)
    done = hpcdist(hiding, *arguments)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout + done.stderr


def test_a_job_is_submitted_if_its_library_is_named(hiding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    hiding = {**hiding, "HOME": str(tmp_path)}
    arguments = ("submit", "--dry-run", "train.py", "--run-dir", "runs/a")
    done = hpcdist(hiding, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1), done.stderr
    assert 'library = "mpich" or "openmpi" under [submit] in hpcdist.toml' in done.stderr
    (tmp_path / "hpcdist.toml").write_text('[submit]\nlibrary = "mpich"\n')
    done = hpcdist(hiding, *arguments)
    assert done.returncode == 0, done.stderr
    assert "srun --mpi=pmi2" in done.stdout


def test_a_run_that_has_ended_is_not_stopped(hiding, run_folder):
    done = hpcdist(hiding, "stop", run_folder)
    assert done.returncode == 2
    assert "expected a run that is under way" in done.stderr
