"""Variables of a strategy: what is written and read inside and outside run, on one replica per rank and on several."""

import re
from collections import namedtuple

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import CheckpointError, DesyncError

pytestmark = pytest.mark.mpi

AGGREGATIONS = ["SUM", "MEAN", "ONLY_FIRST_REPLICA"]
Slices = namedtuple("Slices", ["indices", "values"])


@pytest.fixture(params=[None, 4, 5])
def strategy(request):
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=request.param)


def own_number():
    """Return 1, 2, 4, 8, ... on replicas 0, 1, 2, 3, ...: sums tell who took part."""
    return float(2 ** hpcdist.get_replica_context().replica_id_in_sync_group)


def aggregate(strategy, aggregation):
    """Return what `own_number` of all replicas aggregates to."""
    n = strategy.num_replicas_in_sync
    return {"SUM": 2.0**n - 1, "MEAN": (2.0**n - 1) / n, "ONLY_FIRST_REPLICA": 1.0}[aggregation]


def make(strategy, value=0.0, **options):
    with strategy.scope():
        return hpcdist.Variable(value, **options)


def results(strategy, function):
    """Return what each local replica returns, as a list of numbers."""
    return list(map(float, strategy.experimental_local_results(strategy.run(function))))


def same_everywhere(comm, value):
    rank_bytes = comm.allgather(np.asarray(value).tobytes())
    return len(set(rank_bytes)) == 1


# -- ON_WRITE ---------------------------------------------------------------------------------------------------------


@pytest.mark.feature("training.broadcast-of-initial-state")
def test_all_begin_with_replica_0s_value(strategy, comm):
    variable = make(strategy, np.array([comm.rank, -0.0, np.nan]))
    assert variable.dtype is torch.float64
    assert same_everywhere(comm, variable.numpy())
    assert variable.numpy().tobytes() == np.array([0, -0.0, np.nan]).tobytes()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_of_no_elements(strategy, shared_path, aggregation):
    for synchronization in ("ON_WRITE", "ON_READ"):
        variable = make(strategy, np.zeros((0, 2)), synchronization=synchronization, aggregation=aggregation)
        strategy.run(lambda variable=variable: variable.assign_add(np.ones((0, 2))))
        assert variable.numpy().shape == (0, 2)
        manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(variable=variable), shared_path / synchronization)
        manager.save(1)
        assert manager.restore_or_initialize()


