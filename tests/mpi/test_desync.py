import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import CheckpointError, DesyncError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import call_when_done, make_world
from hpcdist.saving import saver
from hpcdist.saving.desync import Comparison, odd_ranks
from hpcdist.stopping import preemption

pytestmark = pytest.mark.mpi


@pytest.fixture
def job(comm, shared_path):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(6, 3)).square().sum().backward()
        optimizer.step()
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, mine=torch.zeros(comm.rank + 1).numpy())
    return model, optimizer, hpcdist.CheckpointManager(checkpoint, shared_path)


def test_equal_states_pass_and_a_ranks_own_arrays_do_not_count(job):
    _, _, manager = job
    manager.check_equal()


@pytest.mark.feature("debugging.replica-divergence")
@pytest.mark.parametrize("part", ["parameter", "buffer", "optimizer", "sign of zero"])
def test_one_bit_on_one_rank_is_named(comm, job, part):
    model, optimizer, manager = job
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    odd = comm.size - 1
    tensors = {
        "parameter": model[0].weight,
        "buffer": model[1].running_mean,
        "optimizer": optimizer.state[model[0].bias]["exp_avg"],
        "sign of zero": model[0].bias,
    }
    with torch.no_grad():
        if part == "sign of zero":
            tensors[part][0] = 0.0 if comm.rank != odd else -0.0
        elif comm.rank == odd:
            tensors[part].view(-1)[0].view(torch.int32).add_(1)
    with pytest.raises(DesyncError) as caught:
        manager.check_equal()
    named = odd if comm.size > 2 else 1
    assert f"equal models and optimizers on all {comm.size} ranks, got different ones on rank {named};" in str(
        caught.value
    )
    assert caught.value.is_agreed
    assert caught.value.exit_code == 76


def change(model, optimizer, part, value=1):
    """Change one bit of a part by `value`."""
    tensors = {"parameter": model[0].weight, "optimizer": optimizer.state[model[0].bias]["exp_avg"]}
    with torch.no_grad():
        tensors[part].view(-1)[0].view(torch.int32).add_(value)


@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize("part", ["parameter", "optimizer", "learning rate"])
@pytest.mark.parametrize("odd", ["the chief", "another", "all"])
def test_a_save_of_ranks_that_differ_is_refused(comm, job, part, odd, is_blocking):
    """By default, without any schedule: the chief compares what it has copied, in the background."""
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, manager = job
    first = manager.save(1)
    is_odd = {"the chief": comm.rank == 0, "another": comm.rank == comm.size - 1, "all": True}[odd]
    if part == "learning rate":
        if odd == "all":
            optimizer.param_groups[0]["lr"] += 0.1 * comm.rank
        else:
            optimizer.param_groups[0]["lr"] += 0.1 * is_odd
    else:
        if odd == "all":
            number = comm.rank
        else:
            number = int(is_odd)
        change(model, optimizer, part, number)
    named = {"the chief": 0, "another": comm.size - 1, "all": ", ".join(map(str, range(1, comm.size)))}[odd]
    named = 1 if comm.size == 2 else named  # of two the second one is named

    def save():
        manager.save(2, blocking=is_blocking)
        manager.wait()

    with pytest.raises(DesyncError, match=f"got different ones on rank {named};"):
        save()
    manager.wait()  # the error is raised once
    folder = manager.directory
    assert [path.name for path in Path(folder).glob("step-*.h5")] == [Path(first).name]


def test_what_was_restored_is_compared_at_the_end_though_nothing_is_written(comm, job):
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, manager = job
    path = manager.save(1)
    assert manager.save(1, if_changed=True) == path
    if comm.rank == 1:
        change(model, optimizer, "parameter")
    with pytest.raises(DesyncError):
        manager.save(1, if_changed=True)


def test_a_copy_that_is_compared_is_that_of_the_save(comm, job):
    """Training goes on while the chief's thread compares."""
    model, optimizer, manager = job
    for step in range(1, 6):
        manager.save(step, blocking=False)
        change(model, optimizer, "parameter")
    manager.wait()


def test_buffers_may_differ_when_a_save_comes(comm, job):
    """A forward in training mode without a backward, as of an evaluation, changes them by rank."""
    model, _, manager = job
    model(torch.full((2 + comm.rank, 3), float(comm.rank)))
    manager.save(1)


def test_averages_that_the_chief_alone_keeps_are_saved(comm, job, shared_path):
    model, optimizer, _ = job
    average = torch.optim.swa_utils.AveragedModel(model)
    if comm.rank == 0:
        with torch.no_grad():
            average.module[0].weight.mul_(2)
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, average=average)
    hpcdist.CheckpointManager(checkpoint, shared_path / "average").save(1)


def test_a_comparison_that_nobody_waits_for_ends_the_job(comm, job, monkeypatch):
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, manager = job
    ended = []
    monkeypatch.setattr(saver, "end_job", lambda report, code: ended.append((report, code)))
    manager.save(1)
    manager.wait()
    if comm.rank == 1:
        change(model, optimizer, "parameter")
    manager.save(1, if_changed=True, blocking=False)
    manager._saver._wait_at_exit()  # as the interpreter does at the end
    assert [code for _, code in ended] == [76] * (comm.rank == 0)
    assert all("desync check: expected equal models" in report for report, _ in ended)


