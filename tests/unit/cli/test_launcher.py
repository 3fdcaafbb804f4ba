"""Which launcher, and which command line: a pure function of the machine."""

import sys

import pytest

from hpcdist.cli import launcher
from hpcdist.cli.launcher import (
    Launcher,
    Request,
    as_text,
    find_launcher,
    launch_command,
    mpi_library,
    request_here,
)
from hpcdist.errors import ConfigurationError

PROGRAM = ("python", "train.py")
MPICH, OPENMPI, SRUN = (Launcher(kind, f"/bin/{kind}") for kind in ("mpich", "openmpi", "srun"))


def line(made_by, environ=(), **request):
    command, added = launch_command(made_by, Request(program=PROGRAM, **request), dict(environ))
    return as_text(command[: command.index("sh")], added)


@pytest.mark.parametrize(
    ("made_by", "request_", "expected"),
    [
        (MPICH, {"n_ranks": 2, "n_cores": 8}, "OMP_NUM_THREADS=4 /bin/mpich -n 2 -bind-to core:4"),
        (MPICH, {"n_ranks": 4, "n_cores": 2}, "OMP_NUM_THREADS=1 /bin/mpich -n 4"),
        (MPICH, {"n_ranks": 2, "n_cores": 8, "is_bound": False}, "OMP_NUM_THREADS=4 /bin/mpich -n 2"),
        (MPICH, {"n_ranks": 4, "hosts": "a:2,b:2"}, "OMP_NUM_THREADS=1 /bin/mpich -n 4 -hosts a:2,b:2"),
        (
            OPENMPI,
            {"n_ranks": 2, "n_cores": 8},
            "OMP_NUM_THREADS=4 OMPI_MCA_osc='^ucx' /bin/openmpi -n 2 --map-by slot:PE=4",
        ),
        (
            OPENMPI,
            {"n_ranks": 4, "n_cores": 2, "is_root": True},
            "OMP_NUM_THREADS=1 OMPI_MCA_osc='^ucx' OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
            "/bin/openmpi -n 4 --oversubscribe --bind-to none",
        ),
        (
            OPENMPI,
            {"n_ranks": 4, "is_in_allocation": True},
            "OMP_NUM_THREADS=1 OMPI_MCA_osc='^ucx' /bin/openmpi -n 4 --bind-to none -x OMP_NUM_THREADS",
        ),
        (
            SRUN,
            {"n_ranks": 4, "is_in_allocation": True},
            "OMP_NUM_THREADS=1 MPIR_CVAR_CH4_NETMOD=ofi /bin/srun --mpi=pmi2 --kill-on-bad-exit=1 --overlap --ntasks=4",
        ),
        (
            SRUN,
            {"n_ranks": 4, "is_in_allocation": True, "cpus_per_task": 8, "hosts": "n1:2,n2:2", "is_bound": False},
            "OMP_NUM_THREADS=8 MPIR_CVAR_CH4_NETMOD=ofi /bin/srun --mpi=pmi2 --kill-on-bad-exit=1 --overlap --ntasks=4 "
            "--nodelist=n1,n2 --cpus-per-task=8 --cpu-bind=none",
        ),
    ],
)
def test_guards(made_by, request_, expected):
    assert line(made_by, **request_) == expected


def test_what_is_set_stays():
    assert line(MPICH, {"OMP_NUM_THREADS": "3"}, n_ranks=2, n_cores=8) == "/bin/mpich -n 2 -bind-to core:4"


def test_other_hosts_get_our_variables():
    environ = {"HPCDIST_ROLES": "worker:*", "MASTER_PORT": "1", "HOME": "/root", "OMP_NUM_THREADS": "1"}
    assert line(OPENMPI, environ, n_ranks=2, hosts="a,b").endswith(
        "--host a,b --bind-to none -x HPCDIST_ROLES -x MASTER_PORT -x OMP_NUM_THREADS"
    )


