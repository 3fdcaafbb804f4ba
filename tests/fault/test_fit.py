"""fit is stopped and killed at random moments: History, weights, lines and events are those of an unbroken run."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from real_jobs import MPIRUN, PYTHON
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcdist.checkpoint.read import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FIT = ROOT / "jobs" / "fit.py"

pytestmark = pytest.mark.timeout(200)


def command(run, *options):
    return [FIT, "--run-dir", run, "--epochs", 6, "--save-every", 7, *options]


def events_of(folder):
    """Return what a reader of event files sees: (tag, step, value) of each."""
    accumulator = EventAccumulator(str(folder), purge_orphaned_data=True)
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return [(tag, one.step, one.value) for tag in tags for one in accumulator.Scalars(tag)]


def end_of(run):
    """Return all that a run leaves."""
    with open_checkpoint(run / "best.h5") as file:
        weights = [array.values.tobytes() for array in file.read_arrays()]
    events = [sorted(events_of(run / "tensorboard" / kind)) for kind in ("train", "validation")]
    return json.loads((run / "history.json").read_text()), (run / "log.csv").read_text(), weights, events


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    arguments = [str(one) for one in (MPIRUN, "-n", 2, PYTHON, *command(run))]
    subprocess.run(
        arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=90, check=True, stdout=subprocess.DEVNULL
    )
    found = end_of(run)
    assert len(found[0]["val_loss"]) == 6
    assert [step for tag, step, _ in found[3][0] if tag == "epoch_loss"] == list(range(6))
    return found


def run_with_harm(start, run, draws):
    """Run it, harmed at three random moments, until it ends; return how many of them were in time."""
    n_harms = 0
    for number in range(4):
        job = start(2, *command(run))
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
            return n_harms
        assert sign == signal.SIGKILL or outcome.code == 75, outcome.output
        assert outcome.code != 0
    raise AssertionError(f"the run did not end: {outcome.output}")


SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(3, 26))]


@pytest.mark.parametrize("seed", SEEDS)
def test_harm_at_random_moments_changes_nothing(start, tmp_path, unbroken, seed):
    run = tmp_path / "run"
    assert run_with_harm(start, run, random.Random(seed))
    assert end_of(run) == unbroken
    assert not list((run / "checkpoints").glob("*.h5")), "the program has ended: a new one trains anew"
    assert json.loads((run / "decision.json").read_text())["decision"] == "finished"
