import atexit
import errno
import functools
import gc
import json
import logging
import os
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.checkpoint import durable
from hpcdist.checkpoint.store import Store
from hpcdist.collectives.group import group_of
from hpcdist.errors import CheckpointError, CheckpointMismatch, ExitCode, UsageError
from hpcdist.run.decision import without_progress
from hpcdist.runtime.mpi import MPI
from hpcdist.saving import saver

pytestmark = [pytest.mark.mpi, pytest.mark.core]


class Manager(hpcdist.CheckpointManager):
    """A manager whose blocking saves also wait until older files are pruned.

    A test that opens a second manager begins a new attempt, and the pruning of the first one must not meet that.
    """

    def save(self, step, metrics=None, *, blocking=True, **options):
        path = super().save(step, metrics, blocking=blocking, **options)
        if blocking:
            self.wait()
        return path


class Job:
    """A small training program: what it holds, and one that starts again."""

    def __init__(self, comm, width=5, dataset_seed=1, **more):
        self.comm = comm
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        torch.manual_seed(17 + comm.rank)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)
        dataset = hpcdist.Dataset.from_tensor_slices(rows).shuffle(seed=dataset_seed).batch(8)
        self.batches = self.strategy.experimental_distribute_dataset(dataset)
        self.history = np.zeros(30)
        self.checkpoint = hpcdist.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=self.batches,
            strategy=self.strategy,
            history=self.history,
            **more,
        )

    def manager(self, folder, **options):
        return Manager(self.checkpoint, folder, **options)

    def train(self, until, first=0):
        step = first
        while step < until:
            for x, y in self.batches:
                self.optimizer.zero_grad()
                loss = (self.model(x) - y).square().sum() / 8
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.history[step] = self.model[0].weight.detach().double().sum()
                step += 1
                if step == until:
                    break

    def bits(self):
        state = {**self.model.state_dict(), "lr": torch.tensor(self.optimizer.param_groups[0]["lr"])}
        return [value.numpy().tobytes() for value in state.values()] + [self.history.tobytes()]


@pytest.mark.feature(
    "tf.save-works-outside",
    "training.make-or-restore",
    "training.broadcast-of-initial-state",
    "checkpoints.checkpoint-manager",
    "checkpoints.exact-resume",
    "semantics.models-know-their-strategy",
    "complaints.mid-epoch-resume",
)
@pytest.mark.parametrize("stop", [1, 5, 7, 10])
def test_a_restart_resumes_bit_for_bit(comm, shared_path, stop):
    unbroken = Job(comm)
    unbroken.train(14)
    first = Job(comm)
    first.train(stop)
    path = first.manager(shared_path).save(stop)
    second = Job(comm)
    torch.manual_seed(99)
    manager = second.manager(shared_path)
    assert manager.restore_or_initialize() == path
    assert second.checkpoint.step == stop
    second.train(14, first=stop)
    assert second.bits() == unbroken.bits()
    assert len(set(comm.allgather(b"".join(second.bits())))) == 1


@pytest.mark.feature("training.make-or-restore")
def test_nothing_to_restore(comm, shared_path):
    manager = Job(comm).manager(shared_path)
    assert manager.restore_or_initialize() is None
    assert hpcdist.latest_checkpoint(manager.directory) is None


@pytest.mark.feature("checkpoints.chief-writes-hdf5", "checkpoints.checkpoint-manager", "semantics.save-on-all-ranks")
def test_keeps_the_last_few_and_says_who_wrote_them(comm, shared_path):
    job = Job(comm)
    manager = job.manager(shared_path, max_to_keep=2)
    for step in (1, 2, 3):
        manager.save(step)
    manager.wait()
    names = sorted(os.listdir(shared_path))
    assert names == ["attempts", "latest.h5", "step-00000002-0001.h5", "step-00000003-0001.h5"]
    written = Store(shared_path).read_latest().index.written
    assert written["ranks"] == comm.size
    assert written["torch"] == torch.__version__
    assert {"mpi", "threads", "instruction_set", "host", "time", "numpy"} <= set(written)
    assert hpcdist.latest_checkpoint(shared_path).endswith("step-00000003-0001.h5")


@pytest.mark.feature("checkpoints.checkpoint-manager")
def test_saves_keep_an_interval(comm, shared_path):
    job = Job(comm)
    manager = job.manager(shared_path, max_to_keep=None, checkpoint_interval=5)
    paths = list(map(manager.save, range(1, 13)))
    assert [step for step, path in enumerate(paths, 1) if path is not None] == [1, 6, 11]
    assert manager.save(12, check_interval=False).endswith("step-00000012-0001.h5")
    with hpcdist.PreemptionCheckpointHandler(job.strategy.cluster_resolver, manager) as handler:
        handler.run(lambda: None)  # the save at the end is made in any case
    assert hpcdist.latest_checkpoint(shared_path).endswith("step-00000013-0001.h5")


