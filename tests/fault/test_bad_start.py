"""Jobs that cannot start: one line that says what was expected, what came and what to do, and exit code 78."""

import json
import os
from pathlib import Path

import pytest
from real_jobs import PYTHON

PROGRAM = "import hpcdist; print(f'{hpcdist.MultiWorkerMirroredStrategy().num_replicas_in_sync} replicas\\n', end='')"
SITE_MPIRUN = Path("/usr/bin/mpirun.openmpi")


def refused(outcome, *texts):
    """Check that a job was refused with one line of ours, and return it."""
    lines = [line for line in outcome.output.splitlines() if line.startswith("hpcdist:")]
    assert outcome.code == 78, outcome.output
    assert len(lines) == 1, outcome.output
    assert "Traceback" not in outcome.output
    assert "expected" in lines[0]
    for text in texts:
        assert text in lines[0]


def cluster(**jobs):
    addresses = {}
    for job_type, n_tasks in jobs.items():
        addresses[job_type] = [f"localhost:{job_type}{index}" for index in range(n_tasks)]
    return {"cluster": addresses}


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ("{not json", ["TF_CONFIG: expected a JSON object", "check quotes"]),
        ({"clusters": {}}, ["'clusters'", "write 'cluster'"]),
        (cluster(worker=2, boss=1), ["'boss'", "chief, worker, ps, evaluator"]),
        (cluster(worker=1, chief=2), ["at most one chief, got 2"]),
        (cluster(worker=1, evaluator=2), ["at most one evaluator, got 2"]),
        ({**cluster(worker=2), "task": {"type": "worker", "index": 2}}, ["from 0 to 1, got 2"]),
        ({**cluster(worker=2), "task": {"type": "worker", "index": 0}}, ['drop "task"']),
        ({"cluster": {"worker": ["a:1", ""]}}, ["addresses as text", "got ''"]),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, ["every address once", "'a:1' 2 times"]),
        (cluster(worker=3), ["expected 3 ranks", "got 2 ranks on 1 hosts"]),
    ],
)
def test_tf_config(start, config, texts):
    if isinstance(config, str):
        text = config
    else:
        text = json.dumps(config)
    refused(start(2, "-c", PROGRAM, environ={"TF_CONFIG": text}).wait(40), *texts)


def test_plain_processes_with_the_guides_tf_config_and_no_launcher(start):
    """As TensorFlow's guide starts them: each would be a world of its own."""
    for index in range(2):
        config = json.dumps({**cluster(worker=2), "task": {"type": "worker", "index": index}})
        outcome = start(1, command=[PYTHON, "-c", PROGRAM], environ={"TF_CONFIG": config}).wait(20)
        refused(outcome, f"got worker {index} alone in a world of 1", "by one launcher (mpirun -n 2, or srun)")


def test_tf_config_wins_over_roles(start):
    environ = {"TF_CONFIG": json.dumps(cluster(chief=1, worker=1)), "HPCDIST_ROLES": "worker:1,evaluator:1"}
    outcome = start(2, "-c", PROGRAM, environ=environ).wait(40)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("2 replicas") == 2


def test_roles_that_need_more_ranks(start):
    outcome = start(2, "-c", PROGRAM, environ={"HPCDIST_ROLES": "chief:1,ps:2,worker:*"}).wait(40)
    refused(outcome, "at least 4 ranks for chief:1,ps:2,worker:*, got 2", "mpirun -n")


def test_a_misspelt_variable(start):
    refused(start(2, "-c", PROGRAM, environ={"HPCDIST_ROLE": "worker:*"}).wait(40), "write HPCDIST_ROLES")


@pytest.mark.feature("launch.tf-config")
def test_tf_config_that_is_right(start):
    outcome = start(2, "-c", PROGRAM, environ={"TF_CONFIG": json.dumps(cluster(chief=1, worker=1))}).wait(40)
    assert outcome.code == 0
    assert outcome.output.count("2 replicas") == 2


@pytest.mark.feature("launch.launcher-mismatch", "complaints.jobs-of-one")
def test_a_launcher_of_another_mpi(start):
    """Debian's Open MPI starts processes whose MPI library is the MPICH wheel, which cannot be started so."""
    if not SITE_MPIRUN.exists() and not os.environ.get("CI"):
        pytest.skip(f"{SITE_MPIRUN} is not installed")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    outcome = start(2, command=[SITE_MPIRUN, *options, PYTHON, "-c", PROGRAM]).wait(40)
    refused(outcome, "expected a launcher that speaks PMI, got one that speaks PMIx only", "mpirun of the environment")


