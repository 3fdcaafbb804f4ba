"""Copies in memory: the newest state that verifies wins, wherever it is."""

import errno
import logging
import os
import shutil

import numpy as np
import pytest

import hpcdist
from hpcdist.errors import CheckpointError
from hpcdist.run.decision import without_progress
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world

pytestmark = pytest.mark.mpi


class Run:
    """Attempts of one run, whose state is one array, on as many made-up nodes as there are ranks."""

    def __init__(self, folder):
        self.disk = folder / "checkpoints"
        self.memory = folder / f"node-{make_world().rank}"
        self.values = np.zeros(1000)

    def attempt(self):
        self.values[:] = -1
        checkpoint = hpcdist.Checkpoint(values=self.values)
        return hpcdist.CheckpointManager(checkpoint, self.disk, fast_directory=self.memory)

    def files(self):
        return sorted(path.name for path in self.memory.rglob("step-*.h5"))


@pytest.fixture
def run(comm, shared_path, monkeypatch):
    monkeypatch.setattr(make_world(), "node_comm", MPI.COMM_SELF)
    return Run(shared_path)


def save(run, manager, step, is_fast):
    run.values[:] = step
    if is_fast:
        manager.save_fast(step)
    else:
        manager.save(step)
    manager.wait()


@pytest.mark.feature("checkpoints.checkpointer-with-a-file-per-rank")
@pytest.mark.parametrize(
    ("saves", "found"),
    [
        ([(10, False)], "disk"),
        ([(10, True)], "memory"),
        ([(10, False), (12, True)], "memory"),
        ([(10, True), (12, False)], "disk"),
        ([(10, True), (10, False)], "disk"),  # with its metrics
        ([(10, True), (12, True), (13, True)], "memory"),
    ],
)
def test_the_newest_wins(run, comm, saves, found):
    first = run.attempt()
    for step, is_fast in saves:
        save(run, first, step, is_fast)
    second = run.attempt()
    path = second.restore_or_initialize()
    newest = max(step for step, _ in saves)
    assert ("checkpoints" in path) == (found == "disk")
    assert path.endswith(f"step-000000{newest}-0001.h5")
    assert len(set(comm.allgather(path))) == 1
    assert (run.values == newest).all()
    assert second.checkpoint.step == newest
    save(run, second, newest + 1, is_fast=False)


def test_only_the_newest_copy_stays(run):
    manager = run.attempt()
    for step in (1, 2, 3):
        save(run, manager, step, is_fast=True)
    assert run.files() == ["step-00000003-0001.h5"]
    later = run.attempt()
    later.restore_or_initialize()
    later.wait()  # no copy is made while the disk takes what was restored from memory
    save(run, later, 4, is_fast=True)
    assert run.files() == ["step-00000004-0002.h5"]


def cut_the_copy(memory):
    path = next(memory.rglob("step-*.h5"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [cut_the_copy, shutil.rmtree], ids=["damaged", "lost"])
def test_another_node_stands_in_for_one_whose_copy_is_damaged_or_lost(run, comm, harm):
    first = run.attempt()
    save(run, first, 5, is_fast=False)
    save(run, first, 7, is_fast=True)
    if comm.rank == 0:
        harm(run.memory)
    comm.Barrier()
    assert run.attempt().restore_or_initialize() is not None
    if comm.size > 1:
        expected = 7
    else:
        expected = 5
    assert (run.values == expected).all()


def test_damaged_files_on_disk_do_not_matter_where_memory_has_a_copy(run, comm, caplog):
    first = run.attempt()
    save(run, first, 7, is_fast=True)
    save(run, first, 9, is_fast=False)
    if comm.rank == 0:
        path = max(run.disk.rglob("step-*.h5"))
        path.write_bytes(path.read_bytes()[:-1])
    comm.Barrier()
    with caplog.at_level(logging.WARNING, "hpcdist"):
        run.attempt().restore_or_initialize()
    assert (run.values == 7).all()
    assert comm.rank > 0 or "resuming from memory" in caplog.text


def test_copies_of_another_run_in_the_same_folder_are_not_taken(run, comm):
    save(run, run.attempt(), 7, is_fast=True)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(run.disk)  # the user starts over
    comm.Barrier()
    assert run.attempt().restore_or_initialize() is None


def test_full_memory_is_reported_and_training_continues(run, comm, caplog, monkeypatch):
    manager = run.attempt()
    manager.begin_attempt()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "hpcdist"):
        patch.setattr(os, "pwrite", fail)
        manager.save_fast(3)
        manager.wait()
        if comm.rank > 0:
            patch.setattr(manager.checkpoint, "collect", lambda gathered: pytest.fail("nobody takes the state"))
        manager.save_fast(4)
    assert caplog.text.count("continues without copies in memory on this node") == 1
    save(run, manager, 5, is_fast=False)
    run.attempt().restore_or_initialize()
    assert (run.values == 5).all()