def test_half_precision_comes_back(comm, shared_path):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = nn.Linear(3, 2).to(torch.bfloat16)
    saved = model.weight.clone()
    manager = Manager(hpcdist.Checkpoint(model=model), shared_path)
    manager.save(1)
    nn.init.zeros_(model.weight)
    manager.restore_or_initialize()
    assert model.weight.dtype is torch.bfloat16
    assert len(set(comm.allgather(model.weight.float().detach().numpy().tobytes()))) == 1
    assert comm.rank > 0 or torch.equal(model.weight, saved)


def test_the_arrays_of_a_restore_are_in_the_journal(comm, shared_path):
    """So that a rank which hangs in a block is seen."""
    values = np.arange(1234.0)
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    manager.save(1)
    manager.restore_or_initialize()
    last = group_of(manager.checkpoint.world.role_comm).journal.entries[-1]
    assert str(last).startswith("broadcast uint8 x ")
    assert last.ended_s is not None


def raised_everywhere(comm, act):
    with pytest.raises(CheckpointError) as caught:
        act()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert "\n" not in texts[0]
    return texts[0]


def test_of_another_model(comm, shared_path):
    Job(comm, width=5).manager(shared_path).save(1)
    wider_job = Job(comm, width=6)
    before = wider_job.bits()
    text = raised_everywhere(comm, wider_job.manager(shared_path).restore_or_initialize)
    assert "expected 'model' with" in text
    assert "'0.weight' (6, 3) float32, got" in text
    assert "(5, 3) float32 in step-00000001-0001.h5; build the same model, or start with a new run folder" in text
    assert wider_job.bits() == before
    assert hpcdist.latest_checkpoint(shared_path) is not None


@pytest.mark.feature("checkpoints.checkpoint-manager")
def test_of_other_objects(comm, shared_path):
    Job(comm).manager(shared_path).save(1)
    text = raised_everywhere(comm, Job(comm, extra=np.zeros(2)).manager(shared_path).restore_or_initialize)
    assert "'extra'" in text


def test_of_another_optimizer_or_precision(comm, shared_path):
    torch.manual_seed(0)  # ranks that differ are not saved
    model = nn.Linear(1, 1)
    Manager(hpcdist.Checkpoint(model=model, optimizer=torch.optim.Adam(model.parameters())), shared_path).save(1)
    sgd_checkpoint = hpcdist.Checkpoint(model=model, optimizer=torch.optim.SGD(model.parameters()))
    text = raised_everywhere(comm, Manager(sgd_checkpoint, shared_path).restore_or_initialize)
    assert "'optimizer': 'SGD'" in text
    assert "'optimizer': 'Adam'" in text
    fewer = hpcdist.Checkpoint(model=model, optimizer=torch.optim.Adam([model.weight]))
    text = raised_everywhere(comm, Manager(fewer, shared_path).restore_or_initialize)
    assert "'group 0' 1 parameters, got 1, 'group 0' 2 parameters" in text
    model.double()
    same = hpcdist.Checkpoint(model=model, optimizer=torch.optim.Adam(model.parameters()))
    text = raised_everywhere(comm, Manager(same, shared_path).restore_or_initialize)
    assert "'weight' (1, 1) float64, got 2, 'weight' (1, 1) float32" in text


def test_a_model_that_was_not_used_is_made_equal_by_its_first_save(comm, shared_path):
    """Seeds differ by rank: the chief's values count, as at the first use."""
    job = Job(comm)
    weight = job.model[0].weight
    expected = comm.bcast(weight.detach().clone(), 0)
    job.manager(shared_path).save(0)
    assert torch.equal(weight, expected)


def test_steps_are_whole_numbers(comm, shared_path):
    manager = Job(comm).manager(shared_path)
    assert manager.save(np.int64(3)).endswith("step-00000003-0001.h5")
    for step in (-1, 1 << 63):
        with pytest.raises(UsageError, match=rf"expected a step from 0 to 2\*\*63 - 1, got {step};"):
            manager.save(step)
    with pytest.raises(TypeError):
        manager.save(1.5)


@pytest.mark.feature("evaluation.evaluator-apart-from-training", "complaints.servers-and-evaluators-end")
def test_an_evaluator_does_not_take_part_in_the_workers_saves(comm, shared_path):
    if comm.size == 1:
        pytest.skip("an evaluator and a worker need two ranks")
    strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver("worker:*,evaluator:1"))
    folders = {"directory": shared_path / "disk", "fast_directory": shared_path / "memory"}
    if strategy.cluster_resolver.task_type == "worker":
        manager = Manager(hpcdist.Checkpoint(strategy=strategy), **folders)
        assert manager.save(1).endswith("step-00000001-0001.h5")
    comm.Barrier()
    assert (shared_path / "disk" / "step-00000001-0001.h5").exists()
    if strategy.cluster_resolver.task_type == "evaluator":
        Manager(hpcdist.Checkpoint(strategy=strategy), **folders)
    comm.Barrier()
    assert [path.name for path in (shared_path / "disk" / "attempts").glob("*.jsonl")] == ["0001.jsonl"]