def test_a_comparison_is_not_waited_for_for_ever(comm):
    comparison = Comparison({}, [], comm.size, Future())
    with pytest.raises(CheckpointError, match="expected the digest of the other ranks within 0.1 s"):
        comparison.require([], 0.1)


def test_ranks_that_differ_when_the_program_exits_end_the_job(comm, job, shared_path, monkeypatch):
    """The last steps are not saved: the run is not finished, and must not look so."""
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, manager = job
    handler = hpcdist.PreemptionCheckpointHandler(None, manager.checkpoint, shared_path / "run" / "checkpoints")
    handler.save_checkpoint_if_preempted()
    if comm.rank == 1:
        change(model, optimizer, "optimizer")

    def end_job(report, code):
        raise SystemExit(code)

    monkeypatch.setattr(preemption, "end_job", end_job)
    with pytest.raises(SystemExit) as ended:
        handler.record_end()
    handler.close()
    call_when_done(None)
    assert ended.value.code == 76
    comm.Barrier()
    told = json.loads((shared_path / "run" / "decision.json").read_text())
    assert told["decision"] == "stop"


@pytest.mark.parametrize("where", ["learning rate", "class", "groups"])
def test_optimizers_that_differ_are_found_at_the_first_step(comm, where):
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    is_odd = comm.rank == 1
    with strategy.scope():
        model = nn.Linear(3, 2)
        if where == "class" and is_odd:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        elif where == "groups" and is_odd:
            optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * (where == "learning rate") * comm.rank)
    with pytest.raises(DesyncError, match="'s optimizers and comm hook, '.*SGD.*2.*lr=0.*1"):
        model(torch.ones(1, 3))
    assert len(optimizer.param_groups) >= 1


def test_where_ranks_are_compared_nothing_is_saved_that_differs(comm, job, shared_path, monkeypatch):
    """A comparison comes before each save, however seldom the schedule asks for one; copies in memory are removed."""
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, _ = job
    monkeypatch.setattr(make_world(), "node_comm", MPI.COMM_SELF)
    memory = shared_path / f"node-{comm.rank}"
    manager = hpcdist.CheckpointManager(
        hpcdist.Checkpoint(model=model, optimizer=optimizer), shared_path / "run" / "checkpoints", fast_directory=memory
    )
    schedule = hpcdist.SaveSchedule(every_steps=2, in_memory_every_steps=1, compare_every_steps=100)

    def train():
        with hpcdist.PreemptionCheckpointHandler(None, manager, schedule=schedule) as handler:
            for _ in range(4):  # each call acts on the step before it
                handler.run(lambda: None)
            manager.wait()
            assert list(memory.rglob("*.h5")), "a copy of step 3"
            with torch.no_grad():
                model[0].weight[0, 0] += comm.rank
            handler.run(lambda: None)

    with pytest.raises(DesyncError):
        train()
    comm.Barrier()
    assert [path.name for path in (shared_path / "run").rglob("step-*.h5")] == ["step-00000002-0001.h5"]
    assert not list(memory.iterdir())
    told = json.loads((shared_path / "run" / "decision.json").read_text())
    assert (told["decision"], told["step"]) == ("stop", 2)
    assert told["reason"].startswith("desync check: expected equal models")


@pytest.mark.parametrize("n_steps", [0, 1], ids=["restored", "saved"])
def test_ranks_are_compared_before_the_end_too_though_its_step_was_saved_before(comm, job, shared_path, n_steps):
    if comm.size == 1:
        pytest.skip("ranks that differ take two of them")
    model, optimizer, _ = job
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer)
    hpcdist.CheckpointManager(checkpoint, shared_path / "run" / "checkpoints").save(3)
    manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run" / "checkpoints")
    schedule = hpcdist.SaveSchedule(every_steps=2, compare_every_steps=100)

    def train_and_end():
        with hpcdist.PreemptionCheckpointHandler(None, manager, schedule=schedule) as handler, torch.no_grad():
            for _ in range(n_steps):
                handler.run(lambda: None)
            handler.poll()
            assert checkpoint.step == 3 + n_steps
            model[0].weight[0, 0] += comm.rank

    with pytest.raises(DesyncError):
        train_and_end()
    named = [path.name for path in (shared_path / "run").rglob("step-*.h5")]
    assert len(named) == 1 + (n_steps > 0), "nothing is written that differs"


def test_an_optimizer_that_the_chief_steps_alone_is_not_compared(comm, shared_path):
    strategy = hpcdist.CentralStorageStrategy(gradient_op="sum")
    with strategy.scope():
        model = nn.Linear(3, 4)
        optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(6, 3)).square().sum().backward()
    optimizer.step()
    assert bool(optimizer.state) == (comm.rank == 0)
    checkpoint = hpcdist.Checkpoint(strategy=strategy, model=model, optimizer=optimizer)
    hpcdist.CheckpointManager(checkpoint, shared_path).check_equal()


@pytest.mark.parametrize(
    ("digests", "odd"), [([1, 1, 2], [2]), ([2, 1, 1], [0]), ([1, 2], [1]), ([1, 2, 3, 3], [0, 1]), ([1, 1], [])]
)
def test_who_differs(digests, odd):
    assert odd_ranks(digests) == odd
