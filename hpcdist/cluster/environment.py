"""The only module that accesses the process environment.

It is read, and written for one purpose: what a rank starts is no rank itself, and must not take itself for one by the
variables of the launcher that it inherits.
"""

import contextlib
import difflib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hpcdist.errors import ConfigurationError

#: Every variable that hpcdist itself defines, with its meaning.
HPCDIST_VARIABLES = {
    "HPCDIST_FROM_FILE": "names of the variables that hpcdist.toml has set; set by hpcdist run",
    "HPCDIST_DEBUG": "what to check or log: collectives, calls, finite, summary, separated by commas; default: nothing",
    "HPCDIST_JOB_END_S": "when the batch job will be ended, in seconds since 1970; set by scripts of PBS, LSF, Flux",
    "HPCDIST_JOB_ID": "id of the batch job; batch scripts set it",
    "HPCDIST_LOG": "json for log files of JSON lines; text, the default, for people",
    "HPCDIST_PREEMPTED": "1 where the batch system ended the attempt before this one; batch scripts set it",
    "HPCDIST_RANK_PROCESS": "process and launch of the rank that has started this process; ranks set it",
    "HPCDIST_ROLES": "role map given to ranks in order, such as chief:1,ps:2,worker:*",
    "HPCDIST_TERMINAL_COLUMNS": "columns of the terminal that the job prints to; set by hpcdist run",
    "HPCDIST_TIMEOUT_S": "longest time, in seconds, for a collective or an agreement; then the job ends (default 600)",
    "HPCDIST_TRACE": "steps recorded one by one in the run folder: some, the default, all, or off for no records",
}

#: Names that environment modules set for any package, and that mean nothing here.
_OF_MODULES = ("HPCDIST_ROOT", "HPCDIST_HOME", "HPCDIST_DIR", "HPCDIST_VERSION")

#: Valid names in HPCDIST_DEBUG, which is separated by commas: compare each collective on all ranks; log each; look for
#: gradients that are not finite; count calls, bytes and seconds.
DEBUG_NAMES = ("collectives", "calls", "finite", "summary")

#: Launcher variables: (size, rank, launcher). The first pair that is set and larger than one wins.
LAUNCHER_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI's mpirun"),
    ("PMI_SIZE", "PMI_RANK", "an MPICH-like mpirun or srun --mpi=pmi2"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH's mpirun"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("WORLD_SIZE", "RANK", "torchrun, which starts no MPI"),
)

#: What the variables begin with by which a launcher tells a process that it is a rank, and how to reach the others.
_LAUNCH_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_",
    "OMPI_MCA_ess_",
    "OMPI_MCA_orte_",
    "PRTE_",
    "HYDI_",
    "MV2_COMM_",
)
_LAUNCH_NAMES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MPI_LOCALRANKID",
)

