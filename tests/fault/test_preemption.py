"""The main job is asked to stop in every way there is: all ranks leave with 75, and the same command ends with the same
bits as a run that was never stopped."""

import json
import os
import signal
import time

import pytest
from real_jobs import MPIRUN, PYTHON
from test_restart import final_state

pytestmark = pytest.mark.timeout(200)
EPOCHS = 12


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return tmp_path_factory.mktemp("unbroken") / "run"


@pytest.fixture
def launch(start, root, tmp_path):
    """Return launch(): the job on two ranks, which print the codes that they leave with."""

    def launch(run_dir=tmp_path / "run", environ=None, epochs=EPOCHS):
        job = f"{PYTHON} {root / 'jobs' / 'train.py'} --epochs {epochs} --save-every 40 --run-dir {run_dir}"
        command = [MPIRUN, "-n", "2", "sh", "-c", f"{job}; code=$?; echo left with $code; exit $code"]
        return start(2, environ=environ, command=command)

    return launch


def in_training(job):
    job.wait_for_line("epoch 2/")


def stopped_well(job, run_dir, reason):
    outcome = job.wait(60)
    assert outcome.code == 75, outcome.output[-3000:]
    assert outcome.output.count("left with 75") == 2, outcome.output[-3000:]
    assert "Traceback" not in outcome.output
    told = json.loads((run_dir / "decision.json").read_text())
    assert told["decision"] == "requeue"
    assert told["reason"] == reason
    newest = max(run_dir.rglob("step-*.h5"), key=lambda path: path.name)
    assert newest.name == f"step-{told['step']:08d}-{told['attempt']:04d}.h5"
    assert f"stopped after step {told['step']}" in outcome.output
    return told


def ends_with_the_same_bits(launch, run_dir, unbroken):
    outcome = launch(run_dir).wait(100)
    assert outcome.code == 0, outcome.output[-3000:]
    assert "resuming from" in outcome.output
    if not unbroken.exists():
        assert launch(unbroken).wait(100).code == 0
    assert final_state(run_dir) == final_state(unbroken)
    told = json.loads((run_dir / "decision.json").read_text())
    assert (told["decision"], told["attempt"]) == ("finished", 2)


@pytest.mark.feature("checkpoints.preemption-handler", "slurm.signal-before-the-limit")
@pytest.mark.parametrize(
    ("number", "rank"),
    [
        pytest.param(signal.SIGTERM, 1, id="term", marks=pytest.mark.quick),
        pytest.param(signal.SIGUSR2, 0, id="usr2", marks=pytest.mark.sweep),
    ],
)
def test_a_signal_to_one_rank(launch, tmp_path, unbroken, number, rank):
    job = launch()
    in_training(job)
    assert job.log.read_text().count("sh started this program, and may keep signals from it") == 1
    os.kill(job.pid_of(rank), number)
    stopped_well(job, tmp_path / "run", f"{number.name} on rank {rank}")
    ends_with_the_same_bits(launch, tmp_path / "run", unbroken)


@pytest.mark.sweep
def test_signals_to_all_ranks_again_and_again(launch, tmp_path, unbroken):
    """As batch systems send them: to all at once, and more while the job saves and leaves."""
    job = launch()
    in_training(job)
    pids = list(map(job.pid_of, (0, 1)))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        for pid in pids:
            if f"{pid}" in os.listdir("/proc"):
                os.kill(pid, number)
        time.sleep(0.02)
    stopped_well(job, tmp_path / "run", "SIGUSR1 on rank 0")
    ends_with_the_same_bits(launch, tmp_path / "run", unbroken)


@pytest.mark.sweep
def test_the_stop_file(launch, tmp_path, unbroken):
    job = launch(epochs=10**6)
    in_training(job)
    (tmp_path / "run" / "stop").touch()
    stopped_well(job, tmp_path / "run", f"stop file {tmp_path / 'run' / 'stop'}")
    assert not (tmp_path / "run" / "stop").exists()


UNSAFE_LOOP = """
import os, signal, sys, time
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(model=model, optimizer=optimizer), sys.argv[1])
ending = hpcdist.TerminationConfig(grace_period=0.5)
handler = hpcdist.PreemptionCheckpointHandler(None, manager, termination_config=ending)
for step in range(1, 20):
    time.sleep(0.1)
    optimizer.zero_grad()
    loss = model(torch.rand(3, 2)).mean()
    loss.backward()
    optimizer.step()
    if step == 3 and strategy.rank == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGTERM)
print("came to the end")
"""


@pytest.mark.parametrize(("rank", "reason"), [(0, "SIGTERM on rank 0"), (1, "a stop request on another rank")])
def test_a_stop_that_finds_no_place_to_save_is_recorded_whichever_rank_is_asked(start, tmp_path, rank, reason):
    """The chief alone can record it."""
    outcome = start(2, "-c", UNSAFE_LOOP, tmp_path / "run" / "checkpoints", rank).wait(60)
    assert outcome.code == 75, outcome.output
    assert "came to the end" not in outcome.output
    assert f"{reason}: stopped without a save" in outcome.output
    told = json.loads((tmp_path / "run" / "decision.json").read_text())
    assert (told["decision"], told["reason"]) == ("requeue", reason)


