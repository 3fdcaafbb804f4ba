"""`hpcdist submit`: the script is what was asked for, whatever the arguments hold. A real Slurm: tests/slurm."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from requirements import skip_unless_ci

from hpcdist.cli import shipped, site, submit
from hpcdist.cli.launcher import Launcher
from hpcdist.cli.shipped import shipped_folder
from hpcdist.cli.site import site_defaults
from hpcdist.errors import ConfigurationError

DOCS = Path(__file__).resolve().parents[3] / "docs"
NASTY = ["a b", "$HOME", "$(touch harm)", "`touch harm`", "'", '"', "*", "", "-n", "\\", "x\ny", "é", ";exit 3", "#"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return an empty current folder with a program; mpi4py loads MPICH, and there is no file of defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(submit, "mpi_library", lambda: "mpich")
    monkeypatch.setattr(submit, "find_launcher", lambda library, environ: Launcher(library, "/opt/mpi bin/mpirun"))
    monkeypatch.setattr(site, "SITE_PATH", tmp_path / "site.toml")
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.fixture
def call(hpcdist):
    """Return call(*arguments): `hpcdist submit` with these."""
    return functools.partial(hpcdist, "submit")


def headers(text):
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.feature("slurm.script-writer")
def test_a_plain_job(here, call):
    code, text, _ = call(
        "--nodes", 4, "--ntasks-per-node", 8, "--time", "8:00:00", "--dry-run", "train.py", "--run-dir", "runs/a"
    )
    assert code == 0
    assert headers(text) == [
        *("job-name=runs-a", "signal=USR1@120", "requeue", "no-kill", "dependency=singleton", "open-mode=append"),
        *("output=%x-%j.log", "nodes=4", "ntasks-per-node=8", "time=8:00:00", f"comment=hpcdist:{here}/runs/a"),
    ]
    assert f"cd {here} || exit 78\nexport RUN_DIR=runs/a\n" in text
    assert text.endswith(
        "  srun --mpi=pmi2 --kill-on-bad-exit=1 --overlap --nodelist=%nodes --nodes=%n_nodes --ntasks=%n_ranks "
        f'--cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\\n  {sys.executable} train.py --run-dir runs/a\n'
    )
    assert sorted(os.listdir(here)) == ["train.py"], "a dry run writes nothing"


def test_the_script_in_the_tutorial_is_what_submit_writes(here, call):
    """Lines with the reader's folders, and those that the page leaves out, are not compared."""
    page = (DOCS / "tutorials" / "own-script.md").read_text()
    shown = re.search(r"^\$ hpcdist submit ([^\n]*)\n(.*?)^submitted job", page, re.MULTILINE | re.DOTALL)
    (here / "restarts.py").write_text("")
    code, text, _ = call("--dry-run", *shown[1].split())
    assert code == 0
    written_lines = text.splitlines()
    shown_lines = [line for line in shown[2].splitlines() if "/home/you" not in line and "..." not in line]
    assert len(shown_lines) > 6
    assert [line for line in shown_lines if line not in written_lines] == []


