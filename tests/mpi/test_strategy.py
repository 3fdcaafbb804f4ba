import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import DataError, UsageError
from hpcdist.program import owners
from hpcdist.program.model_plan import IdentitySet
from hpcdist.strategy.base import Strategy

pytestmark = pytest.mark.mpi


@pytest.fixture
def strategy():
    return hpcdist.MultiWorkerMirroredStrategy()


@pytest.mark.feature(
    "tf.multiworkermirroredstrategy-cluster-resolver",
    "strategies.multi-worker-mirrored-strategy",
    "strategies.local-results",
    "semantics.multi-worker-without-a-cluster",
)
def test_one_replica_per_rank(strategy, comm):
    assert strategy.num_replicas_in_sync == comm.size
    assert strategy.is_chief == (comm.rank == 0)
    assert strategy.cluster_resolver.task_type == "worker"


@pytest.mark.feature(
    "tf.scope-run-reduce", "tf.another-strategy-inside", "strategies.scope-run-reduce-gather", "semantics.wrong-context"
)
def test_current_strategy(strategy):
    default = hpcdist.get_strategy()
    assert type(default) is Strategy
    assert default.num_replicas_in_sync == 1
    with strategy.scope() as entered:
        assert entered is strategy
        assert hpcdist.get_strategy() is strategy
        with strategy.scope():
            assert hpcdist.get_strategy() is strategy
        with pytest.raises(RuntimeError, match="strategy.*time"), default.scope():
            pass
    assert hpcdist.get_strategy() is default
    assert strategy.run(hpcdist.get_strategy) is strategy


@pytest.mark.feature(
    "tf.scope-run-reduce",
    "tf.run-fn-args",
    "tf.replica-per-process",
    "strategies.scope-run-reduce-gather",
    "semantics.arguments-of-run",
    "semantics.results-of-run",
)
def test_run_gives_the_result_of_the_local_replica(strategy):
    assert strategy.run(lambda a, b=0: (a, b), args=(1,), kwargs={"b": 2}) == (1, 2)
    with pytest.raises(ValueError, match="args.*tuple"):
        strategy.run(lambda a: a, args=1)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert hpcdist.get_strategy().num_replicas_in_sync == 1


@pytest.mark.feature(
    "tf.scope-run-reduce",
    "tf.reduce-sum-mean",
    "tf.reduce-axis-none",
    "strategies.scope-run-reduce-gather",
    "semantics.arguments-of-reduce",
)
@pytest.mark.parametrize("op", ["sum", "SUM", hpcdist.ReduceOp.SUM])
def test_sum_over_replicas(strategy, comm, op):
    total = comm.size * (comm.size + 1) / 2
    summand = comm.rank + 1
    assert strategy.reduce(op, summand, axis=None) == total
    assert strategy.reduce(op, float(summand), axis=None) == total
    assert torch.equal(strategy.reduce(op, torch.full((2, 3), summand), axis=None), torch.full((2, 3), int(total)))
    array_total = strategy.reduce(op, np.full((2,), summand, np.float32), axis=None)
    assert array_total.dtype == np.float32
    assert array_total.tolist() == [total] * 2


def test_the_value_itself_is_left_alone(strategy):
    value = torch.ones(3)
    strategy.reduce("sum", value, axis=None)
    assert value.tolist() == [1, 1, 1]


@pytest.mark.feature(
    "tf.reduce-int-tuple", "tf.reduce-mean-over", "tf.reduce-negative-axes", "semantics.reduce-over-axes"
)
def test_mean_over_an_axis_weighs_by_rows(strategy, comm):
    rows = comm.rank * 2 + 1  # 1, 3, 5, ... rows of value rank
    value = torch.full((rows, 2), float(comm.rank))
    counts = [rank * 2 + 1 for rank in range(comm.size)]
    mean = sum(rank * n for rank, n in enumerate(counts)) / sum(counts)
    assert strategy.reduce("mean", value, axis=0).tolist() == pytest.approx([mean] * 2)
    assert float(strategy.reduce("mean", value, axis=(0, 1))) == pytest.approx(mean)
    assert float(strategy.reduce("mean", value, axis=[-2, -1])) == pytest.approx(mean)
    assert float(strategy.reduce("sum", value, axis=(0, 1))) == 2 * sum(r * n for r, n in enumerate(counts))