@pytest.mark.feature("checkpoints.background-save")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_end_waits_for_a_save_whose_manager_nobody_holds(comm, shared_path, monkeypatch, caplog, is_replaced):
    """Who lets go of it, maybe the thread that writes, waits for nothing; that it was replaced ends no job."""
    later = []
    gate = threading.Event()
    sync = durable.Disk.sync
    monkeypatch.setattr(atexit, "register", lambda act, *arguments, **more: later.append(act))

    def sync_when_told(disk, descriptor):
        if threading.current_thread() is not threading.main_thread():
            gate.wait(30)
        sync(disk, descriptor)

    monkeypatch.setattr(durable.Disk, "sync", sync_when_told)
    manager = Manager(Job(comm).checkpoint, shared_path)
    manager.save(1, blocking=False)
    del manager
    gc.collect()
    if is_replaced and comm.rank == 0:
        (shared_path / "attempts" / "0002.jsonl").touch()
    gate.set()
    of_savers = [act for act in later if isinstance(getattr(act, "__self__", None), saver.Saver)]
    assert len(of_savers) == (comm.rank == 0)
    for finish in of_savers:
        finish()
    comm.Barrier()
    assert (shared_path / "step-00000001-0001.h5").exists() != is_replaced
    assert ("another attempt of this job" in caplog.text) == (is_replaced and comm.rank == 0)


def test_an_attempt_that_is_left_over_adds_no_record_to_the_next_ones(comm, shared_path):
    """The one that has written nothing yet would put its file in the place of the other's."""
    files = [hpcdist.MetricsFile(shared_path / "metrics.jsonl") for _ in range(2)]
    managers = [Manager(hpcdist.Checkpoint(metrics=file), shared_path / "disk") for file in files]
    for manager in managers:
        manager.begin_attempt()
    files[1].write(1, loss=1.0)
    files[0].write(1, loss=0.0)
    files[1].write(2, loss=2.0)
    for file in files:
        file.flush()
    comm.Barrier()
    records = list(map(json.loads, (shared_path / "metrics.jsonl").read_text().splitlines()))
    assert [record["loss"] for record in records] == [1.0, 2.0]
    assert len(managers) == 2


def test_of_other_data(comm, shared_path):
    Job(comm).manager(shared_path).save(1)
    text = raised_everywhere(comm, Job(comm, dataset_seed=2).manager(shared_path).restore_or_initialize)
    assert "seed 1 as in the checkpoint, got 2" in text


@pytest.mark.feature("checkpoints.checksums-and-fallback")
def test_a_damaged_newest_one_is_stepped_over_and_set_aside(comm, shared_path, caplog):
    job = Job(comm)
    job.train(2)
    manager = job.manager(shared_path)
    manager.save(1)
    manager.save(2)
    manager.wait()
    if comm.rank == 0:
        path = shared_path / "step-00000002-0001.h5"
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(data)
    comm.Barrier()
    with caplog.at_level(logging.WARNING, "hpcdist"):
        restored = Job(comm).manager(shared_path).restore_or_initialize()
    assert restored.endswith("step-00000001-0001.h5")
    reports = comm.allgather([message for message in caplog.messages if "skipped" in message])
    assert reports[0][0].startswith("skipped damaged step 2: restore: expected")
    assert reports[1:] == [[]] * (comm.size - 1)
    comm.Barrier()
    assert (shared_path / "step-00000002-0001.h5.bad").exists()


def test_only_damaged_ones_is_an_error_on_all_ranks(comm, shared_path):
    manager = Job(comm).manager(shared_path)
    manager.save(1)
    manager.wait()
    if comm.rank == 0:
        (shared_path / "step-00000001-0001.h5").write_bytes(b"")
    comm.Barrier()
    assert "got 1 damaged" in raised_everywhere(comm, manager.restore_or_initialize)
    assert "got 1 damaged" in raised_everywhere(comm, manager.restore_or_initialize)


def test_any_number_may_be_a_step(comm, shared_path):
    values = np.zeros(2)
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    for step in (1 << 40, 1_200_000_000_000, (1 << 63) - 1):
        manager.save(step)
        second = Manager(hpcdist.Checkpoint(values=values), shared_path)
        second.restore_or_initialize()
        assert second.saved_step == second.checkpoint.step == step
        manager = second


def test_a_folder_that_cannot_be_made(comm, shared_path):
    if comm.rank == 0:
        (shared_path / "file").write_text("")
    comm.Barrier()
    text = raised_everywhere(comm, Job(comm).manager(shared_path / "file" / "folder").restore_or_initialize)
    assert "expected a folder that can be" in text


@pytest.mark.feature(
    "tf.save-called-all",
    "checkpoints.chief-writes-hdf5",
    "semantics.handler-grace-period",
    "complaints.save-under-if-chief",
)
def test_a_save_that_fails_on_the_chief_is_an_error_on_all_ranks(comm, shared_path, monkeypatch):
    job = Job(comm)
    manager = job.manager(shared_path)
    manager.save(1)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(os, "pwrite", fail)
        text = raised_everywhere(comm, lambda: manager.save(2))
    assert "No space left on device" in text
    assert manager.restore_or_initialize().endswith("step-00000001-0001.h5")


