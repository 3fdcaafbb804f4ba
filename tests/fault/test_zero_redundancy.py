"""Jobs with a ZeroRedundancyOptimizer whose ranks are killed or stopped in the middle of sums and updates."""

import contextlib
import os
import random
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(200)
N_STEPS = 300

PROGRAM = """
import hashlib, pathlib, sys
import torch
import hpcdist
from hpcdist.optim import ZeroRedundancyOptimizer

run = pathlib.Path(sys.argv[1])
strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    torch.manual_seed(3)
    layers = torch.nn.Linear(20, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
x = torch.randn(640, 20, generator=torch.Generator().manual_seed(1))
dataset = hpcdist.Dataset.from_tensor_slices((x, x.sum(1, keepdim=True))).shuffle(640, seed=2).batch(32).repeat()
batches = strategy.experimental_distribute_dataset(dataset)

def step(rows, labels):
    optimizer.zero_grad()
    losses = (model(rows) - labels).square()[:, 0]
    hpcdist.compute_average_loss(losses, global_batch_size=32).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()

checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, strategy=strategy)
manager = hpcdist.CheckpointManager(checkpoint, run / "checkpoints", max_to_keep=3)
with hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=25) as handler:
    for batch in batches:
        handler.run(strategy.run, step, args=batch)
        if handler.step >= %d:
            break
if strategy.is_chief:
    state = optimizer.state_dict()["state"]
    parts = [*model.state_dict().values(), *(value for own in state.values() for value in own.values())]
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    (run / "digest").write_text(digest)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM % N_STEPS)
    return path


def harmed(start, program, run, draws):
    """Train, harmed at up to three random moments; return the digest of the end and how often it was harmed."""
    n_harms = 0
    for number in range(1, 6):
        job = start(2, program, run, environ={"HPCDIST_TIMEOUT_S": "4"})
        if number <= 3:
            job.wait_until(lambda number=number: (run / "checkpoints" / "attempts" / f"{number:04d}.jsonl").exists())
            time.sleep(draws.uniform(0, 1.2))
            ranks = sorted(job.ranks())
            if len(ranks) == 2:  # else the program is at its end, or has ended
                victim = draws.choice(ranks)
                os.kill(victim, draws.choice([signal.SIGKILL, signal.SIGSTOP]))
                n_harms += 1
                wake_at_the_end(job, victim, run)
        outcome = job.wait(60)
        if (run / "digest").exists():
            return (run / "digest").read_text(), n_harms
        assert outcome.code != 0
    raise AssertionError(f"the run did not end: {outcome.output}")


def wake_at_the_end(job, pid, run):
    """Let a stopped rank go on if the program had ended: the others wait for it at their exits, however long."""
    while job.process.poll() is None:
        if (run / "digest").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            return
        time.sleep(0.1)


@pytest.fixture
def unbroken(start, program, tmp_path):
    outcome = start(2, program, tmp_path / "unbroken").wait(60)
    assert outcome.code == 0, outcome.output
    return (tmp_path / "unbroken" / "digest").read_text()


@pytest.mark.feature("strategies.sharded-optimizer-state")
def test_a_run_that_is_killed_or_stopped_ends_with_the_bits_of_an_unbroken_one(start, program, tmp_path, unbroken):
    digest, n_harms = harmed(start, program, tmp_path / "run", random.Random(1))
    assert digest == unbroken
    assert n_harms > 0


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_many_moments(start, program, tmp_path, unbroken):
    total = 0
    for seed in range(20):
        digest, n_harms = harmed(start, program, tmp_path / f"run{seed}", random.Random(100 + seed))
        assert digest == unbroken, seed
        total += n_harms
    assert total > 20


def test_nothing_is_left_of_it(start, program, tmp_path, nothing_left):
    job = start(2, program, tmp_path / "run")
    job.wait_until((tmp_path / "run" / "checkpoints" / "attempts" / "0001.jsonl").exists)
    time.sleep(0.3)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.wait(30).code != 0
    nothing_left(job)
