"""Metrics over all replicas: as of all rows in one process, for parts of any length, on any number of ranks."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy, cross_entropy

import hpcdist
from hpcdist import metrics
from hpcdist.errors import UsageError

pytestmark = pytest.mark.mpi

N_ROWS = 11
N_CLASSES = 4
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
    n = replica.num_replicas_in_sync
    number = replica.replica_id_in_sync_group
    if n > 1:
        bounds = [N_ROWS * (k * k) // (n * n) for k in range(n + 1)]
    else:
        bounds = [0, N_ROWS]
    return [None if tensor is None else tensor[bounds[number] : bounds[number + 1]] for tensor in tensors]


def update(strategy, metric, *tensors):
    strategy.run(lambda: metric.update_state(*own_rows(*tensors)))


def in_one_process(kind, *tensors, **options):
    metric = kind(**options)
    metric.update_state(*tensors)
    return float(metric.result())


ONE_HOT = torch.eye(N_CLASSES)[CLASSES]
CHANCES = LOGITS.softmax(-1)
CASES = [
    (metrics.Mean, (LOGITS[:, 0],), LOGITS[:, 0].double().mean()),
    (metrics.Sum, (LOGITS,), LOGITS.double().sum()),
    (metrics.Accuracy, (CLASSES, LOGITS.argmax(-1)), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.BinaryAccuracy, (ONE_HOT, LOGITS), ((LOGITS > 0.5) == ONE_HOT).double().mean()),
    (metrics.CategoricalAccuracy, (ONE_HOT, LOGITS), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.SparseCategoricalAccuracy, (CLASSES, LOGITS), (LOGITS.argmax(-1) == CLASSES).double().mean()),
    (metrics.MeanSquaredError, (ONE_HOT, LOGITS), (ONE_HOT - LOGITS).double().square().mean()),
    (metrics.MeanAbsoluteError, (CLASSES, LOGITS[:, 1]), (CLASSES - LOGITS[:, 1]).double().abs().mean()),
    (metrics.RootMeanSquaredError, (ONE_HOT, LOGITS), (ONE_HOT - LOGITS).double().square().mean().sqrt()),
    (metrics.BinaryCrossentropy, (ONE_HOT, CHANCES), binary_cross_entropy(CHANCES.double(), ONE_HOT.double())),
    (metrics.SparseCategoricalCrossentropy, (CLASSES, CHANCES), cross_entropy(CHANCES.double().log(), CLASSES)),
    (metrics.CategoricalCrossentropy, (ONE_HOT, CHANCES), cross_entropy(CHANCES.double().log(), CLASSES)),
    (metrics.Precision, (ONE_HOT, CHANCES), ((CHANCES > 0.5) * ONE_HOT).sum() / (CHANCES > 0.5).sum()),
    (metrics.Recall, (ONE_HOT, CHANCES), ((CHANCES > 0.5) * ONE_HOT).sum() / ONE_HOT.sum()),
    (metrics.AUC, (ONE_HOT, CHANCES), torch.tensor(roc_auc_score(ONE_HOT.reshape(-1), CHANCES.reshape(-1)))),
]


#: Examples of the pages of tf.keras.metrics: arguments, truths, predictions, weights, result.
PAGES = [
    (metrics.AUC(num_thresholds=3), [0, 0, 1, 1], [0, 0.5, 0.3, 0.9], None, 0.75),
    (metrics.AUC(num_thresholds=3), [0, 0, 1, 1], [0, 0.5, 0.3, 0.9], [1, 0, 0, 1], 1.0),
    (metrics.Precision(), [0, 1, 1, 1], [1, 0, 1, 1], None, 2 / 3),
    (metrics.Precision(), [0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0], 1.0),
    (metrics.Recall(), [0, 1, 1, 1], [1, 0, 1, 1], None, 2 / 3),
    (metrics.Recall(), [0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0], 1.0),
    (metrics.BinaryCrossentropy(), [[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]], None, 0.81492424),
    (metrics.BinaryCrossentropy(), [[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]], [1, 0], 0.9162905),
    (metrics.CategoricalCrossentropy(), [[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]], None, 1.1769392),
    (
        metrics.CategoricalCrossentropy(),
        [[0, 1, 0], [0, 0, 1]],
        [[0.05, 0.95, 0], [0.1, 0.8, 0.1]],
        [0.3, 0.7],
        1.6271976,
    ),
    (metrics.SparseCategoricalCrossentropy(), [1, 2], [[0.05, 0.95, 0], [0.1, 0.8, 0.1]], None, 1.1769392),
    (metrics.RootMeanSquaredError(), [[0, 1], [0, 0]], [[1, 1], [0, 0]], None, 0.5),
    (metrics.RootMeanSquaredError(), [[0, 1], [0, 0]], [[1, 1], [0, 0]], [1, 0], 0.70710677),
]


@pytest.mark.parametrize(("metric", "truths", "predictions", "weights", "expected"), PAGES)
def test_examples_of_the_pages(metric, truths, predictions, weights, expected):
    metric.reset_state()
    metric.update_state(truths, predictions, weights)
    assert float(metric.result()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_of_logits(smoothing):
    options = {"from_logits": True, "label_smoothing": smoothing}
    binary = metrics.BinaryCrossentropy(**options)
    one_hot = metrics.CategoricalCrossentropy(**options)
    binary.update_state(ONE_HOT, LOGITS)
    one_hot.update_state(ONE_HOT, LOGITS)
    moved = (ONE_HOT * (1 - smoothing) + smoothing / 2).double()
    assert float(binary.result()) == pytest.approx(float(binary_cross_entropy(LOGITS.double().sigmoid(), moved)))
    expected = cross_entropy(LOGITS.double(), CLASSES, label_smoothing=smoothing)
    assert float(one_hot.result()) == pytest.approx(float(expected))
    if not smoothing:
        sparse = metrics.SparseCategoricalCrossentropy(from_logits=True)
        sparse.update_state(CLASSES[:, None], LOGITS)
        assert float(sparse.result()) == pytest.approx(float(expected))


@pytest.mark.parametrize("method", ["interpolation", "minoring", "majoring"])
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_areas_by_their_definition(curve, method):
    """At 21 thresholds, counted one by one."""
    generator = np.random.default_rng(5)
    truth = generator.integers(0, 2, 300) == 1
    predictions = np.round(generator.random(300), 3)
    metric = metrics.AUC(21, curve, method)
    metric.update_state(truth, predictions)
    points = [-1e-7, *[(index + 1) / 20 for index in range(19)], 1 + 1e-7]
    counts = [((predictions > at) & truth, (predictions > at) & ~truth) for at in points]
    recalls = [right.sum() / truth.sum() for right, _ in counts]
    if curve == "ROC":
        xs = [wrong.sum() / (~truth).sum() for _, wrong in counts]
        ys = recalls
    else:
        xs = recalls
        ys = [right.sum() / max(1, right.sum() + wrong.sum()) for right, wrong in counts]
    join = {
        "interpolation": lambda start_height, end_height: (start_height + end_height) / 2,
        "minoring": min,
        "majoring": max,
    }[method]
    area = sum((xs[n] - xs[n + 1]) * join(ys[n], ys[n + 1]) for n in range(20))
    if (curve, method) == ("PR", "interpolation"):  # both counts are linear between two thresholds
        area = sum(area_between(*counts[n + 1], *counts[n]) for n in range(20)) / truth.sum()
    assert float(metric.result()) == pytest.approx(area, abs=1e-5)


def area_between(right, wrong, more_right, more_wrong):
    """Return the integral of precision over true positives, by 2,000 trapezoids."""
    first = right.sum()
    last = more_right.sum()
    positives = np.linspace(first + wrong.sum(), last + more_wrong.sum(), 2001)
    trues = np.linspace(first, last, 2001)
    if not positives[0]:  # precision is the same all the way
        return (last - first) * last / max(1, positives[-1])
    return np.trapezoid(trues / positives, trues)


def test_several_thresholds_and_one_class(strategy):
    metric = make(strategy, metrics.Recall, thresholds=[0.1, 0.5], class_id=1)
    update(strategy, metric, ONE_HOT, CHANCES)
    truth = ONE_HOT[:, 1] > 0
    scores = CHANCES[:, 1]
    expected = [float((scores[truth] > at).double().mean()) for at in (0.1, 0.5)]
    assert metric.result().tolist() == pytest.approx(expected)


def test_predictions_that_are_no_probabilities_are_refused():
    with pytest.raises(UsageError, match="predictions.*0.*1.*1.*2"):
        metrics.AUC().update_state([0, 1], [-1.0, 2.0])
    with pytest.raises(UsageError, match="AUC.*ROC.*PR"):
        metrics.AUC(curve="DET")
    assert float(metrics.Precision().result()) == 0
    assert float(metrics.AUC().result()) == 0


@pytest.mark.feature(
    "tf.read-metrics-such",
    "training.metric-averaging",
    "evaluation.multi-node-evaluator",
    "observability.metrics-across-ranks",
    "complaints.metrics-without-padding",
)
@pytest.mark.parametrize(("kind", "tensors", "expected"), CASES)
def test_it_is_that_of_all_rows(strategy, comm, kind, tensors, expected):
    metric = make(strategy, kind)
    update(strategy, metric, *tensors)
    result = metric.result()
    assert result.dtype is torch.float64
    assert float(result) == pytest.approx(float(expected), rel=1e-6)
    assert len(set(comm.allgather(float(result)))) == 1
    assert float(result) == pytest.approx(in_one_process(kind, *tensors), rel=1e-13)


@pytest.mark.feature("training.metric-averaging", "observability.metrics-across-ranks")
@pytest.mark.parametrize(("kind", "tensors", "expected"), CASES)
def test_weights(strategy, kind, tensors, expected):
    metric = make(strategy, kind)
    update(strategy, metric, *tensors, WEIGHTS)
    assert float(metric.result()) == pytest.approx(in_one_process(kind, *tensors, WEIGHTS), rel=1e-13)
    once = make(strategy, kind)
    twice = make(strategy, kind)
    update(strategy, once, *tensors, (CLASSES == 2).float())
    selected_tensors = [tensor[CLASSES == 2] for tensor in tensors]
    assert float(once.result()) == pytest.approx(in_one_process(kind, *selected_tensors), rel=1e-13)
    strategy.run(lambda: twice.update_state(*own_rows(*tensors), sample_weight=2.0))
    if kind is metrics.Sum:
        factor = 2
    else:
        factor = 1
    assert float(twice.result()) == pytest.approx(float(expected) * factor, rel=1e-6)


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


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_not_taken_for_another_one(label):
    predictions = [[0.1, 0.2, 0.7]]
    assert in_one_process(metrics.SparseTopKCategoricalAccuracy, [label], predictions, k=1) == 0.0
    with pytest.raises(UsageError, match=f"expected classes from 0 to 2, got .*{label}"):
        in_one_process(metrics.SparseCategoricalCrossentropy, [label], predictions)


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


@pytest.mark.feature("tf.read-metrics-such")
def test_a_replica_sees_its_own(strategy):
    metric = make(strategy, metrics.Sum)

    def step():
        return metric(float(hpcdist.get_replica_context().replica_id_in_sync_group))

    replica_results = list(map(float, strategy.experimental_local_results(strategy.run(step))))
    assert replica_results == list(map(float, strategy.own_replicas))
    assert float(metric.result()) == sum(range(strategy.num_replicas_in_sync))


@pytest.mark.feature("observability.metrics-across-ranks")
def test_it_has_the_same_bits_on_any_number_of_ranks():
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=7)
    metric = make(strategy, metrics.Sum)
    values = torch.tensor([1, 2.0**53, 1, 1, 2, 2, 2], dtype=torch.float64)
    strategy.run(lambda: metric.update_state(values[hpcdist.get_replica_context().replica_id_in_sync_group]))
    v = list(map(float, values))
    tree = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6])
    assert float(metric.result()) == tree != sum(v)


@pytest.mark.feature("training.metric-averaging", "complaints.metrics-without-padding")
def test_small_values_are_not_lost_beside_large_ones(strategy):
    metric = make(strategy, metrics.Sum)
    strategy.run(lambda: metric.update_state([2.0**30]))
    strategy.run(lambda: metric.update_state([1.0]))
    assert float(metric.result()) == (2.0**30 + 1) * strategy.num_replicas_in_sync


@pytest.mark.feature("tf.save-works-outside", "checkpoints.exact-resume")
@pytest.mark.parametrize("restarted", [None, 4, 9])
def test_it_comes_back_from_a_checkpoint(strategy, shared_path, restarted):
    metric = make(strategy, metrics.Mean)
    update(strategy, metric, LOGITS, WEIGHTS)
    hpcdist.CheckpointManager(hpcdist.Checkpoint(loss=metric), shared_path).save(1)
    restarted_strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=restarted)
    restored_metric = make(restarted_strategy, metrics.Mean)
    hpcdist.CheckpointManager(hpcdist.Checkpoint(loss=restored_metric), shared_path).restore_or_initialize()
    assert float(restored_metric.result()) == pytest.approx(float(metric.result()), rel=1e-14)
    update(strategy, metric, LOGITS + 1)
    update(restarted_strategy, restored_metric, LOGITS + 1)
    assert float(restored_metric.result()) == pytest.approx(float(metric.result()), rel=1e-14)


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
    if strategy.replicas.is_fixed:
        with pytest.raises(ValueError, match="strategy.run"):
            metric.update_state(1.0)
    else:  # README's loop, without run
        metric.update_state(torch.full((comm.rank,), float(comm.rank)))
        n_rows = comm.size * (comm.size - 1) // 2
        expected = sum(rank * rank for rank in range(comm.size)) / max(1, n_rows)
        assert float(metric.result()) == pytest.approx(expected)
    elsewhere = metrics.Mean()
    with pytest.raises(RuntimeError, match="strategy.scope"):
        strategy.run(lambda: elsewhere.update_state(1.0))


def test_half_precision(strategy):
    metric = make(strategy, metrics.SparseCategoricalAccuracy)
    update(strategy, metric, CLASSES, LOGITS.bfloat16())
    assert float(metric.result()) == pytest.approx(float((LOGITS.bfloat16().argmax(-1) == CLASSES).double().mean()))


def test_a_metric_made_outside_of_the_scope_is_warned_of_once(comm, caplog):
    """It counts this rank's rows alone: a plain loop printed a wrong number, and nobody noticed."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    metric = metrics.Mean()
    for _ in range(2):
        metric.update_state(torch.tensor([float(comm.rank)]))
        assert float(metric.result()) == comm.rank
    is_told = comm.size > 1 and comm.rank == 0
    assert caplog.text.count("expected Mean made in strategy.scope()") == is_told
    caplog.clear()
    inside = make(strategy, metrics.Mean)
    inside.update_state(torch.tensor([float(comm.rank)]))
    assert float(inside.result()) == pytest.approx((comm.size - 1) / 2)
    assert not caplog.text
