"""`hpcdist submit`: writes a batch script for a user's program, shows it, and submits it."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError, ExitCode, UsageError


class _System(NamedTuple):
    """A batch system.

    Attributes:
        write: function that returns the text of a job's script.
        submit: command that submits a script; LSF's reads it from its standard input.
        key: key of its options in hpcdist.toml, and ending of its scripts.
    """

    write: Callable[[BatchJob], str]
    submit: tuple[str, ...]
    key: str


_SYSTEMS = {
    "slurm": _System(slurm_script, ("sbatch", "--parsable"), "sbatch"),
    "pbs": _System(pbs_script, ("qsub",), "pbs"),
    "lsf": _System(lsf_script, ("bsub",), "lsf"),
}
#: Characters that an option of sbatch may hold: the quoting rules of sbatch differ from a shell's.
_VALUE = re.compile(r"[\w.,:;@%+=/\[\]()*^~|&!{}-]+")
#: Options of PBS and LSF, whose values follow a space.
_SPACED = re.compile(r"-\w+ ?[\w.,:;@%+=/\[\]()<>*^~|&!\" -]*")
#: Options of PBS and LSF that the script has already.
_TAKEN = {
    "pbs": re.compile(r"-(N|l *(select|walltime))\b"),
    "lsf": re.compile(r"-(J|n|W|r|wa|wt|o|R *\"span)( |$|\[)"),
}
#: Placeholders that job.py replaces by the nodes of a launch, wherever they are in a command.
_PLACES = ("%nodes", "%hosts", "%n_nodes", "%n_ranks")
_NAME = re.compile(r"[\w.-]+")
_LIMIT = re.compile(r"\d+:[0-5]\d:[0-5]\d")
#: The answer of LSF when it has accepted a job.
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
    as docs/how-to/slurm.md describes. Its run folder, in which `checkpoints` lies, is the program's --run-dir; if that
    is fixed in the program, it is given before the program. Scripts for PBS and LSF follow their manuals, and have not
    been run on one. Defaults of a site are in hpcdist.toml here, in ~/.config or in /etc:

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
    text = _SYSTEMS[system].write(job)
    echo(text, nl=False)
    if dry_run:
        return ExitCode.DONE
    durable.make_folders(durable.Disk(), Path(job.script).parent)
    durable.replace_text(durable.Disk(), Path(job.script), text)
    return _submit(_SYSTEMS[system].submit, job.script)


def _job_of(
    program: tuple[str, ...], options: dict[str, Any], site: dict[str, Any], system: str
) -> BatchJob:
    """Return the job that a command line and the site's defaults ask for.

    Raises:
        UsageError: for options that the batch system would misunderstand.
    """
    is_slurm = system == "slurm"
    key = _SYSTEMS[system].key
    site_options = site.get(key, [])
    run_dir = _run_dir_of(program, options)
    name = options["name"] or _name_of(run_dir)
    limit = options["time"] or site.get("time", "")
    sbatch_values: dict[str, str] = {}
    if is_slurm:
        sbatch_values = _values_of([*site_options, *options["more"]])
    n_nodes = _count(options["nodes"], sbatch_values.get("--nodes")) + options["ps_nodes"]
    n_per_node = _count(options["ntasks_per_node"], sbatch_values.get("--ntasks-per-node"))
    n_servers = options["n_servers"] + options["ps_nodes"] * n_per_node
    system_options = [*site_options, *options["more"]]
    launcher_name: str | None = "mpirun"
    if is_slurm:
        job_options = [f"--nodes={n_nodes}", f"--ntasks-per-node={n_per_node}"]
        if limit:
            job_options.append(f"--time={limit}")
        if options["array"]:
            job_options.append(f"--array={options['array']}")
        comment = f"--comment={COMMENT}{Path.cwd() / run_dir}"
        if _VALUE.fullmatch(comment):
            job_options.append(comment)
        system_options = last_of_each([*site_options, *job_options, *options["more"]])
        launcher_name = options["launcher"] or site.get("launcher")
    _check(name, system_options, program, {**options, "time": limit}, system)
    _check_servers(n_servers, n_nodes * n_per_node, options)
    if is_slurm:
        limit_of_job = _values_of(system_options).get("--time", "")
        _check_lead(options["lead"], limit_of_job)
    elif system == "lsf":  # whose script has whole minutes; PBS ignores the lead
        n_minutes = math.ceil(options["lead"] / 60)
        _check_lead(60 * n_minutes, limit)
    script = _folder_above_tasks(run_dir) / f"{name}.{key}"
    return BatchJob(
        name=name,
        n_nodes=n_nodes,
        n_per_node=n_per_node,
        limit=limit,
        options=tuple(system_options),
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
        script=str(script.absolute()),
        folder=str(Path.cwd()),
    )


def _name_of(run_dir: str) -> str:
    """Return the name of a job whose command line has no --name: the parts of its run folder, joined by "-"."""
    parts = [part for part in Path(run_dir.replace(TASK, "all")).parts if part not in "/.."]
    return "-".join(parts)


def _folder_above_tasks(run_dir: str) -> Path:
    """Return the run folder; for an array the part of it that all tasks share."""
    folder = Path()
    for part in Path(run_dir).parts:
        if TASK in part:
            break
        folder /= part
    return folder


def _values_of(options: Sequence[str]) -> dict[str, str]:
    """Return name -> value of options such as --nodes=2; of a repeated option the last value."""
    values = {}
    for option in options:
        name, _, value = option.partition("=")
        values[name] = value
    return values


def _count(explicit_count: int | None, sbatch_value: str | None) -> int:
    """Return a number of nodes or ranks.

    Args:
        explicit_count: number on the command line; None if it has none.
        sbatch_value: value of an option of sbatch, which counts then; 1 without a number there.
    """
    if explicit_count is not None:
        return explicit_count
    if sbatch_value is None:
        return 1
    return whole_number(sbatch_value) or 1


def _run_dir_of(program: Sequence[str], options: dict[str, Any]) -> str:
    """Return the run folder.

    Raises:
        UsageError: if there is none, if there are two, or if tasks of an array would share the folder.
    """
    program_run_dir = run_dir_of(program)
    explicit_run_dir = options["run_dir"]
    run_dir = str(explicit_run_dir or program_run_dir or "")
    if not run_dir:
        raise UsageError(
            "hpcdist submit: expected the run folder, got none; give the program --run-dir, or put --run-dir before it "
            "with the folder that `checkpoints` is in."
        )
    if (
        explicit_run_dir
        and program_run_dir is not None
        and Path(explicit_run_dir).resolve() != program_run_dir.resolve()
    ):
        raise UsageError(
            f"hpcdist submit: expected one run folder, got {explicit_run_dir!r} before the program and "
            f"{str(program_run_dir)!r} in its arguments; leave out the first."
        )
    if options["array"] and TASK not in run_dir:
        raise UsageError(
            f"hpcdist submit: expected a run folder for each task of the array, got {run_dir!r}; put {TASK} into it."
        )
    return run_dir


def _check(
    name: str,
    system_options: Sequence[str],
    program: Sequence[str],
    options: dict[str, Any],
    system: str,
) -> None:
    """Raise UsageError for options that the batch system or job.py would misunderstand.

    Args:
        name: name of the job.
        system_options: options for the batch system.
        program: program and its arguments.
        options: options of the command line.
        system: name of the batch system.
    """
    if options["array"] and options["chain"]:
        raise UsageError("hpcdist submit: expected --array or --chain, got both; leave one out.")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"hpcdist submit: expected letters, digits, . and - in the name of the job, got {name!r}; give it a --name."
        )
    is_slurm = system == "slurm"
    expected_form = "such as '-q long'"
    if is_slurm:
        expected_form = "of sbatch such as --partition=gpu, without spaces and quotes"
    for option in system_options:
        if not _is_plain(option, is_slurm):
            raise UsageError(
                f"hpcdist submit: expected options {expected_form}, got {option!r}; write each as one word."
            )
    if not is_slurm:
        _check_other_system(options, system_options, system)
    for argument in program:
        if any(place in argument for place in _PLACES):
            raise UsageError(
                f"hpcdist submit: expected arguments without {', '.join(_PLACES)}, which stand "
                f"for nodes in a batch script, got {argument!r}; rename it."
            )


def _is_plain(option: str, is_slurm: bool) -> bool:
    """Return whether a script can hold an option as one word, without quotes."""
    if is_slurm:
        return option.startswith("--") and _VALUE.fullmatch(option) is not None
    return _SPACED.fullmatch(option) is not None


def _check_other_system(
    options: dict[str, Any], system_options: Sequence[str], system: str
) -> None:
    """Raise UsageError for options that PBS and LSF do not have, or that the script has already."""
    slurm_options = [f"--{name}" for name in ("array", "chain", "drill") if options[name]]
    if options["launcher"] == "srun":
        slurm_options.append("--launcher srun")
    if slurm_options:
        raise UsageError(
            f"hpcdist submit: expected {slurm_options[0]} with Slurm, got --system {system}; leave it out."
        )
    reserved = next((option for option in system_options if _TAKEN[system].match(option)), None)
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
    """Raise UsageError unless at least one rank is no parameter server."""
    if options["n_servers"] and options["ps_nodes"]:
        raise UsageError("hpcdist submit: expected --ps or --ps-nodes, got both; leave one out.")
    if n_servers >= n_ranks:
        raise UsageError(
            f"hpcdist submit: expected fewer parameter servers than the {n_ranks} ranks, got {n_servers}; ask for more "
            f"nodes or tasks."
        )


def _library_here() -> str:
    """Return which MPI library mpi4py loads where the job is submitted.

    Raises:
        ConfigurationError: if it loads none, as on a login node whose MPI is a module of the job.
    """
    try:
        return mpi_library()
    except ConfigurationError as error:
        fact, _, _ = str(error).rpartition("; ")
        raise ConfigurationError(
            f"hpcdist submit: expected to know the MPI library of the job, got none ({fact}); write "
            f'library = "mpich" or "openmpi" under [submit] in hpcdist.toml, or load the module of an MPI first.'
        ) from error


def _check_lead(lead_s: int, limit: str) -> None:
    """Raise UsageError if a job would be asked to save and end as soon as it starts."""
    limit_s = seconds_of(limit)
    if limit_s is not None and lead_s >= limit_s:
        raise UsageError(
            f"hpcdist submit: expected a time limit of more than the {lead_s} s that --lead keeps for the last save, "
            f"got {limit}; give more --time, or less --lead."
        )


def seconds_of(limit: str) -> int | None:
    """Return a time limit in seconds; None for no limit, or for another form, which the batch system judges.

    Args:
        limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch takes it; 0 is no limit.
    """
    days, dash, clock = limit.rpartition("-")
    texts = clock.split(":")
    units_s: tuple[int, ...] = (60, 1)
    if len(texts) == 3:
        units_s = (3600, 60, 1)
    if dash:
        texts = [days, *texts]
        units_s = (86400, 3600, 60, 1)
    if len(texts) > len(units_s):
        return None
    total_s = 0
    for text, unit_s in zip(texts, units_s, strict=False):
        number = whole_number(text)
        if number is None:
            return None
        total_s += number * unit_s
    return total_s or None


def _launcher_of(launcher_name: str | None, library: str | None) -> tuple[str, ...]:
    """Return the command that starts the ranks inside the job: srun for MPICH, else mpirun.

    Args:
        launcher_name: "srun" or "mpirun"; None for the one that fits the library.
        library: MPI library that the site's setup loads in the job, where its mpirun is in PATH. None for the library
            that mpi4py loads here.
    """
    library_name = library or _library_here()
    is_mpich = library_name == "mpich"
    if launcher_name == "srun" or (launcher_name is None and is_mpich):
        return ("srun", "--mpi=pmi2") if is_mpich else ("srun", "--mpi=pmix")
    path = "mpirun" if library else find_launcher(library_name, {}).path
    if library_name == "openmpi":
        return (path, "--bind-to", "none")
    return (path,)


def _submit(command: Sequence[str], script: str) -> int:
    """Submit a script by a batch system's command; return the exit code."""
    name, *options = command
    path = shutil.which(name)
    if path is None:
        raise ConfigurationError(
            f"hpcdist submit: expected {name}, got none in PATH; run it where jobs are submitted: {name} {script}."
        )
    line = [path, *options, script]
    stdin_path = "/dev/null"
    if name == "bsub":
        line = [path, *options]
        stdin_path = script
    try:
        with open(stdin_path) as stdin_file:
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
    job = done.stdout.strip().partition(";")[0]
    lsf_answer = _LSF_JOB.search(job)
    if lsf_answer is not None:
        job = lsf_answer[1]
    echo(f"submitted job {job}: {json.dumps(script)}", err=True)
    return ExitCode.DONE
