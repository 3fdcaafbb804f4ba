"""Chooses the launcher that starts the ranks, and its options: facts about the machine in, one command line out."""

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
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError, UsageError

#: Launcher -> the variables that it gives its processes: rank, size, rank on the host.
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
    """A program that starts ranks.

    Attributes:
        kind: "mpich", "openmpi" or "srun".
        path: path of the program.
    """

    kind: str
    path: str

    @property
    def save_signal(self) -> signal.Signals:
        """Signal to the launcher that has the ranks save and end."""
        if self.kind == "mpich":
            return signal.SIGTERM
        # for SIGTERM, Open MPI's mpirun and srun end the ranks at once
        return signal.SIGUSR1


@dataclass(frozen=True)
class Request:
    """Ranks that a launcher is to start.

    Attributes:
        n_ranks: number of ranks.
        program: program and its arguments.
        hosts: names of hosts with numbers of ranks, such as "n1:4,n2:4"; empty for this machine, or the allocation.
        is_bound: whether to bind each rank to cores that no other rank uses, if there are enough.
        n_cores: number of cores that this process may use; 0 if the ranks run on other machines.
        cpus_per_task: CPUs of a task in the allocation; 0 if it does not specify them.
        is_root: whether the user is root, whom Open MPI refuses.
        is_in_allocation: whether this process belongs to a job of Slurm.
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
        """Number of cores for each rank; 0 if there are more ranks than cores, or if the cores are not known."""
        return self.cpus_per_task or self.n_cores // self.n_ranks


def mpi_library() -> str:
    """Return which MPI library mpi4py loads, "mpich" or "openmpi". A child process loads it, and does not start MPI.

    Raises:
        ConfigurationError: if mpi4py finds no MPI library, or one of another kind.
    """
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    library_version = _output_of([sys.executable, "-c", probe])
    if "Open MPI" in library_version:
        return "openmpi"
    if any(name in library_version for name in ("MPICH", "Intel(R) MPI", "MVAPICH")):
        return "mpich"
    last_line = (library_version.split("\n")[-1] or "nothing")[:200]
    raise ConfigurationError(
        f"expected an MPI library that mpi4py can load, got {last_line!r}; load your site's MPI module, "
        f"or pip install mpich."
    )


def find_launcher(library: str, environ: Mapping[str, str]) -> Launcher:
    """Return the launcher for ranks of an MPI library.

    Inside an allocation of Slurm, srun starts the ranks of MPICH, if it offers PMI-2. (Open MPI's wheel brings a PMIx
    that is often newer than Slurm's, so its mpirun starts the ranks there.) Elsewhere the launcher is the mpirun of the
    library beside this Python, else the first one in PATH.

    Args:
        library: "mpich" or "openmpi".
        environ: variables of this process; with SLURM_JOB_ID it is inside an allocation.

    Raises:
        ConfigurationError: if there is no launcher of this library.
    """
    if library == "mpich" and "SLURM_JOB_ID" in environ:
        srun = shutil.which("srun")
        if srun and "pmi2" in _output_of([srun, "--mpi=list"]):
            return Launcher("srun", srun)
    rejected = []
    for path in _candidates(library):
        kind = _kind_of(_output_of([path, "--version"]))
        if kind == library:
            return Launcher(kind, path)
        rejected.append(f"{path} ({kind})")
    name = {"mpich": "MPICH", "openmpi": "Open MPI"}[library]
    raise ConfigurationError(
        f"hpcdist run: expected the mpirun of {name}, which mpi4py loads, got {', '.join(rejected) or 'none'}; "
        f"load its module, or activate the environment that it is installed in."
    )


def _candidates(library: str) -> Iterator[str]:
    """Yield the paths of programs that may be the library's mpirun, each once."""
    python_folder = str(Path(sys.executable).parent)
    seen_paths = set()
    for name in ("mpirun", "mpiexec", f"mpirun.{library}"):
        for path in (shutil.which(name, path=python_folder), shutil.which(name)):
            if path and path not in seen_paths:
                seen_paths.add(path)
                yield path


def _kind_of(version: str) -> str:
    """Return the kind of an mpirun by what it prints for --version: "mpich", "openmpi" or "unknown"."""
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return "mpich"
    if any(name in version for name in ("Open MPI", "OpenRTE", "prte")):
        return "openmpi"
    return "unknown"


def _output_of(command: Sequence[str]) -> str:
    """Return what a command prints on both streams, or the error if it cannot be started or takes too long."""
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
    """Return the command that starts the ranks, and the variables to add to the environment. Pure.

    Only guards are added: cores for each rank and as many threads, permission for root and for oversubscription, quiet
    transports, and the variables by which scripts for torchrun know their rank.

    Args:
        launcher: launcher that `find_launcher` returns.
        request: ranks to start.
        environ: variables that are set already, which are not overridden.
    """
    added = {"OMP_NUM_THREADS": str(max(1, request.cores_per_rank))}
    if launcher.kind == "openmpi":
        # the component of UCX warns on every window
        added |= {"OMPI_MCA_osc": "^ucx"}
        if request.is_root:
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if launcher.kind == "srun":
        # UCX's address is sometimes too long for Slurm's PMI-2
        added |= {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    added = {name: value for name, value in added.items() if name not in environ}
    options_of = {"mpich": _mpich_options, "openmpi": _openmpi_options, "srun": _srun_options}
    options = options_of[launcher.kind](request)
    if launcher.kind == "openmpi" and (request.hosts or request.is_in_allocation):
        for name in sorted({*environ, *added}):
            if name.startswith(_EXPORTED):
                options += ["-x", name]
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
    if request.n_ranks > request.n_cores > 0:
        options.append("--oversubscribe")
    return [*options, "--bind-to", "none"]


def _srun_options(request: Request) -> list[str]:
    options = ["--mpi=pmi2", "--kill-on-bad-exit=1", "--overlap", f"--ntasks={request.n_ranks}"]
    if request.hosts:
        names = [entry.partition(":")[0] for entry in request.hosts.split(",")]
        options.append(f"--nodelist={','.join(names)}")
    if request.cpus_per_task:
        options.append(f"--cpus-per-task={request.cpus_per_task}")
    if not request.is_bound:
        options.append("--cpu-bind=none")
    return options


def _as_torchrun(kind: str) -> list[str]:
    """Return the command that sets torchrun's variables for a rank, and then becomes the program."""
    rank, size, local_rank = _VARIABLES[kind]
    return ["sh", "-c", f'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} exec "$0" "$@"']


def request_here(
    n_ranks: int,
    program: Sequence[str],
    environ: Mapping[str, str],
    hosts: str = "",
    is_bound: bool = True,
) -> Request:
    """Return the request for a program on this machine, on the named hosts, or in this allocation.

    Args:
        n_ranks: number of ranks.
        program: program and its arguments.
        environ: variables of this process.
        hosts: names of hosts with numbers of ranks; empty for this machine, or the allocation.
        is_bound: whether to bind ranks to cores. Only a process that may use all cores of its machine binds them.
    """
    is_in_allocation = "SLURM_JOB_ID" in environ
    # launchers count cores from the machine's first one
    has_whole_machine = len(os.sched_getaffinity(0)) == os.cpu_count()
    n_usable_cores = 0
    if not hosts and not is_in_allocation:
        n_usable_cores = n_cores()
    cpus_per_task = 0
    if is_in_allocation:
        cpus_per_task = whole_number(environ.get("SLURM_CPUS_PER_TASK", "")) or 0
    return Request(
        n_ranks=n_ranks,
        program=tuple(program),
        hosts=hosts,
        is_bound=is_bound and has_whole_machine,
        n_cores=n_usable_cores,
        cpus_per_task=cpus_per_task,
        is_root=os.geteuid() == 0,
        is_in_allocation=is_in_allocation,
    )


def require_no_launcher(caller: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError in a rank that a launcher has started: each rank would start a whole job."""
    started_by = launcher_of(environ)
    if started_by is not None and started_by.size > 1:
        raise UsageError(
            f"{caller}: expected to start the ranks, got rank {started_by.rank} of {started_by.size} that "
            f"{started_by.name} has started; leave out one of the two."
        )


def n_cores() -> int:
    """Return how many cores this process may use.

    Hardware threads of the same core count once, as launchers bind ranks to cores.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package_id = (topology / "physical_package_id").read_text()
            core_id = (topology / "core_id").read_text()
        except OSError:  # as in some containers
            package_id = str(cpu)
            core_id = ""
        cores.add((package_id, core_id))
    return len(cores)


def as_text(command: Sequence[str], added: Mapping[str, str]) -> str:
    """Return a command as a person would type it, with the added variables before it."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    return " ".join([*assignments, shlex.join(command)])
