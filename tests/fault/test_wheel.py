"""The wheel, as an index would have it: built from the source distribution, and installed in empty environments."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What hpcdist needs besides torch, which is several GB for interpreters that no CPU build is at hand for.
LIGHT_PACKAGES = ["numpy", "mpi4py", "h5py", "xxhash", "cloudpickle", "tqdm", "click", "tomli", "mpich"]


def run(*command, cwd, **options):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=140, **options)


def interpreters():
    """Return the oldest and the newest Python that hpcdist supports and this machine has."""
    paths = []
    for minor in range(10, 20):
        on_path = shutil.which(f"python3.{minor}")
        installed = sorted(Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python3"))
        candidates = [*installed, *([Path(on_path)] if on_path else [])]
        working = [path for path in candidates if run(path, "-c", "import venv", cwd="/").returncode == 0]
        paths += working[:1]
    paths = paths or [Path(sys.executable)]
    if len(paths) > 1:
        return [paths[0], paths[-1]]
    return paths


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the path of the wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("python", interpreters(), ids=lambda path: path.parent.parent.name)
def test_the_wheel_in_an_empty_environment(wheel, tmp_path, clean_environ, python):
    run(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path, check=True)
    programs = tmp_path / "venv" / "bin"
    installed = run(programs / "python", "-m", "pip", "install", "--quiet", *LIGHT_PACKAGES, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path, check=True)
    doctor = run(programs / "hpcdist", "doctor", cwd=tmp_path, env=clean_environ)
    lines = doctor.stdout.splitlines()
    assert [line for line in lines if line.startswith("fail")] == [
        "fail  packages       torch is not installed; pip install torch"
    ], doctor.stdout + doctor.stderr
    assert any(line.startswith("ok    world") and "2 ranks" in line for line in lines), doctor.stdout
    written = run(programs / "hpcdist", "new", "train.py", "--kind", "ddp", cwd=tmp_path, env=clean_environ)
    assert "wrote train.py" in written.stdout, written.stderr
    rule = (
        "import hpcdist.restart_rule as rule; print(rule.action_after(rule.Launch(75), rule.Situation(rule.RUN)).verb)"
    )
    assert run(programs / "python", "-c", rule, cwd=tmp_path, env=clean_environ, check=True).stdout == "stop\n"


@pytest.mark.timeout(400)
def test_the_first_page_of_the_tutorial_from_the_wheel(wheel, tmp_path, clean_environ):
    """Its commands behind the installation, in a folder with nothing of the repository.

    The other packages are those of this environment, as torch takes minutes to install.
    """
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path, check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path, check=True)
    own_programs = Path(sys.executable).parent
    environ = {**clean_environ, "PATH": f"{venv}/bin:{own_programs}:{clean_environ['PATH']}", "OMP_NUM_THREADS": "1"}
    where = run("python", "-c", "import hpcdist; print(hpcdist.__file__)", cwd=tmp_path, env=environ, check=True)
    assert where.stdout.startswith(f"{packages}/")
    page = (ROOT / "docs" / "tutorials" / "first-job.md").read_text()
    install, *commands = re.search(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    assert install.startswith("pip install")
    expected = ("ok    world ", "wrote digits.py", "epoch 40/40", "nothing: it has finished", "report.html, and ")
    for command, text in zip(commands, expected, strict=True):
        done = run("bash", "-c", command, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout, done.stdout


@pytest.mark.timeout(400)
def test_what_the_wheel_carries(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path, "zip")
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Author: The hpcdist authors" in metadata
    assert next(tmp_path.glob("*.dist-info/licenses/LICENSE")).is_file()
    for name in ("job.py", "watch.py", "restart_rule.py", "placement.py", "run_folder.py", "batch_systems.py"):
        assert (tmp_path / "hpcdist" / "slurm" / name).is_file()
    help_text = run(sys.executable, "-E", "-S", tmp_path / "hpcdist" / "slurm" / "job.py", cwd=tmp_path, env={})
    assert "ImportError" not in help_text.stderr
    assert "ModuleNotFoundError" not in help_text.stderr