#: The id of a batch job: as batch scripts set it, and under Slurm, PBS, LSF and Flux.
JOB_ID_VARIABLES = ("HPCDIST_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


@dataclass(frozen=True)
class Launcher:
    """The launcher's variables: how many processes it started and which one this is."""

    name: str
    size: int
    rank: int
    size_variable: str
    rank_variable: str


def read_environment() -> Mapping[str, str]:
    """Return a frozen copy of the environment."""
    return MappingProxyType(dict(os.environ))


def mark_rank() -> None:
    """Let processes that this rank starts know that they are not the rank."""
    os.environ["HPCDIST_RANK_PROCESS"] = " ".join([str(os.getpid()), _launch_of(os.environ)])


def is_child_of_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process, which has inherited the rank's launcher variables.

    A launcher that a rank starts makes new ranks: they have variables, or a connection to the launcher, of their own.
    """
    process, _, launch = environ.get("HPCDIST_RANK_PROCESS", "").partition(" ")
    if not process.isdecimal() or int(process) == os.getpid():
        return False
    return _launch_of(environ) in (launch, "") or _connection_of(environ) == _CLOSED


def leave_launch() -> None:
    """Forget the variables of the launcher, for the rest of this process: it is one of its own."""
    for name in list(os.environ):
        if _names_launch(name):
            del os.environ[name]


@contextlib.contextmanager
def without_launch() -> Iterator[None]:
    """Start processes in the block without the variables of the launcher. Not for use in several threads at once."""
    launch = {name: value for name, value in os.environ.items() if _names_launch(name)}
    leave_launch()
    try:
        yield
    finally:
        os.environ.update(launch)


def _names_launch(name: str) -> bool:
    is_place_of_library = name.endswith("_PREFIX")
    return name in _LAUNCH_NAMES or (name.startswith(_LAUNCH_PREFIXES) and not is_place_of_library)


#: Three years: longer than any job, and short enough for the timers of the operating system.
_LONGEST_S = 1e8
#: Says of a connection to the launcher that there is none, though the variables name one.
_CLOSED = "closed"


def _launch_of(environ: Mapping[str, str]) -> str:
    """Return text that names the launch of which this process is a rank; empty where no launcher is named."""
    names = [
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_ID",
        "PMIX_NAMESPACE",
        "PMIX_RANK",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
    ]
    names += JOB_ID_VARIABLES
    values = [environ.get(name, "") for name in names]
    return "/".join([*values, _connection_of(environ)]).strip("/")


def _connection_of(environ: Mapping[str, str]) -> str:
    """Return text that names this process's connection to a PMI launcher; empty where its variables name none."""
    descriptor = environ.get("PMI_FD", "")
    if not descriptor.isdecimal():
        return ""
    try:
        status = os.fstat(int(descriptor))
    except OSError:
        return _CLOSED
    return str(status.st_ino) if stat.S_ISSOCK(status.st_mode) else _CLOSED


def has_lost_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether variables name a connection to a PMI launcher that there is not, as inherited ones do."""
    return _connection_of(environ) == _CLOSED


def check_names(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError on an HPCDIST_* name that does not exist, suggesting the nearest one."""
    for name in environ:
        if (
            name.startswith("HPCDIST_")
            and name not in HPCDIST_VARIABLES
            and name not in _OF_MODULES
        ):
            near = difflib.get_close_matches(name, HPCDIST_VARIABLES, n=1, cutoff=0.0)[0]
            raise ConfigurationError(
                f"environment: expected one of {', '.join(HPCDIST_VARIABLES)}, got {name!r}; unset it or write {near}."
            )


def origin_of(environ: Mapping[str, str], name: str) -> str:
    """Return where the value of a variable comes from: its own name, hpcdist.toml, or "default"."""
    if not environ.get(name):
        return "default"
    return "hpcdist.toml" if name in environ.get("HPCDIST_FROM_FILE", "").split(",") else name


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher's facts about this process, or None if it was started by hand."""
    first_launcher = None
    for size_name, rank_name, name in LAUNCHER_VARIABLES:
        size = environ.get(size_name, "")
        rank = environ.get(rank_name, "")
        if size.isdecimal() and rank.isdecimal():
            launcher = Launcher(name, int(size), int(rank), size_name, rank_name)
            first_launcher = first_launcher or launcher
            if launcher.size > 1:
                return launcher
    return first_launcher


def torchrun_sizes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return how many processes torchrun started, and how many of them on this host; None if it started none.

    It may itself have been started by srun or mpirun, one for each host, whose variables its processes inherit. One of
    its processes may start mpirun: then those ranks are MPI's.
    """
    size = environ.get("WORLD_SIZE", "")
    n_local = environ.get("LOCAL_WORLD_SIZE", "")
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ and size.isdecimal() and n_local.isdecimal()
    if not is_torchrun:
        return None
    inner = launcher_of(
        {name: value for name, value in environ.items() if name not in ("WORLD_SIZE", "RANK")}
    )
    is_inside = inner is not None and inner.size > 1 and size == n_local
    return None if is_inside else (int(size), int(n_local))


def unused_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks the Slurm allocation has, if the program runs in it without any launcher; else 0."""
    tasks = environ.get("SLURM_NTASKS", "")
    return (
        int(tasks)
        if launcher_of(environ) is None and environ.get("SLURM_JOB_ID") and tasks.isdecimal()
        else 0
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs this process may use: those of CUDA_VISIBLE_DEVICES, else all of the machine."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len(
            [
                name
                for name in environ["CUDA_VISIBLE_DEVICES"].split(",")
                if name.strip() not in ("", "-1")
            ]
        )
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])


