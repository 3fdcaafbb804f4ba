"""3,000 random command lines and files of defaults: a result, or one line and exit code 2, 74 or 78; no traceback."""

import contextlib
import io
import random
import subprocess

import pytest

from hpcdist.cli import bench, main, run, submit
from hpcdist.cli.launcher import Launcher

COMMANDS = [
    "run",
    "submit",
    "status",
    "stop",
    "ckpt",
    "ckpt ls",
    "ckpt show",
    "ckpt verify",
    "ckpt diff",
    "ckpt export",
]
COMMANDS += ["report", "trace", "logs", "bench allreduce", "bench ps", "bench"]
COMMANDS += ["ckpt import", "ckpt prune", "doctor --no-such", "nothing", "", "--help"]
OPTIONS = [
    "-n",
    "--ranks",
    "--roles",
    "--hosts",
    "--restarts",
    "--run-dir",
    "--no-bind",
    "-m",
    "--nodes",
    "--time",
    "--name",
]
OPTIONS += ["--ps-nodes", "--system", "--option", "--attempt", "--out", "--quick", "--rank", "--level", "--tail"]
OPTIONS += ["--ps", "--array", "--chain", "--drill", "--lead", "--sbatch", "--launcher", "--json", "--wait", "--keep"]
OPTIONS += ["--keep-best", "--best-mode", "--object", "--key", "--yes", "--help", "-h", "--", "-", "--x=y", "-x"]
VALUES = [
    "2",
    "0",
    "-1",
    "1e9",
    "99999999999999999999",
    "x",
    "",
    " ",
    "a b",
    "train.py",
    "run",
    "file",
    "empty",
    "é",
    "\udcff",
]
VALUES += [
    "{task}",
    "a:2,b:2",
    "a:",
    ":",
    "ps:1,worker:*",
    "1-8",
    "8:00:00",
    "--partition=x",
    "$(x)",
    "'",
    '"',
    "\n",
]
VALUES += ["/dev/null", "/proc/self/mem", "/", "..", "srun", "min", "true", "x" * 5000]
VALUES += ["pbs", "lsf", "-q long", "17", "17_3", "info"]
TOML = [
    "[submit]",
    "[run]",
    "trace",
    "timeout_s",
    "system",
    "sbatch",
    "setup",
    "launcher",
    "time",
    "=",
    '"--x=y"',
    "[",
    "]",
    "'''",
    "1",
    "true",
    "\n",
    "#",
    "{",
    "}",
    ",",
    "\0",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a folder with files of several kinds, in which no command starts a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in (run, submit, bench):
        monkeypatch.setattr(module, "mpi_library", lambda: "mpich")
        monkeypatch.setattr(module, "find_launcher", lambda library, environ: Launcher(library, "mpirun"))
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: done)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001-0001.h5").write_bytes(b"\x89HDF\r\n\x1a\n" * 900)
    (tmp_path / "empty").mkdir()
    return tmp_path


def outcome_of(arguments):
    """Return exit code and what was printed as an error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
    return ended.value.code, errors.getvalue()


def line(draws):
    command = draws.choice(COMMANDS).split()
    if command in (["run"], ["submit"]):
        safe = ["--dry-run"]
    else:
        safe = []
    more = [draws.choice(draws.choice([OPTIONS, VALUES])) for _ in range(draws.randrange(6))]
    return [*command, *safe, *more]


def check(arguments):
    code, errors = outcome_of(arguments)
    assert code in (0, 1, 2, 74, 78), (arguments, code, errors)
    assert errors.count("\n") <= 1 or code in (0, 1), (arguments, errors)
    assert "Traceback" not in errors
    if code in (2, 78):
        assert errors.count("\n") == 1, (arguments, errors)


def test_command_lines(here):
    draws = random.Random(20261125)
    for _ in range(2500):
        check(line(draws))


def test_files_of_defaults(here):
    draws = random.Random(20261126)
    for _ in range(500):
        text = " ".join(draws.choice(TOML) for _ in range(draws.randrange(12)))
        (here / "hpcdist.toml").write_text(text)
        check([draws.choice(["submit", "run"]), "--dry-run", "train.py", "--run-dir", "a"])
