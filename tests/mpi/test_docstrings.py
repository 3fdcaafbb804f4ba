"""The examples in the docstrings of what users meet first are run as they stand there."""

import doctest
import importlib.util

import pytest
import torch
import torchmetrics
from torch import nn

import hpcdist

pytestmark = pytest.mark.mpi

STRATEGIES = (
    hpcdist.MultiWorkerMirroredStrategy,
    hpcdist.MirroredStrategy,
    hpcdist.CentralStorageStrategy,
    hpcdist.OneDeviceStrategy,
    hpcdist.TPUStrategy,
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_example(strategy):
    if strategy is hpcdist.TPUStrategy and not importlib.util.find_spec("torch_xla"):
        pytest.skip("torch_xla is not installed")
    (example,) = doctest.DocTestFinder(recurse=False).find(strategy, globs={"hpcdist": hpcdist, "torch": torch})
    outcome = doctest.DocTestRunner().run(example, clear_globs=False)
    assert outcome.attempted == 2, "three lines, which are two statements"
    assert outcome.failed == 0
    assert isinstance(example.globs.get("model"), torch.nn.Linear)


#: What users meet first. An example has at most ten lines, and may use what `example_globals` makes.
NAMES = [
    "get_strategy",
    "set_random_seed",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "Strategy.scope",
    "Strategy.run",
    "Strategy.reduce",
    "Strategy.no_sync",
    "Strategy.experimental_distribute_dataset",
    "CommunicationOptions",
    "MPIClusterResolver",
    "Dataset",
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "SaveSchedule",
    "TerminationConfig",
    "load_checkpoint",
    "latest_checkpoint",
    "MetricsFile",
    "all_reduce",
    "all_gather",
    "broadcast",
    "Model.compile",
    "Model.fit",
    "Model.evaluate",
    "Model.predict",
    "load_model",
    "callbacks.BackupAndRestore",
    "callbacks.ModelCheckpoint",
    "callbacks.EarlyStopping",
    "losses.SparseCategoricalCrossentropy",
    "metrics.Mean",
    "metrics.SparseCategoricalAccuracy",
    "metrics.TorchMetric",
]
MAX_LINES = 10


@pytest.fixture
def example_globals():
    """Return what the examples may use, by its name."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    y = torch.randint(3, (32,), generator=generator)
    with strategy.scope():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keras_model = hpcdist.Model(nn.Sequential(nn.Linear(4, 3)))
        loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
        keras_model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    dataset = hpcdist.Dataset.from_tensor_slices((x, y)).batch(16)
    batches = strategy.experimental_distribute_dataset(dataset)
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, strategy=strategy)

    def loss_of(rows, labels):
        losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        return hpcdist.compute_average_loss(losses, global_batch_size=16)

    def train_step(rows, labels):
        optimizer.zero_grad()
        loss_of(rows, labels).backward()
        optimizer.step()

    return {**locals(), "hpcdist": hpcdist, "torch": torch, "torchmetrics": torchmetrics}


def documented(name):
    """Return the class or function of a public name."""
    item = hpcdist
    for part in name.split("."):
        item = getattr(item, part)
    return item


@pytest.mark.parametrize("name", NAMES)
def test_an_example_does_what_it_shows(example_globals, shared_path, monkeypatch, name):
    monkeypatch.chdir(shared_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(documented(name), name, globs=example_globals)
    n_lines = sum(len(part.source.splitlines()) for part in example.examples)
    assert 0 < n_lines <= MAX_LINES
    report = []
    runner = doctest.DocTestRunner(verbose=False)
    outcome = runner.run(example, clear_globs=False, out=report.append)
    assert outcome.failed == 0, "".join(report)
