"""`hpcdist submit`: a batch script of Slurm for a program of one's own, shown, and submitted."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import hpcdist
from hpcdist.checkpoint import durable
from hpcdist.cli.launcher import find_launcher, mpi_library
from hpcdist.cli.run import command_of, run_dir_of
from hpcdist.cli.site import site_defaults
from hpcdist.cluster.environment import read_environment
from hpcdist.errors import ConfigurationError, ExitCode, UsageError

#: What stands for the number of an array's task in the program's arguments.
TASK = "{task}"
#: What an option of sbatch may hold: sbatch has quoting rules of its own.
_VALUE = re.compile(r"[\w.,:;@%+=/\[\]()*^~|&!-]+$")
#: What job.py replaces by the nodes of a launch, wherever it is in a command.
_PLACES = ("%nodes", "%hosts", "%n_nodes", "%n_ranks")
_NAME = re.compile(r"[\w.-]+$")
_SBATCH_S = 60.0


@dataclass(frozen=True)
class BatchJob:
    """A job of Slurm.

    Attributes:
        name: of the job.
        sbatch: options, such as "--nodes=2": before those that every job has, which they replace.
        run_dir: run folder, which may hold `TASK`.
        command: of one rank.
        launcher: what starts the ranks, such as ("srun",), or mpirun and its options.
        job_program: path of slurm/job.py.
        lead_s: seconds before the time limit at which Slurm signals the job.
        setup: lines of shell before the program starts.
        array: of tasks, such as "1-8"; empty for none.
        is_chained: whether each job submits its successor, where jobs are not requeued.
        n_servers: ranks that are parameter servers.
        drill_s: seconds after the first start at which the job is preempted, once; 0 for no drill.
        script: path that the script is written to. folder: from which it was submitted, where its paths begin.
    """

    name: str
    sbatch: tuple[str, ...]
    run_dir: str
    command: tuple[str, ...]
    launcher: tuple[str, ...]
    job_program: str
    lead_s: int = 120
    setup: tuple[str, ...] = ()
    array: str = ""
    is_chained: bool = False
    n_servers: int = 0
    drill_s: int = 0
    script: str = ""
    folder: str = "."


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ntasks-per-node", type=click.IntRange(1), default=1, show_default=True, help="Ranks of a node.")
@click.option("--time", metavar="LIMIT", help="Time limit, such as 8:00:00.")
@click.option("--name", help="Name of the job; default: that of the run folder.")
@click.option("--run-dir", help="Run folder, if it is fixed in the program; default: the program's --run-dir.")
@click.option("--ps", "n_servers", type=click.IntRange(0), default=0, help="Ranks that are parameter servers.")
@click.option("--array", metavar="TASKS", default="", help="Several runs, such as 1-8; {task} is the number of one.")
@click.option("--chain", is_flag=True, help="Each job submits its successor: for sites that requeue no jobs.")
@click.option("--drill", type=click.IntRange(1), metavar="SECONDS", help="Preempt it once, this long after its start.")
@click.option("--lead", type=click.IntRange(10), default=120, show_default=True, help="Seconds for the last save.")
@click.option("--sbatch", multiple=True, metavar="OPTION", help="Of sbatch, such as --partition=gpu; may be repeated.")
@click.option("--launcher", type=click.Choice(["srun", "mpirun"]), help="Default: srun for MPICH, mpirun for Open MPI.")
@click.option("--dry-run", is_flag=True, help="Show the script, and do not submit it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(program: tuple[str, ...], dry_run: bool, **options: Any) -> int:
    """Write a batch script for PROGRAM and its arguments, show it, and submit it to Slurm.

    The job is started again after a stop, a preemption, a lost rank or node, and its time limit, from its checkpoints,
    as docs/slurm.md describes. Its run folder, in which `checkpoints` lies, is the program's --run-dir; if that is
    fixed in the program, it is given before the program. Defaults of a site are in hpcdist.toml here or in ~/.config:

    \b
    [submit]
    sbatch = ["--partition=long", "--account=abc"]
    setup = ["module load openmpi"]

    \b
    hpcdist submit --nodes 4 --ntasks-per-node 8 --time 8:00:00 train.py --run-dir runs/a
    """
    job = _job_of(program, options)
    text = script_of(job)
    click.echo(text, nl=False)
    if dry_run:
        return ExitCode.DONE
    durable.make_folders(durable.Disk(), Path(job.script).parent)
    durable.replace_text(durable.Disk(), Path(job.script), text)
    return _submit(job.script)


def _job_of(program: tuple[str, ...], options: dict[str, Any]) -> BatchJob:
    """Return the job that a command line and the site's defaults ask for.

    Raises:
        UsageError: for what Slurm would misunderstand. ConfigurationError: for a file of defaults that is none.
    """
    site = site_defaults("submit")
    run_dir = _run_dir_of(program, options)
    name = options["name"] or "-".join(part for part in Path(run_dir.replace(TASK, "all")).parts if part not in "/..")
    limit = options["time"] or site.get("time")
    own = [f"--nodes={options['nodes']}", f"--ntasks-per-node={options['ntasks_per_node']}"]
    own += [f"--time={limit}"] if limit else []
    own += [f"--array={options['array']}"] if options["array"] else []
    sbatch = _last_of_each([*site.get("sbatch", []), *own, *options["sbatch"]])
    _check(name, sbatch, program, options)
    first = next((number for number, part in enumerate(Path(run_dir).parts) if TASK in part), None)
    where = Path(*Path(run_dir).parts[:first]) if first is not None else Path(run_dir)
    return BatchJob(
        name=name,
        sbatch=tuple(sbatch),
        run_dir=run_dir,
        command=command_of(program, is_module=False),
        launcher=_launcher_of(options["launcher"] or site.get("launcher"), site.get("library")),
        job_program=str(_parts() / "job.py"),
        lead_s=options["lead"],
        setup=tuple(site.get("setup", [])),
        array=options["array"],
        is_chained=options["chain"],
        n_servers=options["n_servers"],
        drill_s=options["drill"] or 0,
        script=str((where / f"{name}.sbatch").absolute()),
        folder=str(Path.cwd()),
    )


def _run_dir_of(program: Sequence[str], options: dict[str, Any]) -> str:
    """Return the run folder.

    Raises:
        UsageError: where there is none, or there are two, or tasks of an array would share it.
    """
    of_program, given = run_dir_of(program), options["run_dir"]
    found = str(given or of_program or "")
    if not found:
        raise UsageError(
            "hpcdist submit: expected the run folder, got none; give the program --run-dir, or put --run-dir before it "
            "with the folder that `checkpoints` is in."
        )
    if given and of_program and Path(given) != of_program:
        raise UsageError(
            f"hpcdist submit: expected one run folder, got {given!r} before the program and {str(of_program)!r} in its "
            f"arguments; leave out the first."
        )
    if options["array"] and TASK not in found:
        raise UsageError(
            f"hpcdist submit: expected a run folder for each task of the array, got {found!r}; put {TASK} into it."
        )
    return found


def _last_of_each(sbatch: Sequence[str]) -> list[str]:
    """Return options of sbatch, of each name the last one."""
    return list({option.partition("=")[0]: option for option in sbatch}.values())


def _check(name: str, sbatch: Sequence[str], program: Sequence[str], options: dict[str, Any]) -> None:
    """Raise UsageError for what Slurm or job.py would misunderstand."""
    if options["array"] and options["chain"]:
        raise UsageError("hpcdist submit: expected --array or --chain, got both; leave one out.")
    if not _NAME.match(name):
        raise UsageError(
            f"hpcdist submit: expected letters, digits, . and - in the name of the job, got {name!r}; give it a --name."
        )
    for option in sbatch:
        if not option.startswith("--") or not _VALUE.match(option):
            raise UsageError(
                f"hpcdist submit: expected options of sbatch such as --partition=gpu, without spaces and quotes, got "
                f"{option!r}; correct it."
            )
    for argument in program:
        if any(place in argument for place in _PLACES):
            raise UsageError(
                f"hpcdist submit: expected arguments without {', '.join(_PLACES)}, which stand for nodes in a batch "
                f"script, got {argument!r}; rename it."
            )
    n_ranks = options["nodes"] * options["ntasks_per_node"]
    if options["n_servers"] >= n_ranks:
        raise UsageError(
            f"hpcdist submit: expected fewer parameter servers than the {n_ranks} ranks, got {options['n_servers']}; "
            f"ask for more nodes or tasks."
        )


def _launcher_of(asked: str | None, library: str | None) -> tuple[str, ...]:
    """Return what starts the ranks inside the job: srun for MPICH, else mpirun with the nodes of the launch.

    Args:
        asked: "srun" or "mpirun"; None: whichever fits.
        library: which a site's setup loads in the job: its mpirun is in PATH there. None: that of mpi4py here.
    """
    found = library or mpi_library()
    if asked == "srun" or (asked is None and found == "mpich"):
        return ("srun", "--mpi=pmi2" if found == "mpich" else "--mpi=pmix")
    path = "mpirun" if library else find_launcher(found, {}).path
    return (path, "--bind-to", "none") if found == "openmpi" else (path,)


def _parts() -> Path:
    """Return the folder with job.py: in the package, or beside it in a clone.

    Raises:
        ConfigurationError: where it is missing.
    """
    package = Path(hpcdist.__file__).parent
    for folder in (package / "slurm", package.parent / "slurm"):
        if (folder / "job.py").is_file():
            return folder
    raise ConfigurationError(
        f"hpcdist submit: expected slurm/job.py in {package} or beside it, got none; install hpcdist again."
    )


def script_of(job: BatchJob) -> str:
    """Return the batch script of a job. Pure: every value is quoted for the shell."""
    is_srun = job.launcher[0] == "srun"
    header = [
        f"--job-name={job.name}",
        f"--signal={'' if is_srun else 'B:'}USR1@{job.lead_s}",
        "--no-requeue" if job.is_chained else "--requeue",
        "--no-kill",
        *([] if job.array or job.is_chained else ["--dependency=singleton"]),
        "--open-mode=append",
        f"--output={'%x-%A_%a.log' if job.array else '%x-%j.log'}",
    ]
    lines = ["#!/usr/bin/env bash", "# Made by `hpcdist submit`. What happens to the job: docs/slurm.md of hpcdist."]
    lines += [f"#SBATCH {option}" for option in _last_of_each([*header, *job.sbatch])]
    lines += ["", f"cd {shlex.quote(job.folder)} || exit 78", *job.setup]
    lines += [f"export RUN_DIR={_quoted(job.run_dir, job)}"]
    if is_srun:
        lines += ["# MPICH: UCX's address is sometimes too long for Slurm's pmi2, and MPI fails to start."]
        lines += ["export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}"]
    if job.n_servers:
        lines += [f"export HPCDIST_ROLES='ps:{job.n_servers},worker:*'"]
    if job.drill_s:
        this = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array else "$SLURM_JOB_ID"
        preempt = f'scancel{"" if is_srun else " --batch"} --signal=USR1 "{this}"'
        lines += [f"# A drill: preempted once, {job.drill_s} s after its first start."]
        lines += [f'(sleep {job.drill_s}; mkdir "$RUN_DIR/drill" 2> /dev/null && {preempt}) &']
    successor = ""
    if job.is_chained:
        lines += [
            f'successor=$(sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" {shlex.quote(job.script)}) || exit 1'
        ]
        successor = ' --successor "$successor"'
    program = " ".join(_quoted(part, job) for part in job.command)
    run = f"exec {shlex.quote(sys.executable)} -E -S {shlex.quote(job.job_program)}{successor}"
    return "\n".join([*lines, f"{run} \\", f"  {_start_of(job.launcher)} \\", f"  {program}"]) + "\n"


def _start_of(launcher: Sequence[str]) -> str:
    """Return the command that starts the ranks; job.py fills in the nodes of each launch."""
    if launcher[0] == "srun":
        options = "--kill-on-bad-exit=1 --overlap --nodelist=%nodes --nodes=%n_nodes --ntasks=%n_ranks"
        return f'{shlex.join(launcher)} {options} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}"'
    return f"{shlex.join(launcher)} --host %hosts -n %n_ranks"


def _quoted(value: str, job: BatchJob) -> str:
    """Return a value for the shell; in an array `TASK` is the number of the task."""
    parts = value.split(TASK) if job.array else [value]
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in parts) or "''"


def _submit(script: str) -> int:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigurationError(
            f"hpcdist submit: expected Slurm's sbatch, got none; run it where jobs are submitted: sbatch {script}."
        )
    try:
        done = subprocess.run(
            [sbatch, "--parsable", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SBATCH_S,
            env=dict(read_environment()),
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"hpcdist submit: expected an answer of sbatch within {_SBATCH_S:g} s, got none; look with squeue --me."
        ) from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise ConfigurationError(
            f"hpcdist submit: expected sbatch to take {script}, got {said!r}; correct the options."
        )
    click.echo(f"submitted job {done.stdout.strip().partition(';')[0]}: {json.dumps(script)}", err=True)
    return ExitCode.DONE