@pytest.mark.feature("checkpoints.background-save")
def test_a_save_continues_in_the_background(comm, shared_path, monkeypatch):
    """What is written is the state at the call, whatever becomes of it while the file is written."""
    values = np.full(1000, 1.0)
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    manager.begin_attempt()
    write_now = threading.Event()
    pwrite = os.pwrite

    def write(*arguments):
        assert write_now.wait(30)
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", write)
    path = manager.save(7, blocking=False)
    values[:] = 2.0
    assert not os.path.exists(path)
    comm.Barrier()  # the chief writes when all have looked
    write_now.set()
    manager.wait()
    assert os.path.exists(path)
    manager.restore_or_initialize()
    assert (values == 1.0).all()


@pytest.mark.feature("checkpoints.background-save")
def test_a_background_save_that_fails_is_raised_by_the_next_call_on_all_ranks(comm, shared_path, monkeypatch):
    manager = Job(comm).manager(shared_path)
    manager.begin_attempt()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(os, "pwrite", fail)
        manager.save(1, blocking=False)
        text = raised_everywhere(comm, lambda: manager.save(2, blocking=False))
    assert "to write" in text
    assert "No space left on device" in text
    assert manager.save(3).endswith("step-00000003-0001.h5")


@pytest.mark.feature("complaints.long-work-on-one-rank")
def test_a_disk_that_is_slow_is_waited_for_and_one_that_is_stuck_is_not(comm, shared_path, monkeypatch):
    """The limit is for one block, not for the file: whoever waits hears from the chief that it comes forward."""
    # 10 blocks
    values = np.zeros(5 << 20)
    at_end = []
    told = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    world = manager.checkpoint.world
    pwrite = os.pwrite
    delays_s = [0.2]
    monkeypatch.setattr(world, "timeout_s", 1.0)

    def write(*arguments):
        time.sleep(delays_s[0])
        return pwrite(*arguments)

    if comm.rank == 0:
        monkeypatch.setattr(os, "pwrite", write)
    manager.save(1)
    delays_s[0] = 8.0
    text = raised_everywhere(comm, lambda: manager.save(2))
    assert "to take or give 4194304 bytes within 1 s, got none" in text
    if comm.rank == 0:
        monkeypatch.setattr(saver, "end_job", lambda text, code: told.append((text, code)))
        at_end[-1]()
        [(text, code)] = told
        assert "got none" in text
        assert code == ExitCode.CHECKPOINT_IO
    monkeypatch.undo()
    manager.wait()
    assert manager.restore_or_initialize().endswith("step-00000002-0001.h5")


def test_a_file_that_changed_on_the_disk_is_noticed_before_older_ones_go(comm, shared_path, monkeypatch):
    manager = hpcdist.CheckpointManager(Job(comm).checkpoint, shared_path, max_to_keep=1)
    manager.save(1)
    manager.wait()
    write = os.pwrite
    if comm.rank == 0:
        monkeypatch.setattr(
            os,
            "pwrite",
            lambda fd, data, at: write(fd, bytes(data[:700]) + b"!" + bytes(data[701:]) if at == 4096 else data, at),
        )
    manager.save(2)
    assert "other bytes" in raised_everywhere(comm, manager.wait)
    monkeypatch.undo()
    assert manager.restore_or_initialize().endswith("step-00000001-0001.h5")


@pytest.mark.feature("checkpoints.save-and-retention-policy", "evaluation.best-checkpoint-export")
def test_the_best_is_kept(comm, shared_path):
    manager = Job(comm).manager(shared_path, max_to_keep=1, keep_best="loss")
    for step, loss in enumerate((0.5, 0.2, 0.9), 1):
        manager.save(step, {"loss": loss})
    manager.wait()
    assert sorted(os.listdir(shared_path))[-2:] == ["step-00000002-0001.h5", "step-00000003-0001.h5"]
    assert os.readlink(shared_path / "best.h5") == "step-00000002-0001.h5"
    assert manager.best_path == str(shared_path / "best.h5")
    assert manager.checkpoint.read(manager.best_path) == 2
    assert Job(comm).manager(shared_path).best_path is None


def test_numbers_and_texts_are_state(comm, shared_path):
    def manager(**values):
        return Manager(hpcdist.Checkpoint(**values), shared_path)

    first = manager(epoch=np.int64(0), rate=np.float64(0.1), phase="warm", is_tuned=False)
    first.checkpoint["epoch"] = 3
    first.checkpoint["rate"] = float("inf")
    first.checkpoint["phase"] = "täglich"
    first.checkpoint["is_tuned"] = np.bool_(True)
    first.checkpoint["rate"] = np.float64("inf")
    first.save(7)
    reopened = manager(epoch=0, rate=0.1, phase="", is_tuned=False)
    assert reopened.restore_or_initialize()
    names = ("epoch", "rate", "phase", "is_tuned")
    assert [reopened.checkpoint[name] for name in names] == [3, float("inf"), "täglich", True]
    with pytest.raises(UsageError, match=r"'epoch'.*'rate'.*'phase'.*'epoch'"):
        reopened.checkpoint["epoch"] = "3"
    with pytest.raises(UsageError, match="'other'"):
        reopened.checkpoint["other"] = 1
    mismatched = manager(epoch="", rate=0.1, phase="", is_tuned=False)
    with pytest.raises(CheckpointMismatch, match="'epoch'.*1.*'epoch'"):
        mismatched.restore_or_initialize()


