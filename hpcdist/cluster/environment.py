"""The only module that accesses the process environment.

It reads the environment, and writes it for one purpose: a process that a rank starts is no rank. It inherits the
launcher's variables, and must not take itself for a rank by them.
"""

import contextlib
import difflib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcdist.cluster.whole_numbers import whole_number
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
    "HPCDIST_RUN_NOTE": "file in which the chief names its run folder; set by hpcdist run",
    "HPCDIST_TERMINAL_COLUMNS": "columns of the terminal that the job prints to; set by hpcdist run",
    "HPCDIST_TIMEOUT_S": "longest time, in seconds, for a collective or an agreement; then the job ends (default 600)",
    "HPCDIST_TRACE": "steps recorded one by one in the run folder: some, the default, all, or off for no records",
}

#: Names that environment modules set for any package; they have no meaning for hpcdist.
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

#: Beginnings of the variables by which a launcher tells a process that it is a rank, and how to reach other ranks.
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
    """The launcher's variables: how many processes it started, and the rank of this process."""

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
    launch = _launch_of(os.environ)
    os.environ["HPCDIST_RANK_PROCESS"] = " ".join([str(os.getpid()), launch])


def is_child_of_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process, which has inherited the rank's launcher variables.

    A launcher that a rank starts makes new ranks. They have other variables than the rank, or another connection to
    a launcher.
    """
    process, _, launch = environ.get("HPCDIST_RANK_PROCESS", "").partition(" ")
    if whole_number(process) in (None, os.getpid()):
        return False
    has_launch = any(map(_names_launch, environ))
    if not has_launch or _launch_of(environ) in (launch, ""):
        return True
    return _connection_of(environ) == _CLOSED


def leave_launch() -> None:
    """Remove the launcher's variables from this process, which is no rank from now on."""
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
    """Return whether a variable belongs to one launch. Variables such as PMIX_PREFIX tell where a library is."""
    if name in _LAUNCH_NAMES:
        return True
    return name.startswith(_LAUNCH_PREFIXES) and not name.endswith("_PREFIX")


#: Three years: longer than any job, and short enough for the timers of the operating system.
_LONGEST_S = 1e8
#: Name of a connection to the launcher that the variables name, but that does not exist.
_CLOSED = "closed"


def _launch_of(environ: Mapping[str, str]) -> str:
    """Return text that identifies the launch of which this process is a rank, within its batch job if there is one."""
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
    """Return text that identifies this process's connection to a PMI launcher; empty if no variable names one."""
    descriptor = whole_number(environ.get("PMI_FD", ""))
    if descriptor is None:
        return ""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return _CLOSED
    if not stat.S_ISSOCK(status.st_mode):
        return _CLOSED
    return str(status.st_ino)


def has_lost_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether the variables, such as inherited ones, name a connection to a PMI launcher that does not exist."""
    return _connection_of(environ) == _CLOSED


def check_names(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError on an HPCDIST_* name that does not exist, suggesting the nearest one."""
    for name in environ:
        is_known = name in HPCDIST_VARIABLES or name in _OF_MODULES
        if name.startswith("HPCDIST_") and not is_known:
            near = difflib.get_close_matches(name, HPCDIST_VARIABLES, n=1, cutoff=0.0)[0]
            valid_names = ", ".join(HPCDIST_VARIABLES)
            raise ConfigurationError(
                f"environment: expected one of {valid_names}, got {name!r}; unset it or write {near}."
            )


def origin_of(environ: Mapping[str, str], name: str) -> str:
    """Return where the value of a variable comes from: its own name, hpcdist.toml, or "default"."""
    if not environ.get(name):
        return "default"
    if name in environ.get("HPCDIST_FROM_FILE", "").split(","):
        return "hpcdist.toml"
    return name


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher's variables for this process, or None if no launcher has started it."""
    first_launcher = None
    for size_name, rank_name, name in LAUNCHER_VARIABLES:
        size = whole_number(environ.get(size_name, ""))
        rank = whole_number(environ.get(rank_name, ""))
        if size is not None and rank is not None:
            launcher = Launcher(name, size, rank, size_name, rank_name)
            first_launcher = first_launcher or launcher
            if launcher.size > 1:
                return launcher
    return first_launcher


