"""Metrics of torchmetrics over all replicas: as of all rows in one process, saved and restored on other ranks."""

import gc
import logging

import pytest
import torch
import torchmetrics
from torchmetrics import classification, regression

import hpcdist
from hpcdist import metrics
from hpcdist.errors import CheckpointMismatch, DesyncError, UsageError

pytestmark = pytest.mark.mpi

N_ROWS = 13
N_CLASSES = 4
SCORES = torch.rand(N_ROWS, N_CLASSES, generator=torch.Generator().manual_seed(3)).softmax(-1)
CLASSES = torch.arange(N_ROWS) * 7 % N_CLASSES

METRICS = {
    "sums": lambda: classification.MulticlassF1Score(N_CLASSES, average="macro"),
    "counts at thresholds": lambda: classification.MulticlassAUROC(N_CLASSES, thresholds=20),
    "lists of all rows": lambda: classification.MulticlassAUROC(N_CLASSES, thresholds=None),
    "moments that only compute combines": lambda: regression.PearsonCorrCoef(),
    "a metric in a metric": lambda: torchmetrics.wrappers.ClasswiseWrapper(
        classification.MulticlassRecall(N_CLASSES, average=None)
    ),
    "the largest": lambda: torchmetrics.MaxMetric(),
}


def rows_for(kind, first, last):
    """Return the arguments of `update` for some rows."""
    if kind == "the largest":
        return (SCORES[first:last].flatten(),)
    if kind.startswith("moments"):
        return SCORES[first:last, 0], SCORES[first:last, 1]
    return SCORES[first:last], CLASSES[first:last]


def expected(kind):
    metric = METRICS[kind]()
    metric.update(*rows_for(kind, 0, N_ROWS))
    return metric.compute()


def update_all(kind, strategy, metric):
    """Give each replica its part of two batches; there may be replicas without rows."""

    def step(bounds):
        if bounds[0] < bounds[1]:
            metric.update_state(*rows_for(kind, *bounds))

    n = strategy.num_replicas_in_sync
    for start, stop in ((0, 5), (5, N_ROWS)):
        size = -(-(stop - start) // n)
        bounds = [(min(start + r * size, stop), min(start + (r + 1) * size, stop)) for r in range(n)]
        strategy.run(
            step,
            args=(
                strategy.experimental_distribute_values_from_function(
                    lambda context, bounds=bounds: torch.tensor(bounds[context.replica_id_in_sync_group])
                ),
            ),
        )


@pytest.mark.feature("training.metric-averaging")
@pytest.mark.parametrize("n_replicas", [None, 5])
@pytest.mark.parametrize("kind", METRICS)
def test_it_is_that_of_all_rows(comm, kind, n_replicas):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas)
    with strategy.scope():
        metric = metrics.TorchMetric(METRICS[kind]())
    for _ in range(2):  # the second time, after a reset
        metric.reset_state()
        update_all(kind, strategy, metric)
        torch.testing.assert_close(metric.result(), expected(kind))
    torch.testing.assert_close(metric.result(), expected(kind))
    assert len(set(comm.allgather(str(metric.result())))) == 1


@pytest.mark.parametrize("kind", [kind for kind in METRICS if not kind.startswith("moments")])
def test_a_restore_goes_on(comm, shared_path, kind):
    """On as many ranks, and on one alone that gets the states of all."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        metric = metrics.TorchMetric(METRICS[kind]())
        restored = metrics.TorchMetric(METRICS[kind]())
    update_all(kind, strategy, metric)
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(metric=metric, strategy=strategy), shared_path)
    manager.save(1)
    manager.wait()
    hpcdist.Checkpoint(metric=restored, strategy=strategy).read(hpcdist.latest_checkpoint(shared_path))
    torch.testing.assert_close(restored.result(), expected(kind))
    alone = metrics.TorchMetric(METRICS[kind]())
    alone.load_state_dict(metric.state_dict())
    torch.testing.assert_close(alone.result(), expected(kind))


def test_what_only_compute_combines_is_restored_on_as_many_ranks(comm):
    kind = "moments that only compute combines"
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        metric = metrics.TorchMetric(METRICS[kind]())
        restored = metrics.TorchMetric(METRICS[kind]())
    update_all(kind, strategy, metric)
    state = metric.state_dict()
    restored.load_state_dict(state)
    torch.testing.assert_close(restored.result(), expected(kind))
    alone = metrics.TorchMetric(METRICS[kind]())
    if comm.size == 1:
        alone.load_state_dict(state)
        return
    with pytest.raises(CheckpointMismatch, match=f"expected {comm.size} ranks or more, as at the save, for state"):
        alone.load_state_dict(state)


def test_metrics_read_in_another_order_on_a_rank_are_refused_on_all(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        sum_metrics = [metrics.TorchMetric(torchmetrics.SumMetric()), metrics.TorchMetric(torchmetrics.SumMetric())]
    for metric in sum_metrics:
        metric.update_state(torch.tensor(1.0))
    if comm.size == 1:
        assert sum_metrics[0].result() == 1
        return
    with pytest.raises(DesyncError, match="result.*metric"):
        sum_metrics[comm.rank == 1].result()


def test_what_it_cannot_take_is_refused(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    for wrong in (torchmetrics.MetricCollection([torchmetrics.SumMetric()]), torch.nn.Linear(1, 1)):
        with pytest.raises(UsageError, match=r"torchmetrics.Metric"):
            metrics.TorchMetric(wrong)
    with strategy.scope():
        metric = metrics.TorchMetric(torchmetrics.SumMetric(), name="total")
    with pytest.raises(UsageError, match=r"strategy.run.*'total'"):
        strategy.run(metric.result)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_metric_that_stays_local_is_warned_of(comm, caplog, is_wrapped):
    gc.collect()  # of other tests
    metric = classification.MulticlassF1Score(N_CLASSES)
    wrapped = metrics.TorchMetric(metric) if is_wrapped else None
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        model(torch.ones(1, 2) * comm.rank)
    lines = [message for message in caplog.messages if "TorchMetric(metric)" in message]
    is_warned = comm.size > 1 and comm.rank == 0 and not is_wrapped
    assert any("MulticlassF1Score" in line for line in lines) == is_warned
    assert wrapped is None or wrapped.name == "MulticlassF1Score"
