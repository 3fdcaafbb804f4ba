import os
import socket

import pytest

from hpcdist.cluster.environment import (
    Launcher,
    check_names,
    debug_names,
    is_child_of_rank,
    job_end,
    job_id,
    launcher_of,
    mark_rank,
    slurm_tasks,
    timeout_s,
    unused_tasks,
    visible_gpus,
    without_launch,
)
from hpcdist.errors import ConfigurationError


def test_launchers():
    assert launcher_of({}) is None
    assert launcher_of({"PMI_SIZE": "2", "PMI_RANK": "1"}) == Launcher(
        "an MPICH-like mpirun or srun --mpi=pmi2", 2, 1, "PMI_SIZE", "PMI_RANK"
    )
    two_launchers = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "4", "PMI_RANK": "3"}
    assert launcher_of(two_launchers).size == 4
    assert launcher_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # the shell of a batch script


def test_torchrun_is_known():
    launcher = launcher_of({"WORLD_SIZE": "2", "RANK": "1", "TORCHELASTIC_RUN_ID": "x"})
    assert (launcher.size, launcher.rank) == (2, 1)
    assert launcher_of({"WORLD_SIZE": "2"}) is None, "scripts set it for themselves"
    assert launcher_of({"WORLD_SIZE": "8", "RANK": "7", "PMI_SIZE": "4", "PMI_RANK": "3"}).size == 4


def test_tasks_of_an_allocation_that_nobody_started():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert unused_tasks(job) == 4
    assert unused_tasks({**job, "SLURM_STEP_NUM_TASKS": "1"}) == 0, "one process on purpose"
    assert unused_tasks({**job, "PMI_SIZE": "1", "PMI_RANK": "0"}) == 0
    assert unused_tasks({"SLURM_NTASKS": "4"}) == 0, "a variable that is left over"


@pytest.mark.parametrize(
    ("text", "n_tasks"),
    [("4", 4), ("0", 0), ("", 0), ("-1", 0), ("many", 0), ("1" * 5000, 0), ("99999", 99999)],
)
def test_tasks_of_slurm(text, n_tasks):
    assert slurm_tasks({"SLURM_NTASKS": text}) == n_tasks


def test_gpus_that_may_be_used():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert visible_gpus({}) >= 0


def test_unknown_names_are_refused_with_the_nearest():
    check_names({"HPCDIST_ROLES": "worker:*", "OTHER": "x"})
    check_names({f"HPCDIST_{name}": "/opt" for name in ("ROOT", "HOME", "DIR", "VERSION")})  # of environment modules
    with pytest.raises(ConfigurationError, match="write HPCDIST_ROLES"):
        check_names({"HPCDIST_ROLE": "worker:*"})


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_timeout_must_be_seconds(text):
    assert timeout_s({}) == 600
    assert timeout_s({"HPCDIST_TIMEOUT_S": "1.5"}) == 1.5
    with pytest.raises(ConfigurationError, match="HPCDIST_TIMEOUT_S"):
        timeout_s({"HPCDIST_TIMEOUT_S": text})


@pytest.mark.parametrize("text", ["", " ", ","])
def test_debug_names_nothing_by_default(text):
    assert debug_names({}) == debug_names({"HPCDIST_DEBUG": text}) == frozenset()


@pytest.mark.parametrize("text", ["collectives", " collectives ,", "collectives,collectives"])
def test_debug_names(text):
    check_names({"HPCDIST_DEBUG": text})
    assert debug_names({"HPCDIST_DEBUG": text}) == {"collectives"}


@pytest.mark.parametrize("text", ["1", "collective", "collectives,all", "Collectives"])
def test_unknown_debug_names_are_refused_with_the_valid_ones(text):
    with pytest.raises(ConfigurationError, match="collectives.*summary"):
        debug_names({"HPCDIST_DEBUG": text})


@pytest.mark.feature("complaints.time-limit-known")
def test_the_end_of_the_job():
    assert job_end({"SLURM_JOB_END_TIME": "1795000000"}) == 1795000000.0
    assert job_end({"SLURM_JOB_END_TIME": "Unknown"}) is None
    assert job_end({}) is None


