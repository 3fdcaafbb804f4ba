"""Jobs with parameter servers that are stopped, killed and started again, also with another number of servers."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from real_jobs import MPIRUN, PYTHON, final_state

from hpcdist.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "jobs" / "train.py"

pytestmark = pytest.mark.timeout(150)


def command(run, roles, epochs=3, strategy="ps-synchronous"):
    options = ["--strategy", strategy, "--roles", roles, "--run-dir", run, "--epochs", epochs, "--save-every", 10]
    return [TRAIN, *options]


def wait_for_a_checkpoint(job, run):
    job.wait_until(Store(run / "checkpoints").saved)


def same(first_state, second_state):
    """Return whether two runs ended with the same arrays and metrics; their servers may have been others."""
    return first_state[:2] == second_state[:2] and first_state[3] == second_state[3]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the end of a run that nothing happened to, by the all-reduce: synchronous servers have its bits."""
    run = tmp_path_factory.mktemp("unbroken")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [MPIRUN, "-n", "2", PYTHON, TRAIN, "--run-dir", run, "--epochs", "3", "--save-every", "10"]
    subprocess.run(arguments, env=environ, timeout=60, check=True, capture_output=True)
    return final_state(run)


SWEEP = pytest.mark.sweep


@pytest.mark.feature("parameter-servers.servers-on-spare-cpus")
@pytest.mark.parametrize("victims", ["server", pytest.param("all", marks=SWEEP), pytest.param("worker", marks=SWEEP)])
def test_a_stop_request_to_any_rank_saves_and_another_job_with_more_servers_resumes(start, tmp_path, victims, unbroken):
    run = tmp_path / "run"
    job = start(3, *command(run, "ps:1,worker:*"))
    wait_for_a_checkpoint(job, run)
    for rank in {"server": [0], "worker": [1, 2], "all": [0, 1, 2]}[victims]:
        os.kill(job.pid_of(rank), signal.SIGTERM)
    outcome = job.wait(60)
    decision = json.loads((run / "decision.json").read_text())
    if decision["decision"] != "finished":  # else it came after the last step
        assert (decision["decision"], decision["reason"][:7]) == ("requeue", "SIGTERM"), outcome.output
        assert "to a parameter server" in decision["reason"] or victims != "server"
        assert outcome.code == 75
    outcome = start(4, *command(run, "ps:2,worker:*")).wait(90)
    assert outcome.code == 0, outcome.output
    assert same(final_state(run), unbroken)


@pytest.mark.feature("parameter-servers.worker-and-server-failures", "complaints.servers-and-evaluators-end")
@pytest.mark.parametrize("victim", [pytest.param(0, id="a server"), pytest.param(2, id="a worker", marks=SWEEP)])
def test_a_killed_rank_ends_the_job_and_the_next_one_has_the_bits_of_an_unbroken_run(
    start, nothing_left, tmp_path, victim, unbroken
):
    run = tmp_path / "run"
    job = start(3, *command(run, "ps:1,worker:*"))
    wait_for_a_checkpoint(job, run)
    os.kill(job.pid_of(victim), signal.SIGKILL)
    assert job.wait(30).code != 0
    nothing_left(job)
    outcome = start(3, *command(run, "ps:1,worker:*")).wait(60)
    assert outcome.code == 0, outcome.output
    assert same(final_state(run), unbroken)


@pytest.mark.feature("strategies.parameter-server-each-worker-loops")
@pytest.mark.sweep
def test_asynchronous_workers_stop_after_the_same_step(start, tmp_path):
    run = tmp_path / "run"
    job = start(4, *command(run, "ps:1,worker:*", epochs=100, strategy="ps"))
    wait_for_a_checkpoint(job, run)
    os.kill(job.pid_of(3), signal.SIGUSR1)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    decision = json.loads((run / "decision.json").read_text())
    assert decision["step"] == Store(run / "checkpoints").read_latest().index.step


def test_a_server_that_stops_answering_is_named(start, tmp_path):
    """Bounded waits: nobody waits longer than the limit and what servers take to say whom they wait for."""
    run = tmp_path / "run"
    job = start(3, *command(run, "ps:1,worker:*", epochs=1000), environ={"HPCDIST_TIMEOUT_S": "4"})
    wait_for_a_checkpoint(job, run)
    os.kill(job.pid_of(2), signal.SIGSTOP)
    outcome = job.wait(60)
    assert outcome.code != 0
    assert "expected worker 1 to push step" in outcome.output or "got no answer" in outcome.output, outcome.output
