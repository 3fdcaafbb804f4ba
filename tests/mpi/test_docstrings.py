"""The examples in the docstrings of the strategies are run as they stand there."""

import doctest
import importlib.util

import pytest
import torch

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