def test_the_number_of_the_batch_job():
    assert job_id({"SLURM_JOB_ID": "1234"}) == "1234"
    assert job_id({}) is None


HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}
PMIX = {"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "0"}


@pytest.mark.parametrize("launch", [HYDRA, PMIX, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}, {}])
def test_a_child_has_the_launch_of_its_rank(monkeypatch, launch):
    mark = marked(monkeypatch, launch)
    assert not is_child_of_rank(launch), "a rank has no mark"
    assert not is_child_of_rank({**launch, "HPCDIST_RANK_PROCESS": mark}), "the rank itself, whose number is in it"
    assert is_child_of_rank({**launch, "HPCDIST_RANK_PROCESS": of_another_process(mark)})


@pytest.mark.parametrize(
    "other",
    [
        {"PMIX_NAMESPACE": "job@2", "PMIX_RANK": "0"},
        {**PMIX, "SLURM_JOB_ID": "8"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_a_rank_that_another_rank_has_launched_is_no_child(monkeypatch, other):
    mark = of_another_process(marked(monkeypatch, PMIX))
    assert not is_child_of_rank({**other, "HPCDIST_RANK_PROCESS": mark})


def test_a_connection_to_the_launcher_tells_ranks_from_children(monkeypatch):
    with socket.socket() as of_rank, socket.socket() as of_other:
        launch = {**HYDRA, "PMI_FD": str(of_rank.fileno())}
        mark = of_another_process(marked(monkeypatch, launch))
        assert is_child_of_rank({**launch, "HPCDIST_RANK_PROCESS": mark}), "as after os.fork or os.system"
        peer_launch = {**HYDRA, "PMI_FD": str(of_other.fileno())}
        assert not is_child_of_rank({**peer_launch, "HPCDIST_RANK_PROCESS": mark}), (
            "another mpirun's rank with this number"
        )
        closed = {**HYDRA, "PMI_FD": "987654"}
        assert is_child_of_rank({**closed, "HPCDIST_RANK_PROCESS": mark}), "as after subprocess.run"


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"PBS_JOBID": "7"}])
def test_a_child_without_the_launcher_s_variables_is_a_child_in_a_batch_job_too(monkeypatch, job):
    """As the workers of a fork server, which is started without them."""
    mark = of_another_process(marked(monkeypatch, {**HYDRA, **job}))
    assert is_child_of_rank({**job, "HPCDIST_RANK_PROCESS": mark})
    peer = {"PMI_RANK": "1", "PMI_SIZE": "2", **job}
    assert not is_child_of_rank({**peer, "HPCDIST_RANK_PROCESS": mark}), "another launch in the job"


def test_a_mark_that_nobody_can_read_is_none():
    assert not is_child_of_rank({**PMIX, "HPCDIST_RANK_PROCESS": "no number"})


def test_what_a_rank_starts_does_not_see_its_launcher(monkeypatch):
    for name, value in {**HYDRA, **PMIX, "PMIX_PREFIX": "/opt/mpi", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    with without_launch():
        assert not {*HYDRA, *PMIX} & set(os.environ)
        assert os.environ["PMIX_PREFIX"] == "/opt/mpi", "where the library is"
        assert os.environ["SLURM_JOB_ID"] == "7"
    assert {*HYDRA, *PMIX} <= set(os.environ)


def marked(monkeypatch, launch):
    """Return the mark that a rank with these variables gives to what it starts."""
    with monkeypatch.context() as environment:
        for name in list(os.environ):
            if name.startswith(("PMI", "SLURM", "HPCDIST_RANK", "PBS", "LSB", "FLUX")):
                environment.delenv(name)
        for name, value in launch.items():
            environment.setenv(name, value)
        environment.setenv("HPCDIST_RANK_PROCESS", "")
        mark_rank()
        return os.environ["HPCDIST_RANK_PROCESS"]


def of_another_process(mark):
    return " ".join([str(os.getpid() + 1), mark.partition(" ")[2]])
