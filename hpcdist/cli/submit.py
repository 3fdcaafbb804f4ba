"""`hpcdist submit`: a batch script for a program of one's own, shown, and submitted."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.batch_scripts import (
    COMMENT,
    TASK,
    BatchJob,
    last_of_each,
    lsf_script,
    pbs_script,
    slurm_script,
)
from hpcdist.cli.launcher import find_launcher, mpi_library
from hpcdist.cli.output import echo
from hpcdist.cli.run import command_of, run_dir_of
from hpcdist.cli.shipped import shipped_folder
from hpcdist.cli.site import site_defaults
from hpcdist.cluster.environment import read_environment
from hpcdist.errors import ConfigurationError, ExitCode, UsageError

#: System -> the text of a script, and the command that takes it: LSF's reads it.
_SYSTEMS = {
    "slurm": (slurm_script, ("sbatch", "--parsable")),
    "pbs": (pbs_script, ("qsub",)),
    "lsf": (lsf_script, ("bsub",)),
}
#: What an option of sbatch may hold: sbatch has quoting rules of its own.
_VALUE = re.compile(r"[\w.,:;@%+=/\[\]()*^~|&!{}-]+")
#: The same for PBS and LSF, whose options have their values behind a space.
_SPACED = re.compile(r"-\w+ ?[\w.,:;@%+=/\[\]()<>*^~|&!\" -]*")
#: What the script itself asks of PBS and LSF.
_TAKEN = {
    "pbs": re.compile(r"-(N|l *(select|walltime))\b"),
    "lsf": re.compile(r"-(J|n|W|r|wa|wt|o|R *\"span)( |$|\[)"),
}
#: What job.py replaces by the nodes of a launch, wherever it is in a command.
_PLACES = ("%nodes", "%hosts", "%n_nodes", "%n_ranks")
_NAME = re.compile(r"[\w.-]+")
_LIMIT = re.compile(r"\d+:[0-5]\d:[0-5]\d")
#: What LSF says when it has taken a job.
_LSF_JOB = re.compile(r"Job <(\d+)>")
_SUBMIT_S = 60.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), help="Default: 1.")
@click.option("--ntasks-per-node", type=click.IntRange(1), help="Ranks of a node; default: 1.")
@click.option("--time", metavar="LIMIT", help="Time limit, such as 8:00:00.")
@click.option("--name", help="Name of the job; default: that of the run folder.")
@click.option(
    "--run-dir", help="Run folder, if it is fixed in the program; default: the program's --run-dir."
)
@click.option(
    "--ps", "n_servers", type=click.IntRange(0), default=0, help="Ranks that are parameter servers."
)
@click.option(
    "--ps-nodes", type=click.IntRange(0), default=0, help="Additional nodes, whose ranks all serve."
)
@click.option(
    "--array",
    metavar="TASKS",
    default="",
    help="Several runs, such as 1-8; {task} is the number of one.",
)
@click.option(
    "--chain", is_flag=True, help="Each job submits its successor: for sites that requeue no jobs."
)
@click.option(
    "--drill",
    type=click.IntRange(1),
    metavar="SECONDS",
    help="Preempt it once, this long after its start.",
)
@click.option(
    "--lead",
    type=click.IntRange(10),
    default=120,
    show_default=True,
    help="Seconds for the last save.",
)
@click.option("--system", type=click.Choice(list(_SYSTEMS)), help="Default: slurm.")
@click.option(
    "--sbatch",
    "--option",
    "more",
    multiple=True,
    metavar="OPTION",
    help="Option for the batch system; may be repeated.",
)
@click.option(
    "--launcher",
    type=click.Choice(["srun", "mpirun"]),
    help="Default: srun for MPICH, mpirun for Open MPI.",
)
@click.option("--dry-run", is_flag=True, help="Show the script, and do not submit it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(program: tuple[str, ...], dry_run: bool, **options: Any) -> int:
    """Write a batch script for PROGRAM and its arguments, show it, and submit it to Slurm, PBS or LSF.

    The job is started again after a stop, a preemption, a lost rank or node, and its time limit, from its checkpoints,
    as docs/slurm.md describes. Its run folder, in which `checkpoints` lies, is the program's --run-dir; if that is
    fixed in the program, it is given before the program. Scripts for PBS and LSF follow their manuals, and have not
    been run on one. Defaults of a site are in hpcdist.toml here or in ~/.config:

    \b
    [submit]
    sbatch = ["--partition=long", "--account=abc"]
    setup = ["module load openmpi"]

    \b
    hpcdist submit --nodes 4 --ntasks-per-node 8 --time 8:00:00 train.py --run-dir runs/a
    """
    site = site_defaults("submit")
    system = options["system"] or site.get("system", "slurm")
    job = _job_of(program, options, site, system)
    write, take = _SYSTEMS[system]
    text = write(job)
    echo(text, nl=False)
    if dry_run:
        return ExitCode.DONE
    durable.make_folders(durable.Disk(), Path(job.script).parent)
    durable.replace_text(durable.Disk(), Path(job.script), text)
    return _submit(take, job.script)


def _job_of(
    program: tuple[str, ...], options: dict[str, Any], site: dict[str, Any], system: str
) -> BatchJob:
    """Return the job that a command line and the site's defaults ask for.

    Raises:
        UsageError: for what the batch system would misunderstand.
    """
    run_dir = _run_dir_of(program, options)
    name = options["name"] or "-".join(
        part for part in Path(run_dir.replace(TASK, "all")).parts if part not in "/.."
    )
    sbatch_options = [*site.get("sbatch", ()), *options["more"]] if system == "slurm" else []
    of_sbatch = dict(option.partition("=")[::2] for option in sbatch_options)
    n_nodes = _count(options["nodes"], of_sbatch.get("--nodes")) + options["ps_nodes"]
    n_per_node = _count(options["ntasks_per_node"], of_sbatch.get("--ntasks-per-node"))
    n_servers = options["n_servers"] + options["ps_nodes"] * n_per_node
    limit = options["time"] or site.get("time", "")
    chosen = [*site.get("sbatch" if system == "slurm" else system, [])]
    if system == "slurm":
        chosen += [f"--nodes={n_nodes}", f"--ntasks-per-node={n_per_node}"]
        chosen += [f"--time={limit}"] if limit else []
        chosen += [f"--array={options['array']}"] if options["array"] else []
        comment = f"--comment={COMMENT}{Path.cwd() / run_dir}"
        chosen += [comment] if _VALUE.fullmatch(comment) else []
    chosen = (
        last_of_each([*chosen, *options["more"]])
        if system == "slurm"
        else [*chosen, *options["more"]]
    )
    _check(name, chosen, program, {**options, "time": limit}, system)
    _check_servers(n_servers, n_nodes * n_per_node, options)
    first = next((number for number, part in enumerate(Path(run_dir).parts) if TASK in part), None)
    where = Path(*Path(run_dir).parts[:first]) if first is not None else Path(run_dir)
    launcher_name = options["launcher"] or site.get("launcher") if system == "slurm" else "mpirun"
    return BatchJob(
        name=name,
        n_nodes=n_nodes,
        n_per_node=n_per_node,
        limit=limit,
        options=tuple(chosen),
        run_dir=run_dir,
        command=command_of(program, is_module=False),
        launcher=_launcher_of(launcher_name, site.get("library")),
        job_program=str(shipped_folder("slurm", "job.py") / "job.py"),
        lead_s=options["lead"],
        setup=tuple(site.get("setup", [])),
        array=options["array"],
        is_chained=options["chain"],
        n_servers=n_servers,
        drill_s=options["drill"] or 0,
        script=str((where / f"{name}.{'sbatch' if system == 'slurm' else system}").absolute()),
        folder=str(Path.cwd()),
    )


def _count(explicit_count: int | None, of_sbatch: str | None) -> int:
    """Return a number of nodes or ranks: that of an option of its own, of an option of sbatch, or 1."""
    return explicit_count or (
        int(of_sbatch) if of_sbatch and of_sbatch.isdecimal() and int(of_sbatch) else 1
    )


def _run_dir_of(program: Sequence[str], options: dict[str, Any]) -> str:
    """Return the run folder.

    Raises:
        UsageError: where there is none, or there are two, or tasks of an array would share it.
    """
    of_program = run_dir_of(program)
    explicit_run_dir = options["run_dir"]
    run_dir = str(explicit_run_dir or of_program or "")
    if not run_dir:
        raise UsageError(
            "hpcdist submit: expected the run folder, got none; give the program --run-dir, or put --run-dir before it "
            "with the folder that `checkpoints` is in."
        )
    if explicit_run_dir and of_program and Path(explicit_run_dir).resolve() != of_program.resolve():
        raise UsageError(
            f"hpcdist submit: expected one run folder, got {explicit_run_dir!r} before the program and "
            f"{str(of_program)!r} in its arguments; leave out the first."
        )
    if options["array"] and TASK not in run_dir:
        raise UsageError(
            f"hpcdist submit: expected a run folder for each task of the array, got {run_dir!r}; put {TASK} into it."
        )
    return run_dir


def _check(
    name: str, chosen: Sequence[str], program: Sequence[str], options: dict[str, Any], system: str
) -> None:
    """Raise UsageError for what the batch system or job.py would misunderstand."""
    if options["array"] and options["chain"]:
        raise UsageError("hpcdist submit: expected --array or --chain, got both; leave one out.")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"hpcdist submit: expected letters, digits, . and - in the name of the job, got {name!r}; give it a --name."
        )
    is_slurm = system == "slurm"
    for option in chosen:
        if not (
            option.startswith("--") and _VALUE.fullmatch(option)
            if is_slurm
            else _SPACED.fullmatch(option)
        ):
            expected_form = (
                "of sbatch such as --partition=gpu, without spaces and quotes"
                if is_slurm
                else "such as '-q long'"
            )
            raise UsageError(
                f"hpcdist submit: expected options {expected_form}, got {option!r}; write each as one word."
            )
    if not is_slurm:
        _check_other_system(options, chosen, system)
    for argument in program:
        if any(place in argument for place in _PLACES):
            raise UsageError(
                f"hpcdist submit: expected arguments without {', '.join(_PLACES)}, which stand for nodes in a batch "
                f"script, got {argument!r}; rename it."
            )


def _check_other_system(options: dict[str, Any], chosen: Sequence[str], system: str) -> None:
    """Raise UsageError for what is written for Slurm only."""
    slurm_option = next((name for name in ("array", "chain", "drill") if options[name]), None)
    if slurm_option or options["launcher"] == "srun":
        name = f"--{slurm_option}" if slurm_option else "--launcher srun"
        raise UsageError(
            f"hpcdist submit: expected {name} with Slurm, got --system {system}; leave it out."
        )
    reserved = next((option for option in chosen if _TAKEN[system].match(option)), None)
    if reserved is not None:
        raise UsageError(
            f"hpcdist submit: expected options that the script has not made already, got {reserved!r}; use --nodes, "
            f"--ntasks-per-node, --time, --name and --lead."
        )
    if options["time"] and not _LIMIT.fullmatch(options["time"]):
        raise UsageError(
            f"hpcdist submit: expected a time limit such as 8:00:00 for {system}, got {options['time']!r}; "
            f"write hours:minutes:seconds."
        )


def _check_servers(n_servers: int, n_ranks: int, options: dict[str, Any]) -> None:
    if options["n_servers"] and options["ps_nodes"]:
        raise UsageError("hpcdist submit: expected --ps or --ps-nodes, got both; leave one out.")
    if n_servers >= n_ranks:
        raise UsageError(
            f"hpcdist submit: expected fewer parameter servers than the {n_ranks} ranks, got {n_servers}; ask for more "
            f"nodes or tasks."
        )


def _launcher_of(launcher_name: str | None, library: str | None) -> tuple[str, ...]:
    """Return what starts the ranks inside the job: srun for MPICH, else mpirun with the nodes of the launch.

    Args:
        launcher_name: "srun" or "mpirun"; None: whichever fits.
        library: which a site's setup loads in the job: its mpirun is in PATH there. None: that of mpi4py here.
    """
    library_name = library or mpi_library()
    if launcher_name == "srun" or (launcher_name is None and library_name == "mpich"):
        return ("srun", "--mpi=pmi2" if library_name == "mpich" else "--mpi=pmix")
    path = "mpirun" if library else find_launcher(library_name, {}).path
    return (path, "--bind-to", "none") if library_name == "openmpi" else (path,)


def _submit(take: Sequence[str], script: str) -> int:
    name, *options = take
    path = shutil.which(name)
    if path is None:
        raise ConfigurationError(
            f"hpcdist submit: expected {name}, got none in PATH; run it where jobs are submitted: {name} {script}."
        )
    line = [path, *options, *([] if name == "bsub" else [script])]
    try:
        with open(script if name == "bsub" else "/dev/null") as stdin_file:
            done = subprocess.run(
                line,
                stdin=stdin_file,
                capture_output=True,
                text=True,
                timeout=_SUBMIT_S,
                env=dict(read_environment()),
            )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"hpcdist submit: expected an answer of {name} within {_SUBMIT_S:g} s, got none; look at your jobs."
        ) from error
    if done.returncode:
        error_text = " ".join(done.stderr.split())
        raise ConfigurationError(
            f"hpcdist submit: expected {name} to take {script}, got {error_text!r}; correct the options."
        )
    answer = done.stdout.strip().partition(";")[0]
    of_lsf = _LSF_JOB.search(answer)
    echo(f"submitted job {of_lsf[1] if of_lsf else answer}: {json.dumps(script)}", err=True)
    return ExitCode.DONE
