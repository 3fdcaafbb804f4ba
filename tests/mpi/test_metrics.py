"""Metrics over all replicas: as of all rows in one process, for parts of any length, on any number of ranks."""

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist import metrics

pytestmark = pytest.mark.mpi

N_ROWS, N_CLASSES = 11, 4
LOGITS = torch.randn(N_ROWS, N_CLASSES, generator=torch.Generator().manual_seed(3))
CLASSES = torch.arange(N_ROWS) % N_CLASSES
WEIGHTS = torch.linspace(0.1, 2.0, N_ROWS)


@pytest.fixture(params=[None, 4, 7])
def strategy(request):
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=request.param)


def make(strategy, kind, **options):
    with strategy.scope():
        return kind(**options)


def own_rows(*tensors):
    """Return this replica's part: of very different lengths, of the first replica none."""
    replica = hpcdist.get_replica_context()
    n, number = replica.num_replicas_in_sync, replica.replica_id_in_sync_group
    bounds = [N_ROWS * (k * k) // (n * n) for k in range(n + 1)] if n > 1 else [0, N_ROWS]
    return [None if tensor is None else tensor[bounds[number] : bounds[number + 1]] for tensor in tensors]


def update(strategy, metric, *tensors):
    strategy.run(lambda: metric.update_state(*own_rows(*tensors)))


def in_one_process(kind, *tensors, **options):
    metric = kind(**options)
    metric.update_state(*tensors)
    return float(metric.result())


ONE_HOT = torch.eye(N_CLASSES)[CLASSES]
CASES = [
    (metrics.Mean, (LOGITS[:, 0],), LOGITS[:, 0].double().mean()),
    (metrics.Sum, (LOGITS,), LOGITS.double().sum()),
    (metrics.Accuracy, (CLASSES, LOGITS.argmax(-1)), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.BinaryAccuracy, (ONE_HOT, LOGITS), ((LOGITS > 0.5) == ONE_HOT).double().mean()),
    (metrics.CategoricalAccuracy, (ONE_HOT, LOGITS), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.SparseCategoricalAccuracy, (CLASSES, LOGITS), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.MeanSquaredError, (ONE_HOT, LOGITS), (ONE_HOT - LOGITS).double().square().mean()),
    (metrics.MeanAbsoluteError, (CLASSES, LOGITS[:, 1]), (CLASSES - LOGITS[:, 1]).double().abs().mean()),
]


@pytest.mark.parametrize(("kind", "tensors", "expected"), CASES)
def test_it_is_that_of_all_rows(strategy, comm, kind, tensors, expected):
    metric = make(strategy, kind)
    update(strategy, metric, *tensors)
    result = metric.result()
    assert result.dtype is torch.float64
    assert float(result) == pytest.approx(float(expected), rel=1e-6)
    assert len(set(comm.allgather(float(result)))) == 1
    assert float(result) == pytest.approx(in_one_process(kind, *tensors), rel=1e-13)


@pytest.mark.parametrize(("kind", "tensors", "expected"), CASES)
def test_weights(strategy, kind, tensors, expected):
    metric = make(strategy, kind)
    update(strategy, metric, *tensors, WEIGHTS)
    assert float(metric.result()) == pytest.approx(in_one_process(kind, *tensors, WEIGHTS), rel=1e-13)
    once, twice = make(strategy, kind), make(strategy, kind)
    update(strategy, once, *tensors, (CLASSES == 2).float())
    kept = [tensor[CLASSES == 2] for tensor in tensors]
    assert float(once.result()) == pytest.approx(in_one_process(kind, *kept), rel=1e-13)
    strategy.run(lambda: twice.update_state(*own_rows(*tensors), sample_weight=2.0))
    assert float(twice.result()) == pytest.approx(float(expected) * (2 if kind is metrics.Sum else 1), rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k(strategy, k):
    among = (LOGITS.topk(k).indices == CLASSES[:, None]).any(-1).double().mean()
    for kind, truth in (
        (metrics.SparseTopKCategoricalAccuracy, CLASSES),
        (metrics.SparseTopKCategoricalAccuracy, CLASSES[:, None]),
        (metrics.TopKCategoricalAccuracy, ONE_HOT),
    ):
        metric = make(strategy, kind, k=k)
        update(strategy, metric, truth, LOGITS)
        assert float(metric.result()) == pytest.approx(float(among))
    assert in_one_process(metrics.SparseTopKCategoricalAccuracy, [1], [[2.0, 2.0, 2.0, 1.0]], k=1) == 1.0
    assert in_one_process(metrics.SparseTopKCategoricalAccuracy, [1], [[2.0, np.nan]], k=1) == 0.0


def test_it_adds_up_over_steps_until_it_is_reset(strategy):
    metric = make(strategy, metrics.Mean, name="loss")
    assert float(metric.result()) == 0.0
    for values in (LOGITS, LOGITS + 1):
        update(strategy, metric, values)
    assert float(metric.result()) == pytest.approx(float(LOGITS.double().mean()) + 0.5)
    metric.reset_state()
    assert float(metric.result()) == 0.0
    update(strategy, metric, torch.ones(N_ROWS))
    assert float(metric.result()) == 1.0
    strategy.run(metric.reset_states)
    assert float(metric.result()) == 0.0


def test_a_replica_sees_its_own(strategy):
    metric = make(strategy, metrics.Sum)

    def step():
        return metric(float(hpcdist.get_replica_context().replica_id_in_sync_group))

    found = [float(one) for one in strategy.experimental_local_results(strategy.run(step))]
    assert found == [float(number) for number in strategy.own_replicas]
    assert float(metric.result()) == sum(range(strategy.num_replicas_in_sync))


def test_it_has_the_same_bits_on_any_number_of_ranks():
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=7)
    metric = make(strategy, metrics.Sum)
    values = torch.tensor([1, 2.0**53, 1, 1, 2, 2, 2], dtype=torch.float64)
    strategy.run(lambda: metric.update_state(values[hpcdist.get_replica_context().replica_id_in_sync_group]))
    v = [float(one) for one in values]
    tree = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6])
    assert float(metric.result()) == tree != sum(v)