def without_progress_of(manager):
    return len(without_progress(manager.ledger.attempts()))


@pytest.mark.feature("checkpoints.suspect-checkpoints", "complaints.broken-checkpoint-files")
def test_attempts_that_die_are_counted_and_their_checkpoint_is_stepped_over(comm, shared_path, caplog, monkeypatch):
    """Two deaths in different jobs make a suspect."""
    first = Job(comm).manager(shared_path)
    assert first.restore_or_initialize() is None
    first.save(1)
    first.save(2)
    first.wait()
    assert without_progress_of(first) == 0
    for n_before in range(2):
        monkeypatch.setenv("SLURM_JOB_ID", str(n_before))
        manager = Job(comm).manager(shared_path)
        assert manager.restore_or_initialize().endswith("step-00000002-0001.h5")
        assert without_progress_of(manager) == n_before + 1
        comm.Barrier()
    assert "restore: skips step" not in caplog.text
    third = Job(comm).manager(shared_path)
    assert third.restore_or_initialize().endswith("step-00000001-0001.h5")
    told = "restore: skips step 2, if there is another one: attempts 2 and 3 died on it"
    if comm.rank == 0:
        n_told = 1
    else:
        n_told = 0
    assert caplog.text.count(told) == n_told
    third.save(3)
    third.wait()
    assert without_progress_of(third) == 0
    last = Job(comm).manager(shared_path)
    assert last.restore_or_initialize().endswith("step-00000003-0004.h5")


def test_attempts_whose_saves_fail_are_counted_and_their_checkpoint_stays_in_use(comm, shared_path, monkeypatch):
    first = Job(comm).manager(shared_path)
    for step in (1, 2):
        first.save(step)
    first.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_check_space", full)
        for job in "12":
            monkeypatch.setenv("SLURM_JOB_ID", job)
            manager = Job(comm).manager(shared_path)
            assert manager.restore_or_initialize().endswith("step-00000002-0001.h5")
            assert "the disk is full" in raised_everywhere(comm, functools.partial(manager.save, 3))
    last = Job(comm).manager(shared_path)
    assert last.restore_or_initialize().endswith("step-00000002-0001.h5")
    assert without_progress_of(last) == 3


def full(folder, nbytes):
    raise CheckpointError(f"save: expected {nbytes} bytes in {folder.path}, got none: the disk is full")


def test_an_attempt_that_was_replaced_ends(comm, shared_path):
    first, second = (Job(comm).manager(shared_path) for _ in range(2))
    first.begin_attempt()
    second.begin_attempt()
    text = raised_everywhere(comm, lambda: first.save(1))
    assert "expected attempt 1 to be the latest" in text
    assert second.save(1).endswith("step-00000001-0002.h5")


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.feature("training.make-or-restore")
def test_a_checkpoint_is_read_without_writing(comm, shared_path):
    """Not even a manager's constructor writes: a job that runs goes on, whoever looks at its folder."""
    job = Job(comm)
    job.train(3)
    writer = job.manager(shared_path / "run")
    path = writer.save(3)
    comm.Barrier()
    before = files_in(shared_path)
    reader_job = Job(comm)
    reader_job.manager(shared_path / "run")
    reader_job.manager(shared_path / "nowhere")
    assert reader_job.checkpoint.read(path) == 3
    assert reader_job.checkpoint.step == 0
    assert reader_job.bits()[:-1] == job.bits()[:-1]
    assert files_in(shared_path) == before
    writer.save(4)