@pytest.mark.feature("launch.launcher-mismatch", "complaints.jobs-of-one")
def test_mpich_s_launcher_with_a_site_s_open_mpi(start):
    """The other way round: every process starts, and each is rank 0 of 1."""
    libraries = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
    if not libraries and not os.environ.get("CI"):
        pytest.skip("Debian's libopenmpi3 is not installed")
    outcome = start(2, "-c", PROGRAM, environ={"MPI4PY_LIBMPI": str(libraries[0])}).wait(40)
    lines = [line for line in outcome.output.splitlines() if line.startswith("hpcdist:")]
    assert outcome.code == 78, outcome.output
    assert "Traceback" not in outcome.output
    assert all("expected 2 ranks as started by an MPICH-like mpirun" in line for line in lines)
    assert sum("got a world of 1 with Open MPI" in line for line in lines) == 1, "the line of rank 0"
    assert sum("got a world of 1 for rank 1" in line for line in lines) == len(lines) - 1 <= 1


@pytest.mark.feature("launch.launcher-mismatch", "complaints.jobs-of-one")
def test_slurm_without_an_mpi_plugin(start):
    """`srun --mpi=none` starts processes that know only Slurm's variables."""
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    refused(start(1, command=[PYTHON, "-c", PROGRAM], environ=step).wait(40), "started by srun", "--mpi=pmi2 (MPICH)")


@pytest.mark.feature("launch.launcher-mismatch", "complaints.jobs-of-one")
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun(start, rank):
    """Each of its processes would train alone; the first one reports."""
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    outcome = start(1, command=[PYTHON, "-c", PROGRAM], environ=environ).wait(40)
    if rank == 0:
        refused(outcome, "expected 2 ranks as started by torchrun", "got a world of 1", "start with the mpirun")
    assert outcome.code == 78


@pytest.mark.feature("launch.launcher-mismatch")
def test_an_allocation_without_srun(start):
    job = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    outcome = start(1, command=[PYTHON, "-c", PROGRAM], environ=job).wait(40)
    refused(outcome, "expected 4 ranks, one for each task of this Slurm job", "srun -n 1")


@pytest.mark.feature("launch.tf-config")
def test_an_evaluator_that_the_cluster_does_not_list(start):
    """Started alone, or as one more rank of the job, it is a cluster of one."""
    alone = json.dumps({**cluster(worker=2), "task": {"type": "evaluator", "index": 0}})
    program = "import hpcdist; s = hpcdist.MultiWorkerMirroredStrategy(); print(s.num_replicas_in_sync, s.is_chief)"
    outcome = start(1, command=[PYTHON, "-c", program], environ={"TF_CONFIG": alone}).wait(40)
    assert outcome.code == 0, outcome.output
    assert "1 True" in outcome.output
    beside = f"""
import json, os
rank = int(os.environ["PMI_RANK"])
task = {{"type": "worker", "index": rank}} if rank < 2 else {{"type": "evaluator", "index": 0}}
os.environ["TF_CONFIG"] = json.dumps({{**{cluster(worker=2)!r}, "task": task}})
import hpcdist
s = hpcdist.MultiWorkerMirroredStrategy()
print(f"{{s.world.task}} of {{s.num_replicas_in_sync}}, {{s.is_chief}}\\n", end="")
"""
    outcome = start(3, "-c", beside).wait(40)
    assert outcome.code == 0, outcome.output
    for line in ("worker 0 of 2, True", "worker 1 of 2, False", "evaluator 0 of 1, True"):
        assert line in outcome.output


def test_a_model_built_differently_on_two_ranks(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch, hpcdist
strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(3, 2 + strategy.world.rank)
model(torch.ones(1, 3))
"""
    )
    outcome = start(2, program).wait(40)
    assert outcome.code == 76, outcome.output
    lines = [line for line in outcome.output.splitlines() if line.startswith("hpcdist:")]
    assert len(lines) == 1
    assert "build the same model on every rank" in lines[0]
    assert "[rank 1 (worker 1)]" in lines[0]


def test_no_mpi_library(start):
    outcome = start(1, command=[PYTHON, "-c", PROGRAM], environ={"MPI4PY_LIBMPI": "/nonexistent.so"}).wait(40)
    refused(outcome, "expected an MPI library, got none", "pip install mpich")
