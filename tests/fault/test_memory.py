"""What a restore takes of the memory: the state itself, and little more, on every rank; and a save in a cgroup."""

import contextlib
import json
import os
import shlex
import tempfile
import uuid
from pathlib import Path

import pytest
from real_jobs import MPIRUN, PYTHON
from requirements import skip_unless_ci

STATE_BYTES = 1 << 30
#: Above the state: two blocks, and what libraries take.
ALLOWED_BYTES = 64 << 20

PROGRAM = """
import pathlib, sys
import torch
import hpcdist

def resident(name):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10

path, n_bytes, does_save = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "save"
width = int((n_bytes / 12) ** 0.5)  # weights, and twice as much in the optimizer
strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
with strategy.scope():
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer)
manager = hpcdist.CheckpointManager(checkpoint, path)
if does_save:
    with torch.no_grad():
        model.weight.copy_(torch.arange(width * width).reshape(width, width) % 1000)
    optimizer.state[model.weight] = {
        "step": torch.tensor(3.0), "exp_avg": model.weight.detach() + 1, "exp_avg_sq": model.weight.detach() + 2
    }
    manager.save(3)
else:
    model.weight.detach().fill_(1)  # all of its memory is there
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    assert manager.restore_or_initialize()
    state = optimizer.state[model.weight]
    assert float(model.weight.detach()[1, 1]) == (width + 1) % 1000
    assert float(state["exp_avg_sq"][1, 1]) == (width + 1) % 1000 + 2
    new = 2 * 4 * width * width
    (pathlib.Path(path).parent / f"above-{strategy.world.rank}").write_text(str(resident("VmHWM") - before - new))
"""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restore_takes_little_more_than_the_state(start, tmp_path):
    path = tmp_path / "checkpoints"
    saved = start(1, "-c", PROGRAM, path, STATE_BYTES, "save").wait(120)
    assert saved.code == 0, saved.output[-3000:]
    assert (path / "latest.h5").stat().st_size > 0.99 * STATE_BYTES
    restored = start(4, "-c", PROGRAM, path, STATE_BYTES, "restore").wait(150)
    assert restored.code == 0, restored.output[-3000:]
    above = {file.name: int(file.read_text()) for file in tmp_path.glob("above-*")}
    print(f"1 GiB of state on 4 ranks, MiB above the state: {json.dumps({k: v >> 20 for k, v in above.items()})}")
    assert len(above) == 4
    assert max(above.values()) <= ALLOWED_BYTES, above


TRAINING = """
import sys
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
with strategy.scope():
    model = torch.nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
checkpoint, memory = hpcdist.Checkpoint(model=model, optimizer=optimizer), (sys.argv[2:] or [None])[0]
manager = hpcdist.CheckpointManager(checkpoint, sys.argv[1] + "/checkpoints", fast_directory=memory)
schedule = hpcdist.SaveSchedule(every_steps=25, in_memory_every_steps=memory and 10)
handler = hpcdist.PreemptionCheckpointHandler(None, manager, schedule=schedule)
with handler:
    while handler.step < 30:
        optimizer.zero_grad()
        model(torch.ones(1, 4096)).sum().backward()
        optimizer.step()
        print("step", handler.step, flush=True)
        handler.poll()
"""


@pytest.fixture
def memory_folder():
    """Return a folder in memory, which is removed."""
    with tempfile.TemporaryDirectory(prefix="hpcdist-test-", dir="/dev/shm") as name:
        yield name


@pytest.fixture
def limited(tmp_path):
    """Return limited(bytes): a command that runs another in a memory cgroup with that limit."""
    parent = Path("/sys/fs/cgroup/memory")
    if not os.access(parent / "cgroup.procs", os.W_OK):
        skip_unless_ci("no writable memory cgroup of version 1")
    group = parent / f"hpcdist-test-{uuid.uuid4().hex}"
    group.mkdir()

    def limited(limit):
        (group / "memory.limit_in_bytes").write_text(str(limit))
        return ["bash", "-c", f'echo $$ > {shlex.quote(str(group))}/cgroup.procs; exec "$@"', "bash"]

    yield limited
    with contextlib.suppress(OSError):  # busy for a moment after its last process
        group.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_state_without_room_for_its_copy_is_refused_after_the_first_step(start, limited, tmp_path):
    """And not killed at the first save, hours later. The state is 192 MiB; gradients are 64 more."""
    command = [MPIRUN, "-n", "1", PYTHON, "-c", TRAINING, tmp_path]
    outcome = start(1, command=[*limited(640 << 20), *command]).wait(60)
    assert "will be needed after the first step" in outcome.output.partition("step 1\n")[0]
    assert "expected 2013" in outcome.output, outcome.output[-3000:]
    assert " available; ask the batch system for more." in outcome.output
    assert outcome.output.count("step ") < 5, "at the first step"
    assert outcome.code == 74
    done = start(1, command=[*limited(2 << 30), *command]).wait(60)
    assert done.code == 0, done.output[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_copies_without_room_are_not_made_and_the_start_warns(start, limited, memory_folder, tmp_path):
    """The copy and the next one are 384 MiB in a file system in memory, which the cgroup counts."""
    command = [MPIRUN, "-n", "1", PYTHON, "-c", TRAINING, tmp_path, memory_folder]
    outcome = start(1, command=[*limited(1000 << 20), *command]).wait(60)
    assert outcome.code == 0, outcome.output[-3000:]
    assert "continues without copies in memory on this node: fast tier: expected 4026" in outcome.output
    before, is_there, _ = outcome.output.partition("step 1\n")
    assert is_there
    assert "will be needed after the first step" in before