@pytest.mark.parametrize("kind", ["mpich", "openmpi", "srun"])
def test_ranks_know_themselves_as_under_torchrun(kind):
    command, _ = launch_command(Launcher(kind, "x"), Request(2, ("echo", "a b", "$HOME")), {})
    shell = command[command.index("sh") :]
    assert shell[3:] == ["echo", "a b", "$HOME"], "arguments are not read by a shell"
    assert shell[2].startswith("RANK=$")
    assert shell[2].endswith('exec "$0" "$@"')


@pytest.fixture
def machine(monkeypatch):
    """Return say({program: what it prints}): those programs are in PATH, and no others."""

    def say(outputs):
        monkeypatch.setattr(launcher, "_output_of", lambda command: outputs.get(command[0], ""))
        monkeypatch.setattr(
            launcher.shutil, "which", lambda name, path=None: f"/bin/{name}" if f"/bin/{name}" in outputs else None
        )

    return say


def test_the_launcher_of_the_library_is_found(machine):
    machine({"/bin/mpirun": "mpirun (Open MPI) 5.0.11", "/bin/mpiexec": "HYDRA build details:\nVersion: 5.0.2"})
    assert find_launcher("openmpi", {}) == Launcher("openmpi", "/bin/mpirun")
    assert find_launcher("mpich", {}) == Launcher("mpich", "/bin/mpiexec")


def test_a_launcher_of_another_library_is_refused(machine):
    machine({"/bin/mpirun": "mpirun (Open MPI) 5.0.11"})
    with pytest.raises(ConfigurationError, match=r"MPICH.*/bin/mpirun"):
        find_launcher("mpich", {})


@pytest.mark.parametrize(("plugins", "kind"), [("none\npmi2\npmix", "srun"), ("none\npmix", "mpich")])
def test_srun_starts_mpich_where_it_can(machine, plugins, kind):
    machine({"/bin/srun": plugins, "/bin/mpirun": "HYDRA build details:"})
    assert find_launcher("mpich", {"SLURM_JOB_ID": "7"}).kind == kind
    assert find_launcher("mpich", {}).kind == "mpich", "outside of an allocation"


@pytest.mark.parametrize(
    ("text", "kind"), [("MPICH Version: 5.0.2", "mpich"), ("Open MPI v5.0.11, package", "openmpi")]
)
def test_the_library_is_asked_in_a_child_process(machine, text, kind):
    machine({sys.executable: text})
    assert mpi_library() == kind


def test_no_library_is_an_error_with_the_cure(machine):
    machine({sys.executable: "Traceback\nRuntimeError: cannot load MPI library"})
    with pytest.raises(ConfigurationError, match="'RuntimeError: cannot load MPI library'.*MPI"):
        mpi_library()


@pytest.fixture
def cores(monkeypatch):
    """Return have(n_own, n_all), which lets this process use n_own of the n_all cores of the machine."""

    def have(n_own, n_all):
        monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda pid: set(range(n_own)))
        monkeypatch.setattr(launcher.os, "cpu_count", lambda: n_all)
        monkeypatch.setattr(launcher, "n_cores", lambda: n_own)

    return have


def test_a_request_on_this_machine(cores):
    cores(8, 8)
    request = request_here(2, PROGRAM, {"SLURM_CPUS_PER_TASK": "3"})
    assert (request.n_cores, request.cpus_per_task, request.is_bound, request.cores_per_rank) == (8, 0, True, 4)
    assert not request_here(2, PROGRAM, {}, is_bound=False).is_bound


def test_a_part_of_the_machine_is_left_to_the_scheduler_of_the_kernel(cores):
    """Launchers would bind to the first cores of the machine, whatever part of it this process has."""
    cores(2, 8)
    request = request_here(2, PROGRAM, {})
    assert (request.n_cores, request.is_bound) == (2, False)


def test_cores_of_an_allocation_or_of_hosts_are_not_those_of_this_machine(cores):
    cores(8, 8)
    allocation = request_here(2, PROGRAM, {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"})
    assert (allocation.n_cores, allocation.cpus_per_task, allocation.cores_per_rank) == (0, 3, 3)
    assert request_here(2, PROGRAM, {}, "a,b").n_cores == 0
