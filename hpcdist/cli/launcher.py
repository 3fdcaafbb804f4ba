"""Which launcher starts the ranks, and with which options: facts about the machine in, one command line out."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdist.cluster.environment import launcher_of
from hpcdist.errors import ConfigurationError, UsageError

#: Which variables each launcher gives its processes: rank, size, rank on the host.
_VARIABLES = {
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
#: Prefixes of variables that Open MPI exports to other hosts only with -x.
_EXPORTED = ("HPCDIST_", "OMP_NUM_THREADS", "MASTER_", "PYTHONPATH", "TF_CONFIG", "RUN_DIR")
_PROBE_S = 60.0


@dataclass(frozen=True)
class Launcher:
    """What starts ranks.

    Attributes:
        kind: "mpich", "openmpi" or "srun".
        path: of the program.
    """

    kind: str
    path: str

    @property
    def save_signal(self) -> signal.Signals:
        """What to send it to have the ranks save and end: Open MPI's mpirun and srun end them at once for SIGTERM."""
        return signal.SIGTERM if self.kind == "mpich" else signal.SIGUSR1


@dataclass(frozen=True)
class Request:
    """What is to be started.

    Attributes:
        n_ranks: how many ranks.
        program: the program and its arguments.
        hosts: names with numbers of ranks, such as "n1:4,n2:4"; empty: this machine, or the allocation.
        is_bound: whether each rank is to have cores of its own, where there are enough.
        n_cores: that this process may use; 0 where other machines count.
        cpus_per_task: of an allocation; 0 where it does not say.
        is_root: whether this is root, whom Open MPI refuses.
        is_in_allocation: whether this is a job of Slurm.
    """

    n_ranks: int
    program: tuple[str, ...]
    hosts: str = ""
    is_bound: bool = True
    n_cores: int = 0
    cpus_per_task: int = 0
    is_root: bool = False
    is_in_allocation: bool = False

    @property
    def cores_per_rank(self) -> int:
        """How many cores a rank has of its own; 0 where there are more ranks than cores, or it is not known."""
        return self.cpus_per_task or self.n_cores // self.n_ranks


def mpi_library() -> str:
    """Return "mpich" or "openmpi": which of them mpi4py loads. A child process asks it: MPI is loaded, not started.

    Raises:
        ConfigurationError: where it finds none, or another one.
    """
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    library_version = _output_of([sys.executable, "-c", probe])
    if "Open MPI" in library_version:
        return "openmpi"
    if (
        "MPICH" in library_version
        or "Intel(R) MPI" in library_version
        or "MVAPICH" in library_version
    ):
        return "mpich"
    last = (library_version.split("\n")[-1] or "nothing")[:200]
    raise ConfigurationError(
        f"hpcdist run: expected an MPI library that mpi4py can load, got {last!r}; load your site's MPI module, or "
        f"pip install mpich."
    )


def find_launcher(library: str, environ: Mapping[str, str]) -> Launcher:
    """Return what starts ranks of an MPI library here.

    Inside an allocation of Slurm that is srun for MPICH, if it offers PMI-2. (Open MPI's wheel has a PMIx of its own,
    which is often newer than Slurm's, so its mpirun starts the ranks there.) Elsewhere it is the mpirun beside this
    Python, else the first one in PATH, that belongs to the library.

    Raises:
        ConfigurationError: where there is none.
    """
    srun = shutil.which("srun")
    if (
        library == "mpich"
        and srun
        and "SLURM_JOB_ID" in environ
        and "pmi2" in _output_of([srun, "--mpi=list"])
    ):
        return Launcher("srun", srun)
    seen = []
    for path in _candidates(library):
        kind = _kind_of(_output_of([path, "--version"]))
        if kind == library:
            return Launcher(kind, path)
        seen.append(f"{path} ({kind})")
    names = {"mpich": "MPICH", "openmpi": "Open MPI"}
    raise ConfigurationError(
        f"hpcdist run: expected the mpirun of {names[library]}, which mpi4py loads, got {', '.join(seen) or 'none'}; "
        f"load its module, or activate the environment that it is installed in."
    )


def _candidates(library: str) -> Iterator[str]:
    beside = Path(sys.executable).parent
    seen_paths = set()
    suffix = "openmpi" if library == "openmpi" else "mpich"
    for name in ("mpirun", "mpiexec", f"mpirun.{suffix}"):
        for path in (shutil.which(name, path=str(beside)), shutil.which(name)):
            if path and path not in seen_paths:
                seen_paths.add(path)
                yield path


def _kind_of(version: str) -> str:
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return "mpich"
    return (
        "openmpi" if any(name in version for name in ("Open MPI", "OpenRTE", "prte")) else "unknown"
    )