def torchrun_sizes(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return how many processes torchrun started, and how many of them on this host; None if it started none.

    srun or mpirun may have started torchrun, once on each host; its processes inherit their variables. A process of
    torchrun may start mpirun, whose ranks are MPI's, not torchrun's.
    """
    size = whole_number(environ.get("WORLD_SIZE", ""))
    n_local = whole_number(environ.get("LOCAL_WORLD_SIZE", ""))
    if "TORCHELASTIC_RUN_ID" not in environ or size is None or n_local is None:
        return None
    mpi_environ = dict(environ)
    mpi_environ.pop("WORLD_SIZE", None)
    mpi_environ.pop("RANK", None)
    mpi_launcher = launcher_of(mpi_environ)
    if mpi_launcher is not None and mpi_launcher.size > 1 and size == n_local:
        return None
    return size, n_local


def unused_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks the Slurm allocation has, if the program runs in it without any launcher; else 0."""
    if launcher_of(environ) is not None or not environ.get("SLURM_JOB_ID"):
        return 0
    return slurm_tasks(environ)


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks SLURM_NTASKS asks for; 0 if it does not say."""
    return whole_number(environ.get("SLURM_NTASKS", "")) or 0


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs this process may use: the ones in CUDA_VISIBLE_DEVICES, else all of the machine."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = environ["CUDA_VISIBLE_DEVICES"].split(",")
        return sum(name.strip() not in ("", "-1") for name in names)
    n_gpus = 0
    for name in os.listdir("/dev"):
        if re.fullmatch(r"nvidia\d+", name):
            n_gpus += 1
    return n_gpus


def timeout_s(environ: Mapping[str, str]) -> float:
    """Return HPCDIST_TIMEOUT_S in seconds.

    Raises:
        ConfigurationError: if it is not a positive number.
    """
    text = environ.get("HPCDIST_TIMEOUT_S") or "600"
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
    """Return the columns of the terminal behind the launcher's pipe, which `hpcdist run` sets; 0 without a terminal."""
    text = environ.get("HPCDIST_TERMINAL_COLUMNS", "")
    if not text.isdecimal() or len(text) > 5:
        return 0
    return int(text)


def run_note(environ: Mapping[str, str]) -> Path | None:
    """Return the file in which the chief names its run folder to `hpcdist run`; None if that did not start the job."""
    path = environ.get("HPCDIST_RUN_NOTE")
    if not path:
        return None
    return Path(path)


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return when the batch system will end this job, in seconds since 1970; None if unknown."""
    text = environ.get("SLURM_JOB_END_TIME") or environ.get("HPCDIST_JOB_END_S", "")
    # longer numbers are no seconds since 1970
    if not text.isdecimal() or len(text) > 11:
        return None
    return float(text)


def job_end_origin(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that `job_end` reads."""
    if environ.get("SLURM_JOB_END_TIME"):
        return "SLURM_JOB_END_TIME"
    return "HPCDIST_JOB_END_S"


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of this batch job; None outside of one."""
    for name in JOB_ID_VARIABLES:
        if environ.get(name):
            return environ[name]
    return None


def is_after_preemption(environ: Mapping[str, str]) -> bool:
    """Return whether the batch script says that the batch system ended the attempt before this one."""
    return environ.get("HPCDIST_PREEMPTED", "") == "1"


def nccl_may_share_devices(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL is set to let several ranks use one GPU (experimental, NCCL 2.30 and later)."""
    return environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0").strip() == "1"


def logs_json(environ: Mapping[str, str]) -> bool:
    """Return whether HPCDIST_LOG asks for JSON.

    Raises:
        ConfigurationError: if the value is neither json nor text.
    """
    text = environ.get("HPCDIST_LOG", "").strip().lower() or "text"
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
    names = frozenset(map(str.strip, text.split(","))) - {""}
    if not names.issubset(DEBUG_NAMES):
        valid_names = ", ".join(DEBUG_NAMES)
        raise ConfigurationError(
            f"environment: expected HPCDIST_DEBUG to name some of {valid_names}, got {text!r}; unset it or write "
            f"{DEBUG_NAMES[0]}."
        )
    return names
