"""Losses scaled so that sums over the replicas are those of one process."""

import gc

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import UsageError

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[None, 4])
def strategy(request):
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=request.param)


def total(strategy, function):
    """Return the sum over all replicas of what a function returns."""
    return float(strategy.reduce("sum", strategy.run(function), axis=None))


@pytest.mark.feature("tf.scale-regularization-loss", "semantics.loss-scaling")
@pytest.mark.parametrize("loss", [torch.tensor([[1.0, 2.0], [3.0, 0.5]]), np.array([2.5, 4.0]), torch.tensor(6.5), 6.5])
def test_parts_of_a_regularization_loss_add_up_to_it(strategy, loss):
    assert total(strategy, lambda: hpcdist.scale_regularization_loss(loss)) == pytest.approx(6.5)
    with strategy.scope():
        assert float(hpcdist.scale_regularization_loss(loss)) == pytest.approx(6.5 / strategy.num_replicas_in_sync)


def test_a_regularization_loss_outside_all_strategies_must_be_unambiguous(comm):
    strategies = [hpcdist.MultiWorkerMirroredStrategy(num_replicas=comm.size + more) for more in (0, 1)]
    counts = {strategy.num_replicas_in_sync for strategy in strategies}
    assert len(counts) == 2
    with pytest.raises(ValueError, match=r"scale_regularization_loss.*number.*replicas"):
        hpcdist.scale_regularization_loss(1.0)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_strategy_that_waits_for_the_garbage_collector_has_no_say_in_a_loss(is_frozen):
    gc.collect()
    averaging = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    gc.disable()
    try:
        circle = [hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")]
        circle.append(circle)
        if is_frozen:
            gc.freeze()
        del circle
        assert float(hpcdist.scale_regularization_loss(6.0)) == 6.0
    finally:
        gc.enable()
    assert averaging.is_averaging


def test_a_regularization_loss_of_strategies_that_average_and_that_sum_is_refused(comm):
    averaging = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    assert float(hpcdist.scale_regularization_loss(6.0)) == 6.0
    summing = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    with pytest.raises(UsageError, match=r"gradient_op.*2.*1"):
        hpcdist.scale_regularization_loss(6.0)
    with averaging.scope():
        assert float(hpcdist.scale_regularization_loss(6.0)) == 6.0
    with summing.scope():
        assert float(hpcdist.scale_regularization_loss(6.0)) == 6.0 / comm.size


@pytest.mark.feature("tf.compute-average-loss", "tf.weights-scale-do", "semantics.average-loss")
@pytest.mark.parametrize(
    ("shape", "weights", "expected"),
    [
        ((2,), [0.5, 2.0], 1 * 0.5 + 2 * 2.0),
        ((2,), [[0.5], [2.0]], 1 * 0.5 + 2 * 2.0),
        ((2, 2), [0.5, 2.0], (1 + 2) * 0.5 + (3 + 4) * 2.0),
        ((2, 2), [[0.5], [2.0]], (1 + 2) * 0.5 + (3 + 4) * 2.0),
        ((2, 2), [[1.0, 0.0], [0.0, 2.0]], 1 + 4 * 2.0),
        ((2, 2), 3.0, 10 * 3.0),
    ],
)
def test_weights_of_an_average_loss(strategy, shape, weights, expected):
    """One weight for each row, or for each loss; none enters the divisor."""
    losses = torch.arange(1.0, 1 + np.prod(shape)).view(shape)
    if isinstance(weights, list):
        sample_weights = torch.tensor(weights)
    else:
        sample_weights = weights
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        assert float(hpcdist.compute_average_loss(losses, sample_weights)) == pytest.approx(expected / (2 * n))
    total_loss = total(strategy, lambda: hpcdist.compute_average_loss(losses.numpy(), np.asarray(sample_weights), 5))
    assert total_loss == pytest.approx(n * expected / 5)


@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_what_does_not_fit_a_loss_is_a_usage_error(strategy, kind):
    with strategy.scope():
        with pytest.raises(UsageError, match=r"sample_weight.*3.*7"):
            hpcdist.compute_average_loss(kind(3), sample_weight=kind(7), global_batch_size=3)
        with pytest.raises(UsageError, match="global_batch_size"):
            hpcdist.compute_average_loss(kind(3), global_batch_size=np.array([4, 4]))
