"""The batch script that README names, under a real Slurm: two nodes, two ranks each."""

import json
import time

import pytest

pytestmark = pytest.mark.timeout(240)


def submit(slurm, root, folder, *options):
    """Submit README's command with another run folder; return the job's id and its log."""
    log = folder / "job.log"
    job = slurm.client(
        "sbatch",
        "--parsable",
        "--nodes",
        "2",
        f"--output={log}",
        root / "slurm" / "train.sbatch",
        "--run-dir",
        folder / "run",
        *options,
        cwd=root,
    ).strip()
    return job, log


def finish(slurm, job, log):
    slurm.wait_for(f"job {job}", lambda: slurm.state(job) in ("COMPLETED", "FAILED", "TIMEOUT"), 120)
    text = log.read_text()
    assert slurm.state(job) == "COMPLETED", text[-3000:]
    return text


def test_two_nodes_and_the_same_command_again(slurm, root, tmp_path):
    job, log = submit(slurm, root, tmp_path, "--epochs", "3")
    text = finish(slurm, job, log)
    assert "4 replicas; new run" in text
    assert "epoch 3/3" in text
    job, log = submit(slurm, root, tmp_path, "--epochs", "4")
    assert "4 replicas; going on from" in finish(slurm, job, log)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]


def test_requeued_in_the_middle_it_goes_on(slurm, root, tmp_path):
    options = ("--epochs", "25", "--save-every", "5")
    job, log = submit(slurm, root, tmp_path, *options)
    slurm.wait_for("a checkpoint", lambda: list((tmp_path / "run").rglob("step-*.json")))
    slurm.client("scontrol", "requeue", job)
    slurm.wait_for("the requeue", lambda: slurm.state(job) == "PENDING")
    time.sleep(5)  # Slurm takes word of the first script's end for that of the second, if that one runs by then
    slurm.client("scontrol", "update", f"JobId={job}", "StartTime=now")
    text = finish(slurm, job, log)
    assert text.count("4 replicas; new run") == 1
    assert text.count("4 replicas; going on from") == 1
    assert "epoch 25/25" in text
