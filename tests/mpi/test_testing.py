"""hpcdist.testing: one test under every strategy; and the seeds and switches that tests of programs use."""

import random

import numpy as np
import pytest
import torch

import hpcdist

pytestmark = pytest.mark.mpi


@pytest.fixture(params=hpcdist.testing.STRATEGIES)
def strategy(request):
    return hpcdist.testing.STRATEGIES[request.param]()


def trained(strategy, n_steps):
    """Return the weights after some steps on 24 rows, all of them in each batch."""
    hpcdist.set_random_seed(1)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = hpcdist.Dataset.from_tensor_slices((x, x.sum(1, keepdim=True))).batch(24).repeat(n_steps)

    def step(x, y):
        optimizer.zero_grad()
        losses = (model(x) - y).square().squeeze(1)
        hpcdist.compute_average_loss(losses, global_batch_size=24).backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=batch)
    return model.weight.detach().clone()


@pytest.mark.feature("strategies.strategy-combinations")
def test_every_strategy_trains_alike(strategy):
    torch.testing.assert_close(trained(strategy, 4), trained(hpcdist.OneDeviceStrategy("cpu"), 4))


@pytest.mark.feature("strategies.strategy-combinations")
def test_every_strategy_reduces_and_gathers(strategy):
    n = strategy.num_replicas_in_sync
    numbers = strategy.run(lambda: torch.tensor([float(hpcdist.get_replica_context().replica_id_in_sync_group)]))
    assert strategy.reduce("sum", numbers, axis=None).item() == n * (n - 1) / 2
    assert strategy.gather(numbers, axis=0).tolist() == list(range(n))


@pytest.mark.feature("debugging.determinism")
def test_a_seed_is_for_all_random_numbers():
    drawn = []
    for _ in range(2):
        hpcdist.set_random_seed(1 << 40)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.feature("debugging.determinism")
def test_operations_are_deterministic_or_raise():
    try:
        hpcdist.enable_op_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic.*implementation"):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
