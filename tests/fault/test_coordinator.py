"""Jobs with a coordinator whose ranks are stopped, killed and suspended."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from real_jobs import final_state

from hpcdist.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "coordinated.py"
ROLES = "ps:1,chief:1,worker:*"  # ranks 0, 1, and the others
SWEEP = pytest.mark.sweep

pytestmark = pytest.mark.timeout(170)


def command(run, epochs=6):
    return [JOB, "--roles", ROLES, "--run-dir", run, "--epochs", epochs, "--save-every", 10, "--batch", 32]


def last_accuracy(outcome):
    return float(outcome.output.rpartition("accuracy ")[2].split()[0])


@pytest.mark.feature("parameter-servers.evaluation-by-the-coordinator")
@SWEEP
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stop_request_to_any_rank_saves_in_join_and_the_next_job_resumes(start, tmp_path, victim):
    run = tmp_path / "run"
    job = start(4, *command(run, epochs=40))
    job.wait_for_line("epoch 2/")
    os.kill(job.pid_of(victim), signal.SIGTERM)
    outcome = job.wait(60)
    decision = json.loads((run / "decision.json").read_text())
    assert outcome.code == 75, outcome.output
    assert (decision["decision"], decision["reason"][:7]) == ("requeue", "SIGTERM")
    step = decision["step"]
    assert Store(run / "checkpoints").saved()
    outcome = start(3, *command(run, epochs=8)).wait(90)
    assert outcome.code == 0, outcome.output
    assert f"resuming from {run}/checkpoints/step-{step:08d}" in outcome.output
    assert final_state(run)
    assert last_accuracy(outcome) > 0.9


@pytest.mark.feature("semantics.lost-worker")
@pytest.mark.parametrize(
    "victim", [pytest.param(2, id="a worker", marks=SWEEP), pytest.param(0, id="the server", marks=SWEEP)]
)
def test_a_killed_rank_ends_the_job_and_the_next_one_resumes(start, nothing_left, tmp_path, victim):
    run = tmp_path / "run"
    job = start(4, *command(run, epochs=40))
    job.wait_for_line("epoch 2/")
    os.kill(job.pid_of(victim), signal.SIGKILL)
    assert job.wait(30).code not in (0, 75)
    nothing_left(job)
    outcome = start(4, *command(run)).wait(90)
    assert outcome.code == 0, outcome.output
    assert "resuming from" in outcome.output
    assert last_accuracy(outcome) > 0.85


@pytest.mark.feature("semantics.lost-worker")
@pytest.mark.sweep
def test_what_a_suspended_worker_ran_goes_to_another_one_until_it_is_back(start, tmp_path):
    job = start(4, *command(tmp_path / "run", epochs=150), environ={"HPCDIST_TIMEOUT_S": "60"})
    job.wait_for_line("epoch 2/")
    victim = job.pid_of(3)
    os.kill(victim, signal.SIGSTOP)
    try:
        job.wait_for_line("worker 1 (rank 3) has been silent for 5 s")
        n_lines = job.log.read_text().count("epoch ")
        deadline = time.monotonic() + 30
        while job.log.read_text().count("epoch ") < n_lines + 3:  # the others go on
            assert time.monotonic() < deadline, job.log.read_text()
            time.sleep(0.05)
    finally:
        os.kill(victim, signal.SIGCONT)
    job.wait_for_line("worker 1 (rank 3) is back")
    outcome = job.wait(120)
    assert outcome.code == 0, outcome.output
    assert last_accuracy(outcome) > 0.95


LATE = """
import time
import hpcdist
resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
if resolver.task_type != "chief":
    hpcdist.Server(resolver).join()
coordinator = hpcdist.ClusterCoordinator(hpcdist.ParameterServerStrategy(resolver))
def sleeps_long():
    time.sleep(8)
    return 5
result = coordinator.schedule(sleeps_long)
coordinator.join()
print("it returned", result.fetch(), flush=True)
"""


@pytest.mark.feature("semantics.closure-watchdog")
def test_a_function_that_takes_long_is_reported_with_its_stack_and_waited_for(start, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(LATE)
    outcome = start(3, program, environ={"HPCDIST_TIMEOUT_S": "3"}).wait(60)
    assert outcome.code == 0, outcome.output
    assert "'sleeps_long' has run for 3 s, and is still running; stack" in outcome.output
    assert "in sleeps_long" in outcome.output
    assert "no function has ended for 3 s; still running: 'sleeps_long' on worker 0" in outcome.output
    assert "it returned 5" in outcome.output


SILENT_SERVER = """
import os, signal, sys
import hpcdist, torch
from hpcdist.errors import PSUnavailable
resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
if resolver.task_type == "ps":
    open(sys.argv[1], "w").write(str(os.getpid()))
if resolver.task_type != "chief":
    hpcdist.Server(resolver).join()
strategy = hpcdist.ParameterServerStrategy(resolver)
coordinator = hpcdist.ClusterCoordinator(strategy)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
coordinator.schedule(step)
coordinator.join()
os.kill(int(open(sys.argv[1]).read()), signal.SIGSTOP)
coordinator.schedule(step)
try:
    coordinator.join()
except PSUnavailable as error:
    print("first", error, flush=True)
try:
    coordinator.schedule(step)
except PSUnavailable as error:
    print("again", error, flush=True)
    os.kill(int(open(sys.argv[1]).read()), signal.SIGCONT)
"""


@pytest.mark.feature("semantics.lost-server", "semantics.transient-server-errors")
@pytest.mark.sweep
def test_a_server_that_does_not_answer_is_psunavailable_and_stays_so(start, tmp_path):
    program = tmp_path / "silent.py"
    pid_file = tmp_path / "pid"
    program.write_text(SILENT_SERVER)
    outcome = start(3, program, pid_file, environ={"HPCDIST_TIMEOUT_S": "2"}).wait(120)
    assert "first pull: expected answers of 1 parameter servers" in outcome.output, outcome.output
    assert "again pull: expected answers" in outcome.output


NO_COORDINATOR = """
import hpcdist
resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
if resolver.task_type != "chief":
    hpcdist.Server(resolver).join()
