"""The main job is killed with SIGKILL and started again by the same command: it ends with the same bits."""

import random
import re
import subprocess
import time

import numpy as np
import pytest
from real_jobs import final_state
from scale import SCALE

SEED = 20261121
N_KILLS = SCALE.choose(4, 20)


def command(root, run_dir, *more):
    return [root / "jobs" / "train.py", "--run-dir", run_dir, "--epochs", "12", "--save-every", "4", *more]


def finish(start, root, run_dir, n_ranks=2, *more):
    outcome = start(n_ranks, *command(root, run_dir, *more)).wait(100)
    assert outcome.code == 0, outcome.output[-3000:]
    return outcome.output


def half_written(run_dir):
    """Return the names of files that are being written, or were when their writer was killed."""
    return {path.name for path in (run_dir / "checkpoints").rglob("*.tmp-*")}


def newest_step(run_dir):
    """Return the highest step that any attempt of a run has committed, -1 if none has."""
    return max((int(path.stem.split("-")[1]) for path in run_dir.rglob("step-*.h5")), default=-1)


class Kill:
    """One job that is killed: after a delay or, if asked, at the first file that it is writing after that delay.

    The delay is counted from the job's first line, which it prints when it starts to train, or from its start. With
    `after_progress` it starts once the job has committed a newer checkpoint than any attempt before it.
    """

    def __init__(self, job, run_dir, delay_s, in_training, while_saving, after_progress):
        before = half_written(run_dir)
        step_before = newest_step(run_dir)
        self._wait(job, lambda: not in_training or "replicas;" in job.log.read_text(), 30)
        self._wait(job, lambda: not after_progress or newest_step(run_dir) > step_before, 60)
        time.sleep(delay_s)
        self._wait(job, lambda: not while_saving or half_written(run_dir) - before, 10)
        self.was_running = job.process.poll() is None
        job.kill()
        self.was_training = self.was_running and "replicas;" in job.log.read_text()
        self.was_saving = self.was_running and bool(half_written(run_dir) - before)
        self.has_progressed = newest_step(run_dir) > step_before

    def _wait(self, job, is_true, limit_s):
        deadline = time.monotonic() + limit_s
        while not is_true() and job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0002)


@pytest.mark.feature("checkpoints.exact-resume", "semantics.health-check", "complaints.mid-epoch-resume")
@pytest.mark.quick
@pytest.mark.timeout(600)
def test_killed_again_and_again_it_ends_with_the_same_bits(start, root, tmp_path):
    """Every fourth kill comes at any time from the start on; the others in training, most while a file is written.

    A run is given up after three deaths without a newer checkpoint, so on a slow machine the third one waits for that.
    """
    finish(start, root, tmp_path / "unbroken")
    chance = random.Random(SEED)
    kills = []
    run_dir = tmp_path / "killed"
    n_without_progress = 0
    for attempt in range(60):
        in_training = attempt % 4 != 0
        while_saving = attempt % 4 in (1, 3)
        if in_training:
            delay_s = chance.uniform(0, 1.0)
        else:
            delay_s = chance.uniform(0, 3)
        job = start(2, *command(root, run_dir))
        after_progress = n_without_progress == 2
        kill = Kill(job, run_dir, delay_s, in_training, while_saving, after_progress)
        if kill.has_progressed:
            n_without_progress = 0
        else:
            n_without_progress = n_without_progress + 1
        if kill.was_running:
            kills.append(kill)
        else:  # it had finished: start over, so that the later kills have something to hit
            assert final_state(run_dir) == final_state(tmp_path / "unbroken")
            run_dir = tmp_path / f"killed-{len(kills)}"
            n_without_progress = 0
        if len(kills) == N_KILLS:
            break
    finish(start, root, run_dir)
    assert final_state(run_dir) == final_state(tmp_path / "unbroken")
    assert half_written(run_dir) == set()
    training, saving = (sum(getattr(kill, name) for kill in kills) for name in ("was_training", "was_saving"))
    print(f"{len(kills)} kills, {training} in training, {saving} while a file was written, seed {SEED}")
    assert len(kills) == N_KILLS
    assert training >= N_KILLS // 2
    assert saving >= N_KILLS // 8


@pytest.mark.timeout(200)
@pytest.mark.sweep
def test_the_cnn_resumes_on_four_ranks(start, root, tmp_path):
    options = ("--model", "cnn", "--epochs", "2")
    finish(start, root, tmp_path / "unbroken", 4, *options)
    job = start(4, *command(root, tmp_path / "killed", *options))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "killed").rglob("step-00000012-*.h5")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.kill()
    assert "resuming from" in finish(start, root, tmp_path / "killed", 4, *options)
    assert final_state(tmp_path / "killed") == final_state(tmp_path / "unbroken")


@pytest.mark.feature(
    "input.data-cursor",
    "checkpoints.snapshot-of-replicas",
    "checkpoints.resume-on-other-ranks",
    "complaints.resume-on-another-count",
)
@pytest.mark.timeout(200)
def test_another_number_of_ranks_resumes_at_the_same_sample(start, root, tmp_path):
    """Sample-exact, and equal within rounding: sums are taken in another order, and the job says so."""
    finish(start, root, tmp_path / "unbroken")
    finish(start, root, tmp_path / "moved", 3, "--epochs", "5")
    output = finish(start, root, tmp_path / "moved", 1)
    assert "ranks 3 -> 1" in output
    names = []
    states = []
    for run in ("unbroken", "moved"):
        step, arrays, state, _ = final_state(tmp_path / run)
        names.append((step, state["objects"]["data"]))
        weights = [arrays[name] for name in sorted(arrays) if name.startswith("model/")]
        states.append(np.frombuffer(b"".join(weights), np.float32))
    assert names[0] == names[1]
    assert np.abs(states[0] - states[1]).max() < 5e-3


@pytest.mark.sweep
def test_a_finished_job_only_reports(start, root, tmp_path):
    options = ("--epochs", "2")
    first = finish(start, root, tmp_path / "run", 1, *options)
    rerun_output = finish(start, root, tmp_path / "run", 1, *options)
    assert first.splitlines()[-1] == rerun_output.splitlines()[-1]
    assert "epoch 2/2" not in rerun_output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def ended_with_74(outcome, text):
    lines = re.findall(r"^hpcdist: (?!attempt \d).*$", outcome.output, re.MULTILINE)  # but for the one at the start
    assert outcome.code == 74, outcome.output
    assert len(lines) == 1, outcome.output
    assert text in lines[0]
    assert "Traceback" not in outcome.output


def test_a_full_disk_ends_the_job_and_room_lets_it_resume(start, root, tmp_path, small_disk):
    outcome = start(2, *command(root, small_disk / "run")).wait(60)
    ended_with_74(outcome, "bytes free in")
    assert list((small_disk / "run" / "checkpoints").rglob("*.tmp-*")) == []
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert "resuming from" in finish(start, root, small_disk / "run")
    finish(start, root, tmp_path / "unbroken")
    assert final_state(small_disk / "run") == final_state(tmp_path / "unbroken")


@pytest.mark.sweep
def test_a_read_only_disk(start, root, small_disk):
    finish(start, root, small_disk / "run", 1, "--epochs", "1", "--save-every", "100")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ended_with_74(start(2, *command(root, small_disk / "run")).wait(60), "expected a folder that can be written")