def test_metrics_that_cannot_be_made_durable_end_no_copies_and_no_saves(comm, shared_path, monkeypatch, caplog):
    metrics = hpcdist.MetricsFile(shared_path / "metrics.jsonl")
    checkpoint = hpcdist.Checkpoint(metrics=metrics)
    manager = hpcdist.CheckpointManager(checkpoint, shared_path / "disk", fast_directory=shared_path / "memory")
    metrics.write(1, loss=0.5)
    manager.save_fast(1)
    manager.wait()

    sync = os.fsync

    def fail(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2].lstrip(".").startswith("metrics.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        metrics.write(2, loss=0.25)
        manager.save_fast(2)
        manager.wait()
        assert "continues without copies" not in caplog.text
        assert manager.save(3).endswith("step-00000003-0001.h5")
    assert (metrics.retries.failure is not None) == (comm.rank == 0)
    assert ("Input/output error" in caplog.text) == (comm.rank == 0)
    metrics.write(4, loss=0.125)
    manager.save(4)
    assert metrics.retries.failure is None


@pytest.mark.parametrize("content", [b"x/../.. y", b"ab\xffcd", b""], ids=["a path", "no text", "empty"])
def test_the_name_of_a_run_that_is_none_is_refused_on_all_ranks(comm, shared_path, content):
    (shared_path / "disk").mkdir(exist_ok=True)
    (shared_path / "disk" / "run-id").write_bytes(content)
    comm.Barrier()
    checkpoint = hpcdist.Checkpoint(x=np.zeros(1))
    manager = hpcdist.CheckpointManager(checkpoint, shared_path / "disk", fast_directory=shared_path)
    with pytest.raises(CheckpointError, match="run-id"):
        manager.restore_or_initialize()


def test_the_memory_is_given_back_at_the_end(run):
    manager = run.attempt()
    manager.restore_or_initialize()
    save(run, manager, 3, is_fast=True)
    assert run.files()
    manager.end_attempt()
    assert not list(run.memory.iterdir())


def test_nodes_that_share_their_memory_give_it_back_without_a_word(comm, shared_path, monkeypatch, caplog):
    monkeypatch.setattr(make_world(), "node_comm", MPI.COMM_SELF)
    manager = hpcdist.CheckpointManager(
        hpcdist.Checkpoint(values=np.zeros(9)), shared_path / "checkpoints", fast_directory=shared_path / "shared"
    )
    manager.save(1)
    manager.end_attempt()
    comm.Barrier()
    assert list((shared_path / "shared").iterdir()) == []
    assert "continues without copies" not in caplog.text


def test_a_copy_that_killed_two_attempts_is_stepped_over(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = run.attempt()
    first.restore_or_initialize()
    save(run, first, 5, is_fast=False)
    save(run, first, 7, is_fast=True)
    for tier in ("memory", "disk"):  # the first one has written it to the disk
        monkeypatch.setenv("SLURM_STEP_NODELIST", tier)  # a restart on another node of the job
        dies = run.attempt()
        path = dies.restore_or_initialize()
        assert "step-00000007-" in path
        assert ("checkpoints" in path) == (tier == "disk")
        dies.wait()
    assert run.attempt().restore_or_initialize().endswith("step-00000005-0001.h5")


def test_what_was_restored_from_memory_goes_to_the_disk_before_the_memory_goes(run, comm):
    """A job that died at step 7, and is asked to stop, or ends, right after it went on from there."""
    first = run.attempt()
    first.restore_or_initialize()
    save(run, first, 5, is_fast=False)
    save(run, first, 7, is_fast=True)
    second = run.attempt()
    assert second.restore_or_initialize().endswith("step-00000007-0001.h5")
    second.end_attempt()
    assert not run.files()
    assert second.latest_path == hpcdist.latest_checkpoint(run.disk)
    third = run.attempt()
    assert "checkpoints" in third.restore_or_initialize()
    assert (run.values == 7).all()


def test_an_attempt_that_came_further_in_memory_was_not_in_vain(run, comm):
    first = run.attempt()
    first.restore_or_initialize()
    for step in (10, 20, 30, 40, 50):
        assert len(without_progress(first.ledger.attempts())) == 1
        save(run, first, step, is_fast=True)
        first = run.attempt()
        first.restore_or_initialize()
        first.wait()
    died_at_once = run.attempt()
    died_at_once.restore_or_initialize()
    assert len(without_progress(died_at_once.ledger.attempts())) == 2


def test_the_memory_of_a_later_attempt_is_left_alone(run):
    first = run.attempt()
    first.begin_attempt()
    second = run.attempt()
    save(run, second, 3, is_fast=True)
    first.forget_copies()
    assert run.files() == ["step-00000003-0002.h5"]
