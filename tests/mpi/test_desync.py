import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import DesyncError
from hpcdist.resilience.desync import odd_ranks

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
    assert f"equal models and optimizers on all {comm.size} ranks, got others on rank {named};" in str(caught.value)
    assert caught.value.is_agreed
    assert caught.value.exit_code == 76


@pytest.mark.parametrize(
    ("digests", "odd"), [([1, 1, 2], [2]), ([2, 1, 1], [0]), ([1, 2], [1]), ([1, 2, 3, 3], [0, 1]), ([1, 1], [])]
)
def test_who_differs(digests, odd):
    assert odd_ranks(digests) == odd