@pytest.mark.feature("slurm.heterogeneous-jobs")
@pytest.mark.parametrize(
    ("options", "there", "absent"),
    [
        (["--chain"], ["--no-requeue", "--dependency=afterany", ' --successor "$successor" '], ["singleton"]),
        (["--ps", 2, "--nodes", 3], ["export HPCDIST_ROLES='ps:2,worker:*'\n"], []),
        (
            ["--ps-nodes", 1, "--nodes", 2, "--ntasks-per-node", 4],
            ["--nodes=3\n", "export HPCDIST_ROLES='ps:4,worker:*'\n"],
            [],
        ),
        (
            ["--launcher", "mpirun"],
            ["=B:USR1@120", "'/opt/mpi bin/mpirun' --host %hosts -n %n_ranks"],
            ["srun", "pmi2"],
        ),
        (
            ["--drill", 60],
            [
                '/drill" 2> /dev/null && { scancel --signal=USR1 "$SLURM_JOB_ID" 2> /dev/null || { rmdir',
            ],
            [],
        ),
        (["--drill", 60, "--launcher", "mpirun"], ["&& { scancel --batch --signal=USR1"], []),
        (
            ["--sbatch", "--partition=gpu", "--sbatch", "--gpus-per-node=4"],
            ["--partition=gpu\n", "--gpus-per-node=4\n"],
            [],
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) and len(str(value)) < 60 else "",
)
def test_options(here, call, options, there, absent):
    text = call(*options, "--dry-run", "train.py", "--run-dir", "a")[1]
    assert all(part in text for part in there), text
    assert not any(part in text for part in absent), text


def test_an_array(here, call):
    text = call("--array", "1-3", "--dry-run", "train.py", "--run-dir", "runs/a-{task}", "--seed", "{task}")[1]
    assert {"job-name=runs-a-all", "array=1-3", "output=%x-%A_%a.log"} <= set(headers(text))
    assert "dependency=singleton" not in headers(text)
    assert 'export RUN_DIR=runs/a-"$SLURM_ARRAY_TASK_ID"\n' in text
    assert text.endswith('train.py --run-dir runs/a-"$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID"\n')


def test_the_shell_changes_no_argument(here, call, tmp_path, monkeypatch):
    """The script is run, with a program in place of job.py that prints what it gets."""
    parts = tmp_path / "a folder" / "parts"
    parts.mkdir(parents=True)
    (parts / "job.py").write_text("import json, os, sys\nprint(json.dumps([os.environ['RUN_DIR'], sys.argv[1:]]))\n")
    monkeypatch.setattr(submit, "shipped_folder", lambda name, file: parts)
    code, text, _ = call("--name", "x", "--dry-run", "train.py", "--run-dir", "a b$HOME", *NASTY, "{task}")
    assert code == 0
    done = subprocess.run(["bash", "-eu"], input=text, capture_output=True, text=True, check=True, timeout=30)
    run_dir, arguments = json.loads(done.stdout)
    assert run_dir == "a b$HOME"
    expected = [sys.executable, "train.py", "--run-dir", "a b$HOME", *NASTY, "{task}"]
    assert arguments[-len(expected) :] == expected
    assert not (here / "harm").exists()


@pytest.mark.feature("slurm.script-writer")
def test_shellcheck_has_nothing_to_say(here, call):
    if subprocess.run(["which", "shellcheck"], capture_output=True).returncode:
        skip_unless_ci("shellcheck is not installed")
    for options in (
        ["--chain"],
        ["--array", "1-2", "--drill", "60"],
        ["--launcher", "mpirun", "--ps", "1", "--nodes", "2"],
    ):
        text = call(*options, "--name", "x", "--dry-run", "train.py", "--run-dir", "a {task}", *NASTY)[1]
        done = subprocess.run(["shellcheck", "--severity=warning", "-"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def checked(text):
    """Return the lines of a script that the shell and shellcheck accept."""
    assert subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).returncode == 0
    if subprocess.run(["which", "shellcheck"], capture_output=True).returncode == 0:
        done = subprocess.run(["shellcheck", "--severity=warning", "-"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return text.splitlines()


@pytest.mark.feature("slurm.recipes-for-other-batch-systems")
def test_a_script_for_pbs(here, call):
    """Each job submits its successor, as users of PBS may not requeue."""
    options = ("--system", "pbs", "--nodes", 2, "--ntasks-per-node", 4, "--time", "8:00:00", "--option", "-q long")
    lines = checked(call(*options, "--dry-run", "train.py", "--run-dir", "runs/a", *NASTY)[1])
    assert lines[2:7] == [
        *("#PBS -N runs-a", "#PBS -l select=2:ncpus=4:mpiprocs=4", "#PBS -l walltime=8:00:00", "#PBS -j oe"),
        "#PBS -q long",
    ]
    assert f'successor=$(qsub -W depend=afterany:"$PBS_JOBID" {here}/runs/a/runs-a.pbs) || exit 1' in lines
    assert '  \'/opt/mpi bin/mpirun\' -n "$(wc --lines < "$PBS_NODEFILE")" \\' in lines
    assert any(line.endswith('job.py --successor "$successor" \\') for line in lines)


@pytest.mark.feature("slurm.recipes-for-other-batch-systems")
def test_a_script_for_lsf(here, call):
    """LSF signals the job before its limit, which it takes in hours and minutes, and requeues it."""
    (here / "hpcdist.toml").write_text('[submit]\nsystem = "lsf"\nlsf = ["-q long"]\n')
    options = ("--nodes", 2, "--ntasks-per-node", 4, "--time", "8:00:00", "--ps-nodes", 1, "--lead", 90)
    lines = checked(call(*options, "--dry-run", "train.py", "--run-dir", "runs/a", *NASTY)[1])
    assert lines[2:10] == [
        *("#BSUB -J runs-a", "#BSUB -n 12", '#BSUB -R "span[ptile=4]"', "#BSUB -W 480", "#BSUB -r"),
        *("#BSUB -wa USR1 -wt 2", "#BSUB -o %J.log", "#BSUB -q long"),
    ]
    assert "export HPCDIST_ROLES='ps:4,worker:*'" in lines
    assert "  '/opt/mpi bin/mpirun' -n \"$LSB_DJOB_NUMPROC\" \\" in lines


@pytest.mark.feature("slurm.recipes-for-other-batch-systems")
@pytest.mark.parametrize(
    ("system", "name", "takes", "answer", "job"),
    [
        ("pbs", "qsub", '"$1"', "17.server", "17.server"),
        ("lsf", "bsub", "/dev/stdin", "Job <17> is submitted to default queue <normal>.", "17"),
    ],
)
def test_other_systems_take_the_script(here, call, monkeypatch, system, name, takes, answer, job):
    """qsub gets its path, and bsub reads it."""
    (here / name).write_text(f"#!/bin/sh\ncat {takes} > {here}/taken\necho '{answer}'\n")
    (here / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    code, text, error = call("--system", system, "train.py", "--run-dir", "runs/a")
    assert (code, (here / "taken").read_text()) == (0, text), error
    assert f'submitted job {job}: "{here}/runs/a/runs-a.{system}"' in error


def files_of_the_pages():
    texts = []
    for path in sorted(DOCS.rglob("*.md")):
        page_texts = re.findall(r"^```toml\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
        for number, text in enumerate(page_texts):
            texts.append(pytest.param(text, id=f"{path.stem}-{number}"))
    return texts


@pytest.mark.parametrize("text", files_of_the_pages())
def test_files_of_the_pages(here, call, text):
    """Each is taken, and what it says is in the script."""
    (here / "hpcdist.toml").write_text(text)
    code, script, error = call("--dry-run", "train.py", "--run-dir", "a")
    assert code == 0, error
    lines = checked(script)
    defaults = site_defaults("submit")
    for key, prefix in (("setup", ""), ("sbatch", "#SBATCH "), ("pbs", "#PBS ")):
        assert {f"{prefix}{option}" for option in defaults.get(key, ())} <= set(lines)


def commands_of_the_pages():
    """Return each command `hpcdist submit` in the text of a how-to page, which may go over the end of a line."""
    commands = []
    for path in sorted((DOCS / "how-to").glob("*.md")):
        for command in re.findall(r"`(hpcdist submit\s[^`]*\w[^`]*)`", path.read_text()):
            commands.append(pytest.param(" ".join(command.split()), id=f"{path.stem}-{len(commands)}"))
    return commands


@pytest.mark.parametrize("command", commands_of_the_pages())
def test_commands_of_the_pages(here, call, monkeypatch, command):
    (here / "apptainer").write_text("")
    (here / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    words = shlex.split(command)[2:]
    if "--run-dir" in words:
        more = ()
    else:
        more = ("train.py", "--run-dir", "a")
    code, script, error = call("--dry-run", *words, *more)
    assert code == 0, error
    checked(script)


def test_a_site_has_defaults(here, call):
    (here / "hpcdist.toml").write_text(
        '[submit]\nsbatch = ["--partition=long"]\nsetup = ["module load mpich"]\n'
        'launcher = "mpirun"\ntime = "1:00:00"\n'
    )
    text = call("--time", "2:00:00", "--dry-run", "train.py", "--run-dir", "a")[1]
    assert {"partition=long", "time=2:00:00"} <= set(headers(text))
    assert "time=1:00:00" not in text
    assert "\nmodule load mpich\nexport RUN_DIR=a\n" in text
    assert "mpirun' --host %hosts" in text


@pytest.mark.parametrize(
    "text",
    [
        "[submit",
        "[submit]\nsbatch = 'x'",
        "[submit]\nsetup = [1]",
        "[submit]\npartition = 'x'",
        "submit = 1",
        "[submit]\nlead = 3",
        "[submit]\nlauncher = 'srunn'",
        "[submits]\ntime = '1:00:00'",
    ],
)
def test_defaults_that_are_none(here, call, text):
    (here / "hpcdist.toml").write_text(text)
    code, _, error = call("--dry-run", "train.py", "--run-dir", "a")
    assert (code, error.count("\n")) == (78, 1), error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train.py"], "expected the run folder, got none; give the program --run-dir"),
        (["train.py", "--run-dir"], "expected the run folder, got none"),
        (["nothing.py", "--run-dir", "a"], "expected a program, got 'nothing.py'"),
        (["--array", "1-2", "train.py", "--run-dir", "a"], "expected a run folder for each task of the array, got 'a'"),
        (["--array", "1", "--chain", "train.py", "--run-dir", "{task}"], "expected --array or --chain, got both"),
        (["--name", "a b", "train.py", "--run-dir", "a"], "expected letters, digits, . and - in the name"),
        (["--sbatch", "--x=a\n#SBATCH --y", "train.py", "--run-dir", "a"], "expected options of sbatch"),
        (["--sbatch", "x", "train.py", "--run-dir", "a"], "expected options of sbatch"),
        (["--sbatch", "--partition=a\n", "train.py", "--run-dir", "a"], "expected options of sbatch"),
        (["--system", "lsf", "--time", "9:99:99", "train.py", "--run-dir", "a"], "expected a time limit such as"),
        (["--time", "$(x)", "train.py", "--run-dir", "a"], "expected options of sbatch"),
        (["--nodes", "0", "train.py", "--run-dir", "a"], "0 is not in the range"),
        (
            ["--run-dir", "b", "train.py", "--run-dir", "a"],
            "expected one run folder, got 'b' before the program and 'a'",
        ),
        (["train.py", "--run-dir", "a", "--x", "%nodes"], "expected arguments without %nodes"),
        (
            ["--ps", "2", "--nodes", "2", "train.py", "--run-dir", "a"],
            "expected fewer parameter servers than the 2 ranks",
        ),
        (["--ps", "1", "--ps-nodes", "1", "train.py", "--run-dir", "a"], "expected --ps or --ps-nodes, got both"),
        (
            ["--system", "pbs", "--drill", "9", "train.py", "--run-dir", "a"],
            "expected --drill with Slurm, got",
        ),
        (["--system", "lsf", "--time", "8:00", "train.py", "--run-dir", "a"], "expected a time limit such as 8:00:00"),
        (
            ["--system", "pbs", "--option", "-l select=2", "train.py", "--run-dir", "a"],
            "expected options that the script has not made already, got '-l select=2'",
        ),
        (["--system", "lsf", "--option", "-W 9", "train.py", "--run-dir", "a"], "has not made already, got '-W 9'"),
        (["--system", "lsf", "--time", "5", "train.py", "--run-dir", "a"], "expected a time limit such as 8:00:00"),
        (
            ["--system", "pbs", "--option", "-q $(x)", "train.py", "--run-dir", "a"],
            "options such as '-q long'",
        ),
    ],
)
def test_what_is_refused_is_one_line(here, call, arguments, text):
    code, _, error = call("--dry-run", *arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert text in error


def test_without_slurm_the_script_is_kept(here, call, monkeypatch):
    monkeypatch.setattr(submit.shutil, "which", lambda name: None if name == "sbatch" else f"/bin/{name}")
    code, _, error = call("train.py", "--run-dir", "runs/a")
    assert code == 78
    assert f"run it where jobs are submitted: sbatch {here}/runs/a/runs-a.sbatch" in error
    assert (here / "runs" / "a" / "runs-a.sbatch").read_text().startswith("#!/usr/bin/env bash\n")


def test_what_sbatch_refuses_is_said(here, call, monkeypatch):
    (here / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    (here / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    code, _, error = call("train.py", "--run-dir", "runs/a")
    assert (code, error.count("\n")) == (78, 1)
    assert "got 'sbatch: error: invalid partition'; correct the options" in error


def test_job_py_is_found_and_its_parts_are_in_the_wheel():
    parts = shipped_folder("slurm", "job.py")
    wheel = (parts.parent / "pyproject.toml").read_text()
    for path in parts.glob("*.py"):
        assert f'"slurm/{path.name}" = "hpcdist/slurm/{path.name}"' in wheel


@pytest.mark.parametrize(("name", "file"), [("slurm", "job.py"), ("benchmarks", "allreduce.py")])
def test_a_package_without_what_it_carries(monkeypatch, tmp_path, name, file):
    monkeypatch.setattr(shipped.hpcdist, "__file__", str(tmp_path / "hpcdist" / "__init__.py"))
    with pytest.raises(ConfigurationError, match=f"expected {name}/{file} in .*; install hpcdist again"):
        shipped_folder(name, file)


def test_what_is_asked_for_goes_before_what_every_job_has(here, call):
    """The command line before the site's defaults, and these before the script's."""
    (here / "hpcdist.toml").write_text(
        '[submit]\nsbatch = ["--nodes=9", "--output=site.log", "--open-mode=truncate"]\n'
    )
    more = ("--sbatch", "--output=mine.log", "--sbatch", "--dependency=afterok:5", "--sbatch", "--constraint=a|b&c")
    sbatch_headers = headers(call("--nodes", 2, *more, "--dry-run", "train.py", "--run-dir", "a")[1])
    assert {"nodes=2", "output=mine.log", "open-mode=truncate", "dependency=afterok:5", "constraint=a|b&c"} <= set(
        sbatch_headers
    )
    assert len({header.partition("=")[0] for header in sbatch_headers}) == len(sbatch_headers)


def test_numbers_of_the_site_and_of_the_command_line(here, call):
    (here / "hpcdist.toml").write_text('[submit]\nsbatch = ["--ntasks-per-node=4", "--nodes=3"]\n')
    sbatch_headers = headers(call("--nodes", 2, "--dry-run", "train.py", "--run-dir", "a")[1])
    assert {"nodes=2", "ntasks-per-node=4"} <= set(sbatch_headers)
    text = call("--sbatch", "--nodes=5", "--ps", 18, "--dry-run", "train.py", "--run-dir", "a")[1]
    assert "nodes=5" in headers(text)
    assert "'ps:18,worker:*'" in text


def test_files_of_defaults(here, call):
    """What the one here does not say, the one in ~/.config does, and then the site's."""
    site_lines = '[submit]\nsbatch = ["--account=site"]\ntime = "5:00:00"\nsetup = ["module load mpich"]\n'
    (here / "site.toml").write_text(site_lines)
    (here / "home" / ".config").mkdir(parents=True)
    (here / "home" / ".config" / "hpcdist.toml").write_text('[submit]\nsbatch = ["--account=abc"]\ntime = "9:00:00"\n')
    (here / "hpcdist.toml").write_text('[run]\ntrace = "all"\n[submit]\ntime = "1:00:00"\n')
    script = call("--dry-run", "train.py", "--run-dir", "a")[1]
    assert {"account=abc", "time=1:00:00"} <= set(headers(script))
    assert "account=site" not in headers(script)
    assert "module load mpich\n" in script


@pytest.mark.parametrize(
    ("limit", "limit_s"),
    [
        ("5", 300),
        ("1:30", 90),
        ("8:00:00", 28800),
        ("2-0", 172800),
        ("1-1:30", 91800),
        ("1-0:0:7", 86407),
        *[(text, None) for text in ("0", "", "UNLIMITED", "1:2:3:4", "1-2:3:4:5", "-5", "1-", "9" * 40)],
    ],
)
def test_the_forms_of_a_time_limit(limit, limit_s):
    assert submit.seconds_of(limit) == limit_s


@pytest.mark.parametrize(
    "options",
    [
        ["--time", "2:00"],
        ["--sbatch", "--time=0:02:00"],
        ["--sbatch", "--time=0:02:00", "--time", "8:00:00"],
        ["--time", "0-1", "--lead", 3600],
        ["--system", "lsf", "--time", "0:01:30", "--lead", 61],
    ],
)
def test_a_job_that_would_stop_when_it_starts_is_refused(here, call, options):
    code, _, error = call(*options, "--dry-run", "train.py", "--run-dir", "a")
    assert (code, error.count("\n")) == (2, 1)
    assert "that --lead keeps for the last save, got" in error


@pytest.mark.parametrize("options", [["--time", "8:00:00"], ["--system", "pbs", "--time", "0:01:00"]])
def test_the_limit_that_counts_is_the_one_of_the_job(here, call, options):
    """The command line comes before the site's, and PBS ignores the lead."""
    (here / "hpcdist.toml").write_text('[submit]\nsbatch = ["--time=0:01:00"]\n')
    code, _, error = call(*options, "--dry-run", "train.py", "--run-dir", "a")
    assert code == 0, error


@pytest.mark.parametrize("option", ['-R "select[mem>4000]"', "-q long", "-P project"])
def test_options_of_lsf(here, call, option):
    assert f"#BSUB {option}" in checked(
        call("--system", "lsf", "--option", option, "--dry-run", "train.py", "--run-dir", "a")[1]
    )


def test_seconds_of_a_limit_are_rounded_up(here, call):
    text = call("--system", "lsf", "--time", "1:00:45", "--dry-run", "train.py", "--run-dir", "a")[1]
    assert "#BSUB -W 61" in checked(text)


def test_a_launcher_of_the_site_is_for_slurm(here, call):
    (here / "hpcdist.toml").write_text('[submit]\nlauncher = "srun"\n')
    assert "srun" not in call("--system", "pbs", "--dry-run", "train.py", "--run-dir", "a")[1]


def test_a_library_that_the_job_loads(here, call, monkeypatch):
    monkeypatch.setattr(submit, "mpi_library", lambda: pytest.fail("there may be none where jobs are submitted"))
    (here / "hpcdist.toml").write_text('[submit]\nsetup = ["module load openmpi"]\nlibrary = "openmpi"\n')
    text = call("--dry-run", "train.py", "--run-dir", "a")[1]
    assert "  mpirun --bind-to none --host %hosts -n %n_ranks " in text


@pytest.mark.feature("checkpoints.rehearsed-preemption")
def test_a_drill_of_an_array_signals_its_own_task(here, call):
    text = call("--array", "1-2", "--drill", "5", "--dry-run", "train.py", "--run-dir", "a-{task}")[1]
    assert 'scancel --signal=USR1 "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in text


@pytest.fixture
def drill(here, call):
    """Return (command of the drill's lines, their environment) in a job 7, whose folder has no start of it yet."""
    script = call("--drill", "1", "--dry-run", "train.py", "--run-dir", "a")[1]
    (lines,) = (line for line in script.splitlines() if line.startswith("(for "))
    (here / "a" / "jobs").mkdir(parents=True)
    (here / "a" / "decision.json").touch()
    environ = {"PATH": f"{here}:{os.environ['PATH']}", "RUN_DIR": str(here / "a"), "SLURM_JOB_ID": "7"}
    return ["bash", "-c", f"{lines}\nwait"], {**os.environ, **environ}


def write_scancel(folder, text):
    (folder / "scancel").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "scancel").chmod(0o755)


def test_a_drill_that_comes_too_late_is_left_to_a_later_job(here, drill):
    command, environ = drill
    write_scancel(here, "echo 'scancel: error: Invalid job id' >&2; exit 1")
    (here / "a" / "jobs" / "7").touch()
    time.sleep(0.05)
    (here / "a" / "decision.json").touch()
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=30)
    assert done.stderr == "drill: not sent, as the job has ended or Slurm did not answer\n"
    assert not (here / "a" / "drill").exists()


def test_a_drill_waits_until_this_job_trains(here, drill):
    """A decision of an earlier job in the same folder is no sign of that, nor the start of the job."""
    command, environ = drill
    write_scancel(here, "touch preempted")
    process = subprocess.Popen(command, cwd=here, env=environ)
    try:
        time.sleep(2.5)
        assert not (here / "preempted").exists(), "the job has not begun"
        (here / "a" / "jobs" / "7").touch()
        time.sleep(2.5)
        assert not (here / "preempted").exists(), "the program has not begun"
        began = time.monotonic()
        (here / "a" / "decision.json").touch()
        process.wait(30)
        assert (here / "preempted").exists()
        assert time.monotonic() - began >= 1
    finally:
        process.kill()
        process.wait(10)