strategy = hpcdist.ParameterServerStrategy(resolver)
print("the chief's program ends here", flush=True)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"], ids=["0", "3"])
def test_ranks_that_serve_end_with_a_chief_that_makes_no_coordinator(start, nothing_left, end):
    job = start(3, "-c", NO_COORDINATOR + end, environ={"HPCDIST_TIMEOUT_S": "20"})
    outcome = job.wait(30)
    assert (outcome.code == 0) == (end == ""), outcome.output
    if end == "":
        assert "the chief's program has ended without a ClusterCoordinator" in outcome.output
    nothing_left(job)


#: A worker's first step imports torch's compiler, which takes 2 s on a slow machine: limits are above that.
HUNG = """
import os, signal, sys, threading, time
import hpcdist, torch
resolver = hpcdist.MPIClusterResolver(roles="ps:1,chief:1,worker:*")
if resolver.task_type != "chief":
    hpcdist.Server(resolver).join()
strategy = hpcdist.ParameterServerStrategy(resolver)
limit_s = float(sys.argv[3]) or None
coordinator = hpcdist.ClusterCoordinator(strategy, closure_timeout_s=limit_s)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
config = hpcdist.TerminationConfig(grace_period=3)
folder = sys.argv[1] + "/checkpoints"
handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder, config, save_every_steps=1)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

def hangs():
    time.sleep(10_000)

def is_slow():
    time.sleep(0.5)

for _ in range(3):
    coordinator.schedule(step)
    coordinator.join()
for _ in range(24 if sys.argv[2] == "slow join" else 0):
    coordinator.schedule(is_slow)
if sys.argv[2] == "slow join":
    print("scheduled", flush=True)
    coordinator.join()
while sys.argv[2] == "slow join":
    coordinator.schedule(step)
    coordinator.join()
result = coordinator.schedule(hangs)
print("scheduled", flush=True)
try:
    getattr(coordinator if sys.argv[2] == "join" else result, sys.argv[2])()
except hpcdist.errors.ClosureTimeoutError as error:
    print("raised", error, flush=True)
    coordinator.schedule(step)
    coordinator.join()
    print("the other worker has made a step", handler.step, flush=True)
"""


@pytest.mark.feature("semantics.closure-watchdog")
@pytest.mark.parametrize(
    "waits_in", [pytest.param("join", marks=pytest.mark.quick), pytest.param("fetch", marks=pytest.mark.slow)]
)
def test_a_stop_request_is_obeyed_although_a_function_hangs(start, tmp_path, nothing_left, waits_in):
    run = tmp_path / "run"
    job = start(3, "-c", HUNG, run, waits_in, 0)
    job.wait_for_line("scheduled")
    asked_s = time.monotonic()
    os.kill(job.pid_of(1), signal.SIGTERM)
    outcome = job.wait(30)
    assert outcome.code == 75, outcome.output
    assert "stopped without a save, as the work in progress does not end" in outcome.output
    assert time.monotonic() - asked_s < 28
    decision = json.loads((run / "decision.json").read_text())
    assert (decision["decision"], decision["step"]) == ("requeue", 3)
    assert decision["reason"].startswith("SIGTERM on rank ")
    nothing_left(job)


@pytest.mark.feature("semantics.closure-watchdog")
def test_functions_that_end_are_waited_for_beyond_the_grace_period(start, tmp_path, nothing_left):
    """They take 12 s, and the grace period is 3 s: as long as some end, a save is worth the wait."""
    run = tmp_path / "run"
    job = start(3, "-c", HUNG, run, "slow join", 0)
    job.wait_for_line("scheduled")
    os.kill(job.pid_of(1), signal.SIGTERM)
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    assert "stopped without a save" not in outcome.output
    assert "continues from step 3 within the grace period" in outcome.output, outcome.output
    nothing_left(job)


def test_a_stop_file_is_removed_although_a_function_hangs(start, tmp_path):
    run = tmp_path / "run"
    job = start(3, "-c", HUNG, run, "join", 0)
    job.wait_for_line("scheduled")
    (run / "stop").touch()
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output
    assert not (run / "stop").exists()
    assert json.loads((run / "decision.json").read_text())["decision"] == "requeue"


@pytest.mark.feature("semantics.closure-watchdog")
def test_without_a_worker_that_is_free_the_next_function_fails_too(start, tmp_path):
    job = start(3, "-c", HUNG, tmp_path / "run", "join", 5, environ={"HPCDIST_TIMEOUT_S": "6"})
    outcome = job.wait(60)
    assert "raised schedule: expected 'hangs' to end within closure_timeout_s=5 s" in outcome.output, outcome.output
    assert "expected a worker that is free within closure_timeout_s=5 s, got 1 that run functions" in outcome.output


@pytest.mark.feature("semantics.closure-watchdog")
def test_a_function_that_runs_too_long_fails_and_others_go_on(start, tmp_path, nothing_left):
    job = start(4, "-c", HUNG, tmp_path / "run", "join", 5, environ={"HPCDIST_TIMEOUT_S": "6"})
    outcome = job.wait(60)
    assert "raised schedule: expected 'hangs' to end within closure_timeout_s=5 s" in outcome.output, outcome.output
    assert "the other worker has made a step 4" in outcome.output
    assert outcome.code == 70, "the worker that hangs cannot leave"
    assert "have not ended within 6 s: ending the job" in outcome.output
    nothing_left(job)