@pytest.mark.feature(
    "tf.synchronization-auto-none",
    "tf.assigned-replicas-aggregation",
    "tf.only-first-replica",
    "tf.replica-reads-own",
    "semantics.mirrored-variables",
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_replicas_assign_is_aggregated(strategy, aggregation):
    variable = make(strategy, 3.0, aggregation=aggregation)
    expected = aggregate(strategy, aggregation)
    strategy.run(lambda: variable.assign(own_number()))
    assert float(variable) == pytest.approx(expected)
    strategy.run(lambda: variable.assign_add(own_number()))
    assert float(variable) == pytest.approx(2 * expected)
    strategy.run(lambda: variable.assign_sub(own_number()))
    assert results(strategy, variable.read_value) == pytest.approx([expected] * len(variable.local_copies))


@pytest.mark.feature("tf.assigned-replica-without", "semantics.assign-without-aggregation")
def test_without_aggregation_replicas_may_not_assign(strategy):
    variable = make(strategy)
    for write in (variable.assign, variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="aggregation=VariableAggregation.MEAN"):
            strategy.run(lambda write=write: write(1.0))
    assert float(variable) == 0.0


def test_a_mean_of_whole_numbers_is_refused(strategy):
    with pytest.raises(ValueError, match="torch.int64"):
        make(strategy, 3, aggregation="MEAN")
    assert int(hpcdist.Variable(3, aggregation="MEAN")) == 3


def test_outside_run_all_copies_are_set(strategy, comm):
    variable = make(strategy, [1.0, 2.0])
    assert variable.assign([3, 4]) is variable
    variable.assign_add(torch.ones(2)).assign_sub(np.full(2, 0.5, np.float32))
    assert variable.numpy().tolist() == [3.5, 4.5]
    with strategy.scope():
        variable.assign(variable.value() * 2)
    assert strategy.experimental_local_results(strategy.run(variable.numpy))[0].tolist() == [7.0, 9.0]


def test_what_is_read_does_not_change_later(strategy):
    variable = make(strategy, [1.0])
    before = variable.read_value()
    variable.assign([2.0])
    assert before.tolist() == [1.0]


def test_replicas_that_assign_different_variables_are_found(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=2 * comm.size)
    first_variable, second_variable = (make(strategy, 0.0, aggregation="SUM", name=name) for name in ("one", "other"))
    with pytest.raises(DesyncError, match="'other'"):
        strategy.run(
            lambda: (first_variable if hpcdist.get_replica_context().local_index == 0 else second_variable).assign(1.0)
        )


@pytest.mark.parametrize(("value", "text"), [([1.0], r"shape \(\) and dtype"), ("text", "got str"), (1j, "complex")])
def test_refuses_what_does_not_fit(strategy, value, text):
    variable = make(strategy)
    with pytest.raises(ValueError, match=text):
        variable.assign(value)
    with pytest.raises(ValueError, match="float.*reshape"):
        make(strategy, 1).assign(0.5)
    with pytest.raises(ValueError, match="replicas.*outside"):
        variable.assign(hpcdist.PerReplica([1.0]))


@pytest.mark.feature("tf.auto-write", "semantics.variable-options")
def test_what_it_is_made_of(strategy):
    assert make(strategy, lambda: 2, dtype=np.float16).dtype is torch.float16
    variable = make(strategy, [[1, 2]], name="steps", dtype="int32")
    assert (variable.shape, variable.dtype, variable.trainable) == ((1, 2), torch.int32, True)
    assert "'steps', shape=(1, 2), dtype=torch.int32, ON_WRITE, NONE" in repr(variable)
    assert int(make(strategy, make(strategy, 7))) == 7
    assert np.asarray(variable).tolist() == [[1, 2]]
    assert not make(strategy, synchronization=hpcdist.VariableSynchronization.ON_READ).trainable


# -- expressions -------------------------------------------------------------------------------------------------------

VALUES = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
EXPRESSIONS = {
    "+": (lambda v, x: v + x, lambda v, x: x + v),
    "-": (lambda v, x: v - x, lambda v, x: x - v),
    "*": (lambda v, x: v * x, lambda v, x: x * v),
    "/": (lambda v, x: v / x, lambda v, x: x / v),
    "//": (lambda v, x: v // x, lambda v, x: x // v),
    "%": (lambda v, x: v % x, lambda v, x: x % v),
    "**": (lambda v, x: v**x, lambda v, x: x**v),
    "<": (lambda v, x: v < x, lambda v, x: x < v),
    "<=": (lambda v, x: v <= x, lambda v, x: x <= v),
    ">": (lambda v, x: v > x, lambda v, x: x > v),
    ">=": (lambda v, x: v >= x, lambda v, x: x >= v),
    "==": (lambda v, x: v == x, lambda v, x: x == v),
    "!=": (lambda v, x: v != x, lambda v, x: x != v),
}


def alike(actual, expected):
    is_kind = type(actual) is torch.Tensor and actual.dtype is expected.dtype
    return is_kind and torch.equal(actual.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.feature("tf.operators-torch-s")
@pytest.mark.parametrize("sign", EXPRESSIONS)
def test_it_stands_for_its_value_in_expressions(strategy, sign):
    variable = make(strategy, VALUES)
    for expression in EXPRESSIONS[sign]:
        for operand in (3, 1.5, VALUES.T):
            assert alike(expression(variable, operand), torch.as_tensor(expression(VALUES, operand)))
        assert alike(expression(variable, make(strategy, VALUES.T)), expression(VALUES, VALUES.T))
        array = VALUES.T.numpy().copy()
        assert alike(torch.as_tensor(expression(variable, array)), expression(VALUES, VALUES.T))


@pytest.mark.feature("tf.operators-torch-s")
def test_other_operators(strategy):
    variable = make(strategy, VALUES)
    count = make(strategy, 6)
    assert alike(variable @ VALUES, VALUES @ VALUES)
    assert alike(VALUES @ variable, VALUES @ VALUES)
    assert alike(-variable, -VALUES)
    assert alike(abs(variable), VALUES.abs())
    assert list(map(int, (count & 3, 3 & count, count | 9, 9 | count, count ^ 5, 5 ^ count, ~count))) == [
        *(2, 2, 15, 15, 3, 3),
        -7,
    ]
    assert alike(variable[0], VALUES[0])
    assert alike(variable[:, 1], VALUES[:, 1])
    assert all(alike(row, expected_row) for row, expected_row in zip(variable, VALUES, strict=True))
    assert list(range(count)) == list(range(6))
    assert (bool(count), complex(count)) == (True, 6 + 0j)
    assert variable in {variable: 1}
    assert (variable == None) is False  # noqa: E711


@pytest.mark.feature("tf.operators-torch-s")
def test_torch_and_numpy_take_it(strategy):
    variable = make(strategy, VALUES)
    assert alike(torch.exp(variable), VALUES.exp())
    assert alike(torch.stack([variable, VALUES]), torch.stack([VALUES, VALUES]))
    assert alike(torch.nn.functional.linear(VALUES, weight=variable), VALUES @ VALUES.T)
    assert alike(torch.as_tensor(variable), VALUES)
    assert np.array_equal(np.square(variable), VALUES.square().numpy())
    assert np.from_dlpack(variable).tolist() == VALUES.tolist()
    torch.as_tensor(variable).zero_()
    (variable + 0).zero_()
    assert variable.numpy().tolist() == VALUES.tolist()


@pytest.mark.feature("tf.operators-torch-s")
def test_an_expression_reads_what_the_caller_sees(strategy):
    variable = make(strategy, 0.0, synchronization="ON_READ", aggregation="SUM", dtype="float64")
    strategy.run(lambda: variable.assign(own_number()))
    assert results(strategy, lambda: variable * 2) == [2 * number for number in results(strategy, own_number)]
    assert float(variable * 2) == 2 * aggregate(strategy, "SUM")


@pytest.mark.feature("tf.operators-torch-s")
@pytest.mark.parametrize("sign", ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "@=", "&=", "|=", "^="])
def test_in_place_it_is_refused(strategy, sign):
    names = {"variable": make(strategy, VALUES)}
    with pytest.raises(
        ValueError, match=r"expected variable.assign.*value\) for 'Variable', got variable " + re.escape(sign)
    ):
        exec(f"variable {sign} 2", names)
    assert isinstance(names["variable"], hpcdist.Variable)


# -- ON_READ ----------------------------------------------------------------------------------------------------------


@pytest.mark.feature(
    "tf.synchronization-auto-none", "tf.replica-reads-own", "tf.read-what-replicas", "semantics.variables-per-replica"
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_each_replica_writes_its_own_copy_and_reading_aggregates(strategy, comm, aggregation):
    variable = make(strategy, 1.0, synchronization="ON_READ", aggregation=aggregation, dtype="float64")
    strategy.run(lambda: variable.assign(own_number()))
    local_numbers = results(strategy, own_number)
    assert results(strategy, variable.read_value) == local_numbers
    strategy.run(lambda: variable.assign_add(own_number()).assign_sub(0.0))
    assert results(strategy, variable.read_value) == [2 * number for number in local_numbers]
    assert float(variable) == pytest.approx(2 * aggregate(strategy, aggregation))
    with strategy.scope():
        assert float(variable) == pytest.approx(2 * aggregate(strategy, aggregation))
    assert same_everywhere(comm, variable.numpy())


def test_reduce_takes_a_variable(strategy):
    variable = make(strategy, 1.0, synchronization="ON_READ")
    strategy.run(lambda: variable.assign(own_number()))
    assert float(strategy.reduce("sum", variable, axis=None)) == aggregate(strategy, "SUM")
    assert strategy.experimental_local_results(variable) == variable.local_copies


def test_without_aggregation_it_is_read_inside_run_only(strategy):
    variable = make(strategy, synchronization="ON_READ")
    strategy.run(lambda: variable.assign(own_number()))
    with pytest.raises(ValueError, match="strategy.run"):
        variable.read_value()


@pytest.mark.feature("tf.read-sum-cross", "tf.read-sum-cross-replica", "semantics.variables-per-replica")
def test_a_total_is_divided_among_the_copies(strategy):
    n = strategy.num_replicas_in_sync
    variable = make(strategy, 0.0, synchronization="ON_READ", aggregation="SUM", dtype="float64")
    variable.assign(6.0)
    assert results(strategy, variable.read_value) == [6.0 / n] * len(variable.local_copies)
    assert float(variable) == pytest.approx(6.0)
    count = make(strategy, 0, synchronization="ON_READ", aggregation="SUM")
    count.assign(7)
    assert int(count) == 7
    assert {7 // n, -(-7 // n)} >= set(map(int, count.local_copies))
    if not strategy.replicas.is_fixed:  # a loop without run is the code of the rank's replica
        variable.assign_add(2.0).assign_sub(1.0)
        assert results(strategy, variable.read_value) == [6.0 / n + 1]
        assert float(variable) == pytest.approx(6.0 + n)
        return
    for write in (variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="strategy.run"):
            write(1.0)


@pytest.mark.parametrize("aggregation", ["MEAN", "ONLY_FIRST_REPLICA"])
def test_other_copies_are_written_alike_outside_run(strategy, aggregation):
    variable = make(strategy, 0.0, synchronization="ON_READ", aggregation=aggregation)
    variable.assign(6.0).assign_add(1.0).assign_sub(2.0)
    assert results(strategy, variable.read_value) == [5.0] * len(variable.local_copies)
    assert float(variable) == 5.0


@pytest.mark.feature("tf.synchronization-auto-none", "tf.read-trainable-true", "semantics.variable-options")
def test_it_is_not_trainable(strategy):
    with pytest.raises(ValueError, match="trainable=False.*synchronization=ON_READ"):
        make(strategy, synchronization="ON_READ", trainable=True)
    with pytest.raises(ValueError, match="AUTO.*ON_WRITE.*ON_READ.*NONE"):
        make(strategy, synchronization="NONE")
    with pytest.raises(ValueError, match="VariableAggregation.*NONE.*SUM.*MEAN.*ONLY_FIRST_REPLICA.*'MAX'"):
        make(strategy, aggregation="MAX")


def test_sums_have_the_same_bits_on_any_number_of_ranks():
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=5)
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    variable = make(strategy, torch.zeros(3), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: variable.assign(values[hpcdist.get_replica_context().replica_id_in_sync_group]))
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + values[4]
    assert torch.equal(variable.read_value(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16, torch.bool])
@pytest.mark.parametrize("aggregation", ["SUM", "ONLY_FIRST_REPLICA"])
def test_the_dtype_is_kept(strategy, dtype, aggregation):
    variable = make(strategy, torch.ones(2, dtype=dtype), aggregation=aggregation)
    strategy.run(lambda: variable.assign(torch.ones(2, dtype=dtype)))
    assert variable.dtype is dtype
    if aggregation == "SUM" and dtype is not torch.bool:
        n = strategy.num_replicas_in_sync
    else:
        n = 1
    assert variable.read_value().tolist() == [n, n]


# -- scatter ----------------------------------------------------------------------------------------------------------


def test_scatter_outside_run(strategy):
    variable = make(strategy, [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    rows = [[1.0, 2.0], [3.0, 4.0]]
    assert variable.scatter_add(Slices([2, 2], rows)) is variable
    assert variable.numpy().tolist() == [[1, 1], [2, 2], [7, 9]]
    variable.scatter_sub(([0, 2], rows))
    assert variable.numpy().tolist() == [[0, -1], [2, 2], [4, 5]]
    variable.scatter_update((np.array([1]), np.array([[8.0, 9.0]])))
    assert variable.numpy().tolist() == [[0, -1], [8, 9], [4, 5]]
    with pytest.raises(ValueError, match="index"):
        variable.scatter_add(([0], [1.0]))
    with pytest.raises(ValueError, match="indices.*values.*int"):
        variable.scatter_add(3)


@pytest.mark.parametrize(("aggregation", "first"), [("SUM", None), ("MEAN", None), ("ONLY_FIRST_REPLICA", [0, 6, 0])])
def test_scatter_of_replicas(strategy, aggregation, first):
    """Replica r adds r + 1 rows; only some replicas reach the last element."""
    n = strategy.num_replicas_in_sync
    variable = make(strategy, [0.0, 5.0, 0.0], aggregation=aggregation)

    def step():
        number = hpcdist.get_replica_context().replica_id_in_sync_group
        variable.scatter_add(([1] + [2] * number, torch.ones(number + 1)))

    strategy.run(step)
    scale = n if aggregation == "MEAN" else 1
    assert variable.numpy().tolist() == pytest.approx(first or [0, 5 + n / scale, sum(range(n)) / scale])


@pytest.mark.feature("tf.scatter-update-none", "semantics.mirrored-variables")
def test_scatter_update_of_the_first_replica(strategy):
    variable = make(strategy, [1.0, 2.0, 3.0], aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: variable.scatter_update(([int(own_number()) % 3], [own_number()])))
    assert variable.numpy().tolist() == [1.0, 1.0, 3.0]


@pytest.mark.feature("tf.scatter-update-none", "semantics.mirrored-variables")
@pytest.mark.parametrize("options", [{"aggregation": "SUM"}, {"aggregation": "MEAN"}, {"synchronization": "ON_READ"}])
def test_scatter_update_is_for_some_only(strategy, options):
    variable = make(strategy, [1.0, 2.0], **options)
    with pytest.raises(NotImplementedError, match="NONE.*ONLY_FIRST_REPLICA.*scatter_update"):
        variable.scatter_update(([0], [1.0]))
    if "synchronization" in options:
        with pytest.raises(NotImplementedError, match="an ON_WRITE variable"):
            variable.scatter_add(([0], [1.0]))


# -- where it belongs -------------------------------------------------------------------------------------------------


@pytest.mark.feature("tf.variable-another-strategy", "tf.variables-models-remember", "semantics.wrong-context")
def test_strategies_are_not_mixed(strategy):
    variable = make(strategy, aggregation="SUM")
    second_strategy = hpcdist.MultiWorkerMirroredStrategy()
    with second_strategy.scope(), pytest.raises(RuntimeError, match="mixing"):
        variable.read_value()
    with pytest.raises(RuntimeError, match="mixing"):
        second_strategy.run(lambda: variable.assign(1.0))


def test_it_is_made_before_run(strategy):
    with pytest.raises(RuntimeError, match="strategy.scope"):
        strategy.run(lambda: hpcdist.Variable(1.0))


@pytest.mark.feature("tf.synchronization-auto-none", "semantics.variable-options")
def test_outside_all_strategies_it_is_plain(strategy, comm):
    variable = hpcdist.Variable(float(comm.rank), synchronization="ON_READ", aggregation="SUM")
    assert float(variable.assign_add(2.0)) == comm.rank + 2
    strategy.run(lambda: variable.assign(3.0).assign_add(1.0))
    assert float(variable) == 4.0
    assert hpcdist.Variable(1.0, synchronization="NONE").local_copies == (1.0,)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save(strategy, folder, **options):
    """Save a variable to which every replica has added its number."""
    variable = make(strategy, 0.5, synchronization="ON_READ", dtype="float64", **options)
    strategy.run(lambda: variable.assign_add(own_number() / 3))
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(variable=variable, strategy=strategy), folder)
    manager.save(1)
    return variable


def restore(strategy, folder, **options):
    variable = make(strategy, 9.0, synchronization="ON_READ", dtype="float64", **options)
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(variable=variable, strategy=strategy), folder)
    assert manager.restore_or_initialize()
    return variable


@pytest.mark.feature(
    "tf.read-sum-save",
    "tf.save-called-all",
    "checkpoints.chief-writes-hdf5",
    "semantics.variables-per-replica",
    "semantics.save-on-all-ranks",
)
@pytest.mark.parametrize("aggregation", ["NONE", *AGGREGATIONS])
def test_every_replica_gets_its_copy_back(strategy, shared_path, aggregation):
    saved = save(strategy, shared_path, aggregation=aggregation)
    assert restore(strategy, shared_path, aggregation=aggregation).local_copies == saved.local_copies


@pytest.mark.feature("tf.read-sum-save", "checkpoints.snapshot-of-replicas")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_other_replicas_get_what_it_was_read_as(shared_path, aggregation):
    saved = save(hpcdist.MultiWorkerMirroredStrategy(num_replicas=4), shared_path, aggregation=aggregation)
    restored = restore(hpcdist.MultiWorkerMirroredStrategy(num_replicas=6), shared_path, aggregation=aggregation)
    assert len(restored.local_copies) != len(saved.local_copies) or restored.local_copies != saved.local_copies
    assert float(restored) == pytest.approx(float(saved), rel=1e-15)


def test_other_replicas_cannot_take_copies_without_aggregation(shared_path):
    save(hpcdist.MultiWorkerMirroredStrategy(num_replicas=4), shared_path)
    with pytest.raises(CheckpointError, match="6.*num_replicas=4"):
        restore(hpcdist.MultiWorkerMirroredStrategy(num_replicas=6), shared_path)


def test_a_mirrored_variable_comes_back(strategy, shared_path):
    variable = make(strategy, [1.5, 2.5])
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(variable=variable), shared_path)
    manager.save(1)
    variable.assign([0.0, 0.0])
    manager.restore_or_initialize()
    assert variable.numpy().tolist() == [1.5, 2.5]
    assert results(strategy, lambda: variable.read_value()[1]) == [2.5] * len(variable.local_copies)


@pytest.mark.feature("strategies.extended")
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_extended_knows_variables(strategy, synchronization):
    """As in TensorFlow's own optimizers: update hands over the variable, which writes the copy that is meant."""
    variable = make(strategy, 1.0, synchronization=synchronization, aggregation="MEAN")
    extended = strategy.extended
    n_local = len(variable.local_copies)
    by = hpcdist.PerReplica([2.0] * n_local)
    read = extended.update(variable, lambda v, x: v.assign_add(x).read_value() * 10, args=(by,), group=False)
    assert list(map(float, read)) == [30.0] * n_local
    assert results(strategy, variable.read_value) == [3.0] * n_local
    assert float(variable) == 3.0
    assert extended.variable_created_in_scope(variable)
    assert not extended.variable_created_in_scope(hpcdist.Variable(1.0))
    with extended.colocate_vars_with(variable):
        assert torch.ones(1).device.type == "cpu"
    total = extended.reduce_to("sum", strategy.run(lambda: torch.ones(2)), destinations=variable)
    assert total.tolist() == [strategy.num_replicas_in_sync] * 2
