"""hpcdist beside TensorFlow: the calls that tests/oracle recorded, with as many replicas in this one process."""

import contextlib
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.errors import DataError, UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support" / "oracle"))
from cases import Case, Error, PerReplica, cases

pytest.importorskip("mpi4py.MPI")
#: Where an order of sums is not the same, and for means, which TensorFlow's graphs multiply by the inverse.
TOLERANCE = {"float32": 1e-5, "float64": 1e-6}
#: What hpcdist raises where TensorFlow raises; nothing else will do.
ERRORS = {
    "ValueError": (UsageError, DataError),
    "InvalidArgumentError": (UsageError,),
    "TypeError": (TypeError,),
    "NotImplementedError": (NotImplementedError,),
}


@cache
def strategy_of(n_replicas: int) -> hpcdist.Strategy:
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op="sum")


def ours(value):
    """Return a recorded value as a user of hpcdist would have it: tensors, PerReplica of tensors."""
    if isinstance(value, PerReplica):
        return hpcdist.PerReplica(list(map(ours, value.values)))
    if isinstance(value, dict):
        return {key: ours(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(ours, value))
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    return value


def op_of(text):
    return {"ReduceOp.SUM": hpcdist.ReduceOp.SUM, "ReduceOp.MEAN": hpcdist.ReduceOp.MEAN}.get(text, text)


def check(actual, expected, is_exact):
    if isinstance(expected, PerReplica):
        if isinstance(actual, hpcdist.DistributedValues):
            values = actual.values
        else:
            values = [actual] * len(expected.values)
        for value, expected_value in zip(values, expected.values, strict=True):
            check(value, expected_value, is_exact)
    elif isinstance(expected, dict):
        assert set(actual) == set(expected)
        for key in expected:
            check(actual[key], expected[key], is_exact)
    elif isinstance(expected, (list, tuple)):
        for value, expected_value in zip(actual, expected, strict=True):
            check(value, expected_value, is_exact)
    else:
        if isinstance(actual, torch.Tensor):
            actual = actual.detach()  # what is read of a trainable variable has a gradient
        actual = np.asarray(actual)
        expected = np.asarray(expected)
        assert actual.shape == expected.shape
        actual = actual.astype(expected.dtype)  # a float32 loss with float64 weights is float64 in torch
        if is_exact or expected.dtype.kind not in "fc":
            assert np.array_equal(actual, expected, equal_nan=expected.dtype.kind == "f")
        else:
            tolerance = TOLERANCE[str(expected.dtype)]
            assert np.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def reduce(strategy, reduce_op, value, axis, in_function):
    return strategy.reduce(op_of(reduce_op), ours(value), axis=axis)


def gather(strategy, value, axis, one_device):
    return strategy.gather(ours(value), axis=axis)


def all_reduce(strategy, reduce_op, value, one_device):
    def fn(replica_value):
        return hpcdist.get_replica_context().all_reduce(op_of(reduce_op), replica_value)

    return strategy.run(fn, args=(ours(value),))


def all_gather(strategy, value, axis, one_device):
    return strategy.run(
        lambda replica_value: hpcdist.get_replica_context().all_gather(replica_value, axis=axis), args=(ours(value),)
    )


def split(strategy, rows, batch_size, drop_remainder, repeat_rows, repeat_batches):
    dataset = hpcdist.Dataset.from_tensor_slices(np.arange(rows)).repeat(repeat_rows)
    dataset = dataset.batch(batch_size, drop_remainder=drop_remainder).repeat(repeat_batches)
    batches = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        batches.append([part.tolist() for part in batch.values])
    return batches


def per_replica_batch_size(strategy, global_batch_size):
    return hpcdist.InputContext(1, 0, strategy.num_replicas_in_sync).get_per_replica_batch_size(global_batch_size)


def average_loss(strategy, per_example_loss, sample_weight, global_batch_size, context):
    return strategy.run(
        hpcdist.compute_average_loss, args=(ours(per_example_loss), ours(sample_weight), global_batch_size)
    )


def regularization_loss(strategy, regularization_loss, context):
    return strategy.run(hpcdist.scale_regularization_loss, args=(ours(regularization_loss),))


CALLS = {
    "reduce": reduce,
    "gather": gather,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "split": split,
    "per_replica_batch_size": per_replica_batch_size,
    "average_loss": average_loss,
    "regularization_loss": regularization_loss,
}


def is_meant_otherwise(case: Case) -> bool:
    """Return whether hpcdist means to differ: the reasons, one by one."""
    arguments = case.arguments
    values = []
    for argument in arguments.values():
        if isinstance(argument, PerReplica):
            values += argument.values
    if case.kind == "reduce":  # a list as axis is refused outside tf.function only; the mean of nothing is 0, not NaN
        is_mean_of_nothing = case.error is None and bool(np.isnan(case.expected).any())
        return is_mean_of_nothing or (case.error is not None and "unhashable" in case.error.message)
    if case.kind in ("gather", "all_gather"):  # recorded with what looks at neither axis nor rank
        return arguments["one_device"] and case.n_replicas == 1
    if case.kind == "split":  # TensorFlow has no rows of no dtype either: the array knows them
        return arguments["rows"] == 0
    if case.kind in ("average_loss", "regularization_loss"):
        # the helpers also work in scopes and bare loops; torch gives whole numbers float32; one number is taken for a
        # loss that was summed already, and a global batch may be a float
        is_odd = any(value.dtype.kind != "f" or value.ndim == 0 for value in values)
        is_odd = is_odd or isinstance(arguments.get("global_batch_size"), float)
        return arguments["context"] != "replica" or is_odd
    return False


@pytest.mark.feature(
    "strategies.scope-run-reduce-gather",
    "input.distribute-dataset",
    "semantics.arguments-of-reduce",
    "semantics.gather-rules",
    "semantics.splitting-of-batches",
    "semantics.average-loss",
)
@pytest.mark.parametrize("kind", CALLS)
def test_as_tensorflow(kind):
    compared = [case for case in cases(kind) if not is_meant_otherwise(case)]
    wrong = {case.number: text for case in compared if (text := difference(case))}
    assert wrong == {}
    assert len(compared) >= MINIMUM[kind]


#: So many cases of each kind are compared, of 2,304 that were recorded.
MINIMUM = {
    "reduce": 800,
    "gather": 300,
    "all_reduce": 216,
    "all_gather": 120,
    "split": 400,
    "per_replica_batch_size": 36,
    "average_loss": 100,
    "regularization_loss": 30,
}


def difference(case: Case) -> str:
    """Return how hpcdist's answer differs from TensorFlow's; empty text when it does not."""
    try:
        answer = CALLS[case.kind](strategy_of(case.n_replicas), **case.arguments)
    except Exception as error:
        return error_difference(error, case.error)
    if case.error:
        return f"no error; TensorFlow: {case.error}"
    try:
        check(answer, case.expected, case.exact)
    except AssertionError as error:
        return f"{answer} is not {case.expected} {error}"
    return ""


def error_difference(error, recorded) -> str:
    """Return how an error differs from TensorFlow's; empty text when it is of the class that stands for it."""
    if recorded is None:
        return f"{type(error).__name__}: {error}"
    is_of_dtypes = recorded.type == "TypeError" and "that don't all match" in recorded.message
    if is_of_dtypes:
        expected = (UsageError,)
    else:
        expected = ERRORS[recorded.type]
    if type(error) in expected:
        return ""
    return f"{type(error).__name__}: {error}; TensorFlow: {recorded}"


@pytest.mark.parametrize(
    ("error", "name", "is_fine"),
    [
        (UsageError("x"), "ValueError", True),
        (DataError("x"), "ValueError", True),
        (ValueError("x"), "ValueError", False),
        (RuntimeError("x"), "InvalidArgumentError", False),
        (UsageError("x"), "TypeError", False),
        (TypeError("x"), "TypeError", True),
    ],
)
def test_errors_of_other_classes_are_found(error, name, is_fine):
    assert (error_difference(error, Error(name, "")) == "") == is_fine
    assert error_difference(error, None)


# -- variables ---------------------------------------------------------------------------------------------------------


def make_variable(case: Case) -> hpcdist.Variable:
    options = dict(case.arguments)
    del options["actions"]
    with strategy_of(case.n_replicas).scope():
        return hpcdist.Variable(**options)


def act(variable, action, value):
    if action["method"] == "read_value":
        return variable.read_value()
    if action["indices"] is None:
        argument = value
    else:
        argument = (action["indices"], value)
    getattr(variable, action["method"])(argument)
    return None


def outcome(variable, action):
    """Return what an action on a variable returns, in the context that it was recorded in."""
    strategy = variable.strategy
    value = ours(action["value"])
    if action["context"] == "replica":
        return strategy.run(lambda replica_value: act(variable, action, replica_value), args=(value,))
    with strategy.scope() if action["context"] == "cross" else contextlib.nullcontext():
        return act(variable, action, value)


def is_variable_meant_otherwise(variable, action) -> bool:
    """Return whether hpcdist means to differ: the reasons, one by one. What follows starts from other copies then."""
    is_writing = action["method"] != "read_value"
    is_in_replica = action["context"] == "replica"
    is_on_read = variable.synchronization is hpcdist.VariableSynchronization.ON_READ
    if not is_writing:
        return False
    if variable.aggregation.value == "NONE":
        # replicas may not let the copies of a mirrored variable drift apart; a copy per replica may be set from outside
        return is_in_replica != is_on_read
    if variable.aggregation.value == "SUM" and is_on_read and action["method"] == "assign":
        # whole numbers are divided so that their total is kept, where TensorFlow drops the rest
        return not is_in_replica and not variable.dtype.is_floating_point
    # a number is the value of every replica that gives it, where TensorFlow takes it for a constant
    is_number = isinstance(action["value"], (int, float))
    return variable.aggregation.value == "SUM" and is_in_replica and not is_on_read and is_number


def variable_difference(variable, action, expected, is_exact) -> str:
    try:
        answer = outcome(variable, action)
    except Exception as error:
        if text := error_difference(error, expected["error"]):
            return text
    else:
        if expected["error"]:
            return f"no error; TensorFlow: {expected['error']}"
        if action["method"] == "read_value":
            check(answer, expected["result"], is_exact)
    check(hpcdist.PerReplica(variable.local_copies), PerReplica(tuple(expected["copies"])), is_exact)
    return ""


@pytest.mark.feature("semantics.mirrored-variables", "semantics.variables-per-replica")
def test_variables_as_tensorflow():
    n_compared = n_made = 0
    for case in cases("variable"):
        is_on_read = case.arguments["synchronization"] == "ON_READ"
        if case.error or (is_on_read and case.arguments["trainable"]):  # which tf.Variable's documentation excludes
            with pytest.raises(UsageError):
                make_variable(case)
            continue
        variable = make_variable(case)
        n_made += 1
        for number, (action, expected) in enumerate(zip(case.arguments["actions"], case.expected, strict=True)):
            if is_variable_meant_otherwise(variable, action):
                break
            try:
                text = variable_difference(variable, action, expected, case.exact)
            except AssertionError as error:
                text = f"{error} {expected}"
            assert not text, f"case {case.number}, action {number}, {action}: {text}"
            n_compared += 1
    assert n_made >= 190
    assert n_compared >= 600