def test_small_values_are_not_lost_beside_large_ones(strategy):
    metric = make(strategy, metrics.Sum)
    strategy.run(lambda: metric.update_state([2.0**30]))
    strategy.run(lambda: metric.update_state([1.0]))
    assert float(metric.result()) == (2.0**30 + 1) * strategy.num_replicas_in_sync


@pytest.mark.parametrize("restarted", [None, 4, 9])
def test_it_comes_back_from_a_checkpoint(strategy, shared_path, restarted):
    metric = make(strategy, metrics.Mean)
    update(strategy, metric, LOGITS, WEIGHTS)
    hpcdist.CheckpointManager(hpcdist.Checkpoint(loss=metric), shared_path).save(1)
    other = hpcdist.MultiWorkerMirroredStrategy(num_replicas=restarted)
    again = make(other, metrics.Mean)
    hpcdist.CheckpointManager(hpcdist.Checkpoint(loss=again), shared_path).restore_or_initialize()
    assert float(again.result()) == pytest.approx(float(metric.result()), rel=1e-14)
    update(strategy, metric, LOGITS + 1)
    update(other, again, LOGITS + 1)
    assert float(again.result()) == pytest.approx(float(metric.result()), rel=1e-14)


def test_rows_of_which_each_has_a_weight(strategy):
    metric = make(strategy, metrics.Mean)
    strategy.run(lambda: metric.update_state(torch.ones(2, 3, 2) * torch.tensor([1.0, 3.0])[:, None, None], [1.0, 3.0]))
    assert float(metric.result()) == 2.5
    assert in_one_process(metrics.Mean, [1.0, 3.0], [[1.0], [3.0]]) == 2.5
    for weights in ([[1.0], [3.0]], [[1.0, 1, 1], [3.0, 3, 3]]):
        mean = metrics.Mean()
        mean.update_state([[1.0, 1, 1], [3.0, 3, 3]], weights)
        assert float(mean.result()) == 2.5


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (metrics.MeanSquaredError, (torch.ones(3), torch.ones(2)), r"same shape, got \(3,\) and \(2,\)"),
        (metrics.Accuracy, (torch.ones(3), torch.ones(1, 3)), "same shape"),
        (metrics.SparseCategoricalAccuracy, (torch.ones(3, 2), torch.ones(3, 2)), "one class for each row"),
        (metrics.SparseCategoricalAccuracy, (1, 1.0), "one class for each row"),
        (metrics.Mean, ([1.0, 2.0], [1.0, 2.0, 3.0]), "one weight for each value or row"),
        (metrics.Mean, ("text",), "a tensor, an array or numbers"),
    ],
)
def test_refuses_what_does_not_fit(kind, arguments, text):
    with pytest.raises(ValueError, match=text):
        kind().update_state(*arguments)


def test_rows_and_a_column_are_the_same(strategy):
    assert in_one_process(metrics.MeanSquaredError, [[1.0], [2.0]], [1.0, 4.0]) == 2.0
    assert in_one_process(metrics.BinaryAccuracy, [1, 0], [[0.7], [0.7]], threshold=0.6) == 0.5


def test_where_it_is_made_and_updated(strategy, comm):
    metric = make(strategy, metrics.Mean)
    if strategy._has_fixed_replicas:
        with pytest.raises(ValueError, match="a call inside strategy.run for"):
            metric.update_state(1.0)
    else:  # README's loop, without run
        metric.update_state(torch.full((comm.rank,), float(comm.rank)))
        n_rows = comm.size * (comm.size - 1) // 2
        expected = sum(rank * rank for rank in range(comm.size)) / max(1, n_rows)
        assert float(metric.result()) == pytest.approx(expected)
    elsewhere = metrics.Mean()
    with pytest.raises(RuntimeError, match="make it in strategy.scope"):
        strategy.run(lambda: elsewhere.update_state(1.0))


def test_half_precision(strategy):
    metric = make(strategy, metrics.SparseCategoricalAccuracy)
    update(strategy, metric, CLASSES, LOGITS.bfloat16())
    assert float(metric.result()) == pytest.approx(float((LOGITS.bfloat16().argmax(-1) == CLASSES).double().mean()))
