"""Paths are those of the moment at which they are given, and a folder is the same one by all its names."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.callbacks import BackupAndRestore, CSVLogger, ModelCheckpoint, TensorBoard
from hpcdist.errors import UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.usefixtures("no_handler_left")]


@pytest.fixture
def moving(shared_path, comm, monkeypatch):
    """Return a call that lets each rank change to a folder of its own, after a start in the shared one."""
    monkeypatch.chdir(shared_path)

    def move():
        folder = shared_path / f"elsewhere-{comm.rank}"
        folder.mkdir()
        os.chdir(folder)

    return move


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def regression(strategy):
    with strategy.scope():
        model = hpcdist.Model(torch.nn.Linear(3, 1))
        model.compile("sgd", "mse")
    return model


ROWS = np.arange(36, dtype=np.float32).reshape(12, 3) / 36


def test_a_relative_run_folder_stays_where_it_was(shared_path, comm, moving):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = strategy.experimental_distribute_dataset(
        hpcdist.Dataset.from_tensor_slices(torch.from_numpy(ROWS)).batch(6)
    )
    records = hpcdist.MetricsFile("run/metrics.jsonl")
    checkpoint = hpcdist.Checkpoint(model=net, optimizer=optimizer, data=batches, metrics=records, strategy=strategy)
    manager = hpcdist.CheckpointManager(checkpoint, "run/checkpoints", fast_directory="memory")
    handler = hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=1)
    moving()
    with handler:
        for x in batches:
            optimizer.zero_grad()
            hpcdist.compute_average_loss(net(x).square().sum(1), global_batch_size=6).backward()
            optimizer.step()
            records.write(handler.step, loss=1.0)
    assert Path(handler.latest_path).is_absolute()
    checkpoint.write("mine.h5")
    comm.Barrier()
    assert (shared_path / "elsewhere-0" / "mine.h5").exists(), "given after the change"
    written = [name for name in files_below(shared_path) if name.startswith("elsewhere")]
    assert written == ["elsewhere-0/mine.h5"]
    assert (shared_path / "run" / "metrics.jsonl").read_text().count("loss") == 2
    assert (shared_path / "run" / "decision.json").exists()


def test_callbacks_and_data_stay_where_they_were(shared_path, comm, moving):
    if comm.rank == 0:
        with h5py.File(shared_path / "rows.h5", "w") as file:
            file["x"] = ROWS
    comm.Barrier()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    model = regression(strategy)
    callbacks = [
        CSVLogger("log.csv"),
        ModelCheckpoint("models/m-{epoch}.h5"),
        TensorBoard("events"),
        BackupAndRestore("run", delete_checkpoint=False),
    ]
    dataset = hpcdist.Dataset.from_hdf5("rows.h5", "x").cache("cached")
    dataset = dataset.map(lambda x: (x, x[:1])).batch(6)
    moving()
    model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0)
    comm.Barrier()
    written = files_below(shared_path)
    assert [name for name in written if name.startswith("elsewhere")] == []
    assert {"log.csv", "models/m-1.h5", "models/m-2.h5", "run/decision.json"} <= set(written)
    assert any(name.startswith("cached.") for name in written)


def as_is(folder):
    return folder


def with_dots(folder):
    return folder / ".." / ".." / folder.parent.name / folder.name


def by_a_link(folder):
    link = folder.with_name("link")
    if not link.is_symlink():
        link.symlink_to(folder.name)
    return link


def relative(folder):
    return os.path.relpath(folder)


@pytest.mark.parametrize("other_name", [as_is, with_dots, by_a_link, relative])
def test_two_fits_of_one_folder_by_any_name_are_refused(shared_path, comm, other_name):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    folder = shared_path / "runs" / "a"
    rows = (ROWS, ROWS[:, :1])
    regression(strategy).fit(*rows, epochs=1, callbacks=BackupAndRestore(folder), verbose=0)
    comm.Barrier()
    name = other_name(folder) if comm.rank == 0 else "whatever"  # paths of other ranks do not count
    with pytest.raises(UsageError, match=r"BackupAndRestore.*runs/a"):
        regression(strategy).fit(*rows, epochs=1, callbacks=BackupAndRestore(name), verbose=0)