def timeout_s(environ: Mapping[str, str]) -> float:
    """Return HPCDIST_TIMEOUT_S in seconds.

    Raises:
        ConfigurationError: if it is not a positive number.
    """
    text = environ.get("HPCDIST_TIMEOUT_S", "600")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            f"environment: expected HPCDIST_TIMEOUT_S as seconds above 0, got {text!r}; write a number such as 600."
        )
    return min(value, _LONGEST_S)


def terminal_columns(environ: Mapping[str, str]) -> int:
    """Return the columns of the terminal behind the launcher's pipe, as `hpcdist run` says; 0 where there is none."""
    text = environ.get("HPCDIST_TERMINAL_COLUMNS", "")
    return int(text) if text.isdecimal() and len(text) <= 5 else 0


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return when the batch system will end this job, in seconds since 1970; None if unknown."""
    text = environ.get("SLURM_JOB_END_TIME") or environ.get("HPCDIST_JOB_END_S", "")
    # else it is no time that there is
    return float(text) if text.isdecimal() and len(text) <= 11 else None


def job_end_origin(environ: Mapping[str, str]) -> str:
    """Return which variable `job_end` is from."""
    return "SLURM_JOB_END_TIME" if environ.get("SLURM_JOB_END_TIME") else "HPCDIST_JOB_END_S"


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this batch job; None outside of one."""
    return next((environ[name] for name in JOB_ID_VARIABLES if environ.get(name)), None)


def is_after_preemption(environ: Mapping[str, str]) -> bool:
    """Return whether the batch script says that the batch system ended the attempt before this one."""
    return environ.get("HPCDIST_PREEMPTED", "") == "1"


def nccl_may_share_devices(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL is set to let several ranks use one GPU (experimental, NCCL 2.30 and later)."""
    return environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0").strip() == "1"


def logs_json(environ: Mapping[str, str]) -> bool:
    """Return whether HPCDIST_LOG asks for JSON.

    Raises:
        ConfigurationError: for another value than json and text.
    """
    text = environ.get("HPCDIST_LOG", "text").strip().lower()
    if text not in ("json", "text"):
        raise ConfigurationError(
            f"environment: expected HPCDIST_LOG as json or text, got {text!r}; write one of them, or unset it."
        )
    return text == "json"


def trace_mode(environ: Mapping[str, str]) -> str:
    """Return HPCDIST_TRACE: "some", "all" or "off".

    Raises:
        ConfigurationError: for another value.
    """
    text = environ.get("HPCDIST_TRACE", "").strip().lower() or "some"
    if text not in ("some", "all", "off"):
        raise ConfigurationError(
            f"environment: expected HPCDIST_TRACE as some, all or off, got {text!r}; write one of them, or unset it."
        )
    return text


def debug_names(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names in HPCDIST_DEBUG, such as {"collectives"}.

    Raises:
        ConfigurationError: for an unknown name.
    """
    text = environ.get("HPCDIST_DEBUG", "")
    names = frozenset(name.strip() for name in text.split(",")) - {""}
    if names - set(DEBUG_NAMES):
        raise ConfigurationError(
            f"environment: expected HPCDIST_DEBUG to name some of {', '.join(DEBUG_NAMES)}, got {text!r}; unset it or "
            f"write {DEBUG_NAMES[0]}."
        )
    return names
