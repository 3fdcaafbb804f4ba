"""What README and docs/ say is true: every command and program in them is run, in a fresh copy of the repository."""

import itertools
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import restart_picture
from api_index import page

LIMIT_FROM_NOTHING_S = 180
#: The first test that needs the environment of `make train` makes it.
pytestmark = pytest.mark.timeout(LIMIT_FROM_NOTHING_S + 60)
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Kinds of the blocks on README's first screen: the program, and what it prints.
KINDS = ("python", "console")
LIMIT_INSTALLED_S = 60
#: Every command of the pages, and the test that runs it or what stands for it.
COMMANDS = {
    "pip install -e .": "test_an_existing_environment",
    "python3 -m venv env && . env/bin/activate": "test_make_train_from_nothing_and_again: what make train does",
    "pip install -c constraints.txt -e '.[mpich]'": "test_make_train_from_nothing_and_again: what make train does",
    "make train": "test_make_train_from_nothing_and_again",
    "make test": "test_make_test_is_what_runs_here",
    "mpirun -n 2 python mine.py": "test_programs",
    "python jobs/train.py --run-dir runs/one": "test_the_three_ways",
    "mpirun -n 4 python jobs/train.py --run-dir runs/four": "test_the_three_ways",
    "mpirun -n 4 python jobs/fit.py --run-dir runs/fit": "test_fit_as_in_the_readme",
    "python jobs/own_script_plain.py --epochs 2 --run-dir runs/plain": "tests/fault/test_own_script.py",
    "mpirun -n 2 python jobs/own_script.py --epochs 2 --run-dir runs/own": "tests/fault/test_own_script.py",
    "mpirun -n 3 python jobs/fit.py --roles 'worker:2,evaluator:1'": "tests/fault/test_fit.py",
    "mpirun -n 2 python jobs/gpt.py": "test_guide_jobs.py: with a smaller text",
    "mpirun -n 4 python jobs/estimator.py --model-dir runs/estimator": "test_estimators_as_on_the_page",
    "mpirun -n 5 python jobs/train.py --strategy ps --roles 'ps:2,worker:*'": "test_parameter_servers_as_in_the_readme",
    "mpirun -n 4 python jobs/coordinated.py --roles 'ps:1,chief:1,worker:*'": "test_parameter_servers_as_in_the_readme",
    "mpirun -n 2 python -m pytest --with-mpi tests/test_mine.py": "test_pytest_plugin.py",
    "python -m pytest --with-mpi tests/test_mine.py": "test_pytest_plugin.py",
    "pip install -c constraints.txt -e '.[mpich,jobs,report]'": "test_the_first_job: as the environment of make train",
    "hpcdist new digits.py": "test_the_first_job",
    "hpcdist run -n 2 digits.py --epochs 40": "test_the_first_job",
    "hpcdist status runs/digits": "test_the_first_job",
    "hpcdist report runs/digits": "test_the_first_job",
    "mpirun -n 3 python beside.py": "test_programs: on two ranks",
    "hpcdist new my_job.py": "test_the_command_as_on_its_page",
    "hpcdist run -n 2 my_job.py": "test_the_command_as_on_its_page",
    "hpcdist doctor": "test_the_command_as_on_its_page",
    "hpcdist run -n 2 jobs/train.py --run-dir runs/first --epochs 2": "test_the_command_as_on_its_page",
    "hpcdist status runs/first": "test_the_command_as_on_its_page",
    "hpcdist ckpt ls runs/first": "test_the_command_as_on_its_page",
    "hpcdist report runs/first": "test_the_command_as_on_its_page",
    "hpcdist trace runs/first": "test_the_command_as_on_its_page",
    "hpcdist submit --nodes 2 --ntasks-per-node 4 --time 8:00:00 --dry-run jobs/train.py --run-dir runs/second": (
        "test_the_command_as_on_its_page; tests/slurm submits"
    ),
    "sbatch --nodes 2 slurm/train-ps.sbatch": "test_the_batch_script_is_shipped, and tests/slurm",
    "sbatch --nodes 2 slurm/train.sbatch": "test_the_batch_script_is_shipped, and tests/slurm",
}