@pytest.mark.feature("tf.reduce-mean-over")
def test_mean_over_replicas_with_some_empty(strategy, comm):
    assert strategy.reduce("mean", comm.rank, axis=None) == (comm.size - 1) / 2
    rows = torch.ones(2 if comm.rank == 0 else 0)
    assert float(strategy.reduce("mean", rows, axis=0)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.float64])
def test_the_dtype_is_kept(strategy, comm, dtype):
    total = strategy.reduce("sum", torch.ones(2, dtype=dtype), axis=None)
    assert total.dtype is dtype
    assert total.tolist() == [comm.size] * 2


@pytest.mark.feature(
    "tf.reduce-min-max",
    "tf.reduce-valueerror-axis",
    "tf.reduce-typeerror-axis",
    "semantics.arguments-of-reduce",
    "semantics.reduce-over-axes",
)
@pytest.mark.parametrize(
    ("op", "value", "axis", "kind", "text"),
    [
        ("max", 1.0, None, ValueError, "ReduceOp.SUM or ReduceOp.MEAN"),
        ("sum", torch.ones(2), 1, ValueError, "from -1 to 0, got 1"),
        ("sum", torch.ones(2), -2, ValueError, "from -1 to 0, got -2"),
        ("sum", torch.ones(2), 0.5, TypeError, "axis as None, an int or ints"),
        ("sum", torch.ones(2), "0", TypeError, "axis as None, an int or ints"),
        ("sum", [object()], None, ValueError, "a tensor, an array or a number"),
    ],
)
def test_reduce_refuses(strategy, op, value, axis, kind, text):
    with pytest.raises(kind, match=text):
        strategy.reduce(op, value, axis=axis)
    with pytest.raises(kind, match=text):
        hpcdist.get_strategy().reduce(op, value, axis=axis)


@pytest.mark.feature("tf.reduce-axis-has", "semantics.arguments-of-reduce")
def test_reduce_must_be_given_an_axis(strategy):
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("sum", 1.0)


@pytest.mark.feature("tf.gather-least-dimension", "semantics.gather-rules")
def test_gather_refuses_what_does_not_fit_on_all_ranks(strategy, comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    with pytest.raises(ValueError, match="as on rank 0, got"):
        strategy.gather(torch.ones(2, 2 + comm.rank), axis=0)
    with pytest.raises(ValueError, match=f"in the same call, got gather; axis 0 of {1 + comm.rank} here"):
        strategy.gather(torch.ones((2,) * (1 + comm.rank)), axis=0)


@pytest.mark.feature("tf.gather-sparse-values", "semantics.gather-rules")
def test_sparse_values_are_refused(strategy):
    value = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match="Sparse layout"):
        strategy.gather(value, axis=0)
    with pytest.raises(TypeError, match="Sparse layout"):
        strategy.run(lambda: hpcdist.get_replica_context().all_gather(value, axis=0))


@pytest.mark.feature("tf.reduce-nests-accepted", "semantics.reduce-of-nests")
@pytest.mark.parametrize("nest", [[1.0, 2.0], (np.ones(2), np.ones(2)), {"a": 1.0}])
def test_nests_are_reduced_over_replicas_only(strategy, nest, comm):
    total = strategy.reduce("sum", nest, axis=None)
    assert type(total) is type(nest)
    assert np.sum(list(total.values()) if isinstance(total, dict) else total) == comm.size * np.sum(
        list(nest.values()) if isinstance(nest, dict) else nest
    )
    with pytest.raises(ValueError, match="reduce.*value"):
        strategy.reduce("sum", nest, axis=0)