def _output_of(command: Sequence[str]) -> str:
    """Return what a command prints, on both streams; why it cannot be started, if it cannot."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def launch_command(
    launcher: Launcher, request: Request, environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the ranks, and what is added to the environment. Pure.

    Only guards are added: cores for each rank and as many threads, permission for root and for oversubscription, quiet
    transports, and the variables by which scripts for torchrun know their rank.

    Args:
        launcher: of `find_launcher`.
        request: what is to be started.
        environ: variables that are set already, which are not overridden.
    """
    added = {"OMP_NUM_THREADS": str(max(1, request.cores_per_rank))}
    if launcher.kind == "openmpi":
        added |= {"OMPI_MCA_osc": "^ucx"}  # whose component warns on every window
        if request.is_root:
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if launcher.kind == "srun":
        # UCX's address is sometimes too long for Slurm's PMI-2
        added |= {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    added = {name: value for name, value in added.items() if name not in environ}
    options = {"mpich": _mpich_options, "openmpi": _openmpi_options, "srun": _srun_options}[
        launcher.kind
    ](request)
    if launcher.kind == "openmpi" and (request.hosts or request.is_in_allocation):
        names = sorted(name for name in {**environ, **added} if name.startswith(_EXPORTED))
        options += [part for name in names for part in ("-x", name)]
    return [launcher.path, *options, *_as_torchrun(launcher.kind), *request.program], added


def _mpich_options(request: Request) -> list[str]:
    options = ["-n", str(request.n_ranks)]
    if request.hosts:
        options += ["-hosts", request.hosts]
    if request.is_bound and request.cores_per_rank and request.n_cores:
        options += ["-bind-to", f"core:{request.cores_per_rank}"]
    return options


def _openmpi_options(request: Request) -> list[str]:
    options = ["-n", str(request.n_ranks)]
    if request.hosts:
        return [*options, "--host", request.hosts, "--bind-to", "none"]
    if request.is_bound and request.cores_per_rank and not request.is_in_allocation:
        return [*options, "--map-by", f"slot:PE={request.cores_per_rank}"]
    is_full = request.n_ranks > request.n_cores > 0
    return [*options, *(["--oversubscribe"] if is_full else []), "--bind-to", "none"]


def _srun_options(request: Request) -> list[str]:
    options = ["--mpi=pmi2", "--kill-on-bad-exit=1", "--overlap", f"--ntasks={request.n_ranks}"]
    if request.hosts:
        options += [
            "--nodelist="
            + ",".join(host_entry.partition(":")[0] for host_entry in request.hosts.split(","))
        ]
    if request.cpus_per_task:
        options += [f"--cpus-per-task={request.cpus_per_task}"]
    return [*options, *([] if request.is_bound else ["--cpu-bind=none"])]


def _as_torchrun(kind: str) -> list[str]:
    """Return the command that gives each rank torchrun's variables, and becomes the program."""
    rank, size, local_rank = _VARIABLES[kind]
    return ["sh", "-c", f'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} exec "$0" "$@"']


def request_here(
    n_ranks: int,
    program: Sequence[str],
    environ: Mapping[str, str],
    hosts: str = "",
    is_bound: bool = True,
) -> Request:
    """Return the request for a program on this machine, on given hosts, or in this allocation."""
    is_in_allocation = "SLURM_JOB_ID" in environ
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    # launchers count cores from its first one
    has_whole_machine = len(os.sched_getaffinity(0)) == os.cpu_count()
    return Request(
        n_ranks=n_ranks,
        program=tuple(program),
        hosts=hosts,
        is_bound=is_bound and has_whole_machine,
        n_cores=0 if hosts or is_in_allocation else n_cores(),
        cpus_per_task=int(cpus) if is_in_allocation and cpus.isdecimal() else 0,
        is_root=os.geteuid() == 0,
        is_in_allocation=is_in_allocation,
    )


def require_no_launcher(caller: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError in a rank of a launcher: each rank would start a whole job."""
    started_by = launcher_of(environ)
    if started_by is not None and started_by.size > 1:
        raise UsageError(
            f"{caller}: expected to start the ranks, got rank {started_by.rank} of {started_by.size} that "
            f"{started_by.name} has started; leave out one of the two."
        )


def n_cores() -> int:
    """Return how many cores this process may use: hardware threads of one core count once, as launchers bind cores."""
    core_ids = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            core_ids.add(
                tuple((topology / name).read_text() for name in ("physical_package_id", "core_id"))
            )
        except OSError:  # as in some containers
            core_ids.add((str(cpu), ""))
    return len(core_ids)


def as_text(command: Sequence[str], added: Mapping[str, str]) -> str:
    """Return a command as one would type it."""
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in added.items()), shlex.join(command)]
    )
