"""Removes one safety at a time from a copy of the package: at least one test must fail for each.

`python tests/support/mutants.py` runs all; with numbers, those. It prints a line for each, and exits
with 1 if one is not noticed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutation import mutated
from safeties import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400


def make_copy(folder):
    """Copy what tests need into a folder."""
    for name in ("hpcdist", "slurm", "tests", "docs", "jobs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder, tests):
    """Return whether the tests of a file pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{tests}"]
    if tests.startswith("mpi"):
        command = [Path(sys.executable).parent / "mpirun", "-n", "2", *command, "--with-mpi"]
    else:
        command += ["--basetemp", folder / "temporary", "-k", "not wrong_is_noticed"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def is_noticed(mutant, folder):
    """Return whether the tests fail without a safety."""
    path, text = mutated(mutant, folder)
    whole = path.read_text()
    path.write_text(text)
    try:
        return not run_tests(folder, mutant.tests)
    finally:
        path.write_text(whole)


def main():
    chosen = [MUTANTS[int(number)] for number in sys.argv[1:]] or MUTANTS
    if os.access("/dev/shm", os.W_OK):
        memory = "/dev/shm"
    else:
        memory = None
    with tempfile.TemporaryDirectory(prefix="hpcdist-mutants-", dir=memory) as name:
        folder = Path(name)
        make_copy(folder)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            assert run_tests(folder, tests), f"{tests} fails without any change"
        missed = []
        for mutant in chosen:
            noticed = is_noticed(mutant, folder)
            missed += [] if noticed else [mutant.what]
            print(f"{'noticed' if noticed else 'MISSED '}  {mutant.what} ({mutant.tests})", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants noticed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
