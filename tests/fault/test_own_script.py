"""A script as people have them, made restartable by a few lines, killed again and again: it ends with the same bits."""

import difflib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(900)
JOBS = Path(__file__).resolve().parents[2] / "jobs"
MPIRUN = Path(sys.executable).with_name("mpirun")
#: Lines of code that may differ, as the guide promises.
MAX_CHANGED = 12
EPOCHS = 5


def start(environ, run_dir):
    command = [MPIRUN, "-n", "2", sys.executable, JOBS / "own_script.py"]
    command += ["--epochs", str(EPOCHS), "--run-dir", run_dir]
    environ = {**environ, "OMP_NUM_THREADS": "1", "HPCDIST_TIMEOUT_S": "60"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )


def ranks_of(run_dir):
    """Return the processes of the ranks, which name the run folder."""
    rank_pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has ended
            continue
        is_rank = words[0] == sys.executable and str(run_dir) in words
        if is_rank and (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] != str(os.getpid()):
            rank_pids.append(int(folder.name))
    return rank_pids


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    # mpirun may print lines of two ranks as one
    return re.findall(r"best accuracy \d\.\d+, at the end \d\.\d{4}", output)


def kill_at_random(environ, run_dir, n_kills, seed, whole_s):
    """Kill a random rank at a random time, `n_kills` times; return how many kills hit a running job.

    A run without a kill takes `whole_s`; one that resumes is shorter.
    """
    random_numbers = random.Random(seed)
    n_killed = 0
    for _ in range(n_kills):
        process = start(environ, run_dir)
        time.sleep(random_numbers.uniform(0.4, 0.8) * whole_s)
        pids = ranks_of(run_dir)
        if process.poll() is None and pids:
            os.kill(random_numbers.choice(pids), signal.SIGKILL)
            n_killed += 1
        process.communicate(timeout=120)
    return n_killed


def end_of(run_dir):
    """Return what the best weights are, on each rank."""
    return [torch.load(run_dir / f"rank-{rank}" / "best.pt") for rank in range(2)]


@pytest.mark.feature("checkpoints.exact-resume")
@pytest.mark.parametrize("n_kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_script_that_is_killed_ends_with_the_same_bits(clean_environ, tmp_path, n_kills):
    started = time.monotonic()
    expected = finish(start(clean_environ, tmp_path / "unbroken"))
    whole_s = time.monotonic() - started
    n_killed = kill_at_random(clean_environ, tmp_path / "killed", n_kills, n_kills, whole_s)
    assert finish(start(clean_environ, tmp_path / "killed")) == expected
    assert n_killed > 0
    for unbroken_weights, killed_weights in zip(
        end_of(tmp_path / "unbroken"), end_of(tmp_path / "killed"), strict=True
    ):
        assert unbroken_weights.keys() == killed_weights.keys()
        assert all(torch.equal(unbroken_weights[name], killed_weights[name]) for name in unbroken_weights)


def code_of(name):
    """Return the lines of a script after its docstring."""
    lines = (JOBS / name).read_text().splitlines()
    return lines[lines.index("import argparse") :]


def test_few_lines_differ_from_the_plain_script_and_the_guide_shows_them():
    plain = code_of("own_script_plain.py")
    adapted_lines = code_of("own_script.py")
    changed = []
    for line in difflib.ndiff(plain, adapted_lines):
        if line[0] in "+-" and line[2:].strip():
            changed.append(line)
    assert sum(line.startswith("+") for line in changed) <= MAX_CHANGED
    assert len(plain) >= 100
    guide = (JOBS.parent / "docs" / "how-to" / "full-script.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", guide, re.DOTALL).group(1)
    assert shown.splitlines() == changed


def test_the_plain_script_learns(clean_environ, tmp_path):
    command = [sys.executable, JOBS / "own_script_plain.py", "--run-dir", tmp_path, "--workers", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**clean_environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    best = float(re.search(r"best accuracy ([0-9.]+)", done.stdout).group(1))
    assert best > 0.9
