"""N ranks with batch b train as one rank with batch N*b; all ranks hold the same bits after every step."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import hpcdist

sys.path.insert(0, str(__file__).split("/tests/")[0] + "/jobs")
from images import load_digits
from train import MODELS

pytestmark = pytest.mark.mpi
BATCH = 50
STEPS = 12
#: Sums are taken in another order: float32 rounding, magnified by Adam, which divides by the root of tiny squares.
TOLERANCE = {"sgd": 2e-6, "adam": 2e-4}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def dataset():
    (images, labels), _ = load_digits()
    # 225 rows: every fifth batch is a short one, of 25 rows
    return hpcdist.Dataset.from_tensor_slices((images[:225], labels[:225])).shuffle(seed=3).batch(BATCH).repeat()


def part_of_the_mean(losses):
    return hpcdist.compute_average_loss(losses, global_batch_size=BATCH)


def mean(losses):
    return losses.sum() / BATCH


def train(model, batches, optimizer, reduced, after_step=lambda: None):
    for (images, labels), _ in zip(batches, range(STEPS), strict=False):
        optimizer.zero_grad()
        losses = cross_entropy(model(images), labels, reduction="none")
        reduced(losses).backward()
        optimizer.step()
        after_step()
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])


@pytest.mark.feature(
    "tf.multiworkermirroredstrategy-cluster-resolver",
    "tf.loss-carries-factor",
    "tf.short-last-batch",
    "strategies.multi-worker-mirrored-strategy",
    "gpu.without-gpus",
    "semantics.gradients-are-summed",
)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_n_ranks_train_as_one(comm, name, kind):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    torch.manual_seed(5)
    with strategy.scope():
        model = MODELS[name](8, 8)
    torch.manual_seed(5)
    alone = MODELS[name](8, 8)

    def check_bits():
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        assert len(set(comm.allgather(bits))) == 1

    batches = strategy.experimental_distribute_dataset(dataset())
    with strategy.scope():
        distributed_weights = train(model, batches, OPTIMIZERS[kind](model.parameters()), part_of_the_mean, check_bits)
    expected = train(alone, dataset(), OPTIMIZERS[kind](alone.parameters()), mean)
    assert np.abs(distributed_weights - expected).max() <= TOLERANCE[kind] * max(1.0, np.abs(expected).max())
