"""The tutorial of a user's own script, typed: install, doctor, four ranks, a stop, a batch job that is preempted.

`make tutorial` writes it to docs/tutorials/own-script.md.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "newcomer"
#: What differs on every machine, or says nothing.
_NOISE = re.compile(r"^(WARNING: Running pip as|\[notice\])")
_LONGEST_LINES = 14
_INTRODUCTION = """# Your own script, from plain torch to a preempted Slurm job

You have a training script in plain torch and a cluster with Slurm. At the end of this page the
script runs on four ranks of two nodes, was preempted, and has gone on with the same bits. It takes
less than ten minutes.

Every output is real: `make tutorial` makes an empty environment, starts a Slurm on a machine with
two cores, types these commands, and writes this page. Long outputs are cut in the middle; the time
of each command is below it.
"""


_FOUR_RANKS = """\
An import and two lines distribute it, and one rank prints. Each rank takes its part of each batch
of 128 rows, and gradients are averaged over the ranks: the batch stays as large as it was. The
strategy is set before the model is made, so that the model is equal on all ranks."""
_RESTARTS = """\
Three lines more make it restartable. The `Checkpoint` names all that training changes: the model,
the optimizer, the position in the data, and with the strategy the random numbers. The handler
restores the newest checkpoint, saves every 500 steps, and saves when the job is asked to stop. The
loop begins with the epoch in which the run was stopped."""
_STOPPED = """\
All ranks have saved after the same step. Code 75 says that the same command continues there, in the
middle of the epoch; `step` counts what is left of it:"""
_BATCH_JOB = """\
The first run is over, and its folder goes. `submit` writes a batch script, shows it, and submits it.
Slurm sends the job a signal before its time is over and when it is preempted; the script answers it,
and has Slurm run the job again. The drill preempts it once, 8 s after it has begun to train."""
_WHAT_IT_DID = "The run folder has checkpoints, a record of each attempt, and where each rank's time went."
_NEXT = """\
- What else your script keeps between steps belongs into the Checkpoint: schedulers, a GradScaler,
  averages of weights, your own generators of random numbers. If one is missing, the handler says so
  after the first step. [Your own loop](../how-to/data.md#your-own-loop) says what a loop must keep
  to.
- [Slurm](../how-to/slurm.md): time limits, requeueing, several runs, nodes that die.
- [Modules, conda](../how-to/recipes.md), [containers](../how-to/containers.md), [PBS and
  LSF](../how-to/pbs-lsf.md).
- [Why a restart is exact](../concepts/checkpoints.md), and [when a job
  stops](../concepts/stopping.md)."""


class Terminal:
    """Runs commands as a user types them, and keeps what they print, with how long each took."""

    def __init__(self, folder, environ):
        self.folder = folder
        self.environ = environ
        self.text = _INTRODUCTION

    def say(self, title, text=""):
        """Write a heading, and what a user thinks."""
        self.text += f"\n## {title}\n" + (f"\n{text}\n" if text else "")

    def add(self, text):
        """Write what a user should know before the next command."""
        self.text += f"\n{text}\n"

    def type(self, command, timeout_s=120, code=0, n_lines=_LONGEST_LINES):
        """Run a command; return what it prints. The page shows at most `n_lines` of it."""
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
        assert done.returncode == code, done.stdout[-3000:]
        self._show(command, done.stdout, began, n_lines)
        return done.stdout

    def interrupt(self, command, text, timeout_s):
        """Run a command, and press Ctrl-C once it has printed a text; return what it prints. It ends with code 75."""
        began = time.monotonic()
        process = subprocess.Popen(
            ["setsid", "bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ender = threading.Timer(timeout_s, process.kill)
        ender.start()
        output = ""
        try:
            for line in process.stdout:
                output += line
                if text in line:
                    output += "^C\n"
                    os.killpg(process.pid, signal.SIGINT)
            code = process.wait(timeout_s)
        finally:
            ender.cancel()
            process.stdout.close()
        assert code == 75, output
        self._show(command, f"{output}$ echo $?\n{code}\n", began, _LONGEST_LINES + 6)
        return output

    def _show(self, command, output, began, n_lines):
        """Write a command and what it printed to the page, the middle of many lines left out."""
        seconds = time.monotonic() - began
        shown = output.replace(str(self.folder), "/home/you")
        lines = [line for line in shown.strip("\n").splitlines() if not _NOISE.match(line)]
        if len(lines) > n_lines:
            lines = [*lines[: n_lines - 6], "...", *lines[-5:]]
        self.text += "\n".join(["", "```console", f"$ {command}", *lines, "```", "", f"{seconds:.1f} s", ""])


@pytest.mark.feature("checkpoints.rehearsed-preemption", "slurm.script-writer")
@pytest.mark.timeout(1200)
def test_the_tutorial_of_an_own_script(slurm, root, tmp_path, pytestconfig):
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

    terminal.say("Install", "hpcdist was cloned into the folder `hpcdist`. `mpich` brings an MPI, `report` the plots.")
    terminal.type("python3 -m venv env && . env/bin/activate")
    terminal.type("pip install -q -c hpcdist/constraints.txt './hpcdist[mpich,report]'", 400)
    terminal.say("Is the machine all right?", "A line that begins with `fail` says what to do.")
    assert "ok    world" in terminal.type("hpcdist doctor")

    terminal.say("The script", "A loop in plain torch, for one process.")
    terminal.type("cat plain.py", n_lines=40)
    terminal.say("On four ranks", _FOUR_RANKS)
    terminal.type("diff -u plain.py mine.py", code=1, n_lines=40)
    assert "epoch 10  step 25  loss" in terminal.type("hpcdist run -n 4 mine.py 10", 400)

    terminal.say("Restarts", _RESTARTS)
    terminal.type("diff -u mine.py restarts.py", code=1, n_lines=40)
    terminal.add("Press Ctrl-C while it trains:")
    assert "stopped after step" in terminal.interrupt("hpcdist run -n 4 restarts.py 10", "epoch 3  step 25", 100)
    terminal.add(_STOPPED)
    resumed = terminal.type("hpcdist run -n 4 restarts.py 10", 400)
    assert "epoch 1  step 0" not in resumed
    assert "epoch 10  step 25  loss" in resumed

    terminal.say("A batch job", _BATCH_JOB)
    options = "--nodes 2 --ntasks-per-node 2 --time 0:15:00 --drill 8 --run-dir runs/mine"
    folder = tmp_path / "runs" / "mine"
    terminal.type("rm -r runs/mine")
    try:
        job = re.search(r"submitted job (\d+)", terminal.type(f"hpcdist submit {options} restarts.py 40"))[1]
        slurm.wait_for("the run", lambda: (folder / "trace").exists(), 60)
        assert "runs/mine" in terminal.type("hpcdist status")
        slurm.wait_for("its end", lambda: slurm.fact(job, "JobState") in ("COMPLETED", "FAILED"), 500)
    finally:
        slurm.client("scancel", "--name=runs-mine")
    terminal.add("Some minutes later:")
    status = terminal.type(f"hpcdist status {job}")
    assert "finished: the program has finished" in status
    assert "attempt     2 in job" in status
    terminal.add("The job's log has both attempts:")
    assert "to be requeued" in terminal.type("grep -v '^epoch' runs-mine-*.log", n_lines=30)
    assert "epoch 40  step 25  loss" in terminal.type("tail -n 3 runs-mine-*.log")
    terminal.say("What it did", _WHAT_IT_DID)
    terminal.type("hpcdist ckpt ls runs/mine")
    assert "pictures beside it" in terminal.type("hpcdist report runs/mine")
    assert "steps of 4 ranks" in terminal.type("hpcdist trace runs/mine")
    assert "<b>2</b><span>attempts</span>" in (folder / "report" / "report.html").read_text()
    seconds = time.monotonic() - began
    terminal.say("What next", f"All of this took {seconds:.0f} s.\n\n{_NEXT}")
    out = pytestconfig.getoption("--tutorial")
    if out is not None:
        Path(out).write_text(terminal.text)
        assert seconds < 600, "on a machine with nothing else to do it takes less than ten minutes"