def blocks(path, kind):
    fenced_blocks = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced_blocks if name == kind]


def programs():
    texts = []
    for path in PAGES:
        if path.stem == "testing":  # whose program pytest runs: test_pytest_plugin.py
            continue
        for number, text in enumerate(blocks(path, "python")):
            texts.append(pytest.param(text, id=f"{path.stem}-{number}"))
    return texts


def command_lines(path):
    """Return the commands of a page, in order."""
    return "".join(blocks(path, "sh")).splitlines()


@pytest.fixture(scope="module")
def bare_clone(tmp_path_factory):
    """Return a copy of what git tracks, as it is now: no environment, nothing built."""
    folder = tmp_path_factory.mktemp("clone") / "hpcdist"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(command, clone, environ, timeout_s, cwd=None):
    """Run a command as a user would type it, with the clone's environment active; return its output and seconds."""
    started = time.monotonic()
    path = f"{clone}/.venv/bin:{environ['PATH']}"
    environ = {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["setsid", "--wait", "bash", "-c", command],
        cwd=cwd or clone,
        env={**environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, time.monotonic() - started


@pytest.fixture
def clone(bare_clone, clean_environ):
    """Return the clone with the environment of `make train`, which an earlier test may have made already."""
    run("make .venv/train.installed", bare_clone, clean_environ, LIMIT_FROM_NOTHING_S)
    return bare_clone


@pytest.mark.quick
def test_every_command_is_known():
    documented_commands = set(itertools.chain.from_iterable(map(command_lines, PAGES)))
    assert documented_commands == set(COMMANDS)


@pytest.mark.timeout(400)
def test_make_train_from_nothing_and_again(bare_clone, clean_environ):
    output, seconds = run("make train", bare_clone, clean_environ, LIMIT_FROM_NOTHING_S + 60)
    assert re.search(r"epoch 20/20 .* test accuracy 0\.9[6-9]", output)
    path = re.search(r"^test accuracy 0\.9[6-9]\d+  checkpoint (\S+)$", output, re.MULTILINE)[1]
    assert (bare_clone / path).exists()
    second_output, seconds_again = run("make train", bare_clone, clean_environ, LIMIT_INSTALLED_S + 60)
    assert "2 replicas; new run" in second_output
    print(f"make train: {seconds:.0f} s from nothing, {seconds_again:.0f} s when installed")


def test_a_script_beside_the_clone_imports_the_package(clone, clean_environ):
    """A folder called hpcdist in the working directory must not win over the editable install."""
    code = "import hpcdist; print(hpcdist.__version__, hpcdist.Dataset.__name__)"
    assert "Dataset" in run(f'python -c "{code}"', clone, clean_environ, 60, cwd=clone.parent)[0]


@pytest.mark.timeout(200)
def test_an_existing_environment(bare_clone, clean_environ, tmp_path):
    """`pip install -e .` into an environment that has torch and an MPI already."""
    command = (
        f"{sys.executable} -m venv {tmp_path}/own && P=$(python -c 'import site; print(site.getsitepackages()[0])')"
    )
    command += f" && echo $P > $({tmp_path}/own/bin/python -c 'import site; print(site.getsitepackages()[0])')/has.pth"
    command += f" && {tmp_path}/own/bin/pip install --quiet --no-deps -e . && cd {tmp_path}"
    command += f" && {tmp_path}/own/bin/python -c 'import hpcdist; print(hpcdist.__file__, hpcdist.Strategy.__name__)'"
    assert "Strategy" in run(command, bare_clone, clean_environ, 180)[0]


@pytest.mark.quick
def test_make_test_is_what_runs_here():
    """The command itself cannot be run from inside it; that it starts every part can be seen."""
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    for part in ("lint", "unit", "mpi", "fault", "slurm", "hosts"):
        assert part in done.stdout


@pytest.mark.timeout(400)
def test_the_diff_is_two_programs(clone, clean_environ):
    """The removed lines are a program for torchrun, the added ones for mpirun; both print one line."""
    [diff] = blocks(ROOT / "README.md", "diff")
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert sum(line.startswith("+") for line in lines) <= 9
    # With gloo's threads alive, torch aborts while Python shuts down (7 of 28 runs beside two busy processes, with or
    # without destroy_process_group), so its ranks leave without that shutdown.
    (clone / "before.py").write_text(before + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    (clone / "after.py").write_text(after)
    hpcdist_output = run("mpirun -n 2 python after.py", clone, clean_environ, 60)[0]
    assert re.fullmatch(r"loss [23]\.\d+\n", hpcdist_output), hpcdist_output
    torchs = run("python -m torch.distributed.run --nproc-per-node 2 before.py", clone, clean_environ, 100)[0]
    assert re.search(r"loss [23]\.\d+\n", torchs), torchs


def test_the_first_screen(clone, clean_environ):
    """The digits are this machine's; tests/slurm/test_readme.py submits the program."""
    page = (ROOT / "README.md").read_text()
    program, shown = (re.search(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1] for kind in KINDS)
    assert 12 <= sum(map(bool, program.splitlines())) <= 15
    (clone / "train.py").write_text(program)
    command = shown.splitlines()[0].removeprefix("$ ")
    output, _ = run(command, clone, clean_environ, 90)
    pattern = re.compile(r"epoch (\d)/5  128 steps  .* ms/step  loss (\S+)  accuracy (\S+)$", re.MULTILINE)
    expected = pattern.findall(shown)
    printed = pattern.findall(output)
    assert [epoch for epoch, _, _ in printed] == [epoch for epoch, _, _ in expected]
    assert float(printed[-1][1]) == pytest.approx(float(expected[-1][1]), rel=0.05)


def test_the_readme_fits_a_terminal():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


@pytest.mark.parametrize("code", programs())
def test_programs(clone, clean_environ, code):
    (clone / "mine.py").write_text(code)
    if "ClusterCoordinator" in code:
        n_ranks = 3
    else:
        n_ranks = 2
    run(f"mpirun -n {n_ranks} python mine.py", clone, clean_environ, 60)
    if "runs/mine" in code:
        assert len(list((clone / "runs" / "mine").rglob("step-*.h5"))) == 3
        output = run("python mine.py", clone, clean_environ, 60)[0]
        assert "epoch" not in output, "nothing is left to do"


@pytest.mark.timeout(400)
def test_the_three_ways(clone, clean_environ):
    assert "1 replicas; new run" in run("python jobs/train.py --run-dir runs/one", clone, clean_environ, 60)[0]
    four = "mpirun -n 4 python jobs/train.py --run-dir runs/four"
    assert "4 replicas; new run" in run(four, clone, clean_environ, 90)[0]
    assert "step-00000460-0001.h5" in run(four, clone, clean_environ, 90)[0]


@pytest.mark.timeout(400)
def test_parameter_servers_as_in_the_readme(clone, clean_environ):
    commands = [line for line in command_lines(ROOT / "README.md") if "--roles" in line]
    for command, folder in zip(commands, ("train", "coordinated"), strict=True):
        output, seconds = run(command, clone, clean_environ, 110)
        assert re.search(rf"accuracy 0\.9\d+  checkpoint \S*runs/{folder}/\S+$", output, re.MULTILINE), output[-2000:]
        print(f"{seconds:.0f} s: {output.splitlines()[-1]}")


def test_fit_as_in_the_readme(clone, clean_environ):
    output, seconds = run("mpirun -n 4 python jobs/fit.py --run-dir runs/fit", clone, clean_environ, 110)
    assert float(re.search(r"test accuracy (0\.\d+)$", output, re.MULTILINE)[1]) > 0.95, output[-2000:]
    print(f"{seconds:.0f} s: {output.splitlines()[-1]}")


def test_estimators_as_on_the_page(clone, clean_environ):
    """The run folder is on disk: the second call finds its steps made, and evaluates."""
    command = "mpirun -n 4 python jobs/estimator.py --model-dir runs/estimator"
    for _ in range(2):
        output, _ = run(command, clone, clean_environ, 60)
        assert float(re.search(r"^global step 600  accuracy (0\.\d+)$", output, re.MULTILINE)[1]) > 0.95, output


@pytest.mark.timeout(400)
def test_the_command_as_on_its_page(clone, clean_environ):
    """In the order of the page: each shows what the one before has left."""
    commands = command_lines(ROOT / "docs" / "reference" / "command.md")
    expected = (
        "wrote my_job.py",
        "best accuracy 0.9",
        "ok    world          2 ranks",
        "test accuracy 0.",
        "to follow   nothing: it has finished",
        "step-00000046-0001.h5",
    )
    expected += ("runs/first/report/report.html, and ", "steps of 2 ranks; open it", "#SBATCH --time=8:00:00")
    for command, text in zip(commands, expected, strict=True):
        output, seconds = run(command, clone, clean_environ, 60)
        assert text in output, output
        print(f"{seconds:.1f} s: {command}")


@pytest.mark.timeout(600)
def test_the_first_job(clone, clean_environ):
    """The commands behind the installation, whose extras are those of make train, in whose environment they run."""
    first_block = blocks(ROOT / "docs" / "tutorials" / "first-job.md", "sh")[0]
    install, *commands = first_block.splitlines()
    extras = re.search(r"\[(.*)\]", install)[1]
    assert f"--editable '.[{extras}]'" in (ROOT / "Makefile").read_text().partition("train.installed: ")[2][:300]
    expected = (
        "ok    world ",
        "wrote digits.py",
        "epoch 40/40",
        "to follow   nothing: it has finished",
        "report.html, and ",
    )
    for command, text in zip(commands, expected, strict=True):
        output, seconds = run(command, clone, clean_environ, 400)
        assert text in output, output[-2000:]
        print(f"{seconds:.1f} s: {command}")


@pytest.mark.quick
def test_the_batch_script_is_shipped(bare_clone):
    """It is run under a real Slurm in tests/slurm; here its file and options are looked at."""
    text = (bare_clone / "slurm" / "train.sbatch").read_text()
    subprocess.run(["bash", "-n", bare_clone / "slurm" / "train.sbatch"], check=True)
    assert "jobs/train.py" in text
    assert "--requeue" in text


@pytest.mark.quick
def test_links_lead_somewhere():
    for path in [*PAGES, *ROOT.glob("*.md"), ROOT / "tests" / "README.md", ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.quick
def test_the_api_index_follows_from_the_table():
    """`make docs` writes it anew."""
    assert (ROOT / "docs" / "reference" / "api.md").read_text() == page()


@pytest.mark.quick
def test_the_table_of_routes_is_that_of_the_function():
    table = re.findall(r"^\|.*$", (ROOT / "hpcdist" / "collectives" / "route.py").read_text(), re.MULTILINE)
    assert len(table) > 5
    assert "\n".join(table) in (ROOT / "docs" / "reference" / "algorithms.md").read_text()


@pytest.mark.quick
def test_the_picture_of_the_readme_is_of_real_jobs(tmp_path):
    """Losses differ a little between processors: the lines are compared to a pixel."""
    expected = lines_of(restart_picture.PICTURE.read_text())
    drawn = lines_of(restart_picture.picture_of(*restart_picture.run_jobs(tmp_path)))
    assert list(drawn) == list(expected) == ["unbroken", "first", "second"]
    for kind in drawn:
        assert len(drawn[kind]) == pytest.approx(len(expected[kind]), abs=1), "the stop may come a step later"
    assert np.abs(np.subtract(drawn["unbroken"], expected["unbroken"])).max() < 1


def lines_of(picture):
    """Return the points of the lines of a picture, by their kinds. The later lines of a kind are its legend."""
    lines = {}
    for kind, points in re.findall(r'<polyline class="(\w+)" points="([^"]+)"', picture):
        lines.setdefault(kind, [tuple(map(float, point.split(","))) for point in points.split()])
    return lines
