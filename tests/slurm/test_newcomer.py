"""A new user's first half hour, as a transcript: install, doctor, two lines, four ranks, a batch job that is preempted.

`make transcript` writes it to docs/tutorials/transcript.md.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "newcomer"
#: What differs on every machine, or says nothing.
_NOISE = re.compile(r"^(WARNING: Running pip as|\[notice\]|$)")
_LONGEST_LINES = 14
_INTRODUCTION = """# A first half hour, as it went

Written by `make transcript`, which makes a new environment, starts a Slurm of its own, and types these commands. The
machine has two cores. Times are of the wall clock. Long outputs are cut in the middle.
"""


class Terminal:
    """Runs commands as a user types them, and keeps what they print, with how long each took."""

    def __init__(self, folder, environ):
        self.folder = folder
        self.environ = environ
        self.text = _INTRODUCTION

    def say(self, title, text=""):
        """Write a heading, and what a user thinks."""
        self.text += f"\n## {title}\n" + (f"\n{text}\n" if text else "")

    def type(self, command, timeout_s=120, code=0):
        """Run a command; return what it prints."""
        began = time.monotonic()
        done = subprocess.run(
            ["setsid", "--wait", "bash", "-c", command],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        seconds = time.monotonic() - began
        assert done.returncode == code, done.stdout[-3000:]
        shown = done.stdout.replace(str(self.folder), "/home/you")
        lines = [line for line in shown.splitlines() if not _NOISE.match(line)]
        if len(lines) > _LONGEST_LINES:
            lines = [*lines[: _LONGEST_LINES - 4], "...", *lines[-3:]]
        self.text += "\n".join(["", "```console", f"$ {command}", *lines, "```", "", f"{seconds:.1f} s", ""])
        return done.stdout


@pytest.mark.feature("checkpoints.rehearsed-preemption", "slurm.script-writer")
@pytest.mark.timeout(1200)
def test_a_newcomers_first_half_hour(slurm, root, tmp_path, pytestconfig):
    """The commands do what they say: the drill preempts the job, which resumes and finishes."""
    began = time.monotonic()
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (root / name).exists():
            (tmp_path / "hpcdist" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tmp_path / "hpcdist" / name)
    for program in PROGRAMS.glob("*.py"):
        shutil.copy2(program, tmp_path)
    path = f"{tmp_path}/env/bin:{os.path.dirname(sys.executable)}:{slurm.environ['PATH']}"
    user_environ = {"HOME": str(tmp_path), "PATH": path, "OMP_NUM_THREADS": "1", "PYTHON": f"{tmp_path}/env/bin/python"}
    environ = {}
    for name, value in slurm.environ.items():
        if name not in ("PYTHONPATH", "PROBE_PACE_S"):
            environ[name] = value
    terminal = Terminal(tmp_path, {**environ, **user_environ})

    terminal.say("Install", "From the folder in which the repository was cloned.")
    terminal.type("python3 -m venv env")
    terminal.type("pip install -q -c hpcdist/constraints.txt './hpcdist[mpich,report]'", 400)
    terminal.say("Is the machine all right?")
    assert "ok    world" in terminal.type("hpcdist doctor")

    terminal.say("A script of your own", "`plain.py` is a loop in plain torch. An import and two lines distribute it.")
    terminal.type("diff plain.py mine.py", code=1)
    assert "epoch 10  step 25  loss" in terminal.type("hpcdist run -n 4 mine.py 10", 400)

    terminal.say("Restarts", "Two more lines save it every 500 steps, and whenever it is asked to stop.")
    terminal.type("diff mine.py restarts.py", code=1)
    terminal.say("A batch job", "A drill preempts it once, 8 s after its start.")
    options = "--nodes 2 --ntasks-per-node 2 --time 0:15:00 --drill 8 --run-dir runs/mine"
    folder = tmp_path / "runs" / "mine"
    try:
        job = re.search(r"submitted job (\d+)", terminal.type(f"hpcdist submit {options} restarts.py 40"))[1]
        slurm.wait_for("the run", lambda: (folder / "trace").exists(), 60)
        assert "runs/mine" in terminal.type("hpcdist status")
        slurm.wait_for("its end", lambda: slurm.fact(job, "JobState") in ("COMPLETED", "FAILED"), 500)
    finally:
        slurm.client("scancel", "--name=runs-mine")
    status = terminal.type(f"hpcdist status {job}")
    assert "finished: the program has finished" in status
    assert "attempt     2 in job" in status
    terminal.say("What it did")
    assert "epoch 40  step 25  loss" in terminal.type("tail -n 3 runs-mine-*.log")
    terminal.type("hpcdist ckpt ls runs/mine")
    assert "pictures beside it" in terminal.type("hpcdist report runs/mine")
    assert "steps of 4 ranks" in terminal.type("hpcdist trace runs/mine")
    assert "<b>2</b><span>attempts</span>" in (folder / "report" / "report.html").read_text()
    seconds = time.monotonic() - began
    terminal.say("All of it", f"{seconds:.0f} s.")
    out = pytestconfig.getoption("--transcript")
    if out is not None:
        Path(out).write_text(terminal.text)
        assert seconds < 600, "on a machine with nothing else to do it takes less than ten minutes"