def test_reading_leaves_the_metrics_of_a_job_that_runs_alone(comm, shared_path):
    job = Job(comm, metrics=hpcdist.MetricsFile(shared_path / "metrics.jsonl"))
    manager = job.manager(shared_path / "run")
    metrics = job.checkpoint._objects["metrics"]
    metrics.write(1, loss=1.0)
    path = manager.save(1)
    metrics.write(2, loss=2.0)
    reader = Job(comm, metrics=hpcdist.MetricsFile(shared_path / "metrics.jsonl")).checkpoint
    assert reader.read(path) == 1
    metrics.write(3, loss=3.0)
    metrics.flush()
    comm.Barrier()
    assert len((shared_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert reader.restore(path) == 1
    reader._objects["metrics"].write(2, loss=2.5)
    reader._objects["metrics"].flush()
    comm.Barrier()
    steps = [json.loads(line)["step"] for line in (shared_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


@pytest.mark.feature("complaints.hdf5-locks")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_that_is_read_only_is_read(comm, shared_path):
    path = Job(comm).manager(shared_path).save(3)
    comm.Barrier()
    if comm.rank == 0:
        for folder in (shared_path, *shared_path.parents):
            folder.chmod(folder.stat().st_mode | 0o555)
        shared_path.chmod(0o555)
        os.chmod(path, 0o444)
    comm.Barrier()
    reader = Job(comm).checkpoint
    os.seteuid(12345)
    try:
        assert not os.access(shared_path, os.W_OK, effective_ids=True)
        assert reader.read(path) == 3
    finally:
        os.seteuid(0)
    comm.Barrier()
    if comm.rank == 0:
        shared_path.chmod(0o700)


def test_what_cannot_be_read_is_an_error_on_all_ranks(comm, shared_path):
    checkpoint = Job(comm).checkpoint
    assert "got No such file" in raised_everywhere(comm, lambda: checkpoint.read(shared_path / "nothing.h5"))
    path = Job(comm).manager(shared_path).save(1)
    comm.Barrier()
    if comm.rank == 0:
        with open(path, "r+b") as file:
            file.truncate(5000)
    comm.Barrier()
    assert "got 5000 bytes" in raised_everywhere(comm, lambda: checkpoint.restore(path))


@pytest.mark.feature("training.make-or-restore")
def test_a_person_who_goes_back_makes_progress_from_there(comm, shared_path):
    first = Job(comm).manager(shared_path, max_to_keep=9)
    paths = list(map(first.save, (10, 20)))
    first.wait()
    resumed_job = Job(comm)
    assert resumed_job.checkpoint.restore(paths[0]) == 10
    manager = resumed_job.manager(shared_path, max_to_keep=9)
    manager.save(15)
    manager.wait()
    if comm.rank == 0:
        assert manager.ledger.attempts()[-1].base_step == 10
    assert without_progress_of(manager) == 0
    last = Job(comm)
    later = last.manager(shared_path, max_to_keep=9)
    assert later.restore_or_initialize().endswith("step-00000015-0002.h5")
    assert last.checkpoint.restore(paths[0]) == 10
    assert later.save(12).endswith("step-00000012-0004.h5"), "another attempt, as this one began at 15"
    assert last.checkpoint.restore(paths[1]) == 20
    assert later.restore_or_initialize() == paths[1], "the chosen one, not the newest"
    assert later.saved_step == 20
    assert last.checkpoint.restore(paths[0]) == 10
    assert later.save(11).endswith("step-00000011-0005.h5"), "another attempt, as this one had come to 20"


def test_a_save_that_is_being_written_belongs_to_the_attempt_before(comm, shared_path, monkeypatch):
    values = np.zeros(3)
    pwrite = os.pwrite
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    first = manager.save(1)

    def write(*arguments):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return pwrite(*arguments)

    if comm.rank == 0:
        monkeypatch.setattr(os, "pwrite", write)
    manager.save(3, blocking=False)
    manager.checkpoint.restore(first)
    assert manager.save(2).endswith("step-00000002-0002.h5")
    comm.Barrier()
    assert sorted(path.name for path in shared_path.glob("step-*")) == [
        "step-00000001-0001.h5",
        "step-00000002-0002.h5",
        "step-00000003-0001.h5",
    ]


def test_a_state_that_is_damaged_though_its_digest_is_right_is_stepped_over_on_all_ranks(
    comm, shared_path, monkeypatch
):
    values = np.zeros(3)
    checkpoint = hpcdist.Checkpoint(values=values)
    manager = Manager(checkpoint, shared_path)
    values[:] = 1
    manager.save(1)
    values[:] = 2
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "collect", lambda gathered: ({"objects": 7, "kinds": 7}, []))
        manager.save(2)
    manager.wait()
    assert manager.restore_or_initialize().endswith("step-00000001-0001.h5")
    assert values.tolist() == [1, 1, 1]
    comm.Barrier()
    assert (shared_path / "step-00000002-0001.h5.bad").exists()


def test_a_chosen_checkpoint_whose_successor_cannot_be_read_is_chosen_no_more(comm, shared_path):
    values = np.zeros(3)
    checkpoint = hpcdist.Checkpoint(values=values)
    path = Manager(checkpoint, shared_path / "run").save(1)
    checkpoint.restore(path)
    raised_everywhere(comm, lambda: checkpoint.restore(shared_path / "nothing.h5"))
    assert checkpoint.chosen_path is None


def test_another_thread_count_is_reported(comm, shared_path, caplog):
    job = Job(comm)
    manager = job.manager(shared_path)
    manager.save(1)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        manager.restore_or_initialize()
    torch.set_num_threads(before)
    reports = caplog.messages
    if comm.rank:
        expected_reports = []
    else:
        expected_reports = [reports[0]]
    assert reports == expected_reports
    assert comm.rank or f"threads {before} -> {before + 1}" in reports[0]


class OwnSum(hpcdist.CrossDeviceOps):
    def all_reduce(self, array, group):
        group.comm.Allreduce(MPI.IN_PLACE, array)


def warnings_of_a_restore(path, caplog, before, now):
    """Return what the chief says when a strategy goes on from what another one saved."""
    Manager(hpcdist.Checkpoint(strategy=before), path).save(1)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        Manager(hpcdist.Checkpoint(strategy=now), path).restore_or_initialize()
    return caplog.messages


def summing_by(**options):
    return hpcdist.MultiWorkerMirroredStrategy(communication_options=hpcdist.CommunicationOptions(**options))


@pytest.mark.parametrize("name", ["RING", "HIERARCHICAL", "SHARED_MEMORY", "OwnSum"])
def test_another_way_to_sum_is_reported(comm, shared_path, caplog, name):
    """AUTO becomes SHARED_MEMORY on one host, and HIERARCHICAL adds in the same order: nothing to report."""
    custom_strategy = hpcdist.MultiWorkerMirroredStrategy(cross_device_ops=OwnSum())
    if name == "OwnSum":
        now = custom_strategy
    else:
        now = summing_by(implementation=name)
    reports = warnings_of_a_restore(shared_path, caplog, summing_by(), now)
    assert len(reports) == int(comm.rank == 0 and name in ("RING", "OwnSum"))
    assert all(report.endswith(f"these changed: all_reduce in the order of replicas -> {name}") for report in reports)


def test_a_checkpoint_that_does_not_tell_how_it_summed_is_not_said_to_differ(comm, shared_path, caplog, monkeypatch):
    before = summing_by()
    monkeypatch.setattr(before, "describe_sums", dict)
    assert warnings_of_a_restore(shared_path, caplog, before, summing_by(implementation="RING")) == []


@pytest.mark.parametrize("item", [None, object(), [1], b"bytes"])
def test_refuses_what_has_no_state(item):
    with pytest.raises(ValueError, match="state_dict"):
        hpcdist.Checkpoint(item=item)
    with pytest.raises(ValueError, match="max_to_keep"):
        Manager(hpcdist.Checkpoint(), "x", max_to_keep=0)


def test_a_step_saved_again_because_something_changed_keeps_its_metrics(comm, shared_path):
    values = np.zeros(3)

    def attempt():
        return Manager(hpcdist.Checkpoint(values=values), shared_path, keep_best="loss")

    def latest_save():
        comm.Barrier()
        last = Store(shared_path).read_latest()
        return str(last.saved), last.index.metrics

    manager = attempt()
    manager.save(5, {"loss": 0.25})
    before = os.stat(shared_path / "step-00000005-0001.h5").st_ino
    manager.save(5, if_changed=True)
    assert latest_save() == ("step-00000005-0001.h5", {"loss": 0.25})
    assert os.stat(shared_path / "step-00000005-0001.h5").st_ino == before
    values += 1
    assert manager.save(5, if_changed=True).endswith("step-00000005-0001.h5")
    assert latest_save() == ("step-00000005-0001.h5", {"loss": 0.25})
    assert os.stat(shared_path / "step-00000005-0001.h5").st_ino != before
    manager = attempt()
    manager.restore_or_initialize()
    assert manager.save(5, if_changed=True).endswith("step-00000005-0001.h5"), "the one that was restored"
    values += 1
    assert manager.save(5, if_changed=True).endswith("step-00000005-0002.h5")
    assert latest_save() == ("step-00000005-0002.h5", {"loss": 0.25})
    manager.save(6)
    assert latest_save()[1] == {}


@pytest.mark.feature("checkpoints.suspect-checkpoints")
def test_a_checkpoint_that_kills_who_loads_it_twice_is_stepped_over(comm, shared_path, monkeypatch):
    """What an attempt reads is noted before it is loaded."""
    job = Job(comm)
    manager = job.manager(shared_path)
    manager.save(1)
    manager.save(2)
    manager.end_attempt()

    def die(*_):
        raise MemoryError

    for job_id in ("7", "8"):
        with monkeypatch.context() as patched:
            patched.setenv("SLURM_JOB_ID", job_id)
            patched.setattr(hpcdist.Checkpoint, "load", die)
            with pytest.raises(MemoryError):
                job.manager(shared_path).restore_or_initialize()
    assert job.manager(shared_path).restore_or_initialize().endswith("step-00000001-0001.h5")


@pytest.mark.feature("complaints.long-work-on-one-rank")
def test_a_large_file_may_take_longer_to_read_than_a_collective(comm, shared_path, monkeypatch):
    values = np.arange(5 << 20, dtype=float)  # 10 blocks
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    manager.save(1)
    manager.wait()

    def read(*arguments, plain=os.preadv):
        time.sleep(0.2)
        return plain(*arguments)

    monkeypatch.setattr(manager.checkpoint.world, "timeout_s", 1.0)
    if comm.rank == 0:
        monkeypatch.setattr(os, "preadv", read)
    values[:] = 0
    started = time.monotonic()
    assert manager.restore_or_initialize().endswith("step-00000001-0001.h5")
    assert time.monotonic() - started > 2 or comm.rank > 0
    assert np.array_equal(values, np.arange(5 << 20, dtype=float))


@pytest.mark.parametrize("n_errors", [1, 2, 1000])
def test_a_read_error_in_the_middle_is_tried_again_and_then_raised_on_all_ranks(
    comm, shared_path, monkeypatch, n_errors
):
    """The other ranks wait for blocks meanwhile."""
    values = np.arange(2 << 20, dtype=float)  # 4 blocks
    manager = Manager(hpcdist.Checkpoint(values=values), shared_path)
    manager.save(1)
    manager.wait()
    remaining_errors = [n_errors]

    def read(descriptor, buffers, offset, plain=os.preadv):
        if offset > 8 << 20 and remaining_errors[0]:
            remaining_errors[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor, buffers, offset)

    if comm.rank == 0:
        monkeypatch.setattr(os, "preadv", read)
    values[:] = 0
    if n_errors == 1000:
        assert "got Input/output error, 3 times" in raised_everywhere(comm, manager.restore_or_initialize)
    else:
        assert manager.restore_or_initialize().endswith("step-00000001-0001.h5")
        assert np.array_equal(values, np.arange(2 << 20, dtype=float))


def test_a_restore_writes_into_the_tensors_that_exist(comm, shared_path):
    torch.manual_seed(0)  # ranks that differ are not saved
    model = nn.Linear(3, 2)
    values = np.arange(4.0)
    manager = Manager(hpcdist.Checkpoint(model=model, values=values), shared_path)
    manager.save(1)
    if comm.rank == 0:
        index = Store(shared_path).read_latest().index
    else:
        index = None
    if comm.rank == 0:
        prepared = manager.checkpoint.prepare(index, "file")
        addresses = {array.ctypes.data for array in prepared.arrays}
        assert addresses == {model.weight.data_ptr(), model.bias.data_ptr(), values.ctypes.data}


def test_some_objects_of_a_checkpoint_are_loaded(comm, shared_path):
    job = Job(comm)
    job.train(3)
    path = job.manager(shared_path).save(3)
    expected = job.model.state_dict()
    torch.manual_seed(99)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
    history = np.zeros(30)
    assert hpcdist.load_checkpoint(path, model=model, history=history) == 3
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert history.tolist() == job.history.tolist()
    text = raised_everywhere(comm, lambda: hpcdist.load_checkpoint(path, net=model))
    assert "expected {'net': 'module'}" in text
    assert hpcdist.load_checkpoint(path, strict=False, net=model, history=history) == 3


def test_a_module_is_loaded_in_part(comm, shared_path):
    job = Job(comm)
    path = job.manager(shared_path).save(1)
    larger = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1), nn.Linear(1, 1))
    head = larger[4].weight.detach().clone()
    with torch.no_grad():
        larger[0].weight.zero_()
    raised_everywhere(comm, lambda: hpcdist.load_checkpoint(path, model=larger))
    assert not larger[0].weight.any(), "nothing is loaded"
    hpcdist.load_checkpoint(path, strict=False, model=larger)
    assert torch.equal(larger[0].weight, job.model[0].weight)
    assert torch.equal(larger[4].weight, head)
    mismatched_model = nn.Sequential(nn.Linear(3, 7))
    text = raised_everywhere(comm, lambda: hpcdist.load_checkpoint(path, strict=False, model=mismatched_model))
    assert "'0.weight' (7, 3)" in text


SWITCHED = {
    "mirrored": lambda: hpcdist.MirroredStrategy(gradient_op="sum"),
    "central storage": lambda: hpcdist.CentralStorageStrategy(gradient_op="sum"),
    "one device": lambda: hpcdist.OneDeviceStrategy("cpu"),
}


@pytest.mark.parametrize("make", SWITCHED.values(), ids=SWITCHED)
@pytest.mark.parametrize("is_back", [False, True], ids=["to it", "from it"])
def test_a_run_continues_under_another_strategy(comm, shared_path, make, is_back):
    """The guides' easy switching."""

    def saved_by(strategy, step):
        with strategy.scope():
            torch.manual_seed(step)
            model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy.run(lambda: model(torch.ones(4, 3)).square().sum().backward())
        optimizer.step()
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        if strategy.is_chief:
            momentum = optimizer.state[model[0].weight]["momentum_buffer"]
        else:
            momentum = None
        return model, momentum, hpcdist.CheckpointManager(checkpoint, shared_path / "run")

    kinds = [lambda: hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum"), make]
    first, second = reversed(kinds) if is_back else kinds
    model, momentum, manager = saved_by(first(), 1)
    manager.save(2)
    manager.wait()
    restored_model, _, restored = saved_by(second(), 5)
    assert restored.restore_or_initialize().endswith("step-00000002-0001.h5")
    assert restored.checkpoint.step == 2
    assert torch.equal(restored_model[0].weight, model[0].weight)
    if comm.rank == 0:
        assert torch.equal(
            restored.checkpoint["optimizer"].state[restored_model[0].weight]["momentum_buffer"], momentum
        )


@pytest.mark.parametrize(
    "value",
    [torch.tensor([0.1, 0.2]), None, "0.5", {"a": 1}, 1j, np.zeros(2)],
    ids=["vector", "None", "text", "dict", "complex", "array"],
)
def test_a_metric_that_is_no_number_is_refused_on_all_ranks(comm, shared_path, value):
    """Only the chief's metrics are stored; the error is raised on all ranks."""
    manager = Job(comm).manager(shared_path)
    metrics = {"loss": value} if comm.rank == 0 else None
    with pytest.raises(hpcdist.errors.UsageError, match="expected a number for the metric 'loss'"):
        manager.save(1, metrics)
    assert manager.save(1, {"loss": 0.5}) is not None


@pytest.mark.parametrize("value", [np.float32(1), torch.tensor([1.0]), torch.tensor(1.0, requires_grad=True), True])
def test_numbers_of_any_kind_are_metrics(comm, shared_path, value):
    manager = Job(comm).manager(shared_path)
    manager.save(1, {"loss": value})
    manager.wait()
    assert Store(shared_path).read_latest().index.metrics == {"loss": 1.0}