@pytest.mark.feature("debugging.finite-and-shape-checks")
def test_shapes_that_differ_are_an_error_on_all_ranks(strategy, comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    with pytest.raises(UsageError, match="shape.*replica"):
        strategy.reduce("sum", torch.ones(1 + comm.rank % 2), axis=None)


@pytest.mark.feature("tf.calls-wrong-context")
def test_reduce_belongs_outside_run(strategy):
    with pytest.raises(RuntimeError, match="outside strategy.run"):
        strategy.run(lambda: strategy.reduce("sum", 1.0, axis=None))


@pytest.mark.feature("tf.default-strategy-object", "strategies.default-strategy")
def test_default_strategy_reduces_locally():
    assert hpcdist.get_strategy().reduce("mean", torch.tensor([1.0, 3.0]), axis=0).item() == 2.0


@pytest.mark.feature(
    "tf.compute-average-loss",
    "tf.global-batch-local",
    "tf.global-batch-zero",
    "tf.loss-already-reduced",
    "semantics.average-loss",
    "semantics.loss-scaling",
)
def test_average_loss(strategy, comm):
    losses = torch.arange(4.0)
    with strategy.scope():
        assert hpcdist.compute_average_loss(losses).item() == pytest.approx(6 / (4 * comm.size))
        weighted = hpcdist.compute_average_loss(
            losses, sample_weight=torch.tensor([0.0, 0, 0, 1]), global_batch_size=12
        )
        assert weighted.item() == 3 / 12
        assert hpcdist.compute_average_loss(losses[:0], global_batch_size=0).item() == 0.0
        with pytest.raises(ValueError, match="loss.*example"):
            hpcdist.compute_average_loss(losses.sum())
        with pytest.raises(ValueError, match="at least 0"):
            hpcdist.compute_average_loss(losses, global_batch_size=-1)


def test_average_loss_outside_the_scope_means_the_strategies_alive(comm, monkeypatch):
    monkeypatch.setattr(owners, "_owners", IdentitySet())  # other tests' strategies are not meant
    all_ranks = hpcdist.MultiWorkerMirroredStrategy()
    assert hpcdist.compute_average_loss(torch.ones(2)).item() == pytest.approx(1 / comm.size)
    hpcdist.compute_average_loss(torch.ones(2, requires_grad=True)).backward()
    undecided = hpcdist.MultiWorkerMirroredStrategy()
    with pytest.raises(ValueError, match="2.*alive.*entered"):
        hpcdist.compute_average_loss(torch.ones(2), global_batch_size=4)
    with undecided.scope():
        hpcdist.compute_average_loss(torch.ones(2))
        assert not undecided.is_summing, "a loss that has reached no backward says nothing"
        hpcdist.compute_average_loss(torch.ones(2, requires_grad=True)).backward()
    assert hpcdist.compute_average_loss(torch.ones(2), global_batch_size=4).item() == 0.5
    assert all_ranks.is_summing
    averaging = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with pytest.raises(ValueError, match="got 3 alive"):
        hpcdist.compute_average_loss(torch.ones(2), global_batch_size=4)
    assert not averaging.is_summing


def test_average_loss_does_not_go_with_a_mean_of_gradients():
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope(), pytest.raises(ValueError, match="gradient_op=ReduceOp.MEAN"):
        hpcdist.compute_average_loss(torch.ones(2))


@pytest.mark.feature(
    "tf.experimental-distribute-dataset",
    "tf.without-drop-remainder",
    "input.distribute-dataset",
    "semantics.dropped-remainders",
)
def test_parts_of_a_distributed_dataset(strategy, comm):
    rows = torch.arange(11)
    dataset = hpcdist.Dataset.from_tensor_slices((rows, rows * 2)).shuffle(seed=3).batch(4)
    whole = [batch[0].tolist() for batch in dataset]
    local_batches = [(x.tolist(), y.tolist()) for x, y in strategy.experimental_distribute_dataset(dataset)]
    for x, y in local_batches:
        assert [2 * row for row in x] == y
    parts = comm.allgather([x for x, _ in local_batches])
    assert [sum(step, []) for step in zip(*parts, strict=True)] == whole


def test_a_drawn_seed_is_the_same_on_all_ranks(strategy, comm):
    dataset = hpcdist.Dataset.from_tensor_slices(torch.arange(100)).shuffle().batch(100)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert len(set(comm.allgather(distributed.state_dict()["seed"]))) == 1
    parts = comm.allgather([part.tolist() for part in distributed])
    assert sorted(sum((part[0] for part in parts), [])) == list(range(100))


@pytest.mark.parametrize("drawn_by", [0, 1])
def test_a_seed_on_one_rank_only_is_an_error_on_all(strategy, comm, drawn_by):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    seed = None if min(comm.rank, 1) == drawn_by else 1
    dataset = hpcdist.Dataset.from_tensor_slices(torch.arange(8)).shuffle(seed=seed).batch(4)
    with pytest.raises(DataError, match="drawn seed"):
        strategy.experimental_distribute_dataset(dataset)


def test_another_dataset_on_one_rank_is_an_error_on_all(strategy, comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    rows = torch.arange(8 if comm.rank == 0 else 16)
    with pytest.raises(DataError, match=r"n_rows=8.*n_rows=16"):
        strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(4))


@pytest.mark.feature("tf.experimental-make-numpy", "strategies.numpy-dataset")
def test_a_numpy_dataset_is_held_once_and_distributed(strategy, comm):
    rows = np.arange(6)
    dataset = strategy.experimental_make_numpy_dataset(rows).batch(4)
    rows += 10  # what is seen below was not copied
    parts = comm.allgather([part.tolist() for part in strategy.experimental_distribute_dataset(dataset)])
    assert [sum(step, []) for step in zip(*parts, strict=True)] == [[10, 11, 12, 13], [14, 15]]


def test_refuses_what_is_no_dataset(strategy):
    with pytest.raises(DataError, match="hpcdist.Dataset.*DataLoader.*list"):
        strategy.experimental_distribute_dataset([1, 2])


def test_ps_tasks_are_for_another_strategy(comm):
    if comm.size == 1:
        pytest.skip("a ps and a worker need two ranks")
    resolver = hpcdist.MPIClusterResolver("ps:1,worker:*")
    with pytest.raises(ValueError, match="worker.*evaluator.*1"):
        hpcdist.MultiWorkerMirroredStrategy(resolver)


@pytest.mark.feature(
    "launch.chief-rules",
    "evaluation.evaluator-role",
    "evaluation.evaluator-apart-from-training",
    "semantics.worker-numbers",
)
def test_an_evaluator_is_a_cluster_of_one(comm):
    if comm.size == 1:
        pytest.skip("an evaluator and a worker need two ranks")
    strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver("evaluator:1,worker:*"))
    assert strategy.num_replicas_in_sync == (1 if comm.rank == 0 else comm.size - 1)
    assert strategy.reduce("sum", 1, axis=None) == strategy.num_replicas_in_sync
    chiefs = comm.allgather(strategy.is_chief)  # as in tf.distribute, the evaluator is its own chief
    assert chiefs == [True, True] + [False] * (comm.size - 2)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_bools_are_counted_by_a_sum_and_kept_by_a_gather(comm, make):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    value = make([True, comm.rank == 0])
    assert strategy.reduce("sum", value, axis=None).tolist() == [comm.size, 1]
    assert strategy.reduce("sum", value, axis=0).item() == comm.size + 1
    assert strategy.reduce("mean", value, axis=None).tolist() == pytest.approx([1.0, 1 / comm.size])
    gathered = strategy.gather(value, axis=0)
    assert gathered.dtype in (torch.bool, np.dtype(bool))
    assert gathered.tolist() == [True, True] + [True, False] * (comm.size - 1)
    assert strategy.reduce("sum", True, axis=None) == comm.size


def test_every_strategy_has_a_resolver():
    resolver = hpcdist.OneDeviceStrategy("cpu").cluster_resolver
    assert (resolver.task_type, resolver.task_id, len(resolver.cluster_spec().job_tasks("worker"))) == ("worker", 0, 1)
    assert hpcdist.get_strategy().cluster_resolver is None
    for kind in (hpcdist.MirroredStrategy, hpcdist.CentralStorageStrategy):
        assert kind().cluster_resolver.task_type == "worker"


def test_readme_s_handler_line_with_one_device(shared_path):
    strategy = hpcdist.OneDeviceStrategy("cpu")
    with strategy.scope():
        torch.manual_seed(1)  # each rank has a model of its own, and a save compares them
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
    manager = hpcdist.CheckpointManager(checkpoint, shared_path / "checkpoints")
    handler = hpcdist.PreemptionCheckpointHandler(strategy.cluster_resolver, manager, save_every_steps=1)
    with handler:
        handler.run(lambda: (model(torch.ones(1, 2)).sum().backward(), optimizer.step()))
    assert handler.latest_path.endswith("step-00000001-0001.h5")
