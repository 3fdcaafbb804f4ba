"""The guides' programs under a real Slurm: as a step of two nodes each, and fit in a batch job that is preempted."""

import json
import re
import shutil
import sys

import pytest

pytestmark = pytest.mark.timeout(600)
SRUN = ("srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "--exclusive", "--nodes=2", "--ntasks-per-node=1")


@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("keras_guide.py", ("--folder", "run"), r"test accuracy (0\.\d+)"),
        ("estimator.py", ("--model-dir", "run"), r"global step 600  accuracy (0\.9\d+)"),
        ("gpt.py", ("--kib", "128", "--steps", "20", "--epochs", "1", "--run-dir", "run"), r"val_loss ([1-3]\.\d+)"),
        pytest.param("custom_loop.py", ("--epochs", "1"), r"test accuracy (0\.\d+)", marks=pytest.mark.sweep),
        pytest.param(
            "fit.py", ("--epochs", "3", "--run-dir", "run"), r"test accuracy (0\.\d+)", marks=pytest.mark.sweep
        ),
    ],
    ids=lambda value: value if str(value).endswith(".py") else "",
)
def test_a_guides_program_as_a_step(slurm, folder, root, name, options, last):
    command = (*SRUN, sys.executable, root / "jobs" / name, *options)
    text = slurm.client(*command, cwd=folder, environ={"MPIR_CVAR_CH4_NETMOD": "ofi"}, timeout_s=120)
    assert re.search(last, text), text


@pytest.mark.sweep
def test_fit_is_preempted_and_ends_as_an_unbroken_run(slurm, folder, root, submit, preempt, data):
    """The recipe's line is edited as docs/how-to/slurm.md says. 160 steps: History is that of one process."""
    (folder / "slurm").unlink()
    shutil.copytree(root / "slurm", folder / "slurm")
    recipe = folder / "slurm" / "train.sbatch"
    before = 'jobs/train.py "${replicas[@]}" --copy-every 20'
    after = 'jobs/fit.py "${replicas[@]}"'
    assert before in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(before, after))
    options = ("--data", data, "--batch", 16, "--epochs", 40, "--save-every", 20)
    job = submit("train", *options)
    job.wait_for_training()
    assert preempt(job)["reason"].startswith("SIGTERM on rank ")
    assert "hpcdist: resuming at step" in job.finish()
    alone = folder / "alone"
    command = (sys.executable, root / "jobs" / "fit.py", *options, "--replicas", 2, "--run-dir", alone)
    slurm.client(*command, timeout_s=120)
    assert json.loads((job.run_dir / "history.json").read_text()) == json.loads((alone / "history.json").read_text())
    assert (job.run_dir / "log.csv").read_text() == (alone / "log.csv").read_text()