@pytest.mark.feature("checkpoints.stop-before-the-time-limit", "complaints.time-limit-known")
def test_the_end_of_the_batch_job(launch, tmp_path):
    end = int(time.time()) + 30
    job = launch(environ={"SLURM_JOB_END_TIME": str(end)}, epochs=10**6)
    told = stopped_well(job, tmp_path / "run", "deadline")
    assert time.time() < end
    assert told["step"] > 50
    assert job.log.read_text().count("hpcdist: job ends at ") == 1


@pytest.mark.slow
@pytest.mark.feature("checkpoints.stop-before-the-time-limit")
def test_a_job_that_was_suspended_beyond_its_end_trains_on(launch, tmp_path):
    """Its time of day is over when it wakes up, and its time to run is not: it saves when that is over."""
    job = launch(environ={"SLURM_JOB_END_TIME": str(int(time.time()) + 40)}, epochs=10**6)
    in_training(job)
    pids = job.ranks()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(45)
    n_before = job.log.read_text().count("epoch ")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    job.wait_until(lambda: job.log.read_text().count("epoch ") > n_before + 20)
    stopped_well(job, tmp_path / "run", "deadline")
    assert "too late for a save" not in job.log.read_text()


HANDLERS = """
import signal, sys, time
import torch
signal.signal(signal.SIGTERM, lambda number, frame: print("the handler of the user", flush=True))
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = hpcdist.Dataset.from_tensor_slices(torch.ones(64, 4)).repeat().batch(4)
batches = strategy.experimental_distribute_dataset(rows)
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, strategy=strategy)
handler = hpcdist.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, sys.argv[1])
for x in batches:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    if strategy.world.step == 5 and strategy.world.rank == 1:
        if sys.argv[2] == "api":
            handler.stop("loss is flat")
        else:
            signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("way", "reason"), [("api", "loss is flat on rank 1"), ("signal", "SIGTERM on rank 1")])
def test_a_call_and_a_handler_of_the_users(start, tmp_path, way, reason):
    """In a loop of the user's own: nothing but its dataset polls."""
    (tmp_path / "job.py").write_text(HANDLERS)
    outcome = start(2, tmp_path / "job.py", tmp_path / "run" / "checkpoints", way).wait(60)
    assert outcome.code == 75, outcome.output
    told = json.loads((tmp_path / "run" / "decision.json").read_text())
    assert (told["reason"], told["step"]) == (reason, 6)
    assert outcome.output.count("the handler of the user") == (way == "signal")


WITHOUT_WITH = """
import os, signal, sys, time
import torch, hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
checkpoint = hpcdist.Checkpoint(model=model, strategy=strategy)
def train(handler):
    for _ in range({n_steps}):
        handler.run(hpcdist.all_reduce, torch.ones(1))
manager = hpcdist.CheckpointManager(checkpoint, sys.argv[1] + "/checkpoints", fast_directory=sys.argv[1] + "/memory")
schedule = hpcdist.SaveSchedule(every_steps=2, in_memory_every_steps=1)
train(hpcdist.PreemptionCheckpointHandler(None, manager, schedule=schedule))
rank = strategy.world.rank
{end}
"""


@pytest.mark.parametrize(
    ("n_ranks", "n_steps", "end", "code", "verdict"),
    [
        (1, 5, "", 0, "finished"),
        (1, 5, "1 / 0", 1, "requeue"),
        (2, 0, "sys.exit()", 0, "finished"),
        (2, 5, "", 0, "finished"),
        (2, 5, "sys.exit(3 * (rank == 0))", 3, "requeue"),
        (2, 5, "os.kill(os.getpid(), signal.SIGKILL)", None, "requeue"),
    ],
)
def test_a_program_without_with_is_finished_when_all_ranks_leave_it_well(
    start, tmp_path, n_ranks, n_steps, end, code, verdict
):
    outcome = start(n_ranks, "-c", WITHOUT_WITH.format(n_steps=n_steps, end=end), tmp_path / "run").wait(60)
    if code is not None:
        assert outcome.code == code, outcome.output[-3000:]
    told = json.loads((tmp_path / "run" / "decision.json").read_text())
    steps = {4} if code is not None else {2, 4}  # a kill may cut the save of step 4
    if verdict == "finished":
        steps = {n_steps}  # the last steps are saved when all ranks have left well
    assert told["decision"] == verdict
    assert told["step"] in steps
    ledger = (tmp_path / "run" / "checkpoints" / "attempts" / "0001.jsonl").read_text()
    assert ('"how": "finished"' in ledger) == (verdict == "finished")
    assert os.listdir(tmp_path / "run" / "memory") == [] or verdict == "requeue"
